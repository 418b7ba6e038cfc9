"""Two environments in one run against each alone, by the protocol in docs/evidence.md: the demo's
world in tags, and by native tool calls.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.several_environments --json  # three reported seeds: half an hour
    OMP_NUM_THREADS=1 python -m benchmarks.learning.several_environments --json --quick  # a tuning seed: a minute

Appends a record for each run to `--records`; what is recorded is not run again. The figures are
those of the sandbox, a policy of 390,000 parameters; they say nothing about real models.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from itertools import product
from pathlib import Path
from sys import stderr
from typing import TYPE_CHECKING, Any

from benchmarks.lab import (
    BATCH,
    DEMO,
    RECORDS,
    Records,
    correct,
    interval,
    log,
    markdown,
    quiet,
    settings,
    share,
    shown,
    train,
)

if TYPE_CHECKING:
    from agentic_prompting.rollout import Environment
    from agentic_prompting.sandbox.setup import SandboxRun

SEEDS = (831, 832, 833)
TUNING_SEED = 1
NAMES = ("tags", "tools")
TEMPLATES = {"tags": "question : {question}", "tools": "ask : {question}"}
STEPS = 24
"""Steps on one environment; both together train twice as many."""
WARM_STEPS = 900
HELD_OUT = 256


def environments(seed: int) -> dict[str, Environment]:
    """The oracle, asked in tags, and as a tool."""
    from agentic_prompting import LLMEnvironment
    from agentic_prompting.interop import ToolEnvironment
    from agentic_prompting.llm import complete
    from agentic_prompting.sandbox import Oracle

    oracle = Oracle(seed=seed)

    def ask(prompt: str) -> str:
        """Asks an oracle that knows one fact at a time.

        Args:
            prompt: The question.
        """
        return complete(oracle, [{"role": "user", "content": prompt.strip()}]).text

    return {"tags": LLMEnvironment(oracle), "tools": ToolEnvironment([ask])}


def prepare(folder: Path, seed: int, steps: int) -> SandboxRun:
    """A policy that is warm-started on traces of both forms, half of them each, and the demo's
    questions.
    """
    from agentic_prompting.interop import ToolGrammar
    from agentic_prompting.rollout import TagGrammar
    from agentic_prompting.sandbox import DEFAULT_MIX, Oracle, load_world, make_split, make_traces
    from agentic_prompting.sandbox.policy import sandbox_spec
    from agentic_prompting.sandbox.recipe import Recipe, warm_started
    from agentic_prompting.sandbox.setup import SandboxRun, as_dataset
    from agentic_prompting.sandbox.world import world_of
    from benchmarks.reliability.interop import as_tool_calls, tool_tokenizer

    questions, held_out = make_split(seed, HELD_OUT)
    grammars = {"tags": TagGrammar(), "tools": ToolGrammar()}
    forms = {
        name: {"prompt_template": TEMPLATES[name], "grammar": grammars[name]} for name in NAMES
    }
    spec = replace(sandbox_spec(), environments=forms)
    seen_world = world_of(questions)

    def traces(n: int, draw: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        oracle = Oracle(seen_world, seed=seed)
        tagged = make_traces(questions, n, DEFAULT_MIX, oracle, draw, world=seen_world)
        mixed = []
        for number, trace in enumerate(tagged):
            if number % 2:
                mixed.append({**trace, "environment": "tags"})
            else:
                turns = [as_tool_calls(turn) for turn in trace["turns"]]
                mixed.append({**trace, "environment": "tools", "turns": turns})
        return mixed, mixed[: n // 2]

    with redirect_stdout(stderr):
        recipe = Recipe(spec, tool_tokenizer(), load_world(), traces, steps, steps // 2, seed, seed)
        model = warm_started(folder, recipe)
    return SandboxRun(model, spec, as_dataset(questions), as_dataset(held_out))


def measure(trained: str, seed: int, folder: Path, steps: int, warm_steps: int) -> dict[str, Any]:
    """Train on one environment, or on `both`: the record of the run, with the answers in each
    before and after.
    """
    from agentic_prompting import PromptAgent, PromptR1Config, PromptR1Trainer

    sandbox = prepare(folder, seed, warm_steps)
    names = NAMES if trained == "both" else (trained,)
    rows = in_environments(sandbox.train, names)
    questions = in_environments(sandbox.test, NAMES)
    changes: dict[str, Any] = {
        "output_dir": str(folder / trained),
        "seed": seed,
        "max_steps": steps * len(names),
        # The sandbox's chat template cannot show tools.
        "chat_template_kwargs": {"tools": None},
        "overwrite": True,
    }
    every_environment = environments(seed)
    started = time.perf_counter()
    trainer = train(
        PromptR1Trainer,
        PromptR1Config(**settings(DEMO, **changes)),
        sandbox,
        {name: every_environment[name] for name in names},
        train_dataset=rows,
        prompt_template={name: TEMPLATES[name] for name in names},
    )
    seconds = time.perf_counter() - started
    trainer.save_model()
    record = {
        "trained": trained,
        "seed": seed,
        "steps": steps * len(names),
        "seconds": round(seconds, 1),
    }
    for when, weights in (("before", sandbox.model), ("after", folder / trained)):
        # The form of both environments, whichever of them were trained on.
        agent = PromptAgent.from_pretrained(
            weights, environments(seed), sandbox.spec, max_batch_size=BATCH
        )
        flags = correct(agent.answer_all(questions, seed=seed, progress=False))
        record[when] = {}
        for number, name in enumerate(NAMES):
            record[when][name] = flags[number * HELD_OUT : (number + 1) * HELD_OUT]
    return record


def in_environments(
    rows: Iterable[Mapping[str, Any]], names: Sequence[str]
) -> list[dict[str, Any]]:
    """All rows in the first environment, then all of them in the next one."""
    return [{**row, "environment": name} for name, row in product(names, rows)]


def differences(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """For each environment the score after training on both, minus that after training on it alone,
    paired by seed.
    """
    # By what was trained on and seed, the score in each environment.
    after: dict[tuple[str, int], dict[str, float]] = {}
    for record in records:
        scores = {name: share(record["after"][name]) for name in NAMES}
        after[record["trained"], record["seed"]] = scores
    intervals = {}
    for name in NAMES:
        gaps = []
        for (trained, seed), scores in after.items():
            alone = after.get((name, seed))
            if trained == "both" and alone is not None:
                gaps.append(scores[name] - alone[name])
        if gaps:
            intervals[name] = interval(gaps)
    return intervals


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Exact match on the held-out questions by environment and by what was trained on."""
    rows = []
    for trained in (*NAMES, "both"):
        runs = [record for record in records if record["trained"] == trained]
        if not runs:
            continue
        cells = []
        for name in NAMES:
            before = shown([share(run["before"][name]) for run in runs])
            after = shown([share(run["after"][name]) for run in runs])
            cells.append(f"{before} → {after}")
        rows.append([trained, len(runs), *cells])
    return markdown(("trained on", "seeds", "asked in tags", "asked by tools"), rows)


def cost(records: Sequence[Mapping[str, Any]]) -> str:
    """The differences of the figure, in words."""
    costs = []
    for name, difference in differences(records).items():
        text = f"{difference['mean']:+.3f}"
        if difference["low"] is not None:
            text += f" [{difference['low']:+.3f}, {difference['high']:+.3f}]"
        form = "in tags" if name == "tags" else "by tools"
        costs.append(f"{text} {form}")
    return " and ".join(costs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--quick", action="store_true", help="a seed that is not reported, 2 steps")
    parser.add_argument(
        "--folder", type=Path, default=Path("runs/several"), help="policies and runs"
    )
    parser.add_argument(
        "--records", type=Path, help="default: records/several.jsonl.gz; with --quick in the folder"
    )
    options = parser.parse_args()
    quiet()
    if options.quick:
        folder = options.folder / "quick"
        records_folder = folder
        seeds: tuple[int, ...] = (TUNING_SEED,)
        steps = 2
        warm_steps = 10
    else:
        folder = options.folder
        records_folder = RECORDS
        seeds = SEEDS
        steps = STEPS
        warm_steps = WARM_STEPS
    records = Records(options.records or records_folder / "several.jsonl.gz")
    runs = [(trained, seed) for seed, trained in product(seeds, (*NAMES, "both"))]
    for trained, seed in records.missing(("trained", "seed"), runs):
        record = measure(trained, seed, folder / str(seed), steps, warm_steps)
        records.add(record)
        scores = {name: share(record["after"][name]) for name in NAMES}
        log(f"seed {seed}, trained on {trained}: {scores}")
    entries = records.read()
    print(table(entries))
    if options.json:
        result = {
            "quick": options.quick,
            "both_minus_alone": differences(entries),
            "n": len(entries),
        }
        print(json.dumps(result))


if __name__ == "__main__":
    main()
