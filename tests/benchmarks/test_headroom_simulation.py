"""The simulation of headroom: its worlds have the truth that they say, and its quick mode runs."""

import json

import numpy as np
import pytest

from benchmarks.learning import headroom


@pytest.mark.parametrize(
    "world",
    [
        headroom.World(0.3, 0.1),
        headroom.World(0.5, 0.1, interaction=1.5),
        headroom.World(0.7, 0.1, graded=4.0),
        headroom.World(0.1, 0.0, start=0.1),
    ],
)
def test_a_world_has_the_means_that_it_says(world):
    rng = np.random.default_rng(0)
    means = np.array([0.2, 0.5, 0.8])
    scores = world.make_sampler()(rng, means, 40_000)
    assert scores.mean(axis=0) == pytest.approx(means, abs=0.015)
    drawn = np.array([world.prompt_means(rng, 12) for _ in range(2000)])
    assert drawn[:, 1:].mean() == pytest.approx(world.base, abs=0.01)
    assert drawn[:, 0].mean() == pytest.approx(world.base + (world.start or 0), abs=0.01)


@pytest.mark.parametrize(
    "effects", [headroom.normal, headroom.heavy, headroom.one_good, headroom.one_bad]
)
def test_effects_have_mean_zero_and_deviation_one(effects):
    drawn = effects(np.random.default_rng(0), 200_000)
    assert drawn.mean() == pytest.approx(0, abs=0.02) and drawn.std() == pytest.approx(1, abs=0.1)


def test_the_quick_simulation_prints_its_figures(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["headroom", "--quick", "--json", "--tasks", "6"])
    headroom.main()
    result = json.loads(capsys.readouterr().out)
    assert result["tasks"] == 6 and 0 <= result["summary"]["coverage"]["least"] <= 1
    assert {"false worth it, truth 0, after top-up", "cannot tell"} <= set(
        result["summary"]["delta 0.10"]
    )
    assert result["groups"] and result["ceilings"] and result["router"]
    assert "coverage" in headroom.as_tables(result)


def test_a_cell_follows_from_its_seed():
    world = headroom.World(0.5, 0.06)
    assert headroom.simulate_prompts(world, 5, [1]) == headroom.simulate_prompts(world, 5, [1])
