"""The three papers against this package: every formula, table of numbers and rule that needs no
model.

    python -m benchmarks.fidelity.papers  # a line for each row
    python -m benchmarks.fidelity.papers --json  # the last line: rows, false, untested, ...
    python -m benchmarks.fidelity.papers --only "eq 1"

The expected values are in `prompt_r1.py`, `espl.py` and `prorefine.py`, which compute them from the
papers' text by other means than the code under test. The exit status is 1 if a row does not hold.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.fidelity import espl, prompt_r1, prorefine
from benchmarks.fidelity.check import rows_of

PAPERS = {"Prompt-R1": prompt_r1, "E-SPL": espl, "ProRefine": prorefine}


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

    # Check the rules of all papers, and list those that cannot be checked.
    rows = []
    untested = []
    for paper, module in PAPERS.items():
        for row in rows_of(paper, module.PARTS):
            description = f"{row['paper']} {row['at']} {row['rule']}"
            if args.only.casefold() in description.casefold():
                rows.append(row)
        for rule, reason in module.UNTESTED.items():
            untested.append({"paper": paper, "what": rule, "why": reason})
    wrong = [row for row in rows if not row["holds"]]

    if args.json:
        summary = {
            "rows": len(rows),
            "false": len(wrong),
            "untested": untested,
            "wrong": wrong,
            "all": rows,
        }
        print(json.dumps(summary))
        return int(bool(wrong))

    for row in rows:
        verdict = "yes" if row["holds"] else "NO "
        print(f"{verdict}  {row['paper']:9}  {row['at']:14}  {row['rule']}")
        if not row["holds"]:
            print(f"     expected {row.get('expected')}, got {row['got']}")
    for rule in untested:
        print(f" -   {rule['paper']:9}  {rule['what']}: {rule['why']}")
    print(f"{len(rows)} rows, {len(wrong)} false, {len(untested)} untested")
    return int(bool(wrong))


if __name__ == "__main__":
    raise SystemExit(main())
