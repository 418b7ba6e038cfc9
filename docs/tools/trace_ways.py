"""Traces the three ways through the house: the files of ours that real calls touch, for
`docs/architecture.md`.

    python docs/tools/trace_ways.py            # trace, and write the lists into the page
    python docs/tools/trace_ways.py --check    # trace, and exit with status 1 if the page says something else

Everything runs on the CPU without a network: a tiny policy of the sandbox that takes one training
step with a function as the large LLM, E-SPL on one batch with a scripted reference LLM, and
ProRefine on one query with scripted models. A file counts if a function of it is called, on any
thread; what runs while a module is imported does not count. It also exits with status 1 if a part
calls a trainer, which TRL's hooks alone may do.
"""

from __future__ import annotations

import ast
import logging
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "agentic_prompting"
PAGE = ROOT / "docs" / "architecture.md"
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]
AIMS = {"row-gradient": 24, "batch-child": 14, "query-answer": 7}
TRAINERS = {f"trainers/{name}.py" for name in ("grpo", "prompt_r1", "espl")}
"""The files of the trainer classes, which may call each other."""


def is_trainer_code(code: CodeType) -> bool:
    """Return whether a function of a trainer's file is the trainer's, not another class's."""
    owner = code.co_qualname.split(".")[0]
    is_class = owner[:1].isupper()
    return not is_class or owner.endswith("Trainer")


class Trace:
    """Notes the files of ours in which a function is called, from one function's first call to
    another's next return.

    On the main thread only what these two call is noted: TRL calls much between them. Other
    threads, where episodes and the reflection run, must begin after [`watch_threads`], because a
    profile function is set when a thread begins.

    Args:
        first (`str`): As `file:function`, the file relative to the package.
        last (`str`): The same; may be equal to `first`.

    Attributes:
        files (`list[str]`): In the order of their first calls.
        entries (`list[str]`): Calls of a trainer by other files of ours, as `file -> function`.
    """

    def __init__(self, first: str, last: str):
        self.first, self.last = first, last
        self.files: list[str] = []
        self.entries: list[str] = []
        self._depth, self._begun, self._ended = 0, False, False
        self._main = threading.get_ident()
        self._names: dict[CodeType, str | None] = {}

    @contextmanager
    def running(self) -> Iterator[Trace]:
        """Trace within the block."""
        global _current
        _current = self
        sys.setprofile(_profile)
        try:
            yield self
        finally:
            sys.setprofile(None)
            _current = None

    def note(self, frame: FrameType, event: str) -> None:
        """A function is called or returns."""
        code = frame.f_code
        if code not in self._names:
            self._names[code] = _file_of(code)
        file = self._names[code]
        if file is None or self._ended:
            return
        main, name = threading.get_ident() == self._main, f"{file}:{code.co_name}"
        self._begun |= main and event == "call" and name == self.first
        if not self._begun:
            return
        if main and name in (self.first, self.last):
            self._depth += 1 if event == "call" else -1
        if event == "call" and (self._depth or not main):
            self.files += [file] if file not in self.files else []
            caller = _file_of(frame.f_back.f_code) if frame.f_back else None
            is_entry = file in TRAINERS and caller is not None and caller not in TRAINERS
            if is_entry and is_trainer_code(code):
                self.entries.append(f"{caller} -> {code.co_qualname}")
        self._ended = main and event == "return" and name == self.last and not self._depth


_current: Trace | None = None


def _profile(frame: FrameType, event: str, argument: Any) -> None:
    if _current is not None and event in ("call", "return"):
        _current.note(frame, event)


def watch_threads() -> None:
    """Let every thread that begins from now on report to the trace that is running."""
    threading.setprofile(_profile)


def _file_of(code: CodeType) -> str | None:
    """The file of a function of ours, relative to the package."""
    path = Path(code.co_filename)
    if (
        code.co_name == "<module>" or not path.is_relative_to(PACKAGE) or not code.co_flags & 1
    ):  # 1: a function's
        return None
    return path.relative_to(PACKAGE).as_posix()


async def answer_request(messages: list[dict[str, str]]) -> str:
    """Stand in for the large LLM: a user has one of their own, so it is not a file of the way."""
    return "the answer is Swahili ."


def row_to_gradient(folder: Path) -> list[str]:
    """From a row that enters TRL's hook to the loss: one step of Prompt-R1, sampled by the engine
    of this process.
    """
    from datasets import Dataset

    from agentic_prompting.sandbox import as_rows, make_split
    from support.policies import make_asking_policy, make_tiny_policy
    from support.training import trainer_for

    policy = make_asking_policy(make_tiny_policy(folder / "tiny"), folder / "asking")
    rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
    file = "trainers/grpo.py"
    with Trace(
        f"{file}:_generate_and_score_completions", f"{file}:_compute_loss"
    ).running() as trace:
        trainer = trainer_for(policy, folder / "row", rows, answer_request, max_steps=1)
        trainer.train()
    if not any(file.startswith("environments/") for file in trace.files):
        raise SystemExit("the policy asked nothing, so the way is not whole")
    return by_hooks_only(trace)


def batch_to_child(folder: Path) -> list[str]:
    """From a batch whose rewards are known to the child that joins the population: two steps of
    E-SPL.
    """
    from datasets import Dataset

    from agentic_prompting.sandbox import as_rows, make_split
    from support.espl_training import trainer_for

    rows = Dataset.from_list(as_rows(make_split(0, n_test=8)[1]))
    with Trace(
        "trainers/espl.py:_after_rewards", "trainers/espl.py:_add_children"
    ).running() as trace:
        trainer = trainer_for(folder / "tiny", folder / "batch", rows, max_steps=2, evolution_lag=0)
        trainer.train()
    if len(trainer.population.members) < 2:
        raise SystemExit("no child was made, so the way is not whole")
    return by_hooks_only(trace)


def by_hooks_only(trace: Trace) -> list[str]:
    """The files of a trace in which no part has called a trainer."""
    if trace.entries:
        raise SystemExit(
            f"parts call the trainer, and only hooks of TRL may: {', '.join(trace.entries)}"
        )
    return trace.files


def query_to_answer(folder: Path) -> list[str]:
    """From a query to the refined answer: feedback on the first step, an improved prompt, the
    answer under it.
    """
    from agentic_prompting.refine import ProRefiner
    from support.refine_models import PROMPT, QUERY, Log, models

    with Trace("refine/refiner.py:refine", "refine/refiner.py:refine").running() as trace:
        result = ProRefiner(**models(Log()), max_steps=6).refine(PROMPT, QUERY)
    if not result.answer:
        raise SystemExit("no answer came, so the way is not whole")
    return trace.files


WAYS: dict[str, Callable[[Path], list[str]]] = {
    "query-answer": query_to_answer,
    "row-gradient": row_to_gradient,
    "batch-child": batch_to_child,
}
"""In the order of their runs: the first needs no torch, the third uses the policy that the second
makes.
"""


def trace_all() -> dict[str, list[str]]:
    """The files of every way, in the order of their first calls."""
    watch_threads()
    with tempfile.TemporaryDirectory() as folder:
        return {name: way(Path(folder)) for name, way in WAYS.items()}


def lines_of(name: str, files: Sequence[str]) -> list[str]:
    """The list of a way as the page has it: its count, then each file with the first sentence of
    its docstring.
    """
    count, aim = len(files), AIMS[name]
    missed = "" if count <= aim else f", {count - aim} more than that"
    return [
        f"{count} files; the aim is {aim} at most{missed}.",
        "",
        *(f"1. `{file}`: {_first(file)}" for file in files),
    ]


def _first(file: str) -> str:
    doc = ast.get_docstring(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))) or ""
    sentence = re.match(r".*?\.(?=\s|$)", " ".join(doc.split()))
    return sentence[0] if sentence else doc


def on_page(name: str, text: str) -> re.Match[str]:
    """The place of a way's list on the page, between its markers."""
    match = re.search(rf"<!-- way: {name} -->\n(.*?)\n<!-- /way -->", text, re.DOTALL)
    if match is None:
        raise SystemExit(f"docs/architecture.md has no markers of {name}")
    return match


def main() -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    logging.disable(logging.WARNING)
    text = PAGE.read_text(encoding="utf-8")
    outdated = []
    for name, files in trace_all().items():
        print(f"{name}: {len(files)} files\n  " + "\n  ".join(files))
        lines = lines_of(name, files)
        section = on_page(name, text)
        # Compare without the order, because threads may touch files in another one.
        if sorted(lines) != sorted(section[1].split("\n")):
            outdated.append(name)
            text = text[: section.start(1)] + "\n".join(lines) + text[section.end(1) :]
    if "--check" not in sys.argv:
        PAGE.write_text(text, encoding="utf-8")
    elif outdated:
        raise SystemExit(
            f"docs/architecture.md is old ({', '.join(outdated)}): run docs/tools/trace_ways.py"
        )


if __name__ == "__main__":
    main()
