"""The three papers against this package: every formula, table of numbers and rule that needs no model.

    python -m benchmarks.fidelity.papers  # a line for each row
    python -m benchmarks.fidelity.papers --json  # the last line: rows, false, untested, ...
    python -m benchmarks.fidelity.papers --only "eq 1"

The expected values are in `fidelity_prompt_r1.py`, `fidelity_espl.py` and `fidelity_prorefine.py`, which compute them
from the papers' text by other means than the code under test. The exit status is 1 if a row does not hold.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.fidelity import (
    espl as fidelity_espl,
    prompt_r1 as fidelity_prompt_r1,
    prorefine as fidelity_prorefine,
)
from benchmarks.fidelity.check import rows_of

PAPERS = {"Prompt-R1": fidelity_prompt_r1, "E-SPL": fidelity_espl, "ProRefine": fidelity_prorefine}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--json", action="store_true", help="one line of JSON at the end, and nothing else"
    )
    parser.add_argument(
        "--only", default="", help="rows whose paper, place or rule holds this text"
    )
    parser.add_argument("--quick", action="store_true", help="no difference here: it takes seconds")
    args = parser.parse_args()
    every = [row for paper, module in PAPERS.items() for row in rows_of(paper, module.PARTS)]
    rows = [
        row
        for row in every
        if args.only.casefold() in f"{row['paper']} {row['at']} {row['rule']}".casefold()
    ]
    wrong = [row for row in rows if not row["holds"]]
    untested = [
        {"paper": paper, "what": what, "why": why}
        for paper, module in PAPERS.items()
        for what, why in module.UNTESTED.items()
    ]
    if args.json:
        print(
            json.dumps(
                {
                    "rows": len(rows),
                    "false": len(wrong),
                    "untested": untested,
                    "wrong": wrong,
                    "all": rows,
                }
            )
        )
        return int(bool(wrong))
    for row in rows:
        print(
            f"{'yes' if row['holds'] else 'NO '}  {row['paper']:9}  {row['at']:14}  {row['rule']}"
        )
        if not row["holds"]:
            print(f"     expected {row.get('expected')}, got {row['got']}")
    for one in untested:
        print(f" -   {one['paper']:9}  {one['what']}: {one['why']}")
    print(f"{len(rows)} rows, {len(wrong)} false, {len(untested)} untested")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
