"""Commands that get a signal while they ask a server: their exit code, what they say, and what is
left of them.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-c", "from agentic_prompting.cli import main; main()"]
LIMIT = 90.0  # seconds; such a command takes five on a free machine


class Signalled:
    """A command in a session of its own, so that whatever outlives it is found.

    Args:
        words (`list`): Of the command line.
        log (`Path`): The file for all that it prints.
    """

    def __init__(self, words: list[Any], log: Path, command: list[str] = COMMAND):
        self.log = log
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "src"),
            "OPENAI_API_KEY": "none",
            "OMP_NUM_THREADS": "1",
        }
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [*command, *map(str, words)],
                stdout=file,
                stderr=file,
                env=environment,
                start_new_session=True,
            )

    def signalled(self, number: int) -> tuple[int, str]:
        """Its exit code and what it said, once it got the signal; whatever is left of it is an
        error.
        """
        self.process.send_signal(number)
        try:
            return self.ended()
        finally:
            orphans = self.orphans()
            for orphan in orphans:
                orphan.kill()
            assert not orphans, f"left running: {orphans}"

    def ended(self) -> tuple[int, str]:
        try:
            code = self.process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return code, self.log.read_text(errors="replace")

    def orphans(self) -> list[psutil.Process]:
        """Processes of its session that still run a second after its end."""
        deadline = time.monotonic() + 1
        while (
            left := [process for process in psutil.process_iter() if self._of_session(process)]
        ) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    def _of_session(self, one: psutil.Process) -> bool:
        try:
            return os.getsid(one.pid) == self.process.pid and one.status() != psutil.STATUS_ZOMBIE
        except (ProcessLookupError, psutil.Error):
            return False


class Counted:
    """Replies of a server, counted; each takes `seconds`."""

    def __init__(self, say: Any, seconds: float):
        self.say = say
        self.seconds = seconds
        self.asked = 0

    def __call__(self, body: dict[str, Any], number: int) -> Any:
        from support.servers import Answer

        self.asked += 1
        return Answer(self.say(body), delay=self.seconds)

    def wait_for(self, asked: int, run: Signalled) -> None:
        deadline = time.monotonic() + LIMIT
        while self.asked < asked:
            assert run.process.poll() is None and time.monotonic() < deadline, run.log.read_text()
            time.sleep(0.01)


def moments(count: int, longest: float, seed: int) -> list[float]:
    """Seconds after the first request."""
    rng = random.Random(seed)
    return [rng.uniform(0, longest) for _ in range(count)]
