"""Messages of a command in its own words."""

import sys
import warnings

import pytest

from agentic_prompting.cli import script


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("is spent: raise budget_usd=", "is spent: raise --budget-usd"),
        ("more steps=, or more", "more --steps, or more"),
        ("train with overwrite=True from", "train with --overwrite true from"),
        ("https://host/v1?model= and --model=", "https://host/v1?model= and --model="),
        ("Worker(budget_usd=max(1, 2))", "Worker(budget_usd=max(1, 2))"),
        ("raise timeout=", "raise timeout="),  # no option of this command
    ],
)
def test_arguments_become_options(monkeypatch, message, named):
    options = {"budget_usd", "steps", "overwrite", "model"}
    monkeypatch.setattr(script, "_option_names", options)
    assert script.name_options(message) == named


def test_a_command_names_its_options_in_warnings(capsys, monkeypatch):
    from agentic_prompting.cli.evolve import SETTINGS
    from agentic_prompting.cli.option_parser import OptionParser

    monkeypatch.setattr(script, "_option_names", set())
    OptionParser("evolve", SETTINGS).parse(["--sandbox"])
    script.print_error("lower problems_per_step= or num_generations=, raise budget_tokens=")
    words = capsys.readouterr().err
    assert "--problems-per-step or --num-generations, raise --budget-tokens" in words


@pytest.mark.parametrize(
    ("module", "count"), [("transformers.training_args", 0), ("trl.models.utils", 0), ("mine", 1)]
)
def test_renames_inside_libraries_are_not_shown(monkeypatch, module, count):
    monkeypatch.setattr(sys, "warnoptions", [])

    def warn():
        warnings.warn_explicit("`a` is deprecated", FutureWarning, "file.py", 1, module=module)

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        script.run_script(warn)
    assert len(shown) == count
