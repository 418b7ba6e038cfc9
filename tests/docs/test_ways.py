"""The ways through the house on docs/architecture.md are those of real calls."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "docs" / "tools" / "trace_ways.py"


def test_the_ways_on_the_page_are_those_of_real_calls():
    done = subprocess.run(
        [sys.executable, TOOL, "--check"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]


TRACED = f"""
import runpy
tool = runpy.run_path({str(TOOL)!r})
from agentic_prompting.llm import Usage, with_system
from agentic_prompting.rollout import parse_turn
with tool["Trace"]("rollout/grammar.py:parse_turn", "llm/chats.py:with_system").running() as trace:
    Usage(1, 2) + Usage(1, 2)  # before the first
    parse_turn("<answer> a </answer>")
    with_system("s", [{{"role": "user", "content": "q"}}])
    Usage(1, 2) + Usage(1, 2)
print(trace.files)
"""


def test_a_trace_has_what_is_called_between_two_functions():
    """From the first function's call to the last one's return, and nothing that other code calls. In a process of its
    own: in one that had run many other tests, CPython 3.11.7 looped for ever in a function that was profiled, where no
    signal ends it."""
    done = subprocess.run([sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=100)
    assert done.stdout.split("\n")[0] == "['rollout/grammar.py', 'llm/chats.py']", done.stderr[-2000:]


ENTERED = f"""
import runpy
tool = runpy.run_path({str(TOOL)!r})
from agentic_prompting.rollout import AgentSpec
tool["TRAINERS"].add("llm/chats.py")  # in the place of a trainer
with tool["Trace"]("rollout/spec.py:messages", "rollout/spec.py:messages").running() as trace:
    AgentSpec().messages({{"question": "q"}})
try:
    tool["by_hooks_only"](trace)
except SystemExit as error:
    print(error)
"""


def test_a_part_that_calls_the_trainer_is_named():
    done = subprocess.run([sys.executable, "-c", ENTERED], capture_output=True, text=True, timeout=100)
    assert "rollout/spec.py -> fill, rollout/spec.py -> with_system\n" in done.stdout, done.stderr[-2000:]


def test_an_old_page_is_seen():
    tool = runpy.run_path(str(TOOL))
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    place = tool["on_page"]("query-answer", page)
    assert "1. `refine/loop.py`: " in place[1]
    files = [line.split("`")[1] for line in place[1].split("\n") if line.startswith("1. ")]
    assert tool["lines_of"]("query-answer", files) == place[1].split("\n")
    assert tool["lines_of"]("query-answer", files[1:]) != place[1].split("\n")
