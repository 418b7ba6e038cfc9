"""Two environments in one run against each alone, by the protocol in docs/evidence.md: the demo's world in tags, and by
native tool calls.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.several_environments --json  # three reported seeds: half an hour
    OMP_NUM_THREADS=1 python -m benchmarks.learning.several_environments --json --quick  # a tuning seed: a minute

Appends a record for each run to `--records`; what is recorded is not run again. The figures are those of the sandbox, a
policy of 390,000 parameters; they say nothing about real models.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from sys import stderr
from typing import Any

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

SEEDS = (831, 832, 833)
TUNING_SEED = 1
NAMES = ("tags", "tools")
TEMPLATES = {"tags": "question : {question}", "tools": "ask : {question}"}
# of each environment alone; both together train twice the steps
STEPS = 24
WARM_STEPS = 900
HELD_OUT = 256


def environments(seed: int) -> dict[str, Any]:
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


def prepare(folder: Path, seed: int, steps: int) -> Any:
    """A policy that is warm-started on traces of both forms, half of them each, and the demo's questions."""
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
        traces_made = make_traces(
            questions, n, DEFAULT_MIX, Oracle(seen_world, seed=seed), draw, world=seen_world
        )
        both = [
            {**trace, "environment": "tags"}
            if number % 2
            else {
                **trace,
                "environment": "tools",
                "turns": [as_tool_calls(turn) for turn in trace["turns"]],
            }
            for number, trace in enumerate(traces_made)
        ]
        return both, both[: n // 2]

    with redirect_stdout(stderr):
        recipe = Recipe(spec, tool_tokenizer(), load_world(), traces, steps, steps // 2, seed, seed)
        return SandboxRun(
            warm_started(folder, recipe), spec, as_dataset(questions), as_dataset(held_out)
        )


def measure(trained: str, seed: int, folder: Path, steps: int, warm_steps: int) -> dict[str, Any]:
    """Train on one environment, or on `both`: the record of the run, with the answers in each before and after."""
    from agentic_prompting import PromptAgent, PromptR1Config, PromptR1Trainer

    sandbox = prepare(folder, seed, warm_steps)
    names = NAMES if trained == "both" else (trained,)
    rows = [{**row, "environment": name} for name in names for row in sandbox.train]
    questions = [{**row, "environment": name} for name in NAMES for row in sandbox.test]
    changes: dict[str, Any] = {
        "output_dir": str(folder / trained),
        "seed": seed,
        "max_steps": steps * len(names),
    }
    changes["chat_template_kwargs"] = {
        "tools": None
    }  # the sandbox's chat template cannot show tools
    started = time.perf_counter()
    trainer = train(
        PromptR1Trainer,
        PromptR1Config(**settings(DEMO, **changes, overwrite=True)),
        sandbox,
        {name: environment for name, environment in environments(seed).items() if name in names},
        train_dataset=rows,
        prompt_template={name: TEMPLATES[name] for name in names},
    )
    seconds = time.perf_counter() - started
    trainer.save_model()
    answers = {}
    for when, weights in (("before", sandbox.model), ("after", folder / trained)):
        # The form of both environments, whichever of them were trained on.
        agent = PromptAgent.from_pretrained(
            weights, environments(seed), sandbox.spec, max_batch_size=BATCH
        )
        answers[when] = correct(agent.answer_all(questions, seed=seed, progress=False))
    of_each = {
        when: {
            name: answers[when][n * HELD_OUT : (n + 1) * HELD_OUT] for n, name in enumerate(NAMES)
        }
        for when in answers
    }
    return {
        "trained": trained,
        "seed": seed,
        "steps": steps * len(names),
        "seconds": round(seconds, 1),
        **of_each,
    }


def differences(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """For each environment the score after training on both, minus that after training on it alone, paired by seed."""
    after = {
        (record["trained"], record["seed"], name): share(record["after"][name])
        for record in records
        for name in NAMES
    }
    intervals = {}
    for name in NAMES:
        seeds = [
            seed
            for trained, seed, of in after
            if (trained, of) == ("both", name) and (name, seed, name) in after
        ]
        if seeds:
            intervals[name] = interval(
                [after["both", seed, name] - after[name, seed, name] for seed in seeds]
            )
    return intervals


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Exact match on the held-out questions by environment and by what was trained on."""
    rows = []
    for trained in (*NAMES, "both"):
        if not (runs := [record for record in records if record["trained"] == trained]):
            continue
        scores = [
            [shown([share(run[when][name]) for run in runs]) for when in ("before", "after")]
            for name in NAMES
        ]
        rows.append([trained, len(runs), *(f"{before} → {after}" for before, after in scores)])
    return markdown(("trained on", "seeds", "asked in tags", "asked by tools"), rows)


def cost(records: Sequence[Mapping[str, Any]]) -> str:
    """The differences of the figure, in words."""
    costs = []
    for name, difference in differences(records).items():
        text = f"{difference['mean']:+.3f}"
        if difference["low"] is not None:
            text += f" [{difference['low']:+.3f}, {difference['high']:+.3f}]"
        costs.append(f"{text} {'in tags' if name == 'tags' else 'by tools'}")
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
    folder = options.folder / "quick" if options.quick else options.folder
    records = Records(
        options.records or (folder if options.quick else RECORDS) / "several.jsonl.gz"
    )
    seeds, steps, warm_steps = (
        ((TUNING_SEED,), 2, 10) if options.quick else (SEEDS, STEPS, WARM_STEPS)
    )
    wanted = [(trained, seed) for seed in seeds for trained in (*NAMES, "both")]
    for trained, seed in records.missing(("trained", "seed"), wanted):
        entries = measure(trained, seed, folder / str(seed), steps, warm_steps)
        records.add(entries)
        log(
            f"seed {seed}, trained on {trained}: { ({name: share(entries['after'][name]) for name in NAMES}) }"
        )
    entries = records.read()
    print(table(entries))
    if options.json:
        print(
            json.dumps(
                {
                    "quick": options.quick,
                    "both_minus_alone": differences(entries),
                    "n": len(entries),
                }
            )
        )


if __name__ == "__main__":
    main()
