"""What a command prints besides its results."""

import sys
import warnings

import pytest

from agentic_prompting.cli import script


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
