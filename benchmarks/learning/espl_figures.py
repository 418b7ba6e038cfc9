"""E-SPL's figures, drawn from finished runs, and the commands that train the runs that are missing.

    python -m benchmarks.learning.espl_figures --pair hmmt  # commands still to be run
    python -m benchmarks.learning.espl_figures --pair hmmt --draw figures  # Figures 1, 8, 11 to 15
    python -m benchmarks.learning.espl_figures --sandbox --draw figures  # trains and draws, on two cores, in minutes

A run is a folder `runs/espl/PAIR/VARIANT` that ESPLTrainer wrote (`trainer_state.json` with held-out rewards,
`population.json`), or the checkpoint of `evolve` with `eval_every` and `eval_all`. Prints one JSON object, which
gives the reason for each figure whose runs are missing. The sandbox's figures say nothing about real models.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from agentic_prompting.evolution import read_lineage
from agentic_prompting.evolution.lineage import LINES, figure_class
from benchmarks.learning.espl_sandbox import spearman

ROOT = Path(__file__).parents[2]
CONFIGS = {
    "aime25": "dapo100_aime25",
    "hmmt": "hmmt",
    "beyondaime": "aime_beyondaime",
    "search": "nq_hotpotqa",
}
"""The configuration of each pair; with `--sandbox` the pair is `sandbox`."""

VARIANTS: dict[str, list[str]] = {
    "joint": ["--p_crossover", "0.2"],
    "mutation_only": ["--p_crossover", "0.0"],
    "policy_edits": ["--reflector", "policy"],
    # GRPO: advantages divided by the deviation, 1/|o| inside the sum; CISPO: clipped weights, a mean over all tokens.
    "rl_grpo": ["--mode", "rl", "--loss_type", "grpo", "--scale_rewards", "group"],
    "rl_cispo": [
        "--mode",
        "rl",
        "--loss_type",
        "cispo",
        "--scale_rewards",
        "group",
        "--epsilon_high",
        "5.0",
    ],
    "evolution": ["--mode", "evolution"],
    "reflection": ["--mode", "reflection"],
}
"""The options in which each variant differs from the configuration."""


class Figure(NamedTuple):
    """A figure of the paper: its title, the kind of drawing, and the variants that it compares."""

    title: str
    kind: str
    variants: Sequence[str]


FIGURES = {
    "1": Figure("evolving system prompts helps RL generalize", "bars", ("rl_grpo", "joint")),
    "8": Figure("learned ratings against held-out success", "ratings", ("joint",)),
    "11": Figure(
        "held-out success", "bars", ("reflection", "evolution", "rl_grpo", "rl_cispo", "joint")
    ),
    "12": Figure("held-out success while learning", "curves", ("evolution", "rl_grpo", "joint")),
    "13": Figure("agentic search", "bars", ("evolution", "rl_grpo", "joint")),
    "14": Figure("with crossover and without", "curves", ("rl_grpo", "mutation_only", "joint")),
    "15": Figure("who edits", "curves", ("policy_edits", "joint")),
}


def command(pair: str, variant: str, runs: Path, options: Sequence[str] = ()) -> list[str]:
    """The command's words that train a variant."""
    config = ROOT / "examples" / "configs" / "espl" / f"{CONFIGS.get(pair, pair)}.yaml"
    chosen = VARIANTS[variant]
    if (
        variant == "joint"
        and pair != "sandbox"
        and "p_crossover: 0.0" in config.read_text(encoding="utf-8")
    ):
        chosen = VARIANTS["mutation_only"]  # BeyondAIME: the paper's best is without crossover
    where = ["--config", str(config), "--output_dir", str(runs / pair / variant)]
    return ["espl", *where, *chosen, *options]


# The results of a run ------------------------------------------------------------------------------------------------


def curve_of(run: Path) -> list[tuple[int, float]]:
    """Step and mean held-out reward, read from a trainer's folder or from `evolve`'s checkpoint in it."""
    if (state := run / "trainer_state.json").exists():
        log = json.loads(state.read_text(encoding="utf-8"))["log_history"]
        return [
            (entry["step"], entry["eval_reward"])
            for entry in log
            if entry.get("eval_reward") is not None
        ]
    if (state := run / "state.json").exists():
        steps = json.loads(state.read_text(encoding="utf-8"))["steps"]
        return [
            (step["step"] + 1, step["held_out"])
            for step in steps
            if step.get("held_out") is not None
        ]
    return []


def ratings_of(run: Path) -> list[dict[str, Any]]:
    """Id, μ, σ, score and operator of each prompt whose held-out score was measured."""
    path = next(
        (run / name for name in ("population.json", "state.json") if (run / name).exists()), None
    )
    members = [node.member for node in read_lineage(path).nodes] if path else []
    return [
        {
            "id": member.prompt.id,
            "mu": member.rating.mu,
            "sigma": member.rating.sigma,
            "held_out": member.held_out["mean"],
            "operator": member.prompt.operator,
        }
        for member in members
        if member.held_out and member.matches
    ]


def data_of(figure: Figure, runs: Mapping[str, Path]) -> dict[str, Any]:
    """The data of a figure: `shown` by variant, and `missing` with the reasons."""
    if figure.kind == "ratings":
        points_by_variant: dict[str, Any] = {
            name: ratings_of(runs[name]) for name in figure.variants
        }
    else:
        points_by_variant = {name: curve_of(runs[name]) for name in figure.variants}
    shown = {name: points for name, points in points_by_variant.items() if points}
    if (
        figure.kind == "bars"
    ):  # the mean of the last three evaluations, so that no lucky one is chosen
        shown = {name: fmean(value for _, value in points[-3:]) for name, points in shown.items()}
    why = "no prompt has a held-out score" if figure.kind == "ratings" else "no held-out rewards"
    data = {
        "shown": shown,
        "missing": {
            name: f"{runs[name]}: {why}" for name, points in points_by_variant.items() if not points
        },
    }
    if figure.kind == "ratings":
        data["spearman"] = {name: _spearman(points) for name, points in shown.items()}
    return data


def _spearman(points: Sequence[Mapping[str, Any]]) -> float | None:
    """The rank correlation of rating and held-out score; `None` where one of them does not vary."""
    value = spearman([point["mu"] for point in points], [point["held_out"] for point in points])
    return None if value != value else round(value, 3)


def draw(figure: Figure, shown: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw a figure and write it to `path`."""
    picture = figure_class()(figsize=(6, 3.6), layout="constrained")
    axis = picture.subplots()
    axis.set_title(title)
    if figure.kind == "bars":
        bars = axis.bar(
            list(shown),
            list(shown.values()),
            color=[LINES[n % len(LINES)][0] for n in range(len(shown))],
        )
        axis.bar_label(bars, fmt="%.3f")
        axis.set_ylabel("held-out reward")
    elif figure.kind == "curves":
        for (name, points), (colour, dashes) in zip(shown.items(), LINES, strict=False):
            axis.plot(
                *zip(*points, strict=True), label=name, color=colour, dashes=dashes, marker="."
            )
        axis.set(xlabel="training step", ylabel="held-out reward")
        axis.legend(fontsize="small")
    else:
        for points in shown.values():
            mu = [point["mu"] for point in points]
            score = [point["held_out"] for point in points]
            axis.errorbar(
                mu,
                score,
                xerr=[point["sigma"] for point in points],
                fmt="o",
                color=LINES[0][0],
                ecolor="#9CC9E3",
            )
            for point in points:
                axis.annotate(
                    str(point["id"]),
                    (point["mu"], point["held_out"]),
                    (4, 4),
                    textcoords="offset points",
                )
        axis.set(xlabel="rating μ ± σ", ylabel="held-out reward")
    axis.grid(alpha=0.3)
    picture.savefig(path, dpi=110)


# The sandbox, and the command line -----------------------------------------------------------------------------------

SANDBOX = shlex.split(
    "--seed 0 --n_test 64 --eval_strategy steps --per_device_eval_batch_size 64 --eval_all true"
)


def train(pair: str, variant: str, runs: Path, options: Sequence[str]) -> None:
    """Train a variant in a process of its own, from the warm start that all variants share."""
    import shutil

    from agentic_prompting.sandbox.setup import prepare_guarded

    folder = runs / pair / variant
    prepare_guarded(runs / pair)
    shutil.copytree(runs / pair / "warm_start", folder / "warm_start", dirs_exist_ok=True)
    program = [
        sys.executable,
        "-m",
        "agentic_prompting.cli.train_program",
        *command(pair, variant, runs, options),
    ]
    subprocess.run(program, check=True, stdout=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the commands, with `--sandbox` run them, and draw the figures of finished runs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pair", choices=CONFIGS, help="training and held-out set of the figures")
    parser.add_argument(
        "--sandbox", action="store_true", help="train all variants in the sandbox instead"
    )
    parser.add_argument(
        "--figures", nargs="+", choices=FIGURES, default=list(FIGURES), help="all by default"
    )
    parser.add_argument("--steps", type=int, default=12, help="of each training in the sandbox")
    parser.add_argument("--runs", type=Path, default=Path("runs/espl"), help="where the runs are")
    parser.add_argument("--draw", type=Path, help="folder for the pictures")
    options = parser.parse_args(arguments)
    if options.sandbox == bool(options.pair):
        parser.error(f"say --sandbox, or which --pair: {', '.join(CONFIGS)}")
    pair = options.pair or "sandbox"
    figures = {name: FIGURES[name] for name in options.figures}
    runs = {name: options.runs / pair / name for name in VARIANTS}
    needed = dict.fromkeys(name for figure in figures.values() for name in figure.variants)
    missing = [name for name in needed if not curve_of(runs[name])]
    if options.sandbox:
        every = max(1, options.steps // 6)
        for name in missing:
            train(
                pair,
                name,
                options.runs,
                [*SANDBOX, "--max_steps", str(options.steps), "--eval_steps", str(every)],
            )
        missing = []
    result: dict[str, Any] = {
        "pair": pair,
        "figures": {name: data_of(figure, runs) for name, figure in figures.items()},
    }
    start = ["accelerate", "launch", "--quiet", "-m", "agentic_prompting.cli.train_program"]
    result["to_train"] = {
        name: shlex.join([*start, *command(pair, name, options.runs)]) for name in missing
    }
    for name, figure in figures.items():
        if options.draw and result["figures"][name]["shown"]:
            options.draw.mkdir(parents=True, exist_ok=True)
            picture = options.draw / f"figure_{name}_{pair}.png"
            title = f"{figure.title}, {pair}{' (says nothing about real models)' if options.sandbox else ''}"
            draw(figure, result["figures"][name]["shown"], picture, title)
            result["figures"][name]["picture"] = str(picture)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
