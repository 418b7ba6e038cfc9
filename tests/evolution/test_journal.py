"""The journal: why each child was made or refused, one line per attempt."""

import json

from agentic_prompting.evolution import (
    Attempt,
    EvolutionJournal,
    Outcome,
    Population,
    ProblemResult,
    PromptResult,
    ReflectionTask,
    SystemPrompt,
    attempt_records,
    read_journal,
    scores_of,
)
from agentic_prompting.evolution.operators import (
    MAX_TRACE_CHARS,
    MAX_TRACE_EDITS,
    MAX_TRACE_PROBLEMS,
    MAX_TRACE_REFLECTIONS,
)
from support.operators import MIXED, PROMPT, crossover, edits, mutate, problem, reference


def record_of(outcome, scores, child=None):
    population = Population(SystemPrompt("a"))
    for _ in range(3):
        population.add(SystemPrompt("a"))
    task = ReflectionTask(5, MIXED, scores=scores)
    return attempt_records(task, [outcome], [child], population)[0]


def test_a_mutation_and_why():
    critique = edits(
        {"op": "add", "text": "Verify the result.", "reason": "attempt 2 did not"},
        {"op": "modify", "id": "G9", "text": "x"},
    )
    outcome = mutate(reference(critique), MIXED)
    scores = {3: MIXED.row, 7: [0.5, None, 1.0, 0.0]}
    record = record_of(outcome, scores, outcome.child and SystemPrompt("b", id=4))
    assert (record["step"], record["attempt"], record["operator"], record["child"]) == (
        5,
        0,
        "mutation",
        4,
    )
    assert record["reason"] == "child" and record["parents"] == [3]
    assert [shown["question"] for shown in record["evidence"]] == ["question a", "question c"]
    first, second = record["evidence"]
    assert first["scores"] == {"3": 0.5, "7": 0.5} and first["won"] == first["lost"] == [], (
        "all alike"
    )
    assert second["scores"] == {"3": 0.5, "7": 1.0}
    assert second["won"] == [7]
    assert second["lost"] == [3]
    assert first["reflections"] == [
        {"reward": 1.0, "text": "It guessed try a0"},
        {"reward": 0.0, "text": "It guessed try a1"},
    ]
    assert first["truth"] == "truth a"
    names = ("problem", "op", "reason", "refused")
    assert [tuple(edit[name] for name in names) for edit in record["edits"]] == [
        (0, "add", "attempt 2 did not", None),
        (0, "modify", "", "unknown_id"),
        (1, "add", "attempt 2 did not", "duplicate"),
        (1, "modify", "", "unknown_id"),
    ]
    json.dumps(record)


def test_refusals_are_kept_too():
    refused = mutate(reference(plan="no json"), MIXED)
    record = record_of(refused, {3: MIXED.row})
    assert (record["reason"], record["child"]) == ("unreadable", None)
    assert record["edits"]
    assert record["evidence"]
    nothing = mutate(reference(), PromptResult(PROMPT, (problem("a", 1.0, 1.0),)))
    assert record_of(nothing, {})["evidence"] == [] and nothing.trace.parents == (3,)
    dead = mutate(reference(fail_on=lambda number: True), MIXED)
    assert record_of(dead, {})["reason"] == "call_failed" and not dead.trace.edits


def test_a_crossover_and_why():
    rows = {1: [1.0, 0.0, 1.0], 2: [0.0, 1.0, 1.0]}
    trials = [
        PromptResult(
            SystemPrompt("Solve.", (f"Rule {name}.",), id=name),
            tuple(problem(str(column), value) for column, value in enumerate(row)),
        )
        for name, row in rows.items()
    ]
    plan = edits({"op": "add", "text": "From B.", "reason": "it won"}, {"op": "remove", "id": "G7"})
    record = record_of(
        crossover(reference(cross=plan), trials), scores_of(trials), SystemPrompt("b", id=3)
    )
    assert record["parents"] == [1, 2] and record["operator"] == "crossover"
    assert [(shown["question"], shown["won"], shown["lost"]) for shown in record["evidence"]] == [
        ("question 0", [1], [2]),
        ("question 1", [2], [1]),
    ]
    assert [(edit["op"], edit["problem"], edit["refused"]) for edit in record["edits"]] == [
        ("add", None, None),
        ("remove", None, "unknown_id"),
    ]


def test_a_line_has_a_limit():
    huge = "x" * (2 * MAX_TRACE_CHARS)
    attempts = tuple(
        Attempt(f"try this {huge}", float(number % 2))
        for number in range(MAX_TRACE_REFLECTIONS + 2)
    )
    trial = PromptResult(
        PROMPT,
        tuple(
            ProblemResult(f"{number}{huge}", huge, attempts)
            for number in range(MAX_TRACE_PROBLEMS + 2)
        ),
    )
    critique = edits(
        *({"op": "modify", "id": "G9", "text": huge, "reason": huge} for _ in range(9))
    )
    record = record_of(mutate(reference(critique, huge), trial), scores_of([trial]))
    assert len(record["evidence"]) == MAX_TRACE_PROBLEMS and len(record["edits"]) == MAX_TRACE_EDITS
    assert all(len(shown["reflections"]) <= MAX_TRACE_REFLECTIONS for shown in record["evidence"])
    assert all(len(edit["reason"]) < MAX_TRACE_CHARS + 60 for edit in record["edits"])
    assert len(json.dumps(record)) < 200_000


def test_text_that_no_file_can_hold(tmp_path):
    journal = EvolutionJournal(tmp_path / "new" / "evolution.jsonl")
    outcome = Outcome("mutation", reason="unreadable")
    outcome.trace.show(0, ProblemResult("half \ud800 a pair\u2028\n", "é\x00"))
    journal.append([record_of(outcome, {})])
    (record,) = read_journal(journal.path)
    assert record["evidence"][0]["question"] == "half \ud800 a pair\u2028\n"
