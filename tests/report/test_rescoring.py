"""Rewards of stored rollouts computed anew: what functions get, what is compared, what is written."""

import json
import random

import pytest

from agentic_prompting import PromptR1Reward
from agentic_prompting.evaluation import AgentSystem, evaluate_agent, load_run, save_run
from agentic_prompting.interop import ToolEnvironment
from agentic_prompting.report import rescore, rescore_answers
from agentic_prompting.rewards import CostReward, exact_match_reward
from agentic_prompting.rollout import (
    BatchEngine,
    Rollout,
    TagGrammar,
    render_messages,
    restore_rollout,
    rollout_record,
)
from support.browser import record, write_run
from support.training import Acts, trainer_for

RNG = random.Random(0)


def stored(question="which ?", answer="Nairobi", reward=0.0, **changes):
    return record(
        0,
        RNG,
        3,
        step=0,
        **{
            "question": question,
            "status": "answered",
            "answer": answer,
            "reward": reward,
            "rewards": {"r": reward},
            **changes,
        },
    )


@pytest.fixture
def run(tmp_path):
    """Two questions with two rollouts each, one of which failed, and an evaluation."""
    failure = {"kind": "TimedOut", "what": "no reply"}
    return write_run(
        tmp_path / "run",
        [
            stored("a ?", "Nairobi", 0.25),
            stored("a ?", "Lima", 0.25),
            stored("b ?", "Nairobi", 0.5),
            stored("b ?", None, None, status="failed", error=failure, rewards={"r": None}),
            stored("a ?", "Nairobi", 0.75, mode="eval"),
        ],
    )


def test_old_and_new_rewards_are_compared_by_question(run):
    result = rescore(run, exact_match_reward)
    train, evaluation = result.changes
    assert (train.mode, train.rollouts, train.failed, train.unscored) == ("train", 4, 1, 0)
    assert (train.old.mean, train.old.n) == (0.375, 2)
    # Question a: one of two is right; question b: the only one.
    assert train.new.mean == 0.75 and train.difference.mean == 0.375
    assert train.difference.low <= 0.375 <= train.difference.high
    assert (train.old_gradient_share, train.new_gradient_share) == (0.0, 1.0)
    assert (evaluation.mode, evaluation.old.mean, evaluation.new.mean) == ("eval", 0.75, 1.0)


def test_a_failed_rollout_stays_failed(run):
    seen = []

    def judge(rollout, completions, **columns):
        seen.extend(rollout)
        return [1.0] * len(completions)

    result = rescore(run, judge)
    assert len(seen) == 4 and all(rollout.status == "answered" for rollout in seen)
    (failed,) = [record for record in result.records if record["status"] == "failed"]
    assert failed["new"] is None and failed["old"] is None


def test_the_file_is_beside_the_run(run):
    result = rescore(run, exact_match_reward)
    lines = [json.loads(line) for line in result.path.read_text().splitlines()]
    assert lines == result.records and result.path.parent.parent == run
    assert [line["new"] for line in lines] == [1.0, 0.0, 1.0, None, 1.0]
    # Again, under the same name, it is replaced.
    assert rescore(run, exact_match_reward).path == result.path


def test_several_functions_are_added_with_weights(run):
    def half(completions, **columns):
        return [0.5] * len(completions)

    result = rescore(run, [exact_match_reward, half], weights=[1.0, 2.0])
    assert [record["new"] for record in result.records] == [2.0, 1.0, 2.0, None, 2.0]
    assert result.records[1]["rewards"] == {"exact_match_reward": 0.0, "half": 0.5}
    with pytest.raises(ValueError, match="weights"):
        rescore(run, [half, half], weights=[1.0])


def test_an_async_function_and_none_are_accepted(run):
    async def judge(completions, **columns):
        return [None] * len(completions)

    train, _ = rescore(run, judge).changes
    assert train.unscored == 3 and train.new is None and train.difference is None


def test_columns_of_the_dataset_are_joined(run):
    def by_level(level, completions, **columns):
        return [float(value) for value in level]

    with pytest.raises(ValueError, match="'level'.*dataset"):
        rescore(run, by_level)
    rows = [{"question": "a ?", "level": 3}, {"question": "b ?", "level": 5}]
    result = rescore(run, by_level, rows=rows)
    assert [record["new"] for record in result.records] == [3, 3, 5, None, 3]
    with pytest.raises(ValueError, match="b \\?"):
        rescore(run, by_level, rows=rows[:1])


def test_rows_with_a_prompt_are_found_by_its_text(tmp_path):
    def by_level(level, prompts, **columns):
        assert prompts[0][0]["content"] == "Be brief."
        return [float(value) for value in level]

    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "which ?"}]
    rows = [{"prompt": prompt, "level": 3}, {"prompt": prompt[:1], "level": 5}]
    folder = write_run(tmp_path / "run", [stored("which ?")])
    assert [record["new"] for record in rescore(folder, by_level, rows=rows).records] == [3]


@pytest.mark.parametrize("value", [None, 1.0, [1.0], ["a"] * 3, "abc", {"a": 1}])
def test_a_wrong_value_names_the_function(run, value):
    def wrong(completions, **columns):
        return value

    with pytest.raises(ValueError, match="wrong"):
        rescore(run, wrong)
    assert not (run / "rescored").exists()


def test_what_is_not_recorded_is_refused(run):
    def by_tokens(completion_ids, **columns):
        return [0.0] * len(completion_ids)

    with pytest.raises(ValueError, match="completion_ids"):
        rescore(run, by_tokens)


def test_a_folder_without_rollouts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no rollouts"):
        rescore(tmp_path, exact_match_reward)
    with pytest.raises(FileNotFoundError):
        rescore(tmp_path / "none", exact_match_reward)


def test_a_training_keeps_its_rewards(tiny_policy, rows, tmp_path):
    """Rescored by its own reward a run has the rewards that it was trained with, from the same
    completions.
    """
    seen = []

    def watched(rollout, prompts, completions, answers, **columns):
        for episode, prompt, completion in zip(rollout, prompts, completions, strict=True):
            turns = [(turn.kind, turn.thought, turn.request, turn.answer) for turn in episode.turns]
            seen.append((episode.seed, str(prompt), str(completion), turns, len(episode.replies)))
        return PromptR1Reward()(
            prompts=prompts, completions=completions, rollout=rollout, answers=answers
        )

    reward = {"reward_funcs": watched}
    trainer = trainer_for(tiny_policy, tmp_path, rows, options=reward, max_steps=1)
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    trainer.save_model()
    in_training = sorted(seen)
    seen.clear()
    rescored = rescore(tmp_path, watched)
    (train,) = rescored.changes
    assert sorted(seen) == in_training
    assert [record["new"] for record in rescored.records] == [
        record["old"] for record in rescored.records
    ]
    assert train.difference.mean == 0


def test_a_restored_rollout_has_its_record():
    saved = stored(
        cost_usd=0.0,
        worth_usd=0.5,
        observations=[{"text": "x", "error": None, "seconds": 1.0, "parts": ["x"]}] * 2,
    )
    rollout = restore_rollout(saved, {"question": "which ?"}, TagGrammar())
    again = rollout_record(rollout)
    for name in ("status", "answer", "turns", "error"):
        assert again[name] == saved[name], name
    assert again["worth_usd"] == 0.5 and again["cost_usd"] == 0.0
    assert rollout.turns[0].request and rollout.quotable_texts == ["x", "x"]
    assert CostReward(2.0)([rollout]) == [-1.0]


def test_a_program_keeps_its_answer():
    saved = stored(answer="42", sequences=[{}], counts={"program/calls": 2.0}, observations=[])
    rollout = restore_rollout(saved, {"question": "which ?"})
    assert rollout.answer == "42" and rollout.counts == {"program/calls": 2.0}


def test_what_a_program_returned_is_recorded():
    rollout = Rollout([1], row={"question": "which ?"}, counts={"program/calls": 1.0})
    rollout.returned = {"answer": "42", "reward": 0.5, "looked": [3], "client": object()}
    rollout.returned["page"] = "x" * 20_000
    saved = rollout_record(rollout.finish("answered"))
    assert saved["returned"] == {"reward": 0.5, "looked": [3]}
    returned = restore_rollout(json.loads(json.dumps(saved)), {"question": "which ?"}).returned
    assert returned["looked"] == [3] and returned["answer"] == "42" and "reward" in returned
    # It has not returned this, and these are not known.
    assert returned.get("cost", 0) == 0 and "cost" not in returned
    for name in ("page", "client"):
        with pytest.raises(ValueError, match=name):
            returned.get(name)


@pytest.mark.parametrize("status", ["answered", "malformed"])
def test_what_a_program_returned_besides_is_refused(tmp_path, status):
    def priced(rollout, **columns):
        return [float((episode.returned or {}).get("looked", 0)) for episode in rollout]

    folder = write_run(tmp_path / "run", [stored(status=status, sequences=[{}], observations=[])])
    with pytest.raises(ValueError, match="looked"):
        rescore(folder, priced)


def test_messages_have_tool_calls():
    def stock(part: str) -> str:
        """How many of a part there are.

        Args:
            part: Its name.
        """
        return part

    environment = ToolEnvironment([stock])
    call = '<tool_call>{"name": "stock", "arguments": {"part": "p7"}}</tool_call>'
    turns = [
        {"text": call, "kind": "act", "well_formed": True, "problem": ""},
        {"text": "12", "kind": "answer", "well_formed": True, "problem": ""},
    ]
    observations = [{"text": "12 of p7", "error": None, "seconds": 0.1}]
    saved = stored(answer="12", turns=turns, observations=observations)
    rollout = restore_rollout(saved, {"question": "which ?"}, environment.grammar)
    messages = render_messages(rollout, rollout.texts, environment.grammar)
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]
    assert messages[0]["tool_calls"][0]["function"]["arguments"] == {"part": "p7"}


class ProgramAgent:
    """An agent whose program always returns the same answer."""

    def __init__(self, answer):
        self.answer = answer

    def answer_all(self, questions, seed=0, progress=True):
        rollouts = []
        for row in questions:
            rollout = Rollout([1], row=dict(row), counts={"program/calls": 1})
            rollout.returned = {"answer": self.answer, "length": len(self.answer)}
            rollouts.append(rollout.finish("answered"))
        return rollouts


@pytest.fixture
def evaluation(tmp_path):
    """The answers of two agents and of a function to two questions, each asked twice."""
    rows = [{"question": f"{name} ?", "answers": ["x"]} for name in "ab"]
    systems = {
        "untrained": AgentSystem(ProgramAgent("Nairobi"), "untrained"),
        "trained": AgentSystem(ProgramAgent("Lima"), "trained"),
        "function": lambda questions: ["x"] * len(questions),
    }
    folder = tmp_path / "evaluation"
    save_run(folder, evaluate_agent(systems, {"test": rows}, n=None, runs=2, output=folder))
    return folder


def test_answers_of_an_evaluation_get_a_reward(evaluation):
    def graded(completions, rollout, level, **columns):
        return [
            each * len(one.answer) / one.returned["length"] + (one.answer == "Lima")
            for each, one in zip(level, rollout, strict=True)
        ]

    rows = [{"question": "a ?", "level": 1}, {"question": "b ?", "level": 3}]
    result = rescore_answers(evaluation, graded, rows=rows)
    untrained, trained = result.systems
    assert (untrained.system, untrained.mean.mean, untrained.mean.n) == ("untrained", 2.0, 2)
    assert (trained.answers, trained.failed, trained.mean.mean) == (4, 0, 3.0)
    assert untrained.difference is None and trained.difference.mean == 1.0
    assert result.left_out == ["function"]
    assert len(json.loads(result.path.read_text())) == 8
    # The new file is none of answers: the evaluation can still be read.
    assert len(load_run(evaluation).records) == 12


def test_a_failed_answer_has_no_reward(evaluation):
    path = evaluation / "trained.jsonl"
    answers = [json.loads(line) for line in path.read_text().splitlines()]
    answers[0]["trajectory"] |= {"status": "failed", "error": {"kind": "TimedOut", "what": "late"}}
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))

    _, trained = rescore_answers(
        evaluation, lambda completions, **_: [1.0] * len(completions)
    ).systems
    assert (trained.failed, trained.unscored, trained.mean.mean) == (1, 0, 1.0)


def test_an_evaluation_without_rollouts_is_named(evaluation):
    (evaluation / "trained.jsonl").unlink()
    (evaluation / "untrained.jsonl").unlink()
    with pytest.raises(ValueError, match="rollout"):
        rescore_answers(evaluation, exact_match_reward)
    with pytest.raises(FileNotFoundError, match="evaluate"):
        rescore_answers(evaluation.parent, exact_match_reward)
