"""[`StepTimes`]: how long each step of a training takes."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback


class StepTimes(TrainerCallback):
    """Wall and processor seconds of each step."""

    def __init__(self) -> None:
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._wall_start = time.perf_counter()
        self._cpu_start = time.process_time()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.wall.append(time.perf_counter() - self._wall_start)
        self.cpu.append(time.process_time() - self._cpu_start)

    def after_first(self) -> StepTimes:
        """These times without the first step, which allocates."""
        rest = StepTimes()
        rest.wall = self.wall[1:]
        rest.cpu = self.cpu[1:]
        return rest
