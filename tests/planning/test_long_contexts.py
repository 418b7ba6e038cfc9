"""Memory of a step per token does not grow with the context, and observations take none of it in the head."""

import importlib.util
from pathlib import Path

from support.marks import long


@long
def test_memory_grows_with_the_tokens_and_stays_below_trls():
    path = Path(__file__).parents[2] / "benchmarks" / "long_contexts.py"
    spec = importlib.util.spec_from_file_location("long_contexts", path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.compared((8192, 16384))
    assert found["memory_growth"] <= 1.1 and found["over_trl"] <= 1.0
