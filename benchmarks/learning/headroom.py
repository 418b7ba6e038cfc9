"""Do the verdicts of `headroom` hold? Simulated tasks whose true gain, signal and ceiling are
known.

    python -m benchmarks.learning.headroom           # tables; 1,000 tasks a cell, about ten minutes of one core
    python -m benchmarks.learning.headroom --json    # the same as JSON
    python -m benchmarks.learning.headroom --quick   # few tasks and cells: that it runs

Prompts: 12 on 20 rows, then the start prompt and the challenger on 136 fresh rows (512 calls);
    undecided ones get one
top-up of as many fresh rows as they need, 800 at most. A row has a difficulty from a beta
distribution around the base accuracy; a prompt shifts the logit of all rows so that its mean over
the population of rows is base + effect. Effects have the standard deviation `spread`: normal,
heavy-tailed, one good (or bad) prompt in ten; or the start prompt is no draw from the proposals but
10 points above or below them. `interaction` adds noise to each pair of row and prompt, `graded`
scores are between 0 and 1.

A table's row pools the base accuracies, which are cells of their own in the JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from scipy import special, stats

from agentic_prompting.evaluation import Estimate
from agentic_prompting.evaluation.headroom import (
    choose_challenger,
    expect_further,
    judge_prompts,
    measure_ceiling,
    measure_groups,
    plan_stages,
    route_prompts,
)
from benchmarks.lab import log

TASKS = 1000
QUICK_TASKS = 40
CALLS = 512
PROMPTS = 12
ROWS = 10_000
DELTAS = (0.05, 0.10)
MAX_TOP_UP = 800
BASES = (0.1, 0.3, 0.5, 0.7, 0.9)
MIDDLE = (0.3, 0.5, 0.7)
FURTHER = 20


# --- prompts --------------------------------------------------------------------------------------


def normal(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.standard_normal(size)


def heavy(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.standard_t(3, size) / np.sqrt(3)


def one_good(rng: np.random.Generator, size: int) -> np.ndarray:
    return np.where(rng.random(size) < 0.1, 3.0, -1 / 3)


def one_bad(rng: np.random.Generator, size: int) -> np.ndarray:
    return -one_good(rng, size)


Effects = Callable[[np.random.Generator, int], np.ndarray]
"""Draws effects of prompts with mean 0 and standard deviation 1."""


@dataclass(frozen=True)
class World:
    """A task: the distribution of its prompts, rows and scores.

    Args:
        base (`float`): The mean score under an average prompt.
        spread (`float`): The standard deviation between prompts.
        effects (`Callable`): The form of their distribution.
        start (`float`, *optional*): The start prompt's effect, if it is no draw from the proposals.
        interaction (`float`): The standard deviation of noise in logits on each pair of row and
            prompt.
        graded (`float`, *optional*): Scores are beta-distributed with this concentration instead of
            0 or 1.
    """

    base: float
    spread: float
    effects: Effects = normal
    start: float | None = None
    interaction: float = 0.0
    graded: float | None = None

    def prompt_means(self, rng: np.random.Generator, prompts: int) -> np.ndarray:
        """The true mean score of each prompt, the start prompt first."""
        means = self.base + self.spread * self.effects(rng, prompts)
        if self.start is not None:
            means[0] = self.base + self.start
        return means.clip(0.005, 0.995)

    def make_sampler(self) -> Callable[[np.random.Generator, np.ndarray, int], np.ndarray]:
        """A function that draws the scores of prompts with given means on new rows."""
        # The mean score that a shift of all logits leads to, over the population of rows: to be
        # inverted.
        quantiles = (np.arange(300) + 0.5) / 300
        rows = stats.beta.ppf(quantiles, self.base, 1 - self.base).clip(1e-6, 1 - 1e-6)
        nodes, weights = np.polynomial.hermite_e.hermegauss(9)
        shifts = np.linspace(-14, 14, 281)
        row_logits = special.logit(rows)[None, :, None]
        logits = row_logits + shifts[:, None, None] + self.interaction * nodes
        mean_of_shift = special.expit(logits).mean(axis=1) @ (weights / weights.sum())

        def draw_scores(rng: np.random.Generator, means: np.ndarray, n: int) -> np.ndarray:
            difficulty = rng.beta(self.base, 1 - self.base, (n, 1)).clip(1e-6, 1 - 1e-6)
            logits = special.logit(difficulty) + np.interp(means, mean_of_shift, shifts)
            if self.interaction:
                logits = logits + self.interaction * rng.standard_normal(logits.shape)
            chances = special.expit(logits)
            if self.graded is None:
                return (rng.random(chances.shape) < chances).astype(float)
            chances = chances.clip(1e-3, 1 - 1e-3)
            return rng.beta(chances * self.graded, (1 - chances) * self.graded)

        return draw_scores


def prompt_worlds(quick: bool) -> Iterator[tuple[str, float, World]]:
    """The cells: a family's name, its spread, and a world of it."""
    if quick:
        for spread in (0.0, 0.06):
            yield "normal", spread, World(0.5, spread)
        return
    for spread, base in product((0.0, 0.01, 0.03, 0.06, 0.10, 0.20), BASES):
        yield "normal", spread, World(base, spread)
    for effects, spread, base in product((heavy, one_good, one_bad), (0.06, 0.20), MIDDLE):
        yield effects.__name__.replace("_", " "), spread, World(base, spread, effects)
    for start, spread, base in product((-0.10, 0.10), (0.0, 0.03), MIDDLE):
        yield f"start {start:+.2f}", spread, World(base, spread, start=start)
    for spread, base in product((0.0, 0.10), MIDDLE):
        yield "interaction", spread, World(base, spread, interaction=1.5)
    for spread, base in product((0.0, 0.10), (0.1, 0.5, 0.9)):
        yield "graded", spread, World(base, spread, graded=4.0)


@dataclass(frozen=True)
class Judgement:
    """The verdicts on a task before and after the top-up.

    Args:
        first (`str`): The verdict before.
        last (`str`): The verdict after; the same where no top-up was needed.
        is_covered (`bool`): Whether the last interval holds the true gain.
    """

    first: str
    last: str
    is_covered: bool


@dataclass(frozen=True)
class PromptTask:
    """The truth of a simulated task, and what headroom says of it.

    Args:
        truth (`float`): The true gain of the chosen prompt.
        best_gain (`float`): The true gain of the best prompt.
        gain (`Estimate`): The measured gain of the chosen prompt.
        p_value (`float`, *optional*): The p-value of the F test, if one was made.
        further_is_covered (`bool`): Whether the interval of `expect_further` holds its truth.
        judgements (`dict[float, Judgement]`): By the gain that is worth it.
    """

    truth: float
    best_gain: float
    gain: Estimate
    p_value: float | None
    further_is_covered: bool
    judgements: dict[float, Judgement]

    @property
    def is_covered(self) -> bool:
        """Whether the interval of the chosen prompt's gain holds the truth."""
        return self.gain.low <= self.truth <= self.gain.high


def simulate_prompts(world: World, tasks: int, seed: Sequence[int]) -> dict[str, Any]:
    """Coverage and verdicts in one cell.

    Returns:
        `dict`: `coverage` of the interval of the chosen prompt's gain; its `bias` and `width`; by
            `delta` the shares of verdicts before and after the top-up, of wrong ones, and of right
            ones where the chosen prompt truly gains 0.10 (`power`, of `gaining` tasks); the F
            test's share below .05 and the coverage of `expect_further`.
    """
    rng = np.random.default_rng(seed)
    plan = plan_stages(CALLS, PROMPTS, ROWS)
    draw_scores = world.make_sampler()
    expected_best = _expected_best(world)
    simulated = []
    for _ in range(tasks):
        # Choose a challenger, and compare it with the start prompt on fresh rows.
        means = world.prompt_means(rng, PROMPTS)
        choosing = draw_scores(rng, means, plan.choosing_rows)
        chosen = choose_challenger(choosing, rng)
        pair = means[[0, chosen]]
        truth = float(pair[1] - pair[0])
        fresh = draw_scores(rng, pair, plan.fresh_rows)
        judgements = {}
        for delta in DELTAS:
            first = judge_prompts(choosing, chosen, fresh, delta)
            last = first
            if first.verdict == "cannot tell":
                rows = min(first.rows_needed, MAX_TOP_UP)
                last = judge_prompts(choosing, chosen, fresh, delta, draw_scores(rng, pair, rows))
            is_covered = last.gain.low <= truth <= last.gain.high
            judgements[delta] = Judgement(first.verdict, last.verdict, is_covered)

        # What further proposals would bring.
        further = expect_further(choosing, FURTHER, rng, draws=400)
        simulated.append(
            PromptTask(
                truth=truth,
                best_gain=float(means.max() - means[0]),
                gain=first.gain,
                p_value=None if first.test is None else first.test.p_value,
                further_is_covered=further.low <= expected_best - means[0] <= further.high,
                judgements=judgements,
            )
        )
    return _summarise_tasks(simulated)


def _summarise_tasks(tasks: Sequence[PromptTask]) -> dict[str, Any]:
    """The figures of a cell."""
    truth = np.array([task.truth for task in tasks])
    best_gain = np.array([task.best_gain for task in tasks])
    is_gaining = truth >= 0.10 - 1e-9
    p_values = [task.p_value for task in tasks]
    cell: dict[str, Any] = {
        "coverage": float(np.mean([task.is_covered for task in tasks])),
        "bias": float(np.mean(np.array([task.gain.mean for task in tasks]) - truth)),
        "width": float(np.mean([task.gain.high - task.gain.low for task in tasks])),
        "f_test": float(np.mean([value is not None and value < 0.05 for value in p_values])),
        "further_coverage": float(np.mean([task.further_is_covered for task in tasks])),
        "gaining": int(is_gaining.sum()),
    }
    for delta in DELTAS:
        judgements = [task.judgements[delta] for task in tasks]
        first = np.array([judgement.first for judgement in judgements])
        last = np.array([judgement.last for judgement in judgements])
        for name, verdict in (("", first), (" after top-up", last)):
            worth = verdict == "worth it"
            not_worth = verdict == "not worth it"
            power = float(worth[is_gaining].mean()) if is_gaining.any() else None
            cell[f"{delta:.2f}{name}"] = {
                "worth it": float(worth.mean()),
                "not worth it": float(not_worth.mean()),
                "cannot tell": float((verdict == "cannot tell").mean()),
                "false worth it": float((worth & (truth <= 0)).mean()),
                "false not worth it": float((not_worth & (truth >= delta)).mean()),
                "not worth it, best of all is": float((not_worth & (best_gain >= delta)).mean()),
                "power": power,
            }
        coverage = np.mean([judgement.is_covered for judgement in judgements])
        cell[f"{delta:.2f} after top-up"]["coverage"] = float(coverage)
    return cell


def _expected_best(world: World) -> float:
    """The expected mean of the best of `FURTHER` proposals."""
    rng = np.random.default_rng(1)
    proposals = World(world.base, world.spread, world.effects).prompt_means(rng, 200 * FURTHER * 20)
    return float(proposals.reshape(-1, FURTHER).max(axis=1).mean())


def simulate_router(tasks: int, seed: int = 5) -> list[dict[str, Any]]:
    """How often a router of prompts seems to gain, where prompts differ in nothing, in their means,
    or by row.
    """
    cells = []
    for name, world in (
        ("no difference", World(0.5, 0.0)),
        ("means differ", World(0.5, 0.10)),
        ("rows differ", World(0.5, 0.0, interaction=3.0)),
    ):
        rng = np.random.default_rng(seed)
        gains = []
        for _ in range(tasks):
            means = world.prompt_means(rng, 6)
            first, second = _score_twice(world, rng, means, 64)
            gains.append(route_prompts(first, second, rng))
        cells.append(
            {
                "world": name,
                "gain": float(np.mean([gain.mean for gain in gains])),
                "surely above 0": float(np.mean([gain.low > 0 for gain in gains])),
            }
        )
    return cells


def _score_twice(
    world: World, rng: np.random.Generator, means: np.ndarray, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """Two answers of each prompt to the same rows, whose chances are the same for both."""
    difficulty = rng.beta(world.base, 1 - world.base, (n, 1)).clip(1e-6, 1 - 1e-6)
    noise = world.interaction * rng.standard_normal((n, len(means)))
    chances = special.expit(special.logit(difficulty) + special.logit(means) + noise)
    first = (rng.random(chances.shape) < chances).astype(float)
    second = (rng.random(chances.shape) < chances).astype(float)
    return first, second


# --- groups ---------------------------------------------------------------------------------------

SIGNALS: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "mixed": lambda rng, n: np.where(rng.random(n) < 0.3, rng.random(n) < 0.5, rng.beta(1, 1, n)),
    "hard": lambda rng, n: np.where(rng.random(n) < 0.7, 0.0, rng.beta(0.5, 2, n)),
    "easy": lambda rng, n: np.where(rng.random(n) < 0.5, 1.0, rng.beta(4, 2, n)),
    "u-shaped": lambda rng, n: rng.beta(0.3, 0.3, n),
    "two kinds": lambda rng, n: np.where(rng.random(n) < 0.7, 0.03, 0.9),
    "rare": lambda rng, n: np.full(n, 0.02),
}
"""Draws the chance of a right answer for rows."""


def simulate_groups(tasks: int, quick: bool) -> list[dict[str, Any]]:
    """Coverage of the share of differing groups and of pass@k, for measured sizes g and planned
    sizes G <= g.
    """
    group_sizes = (4,) if quick else (4, 8)
    row_counts = (32,) if quick else (32, 64, 128)
    cells = []
    for group_size, rows, world in product(group_sizes, row_counts, SIGNALS):
        cells += _simulate_signal(world, rows, group_size, tasks)
    return cells


def _simulate_signal(world: str, rows: int, group_size: int, tasks: int) -> list[dict[str, Any]]:
    """The cells of a world whose groups are measured in one size: one for each planned size."""
    draw = SIGNALS[world]
    rng = np.random.default_rng([7, group_size, rows])

    # The true figures, from a population of rows.
    population = draw(rng, 400_000)
    planned_sizes = [size for size in (2, 4, 8) if size <= group_size]
    true_differing = {}
    for size in planned_sizes:
        true_differing[size] = float(np.mean(1 - population**size - (1 - population) ** size))
    true_pass = {k: float(np.mean(1 - (1 - population) ** k)) for k in (1, group_size)}

    # Whether the intervals of each task hold them.
    differing_covered: dict[int, list[bool]] = {size: [] for size in planned_sizes}
    pass_covered: dict[int, list[bool]] = {k: [] for k in true_pass}
    for _ in range(tasks):
        draws = rng.random((rows, group_size))
        chances = draw(rng, rows)[:, None]
        rewards = (draws < chances).astype(float).tolist()
        for size in planned_sizes:
            signal = measure_groups(rewards, size)
            assert signal.differing is not None
            differing_covered[size].append(_holds(signal.differing, true_differing[size]))
        for k, truth in true_pass.items():
            pass_covered[k].append(_holds(signal.pass_at[k], truth))

    return [
        {
            "world": world,
            "rows": rows,
            "measured": group_size,
            "planned": size,
            "truth": true_differing[size],
            "coverage": float(np.mean(differing_covered[size])),
            "pass@1": float(np.mean(pass_covered[1])),
            f"pass@{group_size}": float(np.mean(pass_covered[group_size])),
        }
        for size in planned_sizes
    ]


def _holds(interval: Estimate, truth: float) -> bool:
    return interval.low - 1e-9 <= truth <= interval.high


# --- ceilings -------------------------------------------------------------------------------------


def simulate_ceilings(tasks: int, quick: bool, rows: int = 64) -> list[dict[str, Any]]:
    """How often the bracket holds the true ceiling, and how far naive and cross are from it."""
    spreads_and_bases = [(0.0, 0.5), (1.0, 0.5), (3.0, 0.5), (1.0, 0.2)]
    choice_counts = (4, 8)
    repeat_counts = (2, 4, 8)
    if quick:
        spreads_and_bases = [(0.0, 0.5)]
        choice_counts = (4,)
        repeat_counts = (2,)
    cells = []
    for (spread, base), choices, repeats in product(
        spreads_and_bases, choice_counts, repeat_counts
    ):
        cells.append(_simulate_ceiling(spread, base, choices, repeats, rows, tasks))
    return cells


def _simulate_ceiling(
    spread: float, base: float, choices: int, repeats: int, rows: int, tasks: int
) -> dict[str, Any]:
    rng = np.random.default_rng([9, choices, repeats])
    population = _chances(rng, 40_000, choices, base, spread)
    truth = float(population.max(axis=1).mean())
    names = [str(number) for number in range(choices)]
    ceilings = []
    for _ in range(tasks):
        chances = _chances(rng, rows, choices, base, spread)
        scores = (rng.random((rows, choices, repeats)) < chances[:, :, None]).astype(float)
        ceiling = measure_ceiling(scores, names)
        assert ceiling.cross is not None
        ceilings.append(ceiling)
    covered = [ceiling.low <= truth <= ceiling.high for ceiling in ceilings]
    naive = [ceiling.naive.mean - truth for ceiling in ceilings]
    cross = [ceiling.cross.mean - truth for ceiling in ceilings]
    widths = [ceiling.high - ceiling.low for ceiling in ceilings]
    return {
        "spread": spread,
        "base": base,
        "choices": choices,
        "repeats": repeats,
        "truth": truth,
        "coverage": float(np.mean(covered)),
        "naive": float(np.mean(naive)),
        "cross": float(np.mean(cross)),
        "width": float(np.mean(widths)),
    }


def _chances(
    rng: np.random.Generator, rows: int, choices: int, base: float, spread: float
) -> np.ndarray:
    difficulty = special.logit(rng.beta(base, 1 - base, (rows, 1)).clip(1e-6, 1 - 1e-6))
    return special.expit(difficulty + spread * rng.standard_normal((rows, choices)))


# --- all of it ------------------------------------------------------------------------------------


def simulate(tasks: int, quick: bool = False) -> dict[str, Any]:
    """All cells, and the figures that `docs/howto/headroom.md` promises."""
    started = time.process_time()
    cells = []
    for number, (family, spread, world) in enumerate(prompt_worlds(quick)):
        cell = {"family": family, "spread": spread, "base": world.base, "start": world.start}
        cells.append({**cell, **simulate_prompts(world, tasks, [11, number])})
        log(f"{family} {spread:g} {world.base:g}: coverage {cells[-1]['coverage']:.3f}")
    groups = simulate_groups(tasks, quick)
    ceilings = simulate_ceilings(tasks, quick)
    return {
        "tasks": tasks,
        "summary": summarise_prompts(cells),
        "prompts": cells,
        "router": simulate_router(tasks),
        "groups": groups,
        "ceilings": ceilings,
        "processor_seconds": round(time.process_time() - started, 1),
    }


def summarise_prompts(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of all cells together."""
    coverage = [cell["coverage"] for cell in cells]
    nothing = [cell for cell in cells if cell["spread"] == 0 and cell["start"] is None]
    gaining = [cell for cell in cells if cell["gaining"] >= 100]
    # A start prompt below all others: every challenger gains about 0.10, and not more.
    drawn = [cell for cell in gaining if cell["start"] is None]
    summary: dict[str, Any] = {
        "coverage": {
            "mean": float(np.mean(coverage)),
            "least": min(coverage),
            "most": max(coverage),
        },
        "f_test where no prompt differs": max(cell["f_test"] for cell in nothing),
    }
    for delta in DELTAS:
        first = f"{delta:.2f}"
        last = f"{delta:.2f} after top-up"
        summary[f"delta {delta:.2f}"] = {
            "false worth it, truth 0": max(_figures(nothing, first, "false worth it")),
            "false worth it, truth 0, after top-up": max(_figures(nothing, last, "false worth it")),
            "false not worth it": max(_figures(cells, last, "false not worth it")),
            "not worth it though the best of all is": max(
                _figures(cells, last, "not worth it, best of all is")
            ),
            "cannot tell": float(np.mean(_figures(cells, first, "cannot tell"))),
            "cannot tell after top-up": float(np.mean(_figures(cells, last, "cannot tell"))),
            "coverage after top-up, least": min(_figures(cells, last, "coverage")),
            "power where the chosen prompt gains 0.10, least": min(
                _figures(gaining, first, "power"), default=None
            ),
            "power, start prompt one of the draws, least": min(
                _figures(drawn, first, "power"), default=None
            ),
            "power after top-up, least": min(_figures(gaining, last, "power"), default=None),
        }
    return summary


def _figures(cells: Sequence[dict[str, Any]], *path: str) -> list[float]:
    """A figure of each cell, by the names that lead to it."""
    values = []
    for cell in cells:
        value: Any = cell
        for name in path:
            value = value[name]
        values.append(value)
    return values


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--quick", action="store_true", help="few tasks and cells")
    parser.add_argument("--tasks", type=int, help="tasks a cell")
    arguments = parser.parse_args()
    default_tasks = QUICK_TASKS if arguments.quick else TASKS
    result = simulate(arguments.tasks or default_tasks, arguments.quick)
    print(json.dumps(result) if arguments.json else as_tables(result))


def as_tables(result: dict[str, Any]) -> str:
    """The cells as text, bases pooled."""
    lines = [json.dumps(result["summary"], indent=2), ""]
    lines.append(
        "family, spread | coverage mean/least/most | worth it | not, undecided at 0.10 | after "
        "top-up | further"
    )
    families: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for cell in result["prompts"]:
        families.setdefault((cell["family"], cell["spread"]), []).append(cell)
    for (family, spread), cells in families.items():
        coverage = _figures(cells, "coverage")
        worth = np.mean(_figures(cells, "0.10", "worth it"))
        not_worth = np.mean(_figures(cells, "0.10", "not worth it"))
        undecided = np.mean(_figures(cells, "0.10", "cannot tell"))
        still_undecided = np.mean(_figures(cells, "0.10 after top-up", "cannot tell"))
        further = np.mean(_figures(cells, "further_coverage"))
        lines.append(
            f"{family}, {spread:g} | "
            f"{np.mean(coverage):.3f}/{min(coverage):.3f}/{max(coverage):.3f} | {worth:.2f} | "
            f"{not_worth:.2f}, {undecided:.2f} | {still_undecided:.2f} | {further:.2f}"
        )
    for name in ("router", "groups", "ceilings"):
        lines += ["", name]
        for cell in result[name]:
            figures = []
            for key, value in cell.items():
                figure = round(value, 3) if isinstance(value, float) else value
                figures.append(f"{key} {figure}")
            lines.append("  " + ", ".join(figures))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
