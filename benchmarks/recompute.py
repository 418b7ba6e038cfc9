"""Recompute the figures of README and docs from the records that are shipped, offline and without a run.

    python benchmarks/recompute.py            # ends with an error if a page says something else
    python benchmarks/recompute.py --write    # put the figures into the pages

A page holds recomputed text between `<!-- recomputed: NAME -->` and `<!-- /recomputed -->`; NAME is a file of
`records/` without its suffix, and for each there is a function here that makes text of records.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import async_training
from league import read_records, share, summarise, t_interval, table

REPOSITORY = Path(__file__).parents[1]
BLOCK = re.compile(r"(<!-- recomputed: (\S+) -->\n)(.*?)(<!-- /recomputed -->)", re.DOTALL)


def splits(records: Sequence[Mapping[str, Any]]) -> str:
    """Prompt-R1's demo before and after GRPO, by split."""
    lines = ["| split | held out | before [95 %] | after [95 %] | seeds |", "|---|---|---|---|---|"]
    for split in dict.fromkeys(record["split"] for record in records):
        of_split = [record for record in records if record["split"] == split]
        cells = [_interval([share(record[when]) for record in of_split]) for when in ("before", "after")]
        seeds = ", ".join(str(record["seed"]) for record in of_split)
        lines.append(f"| by {split} | {len(of_split[0]['after'])} questions | {' | '.join(cells)} | {seeds} |")
    return "\n".join(lines)


def _interval(values: Sequence[float]) -> str:
    row = t_interval(values)
    ends = "one seed" if row["low"] is None else f"{row['low']:.3f}, {row['high']:.3f}"
    return f"{row['mean']:.3f} [{ends}]"


TEXTS: dict[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {
    "lead": async_training.table,
    "league": lambda records: table(summarise(records)),
    "splits": splits,
}


def recompute(page: str) -> tuple[str, list[str]]:
    """A page with its blocks made anew, and their names.

    Raises:
        `KeyError`: A block is of records that nothing is made of.
    """
    names = [name for _, name, _, _ in BLOCK.findall(page)]
    records = {name: read_records(REPOSITORY / "records" / f"{name}.jsonl.gz") for name in names}
    texts = {name: TEXTS[name](of) if of else "No run of it has been recorded yet." for name, of in records.items()}
    return BLOCK.sub(lambda found: f"{found[1]}{texts[found[2]]}\n{found[4]}", page), names


def main() -> None:
    parser = argparse.ArgumentParser(description="Recompute the pages' figures from records/.")
    parser.add_argument("--write", action="store_true", help="put them into the pages")
    options = parser.parse_args()
    wrong = 0
    for path in (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))):
        page = path.read_text(encoding="utf-8")
        anew, names = recompute(page)
        if options.write and anew != page:
            path.write_text(anew, encoding="utf-8")
        wrong += anew != page and not options.write
        for name in names:
            state = "as recorded" if anew == page else "written" if options.write else "NOT as recorded"
            print(f"{path.relative_to(REPOSITORY)}: {name}: {state}")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
