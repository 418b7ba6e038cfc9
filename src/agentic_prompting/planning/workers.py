"""Processes that measure steps: the patches of `step.py` are global, and an unknown CUDA path ends a process."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any

from .step import Job

_ALONE = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_", "FSDP_", "MASTER_")  # of a job that plans itself


class Workers:
    """Two processes that measure jobs until a deadline; the first job may take longer, as without it there is no plan.
    They touch no GPU and no network. A context manager.

    Args:
        seconds (`float`): From now until the deadline.
        first (`float`, *optional*, defaults to `600.0`): That of the first job.
    """

    def __init__(self, seconds: float, first: float = 600.0):
        now = time.monotonic()
        self.waited = max(seconds, first)  # for the first job
        self.deadline, self._first = now + seconds, now + self.waited
        self._free: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        self._all = [self._start() for _ in range(2)]
        for one in self._all:
            self._free.put(one)

    def _start(self) -> subprocess.Popen[bytes]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCH)}
        paths = os.pathsep.join(sys.path)
        return subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.step"], env={**kept, **_ALONE, "PYTHONPATH": paths},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: Any) -> None:
        for one in self._all:
            one.kill()
            one.wait()

    def measure(self, jobs: Mapping[str, Job]) -> dict[str, dict[str, Any]]:
        """Figures by name, as [`measure`] returns them; `error` where a job failed, nothing where time was over."""
        found: dict[str, dict[str, Any]] = {}
        threads = [threading.Thread(target=self._one, args=(name, job, found)) for name, job in jobs.items()]
        for one in threads:
            one.start()
            time.sleep(0.01)  # in their order
        for one in threads:
            one.join()
        return {name: found[name] for name in jobs if name in found}

    def _one(self, name: str, job: Job, found: dict[str, dict[str, Any]]) -> None:
        worker, deadline = self._free.get(), self._first
        self._first = self.deadline
        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), worker.kill)
        timer.start()
        try:
            assert worker.stdin is not None and worker.stdout is not None
            worker.stdin.write(pickle.dumps(job))
            worker.stdin.flush()
            line = worker.stdout.readline()
            if line:
                found[name] = json.loads(line)
            elif time.monotonic() < deadline:
                found[name] = {"error": f"the process that measured ended with status {worker.wait()}"}
        except OSError:  # a worker that was ended at the deadline
            pass
        finally:
            timer.cancel()
            self._free.put(worker)
