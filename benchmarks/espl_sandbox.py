"""E-SPL in its sandbox: prompts and weights together against either alone, and what the ratings are worth.

    python benchmarks/espl_sandbox.py --json            # 5 seeds, two processes
    python benchmarks/espl_sandbox.py --json --quick    # 1 seed, fewer steps
    python benchmarks/espl_sandbox.py --tune            # learning rates, temperatures; on seeds that are not reported

Prints Markdown tables; with `--json` one JSON object as the last line. What it measures is the sandbox, a policy of
about 400,000 parameters, a scripted oracle and a scripted reflector, and nothing about real models.

The method's numbers are those of `examples/configs/espl/sandbox.yaml`. Each seed has rules, split, weights and warm
start of its own, which all modes share; all modes get the same number of rollouts. Intervals are Student's t over the
means of the seeds: they cover rules, warm starts, trainings and questions together.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import multiprocessing
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "espl" / "sandbox.yaml"
SEEDS = (321, 322, 323, 324, 325)  # none that the sandbox was made or tuned with
TUNING_SEEDS = (1, 2, 3, 4)

# What --tune found best: for joint it stands in the configuration file. Evolution and reflection sample as joint does.
RL = {"mode": "rl", "learning_rate": 5e-4, "temperature": 1.0}
TRIED = [
    {"learning_rate": rate, "temperature": temperature} for temperature in (0.7, 1.0) for rate in (3e-4, 5e-4, 1e-3)
]

# What differs from the configuration file.
MODES: dict[str, dict[str, Any]] = {
    "joint": {},
    "joint, mutation only": {"p_crossover": 0.0},
    "rl": RL,
    "evolution": {"mode": "evolution"},
    "reflection": {"mode": "reflection"},
    "rl, 5 times the rollouts": RL,
}
TIMES = {"rl, 5 times the rollouts": 5}  # the rollouts of the other modes; not with --quick
TIMES_SEEDS = 3  # so many seeds only, the first ones: these runs are long
QUICK_STEPS, QUICK_WARM_START_STEPS = 6, 350
# Two-sided 95 % quantiles of Student's t by degrees of freedom.
T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


@dataclass
class SeedResult:
    """What one seed gave.

    Args:
        seed (`int`): The seed.
        exact_match (`dict[str, float]`): By mode, held out, under the prompt that the mode ends with.
        rated (`list[tuple[float, float, int]]`): Of each prompt that played in `joint`: learned rating μ, held-out
            exact match under the final weights, order of birth.
        seconds (`dict[str, float]`): Per mode.
    """

    seed: int
    exact_match: dict[str, float] = field(default_factory=dict)
    rated: list[tuple[float, float, int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


# --- pure: intervals and correlations -----------------------------------------------------------------------------


def t_interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and 95 % interval over seeds, Student's t; of one seed there is no interval: `None`."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return {"mean": round(mean, 4), "low": None, "high": None}
    half = T95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return {"mean": round(mean, 4), "low": round(max(0.0, mean - half), 4), "high": round(min(1.0, mean + half), 4)}


def spearman(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Rank correlation, ties at their mean rank; NaN where one side is constant."""
    a, b = _ranks(ours), _ranks(theirs)
    if a.std() == 0 or b.std() == 0:
        return math.nan
    return float(np.corrcoef(a, b)[0, 1])


def partial(ab: float, ac: float, bc: float) -> float:
    """The correlation of a and b with c held fixed."""
    left = (1 - ac**2) * (1 - bc**2)
    return (ab - ac * bc) / left**0.5 if left > 0 else math.nan


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    return np.array([(array < value).sum() + ((array == value).sum() - 1) / 2 for value in array])


def correlations(rated: Sequence[tuple[float, float, int]]) -> dict[str, float]:
    """Rating against held-out score; birth against score; the first with birth held fixed."""
    mu, score, birth = (list(column) for column in zip(*rated, strict=True))
    rating, born, both = spearman(mu, score), spearman(birth, score), spearman(mu, birth)
    return {"rating": rating, "birth_order": born, "partial": partial(rating, both, born)}


def summarise(results: Sequence[SeedResult]) -> dict[str, Any]:
    """All that is reported of the seeds."""
    names = dict.fromkeys(name for result in results for name in result.exact_match)
    per_seed = {name: [round(r.exact_match[name], 4) for r in results if name in r.exact_match] for name in names}
    ranks = [correlations(result.rated) for result in results if len(result.rated) > 2]
    mean = {key: _mean([one[key] for one in ranks]) for key in ("rating", "birth_order", "partial")}
    return {
        "seeds": [result.seed for result in results],
        "modes": {name: t_interval(values) for name, values in per_seed.items()},
        "per_seed": per_seed,
        "spearman": mean["rating"],
        "spearman_birth_order": mean["birth_order"],
        "spearman_partial": mean["partial"],
        "spearman_per_seed": [{key: _mean([value]) for key, value in one.items()} for one in ranks],
    }


def _mean(values: Sequence[float]) -> float | None:
    finite = [value for value in values if not math.isnan(value)]
    return round(statistics.fmean(finite), 3) if finite else None


def table(summary: Mapping[str, Any]) -> str:
    """The modes as a Markdown table."""
    lines = ["| mode | exact match [95 %] | per seed |", "|---|---|---|"]
    for name, row in summary["modes"].items():
        values = ", ".join(f"{value:.3f}" for value in summary["per_seed"][name])
        ends = "one seed" if row["low"] is None else f"{row['low']:.3f}, {row['high']:.3f}"
        lines.append(f"| {name} | {row['mean']:.3f} [{ends}] | {values} |")
    return "\n".join(lines)


# --- one mode on one seed, in a process of two ----------------------------------------------------------------


def warm_start(seed: int, folder: Path, threads: int = 1, **options: Any) -> None:
    """What all modes of a seed start from."""
    started = time.perf_counter()
    _prepare(seed, folder, threads, **options)
    _log(f"seed {seed}: warm start, {time.perf_counter() - started:.0f} s")


def run_mode(seed: int, folder: Path, name: str, steps: int) -> SeedResult:
    """Train one mode on a seed and look at it from outside; the seed's warm start is in `folder`."""
    from agentic_prompting.sandbox.results import guarded_exact_match

    started, sandbox = time.perf_counter(), _prepare(seed, folder)
    trainer = _train(sandbox, seed, folder / re.sub(r"[ ,]+", "-", name), name, max_steps=steps)
    score = guarded_exact_match(sandbox, trainer.args.output_dir, trainer.population.best()).mean
    result = SeedResult(seed, {name: score}, _rated(sandbox, trainer) if name == "joint" else [])
    result.seconds[name] = time.perf_counter() - started
    _log(f"seed {seed}: {name}: {score:.3f}, {result.seconds[name]:.0f} s")
    return result


def joined(parts: Sequence[SeedResult]) -> list[SeedResult]:
    """One result a seed, of what its modes gave, in the order of `MODES`."""
    whole: dict[int, SeedResult] = {}
    for part in sorted(parts, key=lambda part: (part.seed, list(MODES).index(*part.exact_match))):
        result = whole.setdefault(part.seed, SeedResult(part.seed))
        result.exact_match |= part.exact_match
        result.seconds |= part.seconds
        result.rated += part.rated
    return list(whole.values())


def _prepare(seed: int, folder: Path, threads: int = 1, **options: Any) -> Any:
    """Sandbox and warm start; quiet."""
    import datasets
    import torch
    import transformers

    from agentic_prompting.sandbox.setup import prepare_guarded

    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    with redirect_stdout(io.StringIO()):
        return prepare_guarded(folder, seed, **options)


def _train(sandbox: Any, seed: int, folder: Path, name: str, reference: Any = None, **changes: Any) -> Any:
    """A trained [`ESPLTrainer`], its model saved; `changes` replace values of the YAML file and of `MODES`."""
    from agentic_prompting import ESPLConfig, ESPLTrainer, LLMEnvironment, PromptR1Reward
    from agentic_prompting.sandbox import GuardedReflector
    from agentic_prompting.sandbox.setup import ROOT

    values = {key: value for key, value in yaml.safe_load(CONFIG.read_text()).items() if key != "task"}
    values |= {"output_dir": str(folder), "seed": seed, "disable_tqdm": True, "rollouts_max_mb": 0}
    args = ESPLConfig(**{**values, **MODES[name], **changes})
    trainer = ESPLTrainer(
        str(sandbox.model),
        PromptR1Reward(),
        args,
        sandbox.train,
        reference=(reference or GuardedReflector(seed=seed)) if args.evolves else None,
        initial_prompt=ROOT,
        environment=LLMEnvironment(sandbox.oracle),
        prompt_template=sandbox.spec.prompt_template,
    )
    with redirect_stdout(io.StringIO()):  # with its progress bar off, transformers prints every log
        trainer.train()
    trainer.save_model(str(folder))
    return trainer


def _rated(sandbox: Any, trainer: Any) -> list[tuple[float, float, int]]:
    from agentic_prompting.sandbox.results import guarded_exact_match

    return [
        (member.rating.mu, guarded_exact_match(sandbox, trainer.args.output_dir, member.prompt).mean, number)
        for number, member in enumerate(trainer.population.members)
        if member.games
    ]


def measure_overhead(seed: int, folder: Path, rounds: int, steps: int) -> dict[str, float]:
    """Median step times of `joint` and `rl` on the very same rollouts, run in turns on the same machine.

    The reference answers after 50 ms a call and in the end changes nothing, so that the prompts, and with them every
    sampled token, stay those of `rl`: what differs is the work of E-SPL, not the length of what the policy writes.
    """
    from agentic_prompting import ScriptedChat

    sandbox, times = _prepare(seed, folder), {"joint": [], "rl": []}
    for turn in range(rounds):
        for mode in ("joint", "rl") if turn % 2 else ("rl", "joint"):  # neither is always the first, on a fresh process
            idle = ScriptedChat(lambda messages: "```json\n[]\n```", latency=0.05)
            # Both with the settings of joint: else they would not sample the same tokens.
            trainer = _train(sandbox, seed, folder / f"{mode}-{turn}", "joint", idle, max_steps=steps, mode=mode)
            logged = [entry["step_time"] for entry in trainer.state.log_history if "step_time" in entry]
            times[mode] += logged[1:]  # the first one compiles and fills caches
    medians = {mode: statistics.median(values) for mode, values in times.items()}
    return {**medians, "ratio": medians["joint"] / medians["rl"]}


def try_settings(mode: str, settings: Mapping[str, float], seed: int, folder: Path, steps: int) -> float:
    """Held-out exact match of a mode with these settings, on a seed that is not reported."""
    from agentic_prompting.sandbox.results import guarded_exact_match

    sandbox, name = _prepare(seed, folder), "-".join([mode, *map(str, settings.values())])
    trainer = _train(sandbox, seed, folder / name, mode, max_steps=steps, **settings)
    return guarded_exact_match(sandbox, trainer.args.output_dir, trainer.population.best()).mean


# --- the script ---------------------------------------------------------------------------------------------------


def _log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def tune(folder: Path, steps: int, workers: int) -> None:
    """Print how the modes that train weights do with each of the settings in `TRIED`."""
    places = [(seed, folder / f"seed-{seed}") for seed in TUNING_SEEDS]
    rows = [(mode, settings) for mode in ("joint", "rl") for settings in TRIED]
    with _pool(workers) as pool:
        list(pool.map(warm_start, *zip(*places, strict=True)))
        jobs = [(*row, *place, steps) for row in rows for place in places]
        scores = list(pool.map(try_settings, *zip(*jobs, strict=True)))
    print("| mode | learning rate | temperature | exact match, mean | by seed |\n|---|---|---|---|---|")
    for i, (mode, settings) in enumerate(rows):
        of_seeds = scores[i * len(places) : (i + 1) * len(places)]
        cells = [mode, *(f"{value:g}" for value in settings.values()), f"{statistics.fmean(of_seeds):.3f}"]
        print("| " + " | ".join([*cells, ", ".join(f"{score:.3f}" for score in of_seeds)]) + " |")


def _pool(workers: int) -> ProcessPoolExecutor:
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the children as they start
    return ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))


def run_modes(places: Sequence[tuple[int, Path]], steps: int, workers: int, quick: bool) -> list[SeedResult]:
    """All modes on all seeds, each as soon as its seed's warm start is there."""
    threads = max(1, workers // len(places))  # of a warm start: with one seed the other processes have nothing to do
    options = {"warm_start_steps": QUICK_WARM_START_STEPS} if quick else {}
    with _pool(workers) as pool:
        ready = {pool.submit(warm_start, *place, threads, **options): place for place in places}
        jobs = []
        for done in as_completed(ready):
            done.result()
            place = ready[done]
            longer = not quick and place in places[:TIMES_SEEDS]
            names = [name for name in MODES if longer or name not in TIMES]
            names.sort(key=lambda name: -TIMES.get(name, 1))  # the long ones first: the workers end at about one time
            jobs += [pool.submit(run_mode, *place, name, steps * TIMES.get(name, 1)) for name in names]
        return joined([job.result() for job in jobs])


def main() -> None:
    parser = argparse.ArgumentParser(description="E-SPL in its sandbox.")
    parser.add_argument("--quick", action="store_true", help="one seed, fewer steps, no longer run")
    parser.add_argument("--tune", action="store_true", help="try settings instead")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default: {SEEDS}, or the first of them with --quick")
    parser.add_argument("--workers", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/espl_benchmark"), help="models and details")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    started, folder = time.perf_counter(), options.output / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    steps = QUICK_STEPS if options.quick else yaml.safe_load(CONFIG.read_text())["max_steps"]
    if options.tune:
        tune(folder, steps, options.workers)
        return
    seeds = options.seeds or (SEEDS[:1] if options.quick else SEEDS)
    places = [(seed, folder / f"seed-{seed}") for seed in seeds]
    results = run_modes(places, steps, options.workers, options.quick)
    with _pool(1) as pool:  # alone on the machine: it is about time
        overhead = pool.submit(measure_overhead, *places[0], rounds=2 if options.quick else 3, steps=6).result()
    summary = {
        "sandbox": True,
        "quick": options.quick,
        **summarise(results),
        "overhead_ratio": round(overhead["ratio"], 3),
        "step_seconds": {mode: round(overhead[mode], 3) for mode in ("joint", "rl")},
        "rollouts": steps * 96,
        "settings": MODES,
        "seconds": round(time.perf_counter() - started),
    }
    (folder / "results.json").write_text(json.dumps({**summary, "details": [asdict(result) for result in results]}))
    print(
        f"E-SPL in its sandbox (says nothing about real models): seeds {summary['seeds']}, {summary['rollouts']} "
        f"rollouts a mode, {summary['seconds']} s\n\n{table(summary)}\n\nSpearman with the held-out score, "
        f"over all prompts that played: rating {summary['spearman']}, birth order {summary['spearman_birth_order']}, "
        f"rating with birth order held fixed {summary['spearman_partial']}\nmedian step: joint "
        f"{summary['step_seconds']['joint']} s, rl {summary['step_seconds']['rl']} s, ratio "
        f"{summary['overhead_ratio']}\ndetails: {folder / 'results.json'}"
    )
    if options.json:
        print(json.dumps(summary))


if __name__ == "__main__":
    main()
