"""The spans of training: a step's tree with rewards, on one process and on two, evaluations, steps
that break off.
"""

from pathlib import Path

import pytest

from agentic_prompting import PromptR1Config
from agentic_prompting.llm import ScriptedChat, ServerFailed, spans
from agentic_prompting.rollout import BatchEngine
from support import traced_step
from support.asking import Asks
from support.forked import forked
from support.traces import Collector, traced
from support.training import LEAD, Acts, trainer_for

pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")


def children(spans, parent):
    return [span for span in spans if span.parent_span_id == parent.span_id]


def attributes(span):
    values = {attribute.key: attribute.value for attribute in span.attributes}
    return {name: getattr(value, value.WhichOneof("value")) for name, value in values.items()}


def test_a_step_of_two_processes_in_a_collector(tiny_policy, tmp_path):
    """A real one, which gets OTLP over HTTP: the demo's world, its large LLM over HTTP. One trace
    of both processes.
    """
    log = tmp_path / "printed.log"
    with Collector() as collector:
        arguments = [str(tiny_policy), str(tmp_path), collector.address]
        codes = forked(Path(traced_step.__file__), arguments, 2, log, 280)
    assert codes == [0, 0], log.read_text()[-3000:]
    spans = sorted(collector.spans, key=lambda span: span.start_time_unix_nano)
    (first,) = [span for span in spans if not span.parent_span_id]
    assert {span.trace_id for span in spans} == {first.trace_id}
    (second,) = [span for span in children(spans, first) if span.name == "training_step"]
    assert attributes(second)["agentic_prompting.process"] == 1
    for step in (first, second):
        about = attributes(step)
        assert about["agentic_prompting.rollouts"] == 4 and about["agentic_prompting.reward"] == 0.5
        episodes = [span for span in children(spans, step) if span is not second]
        assert [span.name for span in episodes] == ["invoke_agent agent"] * 2
        for episode in episodes:
            inside = children(spans, episode)
            assert [span.name for span in inside] == [
                "chat agent",
                "execute_tool LLMEnvironment",
                "chat agent",
                "reward",
            ]
            assert [span.name for span in children(spans, inside[1])] == ["chat sandbox-oracle"]
            for span in (episode, *inside):
                assert step.start_time_unix_nano <= span.start_time_unix_nano
                assert span.end_time_unix_nano <= step.end_time_unix_nano
    rewards = [
        attributes(span)["gen_ai.evaluation.score.value"] for span in spans if span.name == "reward"
    ]
    assert sorted(rewards) == [0, 0, 1, 1]
    assert b"which country" not in b"".join(span.SerializeToString() for span in spans)


def acting(policy, folder, rows, **changes):
    trainer = trainer_for(policy, folder, rows, traces=True, **changes)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    return trainer


def test_evaluations_and_failed_rollouts(tiny_policy, tmp_path, rows):
    chat = ScriptedChat([ServerFailed("planted")])
    with traced() as found:
        trainer = acting(tiny_policy, tmp_path, rows, chat=chat, max_steps=1, max_failed_share=1.0)
        trainer.evaluate(rows.select(range(2)))
    (evaluation,) = found.named("evaluation")
    assert evaluation.attributes["agentic_prompting.failed"] == 4
    assert "agentic_prompting.reward" not in evaluation.attributes
    assert [name for name, _ in found.below(evaluation)] == ["invoke_agent agent"] * 4
    assert {span.attributes.get("error.type") for span in found.named("invoke_agent agent")} == {
        "ServerFailed"
    }
    assert not any(
        "gen_ai.evaluation.score.value" in one.attributes for one in found.named("reward")
    )
    assert "planted" not in found.text


def test_a_step_that_breaks_off_has_ended(tiny_policy, tmp_path, rows):
    with traced() as found:
        trainer = acting(tiny_policy, tmp_path, rows)
        trainer.policy = BatchEngine(lambda requests: 1 / 0, on_callers_thread=True)
        with pytest.raises(ZeroDivisionError):
            trainer.train()
        assert not spans._traces.trace_api.get_current_span().get_span_context().is_valid
    (step,) = found.named("training_step")
    assert step.attributes["error.type"] == "ZeroDivisionError"
    assert found.below(None)[0][0] == "training_step"


def test_groups_that_are_played_ahead_are_below_the_step_in_which_they_began(
    tiny_policy, tmp_path, rows
):
    with traced() as found:
        trainer_for(tiny_policy, tmp_path, rows, traces=True, **LEAD).train()
    steps = found.named("training_step")
    ids = {one.context.span_id: number for number, one in enumerate(steps)}
    began = [ids[span.parent.span_id] for span in found.named("invoke_agent agent")]
    assert len(steps) == 2 and began.count(0) >= 8
    rewarded = {one.parent.span_id for one in found.named("reward")}
    episodes = {one.context.span_id for one in found.named("invoke_agent agent")}
    assert len(found.named("reward")) == 8 and rewarded <= episodes


def test_the_log_of_groups_in_flight_is_no_tool(tiny_policy, tmp_path, rows):
    """It stands between an episode and its environment, whose call is the only one."""
    with traced() as found:
        trainer = trainer_for(tiny_policy, tmp_path, rows, traces=True, **LEAD)
        trainer.policy = BatchEngine(Asks(trainer), on_callers_thread=True)
        trainer.train()
    tools = [span.name for span in found.all if span.name.startswith("execute_tool")]
    assert tools == ["execute_tool LLMEnvironment"] * 8


def test_without_traces_the_trainer_makes_none(tiny_policy, tmp_path, rows):
    with traced() as found:
        pass
    trainer = trainer_for(tiny_policy, tmp_path, rows)
    assert not found.all
    assert not any(
        "Span" in type(callback).__name__ for callback in trainer.callback_handler.callbacks
    )


def test_contents_without_traces_are_refused():
    with pytest.raises(ValueError, match="trace_content.*traces=True"):
        PromptR1Config("x", trace_content=True, use_cpu=True, bf16=False)
