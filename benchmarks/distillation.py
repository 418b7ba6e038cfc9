"""Is a prompt better distilled on-policy, from a teacher that stays, or by imitation? See docs/evidence.md.

    python benchmarks/distillation.py --json    # what the records say

The cells are `league_cell.py`'s. On-policy distillation was not the better one and left the library, so they can be
read here and not run: `league_cell.GONE` names the last commit that ran them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import league
from lab import RECORDS as RECORDED, Records, interval, markdown, share, shown

RECORDS = RECORDED / "distillation.jsonl.gz"
SEEDS, SETTING = tuple(range(537, 545)), ("rules", "easy")
TEACHER, IMITATION, ON_POLICY = METHODS = ("joint", "joint, then imitation", "joint, then fixed teacher")
HEADING = "## Distillation from a teacher that stays"  # of the protocol
NAMES = {TEACHER: "the teacher, under its prompt", IMITATION: "imitation", ON_POLICY: "on-policy"}
CELLS = [(*SETTING, seed, method) for seed in SEEDS for method in METHODS]


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
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    records = Records(RECORDS).read()
    print(table(records))
    if options.json:
        first = league.protocol_first((one["commit"] for one in records), HEADING)
        about = {"sandbox": True, "missing": league.missing(records, CELLS), "protocol_first": first}
        print(json.dumps({**about, **outcomes(records)}))


if __name__ == "__main__":
    main()
