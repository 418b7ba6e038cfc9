"""The pure parts of benchmarks/prompt_r1_sandbox.py: what its tables say follows from the outcomes."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "prompt_r1_sandbox.py"


@pytest.fixture(scope="module")
def ablations():
    spec = importlib.util.spec_from_file_location("prompt_r1_sandbox", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def outcome(ablations, right, wrong, turns=2.0):
    """`right` two-hop questions answered right, `wrong` three-hop ones answered wrong."""
    return ablations.Outcome((1,) * right + (0,) * wrong, (2,) * right + (3,) * wrong, turns, 1.0)


def test_the_bounds_of_proposition_3(ablations):
    assert ablations.transfer_bounds(0.0, 4) == (0.0, 0.0)
    assert ablations.transfer_bounds(0.1, 4) == pytest.approx((0.3439, 0.4))
    for noise in (0.01, 0.3, 1.0):  # eq 45: the product bound is never the looser one, and one reply is one ε
        tight, linear = ablations.transfer_bounds(noise, 4)
        assert tight <= linear
        assert ablations.transfer_bounds(noise, 1) == pytest.approx((noise, noise))


def test_a_summary_pools_questions_and_keeps_the_seeds_apart(ablations):
    summary = ablations.summarise([outcome(ablations, 8, 2, turns=3.0), outcome(ablations, 5, 5, turns=2.0)])
    assert summary["exact_match"] == 0.65
    assert summary["questions"] == 20
    assert summary["per_seed"] == [0.8, 0.5]
    assert summary["spread"] == 0.3
    assert summary["by_hops"] == {"2": 1.0, "3": 0.0}
    assert summary["turns"] == 2.5
    low, high = summary["interval"]
    assert low == pytest.approx(0.4329, abs=1e-4)  # Wilson, 13 of 20
    assert high == pytest.approx(0.8188, abs=1e-4)


def test_the_transfer_report_judges_by_the_interval_and_by_both_inequalities(ablations):
    trained = {0.0: [outcome(ablations, 90, 10)], 0.1: [outcome(ablations, 70, 30)], 0.01: [outcome(ablations, 70, 30)]}
    untrained = {noise: [outcome(ablations, 30, 70)] for noise in trained}
    home, far, near = ablations.transfer_report(trained, untrained, interactions=4)
    assert home["trained"]["change"]["difference"] == 0.0
    assert home["trained"]["within"] and home["superiority_guaranteed"]
    assert far["trained"]["change"]["difference"] == pytest.approx(-0.2)
    assert far["trained"]["within"]  # a drop of .2 where .344 is allowed
    assert far["least_margin"] == pytest.approx(0.6 - 2 * 4 * 0.1)
    assert not far["superiority_guaranteed"] and far["least_margin_kept"]
    assert not near["trained"]["within"]  # the same drop where .039 is allowed: the bound would be broken, and said so
    assert near["untrained"]["within"]
    assert not near["least_margin_kept"]


def test_tables_have_a_cell_under_every_heading(ablations):
    trained = {0.0: [outcome(ablations, 9, 1)], 0.1: [outcome(ablations, 7, 3)]}
    untrained = {noise: [outcome(ablations, 3, 7)] for noise in trained}
    report = ablations.transfer_report(trained, untrained, interactions=4)
    only_two_hops = {"all right": ablations.summarise([outcome(ablations, 5, 0)])}
    for table, rows in (
        (ablations.ablation_table(only_two_hops), 1),
        (ablations.transfer_table(report), 4),
        (ablations.margin_table(report), 2),
    ):
        lines = table.splitlines()
        assert len(lines) == 2 + rows
        assert {line.count("|") for line in lines} == {lines[0].count("|")}
    assert "| 1.000 | – |" in ablations.ablation_table(only_two_hops)  # no three-hop question: no number


def test_every_changed_number_of_the_training_comes_from_the_sandbox_config(ablations):
    config = ablations.yaml.safe_load(ablations.CONFIG.read_text())
    assert config.pop("sandbox") is True
    fields = ablations.PromptR1Config.__dataclass_fields__
    assert set(config) <= set(fields), "the script passes all of it to PromptR1Config"
