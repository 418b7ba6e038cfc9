"""Processes that measure training steps.

The replacements of `fake_gpu.py` are global, and an unknown CUDA path may end a process, so steps
are never measured in the caller's process.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from queue import SimpleQueue

from .measured_step import MeasuredStep, TrainingJob

PROCESS_COUNT = 2
OFFLINE_CPU = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
# Prefixes of the variables of a distributed job that plans itself.
LAUNCH_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "ACCELERATE_", "FSDP_", "MASTER_")


@dataclass(frozen=True)
class MeasurementResult:
    """The result of a job: one of the two fields is set.

    Args:
        step ([`MeasuredStep`], *optional*): The measured step.
        error (`str`, *optional*): The reason why it could not be measured.
    """

    step: MeasuredStep | None = None
    error: str | None = None


class MeasurementProcesses:
    """Two processes that measure jobs until a deadline. They touch no GPU and no network.

    The first job may take longer, because there is no plan without it. Use it as a context manager.

    Args:
        seconds (`float`): Seconds from now until the deadline.
        first_seconds (`float`, *optional*, defaults to `600.0`): Seconds until the deadline of the
            first job.

    Attributes:
        max_wait (`float`): Seconds that the first job may take.
    """

    def __init__(self, seconds: float, first_seconds: float = 600.0):
        # The first job has its own, later deadline.
        now = time.monotonic()
        self.max_wait = max(seconds, first_seconds)
        self.deadline = now + seconds
        self._next_deadline = now + self.max_wait
        # All processes are idle at first. They take turns.
        self._processes = [start_process() for _ in range(PROCESS_COUNT)]
        self._idle: SimpleQueue[subprocess.Popen[bytes]] = SimpleQueue()
        for process in self._processes:
            self._idle.put(process)

    def __enter__(self) -> MeasurementProcesses:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def measure(self, jobs: Mapping[str, TrainingJob]) -> dict[str, MeasurementResult]:
        """Measure jobs at the same time.

        Returns:
            `dict[str, MeasurementResult]`: The result of each job by name, without those that had
                not ended by the deadline.
        """
        results: dict[str, MeasurementResult] = {}

        def measure_and_store(name: str, job: TrainingJob) -> None:
            result = self._measure_job(job)
            if result is not None:
                results[name] = result

        # A thread per job waits for its result.
        threads = []
        for name, job in jobs.items():
            thread = threading.Thread(target=measure_and_store, args=(name, job))
            thread.start()
            threads.append(thread)
            time.sleep(0.01)  # so that the jobs get their processes in order
        for thread in threads:
            thread.join()
        return {name: results[name] for name in jobs if name in results}

    def _measure_job(self, job: TrainingJob) -> MeasurementResult | None:
        """Measure a job in an idle process, which is killed at the deadline."""
        # The first job takes the longer deadline with it; the jobs after it have the common one.
        process = self._idle.get()
        deadline = self._next_deadline
        self._next_deadline = self.deadline
        timer = threading.Timer(max(deadline - time.monotonic(), 0.0), process.kill)
        timer.start()
        try:
            # A job goes in as a pickle, and its result comes back as a line of JSON.
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(pickle.dumps(job))
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:  # the process was killed at an earlier deadline
            return None
        finally:
            timer.cancel()
            self._idle.put(process)

        # A result, or the error of a library on the way.
        if line:
            values = json.loads(line)
            if "error" in values:
                return MeasurementResult(error=values["error"])
            return MeasurementResult(step=MeasuredStep.from_json(values["step"]))
        # No line before the deadline: the process crashed. After it: the timer ended the process.
        if time.monotonic() < deadline:
            status = process.wait()
            return MeasurementResult(error=f"the measuring process ended with status {status}")
        return None


def start_process() -> subprocess.Popen[bytes]:
    """Start a process that reads jobs and writes results."""
    # The caller's environment, without its distributed job, its GPUs and its network.
    environment = {}
    for name, value in os.environ.items():
        if not name.startswith(LAUNCH_VARIABLES):
            environment[name] = value
    environment |= OFFLINE_CPU
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", f"{__package__}.measured_step"],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
