"""A `GRPOTrainer` whose resumed run is the uninterrupted one, bit for bit.

transformers' checkpoint holds weights, optimizer, schedule and random states. GRPO needs more, and it is kept here, one
file per process beside the rest: where in a block of reused rollouts training stands and what is left of that block,
means and losses not yet logged, and what a subclass adds. The order of the rows needs no saving: it is a function of
seed and epoch.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import send_to_device
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from ..config import check_rows
from .checkpoints import STATE_FILE, alone_in, from_first, saved_whole, whole_checkpoint

logger = logging.getLogger(__name__)


class ResumableGRPOTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] with whole checkpoints and an exact resume, under DDP, DeepSpeed and FSDP2 alike.

    A run resumed on another number of processes goes on with weights, optimizer, schedule and population, and says in
    a warning what starts afresh; DeepSpeed, whose checkpoints are cut for a number of processes, cannot.
    """

    staging: Path | None = None  # while a checkpoint is being saved: where

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._clock = _Clock(self)
        self.add_callback(self._clock)

    # --- for subclasses ------------------------------------------------------------------------------------------

    def resume_state(self) -> dict[str, Any]:
        """What else this process needs to go on exactly: plain data and tensors."""
        return {}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        """Take back a [`ResumableGRPOTrainer.resume_state`]."""

    def rollouts_per_row(self) -> int:
        """How often a row comes in a row: `num_generations`, or a multiple of it."""
        return self.num_generations

    # --- the order of rows ---------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Dataset | None = None) -> RepeatSampler:
        repeats = self.rollouts_per_row()
        return EpochSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=repeats,
            batch_size=self.args.generation_batch_size // repeats,
            repeat_count=self.num_iterations * self.args.steps_per_generation,
            shuffle=self.shuffle_dataset,
            seed=self.args.seed,
            epoch=lambda: int(self.state.epoch or 0),  # whole at the beginning of an epoch
        )

    # --- saving --------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self.staging is None else str(self.staging)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with saved_whole(self, trial) as folder:
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                folder.mkdir(parents=True, exist_ok=True)  # on a node whose disk is its own
                torch.save(self._exact_state(), folder / STATE_FILE.format(self.accelerator.process_index))

    def _exact_state(self) -> dict[str, Any]:
        step, metrics = self._clock.now()
        block = self.args.steps_per_generation * self.num_iterations
        return {
            "world": self.accelerator.num_processes,
            "step": step,
            # At the end of a block the next one is generated anyway.
            "buffered": self._buffered_inputs if step % block else None,
            "metrics": metrics,
            "loss": float(self._tr_loss),
            "last_logged": self._globalstep_last_logged,
            "own": self.resume_state(),
        }

    # --- resuming ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As [`~trl.GRPOTrainer`]'s.

        With `resume_from_checkpoint=True` a damaged checkpoint gives way to the whole one before it, with a warning;
        where there is none yet, training starts at the beginning: the same command begins a run and goes on with it,
        whenever it was killed. At the last step nothing is trained.

        Raises:
            `ValueError`: If there are too few rows for a single step; if another run trains in `output_dir`; if the
                checkpoint that was asked for is damaged; if a DeepSpeed checkpoint is of another number of processes.
                Says what can be done.
        """
        check_rows(self.train_dataset, self.args, self.rollouts_per_row())
        folder = Path(self.args.output_dir)
        with alone_in(folder, self.accelerator):
            checkpoint = from_first(self.accelerator, lambda: whole_checkpoint(resume_from_checkpoint, folder))
            state = self._read_exact_state(checkpoint) if self.is_deepspeed_enabled else None
            if state is not None and state["world"] != (world := self.accelerator.num_processes):
                raise ValueError(
                    f"{checkpoint} is cut by DeepSpeed for {state['world']} processes, this job has "
                    f"{world}: convert it with DeepSpeed's ds_to_universal.py and set checkpoint.load_universal in its "
                    "config, or train on from its weights alone (they are whole) with this folder as the model"
                )
            return super().train(checkpoint, *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # transformers looks only after a step whether it was the last: the same command would take one more each time.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        state = self._read_exact_state(checkpoint)
        if state is None:
            return
        self._step = state["step"]
        if state["world"] != self.accelerator.num_processes:
            logger.warning(
                "the checkpoint is of %d processes, this job has %d: weights, optimizer, schedule and population go "
                "on, but random states, the rest of a generated batch and means not yet logged start afresh, and where "
                "the global batch has another size some rows of this epoch come twice or not at all",
                state["world"],
                self.accelerator.num_processes,
            )
            return
        self._buffered_inputs = send_to_device(state["buffered"], self.accelerator.device)
        for mode, means in state["metrics"].items():
            self._metrics[mode].update(means)
        self._clock.unlogged = state["loss"], state["last_logged"]
        self.load_resume_state(state["own"])

    def _read_exact_state(self, checkpoint: str | None) -> dict[str, Any] | None:
        """This process's part; where the job has another size, the first process's."""
        if checkpoint is None:
            return None
        for process in (self.accelerator.process_index, 0):
            path = Path(checkpoint, STATE_FILE.format(process))
            if path.exists():
                try:
                    return torch.load(path, map_location="cpu", weights_only=True)
                except Exception as error:  # each kind of damage has its own
                    raise ValueError(f"{path} cannot be read: resume from an earlier checkpoint") from error
        logger.warning("%s has no %s: the resumed run is not exactly the uninterrupted one", checkpoint, STATE_FILE)
        return None


class EpochSampler(RepeatSampler):
    """TRL's sampler with the order drawn from seed and epoch, instead of from how many epochs it has been through.

    Args:
        epoch (`Callable`): Gives the number of the epoch that begins.
        **options: Of `RepeatSampler`.
    """

    def __init__(self, *, epoch: Callable[[], int], **options: Any):
        super().__init__(**options)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.shuffle:
            self.generator.manual_seed(self.seed + self.epoch())  # in the first epoch TRL's own order
        return super().__iter__()


class _Clock(TrainerCallback):
    """Knows where a step began, since a checkpoint may be saved in the middle of one (when training has to stop), and
    puts the loss of steps not yet logged back where transformers starts it at zero."""

    def __init__(self, trainer: ResumableGRPOTrainer):
        self.trainer = trainer
        self.began: tuple[int, dict[str, dict[str, list[float]]]] | None = None
        self.unlogged: tuple[float, int] | None = None

    def now(self) -> tuple[int, dict[str, dict[str, list[float]]]]:
        """Micro-batches so far and means to be logged; of an unfinished step, those at its beginning."""
        if self.began is not None:
            return self.began
        return self.trainer._step, copy.deepcopy({mode: dict(means) for mode, means in self.trainer._metrics.items()})

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if self.unlogged is not None:
            loss, self.trainer._globalstep_last_logged = self.unlogged
            self.trainer._tr_loss += loss
            self.unlogged = None

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = None
        self.began = self.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.began = None
