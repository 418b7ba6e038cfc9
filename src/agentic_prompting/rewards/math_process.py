"""A process that compares mathematical answers, for threads that cannot interrupt a computation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from . import math_grading

# Variables that the process gets. All others may contain secrets.
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT", "TMPDIR", "TEMP")
_NO_LIMIT_SECONDS = 3600


class GraderProcess:
    """Runs `math_grading.py`.

    A process that takes too long is killed, and a new one started for the next call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def compare(
        self, gold: str, answer: str, text: str | None, timeout_seconds: int | None
    ) -> bool | None:
        """Call [`math_grading.compare`] in the process.

        Raises:
            `TimeoutError`: If the comparison takes too long.
            `RuntimeError`: If the comparison fails.
        """
        seconds = timeout_seconds or _NO_LIMIT_SECONDS
        # The process ends itself a second later, for the case that this one is gone by then.
        request = {"gold": gold, "answer": answer, "text": text, "seconds": seconds + 1}
        with self._lock:
            process = self._ensure_running()
            assert process.stdin is not None and process.stdout is not None
            # Killing the process ends the wait for its reply.
            timer = threading.Timer(seconds, process.kill)
            timer.start()
            try:
                process.stdin.write(json.dumps(request) + "\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except OSError:
                line = ""
            finally:
                timer.cancel()
            if not line:
                self._kill()
                raise TimeoutError(f"no verdict in {seconds} s")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["equal"]  # type: ignore[no-any-return]

    def _ensure_running(self) -> subprocess.Popen[str]:
        """Return the running process; start it if there is none."""
        if self._process is not None and self._process.poll() is None:
            return self._process

        # Without the secrets of this process, but with its packages.
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        environment["PYTHONUTF8"] = "1"
        # `-P` keeps this folder, which has a `math.py`, out of the search path.
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(math_grading.__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        assert process.stdout is not None
        # The first line says that it has loaded math-verify.
        is_ready = bool(process.stdout.readline())
        if not is_ready:
            process.kill()
            process.wait()
            raise RuntimeError("the process of math-verify did not start")
        self._process = process
        return process

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


_processes: dict[int, GraderProcess] = {}


def grader_process() -> GraderProcess:
    """Return the grader of this process.

    A fork gets a new one, because it must not share its parent's pipes.
    """
    return _processes.setdefault(os.getpid(), GraderProcess())
