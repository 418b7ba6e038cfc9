"""What led to each child is kept: what the operator was shown, every edit and its fate; once, whatever was killed."""

import json

import pytest

from agentic_prompting import ESPLTrainer
from agentic_prompting.evolution import (
    Attempt,
    EvolutionJournal,
    EvolveConfig,
    Outcome,
    Population,
    ProblemResult,
    PromptResult,
    SystemPrompt,
    attempt_records,
    journal_beside,
    read_journal,
    read_lineage,
    scores_of,
)
from agentic_prompting.evolution.operators import (
    MAX_CHARS,
    MAX_EDITS,
    MAX_PROBLEMS,
    MAX_REFLECTIONS,
)
from agentic_prompting.llm import ServerFailed
from agentic_prompting.rollout import BatchEngine, FreeText
from support.espl_training import (
    EDIT,
    Reference,
    WritesBySeed,
    arguments,
    reward_by_word,
    trainer_for,
)
from support.evolving import SETTINGS, Policy, run
from support.operators import MIXED, PROMPT, crossover, edits, mutate, problem, reference


def record_of(outcome, scores, child=None):
    population = Population(SystemPrompt("a"))
    for _ in range(3):
        population.add(SystemPrompt("a"))
    return attempt_records(5, [outcome], [child], scores, population)[0]


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
    assert [one["question"] for one in record["evidence"]] == ["question a", "question c"]
    first, second = record["evidence"]
    assert first["scores"] == {"3": 0.5, "7": 0.5} and first["won"] == first["lost"] == [], (
        "all alike"
    )
    assert (
        second["scores"] == {"3": 0.5, "7": 1.0} and second["won"] == [7] and second["lost"] == [3]
    )
    assert first["reflections"] == [
        {"reward": 1.0, "text": "It guessed try a0"},
        {"reward": 0.0, "text": "It guessed try a1"},
    ]
    assert first["truth"] == "truth a"
    told = [
        (edit["problem"], edit["op"], edit["reason"], edit["refused"]) for edit in record["edits"]
    ]
    assert told == [
        (0, "add", "attempt 2 did not", None),
        (0, "modify", "", "unknown_id"),
        (1, "add", "attempt 2 did not", "duplicate"),
        (1, "modify", "", "unknown_id"),
    ]
    json.dumps(record)


def test_refusals_are_kept_too():
    refused = mutate(reference(plan="no json"), MIXED)
    record = record_of(refused, {3: MIXED.row})
    assert (
        (record["reason"], record["child"]) == ("unreadable", None)
        and record["edits"]
        and record["evidence"]
    )
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
    assert [(one["question"], one["won"], one["lost"]) for one in record["evidence"]] == [
        ("question 0", [1], [2]),
        ("question 1", [2], [1]),
    ]
    assert [(edit["op"], edit["problem"], edit["refused"]) for edit in record["edits"]] == [
        ("add", None, None),
        ("remove", None, "unknown_id"),
    ]


def test_a_line_has_a_limit():
    huge = "x" * (2 * MAX_CHARS)
    attempts = tuple(
        Attempt(f"try this {huge}", float(number % 2)) for number in range(MAX_REFLECTIONS + 2)
    )
    trial = PromptResult(
        PROMPT,
        tuple(
            ProblemResult(f"{number}{huge}", huge, attempts) for number in range(MAX_PROBLEMS + 2)
        ),
    )
    critique = edits(
        *({"op": "modify", "id": "G9", "text": huge, "reason": huge} for _ in range(9))
    )
    record = record_of(mutate(reference(critique, huge), trial), scores_of([trial]))
    assert len(record["evidence"]) == MAX_PROBLEMS and len(record["edits"]) == MAX_EDITS
    assert all(len(one["reflections"]) <= MAX_REFLECTIONS for one in record["evidence"])
    assert all(len(edit["reason"]) < MAX_CHARS + 60 for edit in record["edits"])
    assert len(json.dumps(record)) < 200_000


def test_text_that_no_file_can_hold(tmp_path):
    journal = EvolutionJournal(tmp_path / "new" / "evolution.jsonl")
    outcome = Outcome("mutation", reason="unreadable")
    outcome.trace.show(0, ProblemResult("half \ud800 a pair\u2028\n", "é\x00"))
    journal.append([record_of(outcome, {})])
    (read,) = read_journal(journal.path)
    assert read["evidence"][0]["question"] == "half \ud800 a pair\u2028\n"


# --- killed and resumed ----------------------------------------------------------------------------------------------


def test_evolve_keeps_it_beside_its_checkpoint(tmp_path):
    whole, broken = tmp_path / "whole.json", tmp_path / "broken.json"
    result = run(checkpoint=whole)
    story = read_journal(journal_beside(whole))
    assert journal_beside(whole).name == "whole.evolution.jsonl"
    made = [(one["step"], one["operator"], one["reason"], one["child"]) for one in story]
    logged = [
        (log.step, o["operator"], o["reason"], o["child"])
        for log in result.steps
        for o in log.operators
    ]
    assert made == logged and any(one["child"] for one in story)
    run(config=EvolveConfig(**{**vars(SETTINGS), "steps": 5}), checkpoint=broken)
    # Killed after the sixth step's attempts were written, in the middle of a line, before its state was.
    lost = {**story[0], "step": 5, "child": 99}
    with open(journal_beside(broken), "a") as file:
        file.write(json.dumps(lost) + "\n" + json.dumps(lost)[:50])
    run(checkpoint=broken)
    assert read_journal(journal_beside(broken)) == story
    assert len({(one["step"], one["attempt"]) for one in story}) == len(story)
    lineage = read_lineage(broken)
    assert all(node.story["child"] == place for place, node in enumerate(lineage.nodes) if place)
    assert len(lineage.refused) == sum(one["child"] is None for one in story)


def test_a_stopped_step_leaves_no_line(tmp_path):
    path = tmp_path / "state.json"
    result = run(
        Policy(fail=lambda number: ServerFailed("down") if number > 100 else None), checkpoint=path
    )
    assert result.stopped and {one["step"] for one in read_journal(journal_beside(path))} == set(
        range(len(result.steps))
    )


class Replays(Reference):
    """The same reply to the same question, as a recorded reference gives."""

    def _say(self, messages):
        asked = messages[-1]["content"]
        return (
            EDIT % (len(asked) % 1000) if "JSON" in asked else "It went wrong at the second step."
        )


@pytest.mark.parametrize("lag", [0, 1])
def test_a_trainer_killed_and_resumed(tiny_policy, rows, tmp_path, lag):
    def train(folder, **options):
        trainer = trainer_for(
            tiny_policy,
            folder,
            rows,
            Replays(),
            evolution_lag=lag,
            p_crossover=0.5,
            save_strategy="steps",
            save_steps=2,
        )
        trainer.policy = BatchEngine(WritesBySeed(trainer), on_callers_thread=True)
        trainer.train(**options)
        return read_journal(folder / "evolution.jsonl")

    whole = train(tmp_path)
    assert {one["step"] for one in whole} == set(range(3 - lag)) and any(
        one["child"] for one in whole
    )
    with open(tmp_path / "evolution.jsonl", "a") as file:
        file.write(json.dumps({**whole[-1], "attempt": 7}) + '\n{"step": 3, "att')
    assert train(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2")) == whole
    evidence = [problem for one in whole for problem in one["evidence"]]
    assert evidence and all(
        len(problem["scores"]) in (1, 2) and problem["reflections"] for problem in evidence
    )
    with pytest.raises(ValueError, match="holds another run"):
        train(tmp_path)


def test_held_out_success_is_the_members(tiny_policy, rows, tmp_path):
    trainer = trainer_for(tiny_policy, tmp_path, rows, max_steps=1)
    trainer.eval_dataset = rows
    trainer.policy = BatchEngine(WritesBySeed(trainer), on_callers_thread=True)
    metrics = trainer.evaluate()
    measured = trainer.population.members[0].held_out
    assert measured["mean"] == pytest.approx(metrics["eval_reward"]) and measured["deviation"] > 0
    assert measured["n"] == len(rows)  # the rollouts of a question are alike
    child = trainer.population.add(
        SystemPrompt("ask first .", (), parents=(0,), operator="mutation")
    )
    scores = trainer.evaluate_prompts([trainer.population.members[0].prompt, child])
    assert list(scores) == [0, 1] and trainer.population.members[1].held_out["mean"] == scores[1]
    assert trainer.population.members[0].held_out["n"] == measured["n"]
    assert trainer.prompts.render_messages(rows[0], trainer.prompts.choose_metadata(0, False))[0][
        "content"
    ].startswith(trainer.population.best().text)
    trainer.save_model()
    node = read_lineage(tmp_path / "population.json").nodes[1]
    assert node.member.held_out["mean"] == scores[1]


def test_every_prompt_that_played_is_tried_in_the_end(tiny_policy, rows, tmp_path):
    """Figure 8: `eval_all`, which without held-out rows is an error before training, not after it."""
    with pytest.raises(ValueError, match="eval_all=True needs an eval_dataset"):
        trainer_for(tiny_policy, tmp_path, rows, eval_all=True)
    trainer = ESPLTrainer(
        model=str(tiny_policy),
        reward_funcs=reward_by_word,
        reference=Replays(),
        args=arguments(tmp_path, evolution_lag=0, eval_all=True, max_steps=2),
        train_dataset=rows,
        eval_dataset=rows,
        initial_prompt="Answer .\n[G0]. Ask first .",
        grammar=FreeText(),
    )
    trainer.policy = BatchEngine(WritesBySeed(trainer), on_callers_thread=True)
    trainer.train()
    played = [member for member in trainer.population.members if member.matches]
    assert played and all(member.held_out["n"] > 0 for member in played)
    assert not [entry for entry in trainer.state.log_history if "eval_reward" in entry], (
        "no points of the run's curve"
    )
    trainer.evaluate()
    assert "eval_reward" in trainer.state.log_history[-1]
