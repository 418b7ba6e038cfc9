"""Fewer calls: each rule by itself, and that its estimate of the gradient is unbiased, by enumeration."""

import asyncio
import itertools
import random
import re
import threading
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agentic_prompting import LLMEnvironment
from agentic_prompting.llm import Reply, RoutedChat, ScriptedChat, Usage
from agentic_prompting.report.summary import RunSummary, cost_points
from agentic_prompting.rewards import CostReward, exact_match_reward
from agentic_prompting.rollout import BatchEngine, Observation, Rollout, Sample, parse_turn, read_rollouts
from agentic_prompting.trainers import ESPLConfig
from agentic_prompting.trainers.saving_calls import (
    CallSaver,
    Curriculum,
    EndsHopeless,
    Growth,
    group_weight,
    honest_advantages,
)
from support.training import ASK, END, arguments, one_batch, trainer_for

# A policy of one decision between three actions with these chances, each with a reward of its own: everything that can
# happen in a group of four is enumerated, with its exact probability.
CHANCES, REWARDS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64), torch.tensor([1.0, 0.0, -1.0]).double()
N = 4


def score(action):
    """d log pi(action) / d logits"""
    return torch.eye(3, dtype=torch.float64)[action] - CHANCES


def expected(estimate):
    """The expectation of `estimate(actions)`, a gradient, over all groups."""
    total = torch.zeros(3, dtype=torch.float64)
    for actions in itertools.product(range(3), repeat=N):
        total += CHANCES[list(actions)].prod() * estimate(actions)
    return total


def gradient(actions, advantages):
    return sum(advantage * score(action) for action, advantage in zip(actions, advantages, strict=True))


def full(actions, scale=False):
    rewards = REWARDS[list(actions)]
    advantages = rewards - rewards.mean()
    return gradient(actions, advantages / (rewards.std() + 1e-4) if scale else advantages)


@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("chance", [1.0, 0.5, 0.1])
def test_groups_that_grow_have_the_gradient_of_full_groups(chance, scale):
    """Whatever the advantages are: the weight multiplies the whole group."""

    def grown(actions):
        first = REWARDS[list(actions[:2])].tolist()
        kept = group_weight(first, chance, draw=0.0) * full(actions, scale)
        left = group_weight(first, chance, draw=chance) * full(actions, scale) if chance < 1 else 0
        return chance * kept + (1 - chance) * left

    assert torch.allclose(expected(grown), expected(lambda actions: full(actions, scale)), atol=1e-12)
    unweighted = expected(lambda actions: full(actions) * (len({*actions[:2]}) > 1))
    assert not torch.allclose(unweighted, expected(full), atol=1e-3), "without the weights it would be another"


def test_what_a_group_counts():
    assert group_weight([1.0, 0.0], 0.1, 0.99) == 1 == group_weight([None, 0.0], 0.1, 0.99)
    assert [group_weight([1.0, 1.0], 0.25, draw) for draw in (0.0, 0.24, 0.25, 0.9)] == [4, 4, 0, 0]


def test_the_chance_of_growing_has_the_least_noise_for_the_calls():
    """By brute force, with questions of which none, many or nearly all are settled: two rollouts first, eight in all.
    Where replies are shared the rest costs less, and is left out less often."""
    draw, chances = np.random.default_rng(0), np.linspace(0.05, 1, 96)
    for settled in (0.0, 0.8, 0.97):
        p = np.where(draw.random(40_000) < settled, 1.0, draw.random(40_000))
        right = draw.random((40_000, 8)) < p[:, None]
        same, spread = right[:, 0] == right[:, 1], right.any(1) & ~right.all(1)
        growth = Growth(2, 8)
        for group in right[:2000].astype(float).tolist():
            growth.note(group)
        for paid in (1.0, 0.2):
            # A group with a spread has an advantage of one size, one without has none: the mean square is the noise.
            noise = (spread & ~same).mean() + (spread & same).mean() / chances
            calls = 2 + 6 * paid * ((~same).mean() + same.mean() * chances)
            best = (noise * calls).min()
            found = np.interp(growth.chance(paid), chances, noise * calls)
            assert found <= 1.02 * best, (settled, paid)
            assert growth.chance(paid) <= growth.chance(0.2)
    assert growth.chance(1.0) < 1 == growth.chance(0.2) == Growth(2, 8).chance(1.0), "nearly all settled; nothing known"


@pytest.mark.parametrize("share", [1.0, 0.5, 0.2])
def test_hopeless_rollouts_left_out_by_chance_leave_the_gradient_as_it_is(share):
    """Actions 1 and 2 turn out hopeless; each of them is played on with probability `share`."""

    def by_chance(actions):
        total = torch.zeros(3, dtype=torch.float64)
        hopeless = [i for i, action in enumerate(actions) if action > 0]
        for played in itertools.product((True, False), repeat=len(hopeless)):
            rewards, weights, chance = REWARDS[list(actions)].clone(), torch.ones(N).double(), 1.0
            for i, on in zip(hopeless, played, strict=True):
                weights[i] = 1 / share if on else 0.0
                rewards[i] = rewards[i] if on else torch.nan
                chance *= share if on else 1 - share
            total += chance * gradient(actions, honest_advantages(rewards[None], weights[None])[0])
        return total

    assert torch.allclose(expected(by_chance), expected(full), atol=1e-12)


def test_advantages_without_weights_are_those_of_the_group():
    rewards = torch.tensor([[1.0, 0.0, 0.5, torch.nan]])
    there = torch.tensor([1.0, 0.0, 0.5])
    ones = torch.ones(1, 4)
    assert torch.allclose(honest_advantages(rewards, ones)[0, :3], there - there.mean())
    scaled = (there - there.mean()) / (there.std() + 1e-4)
    assert torch.allclose(honest_advantages(rewards, ones, scale=True)[0, :3], scaled)
    assert honest_advantages(rewards, ones)[0, 3] == 0, "failed: no part in its group"
    assert not honest_advantages(torch.full((1, 4), torch.nan), ones).any()


@pytest.mark.parametrize("scale", [False, True])
def test_a_group_without_a_spread_has_no_advantages_whatever_its_weights(scale):
    """Four of eight were left out and the others count twice, all of them wrong: there is nothing to learn, and no
    deviation of 0 to divide by."""
    rewards = torch.tensor([[-1.0] * 4 + [torch.nan] * 4])
    assert not honest_advantages(rewards, torch.tensor([[2.0] * 4 + [0.0] * 4]), scale).any()
    rewards[0, 0] = 1.0
    known = honest_advantages(rewards, torch.tensor([[1.0] + [2.0] * 3 + [0.0] * 4]), scale)
    assert known[0, 0] > 0 > known[0, 1] and known.abs().max() < 8 and not known[0, 4:].any()


def test_what_cannot_be_saved_is_not_asked_for_and_a_share_is_played_on():
    asked = []

    class Asked:
        grammar = "its own"

        def step(self, rollout):
            asked.append(rollout.seed)
            return Observation("ok")

    environment = EndsHopeless(Asked(), lambda rollout: rollout.row["lost"], share=0.25)
    assert environment.grammar == "its own"
    rollouts = [Rollout([1], {"lost": seed % 2 == 0}, seed, batch="1") for seed in range(800)]
    for rollout in rollouts:
        rollout.add_turn(Sample([2]), parse_turn("<interaction_prompt>q</interaction_prompt>"))
        said = asyncio.run(environment.step(rollout))
        assert (said is None) == (rollout.weight == 0)
        assert rollout.weight in ((0, 4) if rollout.row["lost"] else (1,))
    on = sum(rollout.weight == 4 for rollout in rollouts)
    assert len(asked) == 400 + on and 70 < on < 130
    alone = Rollout([1], {"lost": True}, 3)
    assert asyncio.run(environment.step(alone)).text == "ok" and alone.weight == 1, "evaluation plays everything"


# --- the curriculum -----------------------------------------------------------------------------------------------


def test_a_question_is_settled_after_visits_without_spread():
    known = Curriculum(patience=2, rare=0.1)
    known.observe("q", [1.0, 1.0])
    assert not known.settled("q")
    known.observe("q", [0.0, 0.0, 0.0])
    assert known.settled("q") and not known.settled("other")
    known.observe("q", [1.0])
    assert known.settled("q"), "one rollout has no spread to show"
    known.observe("q", [1.0, 0.0])
    assert not known.settled("q")


def test_settled_questions_come_back_rarely_and_another_takes_their_place():
    known, rows = Curriculum(patience=1, rare=0.2), ["easy", "hard", "open 1", "open 2"]
    for question in rows[:2]:
        known.observe(question, [1.0, 1.0])
    draw = random.Random(0)
    instead = [known.instead("easy", rows, draw) for _ in range(1000)]
    assert 150 < instead.count(None) < 250 and set(instead) == {None, 2, 3}
    assert known.instead("open 1", rows, draw) is None
    for question in rows:
        known.observe(question, [1.0, 1.0])
    assert known.instead("easy", rows, random.Random(0)) in range(4), "where all are settled any will do"


def test_its_state_goes_on_as_it_was():
    known, twin = Curriculum(2, 0.1), Curriculum(2, 0.1)
    for question in "aab":
        known.observe(question, [0.0, 0.0])
    twin.load_state_dict(known.state_dict())
    for one in (known, twin):
        one.observe("b", [0.0, 0.0])
    assert [twin.settled(question) for question in "abc"] == [known.settled(question) for question in "abc"]
    assert twin.state_dict() == known.state_dict()


# --- in a trainer -------------------------------------------------------------------------------------------------


class Plays:
    """Answers at once, and `right(question, place in the group)` says whether rightly."""

    def __init__(self, trainer, right):
        self.trainer, self.right, self.played = trainer, right, Counter()

    def __call__(self, requests):
        return [self._turn(request) for request in requests]

    def _turn(self, request):
        chat_format = self.trainer.chat_format
        text = chat_format.tokenizer.decode(request.context)
        row = next(row for row in self.trainer.train_dataset if row["question"] in text)
        place = self.played[row["question"]]
        self.played[row["question"]] += 1
        return Sample(
            chat_format.turn_ids(END.format(row["answers"][0] if self.right(row["question"], place) else "x"))
        )


def batch_of(policy, folder, rows, right, questions=(0, 1), **changes):
    """A batch of groups of four; the trainer, what it was given, and how often each question was played."""
    changes = {"num_generations": 4, "per_device_train_batch_size": 8, "reward_funcs": exact_match_reward, **changes}
    funcs = changes.pop("reward_funcs")
    trainer = trainer_for(policy, folder, rows, options={"reward_funcs": funcs}, **changes)
    plays = Plays(trainer, right)
    trainer.policy = BatchEngine(plays, on_callers_thread=True)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    scored = trainer._generate_and_score_completions([rows[i] for i in questions for _ in range(4)])
    return trainer, scored, plays.played


def test_a_group_whose_first_rollouts_agree_stays_small(tiny_policy, rows, tmp_path):
    easy, hard = rows[0]["question"], rows[1]["question"]
    right = lambda question, place: question == easy or place % 2 == 0  # noqa: E731
    trainer, scored, played = batch_of(tiny_policy, tmp_path, rows, right, group_start=2, group_chance=1e-9)
    assert played == {easy: 2, hard: 4}
    in_loss = scored["tool_mask"] * scored["completion_mask"]
    assert not scored["advantages"][:4].any() and not in_loss[:4].any(), "nothing of it is in the loss"
    assert (scored["advantages"][4:] > 0).tolist() == [True, False, True, False] and in_loss[4:].any(1).all()
    logged = trainer._metrics["train"]
    assert logged["rollout/left_out"] == [0.25] and logged["rollout/answered"] == [1.0]
    records = list(read_rollouts(tmp_path / "rollouts"))
    assert [record["status"] for record in records] == ["answered"] * 2 + ["left_out"] * 2 + ["answered"] * 4


def test_a_group_that_grows_by_chance_counts_more(tiny_policy, rows, tmp_path):
    right = lambda question, place: place < 3  # noqa: E731  # the first two agree, the fourth does not
    _, full, _ = batch_of(tiny_policy, tmp_path / "full", rows, right)
    _, scored, played = batch_of(tiny_policy, tmp_path, rows, right, group_start=2, group_chance=0.999)
    assert set(played.values()) == {4}
    assert torch.allclose(scored["advantages"], full["advantages"] / 0.999)


@pytest.mark.parametrize(("share", "paid"), [("never", 1.0), ("step", 0.25)])
def test_where_replies_are_shared_less_is_left_out(tiny_policy, rows, tmp_path, share, paid):
    """Further replies are nearly free then. By what was paid in the batch before: the gradient has no bias by it."""
    chat = ScriptedChat(["ok"])
    environment = LLMEnvironment(chat, share_replies=share)
    settings = {"num_generations": 4, "per_device_train_batch_size": 8, "group_start": 2, "hopeless_share": 0.2}
    trainer = trainer_for(tiny_policy, tmp_path, rows, environment=environment, group_chance=0.01, **settings)
    asks, ends = (trainer.chat_format.turn_ids(text) for text in (ASK, END.format("x")))
    answered = trainer.chat_format.tokenizer.convert_tokens_to_ids("<interaction_response>")
    acts = lambda requests: [Sample(ends if answered in one.context else asks) for one in requests]  # noqa: E731
    trainer.policy = BatchEngine(acts, on_callers_thread=True)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    batch = [rows[i] for i in (0, 1) for _ in range(4)]
    trainer._generate_and_score_completions(batch)
    assert (trainer._saver.paid, trainer.environment.share) == (1, 0.2)
    trainer.load_resume_state(trainer.resume_state())
    trainer.state.global_step = 1
    trainer._generate_and_score_completions(batch)
    assert (trainer._saver.paid, trainer.environment.share) == (paid, 0.2 / paid)
    assert trainer._saver.growth.seen == {"differed": 0, "agreed": 3.6, "grown": 0, "spread": 0}, "two batches of two"
    seen = [one for record in read_rollouts(tmp_path / "rollouts") for one in record["observations"]]
    assert sum(not one["shared"] for one in seen) == len(chat.calls) < len(seen) + (share == "never")


def test_a_group_that_teaches_nothing_gives_its_place_to_another(tiny_policy, rows, tmp_path):
    first = {rows[i]["question"] for i in (0, 1)}
    right = lambda question, place: question in first or place % 2 == 0  # noqa: E731
    _, scored, played = batch_of(tiny_policy, tmp_path, rows, right, refill_rounds=8)
    assert all(played[question] % 4 == 0 for question in first) and sum(played.values()) >= 16
    assert (scored["advantages"] != 0).all(), "a whole batch to learn from"
    records = list(read_rollouts(tmp_path / "rollouts"))
    kept = [record for record in records if record["mode"] == "train"]
    assert not first & {record["question"] for record in kept}
    assert [record["rewards"]["exact_match_reward"] for record in kept] == [1, 0, 1, 0] * 2, "scored by its own gold"
    assert len(records) == sum(played.values()), "what was paid for is recorded"


def test_settled_questions_give_way_and_the_state_is_in_the_checkpoint(tiny_policy, rows, tmp_path):
    settings = {"curriculum_rare": 1e-9, "curriculum_patience": 1}
    trainer, _, _ = batch_of(tiny_policy, tmp_path, rows, lambda question, place: True, **settings)
    twin = batch_of(tiny_policy, tmp_path / "twin", rows, lambda question, place: place % 2, **settings)[0]
    twin.load_resume_state(trainer.resume_state())
    chosen = [one._saver.choose([rows[0]] * 4 + [rows[5]] * 4, 0, "7.0") for one in (trainer, twin)]
    assert chosen[0] == chosen[1] and chosen[0][4:] == [rows[5]] * 4
    instead = chosen[0][:4]
    assert instead[0] not in (rows[0], rows[1]) and instead == [instead[0]] * 4, "one question for the whole group"


@pytest.mark.parametrize(("unit", "weight", "cost"), [("calls", 0.1, 0.1), ("usd", 2.0, 0.5)])
def test_a_price_in_the_reward(tiny_policy, rows, tmp_path, unit, weight, cost):
    chat = ScriptedChat(lambda messages: Reply("ok", usage=Usage(1, 1, 0.25)))
    trainer = trainer_for(tiny_policy, tmp_path, rows, chat=chat, cost_weight=weight, cost_unit=unit)
    one_batch(trainer)
    records = list(read_rollouts(tmp_path / "rollouts"))
    assert [record["rewards"]["cost_reward"] for record in records] == [-cost] * 4
    assert [round(r["rewards"]["prompt_r1_reward"] - r["reward"], 6) for r in records] == [cost] * 4
    reply = Reply("ok", saved=Usage(1, 1, 0.25), shared=True)
    rollout = Rollout([1], observations=[Observation("ok", replies=(reply,))])
    assert CostReward(2.0)([rollout]) == [-0.5], "as dear to who shares a reply as to who paid"


def test_the_front_of_a_cheap_and_a_dear_model(tiny_policy, rows, tmp_path):
    """The cheap model knows one question of two, the dear one both; a rule that tells them apart is as good as the dear
    one alone, for less. The report's front has it, and not the dear one."""
    easy, gold = rows[0]["question"], {row["question"]: row["answers"][0] for row in rows}

    def model(known, usd):
        says = lambda messages: gold[asked] if (asked := messages[-1]["content"]) in known else "no idea"  # noqa: E731
        return ScriptedChat(lambda messages: Reply(says(messages), usage=Usage(1, 1, usd)))

    def passes_on(request):
        text = trainer.chat_format.tokenizer.decode(request.context)
        said = re.search(r"<interaction_response>(.*?)</interaction_response>", text)
        asked = next(question for question in gold if question in text)
        turn = END.format(said[1].strip()) if said else f"<interaction_prompt> {asked} </interaction_prompt>"
        return Sample(trainer.chat_format.turn_ids(turn))

    rules = {
        "cheap": lambda question, names: "small",
        "routed": lambda question, names: "small" if question == easy else "large",
        "dear": lambda question, names: "large",
    }
    for name, rule in rules.items():
        chat = RoutedChat({"small": model({easy}, 0.01), "large": model(set(gold), 0.1)}, rule)
        environment = LLMEnvironment(chat, share_replies="group")
        trainer = trainer_for(tiny_policy, tmp_path / name, rows, environment=environment, cost_weight=2.0)
        trainer.policy = BatchEngine(
            lambda requests: [passes_on(request) for request in requests], on_callers_thread=True
        )
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        trainer._generate_and_score_completions([rows[i] for i in (0, 0, 1, 1)])
    points = cost_points([RunSummary.read(tmp_path / name) for name in rules], list(rules))
    assert [(one.name, round(one.usd, 3), one.mean, one.front) for one in points] == [
        ("cheap", 0.01, 0.5, True),
        ("routed", 0.055, 1.0, True),
        ("dear", 0.1, 1.0, False),
    ]


def test_what_makes_no_sense_is_refused(tiny_policy, rows, tmp_path):
    for wrong in (
        {"group_start": 1},
        {"group_start": 3},
        {"group_chance": 0},
        {"refill_rounds": -1},
        {"cost_unit": "x"},
    ):
        with pytest.raises(ValueError, match="|".join(wrong)):
            arguments(tmp_path, **wrong)
    with pytest.raises(ValueError, match="not for E-SPL"):
        ESPLConfig(str(tmp_path), refill_rounds=1, bf16=False)
    with pytest.raises(ValueError, match="hopeless"):
        trainer_for(tiny_policy, tmp_path, rows, hopeless_share=0.5, options={"reward_funcs": exact_match_reward})


def test_form_that_is_lost_ends_the_episode(tiny_policy, rows, tmp_path):
    """Three turns, two of them requests without a thought: with the last one the form cannot be reached any more."""
    chat, lost = ScriptedChat(["ok"]), "<interaction_prompt> {} </interaction_prompt>"
    trainer = trainer_for(tiny_policy, tmp_path, rows, chat=chat, hopeless_share=1e-9)
    ask = trainer.chat_format.turn_ids(lost.format("what ?"))
    trainer.policy = BatchEngine(lambda requests: [Sample(ask) for _ in requests], on_callers_thread=True)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    scored = trainer._generate_and_score_completions([rows[i] for i in (0, 0, 1, 1)])
    assert len(chat.calls) == 4, "the second request of each is not answered"
    assert not scored["advantages"].any() and not (scored["tool_mask"] * scored["completion_mask"]).any()
    assert {record["reward"] for record in read_rollouts(tmp_path / "rollouts")} == {None}


def test_processes_whose_groups_straddle_decide_alike():
    """Two processes with six places each, groups of four: what they play together is what one process would play."""
    rows = [{"question": f"q{i}"} for i in range(9)]
    settings = SimpleNamespace(
        group_start=2, group_chance=0.5, refill_rounds=2, curriculum_rare=1.0, curriculum_patience=2
    )

    def run(processes):
        size, waiting = 12 // processes, threading.Barrier(processes)
        given, done = [None] * processes, [None] * processes

        def process(number):
            saver, first = CallSaver(settings, rows, n=4, seed=3), number * size

            def gather(mine):
                given[number] = mine
                waiting.wait(30)
                together = [one for part in given for one in part]
                waiting.wait(30)
                return together

            def begin(i, row):
                return Rollout([1], dict(row), seed=first + i)

            def play(some):
                for one in some:
                    one.add_turn(Sample([2]), parse_turn("<answer>a</answer>"))
                    one.finish("answered")

            def earn(some):  # q0 to q5 teach nothing
                return [one.seed % 2 * float(int(one.row["question"][1:]) > 5) for one in some]

            rollouts = [begin(i, rows[(first + i) // 4]) for i in range(size)]
            saver.play(rollouts, first, "1.0", play, earn, begin, gather)
            told = [(one.row["question"], one.status, one.weight, len(one.turns)) for one in rollouts]
            done[number] = told, saver.group_weights, saver.curriculum.state_dict(), len(saver.discarded)

        threads = [threading.Thread(target=process, args=(number,)) for number in range(processes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        told, weights, states, discarded = zip(*done, strict=True)
        assert all(one == weights[0] for one in weights) and all(one == states[0] for one in states)
        return [one for part in told for one in part], weights[0], states[0], sum(discarded)

    alone = run(1)
    assert run(2) == alone == run(3)
    assert {0, 1}.intersection(alone[1].values()) and alone[3] > 0
