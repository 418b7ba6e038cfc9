"""The tool that traces the ways through the package sees the calls, and names a part that calls the
trainer.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "docs" / "tools" / "trace_ways.py"


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
    """From the first function's call to the last one's return, and nothing that other code calls.

    In a process of its own: in one that had run many other tests, CPython 3.11.7 looped for ever in
    a function that was profiled, where no signal ends it.
    """
    done = subprocess.run(
        [sys.executable, "-c", TRACED], capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split("\n")[0] == "['rollout/grammar.py', 'llm/chats.py']", done.stderr[
        -2000:
    ]


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
    done = subprocess.run(
        [sys.executable, "-c", ENTERED], capture_output=True, text=True, timeout=100
    )
    assert "rollout/spec.py -> fill, rollout/spec.py -> with_system\n" in done.stdout, done.stderr[
        -2000:
    ]
