"""E-SPL's slots and its reflectors, each without a trainer."""

import asyncio
import time
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest

from agentic_prompting.evolution import (
    Attempt,
    ESPLSettings,
    Population,
    PopulationEvolution,
    ProblemResult,
    PromptResult,
    ReflectionTask,
    SystemPrompt,
)
from agentic_prompting.llm import Reply, ScriptedChat
from agentic_prompting.rollout import AgentSpec
from agentic_prompting.trainers.policies import CollectivePolicy
from agentic_prompting.trainers.population_prompts import PopulationPrompts
from agentic_prompting.trainers.reflectors import PolicyReflector, ReferenceReflector
from support.espl_training import arguments as espl_arguments

ROW = {"question": "which city ?", "answers": ["Nairobi"]}
EDIT = '[{"op": "add", "text": "Look twice."}]'


def parts(members=1, root="Answer .", **changes):
    population = Population(
        SystemPrompt(root, ()), rule=lambda window, k, rng: list(range(len(window)))[-k:]
    )
    for number in range(1, members):
        population.add(SystemPrompt(root, (f"Rule {number} .",), parents=(0,), operator="mutation"))
    settings = espl_arguments(
        "unused", **{"num_generations": 3, "per_device_train_batch_size": 6, **changes}
    )
    return PopulationPrompts(PopulationEvolution(population), settings, AgentSpec().messages)


def test_each_slot_has_its_own_prompt():
    prompts = parts(members=4)
    prompts.start_batch(0)
    assert prompts.rollouts_per_row == 6
    assert [prompt.id for prompt in prompts.batch_prompts] == [
        2,
        3,
    ]
    names = [prompts.choose_metadata(index, training=True)["system_prompt"] for index in range(12)]
    assert names == [2, 2, 2, 3, 3, 3] * 2, "N times each, for every row of the batch"
    for name in (2, 3):
        first, question = prompts.render_messages(ROW, {"system_prompt": name})
        assert first == {
            "role": "system",
            "content": prompts.evolution.population.members[name].prompt.text,
        }
        assert "which city ?" in question["content"]
    with pytest.raises(LookupError):
        prompts.render_messages(ROW, {"system_prompt": 9})


def test_evaluation_has_the_final_prompt_in_all_slots():
    prompts = parts(members=3)
    final = prompts.final_prompt()
    assert prompts.choose_metadata(4, training=False) == {"system_prompt": final.id}
    prompts.evaluated_prompt = prompts.evolution.population.members[1].prompt
    assert prompts.choose_metadata(4, training=False) == {"system_prompt": 1}
    prompts.evaluated_prompt = None
    prompts.is_distilled = True
    assert prompts.choose_metadata(4, training=False) == {"system_prompt": None}
    assert prompts.render_messages(ROW, {"system_prompt": None}) == AgentSpec().messages(ROW)
    assert prompts.saved_spec(AgentSpec()) == AgentSpec()


def test_the_best_prompt_alone_takes_no_draw():
    prompts = parts(members=3, mode="alternating", phase_steps=1)
    before = prompts.evolution.population.turns
    prompts.start_batch(0)
    assert len({prompt.id for prompt in prompts.batch_prompts}) == 1
    assert prompts.evolution.population.turns == before
    prompts.start_batch(1)
    assert len({prompt.id for prompt in prompts.batch_prompts}) == 2, (
        "in the phase after it prompts evolve"
    )


@pytest.mark.parametrize("place", ["system", "user", "after"])
@pytest.mark.parametrize("own", [None, "Be brief ."])
def test_one_prompt_renders_as_the_saved_agent(place, own):
    """The rows are rendered as GRPO renders them under the spec that is saved."""
    prompts = parts(prompt_place=place)
    spec = AgentSpec(system_prompt=own)
    prompts.render = spec.messages
    prompts.start_batch(0)
    seen = [
        prompts.render_messages(ROW, prompts.choose_metadata(index, training=True))
        for index in range(6)
    ]
    assert all(messages == prompts.saved_spec(spec).messages(ROW) for messages in seen)


# --- reflectors -----------------------------------------------------------------------------------


def reflection_task(batch=0):
    attempts = (Attempt("one", 1.0), Attempt("two", 0.0))
    return ReflectionTask(
        batch,
        PromptResult(SystemPrompt("Answer .", (), id=0), (ProblemResult("q", "t", attempts),)),
    )


def settings(**changes):
    values = {"seed": 0, "reflection_timeout": 30.0, "reference_sampling": None}
    return SimpleNamespace(**{**vars(ESPLSettings()), **values, **changes})


def reflects(messages):
    return EDIT if "JSON" in messages[-1]["content"] else "It went wrong."


def test_the_reference_works_before_finish_is_called():
    chat = ScriptedChat(reflects)
    reflector = ReferenceReflector(chat, settings(), sends_requests=True)
    reflector.begin(reflection_task())
    for _ in range(100):
        if len(chat.calls) == 4:
            break
        time.sleep(0.05)
    assert len(chat.calls) == 4, "two summaries, a critique and a plan"
    (outcome,) = reflector.finish(reflection_task())
    assert outcome.child.principles == ("Look twice.",) and len(chat.calls) == 4
    assert reflector.finish(reflection_task(1))[0].child is not None, (
        "a task that was not begun is done now"
    )


def test_another_process_asks_nothing():
    chat = ScriptedChat(reflects)
    reflector = ReferenceReflector(chat, settings(), sends_requests=False)
    reflector.begin(reflection_task())
    assert reflector.finish(reflection_task()) == [] and not chat.calls


def test_a_task_ends_with_its_time(caplog):
    async def silent(messages, **options):
        await asyncio.Event().wait()

    (outcome,) = ReferenceReflector(
        silent, settings(reflection_timeout=0.1), sends_requests=True
    ).finish(reflection_task())
    assert outcome.reason == "call_failed" and outcome.error.kind == "TimedOut"
    assert "did not reply to 2 calls within 0.1 s" in caplog.text


def test_the_policy_reflects_in_a_session(monkeypatch):
    opened = []

    def session():
        opened.append(True)
        return nullcontext()

    async def write(messages, **options):
        return Reply(reflects(messages))

    from agentic_prompting.rollout import BatchEngine

    policy = BatchEngine(lambda requests: [], on_callers_thread=True)
    reflector = PolicyReflector(
        lambda: policy, session, None, None, settings(), sends_requests=True
    )
    reflector.write = write
    reflector.begin(reflection_task())
    assert not opened
    assert reflector.finish(reflection_task())[0].child is not None and opened


def test_other_processes_take_part_in_collective_sampling(monkeypatch):
    """They wait for the outcomes afterwards; before, both would wait, each in another collective."""
    calls = []
    words = [1, 1, 0]

    def gather(values):
        calls.append("gather")
        return [*values, words.pop(0)]  # the requests of the process that reflects

    def broadcast(shared):
        calls.append("broadcast")
        shared[:] = [["outcome"], None]

    monkeypatch.setattr("agentic_prompting.trainers.policies.batch_samplers.gather_object", gather)
    monkeypatch.setattr("agentic_prompting.trainers.reflectors.broadcast_object_list", broadcast)
    policy = CollectivePolicy(lambda requests: calls.append("sample"), filler=[0])
    reflector = PolicyReflector(
        lambda: policy, policy.session, None, None, settings(), sends_requests=False
    )
    assert reflector.finish(reflection_task()) == ["outcome"]
    assert calls == ["gather", "sample", "gather", "sample", "gather", "broadcast"]


def test_a_failed_reflection_fails_on_every_process(monkeypatch):
    broadcasts = []
    monkeypatch.setattr(
        "agentic_prompting.trainers.reflectors.broadcast_object_list", broadcasts.append
    )

    def fails():
        raise RuntimeError("out of memory")

    left = []

    @contextmanager
    def session():
        yield
        left.append("whole")

    reflector = PolicyReflector(fails, session, None, None, settings(), sends_requests=True)
    with pytest.raises(RuntimeError, match="out of memory"):
        reflector.finish(reflection_task())
    assert left == ["whole"] and broadcasts == [[None, "RuntimeError: out of memory"]]
