"""E-SPL (arXiv 2602.14697), row by row; see `papers.py`."""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import chain, pairwise
from pathlib import Path
from statistics import NormalDist
from typing import Any

import yaml

from agentic_prompting.data import PAIRS, TASKS
from agentic_prompting.environments.search import SearchGrammar, read_call
from agentic_prompting.evolution import (
    Attempt,
    Draft,
    Edit,
    ESPLSettings,
    Population,
    ProblemResult,
    PromptResult,
    Rating,
    SystemPrompt,
    best_result,
    common_means,
    crossover,
    mutate,
    rate,
    sole_wins,
)
from agentic_prompting.llm import Message, ScriptedChat
from agentic_prompting.rewards import search_reward
from agentic_prompting.rollout import Rollout, Sample
from benchmarks.fidelity.check import Part, Row

EXAMPLES = Path(__file__).parents[2] / "examples"
MU0 = 25.0
SIGMA0 = 25 / 3
BETA = 25 / 6
TAU = 25 / 300
P_DRAW = 0.1
NORMAL = NormalDist()

# --- Appendix B: TrueSkill, as the appendix writes it ---------------------------------------------

EPS_ABS = NORMAL.inv_cdf((P_DRAW + 1) / 2) * math.sqrt(2) * BETA


def corrections(t: float, eps: float, draw: bool) -> tuple[float, float]:
    """v and w of the truncated Gaussian."""
    if not draw:
        v = NORMAL.pdf(t - eps) / NORMAL.cdf(t - eps)
        return v, v * (v + t - eps)
    mass = NORMAL.cdf(eps - t) - NORMAL.cdf(-eps - t)
    v = (NORMAL.pdf(-eps - t) - NORMAL.pdf(eps - t)) / mass
    return v, v * v + ((eps - t) * NORMAL.pdf(eps - t) - (-eps - t) * NORMAL.pdf(-eps - t)) / mass


def message_passing(
    ratings: Sequence[tuple[float, float]], places: Sequence[int]
) -> list[tuple[float, float]]:
    """Expectation propagation over the chain of adjacent comparisons, repeated until nothing
    changes.
    """
    order = sorted(range(len(ratings)), key=lambda i: places[i])
    # Mean and variance of each player, best place first; the dynamics add tau^2.
    skills = [(ratings[i][0], ratings[i][1] ** 2 + TAU**2) for i in order]
    pi0 = [1 / (variance + BETA**2) for _, variance in skills]
    tau0 = [mu / (variance + BETA**2) for mu, variance in skills]

    # The message of each comparison to each of its two players: precision, precision times mean.
    pairs = list(pairwise(range(len(order))))
    messages = {}
    for number, (i, j) in enumerate(pairs):
        messages[number, i] = (0.0, 0.0)
        messages[number, j] = (0.0, 0.0)

    def messages_to(player: int, without: int | None = None) -> list[tuple[float, float]]:
        numbers = [number for number in (player - 1, player) if number != without]
        return [messages[number, player] for number in numbers if (number, player) in messages]

    for _ in range(2000):
        moved = 0.0
        for number, (i, j) in enumerate(pairs):
            # The beliefs about both players that come from all other comparisons.
            cavity = {}
            for player in (i, j):
                received = messages_to(player, without=number)
                precision = pi0[player] + sum(message[0] for message in received)
                weighted_mean = tau0[player] + sum(message[1] for message in received)
                cavity[player] = (precision, weighted_mean)
            mu_i = cavity[i][1] / cavity[i][0]
            mu_j = cavity[j][1] / cavity[j][0]
            var_i = 1 / cavity[i][0]
            var_j = 1 / cavity[j][0]

            # What the comparison says, as a message to both.
            c = math.sqrt(var_i + var_j)
            is_draw = places[order[i]] == places[order[j]]
            v, w = corrections((mu_i - mu_j) / c, EPS_ABS / c, is_draw)
            for player, mu, var, sign in ((i, mu_i, var_i, 1), (j, mu_j, var_j, -1)):
                mean = mu + sign * var / c * v
                variance = var * (1 - var / c**2 * w)
                precision, weighted_mean = cavity[player]
                new = (max(0.0, 1 / variance - precision), mean / variance - weighted_mean)
                old = messages[number, player]
                moved = max(moved, abs(new[0] - old[0]), abs(new[1] - old[1]))
                messages[number, player] = new
        if moved < 1e-14:
            break

    # The belief about each skill after the game, in the order of the arguments.
    after: list[tuple[float, float]] = [(0.0, 0.0)] * len(order)
    for player, (mu, variance) in enumerate(skills):
        received = messages_to(player)
        pi_message = sum(message[0] for message in received)
        tau_message = sum(message[1] for message in received)
        pi_skill = pi_message / (1 + BETA**2 * pi_message)
        tau_skill = tau_message / (1 + BETA**2 * pi_message)
        precision = 1 / variance + pi_skill
        mean = (mu / variance + tau_skill) / precision
        after[order[player]] = (mean, math.sqrt(1 / precision))
    return after


def rate_tuples(
    ratings: Sequence[tuple[float, float]], scores: Sequence[float]
) -> list[tuple[float, float]]:
    """The package's `rate`, with (mu, sigma) for a rating."""
    before = [Rating(mu, sigma) for mu, sigma in ratings]
    return [(rating.mu, rating.sigma) for rating in rate(before, scores)]


def rating_constants() -> Iterator[Row]:
    from agentic_prompting.evolution import population as module

    fresh = Rating()
    yield Row("Appendix B", "mu_0 = 25, sigma_0 = 25/3", (MU0, SIGMA0), (fresh.mu, fresh.sigma))
    constants = {"BETA": BETA, "TAU": TAU, "DRAW_PROBABILITY": P_DRAW, "EXPLORATION": 2.0}
    for name, value in constants.items():
        yield Row("Appendix B", f"{name.lower()} = {value:.4g}", value, getattr(module, name))


def closed_forms() -> Iterator[Row]:
    start = [(MU0, SIGMA0)] * 2
    c = math.sqrt(2 * (SIGMA0**2 + TAU**2 + BETA**2))
    s2 = SIGMA0**2 + TAU**2

    v, w = corrections(0.0, EPS_ABS / c, draw=False)
    mean = s2 / c * v
    deviation = math.sqrt(s2 * (1 - s2 / c**2 * w))
    expected = [(MU0 + mean, deviation), (MU0 - mean, deviation)]
    yield Row(
        "Appendix B",
        "two fresh prompts, one wins: the closed form",
        expected,
        rate_tuples(start, [0.9, 0.1]),
        1e-6,
    )

    v, w = corrections(0.0, EPS_ABS / c, draw=True)
    deviation = math.sqrt(s2 * (1 - s2 / c**2 * w))
    yield Row(
        "Appendix B",
        "two fresh prompts, a draw",
        [(MU0, deviation)] * 2,
        rate_tuples(start, [0.5, 0.5]),
        1e-6,
    )


def rankings() -> Iterator[Row]:
    expected = message_passing([(MU0, SIGMA0)] * 3, [0, 1, 1])
    yield Row(
        "Appendix B",
        "three fresh prompts, two tied behind one",
        expected,
        rate_tuples([(MU0, SIGMA0)] * 3, [0.9, 0.4, 0.4]),
        1e-4,
    )

    rng = random.Random(0)
    for n in (2, 3, 5):
        largest = 0.0
        for _ in range(60):
            before = [(rng.gauss(25, 5), rng.uniform(1, 9)) for _ in range(n)]
            places = [rng.randrange(n) for _ in range(n)]
            expected = message_passing(before, places)
            after = rate_tuples(before, [1 - rank / 10 for rank in places])
            for (mu, sigma), (our_mu, our_sigma) in zip(expected, after, strict=True):
                largest = max(largest, abs(mu - our_mu), abs(sigma - our_sigma))
        yield Row(
            "Appendix B",
            f"60 random rankings of {n}: largest distance from message passing",
            0.0,
            largest,
            1e-3,
        )

    three = [(20.0, 3.0), (25.0, 5.0), (27.0, 2.0)]
    ascending = rate_tuples(three, [0.1, 0.5, 0.9])
    yield Row(
        "3.2",
        "only the order of the returns counts",
        ascending,
        rate_tuples(three, [0.0, 0.02, 1.0]),
    )
    yield Row(
        "3.2",
        "... so that a better order gives other ratings",
        False,
        ascending == rate_tuples(three, [0.9, 0.5, 0.1]),
    )
    single = [(20.0, 3.0)]
    yield Row(
        "Appendix B",
        "M - 1 comparisons: a prompt alone is not rated",
        single,
        rate_tuples(single, [1.0]),
    )

    ties = rate_tuples([(MU0, SIGMA0)] * 4, [0.52, 0.515, 0.508, 0.50])
    pairs = message_passing([(MU0, SIGMA0)] * 4, [0, 0, 1, 1])
    yield Row(
        "Appendix B",
        "ties by equal return: within .01 of a group's first, not chained",
        pairs,
        ties,
        1e-3,
    )


# --- eq 1-4: value, selection, who mutates --------------------------------------------------------


def make_population(n: int, **options: Any) -> Population:
    """A population of n prompts; by default the window holds them all."""
    options.setdefault("window", n)
    population = Population(SystemPrompt("p0"), **options)
    for number in range(1, n):
        population.add(SystemPrompt(f"p{number}"))
    return population


def draw_ids(population: Population, count: int, times: int) -> list[list[int]]:
    """The ids of the prompts that each of a number of selections draws."""
    selections = []
    for _ in range(times):
        selections.append([prompt.id for prompt in population.select(count)])
    return selections


def set_ratings(population: Population, ratings: Sequence[tuple[float, float]]) -> None:
    for member, (mu, sigma) in zip(population.members, ratings, strict=True):
        member.rating = Rating(mu, sigma)


def make_results(matrix: Sequence[Sequence[Sequence[float]]]) -> list[PromptResult]:
    """The results of prompts whose rewards are `matrix[prompt][problem][rollout]`."""
    prompt_results = []
    for number, row in enumerate(matrix):
        problems = []
        for column, rewards in enumerate(row):
            attempts = tuple(Attempt(f"y{reward}", reward) for reward in rewards)
            problems.append(ProblemResult(f"x{column}", "42", attempts))
        prompt = SystemPrompt("Solve.", (f"rule {number}",), id=number)
        prompt_results.append(PromptResult(prompt, tuple(problems)))
    return prompt_results


def values() -> Iterator[Row]:
    rewards = [[[1, 0, 1, 1, 0], [0, 0, 0, 1, 0]], [[1, 1, 1, 1, 0], [0, 1, 0, 1, 1]]]
    batch = make_results(rewards)
    problem_values = [result.row for result in batch]
    yield Row(
        "eq 1",
        "V is the mean over the N rollouts",
        [[3 / 5, 1 / 5], [4 / 5, 3 / 5]],
        problem_values,
    )
    batch_values = [0.4, 0.7]
    yield Row(
        "eq 1",
        "... and of a batch the mean over its problems",
        batch_values,
        common_means(problem_values),
    )
    best = best_result(batch, batch_values)
    yield Row("eq 4", "the prompt with the highest V mutates", 1, best and best.prompt.id)


def selection() -> Iterator[Row]:
    beliefs = [(25.0, 1.0), (24.0, 2.0), (23.5, 1.5), (26.0, 0.2)]
    scores = [mu + 2 * sigma for mu, sigma in beliefs]

    # Independent draws by softmax, as the paper prints them.
    for temperature in (1.0, 2.0):
        population = make_population(
            4, rule="softmax", independent_draws=True, temperature=temperature
        )
        set_ratings(population, beliefs)
        id_counts = Counter(chain.from_iterable(draw_ids(population, 3, times=4000)))
        weights = [math.exp(score / temperature) for score in scores]
        expected = [weight / sum(weights) for weight in weights]
        shares = [id_counts[number] / 12_000 for number in range(4)]
        yield Row(
            "eq 3",
            f"T = {temperature:g}: p as exp((mu + lambda sigma) / T), 12,000 draws",
            expected,
            shares,
            0.02,
        )
    population = make_population(4, rule="softmax", independent_draws=True)
    set_ratings(population, beliefs)
    twice = any(len(set(ids)) < 3 for ids in draw_ids(population, 3, times=500))
    yield Row("Algorithm 1", "independent draws: one may come twice", True, twice)

    # The default rule: the best prompt, and different ones beside it.
    population = make_population(4)
    set_ratings(population, beliefs)
    selections = draw_ids(population, 3, times=6000)
    top = scores.index(max(scores))
    yield Row(
        "A.5",
        "the highest score is always in the batch",
        True,
        all(top in ids for ids in selections),
    )
    id_counts = Counter(chain.from_iterable(selections))
    shares = [id_counts[number] / 6000 for number in range(4) if number != top]
    yield Row("A.5", "the rest at random from the window", [2 / 3] * 3, shares, 0.03)
    yield Row("A.5", "M different prompts", True, all(len(set(ids)) == 3 for ids in selections))

    population = make_population(25, window=10)
    latest = set(chain.from_iterable(draw_ids(population, 3, times=400)))
    yield Row("3.2", "sliding window: only the latest K = 10 are drawn", set(range(15, 25)), latest)

    population = make_population(2, exploration=0.0, rule="softmax", independent_draws=True)
    set_ratings(population, [(25.0, 1.0), (25.0, 9.0)])
    half = draw_ids(population, 1, times=2000).count([0]) / 2000
    yield Row("eq 3", "lambda = 0: uncertainty does not count", 0.5, half, 0.05)


def children() -> Iterator[Row]:
    population = make_population(3)
    yield Row(
        "Algorithm 1",
        "the root begins at (mu_0, sigma_0)",
        (MU0, SIGMA0),
        (population.rating(0).mu, population.rating(0).sigma),
    )
    set_ratings(population, [(29.0, 4.0), (22.0, 3.0), (26.0, 6.0)])

    child = population.add(SystemPrompt("child", parents=(0,), operator="mutation"))
    rating = population.rating(child)
    yield Row(
        "Appendix B",
        "mutation: mu of the parent, sqrt(sigma^2 + 1)",
        (29.0, math.sqrt(17.0)),
        (rating.mu, rating.sigma),
    )

    crossed = population.add(SystemPrompt("crossed", parents=(0, 1, 2), operator="crossover"))
    precision = 1 / 16 + 1 / 9 + 1 / 36
    mean = (29 / 16 + 22 / 9 + 26 / 36) / precision
    rating = population.rating(crossed)
    yield Row(
        "Algorithm 2",
        "crossover: precision-weighted mean, sqrt(1 / sum + 1)",
        (mean, math.sqrt(1 / precision + 1)),
        (rating.mu, rating.sigma),
    )

    before = {0: Rating(29.38, 4.0)}
    late = population.rating(population.add(SystemPrompt("late", parents=(0,)), before))
    yield Row(
        "Algorithm 1",
        "a child inherits what its parent had at the batch it was made from",
        29.38,
        late.mu,
    )
    wide = make_population(1, delta_sigma=3.0)
    wide.add(SystemPrompt("c", parents=(0,)))
    yield Row("Appendix B", "Delta sigma = 3", math.sqrt(SIGMA0**2 + 9), wide.rating(1).sigma)


def winners() -> Iterator[Row]:
    matrix = [[0.8, 0.2, 0.5, 0.0], [0.6, 0.4, 0.5, 0.0], [0.2, 0.2, 0.1, 0.9]]
    wins = []
    for row in matrix:
        rivals = [rival for rival in matrix if rival is not row]
        best_rival = [max(column) for column in zip(*rivals, strict=True)]
        wins.append([column for column in range(4) if row[column] > best_rival[column]])
    yield Row(
        "Algorithm 2", "rho_i: the problems each prompt alone did best", wins, sole_wins(matrix)
    )
    yield Row("Algorithm 2", "a tie is nobody's problem", [[], []], sole_wins([[0.5], [0.5]]))


# --- A.2 to A.5, Algorithm 2: the operators -------------------------------------------------------


def instructive_problems() -> Iterator[Row]:
    examples = {
        "1 0 1 (0 < V < 1)": ([1.0, 0.0, 1.0], True),
        "0 0 0 (V = 0)": ([0.0, 0.0, 0.0], False),
        "1 1 1 (V = 1)": ([1.0, 1.0, 1.0], False),
    }
    for name, (rewards, expected) in examples.items():
        problem = ProblemResult("x", "42", tuple(Attempt("y", reward) for reward in rewards))
        yield Row("A.2", f"rewards {name}: reflected on", expected, problem.is_instructive())

    reference = ScriptedChat(lambda messages: "never asked")
    outcome = asyncio.run(mutate(reference, make_results([[[0.0, 0.0], [1.0, 1.0]]])[0]))
    yield Row(
        "A.2",
        "no problem with mixed outcomes: nobody is asked",
        ("no_evidence", 0),
        (outcome.reason, outcome.counts["calls"]),
    )


def edits() -> Iterator[Row]:
    parent = SystemPrompt("Solve.", ("old rule", "second rule"), id=0)

    # The edits of one problem.
    three = [Edit("add", text=f"new rule {n}") for n in range(3)]
    report = Draft(parent).apply(three, ("add", "modify"), ESPLSettings().max_ops)
    yield Row(
        "A.4",
        "K_ops = 2: of three edits of a problem two count",
        (2, 1),
        (len(report.applied), len(report.refused)),
    )
    report = Draft(parent).apply([Edit("merge", ("G0", "G1"), "both")], ("add", "modify"))
    yield Row(
        "A.3", "a problem may add and modify, not merge", {"not_allowed": 1}, dict(report.counts)
    )

    # The plan: edits of all problems together.
    draft = Draft(parent)
    draft.apply([Edit("modify", ("G0",), "local idea")], ("add", "modify"), suggested=("modify",))
    yield Row(
        "A.5",
        "a problem's modify is a proposal, not applied directly",
        parent.principles,
        draft.finish().principles,
    )
    draft.apply([Edit("merge", ("G0", "G1"), "one wide rule")], ("modify", "merge"))
    yield Row(
        "A.5", "merge: several principles become one", ("one wide rule",), draft.finish().principles
    )
    plan = Draft(parent)
    plan.apply([Edit("modify", ("G1",), "revised")], ("modify", "merge"))
    yield Row(
        "A.5", "modify: of an existing principle", ("old rule", "revised"), plan.finish().principles
    )


def refused_edits() -> Iterator[Row]:
    parent = SystemPrompt("Solve.", ("old rule", "second rule"), id=0)
    long_edits = [Edit("add", text=" ".join(["word"] * n)) for n in (32, 33)]
    report = Draft(parent).apply(long_edits)
    yield Row(
        "A.5",
        "principles stay short: 32 words are taken, 33 are not",
        (1, {"too_long": 1}),
        (len(report.applied), dict(report.counts)),
    )
    report = Draft(parent).apply([Edit("modify", ("G7",), "x")])
    yield Row(
        "Algorithm 1",
        "git.apply: an unknown id does not apply",
        {"unknown_id": 1},
        dict(report.counts),
    )
    replacements = [
        Edit("replace", text="x", search="one"),
        Edit("replace", text="x", search="two"),
    ]
    report = Draft(SystemPrompt("one two one", id=0)).apply(replacements)
    yield Row(
        "Algorithm 1",
        "git.apply: text that occurs twice does not apply",
        ({"ambiguous": 1}, 1),
        (dict(report.counts), len(report.applied)),
    )
    yield Row(
        "C.4, Figure 9",
        "principles are numbered from G0, in brackets",
        "Solve.\n[G0]. a\n[G1]. b",
        SystemPrompt("Solve.", ("a", "b")).text,
    )


def crossing() -> Iterator[Row]:
    requests: list[str] = []

    def reply(messages: Sequence[Message]) -> str:
        requests.append(messages[-1]["content"])
        return "?"

    dominated = make_results([[[1.0], [1.0]], [[0.0], [0.0]]])
    outcome = asyncio.run(crossover(ScriptedChat(lambda messages: "?"), dominated))
    yield Row(
        "Algorithm 2",
        "one prompt ahead everywhere: nothing to cross",
        ("too_few_winners", 0),
        (outcome.reason, outcome.counts["calls"]),
    )

    batch = make_results([[[1.0], [0.0], [0.0]], [[0.0], [1.0], [1.0]]])
    asyncio.run(crossover(ScriptedChat(reply), batch))
    order = [requests[0].index("rule 1"), requests[0].index("rule 0")]
    yield Row(
        "Algorithm 2",
        "the overall top prompt comes first, as the one to edit",
        sorted(order),
        order,
    )
    yield Row(
        "Algorithm 2",
        "... with the problems it won",
        True,
        all(f"x{column}" in requests[0] for column in range(3)),
    )


def reflection() -> Iterator[Row]:
    mixed = make_results([[[1.0, 0.0], [0.0, 1.0]]])[0]
    calls = asyncio.run(mutate(ScriptedChat(lambda messages: "[]"), mixed)).counts["calls"]
    yield Row(
        "A.2-A.3", "a summary for each rollout, a critique for each problem", 2 * 2 + 2, calls
    )


def reflection_stages() -> Iterator[Row]:
    """The four stages of reflection: the reference LLM's requests, and the edits that its replies
    become.
    """
    requests: list[str] = []
    replies = [
        "summary of the first attempt",
        "summary of the second attempt",
        '```json\n[{"operation": "add", "principle": "added rule"}, '
        '{"operation": "modify", "principle": "local idea", "modified_from": "G0"}]\n```',
        '```json\n[{"operation": "modify", "principle": "planned rule", "modified_from": "G0"}]\n```',
    ]

    def reply(messages: Sequence[Message]) -> str:
        requests.append(messages[-1]["content"])
        return replies[len(requests) - 1]

    parent = SystemPrompt("Solve.", ("old rule",), id=0)
    attempts = (Attempt("I multiply: 41", 0.0), Attempt("I add: 42", 1.0))
    result = PromptResult(parent, (ProblemResult("What is x?", "42", attempts),))
    outcome = asyncio.run(mutate(ScriptedChat(reply), result, ESPLSettings(max_ops=7)))
    yield Row("Figure 18", "summaries, a critique, a plan: calls", 2 + 1 + 1, len(requests))

    # What each request holds.
    first, second, critique, plan = requests
    context = ["What is x?", "old rule", "42"]
    for attempt, text in zip(attempts, (first, second), strict=True):
        yield Row(
            "A.2",
            f"a summary reads problem, prompt, truth, {attempt.text!r}",
            True,
            _has_all([*context, attempt.text], text),
        )
    yield Row(
        "A.2",
        "... and of one attempt alone",
        (False, False),
        (attempts[1].text in first, attempts[0].text in second),
    )
    yield Row(
        "A.3",
        "the critique reads both summaries, prompt and truth",
        True,
        _has_all([*context, *replies[:2]], critique),
    )
    yield Row("A.4", "... and is told K_ops (7 here)", True, "7" in critique)
    yield Row(
        "A.5",
        "the plan reads the prompt and all proposals",
        True,
        _has_all(["old rule", "added rule", "local idea"], plan),
    )

    child = outcome.child and outcome.child.principles
    yield Row(
        "A.5",
        "the child: the plan's modify, the problem's add",
        ("planned rule", "added rule"),
        child,
    )


def _has_all(parts: Sequence[str], text: str) -> bool:
    return all(part in text for part in parts)


# --- numbers, and the search recipe ---------------------------------------------------------------


def training_defaults() -> Iterator[Row]:
    from agentic_prompting import ESPLConfig

    defaults = {setting.name: setting.default for setting in fields(ESPLConfig)}
    for rule, name, value in (
        ("group size N = 5", "num_generations", 5),
        ("M = 3 prompts a batch", "prompts_per_step", 3),
        ("sliding window K = 10", "window", 10),
        ("Delta sigma = 1", "delta_sigma", 1.0),
        ("lambda = 2", "exploration", 2.0),
        ("p_crossover = 0.2", "p_crossover", 0.2),
        ("K_ops = 2", "max_ops", 2),
        ("learning rate 4e-5", "learning_rate", 4e-5),
        ("Adam beta_1 = .9", "adam_beta1", 0.9),
        ("Adam beta_2 = .95", "adam_beta2", 0.95),
        ("KL beta = 0 with LoRA", "beta", 0.0),
        ("eq 2 divides by no deviation", "scale_rewards", "none"),
        ("eq 2 sums log pi over the tokens, up to a constant", "loss_type", "dr_grpo"),
        ("baseline V_i of eq 1", "baseline", "normal"),
    ):
        yield Row("A.5, eq 1-2", rule, value, defaults[name])
    rollouts = defaults["per_device_train_batch_size"] * defaults["gradient_accumulation_steps"]
    yield Row("A.5", "b = 10 problems a batch on one GPU", 10, rollouts / (3 * 5))


def data_sets() -> Iterator[Row]:
    pairs = {name: (pair["train"][0], pair["test"][0]) for name, pair in PAIRS.items()}
    for at, name, sets in (
        ("DAPO100 to AIME25", "dapo_aime25", ("dapo100", "aime25")),
        ("HMMT 23/24/February 25 to November 25", "hmmt", ("hmmt_feb", "hmmt_nov25")),
        ("AIME 22-24 to BeyondAIME", "aimo_beyondaime", ("aimo_aime", "beyondaime")),
    ):
        yield Row("4.1", at, sets, pairs[name])
    yield Row("4.1", "100 problems of DAPO", 100, TASKS["dapo100"].expected_rows["train"])
    hmmt = TASKS["hmmt_feb"].sources[0]
    paths = " ".join([hmmt.path, *hmmt.also])
    years = [year for year in ("2023", "2024", "2025") if year in paths]
    yield Row("4.1", "HMMT of three years", ["2023", "2024", "2025"], years)


def modes() -> Iterator[Row]:
    from agentic_prompting import ESPLConfig

    expected = {"rl": (False, True), "evolution": (True, False), "joint": (True, True)}
    changes = {}
    for mode in expected:
        args = ESPLConfig("unused", mode=mode, use_cpu=True, bf16=False)
        changes[mode] = (args.evolves, args.mode_at(0) in ("joint", "rl"))
    yield Row("4.1", "RL only, evolution and both: what changes", expected, changes)

    config = EXAMPLES / "configs" / "espl" / "math_qwen3_4b.yaml"
    maths = yaml.safe_load(config.read_text(encoding="utf-8"))
    yield Row(
        "A.5", "LoRA of rank 32 at 4e-5", (32, 4e-5), (maths["lora_r"], maths["learning_rate"])
    )


def search() -> Iterator[Row]:
    body = '{"name": "search", "arguments": {"query_list":\n["Population New York city between 2020 and 2025"]}}'
    turn = SearchGrammar().parse(f"I will search.\n<tool_call>{body}</tool_call>")
    yield Row(
        "A.5",
        "the root prompt's own example is read as a search",
        ("act", ["Population New York city between 2020 and 2025"]),
        (turn.kind, read_call(turn.request or "")[0]),
    )
    last = SearchGrammar().parse("I have it.\nAnswer: 4 x 400 metres")
    yield Row(
        "A.5",
        "the answer stands behind 'Answer:'",
        ("answer", "4 x 400 metres"),
        (last.kind, last.answer),
    )
    # Correct, of the right format, the text. A reply with two answers counts as no answer.
    for correct, form, text in (
        (1, 1, "Answer: right"),
        (0, 1, "Answer: wrong"),
        (0, 0, "Answer: wrong\nAnswer: again"),
    ):
        rollout = Rollout([1]).finish("answered")
        rollout.add_turn(Sample([1]), SearchGrammar().parse(text))
        (reward,) = search_reward([], [], [rollout], [["right"]])
        yield Row(
            "released recipe",
            f".1 (format {form} - 1) + correct {correct}",
            0.1 * (form - 1) + correct,
            reward,
        )


PARTS: list[Part] = [
    rating_constants,
    closed_forms,
    rankings,
    values,
    selection,
    children,
    winners,
    instructive_problems,
    edits,
    refused_edits,
    crossing,
    reflection,
    reflection_stages,
    training_defaults,
    data_sets,
    modes,
    search,
]
UNTESTED = {
    "eq 2 (gradient)": (
        "needs a policy: tests/trainers/test_espl_trainer.py holds the advantages r - V to NumPy"
    ),
    "Algorithm 1 (KL to the reference)": "beta = 0 with LoRA (3.1); TRL's term where it is set",
    "A.2-A.5 (what the reference LLM writes)": (
        "needs a model; what becomes of its replies is checked"
    ),
    "Figures 8, 11-16, Table 1 (scores)": "need DeepSeek-V3.1, gpt-oss-120b and their competitions",
    "Appendix C (wrong principles)": "an account of what was found, not a rule",
}
