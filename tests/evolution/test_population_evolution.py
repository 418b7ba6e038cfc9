"""Algorithm 1 for the prompts, without a trainer or an LLM: what is rated, reflected on and joined,
and when.
"""

import json

import pytest

from agentic_prompting.evolution import (
    Attempt,
    ESPLSettings,
    Outcome,
    Population,
    PopulationEvolution,
    ProblemResult,
    PromptResult,
    Rating,
    ReflectionTask,
    SystemPrompt,
)
from agentic_prompting.llm import BudgetExceeded, ServerFailed

ROOT = SystemPrompt("Answer.", ())


def grown(p_crossover=0.0, members=2, **options):
    """A evolution whose population has this many prompts."""
    population = Population(ROOT, **options)
    for number in range(1, members):
        population.add(
            SystemPrompt("Answer.", (f"Rule {number}.",), parents=(0,), operator="mutation")
        )
    return PopulationEvolution(population, p_crossover)


def match(evolution, *rows, questions="abcdefgh", ids=None):
    """The results of the first prompts: a row of rewards each, two attempts a problem."""
    members = evolution.population.members
    ids = range(len(rows)) if ids is None else ids
    return [
        PromptResult(
            members[name].prompt,
            tuple(
                ProblemResult(question, "truth", (Attempt("one", reward), Attempt("two", reward)))
                for question, reward in zip(questions, row, strict=False)
            ),
        )
        for name, row in zip(ids, rows, strict=True)
    ]


def child_of(*parents, text="New."):
    operator = "mutation" if len(parents) == 1 else "crossover"
    return Outcome(operator, SystemPrompt("Answer.", (text,), parents=parents, operator=operator))


def test_the_best_of_a_batch_is_reflected_on_and_its_child_joins():
    evolution = grown()
    task = evolution.record([match(evolution, [0.0, 0.5], [1.0, 0.5])])
    assert (task.batch, task.best.prompt.id, task.crossing) == (0, 1, None)
    assert task.scores == {0: [0.0, 0.5], 1: [1.0, 0.5]} and evolution.values == [[0.25, 0.75]]
    assert task.ratings[1].mu > 25 > task.ratings[0].mu and evolution.pending == [task]
    (joined,) = evolution.join(task, [child_of(1)])
    assert (joined.id, joined.parents, joined.born_at, evolution.pending) == (2, (1,), 1, [])
    assert evolution.population.rating(2).mu == task.ratings[1].mu
    assert evolution.join(evolution.record([match(evolution, [1.0])]), [Outcome("mutation")]) == [
        None
    ]


def test_a_child_has_the_rating_that_its_parents_had_after_its_own_batch():
    evolution = grown()
    task = evolution.record([match(evolution, [0.0], [1.0])])
    later = evolution.record([match(evolution, [1.0], [0.0])])
    assert evolution.population.rating(1).mu < task.ratings[1].mu
    (joined,) = evolution.join(task, [child_of(1)])
    assert evolution.population.rating(joined).mu == task.ratings[1].mu
    assert evolution.pending == [later]


def test_children_are_due_by_the_count_of_batches():
    evolution = grown()
    tasks = [evolution.record([match(evolution, [0.0], [1.0])]) for _ in range(3)]
    assert [evolution.due(lag) for lag in (0, 1, 2, 3)] == [tasks, tasks[:2], tasks[:1], []]


def test_only_the_largest_match_is_reflected_on_and_of_equal_ones_the_last():
    """Carried groups were played under other prompts: rated apart, and only one of them has
    children.
    """
    evolution = grown(members=4)
    small = match(evolution, [1.0], [0.0])
    large = match(evolution, [0.0, 0.0], [0.5, 1.0], ids=(2, 3))
    task = evolution.record([large, small])
    assert task.best.prompt.id == 3 and list(task.scores) == [2, 3]
    assert evolution.population.rating(0).mu > 25 and len(evolution.values) == 2
    task = evolution.record(
        [match(evolution, [1.0], [0.0]), match(evolution, [1.0], [0.0], ids=(2, 3))]
    )
    assert task.best.prompt.id == 2


def test_nothing_is_reflected_on_without_a_score_or_on_request():
    evolution = grown()
    rng = evolution.population.rng.getstate()
    assert evolution.record([match(evolution, [None], [None])]) is None
    assert evolution.record([]) is None
    assert evolution.record([match(evolution, [0.0], [1.0])], reflect=False) is None
    assert (evolution.batches, evolution.pending) == (3, [])
    assert evolution.population.rating(1).mu > 25, "it is rated all the same"
    assert evolution.population.rng.getstate() == rng


def test_crossovers_come_with_their_probability():
    evolution = grown(1.0)
    assert len(evolution.record([match(evolution, [0.0], [1.0])]).crossing) == 2
    evolution = grown(0.3)
    tasks = [evolution.record([match(evolution, [0.0], [1.0])]) for _ in range(500)]
    assert sum(task.crossing is not None for task in tasks) / 500 == pytest.approx(0.3, abs=0.06)


def play(evolution, batches):
    """Some batches: whatever is drawn gets a reward by its id; children join two batches later."""
    log = []
    for _ in range(batches):
        for task in evolution.due(1):
            log.append(
                [
                    child and child.id
                    for child in evolution.join(task, [child_of(task.best.prompt.id)])
                ]
            )
        drawn = evolution.draw(2)
        rows = [[(7 * prompt.id + evolution.batches) % 5 / 4, 0.5] for prompt in drawn]
        evolution.record([match(evolution, *rows, ids=[prompt.id for prompt in drawn])])
        log.append(
            [
                [prompt.id for prompt in drawn],
                evolution.values,
                evolution.pending[-1].crossing is not None,
            ]
        )
    return log


def test_a_resumed_evolution_is_the_uninterrupted_one():
    whole, first, second = (grown(0.4, seed=3) for _ in range(3))
    log = play(whole, 12)
    before = play(first, 5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert before + play(second, 7) == log
    assert second.state_dict() == whole.state_dict()
    assert {crossed for _, _, crossed in (entry for entry in log if len(entry) == 3)} == {
        True,
        False,
    }


def test_a_task_outlives_json():
    evolution = grown(1.0)
    task = evolution.record([match(evolution, [0.0, None], [1.0, 0.5])])
    assert ReflectionTask.from_json(json.loads(json.dumps(task.to_json()))) == task
    assert task.ratings[0] == Rating(task.ratings[0].mu, task.ratings[0].sigma)


def test_a_damaged_state_changes_nothing():
    evolution = grown()
    evolution.record([match(evolution, [0.0], [1.0])])
    before = evolution.state_dict()
    state = grown(members=3).state_dict()
    state["population"]["members"][1]["prompt"]["id"] = 7
    with pytest.raises(ValueError, match="damaged"):
        evolution.load_state_dict(state)
    with pytest.raises(KeyError, match="pending"):
        evolution.load_state_dict({"population": state["population"], "batches": 3})
    assert evolution.state_dict() == before


def test_the_numbers_for_logs():
    evolution = grown()
    assert "population/value_best" not in evolution.metrics()
    evolution.record([match(evolution, [0.25], [1.0]), match(evolution, [None], [None])])
    logged = evolution.metrics()
    assert [logged[f"population/{name}"] for name in ("size", "value_best", "value_worst")] == [
        2,
        1,
        0.25,
    ]
    assert logged["population/best_mu"] > 25 and logged["population/diversity"] > 0


def test_the_children_of_an_older_population_are_not_older_than_its_prompts():
    population = Population(ROOT)
    for _ in range(9):
        population.select(1)
    evolution = PopulationEvolution(population)
    task = evolution.record([match(evolution, [1.0])])
    assert evolution.join(task, [child_of(0)])[0].born_at == 9


def test_a_child_that_says_what_a_prompt_says_joins_nowhere():
    """Not its parent's text, not another's, in whatever order: it would be rated as if it were a
    prompt of its own.
    """
    evolution = grown(members=3)
    task = evolution.record([match(evolution, [0.0], [1.0])])
    same = child_of(1, text="Rule 1.")
    new = Outcome(
        "mutation",
        SystemPrompt("Answer.", ("Rule 9.", "Rule 1."), parents=(1,), operator="mutation"),
    )
    reordered = Outcome(
        "crossover",
        SystemPrompt("Answer.", ("rule 1", "Rule 9."), parents=(1, 0), operator="crossover"),
    )
    outcomes = [same, new, reordered]
    joined = evolution.join(task, outcomes)
    assert [child and child.id for child in joined] == [None, 3, None]
    assert [outcome.reason for outcome in outcomes] == ["known", "child", "known"]
    unchanged = [outcome.metrics()["evolution/unchanged"] for outcome in outcomes]
    assert unchanged == [1.0, 0.0, 1.0]
    assert same.child is None and same.failed and evolution.population.turns == 0


def test_an_evicted_prompt_is_known_too():
    evolution = grown(members=3, window=1)
    (joined,) = evolution.join(
        evolution.record([match(evolution, [1.0])]), [child_of(0, text="Rule 1.")]
    )
    assert joined is None and len(evolution.population.members) == 3


def test_after_a_fatal_error_a_task_stays_pending():
    """A resumed run reflects on it again."""
    evolution = grown()
    task = evolution.record([match(evolution, [0.0], [1.0])])
    spent = Outcome("crossover", reason="call_failed", error=BudgetExceeded("spent"))
    with pytest.raises(BudgetExceeded):
        evolution.join(task, [child_of(1), spent])
    assert evolution.pending == [task] and len(evolution.population.members) == 2
    down = Outcome("crossover", reason="call_failed", error=ServerFailed("down"))
    child, nothing = evolution.join(task, [child_of(1), down])
    assert child.id == 2 and nothing is None and not evolution.pending


def test_a_run_that_revises_one_prompt_has_no_crossover():
    settings = ESPLSettings(window=7, p_crossover=0.5)
    both = [
        PopulationEvolution.start("Answer.", settings, seed=1, is_alone=flag)
        for flag in (False, True)
    ]
    assert [evolution.p_crossover for evolution in both] == [0.5, 0.0]
    assert [evolution.population.window for evolution in both] == [7, 1]
    population = Population(ROOT)
    assert PopulationEvolution.start(population, ESPLSettings(), seed=1).population is population
