"""Take the pictures of `docs/tutorial.md` out of the notebooks.

python docs/tools/gallery.py             # after docs/tools/run_notebooks.py
python docs/tools/gallery.py --check     # whether pictures and outputs are those of the notebooks
"""

from __future__ import annotations

import base64
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURES = {
    "01_prompt_r1": 0,
    "02_espl": 1,
    "03_prorefine": 0,
    "04_your_own_environment_and_reward": 0,
    "05_agent_program": 0,
    "06_conductor": 0,
}
"""By notebook, which of its pictures."""


def outputs_of(notebook: str) -> Iterator[dict]:
    path = ROOT / "examples" / f"{notebook}.ipynb"
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        yield from cell.get("outputs", ())


def main(check: bool) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    for name, which in PICTURES.items():
        outputs = list(outputs_of(name))
        drawn = [one["data"]["image/png"] for one in outputs if "image/png" in one.get("data", ())]
        picture = base64.b64decode(drawn[which])
        path = ROOT / "docs" / "images" / f"notebook_{name[:2]}.png"
        if not check:
            path.write_bytes(picture)
            continue
        section = page[page.index(f"`examples/{name}.ipynb`") :].partition("\n### ")[0]
        (printed,) = re.findall(r"^```\n(.*?)^```$", section, re.M | re.S)
        said = "".join("".join(one.get("text", ())) for one in outputs)
        missing = [line for line in printed.splitlines() if line not in said]
        if missing or path.read_bytes() != picture:
            raise SystemExit(f"docs/tutorial.md is not as {name} is: {missing or path.name}")


if __name__ == "__main__":
    main("--check" in sys.argv)
