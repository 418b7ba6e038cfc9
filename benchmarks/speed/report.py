"""The time to write, open, filter and search a report of many trajectories, in headless Chromium.

python -m benchmarks.speed.report --trajectories 20000 --words 60
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from agentic_prompting.report import write_report
from support.browser import chromium, opened, record, shows, why_not, write_run


def timed(label: str, work: Callable[[], object]) -> None:
    started = time.perf_counter()
    work()
    print(f"{label:24} {time.perf_counter() - started:6.2f} s")


def measure(folder: Path, trajectories: int, words: int) -> None:
    rng = random.Random(0)
    records = [record(number, rng, words) for number in range(trajectories)]
    run = write_run(folder, records)
    page_file = folder / "report" / "index.html"
    timed("write", lambda: write_report(run, pictures=False, max_trajectories=trajectories))
    texts = sum(part.stat().st_size for part in (run / "rollouts").iterdir()) / 2**20
    print(
        f"{'size':24} {page_file.stat().st_size / 2**20:6.1f} MiB (records, compressed: {texts:.1f} MiB)"
    )
    malformed = sum(one["status"] == "malformed" for one in records)
    with chromium() as browser:
        started = time.perf_counter()
        page = opened(browser, page_file)
        print(f"{'open':24} {time.perf_counter() - started:6.2f} s")
        outcome = page.get_by_label("outcome")
        search = page.get_by_label("text in question")
        timed(
            "filter by outcome",
            lambda: (outcome.select_option("malformed"), shows(page, malformed)),
        )
        timed("no filter", lambda: (outcome.select_option(""), shows(page, trajectories)))
        timed(
            "first search", lambda: (search.fill(f"question {trajectories - 1} :"), shows(page, 1))
        )
        timed("next search", lambda: (search.fill("kenya"), shows(page, trajectories)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--words", type=int, default=60, help="in each turn and reply")
    args = parser.parse_args()
    if why_not():
        raise SystemExit(why_not())
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), args.trajectories, args.words)
