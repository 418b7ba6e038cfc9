"""Runs the commands of `docs/first-hour.md` line by line and writes their results into the page.

    python docs/tools/first_hour.py --folder /tmp/first-hour     # an empty folder, outside of the clone
    python docs/tools/first_hour.py --check                      # whether the page is unchanged since its run

The wheel is built into the folder, which is otherwise empty. Then the page's blocks are run in order. A ```python block
with `title="name.py"` becomes that file. A ```bash block is typed into one terminal that stays open, and the text
between `<!-- result: ... -->` and `<!-- end -->` after it is replaced by its output (only the lines of `last 5` or
`with PATTERN`, none if it is empty) and its seconds. A stopped run continues with the first block that is not done.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "first-hour.md"
AN_HOUR = 3600
_BLOCK = re.compile(
    r'^```(?:python title="(\w+\.py)"|bash)\n(.*?)^```$'
    r"(?:\n+<!-- result: ?(.*?) -->\n(.*?)<!-- end -->)?",
    re.M | re.S,
)
_SUMMARY = re.compile(r"<!-- run (\w+), (\d+) seconds -->\n.*?\n\n", re.S)
_DONE = "the block is done:"
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Terminal:
    """One shell for the whole page, as a reader has it."""

    def __init__(self, folder: Path):
        hidden = {name for name in os.environ if name.startswith(("PYTHON", "VIRTUAL_ENV"))}
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        mine = [
            part
            for part in environment["PATH"].split(":")
            if part != str(Path(sys.executable).parent)
        ]
        self.shell = subprocess.Popen(
            ["bash", "--norc"],
            cwd=folder,
            env={**environment, "PATH": ":".join(mine), "COLUMNS": "120"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.typed("trap 'failed=$?' ERR")

    def typed(self, commands: str) -> tuple[str, float]:
        """The output of the commands and their seconds. Raises `RuntimeError` if one of them fails."""
        assert self.shell.stdin is not None and self.shell.stdout is not None
        started, lines = time.perf_counter(), []
        self.shell.stdin.write(f"failed=0\n{commands}\necho; echo '{_DONE}' $failed\n")
        self.shell.stdin.flush()
        for line in self.shell.stdout:
            if line.startswith(_DONE):
                break
            lines.append(line)
            print(line, end="", flush=True)
        said = "".join(lines)
        if line.split()[-1] != "0":
            raise RuntimeError(f"failed:\n{commands}\n{said}")
        return said, time.perf_counter() - started


def digest(text: str) -> str:
    """A hash of all files and commands of the page, in order."""
    blocks = [f"{block[1]}\n{block[2]}" for block in _BLOCK.finditer(text)]
    return hashlib.sha256("\n".join(blocks).encode()).hexdigest()[:12]


def run(text: str, folder: Path) -> str:
    """The page with the results of a run in `folder`."""
    if not list((folder / "dist").glob("*.whl")):
        build = [
            sys.executable,
            "-m",
            "build",
            "--outdir",
            folder / "dist",
            ROOT,
        ]  # by way of the sdist
        subprocess.run([*map(str, build)], check=True, stdout=subprocess.DEVNULL)
    log = folder.parent / f"{folder.name}.json"  # beside it: the folder is the reader's
    done: dict[str, Any] = json.loads(log.read_text(encoding="utf-8")) if log.is_file() else {}
    terminal, so_far, pieces, total, end = Terminal(folder), "", [], 0.0, 0
    for block in _BLOCK.finditer(text):
        file, code, shown = block[1], block[2], block[3]
        so_far = hashlib.sha256((so_far + code).encode()).hexdigest()
        pieces.append(text[end : block.end(2)] + "```")
        end = block.end()
        if file:
            (folder / file).write_text(code, encoding="utf-8")
            continue
        if so_far in done:
            terminal.typed(
                "\n".join(
                    line for line in code.splitlines() if line.startswith(("source", "export"))
                )
            )
        else:
            done[so_far] = terminal.typed(code)
            log.write_text(json.dumps(done), encoding="utf-8")
        said, seconds = done[so_far]
        total += seconds
        fence = f"```\n{chosen}```\n\n" if (chosen := pick(said, shown or "")) else ""
        pieces.append(f"\n\n<!-- result: {shown or ''} -->\n{fence}{spoken(seconds)}\n<!-- end -->")
    machine = f"{len(os.sched_getaffinity(0))} CPU cores, Python {sys.version_info.major}.{sys.version_info.minor}"
    summary = (
        f"<!-- run {digest(text)}, {total:.0f} seconds -->\n"
        f"Done as printed on {datetime.now(UTC):%Y-%m-%d}, on {machine}: **{total / 60:.0f} minutes**, installing "
        "included, reading and typing not.\n\n"
    )
    return _SUMMARY.sub(lambda _: summary, "".join([*pieces, text[end:]]), count=1)


def pick(said: str, wanted: str) -> str:
    """The lines to show, without colours and with the last state of each progress bar."""
    plain = [
        _COLOURS.sub("", line).split("\r")[-1].rstrip()[:118] for line in said.rstrip().split("\n")
    ]
    kind, _, what = wanted.partition(" ")
    if kind == "last":
        plain = plain[-int(what) :]
    elif kind == "with":
        plain = [line for line in plain if re.search(what, line)]
    else:
        plain = []
    return "".join(f"{line}\n" for line in plain)


def spoken(seconds: float) -> str:
    return f"*{seconds:.1f} seconds.*" if seconds < 10 else f"*{seconds:.0f} seconds.*"


def check(text: str) -> None:
    """Raises `SystemExit` unless the page was run as it stands, in under an hour."""
    found = _SUMMARY.search(text)
    if not found or found[1] != digest(text):
        raise SystemExit(
            f"{PAGE.name} was not run as it stands: python docs/tools/first_hour.py --folder FOLDER"
        )
    if int(found[2]) >= AN_HOUR:
        raise SystemExit(f"{PAGE.name} took {found[2]} seconds")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Run docs/first-hour.md, and write what it printed into it."
    )
    parser.add_argument("--folder", type=Path, help="empty, or of a run that was stopped")
    parser.add_argument("--check", action="store_true")
    arguments, text = parser.parse_args(), PAGE.read_text(encoding="utf-8")
    if arguments.check:
        check(text)
    elif arguments.folder is None:
        parser.error("say where: --folder FOLDER")
    else:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        PAGE.write_text(run(text, arguments.folder.resolve()), encoding="utf-8")


if __name__ == "__main__":
    main()
