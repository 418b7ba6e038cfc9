"""Whether learning works at all: what continuous integration asks of two short runs in the sandbox.

    make demo
    agentic-prompting demo --method espl --output-dir runs/espl --max-steps 10
    python benchmarks/learning.py runs/demo/summary.json runs/espl/summary.json

Ends with an error unless Prompt-R1's exact match on unseen countries rises from at most .5 to at least .85, and unless
E-SPL's policy under its best prompt is better than where it started, beyond what the questions' chance explains.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

START, END = 0.5, 0.85


def problems(demo: Mapping[str, Any], espl: Mapping[str, Any]) -> list[str]:
    """What is wrong with the summaries of the two runs; nothing if learning works."""
    before, after = demo["exact_match_before"], demo["exact_match_after"]
    start, end = (espl["exact_match"][f"policy {row} prompt"] for row in ("before, initial", "after, best"))
    found = []
    if before > START:
        found.append(f"Prompt-R1 starts at {before:.3f}, above {START}: there is too little left to learn")
    if after < END:
        found.append(f"Prompt-R1 ends at {after:.3f}, below {END}")
    if demo["failed_rollouts"]:
        found.append(f"{demo['failed_rollouts']} rollouts failed beside an oracle that never does")
    if end[1] <= start[2]:
        found.append(f"E-SPL ends at {end}, not above its start, {start}: mean and ends of the interval")
    return found


def main() -> None:
    demo, espl = (json.loads(Path(name).read_text(encoding="utf-8")) for name in sys.argv[1:])
    found = problems(demo, espl)
    print("\n".join(found) or "learning works: Prompt-R1's demo and E-SPL's smallest run end above their starts")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
