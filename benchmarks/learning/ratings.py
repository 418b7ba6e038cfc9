"""Ratings and selection rules in a simulation: which of them choose good prompts, with reflectors
that are often wrong?

    python -m benchmarks.learning.ratings --json  # a few minutes
    python -m benchmarks.learning.ratings --json --quick  # few replications
    python -m benchmarks.learning.ratings --json --record  # also replaces records/simulated.jsonl.gz

The population, its ratings and its rules are the library's; rewards and reflector are simulated.
The records also hold paired ratings and the rule `top_two`, which gained nothing in training and
left the library (commit 7a6afd6).

A prompt has some of five principles that help and any number that harm. How many of its attempts at
a problem succeed follows from them, from the problem, and from weights that get better. In every
batch the best prompt by its scores has a child, which is better, worse or unchanged, as often as
the reflector is right, wrong or idle. A replication is a seed, the same for every rule.

`chosen` is the true quality of the prompt that the run ends with, `spearman` the rank correlation
of rating and true quality among the candidates at the end, `played` the mean quality of what was
played. Quality is the expected share of right answers under the final weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_prompting.evolution import (
    Attempt,
    Outcome,
    Population,
    PopulationEvolution,
    ProblemResult,
    PromptResult,
    SystemPrompt,
)
from benchmarks.lab import RECORDS as RECORDED, Records, interval, log, markdown, shown
from benchmarks.learning.espl_sandbox import spearman

RECORDS = RECORDED / "simulated.jsonl.gz"
REPLICATIONS = 60
QUICK = 4
STEPS = 30
PROBLEMS = 8
PROMPTS = 3
ROLLOUTS = 4
# all but the first in logits
HELPFUL = 5
SIZE = 0.6
SPREAD = 1.2
INTERACTION = 0.4
DRIFT = 0.03
REFLECTORS = {
    "right .6, wrong .1": (0.6, 0.1),
    "right .45, wrong .3": (0.45, 0.3),
    "right .3, wrong .5": (0.3, 0.5),
}
RULES = ("top_plus_random", "softmax", "uniform")
RATING = "trueskill"
DEFAULT = "trueskill, top_plus_random"


class World:
    """Prompts of known quality under weights that learn."""

    def __init__(self, rng: random.Random):
        self.rng = rng
        self.step = 0
        self.problems = [rng.gauss(0, SPREAD) for _ in range(200)]
        self.gain = rng.uniform(1.0, 2.5)
        self.drifted: dict[int, float] = {0: 0.0}

    def strength(self, prompt: SystemPrompt) -> float:
        """The prompt's effect in logits, under the weights of the moment."""
        texts = prompt.principles or ()
        helpful_count = sum(text.startswith("help") for text in texts)
        return SIZE * (2 * helpful_count - len(texts)) + self.drifted[prompt.id or 0]

    def level(self) -> float:
        return -2.0 + self.gain * self.step / STEPS

    def quality(self, prompt: SystemPrompt) -> float:
        """The expected share of right answers under a prompt."""
        return statistics.fmean(
            _sigmoid(self.level() + self.strength(prompt) + ease) for ease in self.problems
        )

    def play(self, prompts: Sequence[SystemPrompt]) -> list[PromptResult]:
        """Let each prompt attempt the same new problems."""
        problems = [self.rng.gauss(0, SPREAD) for _ in range(PROBLEMS)]
        results = []
        for prompt in prompts:
            cells = [self._attempt(number, ease, prompt) for number, ease in enumerate(problems)]
            results.append(PromptResult(prompt, tuple(cells)))
        return results

    def _attempt(self, number: int, ease: float, prompt: SystemPrompt) -> ProblemResult:
        """The attempts at one problem under one prompt."""
        interaction = self.rng.gauss(0, INTERACTION)
        chance = _sigmoid(self.level() + self.strength(prompt) + ease + interaction)
        attempts = [Attempt("", float(self.rng.random() < chance)) for _ in range(ROLLOUTS)]
        return ProblemResult(str(number), "", tuple(attempts))

    def learn(self) -> None:
        self.step += 1
        self.drifted = {
            name: value + self.rng.gauss(0, DRIFT) for name, value in self.drifted.items()
        }


def reflect(prompt: SystemPrompt, right: float, wrong: float, rng: random.Random) -> Outcome:
    """A child that is better, worse, or none."""
    texts = list(prompt.principles or ())
    drawn = rng.random()
    good = [text for text in texts if text.startswith("help")]
    bad = [text for text in texts if text.startswith("harm")]
    if drawn < right:
        missing = [f"help {n}" for n in range(HELPFUL) if f"help {n}" not in texts]
        if bad and (not missing or rng.random() < 0.5):
            texts.remove(rng.choice(bad))
        elif missing:
            texts.append(rng.choice(missing))
    elif drawn < right + wrong:
        if good and rng.random() < 0.5:
            texts.remove(rng.choice(good))
        else:
            texts.append(f"harm {rng.randrange(1000)}")
    if texts == list(prompt.principles or ()):
        return Outcome("mutation").finish("unchanged")
    child = SystemPrompt(
        prompt.preamble, tuple(texts), parents=(prompt.id or 0,), operator="mutation"
    )
    return Outcome("mutation").finish("child", child)


def replicate(reflector: str, rule: str, seed: int) -> dict[str, float]:
    """One run of 30 batches."""
    right, wrong = REFLECTORS[reflector]
    world = World(random.Random(f"{reflector} {seed}"))
    rng = random.Random(f"reflector {seed}")
    population = Population(SystemPrompt("Solve.", ()), rule=rule, temperature=1.0, seed=seed)
    evolution = PopulationEvolution(population, 0.0)
    played = []
    for _ in range(STEPS):
        prompts = list({prompt.id: prompt for prompt in evolution.draw(PROMPTS)}.values())
        job = evolution.record([world.play(prompts)])
        played.append(statistics.fmean(map(world.quality, prompts)))
        if job is not None:
            (child,) = evolution.join(job, [reflect(job.best.prompt, right, wrong, rng)])
            if child is not None:
                world.drifted[child.id or 0] = world.drifted[child.parents[0]]
        world.learn()
    candidates = population.candidates()
    truth = [world.quality(member.prompt) for member in candidates]
    correlation = spearman([member.rating.mu for member in candidates], truth)
    chosen = world.quality(population.best())
    return {
        "chosen": chosen,
        "spearman": correlation,
        "played": statistics.fmean(played),
        "best": max(truth),
    }


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def measure(replications: int) -> list[dict[str, Any]]:
    """A record for each reflector and rule, with a number for each replication."""
    records = []
    for reflector in REFLECTORS:
        for rule in RULES:
            runs = [replicate(reflector, rule, seed) for seed in range(replications)]
            columns = {}
            for name in runs[0]:
                columns[name] = [round(run[name], 4) for run in runs]
            records.append({"reflector": reflector, "rating": RATING, "rule": rule, **columns})
            log(f"{reflector} | {rule}: {statistics.fmean(columns['chosen']):.3f}")
    return records


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By reflector, and rating and rule: means with 95 % intervals over replications;
    `minus_default` is paired.
    """
    by_reflector: dict[str, dict[str, Any]] = {}
    for record in records:
        name = f"{record['rating']}, {record['rule']}"
        by_reflector.setdefault(record["reflector"], {})[name] = record
    summary: dict[str, dict[str, Any]] = {}
    for reflector, by_name in by_reflector.items():
        default = by_name[DEFAULT]["chosen"]
        summary[reflector] = {}
        for name, record in by_name.items():
            chosen = record["chosen"]
            correlations = [value for value in record["spearman"] if not math.isnan(value)]
            gaps = [quality - base for quality, base in zip(chosen, default, strict=True)]
            summary[reflector][name] = {
                "chosen": interval(chosen),
                "spearman": interval(correlations),
                "played": interval(record["played"]),
                "minus_default": interval(gaps),
                "n": len(chosen),
            }
    return summary


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """The summary as a Markdown table."""
    rows = []
    for reflector, settings in summarise(records).items():
        for name, row in settings.items():
            chosen = shown(row["chosen"])
            minus_default = shown(row["minus_default"], "+")
            correlation = shown(row["spearman"], digits=2)
            rows.append([reflector, name, chosen, minus_default, correlation])
    titles = "reflector|rating, rule|quality of the chosen [95 %]|minus the default|Spearman"
    return markdown(titles.split("|"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="Ratings and selection rules in a simulation.")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK} replications instead of {REPLICATIONS}"
    )
    parser.add_argument("--record", action="store_true", help="replace the records")
    parser.add_argument("--records", type=Path, default=RECORDS)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    options = parser.parse_args()
    started = time.perf_counter()
    records = measure(QUICK if options.quick else REPLICATIONS)
    print(table(records))
    if options.record:
        options.records.unlink(missing_ok=True)
        Records(options.records).add(*records)
    if options.json:
        result = {
            "simulation": summarise(records),
            "quick": options.quick,
            "seconds": round(time.perf_counter() - started),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
