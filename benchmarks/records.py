"""What a run leaves for `recompute.py`: lines of JSON in `records/NAME.jsonl.gz`, with commit, date and machine."""

from __future__ import annotations

import gzip
import json
import os
import platform
import subprocess
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[1] / "records"


def record(path: Path, *entries: Mapping[str, Any]) -> None:
    """Append entries. Half a run is half a file: whoever goes on reads what is there."""
    git = ["git", "-C", str(RECORDS.parent), "rev-parse", "--short=12", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {"commit": commit, "date": date.today().isoformat(), "machine": machine()}
    with gzip.open(path, "at", encoding="utf-8") as file:
        file.writelines(json.dumps({**entry, **known}) + "\n" for entry in entries)


def machine() -> str:
    """Cores, processor and how busy it was."""
    return f"{os.cpu_count()} cores, {platform.machine()}, load {os.getloadavg()[0]:.1f}"
