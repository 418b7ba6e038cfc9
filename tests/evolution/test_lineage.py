"""The tree and the journal beside a state: each child once, whatever was killed, with its held-out
score.
"""

import json

import pytest

from agentic_prompting import ESPLTrainer
from agentic_prompting.evolution import (
    EvolveConfig,
    SystemPrompt,
    journal_beside,
    read_journal,
    read_lineage,
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


def test_evolve_keeps_it_beside_its_checkpoint(tmp_path):
    whole = tmp_path / "whole.json"
    broken = tmp_path / "broken.json"
    result = run(checkpoint=whole)
    records = read_journal(journal_beside(whole))
    assert journal_beside(whole).name == "whole.evolution.jsonl"
    names = ("operator", "reason", "child")
    logged = []
    for log in result.steps:
        logged += [[log.step, *(operator[name] for name in names)] for operator in log.operators]
    assert [[record[name] for name in ("step", *names)] for record in records] == logged
    assert any(record["child"] for record in records)
    run(config=EvolveConfig(**{**vars(SETTINGS), "steps": 5}), checkpoint=broken)
    # Killed after the sixth step's attempts were written, in the middle of a line, before its state
    # was.
    lost = {**records[0], "step": 5, "child": 99}
    with open(journal_beside(broken), "a") as file:
        file.write(json.dumps(lost) + "\n" + json.dumps(lost)[:50])
    run(checkpoint=broken)
    assert read_journal(journal_beside(broken)) == records
    assert len({(record["step"], record["attempt"]) for record in records}) == len(records)
    lineage = read_lineage(broken)
    assert all(node.story["child"] == place for place, node in enumerate(lineage.nodes) if place)
    assert len(lineage.refused) == sum(record["child"] is None for record in records)


def test_a_stopped_step_leaves_no_line(tmp_path):
    path = tmp_path / "state.json"
    result = run(
        Policy(fail=lambda number: ServerFailed("down") if number > 100 else None), checkpoint=path
    )
    recorded_steps = {record["step"] for record in read_journal(journal_beside(path))}
    assert result.stopped and recorded_steps == set(range(len(result.steps)))


class Replays(Reference):
    """The same reply to the same question, as a recorded reference gives."""

    def _say(self, messages):
        request = messages[-1]["content"]
        if "JSON" not in request:
            return "It went wrong at the second step."
        return EDIT % (len(request) % 1000)


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
    assert {record["step"] for record in whole} == set(range(3 - lag))
    assert any(record["child"] for record in whole)
    with open(tmp_path / "evolution.jsonl", "a") as file:
        file.write(json.dumps({**whole[-1], "attempt": 7}) + '\n{"step": 3, "att')
    assert train(tmp_path, resume_from_checkpoint=str(tmp_path / "checkpoint-2")) == whole
    evidence = [problem for record in whole for problem in record["evidence"]]
    assert evidence
    assert all(len(problem["scores"]) in (1, 2) and problem["reflections"] for problem in evidence)
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
