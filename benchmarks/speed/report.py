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
from support.browser import chromium, opened, record as make_record, shows, why_not, write_run


def print_seconds(label: str, action: Callable[[], object]) -> None:
    started = time.perf_counter()
    action()
    print(f"{label:24} {time.perf_counter() - started:6.2f} s")


def measure(folder: Path, trajectories: int, words: int) -> None:
    rng = random.Random(0)
    records = [make_record(number, rng, words) for number in range(trajectories)]
    run = write_run(folder, records)
    page_file = folder / "report" / "index.html"
    print_seconds("write", lambda: write_report(run, pictures=False, max_trajectories=trajectories))
    page_mib = page_file.stat().st_size / 2**20
    records_mib = sum(part.stat().st_size for part in (run / "rollouts").iterdir()) / 2**20
    print(f"{'size':24} {page_mib:6.1f} MiB (records, compressed: {records_mib:.1f} MiB)")
    malformed = sum(record["status"] == "malformed" for record in records)
    with chromium() as browser:
        started = time.perf_counter()
        page = opened(browser, page_file)
        print(f"{'open':24} {time.perf_counter() - started:6.2f} s")
        outcome = page.get_by_label("outcome")
        search = page.get_by_label("text in question")

        def filter_by(status: str, count: int) -> None:
            outcome.select_option(status)
            shows(page, count)

        def search_for(text: str, count: int) -> None:
            search.fill(text)
            shows(page, count)

        print_seconds("filter by outcome", lambda: filter_by("malformed", malformed))
        print_seconds("no filter", lambda: filter_by("", trajectories))
        last_question = f"question {trajectories - 1} :"
        print_seconds("first search", lambda: search_for(last_question, 1))
        print_seconds("next search", lambda: search_for("kenya", trajectories))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=20_000)
    parser.add_argument("--words", type=int, default=60, help="in each turn and reply")
    args = parser.parse_args()
    reason = why_not()
    if reason:
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), args.trajectories, args.words)
