"""Ablations of Prompt-R1 in the sandbox: fewer turns, no RL, no environment, no agent, a noisier oracle.

    OMP_NUM_THREADS=1 python benchmarks/prompt_r1_sandbox.py            # 3 seeds, about a quarter of an hour
    OMP_NUM_THREADS=1 python benchmarks/prompt_r1_sandbox.py --quick    # 1 seed, fewer steps, under 3 minutes

Prints Markdown tables; with `--json` one JSON object as the last line. What it measures is the sandbox: a policy of
390,000 parameters and a scripted oracle. It says which part of the method does what there, nothing about real models.

The numbers of the training are those of `examples/configs/sandbox.yaml`, read from it. The oracle is asked as a
[`ChatModel`] in this process, not over HTTP as in the demo: what it says is the same. Every seed has its own split,
weights, traces and oracle; all settings of a seed share one warm start and are asked the same held-out questions with
the same random numbers. One function per setting, below `# --- settings`.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import datasets
import torch
import transformers
import yaml

from agentic_prompting import AgentSpec, LLMEnvironment, PromptAgent, PromptR1Config, PromptR1Trainer, exact_match
from agentic_prompting.evaluation import Estimate, bootstrap_interval, wilson_interval
from agentic_prompting.llm import complete
from agentic_prompting.rewards import token_f1_reward
from agentic_prompting.rollout import Environment, Rollout
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.setup import Sandbox, prepare_sandbox
from agentic_prompting.sandbox.world import value_of

CONFIG = Path(__file__).parents[1] / "examples" / "configs" / "sandbox.yaml"
SEEDS = (101, 102, 103)  # none that the sandbox was made with
PROTOCOL_SEEDS = (601, 602, 603, 604, 605)  # of docs/evidence.md
NOISES = (0.0, 0.02, 0.05, 0.1)
QUICK_SHARE_OF_STEPS = 0.2  # of GRPO; the warm start stays, without it there is nothing to train


@dataclass(frozen=True)
class Outcome:
    """One setting on the held-out questions of one seed.

    Args:
        correct (`tuple[int, ...]`): 1 or 0 per question, in the order of the questions.
        hops (`tuple[int, ...]`): Of each question.
        turns (`float`): Turns of the agent, mean; 0 without an agent.
        answered (`float`): Share that ended on an answer, right or wrong.
    """

    correct: tuple[int, ...]
    hops: tuple[int, ...]
    turns: float
    answered: float


# --- pure: bounds, summaries, tables ------------------------------------------------------------------------------


def transfer_bounds(noise: float, interactions: int) -> tuple[float, float]:
    """How far a policy's value may move when each reply's distribution moves by `noise` in total variation.

    Args:
        noise (`float`): ε of eq 44.
        interactions (`int`): T of eq 45, the replies one episode can hold.

    Returns:
        `tuple[float, float]`: `1 - (1 - ε)^T` and `T ε`, the two bounds of eq 45-46; the first is the tighter one.
    """
    return 1 - (1 - noise) ** interactions, interactions * noise


def share(values: Iterable[int]) -> Estimate:
    """Share of ones with its 95 % Wilson interval."""
    values = list(values)
    return wilson_interval(sum(values), len(values))


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One setting over all seeds: exact match pooled and per seed, by hops, turns."""
    pooled = [one for outcome in outcomes for one in outcome.correct]
    estimate = share(pooled)
    per_seed = [sum(outcome.correct) / len(outcome.correct) for outcome in outcomes]
    hops = [n for outcome in outcomes for n in outcome.hops]
    return {
        "exact_match": round(estimate.mean, 4),
        "interval": [round(estimate.low, 4), round(estimate.high, 4)],
        "questions": estimate.n,
        "per_seed": [round(value, 4) for value in per_seed],
        "spread": round(max(per_seed) - min(per_seed), 4),
        "by_hops": {
            str(n): round(share(one for one, h in zip(pooled, hops, strict=True) if h == n).mean, 4)
            for n in sorted(set(hops))
        },
        "turns": round(sum(outcome.turns for outcome in outcomes) / len(outcomes), 3),
        "answered": round(sum(outcome.answered for outcome in outcomes) / len(outcomes), 4),
    }


def paired_difference(ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> dict[str, Any]:
    """Exact match of `ours` minus that of `theirs` on the same questions, with a 95 % bootstrap interval."""
    differences = [
        float(a - b)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one.correct, other.correct, strict=True)
    ]
    estimate = bootstrap_interval(differences)
    return {"difference": round(estimate.mean, 4), "interval": [round(estimate.low, 4), round(estimate.high, 4)]}


def transfer_report(
    trained: dict[float, list[Outcome]], untrained: dict[float, list[Outcome]], interactions: int
) -> list[dict[str, Any]]:
    """Proposition 3 in numbers: one entry per noise, what was measured beside the bounds of eq 45-49.

    Args:
        trained (`dict[float, list[Outcome]]`), untrained (`dict[float, list[Outcome]]`): Outcomes per seed, by noise.
        interactions (`int`): T.
    """
    report = []
    margin_at_home = paired_difference(trained[0.0], untrained[0.0])["difference"]
    for noise in trained:
        bound, linear = transfer_bounds(noise, interactions)
        margin, least = paired_difference(trained[noise], untrained[noise]), margin_at_home - 2 * linear
        report.append(
            {
                "noise": noise,
                "bound": round(bound, 4),
                "linear_bound": round(linear, 4),
                "trained": _moved(trained[noise], trained[0.0], bound),
                "untrained": _moved(untrained[noise], untrained[0.0], bound),
                "margin": margin,
                "least_margin": round(least, 4),
                "least_margin_kept": margin["difference"] >= least,
                "superiority_guaranteed": least > 0,
            }
        )
    return report


def _moved(there: Sequence[Outcome], at_home: Sequence[Outcome], bound: float) -> dict[str, Any]:
    change = paired_difference(there, at_home)
    # Judged by the interval's far end, not by the mean, so that "within" is not a matter of luck.
    within = max(abs(end) for end in change["interval"]) <= bound
    return {**summarise(there), "change": change, "within": within}


def ablation_table(summaries: dict[str, dict[str, Any]]) -> str:
    """The settings as a Markdown table."""
    lines = [
        "| setting | exact match [95 %] | per seed | spread | 2 hops | 3 hops | turns | answered |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in summaries.items():
        cells = [
            name,
            _with_interval(row["exact_match"], row["interval"]),
            ", ".join(f"{value:.3f}" for value in row["per_seed"]),
            f"{row['spread']:.3f}",
            *(f"{row['by_hops'][hops]:.3f}" if hops in row["by_hops"] else "–" for hops in ("2", "3")),
            f"{row['turns']:.2f}",
            f"{row['answered']:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def transfer_table(report: Sequence[dict[str, Any]]) -> str:
    """Values and their changes as a Markdown table."""
    lines = [
        "| ε | agent | exact match V [95 %] | per seed | change from ε = 0 [95 %] | 1-(1-ε)^T | Tε | within |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in report:
        for agent in ("trained", "untrained"):
            row = entry[agent]
            cells = [
                f"{entry['noise']:g}",
                agent,
                _with_interval(row["exact_match"], row["interval"]),
                ", ".join(f"{value:.3f}" for value in row["per_seed"]),
                _with_interval(row["change"]["difference"], row["change"]["interval"], sign="+"),
                f"{entry['bound']:.3f}",
                f"{entry['linear_bound']:.3f}",
                "yes" if row["within"] else "no",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def margin_table(report: Sequence[dict[str, Any]]) -> str:
    """Whether the trained agent stays the better one, as a Markdown table."""
    lines = [
        "| ε | trained - untrained [95 %] | at least, by eq 48 | kept | superiority guaranteed (eq 49) |",
        "|---|---|---|---|---|",
    ]
    for entry in report:
        margin = entry["margin"]
        cells = [
            f"{entry['noise']:g}",
            _with_interval(margin["difference"], margin["interval"], sign="+"),
            f"{entry['least_margin']:+.3f}",
            *("yes" if entry[key] else "no" for key in ("least_margin_kept", "superiority_guaranteed")),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_interval(value: float, interval: Sequence[float], sign: str = "") -> str:
    return f"{value:{sign}.3f} [{interval[0]:{sign}.3f}, {interval[1]:{sign}.3f}]"


# --- one seed -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What all settings of a seed share.

    Args:
        seed (`int`): Of split, weights, traces, oracle, training and evaluation.
        folder (`Path`): Where its models go.
        sandbox ([`Sandbox`]): Data and warm start.
        arguments (`dict`): Of [`PromptR1Config`], from the YAML file.
        trained (`Path`, *optional*): The agent trained as in the demo.
    """

    seed: int
    folder: Path
    sandbox: Sandbox
    arguments: dict[str, Any]
    trained: Path | None = None

    def environment(self, noise: float = 0.0) -> LLMEnvironment:
        """The seed's oracle; noise changes single facts and leaves its guesses as they are."""
        return LLMEnvironment(Oracle(seed=self.seed, noise=noise))

    @property
    def agent(self) -> Path:
        if self.trained is None:
            raise RuntimeError("this setting needs the trained agent: train it first")
        return self.trained


def prepare(seed: int, folder: Path, max_steps_share: float, by: Literal["country", "question"] = "country") -> Run:
    """Warm start and train as the demo does, on questions split by country or, as once, by question."""
    arguments = {key: value for key, value in yaml.safe_load(CONFIG.read_text()).items() if key != "sandbox"}
    arguments["max_steps"] = round(arguments["max_steps"] * max_steps_share)
    started = time.perf_counter()
    with redirect_stdout(io.StringIO()):
        sandbox = prepare_sandbox(folder, seed, by=by)
    log(f"seed {seed}: warm start, {time.perf_counter() - started:.0f} s")
    run = Run(seed, folder, sandbox, arguments)
    return replace(run, trained=train(run, "trained", run.environment()))


def train(run: Run, name: str, environment: Environment | None, reward_funcs: Any = None, **changes: Any) -> Path:
    """GRPO from the seed's warm start; `changes` replace values of the YAML file. Returns the agent's folder."""
    started, folder = time.perf_counter(), run.folder / name
    values = {**run.arguments, "output_dir": str(folder), "seed": run.seed, **changes}
    args = PromptR1Config(**values, disable_tqdm=True, rollouts_max_mb=0)
    trainer = PromptR1Trainer(
        str(run.sandbox.model),
        reward_funcs,
        args,
        run.sandbox.train,
        environment=environment,
        prompt_template=run.sandbox.spec.prompt_template,
    )
    with redirect_stdout(io.StringIO()):  # with its progress bar off, transformers prints every log
        trainer.train()
    trainer.save_model(str(folder))
    log(f"seed {run.seed}: {name}, {args.max_steps} steps, {time.perf_counter() - started:.0f} s")
    return folder


def evaluate(run: Run, model: Path, environment: Environment | None, max_turns: int | None = None) -> Outcome:
    """Ask an agent the held-out questions, with at most `max_turns` turns if given."""
    spec = AgentSpec.load(model)
    if max_turns is not None:
        spec = replace(spec, limits=replace(spec.limits, max_turns=max_turns))
    agent = PromptAgent.from_pretrained(model, environment, spec, max_batch_size=256)
    return outcome_of(agent.answer_all(list(run.sandbox.test), seed=run.seed, progress=False))


def outcome_of(rollouts: Sequence[Rollout]) -> Outcome:
    """Score finished rollouts.

    Raises:
        `RuntimeError`: If one failed. The oracle in this process has no reason to, so the numbers would be of a bug.
    """
    statuses = Counter(rollout.status for rollout in rollouts)
    if statuses["failed"]:
        raise RuntimeError(f"{statuses['failed']} of {len(rollouts)} rollouts failed; nothing was scored")
    return Outcome(
        correct=tuple(int(exact_match(rollout.answer or "", rollout.row["answers"])) for rollout in rollouts),
        hops=tuple(rollout.row["meta"]["hops"] for rollout in rollouts),
        turns=sum(len(rollout.turns) for rollout in rollouts) / len(rollouts),
        answered=statuses["answered"] / len(rollouts),
    )


# --- settings: one function each ----------------------------------------------------------------------------------


def trained_used_with(run: Run, max_turns: int) -> Outcome:
    """The trained agent, allowed `max_turns` turns in use. Its training is not repeated."""
    return evaluate(run, run.agent, run.environment(), max_turns)


def trained_for(run: Run, max_turns: int) -> Outcome:
    """An agent trained with that many turns from the start, and used so."""
    environment = run.environment()
    return evaluate(run, train(run, f"trained_for_{max_turns}", environment, max_turns=max_turns), environment)


def without_rl(run: Run) -> Outcome:
    """The warm start as it is."""
    return evaluate(run, run.sandbox.model, run.environment())


def without_environment(run: Run) -> Outcome:
    """The trained agent with nobody to ask: a request ends the episode."""
    return evaluate(run, run.agent, None)


def trained_without_environment(run: Run) -> Outcome:
    """Trained to answer by itself, by the paper's reward; which, without an interaction, never rewards an answer."""
    return evaluate(run, train(run, "trained_alone", None, max_turns=1), None)


def trained_without_environment_by_f1(run: Run) -> Outcome:
    """Trained to answer by itself, rewarded by the answer's F1: what the tiny policy can know on its own."""
    return evaluate(run, train(run, "trained_alone_f1", None, token_f1_reward, max_turns=1), None)


def without_agent(run: Run) -> Outcome:
    """The oracle, asked the question as it stands."""
    oracle, rows = Oracle(seed=run.seed), list(run.sandbox.test)
    values = [value_of(complete(oracle, row["question"]).text) for row in rows]
    return Outcome(
        correct=tuple(int(exact_match(value or "", row["answers"])) for value, row in zip(values, rows, strict=True)),
        hops=tuple(row["meta"]["hops"] for row in rows),
        turns=0.0,
        answered=sum(value is not None for value in values) / len(values),
    )


def trained_with_strict_gate(run: Run) -> Outcome:
    """Trained with the reward whose ending has to be earned (`gate="strict"`)."""
    environment = run.environment()
    return evaluate(run, train(run, "strict", environment, gate="strict"), environment)


def trained_with_noise(run: Run, noise: float) -> Outcome:
    """Trained with the noiseless oracle, used with a noisier one."""
    return evaluate(run, run.agent, run.environment(noise))


def untrained_with_noise(run: Run, noise: float) -> Outcome:
    """The warm start with a noisier oracle."""
    return evaluate(run, run.sandbox.model, run.environment(noise))


SETTINGS: dict[str, Callable[[Run], Outcome]] = {
    "trained, 5 turns (full)": partial(trained_used_with, max_turns=5),
    "trained, used with 4 turns": partial(trained_used_with, max_turns=4),
    "trained, used with 3 turns": partial(trained_used_with, max_turns=3),
    "trained, used with 2 turns": partial(trained_used_with, max_turns=2),
    "trained, used with 1 turn": partial(trained_used_with, max_turns=1),
    "trained for 2 turns, used with 2": partial(trained_for, max_turns=2),
    "trained with the strict gate": trained_with_strict_gate,
    "without RL (warm start)": without_rl,
    "without environment, in use only": without_environment,
    "without environment, trained so": trained_without_environment,
    "without environment, trained so by F1": trained_without_environment_by_f1,
    "without agent (oracle alone)": without_agent,
}


# --- the script ---------------------------------------------------------------------------------------------------


def log(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measured(run: Run, name: str, setting: Callable[[Run], Outcome]) -> Outcome:
    started = time.perf_counter()
    outcome = setting(run)
    right = share(outcome.correct)
    log(f"seed {run.seed}: {name}: exact match {right.mean:.3f}, {time.perf_counter() - started:.0f} s")
    return outcome


def run_all(seeds: Sequence[int], folder: Path, max_steps_share: float) -> dict[str, Any]:
    """Every setting on every seed."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in SETTINGS}
    trained: dict[float, list[Outcome]] = {noise: [] for noise in NOISES}
    untrained: dict[float, list[Outcome]] = {noise: [] for noise in NOISES}
    for seed in seeds:
        run = prepare(seed, folder / f"seed-{seed}", max_steps_share)
        for name, setting in SETTINGS.items():
            outcomes[name].append(measured(run, name, setting))
        for noise in NOISES:
            trained[noise].append(measured(run, f"trained, ε={noise}", partial(trained_with_noise, noise=noise)))
            untrained[noise].append(measured(run, f"untrained, ε={noise}", partial(untrained_with_noise, noise=noise)))
    interactions = AgentSpec.load(run.agent).limits.max_turns - 1  # the last turn answers
    return {
        "steps": run.arguments["max_steps"],
        "settings": {name: summarise(of_setting) for name, of_setting in outcomes.items()},
        "interactions": interactions,
        "transfer": transfer_report(trained, untrained, interactions),
    }


def record_splits(seeds: Sequence[int], folder: Path, records: Path) -> None:
    """Append to `records` what each question got before and after training, by either split; see recompute.py."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    for seed in seeds:
        for by in ("country", "question"):
            run = prepare(seed, folder / f"{by}-{seed}", 1.0, by)
            correct = {
                when: "".join(map(str, evaluate(run, model, run.environment()).correct))
                for when, model in (("before", run.sandbox.model), ("after", run.agent))
            }
            shown = ", ".join(f"{when} {of.count('1') / len(of):.3f}" for when, of in correct.items())
            log(f"seed {seed}, by {by}: {shown}")
            with gzip.open(records, "at", encoding="utf-8") as file:
                file.write(json.dumps({"split": by, "seed": seed, "commit": commit, **correct}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Ablations of Prompt-R1 in the sandbox.")
    parser.add_argument("--quick", action="store_true", help="one seed, fewer GRPO steps")
    parser.add_argument("--seeds", type=int, nargs="+", help=f"default: {SEEDS}, or the first of them with --quick")
    parser.add_argument("--output", type=Path, help="keep the trained models in this new or empty folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument(
        "--splits", type=Path, help="only compare splits by country and by question, into this .jsonl.gz"
    )
    options = parser.parse_args()
    if options.output and options.output.exists() and any(options.output.iterdir()):
        parser.error(f"{options.output} is not empty; a warm start found there would be used again: take another")
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    datasets.disable_progress_bars()
    seeds, started = options.seeds or (SEEDS[:1] if options.quick else SEEDS), time.perf_counter()
    if options.splits:
        with tempfile.TemporaryDirectory() as temporary:
            record_splits(options.seeds or PROTOCOL_SEEDS, Path(temporary), options.splits)
        return
    with tempfile.TemporaryDirectory() as temporary:
        result = run_all(seeds, options.output or Path(temporary), QUICK_SHARE_OF_STEPS if options.quick else 1.0)
    seconds = round(time.perf_counter() - started)
    print(
        f"Prompt-R1 in the sandbox (a tiny policy and a scripted oracle; says nothing about real models): "
        f"{len(seeds)} seed(s) {', '.join(map(str, seeds))}, {result['steps']} GRPO steps, {seconds} s, "
        f"{torch.get_num_threads()} thread(s)\n\n{ablation_table(result['settings'])}\n\n"
        f"Transfer (Proposition 3), T = {result['interactions']} interactions\n\n"
        f"{transfer_table(result['transfer'])}\n\n{margin_table(result['transfer'])}"
    )
    if options.json:
        print(json.dumps({"sandbox": True, "quick": options.quick, "seeds": list(seeds), "seconds": seconds, **result}))


if __name__ == "__main__":
    main()
