"""Is one reflection call as good as the paper's many? E-SPL against itself, GEPA and RL: see
docs/evidence.md.

    python -m benchmarks.learning.league --json  # hours; run it twice at once for two processes
    python -m benchmarks.learning.league --report --json  # what the cells say so far, without running any
    python -m benchmarks.learning.league --json --quick  # some minutes: a few cells of tuning seeds, fewer steps

A cell is a method in a world, with a reflector, on a seed (`league_cell.py`). Each is written to a
file of its own in `--folder` when it is done, so that a run that is stopped or killed loses at most
the cell it was at; the same command goes on, and a second process takes the cells that the first
one is not at. With `--collect` the cells are put together into `records/`, from which
`benchmarks/recompute.py` makes every figure of the pages, and from which another machine goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from agentic_prompting.records import atomic_write
from benchmarks.lab import (
    RECORDS as RECORDED,
    REPOSITORY,
    Records,
    git,
    interval,
    log,
    markdown,
    share,
    shown,
)
from benchmarks.learning import espl_sandbox
from benchmarks.learning.league_cell import run
from benchmarks.paper_tables.estimates import seed_interval

RECORDS = RECORDED / "league_two.jsonl.gz"
SETTINGS = tuple(product(("rules", "many", "misleading"), ("easy", ".7")))
SEEDS = tuple(range(521, 537))
# The warm start of 42 comes with the package.
TUNING_SEEDS = (1, 2, 3, 42)
PRIMARY = ("joint", "one call", "GEPA, then GRPO")
SECONDARY = ("one call, paired", "rl")
DISTILLED = ("joint, then imitation", "joint, then on-policy")
ORDER = (*PRIMARY, *SECONDARY, *DISTILLED)
HEADING = "## The second league of E-SPL"
"""The protocol's heading."""
MARGIN = 0.05
"""One call counts as good if it is not worse by more."""
GOOD = 0.8
BATCHES = 3
"""Calls are counted until the mean of so many batches has the exact match `GOOD`."""

# What would count against us, the outcome that decides it, its lower bound, and what that must be
# above.
AGAINST = (
    (
        f"one call is worse than joint training by more than {MARGIN}, or that cannot be excluded",
        "one_call_minus_joint",
        "low_one_sided",
        -MARGIN,
    ),
    ("one call is not above GEPA and then GRPO", "one_call_minus_gepa", "low", 0.0),
    (
        "paired ratings with top-two do not gain over one call alone",
        "paired_minus_one_call",
        "low",
        0.0,
    ),
)
# Outcomes without a verdict; the first one is not in the protocol.
FURTHER = {
    "joint_minus_gepa": "Not asked by the protocol: joint training minus GEPA, then GRPO",
    "imitation_minus_joint": "Imitation minus its teacher",
    "on_policy_minus_joint": "On-policy distillation, with a teacher that moved, minus its teacher",
    "on_policy_minus_imitation": (
        "On-policy distillation, with a teacher that moved, minus imitation"
    ),
}
# Weights and prompt that are scored besides the trained weights under the final prompt.
OTHERS = ("base, first", "base, final", "trained, first")
# This process never imports torch, so that it can be forked.
FORK = multiprocessing.get_context("fork")
UNLOCKED = 0.5
"""The exact match on the questions that end on a relation from which on its word is known."""

Cell = tuple[str, str, int, str]


def cells(seeds: Sequence[int] = SEEDS) -> Iterator[Cell]:
    """World, reflector, seed and method of each cell of the protocol, in the order of the runs."""
    for methods in (PRIMARY, SECONDARY):
        for (world, reflector), seed, method in product(SETTINGS, seeds, methods):
            # RL has no reflector: it runs once.
            if method == "rl" and reflector != "easy":
                continue
            yield world, reflector, seed, method
    world, reflector = SETTINGS[0]
    for seed, method in product(seeds, DISTILLED):
        yield world, reflector, seed, method


# --- pure: what the cells say ---------------------------------------------------------------------


RecordsByCell = Mapping[Cell, Mapping[str, Any]]


def cell_of(record: Mapping[str, Any]) -> Cell:
    """The cell that a record is of."""
    return record["world"], record["reflector"], record["seed"], record["method"]


def by_cell(records: Iterable[Mapping[str, Any]]) -> dict[Cell, Mapping[str, Any]]:
    """Records by their cell."""
    return {cell_of(record): record for record in records}


def difference(
    records: RecordsByCell, method: str, other: str, settings: Sequence[tuple[str, str]]
) -> dict[str, Any]:
    """Exact match of a method minus another's: the mean over the settings, paired by seed.

    Returns:
        `dict`: `mean`, `low`, `high` (95 %), `low_one_sided` (95 %), and `n`, the seeds that have
        all of these cells.
    """
    values = []
    for seed in sorted({seed for _, _, seed, _ in records}):
        gaps = []
        for setting in settings:
            record = records.get((*setting, seed, method))
            other_record = records.get((*setting, seed, other))
            if record is not None and other_record is not None:
                gaps.append(share(record["correct"]) - share(other_record["correct"]))
        if len(gaps) == len(settings):
            values.append(statistics.fmean(gaps))
    if not values:
        return {"n": 0}
    low_one_sided = None
    if len(values) > 1:
        low_one_sided = round(seed_interval(values, 0.9).low, 4)
    return {**interval(values), "low_one_sided": low_one_sided, "n": len(values)}


def complete(records: RecordsByCell, methods: Sequence[str]) -> list[tuple[str, str]]:
    """The settings that have the cells of these methods on all seeds: those that the primary
    outcome is about.
    """
    settings = []
    for setting in SETTINGS:
        expected = {(*setting, seed, method) for seed, method in product(SEEDS, methods)}
        if expected <= records.keys():
            settings.append(setting)
    return settings


def calls_until_good(curve: Sequence[tuple[int, float]]) -> int | None:
    """The calls made when the mean exact match of the latest batches first reached `GOOD`; `None`
    if it never did.
    """
    for end in range(BATCHES, len(curve) + 1):
        if statistics.fmean(score for _, score in curve[end - BATCHES : end]) >= GOOD:
            return curve[end - 1][0]
    return None


def unlocked(record: Mapping[str, Any]) -> int:
    """Guarded relations that a question may end on and that the agent gets right more often than
    not.
    """
    right: dict[str, list[bool]] = {}
    for correct, relation in zip(record["correct"], record["ends"], strict=True):
        right.setdefault(relation, []).append(correct == "1")
    guarded_ends = set(record["guarded"]) & right.keys()
    return sum(statistics.fmean(right[relation]) >= UNLOCKED for relation in guarded_ends)


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """By setting and method: exact match with its interval, calls, and the secondary outcomes."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        setting = f"{record['world']}, {record['reflector']}"
        groups.setdefault((setting, record["method"]), []).append(record)
    summary: dict[str, dict[str, Any]] = {}
    for (setting, method), group in groups.items():
        summary.setdefault(setting, {})[method] = _row(group)
    return summary


def _row(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    until = [calls_until_good(record["curve"]) for record in records]
    reached = [calls for calls in until if calls is not None]
    ranks = []
    for record in records:
        if len(record["rated"]) > 2:
            rank = espl_sandbox.correlations(record["rated"])["rating"]
            if not math.isnan(rank):
                ranks.append(rank)
    other_scores = {}
    for name in OTHERS:
        mean = statistics.fmean(record["others"][name] for record in records)
        other_scores[name] = round(mean, 3)
    return {
        **interval([share(record["correct"]) for record in records]),
        "n": len(records),
        "calls": round(statistics.fmean(record["calls"] for record in records)),
        "good": len(reached),
        "calls_until_good": round(statistics.median(reached)) if reached else None,
        **other_scores,
        "unlocked": round(statistics.fmean(map(unlocked, records)), 2),
        "spearman": interval(ranks) if ranks else None,
    }


def outcomes(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The primary outcomes, and everything else that the protocol names."""
    by_setting_and_seed = by_cell(records)
    pairs = {
        "one_call_minus_joint": ("one call", "joint"),
        "one_call_minus_gepa": ("one call", "GEPA, then GRPO"),
        "paired_minus_one_call": ("one call, paired", "one call"),
        "joint_minus_gepa": ("joint", "GEPA, then GRPO"),
        "imitation_minus_joint": ("joint, then imitation", "joint"),
        "on_policy_minus_joint": ("joint, then on-policy", "joint"),
        "on_policy_minus_imitation": ("joint, then on-policy", "joint, then imitation"),
    }
    result: dict[str, Any] = {}
    for name, methods in pairs.items():
        settings = complete(by_setting_and_seed, methods) or SETTINGS[:1]
        result[name] = {
            **difference(by_setting_and_seed, *methods, settings),
            "settings": [", ".join(setting) for setting in settings],
        }
    result["each"] = {}
    for setting in SETTINGS:
        rows = {
            name: difference(by_setting_and_seed, *methods, [setting])
            for name, methods in pairs.items()
        }
        measured = {name: row for name, row in rows.items() if row["n"]}
        result["each"][", ".join(setting)] = measured
    calls: dict[str, list[int]] = {}
    for record in records:
        calls.setdefault(record["method"], []).append(record["calls"])
    result["calls"] = {method: round(statistics.fmean(each)) for method, each in calls.items()}
    return result


def verdicts(records: Sequence[Mapping[str, Any]]) -> str:
    """The outcomes that the protocol counts against us, first; then the other ones and what was not
    run.
    """
    results = outcomes(records)
    # The outcomes that count against us.
    lines = []
    for failure, name, bound, threshold in AGAINST:
        row = results[name]
        if row["n"] < len(SEEDS):
            lines.append(f"- Not decided yet ({row['n']} of {len(SEEDS)} seeds): {failure}.")
            continue
        verdict = "Not so" if row[bound] > threshold else "**Against us**"
        basis = f"over {len(row['settings'])} of {len(SETTINGS)} settings"
        if bound == "low_one_sided":
            basis += f"; one-sided lower bound {row[bound]:+.3f}"
        lines.append(f"- {verdict}: {failure}. Difference {shown(row, '+')}, {basis}.")
    lines.sort(key=lambda line: "Against" not in line)

    # Outcomes without a verdict.
    for name, title in FURTHER.items():
        row = results[name]
        if row["n"]:
            settings = len(row["settings"])
            basis = f"on {row['n']} seeds, over {settings} of {len(SETTINGS)} settings"
            lines.append(f"- {title}: {shown(row, '+')}, {basis}.")

    # Cells without a record, by setting.
    measured = by_cell(records)
    planned: Counter[str] = Counter()
    absent: Counter[str] = Counter()
    for cell in cells():
        setting = ", ".join(cell[:2])
        planned[setting] += 1
        absent[setting] += cell not in measured
    if any(absent.values()):
        counts = []
        for setting, count in planned.items():
            if absent[setting]:
                counts.append(f"*{setting}*, {absent[setting]} of {count}")
        lines.append(f"- Cells that are not run yet: {'; '.join(counts)}.")
    return "\n".join(lines)


def missing(records: Iterable[Mapping[str, Any]], planned: Iterable[Cell]) -> dict[str, int]:
    """By setting and method: how many of the planned cells are not done."""
    done = by_cell(records)
    counts: Counter[str] = Counter()
    for cell in planned:
        if cell not in done:
            world, reflector, _, method = cell
            counts[f"{world}, {reflector}, {method}"] += 1
    return dict(counts)


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """The summary as a Markdown table."""
    rows = []
    for setting, methods in summarise(records).items():
        for method in sorted(methods, key=ORDER.index):
            row = methods[method]
            shares = [f"{row[name]:.3f}" for name in OTHERS]
            good = f"{row['good']} of {row['n']}"
            if row["good"]:
                good = f"{row['calls_until_good']} ({good})"
            rank = shown(row["spearman"], digits=2)
            figures = [setting, method, shown(row), row["n"], *shares, row["calls"]]
            rows.append([*figures, good, row["unlocked"], rank])
    titles = (
        "world and reflector,method,exact match [95 %],seeds,warm start and first prompt,warm "
        "start and final prompt"
    )
    titles += ",trained and first prompt,calls,calls until .8,unlocked,Spearman of rating"
    return markdown(titles.split(","), rows)


def each_setting(records: Sequence[Mapping[str, Any]]) -> str:
    """The differences in each setting as a Markdown table."""
    differences = outcomes(records)["each"]
    titles = {
        "one_call_minus_joint": "one call minus joint [95 %]",
        "one_call_minus_gepa": "one call minus GEPA, then GRPO [95 %]",
        "joint_minus_gepa": "joint minus GEPA, then GRPO [95 %]",
        "paired_minus_one_call": "paired ratings minus one call [95 %]",
    }
    rows = []
    for setting, row in differences.items():
        if row:
            seeds = " / ".join(str(row[name]["n"]) for name in titles if name in row)
            rows.append([setting, *(shown(row.get(name), "+") for name in titles), seeds])
    return markdown(["world and reflector", *titles.values(), "seeds of each"], rows)


def protocol_first(commits: Iterable[str], heading: str = HEADING) -> bool:
    """Whether the protocol was committed before all of these commits, from which the records come."""
    added = git("log", "--format=%H", f"-S{heading}", "--", "docs/evidence.md").split()
    if not added:
        return False
    for commit in set(commits):
        command = ["git", "merge-base", "--is-ancestor", added[-1], commit]
        if subprocess.run(command, cwd=REPOSITORY).returncode != 0:
            return False
    return True


# --- the script -----------------------------------------------------------------------------------


def path_of(folder: Path, cell: Cell) -> Path:
    """The file of a finished cell."""
    world, reflector, seed, method = cell
    method_name = method.replace(", ", "-").replace(" ", "-")
    return folder / "cells" / f"{world}-{reflector.strip('.')}-{seed}-{method_name}.json"


def restore(folder: Path, recorded: Iterable[Mapping[str, Any]]) -> None:
    """Write the cells that another machine has recorded and that this folder lacks, so that they
    are not run again.
    """
    for record in recorded:
        path = path_of(folder, cell_of(record))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, json.dumps(record))


def work(todo: Iterable[Cell], folder: Path, **options: Any) -> None:
    """Run the cells that are not done, and that no other process is at, each in a process of its
    own.

    A cell that fails is logged and passed over: the same command tries it again.
    """
    about = {
        # The commit of the code that this process has loaded.
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}",
    }
    for cell in todo:
        if not path_of(folder, cell).exists():
            process = FORK.Process(target=_work_on, args=(cell, folder, about, options))
            process.start()
            process.join()
            if process.exitcode:
                log(f"FAILED with {process.exitcode}: {cell}")


def _work_on(
    cell: Cell, folder: Path, about: Mapping[str, Any], options: Mapping[str, Any]
) -> None:
    path = path_of(folder, cell)
    with suppress(Busy), claimed(path):
        if not path.exists():
            record = run(*cell, folder / "models", **options)
            atomic_write(path, json.dumps({**record, **about, "date": date.today().isoformat()}))
            log(" ".join(map(str, (*cell, f"{record['seconds']} s"))))


class Busy(Exception):
    """Another process is at the cell."""


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """Within it no other process is at the cell of this file. The claim ends with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise Busy from None
    try:
        yield
    finally:
        lock.release()


def read(folder: Path) -> list[dict[str, Any]]:
    """The records of the finished cells, in the order of the protocol."""
    paths = (folder / "cells").glob("*.json")
    records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def order(record: Mapping[str, Any]) -> tuple[int, int, int]:
        setting = SETTINGS.index((record["world"], record["reflector"]))
        return setting, record["seed"], ORDER.index(record["method"])

    return sorted(records, key=order)


def main() -> None:
    parser = argparse.ArgumentParser(description="The second league of docs/evidence.md.")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a few cells of seeds that are not reported, fewer steps",
    )
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument(
        "--collect", action="store_true", help=f"write {RECORDS.name} from the cells, in the end"
    )
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the protocol")
    parser.add_argument(
        "--folder", type=Path, default=REPOSITORY / "runs" / "league", help="cells and models"
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    options = parser.parse_args()
    started = time.perf_counter()
    folder = options.folder / "quick" if options.quick else options.folder
    os.environ["OMP_NUM_THREADS"] = "1"
    if options.quick:
        todo = [(*SETTINGS[0], 42, method) for method in PRIMARY]
        expected = todo
        run_options = {"steps": 4}
    else:
        todo = list(cells(options.seeds or SEEDS))
        expected = list(cells())
        run_options = {}
        restore(folder, Records(RECORDS).read())

    # Run what is missing, and report all cells that are done.
    if not options.report:
        work(todo, folder, **run_options)
    records = read(folder)
    if options.collect:
        RECORDS.unlink(missing_ok=True)
        Records(RECORDS).write(records)
    if records:
        print(f"{table(records)}\n\n{verdicts(records)}")
    else:
        print("no cell is done yet")
    result = {
        "missing": missing(records, expected),
        "leaks": sum(record.get("leaks", 0) for record in records),
        "protocol_first": protocol_first(record["commit"] for record in records),
        **outcomes(records),
        "seconds": round(time.perf_counter() - started),
    }
    if options.json:
        print(json.dumps({"sandbox": True, "quick": options.quick, **result}))


if __name__ == "__main__":
    main()
