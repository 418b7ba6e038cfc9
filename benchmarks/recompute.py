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
from statistics import fmean
from typing import Any

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


def of_settings(records: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    """Each world and setting of benchmarks/calls.py against today's, paired by seed."""
    runs = {(one["world"], one["setting"], one["seed"]): one for one in records}
    rows = {}
    for world, name in dict.fromkeys((one["world"], one["setting"]) for one in records):
        of_seed = {seed: one for (w, n, seed), one in runs.items() if (w, n) == (world, name)}
        pairs = [(one, runs[world, "today", seed]) for seed, one in of_seed.items() if (world, "today", seed) in runs]
        seeds = sorted(one["seed"] for one, _ in pairs)
        if not pairs:
            continue
        score, today = (t_interval([one["exact_match"] for one in of]) for of in zip(*pairs, strict=True))
        ends = score["low"], score["high"], today["low"], today["high"]
        rows[world, name] = {
            "steps": fmean(one["step"] for one, _ in pairs),
            "calls": round(fmean(one["calls"] for one, _ in pairs)),
            "different": fmean(one["curve"][-1]["different"] / one["calls"] for one, _ in pairs),
            "calls_ratio": t_interval([one["calls"] / old["calls"] for one, old in pairs]),
            "usd_ratio": t_interval([one["usd"] / old["usd"] for one, old in pairs]),
            "reached": sum(one["reached"] for one, _ in pairs),
            "exact_match": score,
            "overlap": None not in ends and ends[0] <= ends[3] and ends[2] <= ends[1],
            "paid_twice": None if pairs[0][0]["paid_twice"] is None else sum(one["paid_twice"] for one, _ in pairs),
            "seeds": seeds,
        }
    return rows


def calls_table(records: Sequence[Mapping[str, Any]]) -> str:
    """Calls of the large LLM until the agent is good, by setting."""
    lines = [
        "| world | setting | steps | calls | different in their step | of today's [95 %] | dollars of it | reached "
        "| exact match [95 %] | paid twice |",
        "|" + "---|" * 10,
    ]
    for (world, name), row in of_settings(records).items():
        ratio, dollars = _shown(row["calls_ratio"], 2), f"{row['usd_ratio']['mean']:.2f}"
        reached, twice = (
            f"{row['reached']} of {len(row['seeds'])}",
            "–" if row["paid_twice"] is None else row["paid_twice"],
        )
        cells = (
            f"{row['steps']:.1f}",
            f"{row['calls']:,}",
            f"{row['different']:.0%}",
            ratio,
            dollars,
            reached,
            _shown(row["exact_match"]),
            twice,
        )
        lines.append(f"| {world} | {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _interval(values: Sequence[float]) -> str:
    return _shown(t_interval(values))


def _shown(row: Mapping[str, Any], digits: int = 3) -> str:
    ends = "one seed" if row["low"] is None else f"{row['low']:.{digits}f}, {row['high']:.{digits}f}"
    return f"{row['mean']:.{digits}f} [{ends}]"


TEXTS: dict[str, Callable[[Sequence[Mapping[str, Any]]], str]] = {
    "calls": calls_table,
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
