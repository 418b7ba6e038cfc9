"""E-SPL's figures, drawn from finished runs, and the commands that train the runs that are missing.

    python -m benchmarks.learning.espl_figures --pair hmmt  # commands still to be run
    python -m benchmarks.learning.espl_figures --pair hmmt --draw figures  # Figures 1, 8, 11 to 15
    python -m benchmarks.learning.espl_figures --sandbox --draw figures  # trains and draws, on two cores, in minutes

A run is a folder `runs/espl/PAIR/VARIANT` that ESPLTrainer wrote (`trainer_state.json` with
held-out rewards, `population.json`), or the checkpoint of `evolve` with `eval_every` and
`eval_all`. Prints one JSON object, which gives the reason for each figure whose runs are missing.
The sandbox's figures say nothing about real models.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import chain
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
    # GRPO: advantages divided by the deviation, 1/|o| inside the sum; CISPO: clipped weights, a
    # mean over all tokens.
    "rl_grpo": ["--mode", "rl", "--loss_type", "grpo", "--scale_rewards", "group"],
    "rl_cispo": shlex.split("--mode rl --loss_type cispo --scale_rewards group --epsilon_high 5.0"),
    "evolution": ["--mode", "evolution"],
    "reflection": ["--mode", "reflection"],
}
"""The options in which each variant differs from the configuration."""


class Figure(NamedTuple):
    """A figure of the paper: its title, its form (`bars`, `curves` or `ratings`), and the variants
    that it compares.
    """

    title: str
    form: str
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
    # BeyondAIME: the paper's best is without crossover.
    without_crossover = "p_crossover: 0.0" in config.read_text(encoding="utf-8")
    if variant == "joint" and pair != "sandbox" and without_crossover:
        variant_options = VARIANTS["mutation_only"]
    else:
        variant_options = VARIANTS[variant]
    paths = ["--config", str(config), "--output_dir", str(runs / pair / variant)]
    return ["espl", *paths, *variant_options, *options]


# The results of a run
# ------------------------------------------------------------------------------------------------


def curve_of(run: Path) -> list[tuple[int, float]]:
    """Step and mean held-out reward, read from a trainer's folder or from `evolve`'s checkpoint in
    it.
    """
    trainer_state = run / "trainer_state.json"
    if trainer_state.exists():
        log = json.loads(trainer_state.read_text(encoding="utf-8"))["log_history"]
        evaluated = [entry for entry in log if entry.get("eval_reward") is not None]
        return [(entry["step"], entry["eval_reward"]) for entry in evaluated]
    checkpoint = run / "state.json"
    if checkpoint.exists():
        steps = json.loads(checkpoint.read_text(encoding="utf-8"))["steps"]
        evaluated = [step for step in steps if step.get("held_out") is not None]
        return [(step["step"] + 1, step["held_out"]) for step in evaluated]
    return []


def ratings_of(run: Path) -> list[dict[str, Any]]:
    """Id, μ, σ, score and operator of each prompt whose held-out score was measured."""
    paths = [run / name for name in ("population.json", "state.json") if (run / name).exists()]
    if not paths:
        return []
    ratings = []
    for node in read_lineage(paths[0]).nodes:
        member = node.member
        if member.held_out and member.matches:
            ratings.append(
                {
                    "id": member.prompt.id,
                    "mu": member.rating.mu,
                    "sigma": member.rating.sigma,
                    "held_out": member.held_out["mean"],
                    "operator": member.prompt.operator,
                }
            )
    return ratings


def data_of(figure: Figure, runs: Mapping[str, Path]) -> dict[str, Any]:
    """The data of a figure: `shown` by variant, and `missing` with the reasons."""
    read_points = ratings_of if figure.form == "ratings" else curve_of
    reason = "no prompt has a held-out score" if figure.form == "ratings" else "no held-out rewards"
    points_by_variant: dict[str, Any] = {}
    missing = {}
    for name in figure.variants:
        points = read_points(runs[name])
        if points:
            points_by_variant[name] = points
        else:
            missing[name] = f"{runs[name]}: {reason}"

    if figure.form == "bars":
        # The mean of the last three evaluations, so that no lucky one is chosen.
        bars = {}
        for name, points in points_by_variant.items():
            bars[name] = fmean(score for _, score in points[-3:])
        return {"shown": bars, "missing": missing}
    data = {"shown": points_by_variant, "missing": missing}
    if figure.form == "ratings":
        data["spearman"] = {name: _spearman(points) for name, points in points_by_variant.items()}
    return data


def _spearman(points: Sequence[Mapping[str, Any]]) -> float | None:
    """The rank correlation of rating and held-out score; `None` where one of them does not vary."""
    value = spearman([point["mu"] for point in points], [point["held_out"] for point in points])
    return None if value != value else round(value, 3)


def draw(figure: Figure, values: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw a figure of what its variants have reached and write it to `path`."""
    picture = figure_class()(figsize=(6, 3.6), layout="constrained")
    axis = picture.subplots()
    axis.set_title(title)
    if figure.form == "bars":
        colours = [LINES[number % len(LINES)][0] for number in range(len(values))]
        bars = axis.bar(list(values), list(values.values()), color=colours)
        axis.bar_label(bars, fmt="%.3f")
        axis.set_ylabel("held-out reward")
    elif figure.form == "curves":
        for (name, points), (colour, dashes) in zip(values.items(), LINES, strict=False):
            steps, rewards = zip(*points, strict=True)
            axis.plot(steps, rewards, label=name, color=colour, dashes=dashes, marker=".")
        axis.set(xlabel="training step", ylabel="held-out reward")
        axis.legend(fontsize="small")
    else:
        for points in values.values():
            ratings = [point["mu"] for point in points]
            scores = [point["held_out"] for point in points]
            deviations = [point["sigma"] for point in points]
            colour = LINES[0][0]
            axis.errorbar(ratings, scores, xerr=deviations, fmt="o", color=colour, ecolor="#9CC9E3")
            for point in points:
                position = (point["mu"], point["held_out"])
                axis.annotate(str(point["id"]), position, (4, 4), textcoords="offset points")
        axis.set(xlabel="rating μ ± σ", ylabel="held-out reward")
    axis.grid(alpha=0.3)
    picture.savefig(path, dpi=110)


# The sandbox, and the command line
# -----------------------------------------------------------------------------------

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
    program = [sys.executable, "-m", "agentic_prompting.cli.train_program"]
    arguments = command(pair, variant, runs, options)
    subprocess.run([*program, *arguments], check=True, stdout=sys.stderr)


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

    # Variants of these figures without a finished run: trained here in the sandbox, else named with
    # their commands.
    needed = dict.fromkeys(chain.from_iterable(figure.variants for figure in figures.values()))
    missing = [name for name in needed if not curve_of(runs[name])]
    if options.sandbox:
        eval_steps = max(1, options.steps // 6)
        lengths = ["--max_steps", str(options.steps), "--eval_steps", str(eval_steps)]
        for name in missing:
            train(pair, name, options.runs, [*SANDBOX, *lengths])
        missing = []
    data = {name: data_of(figure, runs) for name, figure in figures.items()}
    launch = ["accelerate", "launch", "--quiet", "-m", "agentic_prompting.cli.train_program"]
    to_train = {}
    for name in missing:
        to_train[name] = shlex.join([*launch, *command(pair, name, options.runs)])
    result = {"pair": pair, "figures": data, "to_train": to_train}

    if options.draw:
        note = " (says nothing about real models)" if options.sandbox else ""
        for name, figure in figures.items():
            if data[name]["shown"]:
                options.draw.mkdir(parents=True, exist_ok=True)
                picture = options.draw / f"figure_{name}_{pair}.png"
                draw(figure, data[name]["shown"], picture, f"{figure.title}, {pair}{note}")
                data[name]["picture"] = str(picture)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
