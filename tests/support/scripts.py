"""Scripts of `benchmarks/` as modules, loaded afresh."""

import importlib.util
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "espl_sandbox.py"


def loaded(name, monkeypatch):
    """A script as a module, and under the name by which the others import it."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location(name, SCRIPT.with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module
