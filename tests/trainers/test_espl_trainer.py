"""E-SPL's trainer: slots, baselines (eq 1-2), ratings, children, modes, saving and resuming, on a
tiny model.
"""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from accelerate.utils import DistributedType
from transformers import AutoTokenizer

from agentic_prompting import ESPLTrainer, OpenAIChat
from agentic_prompting.evolution import Outcome, Population, SystemPrompt, rate, read_journal
from agentic_prompting.llm import BudgetExceeded, Misconfigured, Reply, ScriptedChat
from agentic_prompting.rollout import (
    AgentSpec,
    BatchEngine,
    FreeText,
    Rollout,
    Sample,
    read_rollouts,
)
from agentic_prompting.trainers import TrainingStopped
from agentic_prompting.trainers.reflectors import ReflectionWatch
from agentic_prompting.trainers.rollouts import Batch, BatchPosition
from support.espl_training import (
    EDIT,
    NOBODY,
    Reference,
    Writes,
    WritesBySeed,
    arguments,
    reward_by_word,
    trainer_for,
)
from support.misbehaving import MisbehavingServer


class Numbered(Reference):
    """A principle whose number follows from what is asked, as a recorded reference gives."""

    def _say(self, messages):
        request = messages[-1]["content"]
        return (
            EDIT % (len(request) + sum(map(ord, request)))
            if "JSON" in request
            else "It went wrong at the second step."
        )


class WritesOne(Writes):
    """Writes always the same word."""

    def __init__(self, trainer, word):
        self.trainer = trainer
        self.word = word

    def __call__(self, requests):
        return [Sample(self.trainer.chat_format.turn_ids(self.word)) for _ in requests]


def one_batch(trainer):
    """One generated batch: two problems, each under two prompts, twice."""
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    return trainer._generate_and_score_completions(
        [trainer.train_dataset[i] for i in [0] * 4 + [1] * 4]
    )


def rewards_of(folder):
    return np.array(
        [record["rewards"]["reward_by_word"] for record in read_rollouts(folder / "rollouts")]
    )


def watched_batches(trainer):
    """The batches whose rewards are known, as they come."""
    batches = []
    after = trainer._after_rewards
    trainer._after_rewards = lambda batch, totals: batches.append(batch) or after(batch, totals)
    return batches


def prompt_messages(trainer, row, index=0):
    """What a row begins with in this slot."""
    return trainer.prompts.render_messages(
        row, trainer.prompts.choose_metadata(index, trainer.model.training)
    )


@pytest.mark.parametrize("baseline", ["normal", "marginalize"])
def test_advantages_are_the_papers(tiny_policy, rows, tmp_path, baseline):
    """eq 1-2 in NumPy from the logged rewards: no standard deviation; the mean over N, or over M·N."""
    trainer = trainer_for(tiny_policy, tmp_path, rows, baseline=baseline)
    batch = one_batch(trainer)
    rewards = rewards_of(tmp_path)
    group = 2 if baseline == "normal" else 4
    expected = (
        rewards.reshape(-1, group) - rewards.reshape(-1, group).mean(1, keepdims=True)
    ).ravel()
    assert np.allclose(batch["advantages"].numpy(), expected, atol=1e-7) and np.ptp(rewards) > 0


def test_each_slot_reads_its_own_prompt(tiny_policy, rows, tmp_path):
    trainer = trainer_for(tiny_policy, tmp_path, rows)
    trainer.population.add(
        SystemPrompt("Answer .", ("Second .",), parents=(0,), operator="mutation")
    )
    batches = watched_batches(trainer)
    one_batch(trainer)
    assert {prompt.id for prompt in trainer.prompts.batch_prompts} == {0, 1}
    for rollout, slot in zip(batches[0].rollouts, [0, 0, 1, 1, 0, 0, 1, 1], strict=True):
        question = {"question": rollout.row["question"]}
        expected = trainer.prompts.batch_prompts[slot].messages(trainer.spec.messages(question))
        assert rollout.row["prompt"] == expected and expected[0]["role"] == "system"
        assert rollout.prompt_ids == trainer.chat_format.prompt_ids(expected)


def test_ratings_follow_the_rewards(tiny_policy, rows, tmp_path):
    trainer = trainer_for(tiny_policy, tmp_path, rows)
    trainer.population.add(
        SystemPrompt("Answer .", ("Second .",), parents=(0,), operator="mutation")
    )
    before = {member.prompt.id: member.rating for member in trainer.population.members}
    one_batch(trainer)
    rewards = rewards_of(tmp_path).reshape(2, 2, 2)  # problem, slot, attempt
    values = rewards.mean(2).mean(0)
    ids = [prompt.id for prompt in trainer.prompts.batch_prompts]
    expected = rate([before[i] for i in ids], list(values), 0.01)
    for i, rating in zip(ids, expected, strict=True):
        assert trainer.population.rating(i).mu == pytest.approx(rating.mu)
    assert trainer.population.members[0].matches == 1


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_children_join_when_due(tiny_policy, rows, tmp_path, lag):
    trainer = trainer_for(tiny_policy, tmp_path, rows, evolution_lag=lag, max_steps=4)
    trainer.train()
    born = [member.prompt.born_at for member in trainer.population.members[1:]]
    assert born == list(range(1 + lag, 4)), "one child a batch, `lag` batches later than at once"
    assert [member.prompt.operator for member in trainer.population.members[1:]] == [
        "mutation"
    ] * len(born)
    assert "Principle number 1." in trainer.population.members[1].prompt.principles


def test_a_child_inherits_the_rating_of_the_batch_it_was_made_from(tiny_policy, rows, tmp_path):
    """Algorithm 1 makes it from the rating after that batch.

    With a lag its parent has played again when it joins.
    """
    trainer = trainer_for(tiny_policy, tmp_path, rows)
    trainer.population.add(
        SystemPrompt("Answer .", ("Second .",), parents=(0,), operator="mutation")
    )
    trainer.prompts.batch_prompts = [member.prompt for member in trainer.population.members]
    trainer.model.train()
    # The prompt that each was played under.
    metadata = [trainer.prompts.choose_metadata(i, training=True) for i in range(8)]
    rows = [{"question": "q", "answers": ["x"]}] * 8
    played = Batch(BatchPosition(0, "train", 0), rows, metadata, [Rollout([0])] * 8)
    root_wins = [1.0, 0.5, 0.0, 0.0] * 2
    root_loses = [0.0, 0.0, 1.0, 0.5] * 2
    trainer._rate(root_wins, played)
    trainer.load_state_dict(
        json.loads(json.dumps(trainer.state_dict()))
    )  # it outlives a checkpoint
    trainer._rate(root_loses, replace(played, position=BatchPosition(0, "train", 1)))
    assert trainer.population.rating(0).mu == pytest.approx(23.34, abs=0.01)
    trainer._add_children()
    child = trainer.population.members[2]
    assert child.prompt.parents == (0,) and child.rating.mu == pytest.approx(29.38, abs=0.01)


def test_a_population_of_ones_own(tiny_policy, rows, tmp_path):
    """With a selection rule that is a function; what would be ignored beside it is an error."""
    oldest = Population(SystemPrompt("Answer .", ()), rule=lambda members, k, rng: list(range(k)))
    settings = {
        "args": arguments(tmp_path, evolution_lag=0),
        "train_dataset": rows,
        "reference": Reference(),
    }
    settings["grammar"] = FreeText()
    trainer = ESPLTrainer(str(tiny_policy), reward_by_word, population=oldest, **settings)
    trainer.policy = BatchEngine(Writes(trainer), on_callers_thread=True)
    trainer.train()
    assert trainer.population is oldest and len(oldest.members) > 1
    assert [prompt.id for prompt in trainer.prompts.batch_prompts] == [0, 1]
    with pytest.raises(ValueError, match="initial_prompt would be ignored"):
        ESPLTrainer(
            str(tiny_policy), reward_by_word, population=oldest, initial_prompt="x", **settings
        )
    with pytest.raises(ValueError, match="window=3.*Population"):
        args = arguments(tmp_path, window=3)
        ESPLTrainer(
            str(tiny_policy), reward_by_word, population=oldest, **{**settings, "args": args}
        )


def test_the_references_sampling_is_set(tiny_policy, rows, tmp_path):
    reference = Reference()
    sampling = {"temperature": 0.3, "max_tokens": 900}
    trainer_for(
        tiny_policy,
        tmp_path,
        rows,
        reference,
        evolution_lag=0,
        max_steps=2,
        reference_sampling=sampling,
        max_words=2,
    ).train()
    assert reference.calls and all(options == sampling for options in reference.sampling)
    assert "at most 2 words" in "".join(call[0]["content"] for call in reference.calls)


def test_the_model_learns_and_carries_its_prompt(tiny_policy, rows, tmp_path):
    trainer = trainer_for(tiny_policy, tmp_path, rows)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    trainer.save_model(str(tmp_path))
    assert any(
        not torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items()
    )
    best = trainer.population.best().text
    assert (
        (tmp_path / "system_prompt.txt").read_text()
        == best
        == AgentSpec.load(tmp_path).system_prompt
    )
    saved = json.loads((tmp_path / "population.json").read_text())
    assert len(saved["population"]["members"]) == len(trainer.population.members)
    logged = [entry for entry in trainer.state.log_history if "population/size" in entry]
    assert logged[-1]["population/size"] == 3 and "evolution/mutation_children" in logged[-1]


@pytest.mark.parametrize("mode", ["rl", "evolution", "reflection"])
def test_modes(tiny_policy, rows, tmp_path, mode):
    reference = Reference()
    trainer = trainer_for(tiny_policy, tmp_path, rows, reference, mode=mode, evolution_lag=0)
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    trainer.train()
    moved = any(
        not torch.equal(before[name], tensor) for name, tensor in trainer.model.state_dict().items()
    )
    assert moved == (mode == "rl")
    assert (len(trainer.population.members) > 1) == (mode != "rl")
    assert bool(reference.calls) == (mode != "rl")
    assert all(entry["step_time"] > 0 for entry in trainer.state.log_history if "reward" in entry)
    if mode == "reflection":
        assert len(trainer.population.candidates()) == 1
        assert trainer.final_prompt().id == len(trainer.population.members) - 1


def test_weights_and_prompts_in_turn(tiny_policy, rows, tmp_path):
    """Phases of two steps: the weights learn under the best prompt alone, then prompts have
    children and the weights stand still.
    """
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, mode="alternating", phase_steps=2, max_steps=6, evolution_lag=0
    )
    steps = []
    train = trainer._generate_and_score_completions

    def weights():
        return torch.cat(
            [tensor.flatten().clone() for tensor in trainer.model.state_dict().values()]
        )

    def watched(inputs):
        batch = train(inputs)
        steps.append(
            (
                weights(),
                [prompt.id for prompt in trainer.prompts.batch_prompts],
                len(trainer.population.members),
            )
        )
        return batch

    trainer._generate_and_score_completions = watched
    trainer.train()
    after = [*(one for one, _, _ in steps[1:]), weights()]
    assert [not torch.equal(one, then) for (one, _, _), then in zip(steps, after, strict=True)] == [
        *(True, True, False, False, True, True)
    ]
    assert [one for _, one, _ in steps[:2]] == [[0, 0], [0, 0]] and len({*steps[4][1]}) == 1
    assert [members for _, _, members in steps] == [1, 1, 1, 2, 3, 3]


def test_a_run_in_phases_resumes_exactly(tiny_policy, rows, tmp_path):
    def run(folder, checkpoint=None, **changes):
        trainer = trainer_for(
            tiny_policy, folder, rows, mode="alternating", phase_steps=1, evolution_lag=0, **changes
        )
        trainer.policy = BatchEngine(WritesBySeed(trainer), on_callers_thread=True)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.state_dict(), [
            (e["step"], e["loss"]) for e in trainer.state.log_history if "loss" in e
        ]

    whole = run(tmp_path / "whole", save_strategy="steps", save_steps=3)
    assert run(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-3")) == whole


def test_what_the_prompt_did_stays_when_it_is_left_out(tiny_policy, rows, tmp_path):
    """The teacher speaks only under its prompt; the student says the same without it, and is used
    without it.
    """
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, mode="rl", max_steps=1, per_device_eval_batch_size=8
    )
    trainer.train()
    trainer.policy, batches = (
        BatchEngine(WritesOne(trainer, "euro"), on_callers_thread=True),
        watched_batches(trainer),
    )

    def likelihood(messages):
        ids = trainer.chat_format.prompt_ids(messages)
        word = trainer.chat_format.turn_ids("euro")
        logits = (
            trainer.model(torch.tensor([ids + word])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
        )
        return logits[range(len(word)), word].mean().item()

    bare = trainer.spec.messages(rows[0])
    before = likelihood(bare)
    trainer.distill(rows.select(range(4)), learning_rate=1e-2, num_train_epochs=4)
    played = [rollout.row["prompt"] for batch in batches for rollout in batch.rollouts]
    assert len(played) == 8
    assert {messages[0]["content"] for messages in played} == {"Answer .\n[G0]. Ask first ."}
    assert likelihood(bare) > before + 1
    trainer.evaluate(rows.select(range(4)))
    assert batches[-1].rollouts[-1].row["prompt"][0]["role"] == "user"
    assert trainer.population.members[0].held_out is None
    trainer.save_model(str(tmp_path))
    assert AgentSpec.load(tmp_path).messages(rows[0]) == bare
    assert not (tmp_path / "system_prompt.txt").read_text()


def test_training_can_end_with_distillation(tiny_policy, rows, tmp_path, monkeypatch):
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, max_steps=1, distill_epochs=0.5, per_device_eval_batch_size=16
    )
    trainer.train()
    assert trainer.final_prompt().text == "" and trainer.population.best().text
    trainer = trainer_for(tiny_policy, tmp_path / "sharded", rows, max_steps=1, distill_epochs=0.5)
    monkeypatch.setattr(
        type(trainer.accelerator), "distributed_type", property(lambda self: DistributedType.FSDP)
    )
    with pytest.raises(ValueError, match="distill needs whole weights"):
        trainer.train()
    assert trainer.state.global_step == 0, "before the first step, not after the last"
    with pytest.raises(ValueError, match="distill_epochs"):
        arguments(tmp_path, distill_epochs=-1)


@pytest.mark.parametrize("reflection", ["paper", "one_call"])
def test_a_run_resumes_bit_for_bit_whatever_reflects(tiny_policy, rows, tmp_path, reflection):
    """Population and losses; with a job that is still pending at the checkpoint."""
    ours = {"reflection": reflection, "reflect_on": "imperfect"}

    def run(folder, checkpoint=None, **changes):
        trainer = trainer_for(
            tiny_policy, folder, rows, Numbered(), evolution_lag=1, **ours, max_steps=6, **changes
        )
        trainer.policy = BatchEngine(WritesBySeed(trainer), on_callers_thread=True)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer.state_dict(), [
            (e["step"], e["loss"]) for e in trainer.state.log_history if "loss" in e
        ]

    whole = run(tmp_path / "whole", save_strategy="steps", save_steps=3)
    assert run(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-3")) == whole
    assert len(whole[0]["population"]["members"]) > 3


def test_a_one_call_reflection_that_goes_wrong_is_counted_and_training_goes_on(
    tiny_policy, rows, tmp_path, caplog
):
    replies = iter(
        [
            "no idea",
            '{"edits": [{"op": "paint"}]}',
            '{"edits": [{"op": "add", "text": "New ."}]}',
            "[",
        ]
    )
    chat = ScriptedChat(lambda messages: next(replies))
    options = {
        "reflection": "one_call",
        "reflect_on": "imperfect",
        "evolution_lag": 0,
        "max_steps": 5,
    }
    trainer = trainer_for(tiny_policy, tmp_path, rows, chat, **options)
    trainer.train()
    logged = [
        entry.get("evolution/mutation_failed")
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    assert logged == [None, 1.0, 1.0, 0.0, 1.0]
    assert [member.prompt.principles[-1] for member in trainer.population.members] == [
        "Ask first .",
        "New .",
    ]
    assert "no new system prompt" not in caplog.text


@pytest.mark.parametrize("place", ["system", "user", "after"])
@pytest.mark.parametrize("own", [None, "Be brief ."])
def test_a_loaded_agent_is_asked_as_in_evaluation(tiny_policy, rows, tmp_path, place, own):
    """Under the best prompt, wherever it stands, and with the system message it had anyway."""
    trainer = ESPLTrainer(
        model=str(tiny_policy),
        reward_funcs=reward_by_word,
        reference=Reference(),
        args=arguments(tmp_path, prompt_place=place),
        train_dataset=rows,
        initial_prompt="Answer .\n[G0]. Ask first .",
        prompt_template="question : {question}",
        system_prompt=own,
    )
    trainer.model.eval()
    trainer.save_model(str(tmp_path))
    assert AgentSpec.load(tmp_path).messages(rows[0]) == prompt_messages(trainer, rows[0])


def test_a_rows_own_system_message_does_not_push_the_evolved_prompt_out(
    tiny_policy, rows, tmp_path
):
    """Neither in training nor in use: what was trained is what is asked."""
    trainer = trainer_for(tiny_policy, tmp_path, rows, Reference())
    trainer.model.eval()
    trainer.save_model(str(tmp_path))
    row = {
        "prompt": [
            {"role": "system", "content": "Be brief ."},
            {"role": "user", "content": "which city ?"},
        ]
    }
    asked = AgentSpec.load(tmp_path).messages(row)
    assert asked == prompt_messages(trainer, row)
    assert trainer.population.best().text in asked[0]["content"]
    assert asked[0]["content"].endswith("Be brief .")


def test_rows_with_a_prompt_only_can_cross(tiny_policy, rows, tmp_path):
    """Each slot renders the row's prompt with its own system prompt; the problem is the same one
    all the same.
    """
    own = rows.map(
        lambda row: {"prompt": [{"role": "user", "content": row["question"]}]},
        remove_columns=["question"],
    )
    trainer = trainer_for(
        tiny_policy,
        tmp_path,
        own,
        prompt_place="user",
        p_crossover=1.0,
        evolution_lag=0,
        max_steps=3,
    )
    trainer.train()
    assert len(trainer.population.members) > 1
    assert any(
        "what is" in call[-1]["content"] or "which" in call[-1]["content"]
        for call in trainer.reference.calls
    )


def test_evaluation_is_under_the_best_prompt(tiny_policy, rows, tmp_path):
    trainer = trainer_for(tiny_policy, tmp_path, rows)
    trainer.population.add(
        SystemPrompt("Answer .", ("Second .",), parents=(0,), operator="mutation")
    )
    trainer.model.eval()
    messages = prompt_messages(trainer, rows[0], 3)
    assert messages[0] == {"role": "system", "content": trainer.population.best().text}


def test_a_dead_reference_changes_nothing(tiny_policy, rows, tmp_path, caplog):
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, Reference(fail_on=lambda n: True), evolution_lag=0
    )
    trainer.train()
    assert len(trainer.population.members) == 1
    logged = [
        entry.get("evolution/mutation_failed")
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    assert logged == [None, 1.0, 1.0, 1.0]
    assert caplog.text.count("no new system prompt") == 1
    assert "call_failed 3" in caplog.text


def test_warning_without_any_proposed_change(caplog):
    watch = ReflectionWatch()
    watch.note([Outcome("mutation", reason="no_change")] * 3)
    assert "in all 3 attempts the reference LLM proposed no change" in caplog.text
    assert "failed" not in caplog.text
    caplog.clear()
    watch = ReflectionWatch()
    reasons = ("no_change", "unreadable", "unreadable")
    watch.note([Outcome("mutation", reason=reason) for reason in reasons])
    assert "2 of 3 attempts" in caplog.text and "1 proposed no change" in caplog.text


def test_a_reference_that_can_never_answer_stops_training(tiny_policy, rows, tmp_path):
    """Found at once where the model can be checked; else at its first reflection, with a
    checkpoint.
    """

    class Wrong(ScriptedChat):
        def check(self):
            raise Misconfigured("no such model")

    with pytest.raises(Misconfigured, match="no such model"):
        trainer_for(tiny_policy, tmp_path, rows, Wrong(["x"]))
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, ScriptedChat([Misconfigured("no such model")]), evolution_lag=0
    )
    with pytest.raises(
        TrainingStopped,
        match="step 1.*reference LLM.*Misconfigured",
    ):
        trainer.train()
    saved = json.loads((tmp_path / "checkpoint-1" / "population.json").read_text())
    assert len(saved["pending"]) == 1, "its work is asked for again when training goes on"


@pytest.mark.parametrize("silent_from", [0, 3])
def test_a_reference_that_never_answers_holds_nothing_up(
    tiny_policy, rows, tmp_path, caplog, silent_from
):
    """No child, a warning, and training goes on; nor does the thread that asks wait for ever."""

    class Silent(Reference):
        async def __call__(self, messages, **sampling):
            self.asked = getattr(self, "asked", -1) + 1
            if self.asked >= silent_from:
                await asyncio.Event().wait()
            return await super().__call__(messages, **sampling)

    trainer = trainer_for(
        tiny_policy, tmp_path, rows, Silent(), evolution_lag=0, reflection_timeout=0.2, max_steps=3
    )
    trainer.policy = BatchEngine(Writes(trainer), on_callers_thread=True)
    trainer.train()
    logged = [
        entry.get("evolution/mutation_failed")
        for entry in trainer.state.log_history
        if "loss" in entry
    ]
    assert trainer.state.global_step == 3 and 1.0 in logged and len(trainer.population.members) < 3
    assert "the reference LLM did not reply to" in caplog.text


def test_a_full_disk_under_the_journal_ends_no_run(tiny_policy, rows, tmp_path, caplog):
    """What it does not take is written with the next lines, once."""
    trainer = trainer_for(tiny_policy, tmp_path, rows, Reference(), evolution_lag=0)
    trainer.policy = BatchEngine(Writes(trainer), on_callers_thread=True)
    write = trainer._journal.append
    tries = iter(range(100))

    def full_twice(attempts):
        if next(tries) < 2:
            write(attempts[:1])
            raise OSError(28, "No space left on device")
        write(attempts)

    trainer._journal.append = full_twice
    trainer.train()
    assert trainer.state.global_step == 4
    assert caplog.text.count("evolution.jsonl cannot be written") == 1
    assert [line["step"] for line in read_journal(tmp_path / "evolution.jsonl")] == [0, 1, 2]


def test_at_the_last_step_the_reference_is_not_asked_again(tiny_policy, rows, tmp_path):
    """The same command after the end: what was at work for steps that will never come stays
    unasked.
    """
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, Reference(), max_steps=2, save_strategy="steps", save_steps=1
    )
    trainer.policy = BatchEngine(WritesBySeed(trainer), on_callers_thread=True)
    trainer.train()
    assert trainer.evolution.pending
    again = trainer_for(tiny_policy, tmp_path, rows, Reference(), max_steps=2)
    again.train(resume_from_checkpoint=True)
    assert again.reference.children == 0 and again.state_dict() == trainer.state_dict()
    more = trainer_for(tiny_policy, tmp_path, rows, Reference(), max_steps=3)
    more.policy = BatchEngine(WritesBySeed(more), on_callers_thread=True)
    more.train(resume_from_checkpoint=True)
    assert len(more.population.members) > len(trainer.population.members)


@pytest.mark.parametrize(
    "damage", ["{", "{}", '{"population": {}, "batches": 1, "pending": []}', "[]"]
)
def test_a_population_that_was_edited_is_named(tiny_policy, rows, tmp_path, damage):
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, Reference(), max_steps=1, save_strategy="steps", save_steps=1
    )
    trainer.train()
    (tmp_path / "checkpoint-1" / "population.json").write_text(damage)
    again = trainer_for(tiny_policy, tmp_path, rows, Reference(), max_steps=2)
    with pytest.raises(ValueError, match=r"checkpoint-1.*population\.json") as raised:
        again.train(resume_from_checkpoint=True)
    assert "\n" not in str(raised.value)


def test_what_the_reference_spends_is_the_jobs(tiny_policy, rows, tmp_path):
    """15 tokens a call, one call at a time: 40 are reached with the third.

    Nobody else asks anything.
    """

    def run(budget, **resume):
        with OpenAIChat("m", server.base_url, price=(1e6, 1e6), max_concurrency=1) as reference:
            trainer = trainer_for(
                tiny_policy, tmp_path, rows, reference, budget_tokens=budget, evolution_lag=0
            )
            trainer.train(**resume)
            return trainer

    with MisbehavingServer(say=lambda request: Reference()._say(request["messages"])) as server:
        with pytest.raises(TrainingStopped, match="reference LLM.*BudgetExceeded.*45.*40") as it:
            run(40)
        assert "Spent so far: reference $45.0000 (45 tokens)" in str(it.value)
        assert len(server.requests) == 3 and list(tmp_path.glob("checkpoint-*"))
        with pytest.raises(BudgetExceeded, match="45 of the budget of 40"):
            run(40, resume_from_checkpoint=True)  # found out before the model is loaded
        assert len(server.requests) == 3, "a restart does not get the budget again"
        assert run(10_000, resume_from_checkpoint=True).state.global_step == 4


@pytest.mark.parametrize("lag", [0, 1])
def test_resumed_run_is_the_uninterrupted_one(tiny_policy, rows, tmp_path, lag):
    """Stopped after two of four steps: same selections, ratings, children and losses afterwards."""

    class Replays(Reference):
        """The same reply to the same question, as a recorded reference gives."""

        def _say(self, messages):
            request = messages[-1]["content"]
            return (
                EDIT % (len(request) % 1000)
                if "JSON" in request
                else "It went wrong at the second step."
            )

    def run(folder, checkpoint=None, **changes):
        trainer = trainer_for(
            tiny_policy, folder, rows, Replays(), evolution_lag=lag, p_crossover=0.5, **changes
        )
        trainer.policy = BatchEngine(WritesBySeed(trainer), on_callers_thread=True)
        trainer.train(resume_from_checkpoint=checkpoint)
        losses = [
            (e["step"], e["loss"], e["reward"]) for e in trainer.state.log_history if "loss" in e
        ]
        return trainer.state_dict(), losses

    whole, losses = run(tmp_path / "whole", save_strategy="steps", save_steps=2)
    resumed, again = run(tmp_path / "resumed", checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed == whole and again == losses
    assert len(whole["population"]["members"]) > 1


def test_a_checkpoint_with_an_edited_population_is_named(tiny_policy, rows, tmp_path):
    trainer_for(
        tiny_policy, tmp_path, rows, save_strategy="steps", save_steps=2, max_steps=2
    ).train()
    path = tmp_path / "checkpoint-2" / "population.json"
    path.write_text(path.read_text().replace('"rating"', '"belief"'))
    with pytest.raises(
        ValueError, match=r"checkpoint-2/population\.json cannot be resumed.*'rating' is missing"
    ):
        trainer_for(tiny_policy, tmp_path, rows).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("lag", [0, 1])
def test_the_policy_as_its_own_reflector(tiny_policy, rows, tmp_path, lag):
    """What a random policy writes is rubbish: counted as failed, and training goes on."""

    def run(folder, checkpoint=None, **changes):
        trainer = trainer_for(
            tiny_policy,
            folder,
            rows,
            NOBODY,
            reflector="policy",
            evolution_lag=lag,
            max_completion_length=900,
            **changes,
        )
        trainer.policy = BatchEngine(WritesBySeed(trainer), on_callers_thread=True)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    trainer = run(tmp_path / "whole", save_strategy="steps", save_steps=2)
    logged = [entry for entry in trainer.state.log_history if "evolution/calls" in entry]
    assert len(logged) == 3 - lag and all(entry["evolution/calls"] > 0 for entry in logged)
    assert all(entry["evolution/mutation_failed"] == 1.0 for entry in logged)
    assert len(trainer.population.members) == 1
    resumed = run(tmp_path / "resumed", str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.state_dict() == trainer.state_dict()


def test_what_the_policy_writes_becomes_a_prompt(tiny_policy, rows, tmp_path):
    """Its edits are read as a reference LLM's are; the conversation it gets is the real one."""
    trainer = trainer_for(
        tiny_policy, tmp_path, rows, NOBODY, reflector="policy", evolution_lag=0, max_steps=2
    )
    asked = []

    async def write(messages, **options):
        asked.append(messages)
        return Reply(EDIT % 7 if "JSON" in messages[-1]["content"] else "It went wrong.")

    trainer._reflector.write = write
    trainer.train()
    assert [member.prompt.principles for member in trainer.population.members[1:]] == [
        ("Ask first .", "Principle number 7.")
    ]
    assert asked[0][0]["content"].startswith("Task: retell")


def test_an_evaluation_has_groups_of_its_own_size(tiny_policy, rows, tmp_path):
    """Where the baseline is over all prompts of a problem, a group of training is larger than one
    of an evaluation.
    """
    options = {"baseline": "marginalize", "per_device_eval_batch_size": 4}
    trainer = trainer_for(tiny_policy, tmp_path, rows, **options)
    trainer.policy = BatchEngine(WritesBySeed(trainer), on_callers_thread=True)
    metrics = trainer.evaluate(rows.select(range(4)))
    assert [name for name in metrics if "pass@" in name] == ["eval_pass@1", "eval_pass@2"]


def test_a_batch_that_a_resumed_run_plays_again_is_rated_once(tiny_policy, rows, tmp_path):
    """Training stops in the second batch of a step, and the step is played again: its first batch
    was rated before.
    """
    reference = Reference()
    two = {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 2}

    def build():
        trainer = trainer_for(tiny_policy, tmp_path, rows, reference, **two)
        trainer.policy = BatchEngine(WritesBySeed(trainer), on_callers_thread=True)
        return trainer

    stopped = build()
    reasons = iter(["", "down"])
    stopped.monitor.failures.check_batch = lambda *facts, **options: next(reasons)
    with pytest.raises(TrainingStopped, match="stopped at step 0: down"):
        stopped.train()
    assert stopped.evolution.batches == 1
    resumed = build()
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 2 and resumed.evolution.batches == 4


def test_bad_arguments(tiny_policy, rows, tmp_path):
    numbers = r"make that 6 or 12 \(per_device_train_batch_size x processes x steps_per_generation = 8 x 1 x 1\)"
    with pytest.raises(
        ValueError, match=r"3 x 2 = 6 rollouts, which does not divide .* of 8: " + numbers
    ):
        arguments(tmp_path, prompts_per_step=3)
    assert arguments(tmp_path, prompts_per_step=2).describe_batch() == (
        "a batch is 2 problems x 2 prompts (prompts_per_step) x 2 rollouts (num_generations) = 8 "
        "rollouts (per_device_train_batch_size x processes x steps_per_generation = 8 x 1 x 1)"
    )
    with pytest.raises(ValueError, match="between 0 and 1"):
        arguments(tmp_path, p_crossover=1.2)
    for name in (
        "mode",
        "baseline",
        "prompt_place",
        "reflect_on",
        "reflector",
        "selection",
        "best_rule",
    ):
        with pytest.raises(ValueError, match=name):
            arguments(tmp_path, **{name: "other"})
    with pytest.raises(ValueError, match="phase_steps=3 must be a multiple of 2"):
        arguments(tmp_path, mode="alternating", phase_steps=3, num_iterations=2)
    with pytest.raises(ValueError, match="needs a reference"):
        ESPLTrainer(str(tiny_policy), reward_by_word, arguments(tmp_path), rows)
    with pytest.raises(ValueError, match="would never be called"):
        ESPLTrainer(
            str(tiny_policy),
            reward_by_word,
            arguments(tmp_path, reflector="policy"),
            rows,
            reference=Reference(),
        )


def test_prompt_r1_under_an_evolving_prompt(tiny_policy, rows, tmp_path):
    """Both methods at once: the agent asks the oracle, and what it is told in advance evolves."""
    from agentic_prompting import LLMEnvironment, PromptR1Reward
    from agentic_prompting.sandbox import Oracle
    from agentic_prompting.sandbox.policy import SANDBOX_TEMPLATE
    from support.training import Acts

    trainer = ESPLTrainer(
        model=str(tiny_policy),
        reward_funcs=PromptR1Reward(),
        reference=Reference(),
        args=arguments(
            tmp_path,
            evolution_lag=0,
            max_steps=2,
            max_turns=3,
            max_turn_tokens=24,
            max_completion_length=160,
        ),
        train_dataset=rows,
        initial_prompt="Answer .\n[G0]. Ask first .",
        environment=LLMEnvironment(Oracle()),
        prompt_template=SANDBOX_TEMPLATE,
    )
    trainer.policy = BatchEngine(Acts(trainer), on_callers_thread=True)
    trainer.train()
    records = list(read_rollouts(tmp_path / "rollouts"))
    assert {len(record["turns"]) for record in records} == {2}
    assert {record["rewards"]["prompt_r1_reward"] for record in records} == {0.0, 1.0}
    assert len(trainer.population.members) == 2
    told = trainer.reference.calls[0][-1]["content"]
    assert "<interaction_prompt>" in told and "[reply]" in told, (
        "the reference reads the whole conversation"
    )


def test_search_under_an_evolving_prompt(tiny_policy, rows, tmp_path):
    from agentic_prompting import SearchEnvironment, search_reward
    from agentic_prompting.environments import BM25Retriever, SearchGrammar

    trainer = ESPLTrainer(
        model=str(tiny_policy),
        reward_funcs=search_reward,
        reference=Reference(),
        args=arguments(tmp_path, max_steps=1),
        train_dataset=rows,
        initial_prompt=SystemPrompt("Use the tool ."),
        environment=SearchEnvironment(BM25Retriever(["Nairobi is the capital of Kenya"])),
    )
    assert isinstance(trainer.chat_format.grammar, SearchGrammar)
    trainer.train()
    trainer.save_model(str(tmp_path))
    assert AgentSpec.load(tmp_path, grammar=SearchGrammar()).grammar == SearchGrammar()


def test_a_template_without_a_place_for_the_evolved_prompt_is_refused_before_training(
    tiny_policy, rows, tmp_path
):
    """Their place is the system message, unless told otherwise; reinforcement learning alone has
    none to put there.
    """
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    refuses = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    )
    tokenizer.chat_template = refuses + tokenizer.chat_template

    def trainer(**changes):
        return ESPLTrainer(
            str(tiny_policy),
            reward_by_word,
            args=arguments(tmp_path, **changes),
            reference=Reference(),
            train_dataset=rows,
            grammar=FreeText(),
            processing_class=tokenizer,
        )

    with pytest.raises(ValueError, match="system.*prompt_place='user'"):
        trainer()
    for changes in ({"prompt_place": "user"}, {"mode": "rl"}):
        trainer(**changes)
