"""Is a prompt better distilled on-policy, from a teacher that stays, or by imitation? See docs/evidence.md.

    python benchmarks/distillation.py --report --json    # what the records say
    python benchmarks/distillation.py --json             # runs cells that are missing: an hour for all

The cells are `league_cell.py`'s, and are run, kept and put together as those of `league.py`. On-policy distillation was
not the better one and left the library: `league_cell.GONE` names the last commit that runs it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import league
from lab import RECORDS as RECORDED, REPOSITORY, Records, interval, markdown, share, shown

RECORDS = RECORDED / "distillation.jsonl.gz"
SEEDS, SETTING = tuple(range(537, 545)), ("rules", "easy")
TEACHER, IMITATION, ON_POLICY = METHODS = ("joint", "joint, then imitation", "joint, then fixed teacher")
HEADING = "## Distillation from a teacher that stays"  # of the protocol
NAMES = {TEACHER: "the teacher, under its prompt", IMITATION: "imitation", ON_POLICY: "on-policy"}


def cells(seeds: Sequence[int] = SEEDS) -> Iterator[league.Cell]:
    """The cells of the protocol, in the order of the runs."""
    yield from ((*SETTING, seed, method) for seed in seeds for method in METHODS)


def outcomes(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Student minus teacher, and one student minus the other, paired by seed."""
    found = league.by_cell(records)
    pairs = {
        "on_policy_minus_imitation": (ON_POLICY, IMITATION),
        "imitation_minus_teacher": (IMITATION, TEACHER),
        "on_policy_minus_teacher": (ON_POLICY, TEACHER),
    }
    return {name: league.difference(found, *methods, [SETTING]) for name, methods in pairs.items()}


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """The scores and the differences as a Markdown table."""
    rows = []
    found = league.by_cell(records)
    for method in METHODS:
        some = [one for one in records if one["method"] == method]
        minus = league.difference(found, method, TEACHER, [SETTING]) if method != TEACHER else None
        rows.append(
            [NAMES[method], shown(interval([share(one["correct"]) for one in some])), shown(minus, "+"), len(some)]
        )
    told = outcomes(records)["on_policy_minus_imitation"]
    lines = markdown(["", "exact match [95 %]", "minus the teacher [95 %]", "seeds"], rows)
    return f"{lines}\n\nOn-policy minus imitation: {shown(told, '+')}, on {told['n']} seeds."


def main() -> None:
    parser = argparse.ArgumentParser(description="Distillation from a teacher that stays: see docs/evidence.md.")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--collect", action="store_true", help=f"write {RECORDS.name} from the cells, in the end")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: those of the protocol")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "distillation", help="cells and models")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    league.restore(options.folder, Records(RECORDS).read())
    if not options.report:
        league.work(cells(options.seeds or SEEDS), options.folder)
    records = league.read(options.folder, METHODS)
    if options.collect:
        RECORDS.unlink(missing_ok=True)
        Records(RECORDS).write(records)
    print(table(records) if records else "no cell is done yet")
    result = {
        "missing": league.missing(records, cells()),
        "protocol_first": league.protocol_first((one["commit"] for one in records), HEADING),
        **outcomes(records),
    }
    if options.json:
        print(json.dumps({"sandbox": True, **result}))


if __name__ == "__main__":
    main()
