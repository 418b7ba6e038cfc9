"""Real command-line agents against the gateway, after `make foreign`: their sequences, and how
faults end them.

    python -m benchmarks.reliability.harnesses --json  # all, some twenty minutes on two cores
    python -m benchmarks.reliability.harnesses --json --only codex --only pi  # some of them
    python -m benchmarks.reliability.harnesses --record  # keep the rows in records/harnesses.jsonl.gz

A script plays the policy (`agentic-prompting check-env --harness`): it writes a file, reads it,
says done. One row for each harness and dialect, over three styles of turns (plain, with thoughts,
and with white space and JSON as no template writes them):

- `sequences_per_rollout`: the token sequences that a rollout's calls make, the most of the styles.
- `lost`, `twice`: sampled replies that are in no sequence's loss, or in two; those of auxiliary
  calls are left out on purpose. `auxiliary_trained`: replies without tools in a rollout with tools
  that are in the loss.
- `witness_differences`: against the harness's own record; `null` where it has none that is read.
- `leaks`: prompts that hold the answer column.
- `give_up_s`: the most seconds from a fault's reply to the harness's end, over the faults: the
  rollout is over, the context is full, an empty reply, arguments that are no JSON, a reply cut at
  its limit. `faults` has each, with the status that the rollout got. A wall time: `load`, beside
  it, is how many processes wanted a core meanwhile.
- `looked_up`: the names that the harness asked for outside. None resolves.

A harness that is not installed has a row with the reason. The last line of `--json` holds the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

from agentic_prompting.harnesses import HARNESSES, CommandProgram, Workspace, get_harness
from agentic_prompting.harnesses.check_harness import (
    ScriptedAgent,
    byte_format,
    format_call,
    play_scripted,
    wrote_the_file,
)
from agentic_prompting.harnesses.harness import NotInstalled
from agentic_prompting.rollout import Rollout, Sample, SampleRequest
from benchmarks.lab import RECORDS, Records, markdown

FOREIGN = Path(os.environ.get("FOREIGN", Path(__file__).parents[2] / ".venv-foreign"))
STYLES = ("plain", "think", "messy")
COUNTS = ("lost", "twice", "auxiliary_trained", "witness_differences", "leaks", "not_done")
FAULTS = ("rollout_ended", "context_full", "empty", "broken_json", "length")


class Styled(ScriptedAgent):
    """Writes calls in a style; from the second call with tools on with a fault."""

    def __init__(self, style: str = "think", fault: str = ""):
        super().__init__(byte_format())
        self.style = style
        self.fault = fault
        self.calls_with_tools = 0
        self.last = time.monotonic()

    def write_call(self, name: str, arguments: Mapping[str, Any]) -> str:
        if self.style == "messy":
            body = json.dumps({"arguments": arguments, "name": name}, separators=(",", ":"))
            return f"  I use  {name} now. \n\n<tool_call>{body}</tool_call> "
        call = format_call(name, json.dumps(arguments))
        return call if self.style == "plain" else f"<think>\nI think.\n</think>\n\n{call}"

    def turn(self, text: str) -> str:
        turn = super().turn(text)
        has_tools = "<tools>" in text
        self.calls_with_tools += has_tools
        if not has_tools or self.calls_with_tools < 2:
            return turn
        if self.fault == "empty":
            return ""
        if self.fault == "broken_json":
            return turn.replace('"}', '"', 1)
        return turn

    async def __call__(self, request: SampleRequest) -> Sample:
        sample = await super().__call__(request)
        self.last = time.monotonic()
        if self.fault == "length" and self.calls_with_tools >= 2:
            # The harness gets half of the turn, and that half is what counts as sampled.
            length = max(1, len(sample.ids) // 2)
            logprobs = (sample.logprobs or [])[:length]
            sample = replace(sample, ids=sample.ids[:length], logprobs=logprobs, finished=False)
            prompt_ids, _ = self.samples[-1]
            self.samples[-1] = (prompt_ids, tuple(sample.ids))
        return sample


def samples_in(rollout: Rollout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The samples in the loss, each as the ids before it and its own."""
    samples = []
    for sequence in rollout.sequences:
        start = 0
        for in_loss, run in groupby(sequence.mask):
            end = start + len(list(run))
            if in_loss:
                context = (*sequence.prompt_ids, *sequence.ids[:start])
                samples.append((context, tuple(sequence.ids[start:end])))
            start = end
    return samples


def measure(name: str, dialect: str) -> dict[str, Any]:
    """The row of a harness in a dialect."""
    row: dict[str, Any] = {"harness": name, "dialect": dialect}
    names: list[str] = []
    space = Workspace(on_dns_lookup=names.append)
    program = CommandProgram(
        get_harness(name, dialect), reward=wrote_the_file, timeout=300, workspace=space
    )
    try:
        program.check()
    except NotInstalled as error:
        return {**row, "not_installed": str(error)}

    # A rollout in each style: its samples against those in its loss.
    sums = Counter[str]()
    sequences = 0
    context = 0
    for style in STYLES:
        agent = Styled(style)
        started = time.monotonic()
        rollout, _ = play_scripted(program, agent)
        sampled = Counter(agent.samples)
        in_loss = Counter(samples_in(rollout))
        auxiliary: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
        for sample, text in zip(agent.samples, agent.prompts, strict=True):
            if "<tools>" not in text:
                auxiliary[sample] += 1
        sums["lost"] += sum((sampled - in_loss - auxiliary).values())
        sums["twice"] += sum((in_loss - sampled).values())
        sums["auxiliary_trained"] += sum((in_loss & auxiliary).values())
        sums["leaks"] += sum("SECRET42" in text for text in agent.prompts)
        sums["witness_differences"] += int(rollout.counts.get("program/witness_differences", 0))
        sums["not_done"] += (rollout.returned or {}).get("reward") != 1.0
        sequences = max(sequences, len(rollout.sequences))
        context = max(len(ids) for ids, _ in agent.samples[:2])
        row[f"seconds_{style}"] = round(time.monotonic() - started, 1)

    row["sequences_per_rollout"] = sequences
    for count in COUNTS:
        row[count] = sums[count]
    if not program.harness.trace:
        row["witness_differences"] = None
    row["looked_up"] = sorted({*names})
    row["version"] = program.harness.version

    # A rollout with each fault.
    row["faults"] = {fault: end_of(name, dialect, fault, context) for fault in FAULTS}
    ends = row["faults"].values()
    row["give_up_s"] = max(end["seconds"] for end in ends)
    return {**row, "load": max(end["load"] for end in ends)}


def end_of(name: str, dialect: str, fault: str, context: int) -> dict[str, Any]:
    """How a fault ends a rollout."""
    calls = 64
    if fault == "rollout_ended":
        calls = 2 if name == "opencode" else 1
    program = CommandProgram(get_harness(name, dialect), max_calls=calls, timeout=120)
    agent = Styled(fault=fault)
    rollout, _ = play_scripted(program, agent, context + 60 if fault == "context_full" else 400_000)
    end: dict[str, Any] = {
        "seconds": round(time.monotonic() - agent.last, 1),
        "status": rollout.status,
        "calls": len(agent.prompts),
        "load": round(os.getloadavg()[0], 1),
    }
    if rollout.error:
        end["error"] = str(rollout.error)[:200]
    return end


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """The latest record of each harness in each dialect."""
    latest = {(record["harness"], record["dialect"]): record for record in records}
    rows = []
    for record in latest.values():
        counts = ["none" if record[name] is None else record[name] for name in COUNTS[:-1]]
        rows.append(
            (
                record["harness"],
                record["dialect"],
                record["sequences_per_rollout"],
                *counts,
                f"{record['give_up_s']:g} ({record['load']:g})",
                ", ".join(record["looked_up"]) or "nothing",
            )
        )
    titles = [name.replace("_", " ") for name in COUNTS[:-1]]
    return markdown(
        ("harness", "dialect", "sequences", *titles, "gives up in s (load)", "looks up"), rows
    )


def put_in_path() -> None:
    """The programs that `make foreign` has installed."""
    folders = []
    for name in HARNESSES:
        folders += [str(FOREIGN / name / "node_modules/.bin"), str(FOREIGN / name / "bin")]
    os.environ["PATH"] = os.pathsep.join([*folders, os.environ["PATH"]])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument("--record", action="store_true", help="append the rows to the records")
    parser.add_argument(
        "--only", action="append", choices=[*HARNESSES], help="these harnesses only"
    )
    arguments = parser.parse_args()
    put_in_path()
    rows = []
    for name in arguments.only or HARNESSES:
        for dialect in HARNESSES[name].dialects:
            rows.append(measure(name, dialect))
            print(rows[-1], flush=True)
            if arguments.record and "not_installed" not in rows[-1]:
                Records(RECORDS / "harnesses.jsonl.gz").add(rows[-1])
    if arguments.json:
        print(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
