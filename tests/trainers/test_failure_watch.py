"""Failed rollouts that end a run, or do not."""

import pytest

from agentic_prompting.llm import Misconfigured, ServerFailed
from agentic_prompting.programs import ProgramFailed
from agentic_prompting.rollout import Limits, Observation, Rollout, RolloutFacts
from agentic_prompting.trainers.batch_monitor import FailureWatch

ANSWERED = RolloutFacts.of(Rollout([1]).finish("answered"))
FAILED = RolloutFacts.of(Rollout([1]).fail(Observation(error=ServerFailed("down"))))
FATAL = RolloutFacts.of(Rollout([1]).fail(Observation(error=Misconfigured("no key"))))


def test_only_a_full_window_of_failures_stops():
    watch = FailureWatch(window=2, max_share=0.5)
    assert not watch.check_batch([FAILED, FAILED])
    reason = watch.check_batch([FAILED, ANSWERED])
    assert "75%" in reason and "ServerFailed" in reason


def test_a_recovered_environment_does_not_stop():
    watch = FailureWatch(window=2, max_share=0.1)
    watch.check_batch([FAILED, FAILED])
    assert not watch.check_batch([ANSWERED, ANSWERED])


def test_a_fatal_error_stops_at_once():
    reason = FailureWatch(window=5, max_share=1.0).check_batch([ANSWERED, FATAL, FAILED])
    assert "Misconfigured" in reason and "no key" in reason


def test_a_program_that_raises_is_told_of_mistakes(caplog):
    raised = RolloutFacts.of(Rollout([1]).fail(Observation(error=ProgramFailed("raised"))))
    reason = FailureWatch(window=1, max_share=0.1).check_batch([raised])
    assert "mistakes=" in reason and "mistakes=" in caplog.text
    caplog.clear()
    reason = FailureWatch(window=1, max_share=0.1).check_batch([FAILED])
    assert "mistakes=" not in reason and "mistakes=" not in caplog.text


@pytest.mark.parametrize(
    ("batches", "has_reason"),
    [
        ([[FAILED, FAILED]], True),
        ([[FAILED, ANSWERED], [FAILED, FAILED]], False),
        ([[FAILED, FAILED], [ANSWERED, ANSWERED]], False),
        ([], False),
    ],
)
def test_a_run_without_a_success_has_failed(batches, has_reason):
    watch = FailureWatch(window=9, max_share=1.0)
    for batch in batches:
        assert not watch.check_batch(batch)
    assert bool(watch.failure_reason()) == has_reason


def test_the_first_failure_is_logged_once(caplog):
    watch = FailureWatch(window=9, max_share=0.5)
    watch.check_batch([FAILED], hint="; see FILE")
    watch.check_batch([FAILED], hint="; see FILE")
    (line,) = caplog.messages
    assert "1 of 1 rollouts" in line and "50%" in line and line.endswith("; see FILE")


@pytest.mark.parametrize("has_environment", [False, True])
def test_cut_off_completions_have_a_form_only_with_an_environment(caplog, has_environment):
    truncated = RolloutFacts.of(Rollout([1]).finish("truncated"))
    watch = FailureWatch(window=9, max_share=0.5)
    limits = Limits(max_turn_tokens=24, max_tokens=24)
    assert watch.warn_about_format([truncated] * 4, limits, has_environment)
    assert "max_completion_length" in caplog.text
    assert ("grammar" in caplog.text) == has_environment


def test_a_program_without_answers_is_not_told_of_a_grammar(caplog):
    rollout = Rollout([1])
    rollout.counts = {"program/calls": 1}
    facts = [RolloutFacts.of(rollout.finish("malformed"))] * 4
    watch = FailureWatch(window=9, max_share=0.5, prompt_description="'{question}'")
    assert watch.warn_about_format(facts, Limits(), has_environment=True)
    assert "program" in caplog.text and "None" in caplog.text
    assert "grammar" not in caplog.text and "{question}" not in caplog.text
