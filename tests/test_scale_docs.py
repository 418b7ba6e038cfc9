"""docs/scale.md says what benchmarks/scale.py computes."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_every_table_is_the_scripts():
    script = [sys.executable, ROOT / "benchmarks" / "scale.py"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    for part in done.stdout.strip().split("\n\n"):
        assert part in page, f"run benchmarks/scale.py and copy this into docs/scale.md:\n{part}"
