"""The accuracy table and the picture of iterations, and the benchmark that makes them."""

from dataclasses import replace
from itertools import pairwise

import pytest

from agentic_prompting.evaluation import wilson_interval
from agentic_prompting.refine import ProRefiner
from agentic_prompting.report.refine_plots import (
    accuracy_of,
    accuracy_table,
    iterations_of,
    plot_iterations,
)
from agentic_prompting.rewards import exact_match
from benchmarks.learning import (
    prorefine,
    prorefine_drafting as drafting,
    prorefine_reciter as reciter,
)
from support.refine_models import PROMPT, Log, answer, models


def results(log=None, n=4):
    return ProRefiner(**models(log or Log(), length=25)).refine_all(
        PROMPT, [f"Question {i}?" for i in range(n)], max_in_flight=1, progress=False
    )


def test_accuracy_leaves_failed_queries_out():
    right = answer(25)(PROMPT + "+++", "")
    rows = [
        {"answers": [right]},
        {"answers": ["other"]},
        {"answers": [right]},
        {"answers": [right]},
    ]
    assert str(accuracy_of(results(), rows, exact_match)) == str(wilson_interval(3, 4))
    failed = results(Log(fail_at={0, 1, 2}))
    assert failed[0].error is not None
    assert accuracy_of(failed, rows, exact_match).n == 3


def test_the_table_has_a_row_for_each_method_and_a_column_for_each_model():
    half = wilson_interval(5, 10)
    table = accuracy_table(
        {"sorting": {"none": {"1B": half}, "verifier": {"1B": half, "8B": half}}}
    )
    assert table.splitlines() == [
        "| data set | method | 1B | 8B |",
        "|---|---|---|---|",
        "| sorting | none | 0.500 [0.237, 0.763] | – |",
        "| sorting | verifier | 0.500 [0.237, 0.763] | 0.500 [0.237, 0.763] |",
    ]


def test_the_picture_of_iterations(tmp_path):
    pytest.importorskip("matplotlib")
    found = results()
    assert iterations_of(found).mean == 3
    accepted = [replace(result, steps=()) for result in found]
    assert iterations_of([*found, *accepted]).mean == 1.5
    plot_iterations(
        {"sorting": {"a": found, "b": accepted}, "counting": {"b": found}},
        tmp_path / "deep" / "x.png",
    )
    assert (tmp_path / "deep" / "x.png").read_bytes().startswith(b"\x89PNG")


# The benchmark
# -------------------------------------------------------------------------------------------------------


def test_prompts_change_as_the_scenarios_say():
    changes = {}
    for scenario in reciter.SCENARIOS:
        (case,) = reciter.make_cases(scenario, 1, 20)
        prompts = [reciter.FIRST_PROMPT, *case.prompts]
        changes[scenario] = sum(old != new for old, new in pairwise(prompts))
    assert changes == {"unchanged": 0, "half": 10, "slight": 20, "strong": 20}
    assert reciter.recital("briefly", [], 159, 3) == "w159 ; w0 ; w1 ;"


def test_drafted_and_plain_runs_are_compared_and_counted():
    tokens = reciter.tokenizer()
    model = reciter.random_model(tokens)
    cases = reciter.mixed_cases(8, 3)
    plain, drafted = (drafting.play(model, tokens, cases, draft=draft) for draft in (False, True))
    assert drafting.differences(model, tokens, plain.results, drafted.results) == {
        "cases": 8,
        "identical": 8,
        "ties": 0,
        "mismatches": 0,
    }
    assert drafted.passes < plain.passes <= 90
    spoilt = [replace(plain.results[0], answer="w1 w2 w3"), *plain.results[1:]]
    counts = drafting.differences(model, tokens, plain.results, spoilt)
    assert (counts["identical"], counts["mismatches"]) == (7, 1)
    assert drafting.speed(plain, drafted)["speedup_passes"] > 1


def test_the_order_of_accuracies(tmp_path):
    pytest.importorskip("matplotlib")
    found, table = prorefine.accuracy(
        replace(prorefine.QUICK, queries=100), tmp_path / "iterations.png"
    )
    means = {name: value["mean"] for name, value in found["accuracy"].items()}
    assert means["none"] + 0.2 < means["verifier"] < means["optimal"]
    assert all(value["low"] < value["mean"] < value["high"] for value in found["accuracy"].values())
    assert table.count("\n") == 1 + 8 and (tmp_path / "iterations.png").exists()


def test_many_queries_at_once():
    figures = prorefine.batch_speed(n=16, latency=0.05)
    assert figures["speedup"] > 4 and figures["queries"] == 16
