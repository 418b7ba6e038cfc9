"""The optimisers on the sandbox's scripted models: they find better prompts, within their calls,
GEPA and TextGrad by their authors' packages.
"""

import os
import sys
from pathlib import Path

import pytest

from agentic_prompting.evolution import EvolveConfig
from agentic_prompting.llm import (
    LLMError,
    Misconfigured,
    ReplayCache,
    Reply,
    ScriptedChat,
    ServerFailed,
)
from paper_tables.optimise import OPTIMISERS, Objective, optimise_espl, optimise_opro
from paper_tables.optimise.opro import read_instruction
from paper_tables.sandbox import sandbox_models, sandbox_task
from paper_tables.templates import CHAIN_OF_THOUGHT

ROWS = sandbox_task("sandbox_counting", 16, split="train").rows
PACKAGES = {"gepa": "gepa", "textgrad": "textgrad"}


def objective(max_calls=300, rows=ROWS, cache=None, **models):
    models = {**sandbox_models(), **models}
    return Objective(
        models["model"], models["editor"], rows, "integer_match", max_calls, cache=cache
    )


@pytest.mark.parametrize("name", ["opro", "gepa", "textgrad"])
def test_each_optimiser_finds_a_better_prompt_within_its_calls(name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="in the extra [optimizers]")
    objective_of_prompt = objective()
    before = sum(trial.score for trial in objective().try_prompt(CHAIN_OF_THOUGHT)) / len(ROWS)
    optimised = OPTIMISERS[name](objective_of_prompt, CHAIN_OF_THOUGHT)
    after = sum(trial.score for trial in objective().try_prompt(optimised.prompt)) / len(ROWS)
    assert after > before and optimised.prompt != CHAIN_OF_THOUGHT
    assert len(ROWS) < optimised.calls == objective_of_prompt.count.calls <= 300


def test_espl_evolves_the_prompt_of_a_model_that_nobody_trains():
    # The stand-in answers a question the same way each time: no mixed outcomes, so failures have to
    # be looked at.
    config = EvolveConfig(
        num_generations=1, problems_per_step=8, p_crossover=0.0, reflect_on="imperfect"
    )
    result = optimise_espl(objective(400), CHAIN_OF_THOUGHT, config)
    assert result.calls <= 400 and "[G0]" in result.prompt and 0 <= result.score <= 1


def test_espl_warns_of_too_few_calls(caplog):
    config = EvolveConfig(num_generations=1, problems_per_step=4)
    optimise_espl(objective(400), CHAIN_OF_THOUGHT, config)
    assert "calls_budget" not in caplog.text
    optimise_espl(objective(20), CHAIN_OF_THOUGHT, config)
    assert "calls_budget=20" in caplog.text


@pytest.mark.parametrize("name", ["opro", "gepa", "textgrad"])
def test_an_optimiser_that_was_killed_pays_nothing_twice(tmp_path, name):
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="in the extra [optimizers]")
    cache = ReplayCache(tmp_path / "replies.sqlite")
    paid = []

    def counting(model):
        async def counted(messages, **options):
            paid.append(1)
            return await model(messages, **options)

        return counted

    runs = []
    payments = []
    for _ in range(2):
        models = {name: counting(model) for name, model in sandbox_models().items()}
        runs.append(OPTIMISERS[name](objective(200, cache=cache, **models), CHAIN_OF_THOUGHT))
        payments.append(len(paid))
    assert runs[0] == runs[1] and payments[0] == payments[1] > 0


def test_a_prompt_is_not_judged_by_an_outage():
    with pytest.raises(LLMError, match="ServerFailed"):
        optimise_opro(objective(model=ScriptedChat([ServerFailed("down")])), "p")
    # An editor that fails costs its calls, no more.
    optimised = optimise_opro(
        objective(60, editor=ScriptedChat([ServerFailed("down")])), "Answer: ..."
    )
    assert optimised.prompt == "Answer: ..." and optimised.calls <= 60


def test_opro_warns_of_replies_that_it_cannot_read(caplog):
    found = optimise_opro(objective(60, editor=ScriptedChat(["no tags"])), "Answer: ...")
    assert found.prompt == "Answer: ..."
    assert "<INS>" in caplog.text


@pytest.mark.parametrize(
    ("start", "has_line"),
    [("Name the queue.", False), ("Name the queue in a line 'Answer: ...'.", True)],
)
def test_opro_asks_for_the_form_of_the_first_prompt(start, has_line):
    editor = ScriptedChat(["<INS>Name it.</INS>"])
    optimise_opro(objective(60, editor=editor), start)
    request = editor.calls[0][-1]["content"].replace(start, "")
    assert ("Answer:" in request) is has_line
    assert "{form}" not in request and ("demand" in request)


def test_bad_input():
    with pytest.raises(ValueError, match="there are none"):
        objective(rows=[])
    for name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="in the extra [optimizers]")
        with pytest.raises(ValueError, match="at least two training rows"):
            OPTIMISERS[name](objective(rows=ROWS[:1]), "p")


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_that_is_missing_is_named(name, monkeypatch):
    monkeypatch.setitem(sys.modules, PACKAGES[name], None)
    with pytest.raises(ImportError, match=r"agentic-prompting\[optimizers\]"):
        OPTIMISERS[name](objective(), "p")


def test_textgrads_log_lies_in_a_private_folder(monkeypatch):
    """The log holds questions and answers, and a folder of a known name could be another user's."""
    monkeypatch.setenv("TEXTGRAD_LOG_DIR", "")
    monkeypatch.delenv("TEXTGRAD_LOG_DIR")
    monkeypatch.setitem(sys.modules, "textgrad", None)
    with pytest.raises(ImportError):
        OPTIMISERS["textgrad"](objective(), "p")
    folder = Path(os.environ["TEXTGRAD_LOG_DIR"])
    assert folder.is_dir() and folder.stat().st_mode & 0o077 == 0


def test_reading_an_instruction():
    assert read_instruction("<INS>a</INS> or <INS> b </INS>") == "b"
    assert read_instruction("none") == ""


@pytest.mark.parametrize("name", ["opro", "gepa", "textgrad", "espl"])
@pytest.mark.parametrize("role", ["model", "editor"])
def test_a_search_that_was_cut_off_has_no_result(name, role):
    """A table would save it, and the run that goes on would take it for what the optimiser found."""
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name], reason="in the extra [optimizers]")
    rejected = Misconfigured("the key was rejected")
    asked = []

    def failing_later(model):
        async def call(messages, **options):
            asked.append(1)
            return Reply(error=rejected) if len(asked) > 30 else await model(messages, **options)

        return call

    models = sandbox_models()
    if role == "editor":
        models["editor"] = ScriptedChat([rejected])
    else:
        models["model"] = failing_later(models["model"])
    searched = objective(300, **models)
    # The stand-in answers a question the same way each time: failures have to be looked at.
    options = {"config": EvolveConfig(reflect_on="imperfect")} if name == "espl" else {}
    with pytest.raises(LLMError, match="the key was rejected"):
        OPTIMISERS[name](searched, CHAIN_OF_THOUGHT, **options)
    # No call is made, or counted, after it.
    assert searched.count.calls < 150 and len(asked) <= 31 + len(ROWS)
