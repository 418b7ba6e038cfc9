"""Results as JSON, in summaries and as text."""

import json

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.refine import (
    RefinementResult,
    RefinementStep,
    describe,
    summarize,
)
from agentic_prompting.refine.results_file import ResultsFile
from agentic_prompting.refine.types import Failure, RoleUsage
from support.refine_models import PROMPT, QUERIES, Log, refiner

texts = st.text(max_size=20) | st.sampled_from(["\u2028", "\ud800", "a\nb", "\x00"])

failures = st.builds(
    Failure, st.sampled_from(["task", "verifier"]), st.integers(-1, 9), texts, texts, st.booleans()
)

steps = st.builds(
    RefinementStep,
    texts,
    texts,
    st.none() | texts,
    st.booleans(),
    st.none() | texts,
    st.none() | texts,
)

results_of_any_kind = st.builds(
    RefinementResult,
    *[texts] * 5,
    st.sampled_from(["verified", "failed"]),
    steps=st.lists(steps, max_size=3).map(tuple),
    error=st.none() | failures,
    failures=st.lists(failures, max_size=2).map(tuple),
    usage=st.dictionaries(st.sampled_from(["task"]), st.builds(RoleUsage, st.integers(0, 9))),
    seconds=st.floats(0, 9),
)


@given(results_of_any_kind)
def test_results_survive_json(tmp_path_factory, result):
    path = tmp_path_factory.mktemp("results") / "r.jsonl"
    for _ in range(2):
        ResultsFile(path, "s").add("k", result)
    assert ResultsFile(path, "s").results == ({} if result.error else {"k": result})
    assert RefinementResult.from_dict(json.loads(json.dumps(result.to_dict()))) == result


def test_results_of_a_later_version_are_refused():
    with pytest.raises(ValueError, match="upgrade agentic-prompting"):
        RefinementResult.from_dict({**refiner().refine(PROMPT, "A?").to_dict(), "format": 99})
    with pytest.raises(ValueError, match="not a refinement result: KeyError"):
        RefinementResult.from_dict({"format": 1})


def test_a_summary_counts_and_means():
    log = Log(fail_at={3})
    results = refiner(log).refine_all(PROMPT, QUERIES[:2], max_in_flight=1, progress=False)
    summary = summarize(results)
    assert summary["queries"] == 2 and summary["steps"] == 4 and summary["task/failed"] == 1
    assert summary["stop/finished"] == 2 and "stop/failed" not in summary
    assert summary["feedback/calls"] == sum(result.usage["feedback"].calls for result in results)


def test_a_description_shows_every_step():
    text = describe(refiner().refine(PROMPT, "A?"), width=40)
    assert "Step 4" in text and f"- {PROMPT}" in text and f"+ {PROMPT}+" in text
    assert "Ended: finished, 4 steps, prompt changed 4 times" in text and "(cut off)" in text
