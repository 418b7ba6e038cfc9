"""A `GRPOTrainer` whose resumed run is the uninterrupted one, bit for bit, and that learns nothing from nothing.

transformers' checkpoint holds weights, optimizer, schedule and random states. GRPO needs more, and it is kept here, one
file per process beside the rest: where in a block of reused rollouts training stands and what is left of that block,
means and losses not yet logged, and what a subclass adds. The order of the rows is a function of seed and epoch.

When the environment was down for a whole step, every rollout of it failed. Gradients of zero would still let AdamW
decay the weights and move them by the momentum of earlier steps; so there is no backward pass, and optimizers
skip weights without a gradient (torch's do, and DeepSpeed's engine, which steps inside `backward`, is not called).
The schedule goes on. A gradient scaler (fp16) insists on a backward pass: there the gradients, zeros, are taken away
before the optimizer steps.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, send_to_device
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer
from trl.trainer.utils import RepeatSampler

from .checkpoints import (
    STATE_FILE,
    Staging,
    alone_in,
    asked_to_resume,
    from_first,
    holds_run,
    move_aside,
    occupied,
    saved_whole,
    whole_checkpoint,
)
from .contract import check_trl
from .stopping import checkpoint_on_interrupt

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """A part of a trainer whose state belongs in a checkpoint."""

    def state_dict(self) -> dict[str, Any] | None:
        """Plain data and tensors; `None` if there is nothing to keep."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back a `state_dict`."""


class _Prepared(dict):
    """A micro-batch that `_prepare_inputs` has been through."""


class ResumableGRPOTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] with whole checkpoints and an exact resume, under DDP, DeepSpeed and FSDP2 alike, that skips
    micro-batches without a token in the loss.

    A run resumed on another number of processes goes on with weights, optimizer, schedule and population, and says in
    a warning what starts afresh; DeepSpeed, whose checkpoints are cut for a number of processes, cannot.

    Attributes:
        keepers (`dict[str, Stateful]`): The parts whose state a checkpoint keeps, by name, one file per process. A part
            registers here before `train` begins.
        staging ([`Staging`]): Where a checkpoint is being saved.
        locks_folder (`bool`): Whether `train` locks the output folder. A program that holds the lock for longer sets
            it to `False`.
    """

    locks_folder = True

    _current_train_step_time: float  # TRL's
    _began = _evaluated = False  # by this trainer, in the output folder
    _gradients_waiting = False  # from an earlier micro-batch, for the optimizer's next step
    _learns = True  # whether a token has a part in the gradients of the optimizer's next step

    def __init__(self, *args: Any, **kwargs: Any):
        check_trl()
        self.keepers: dict[str, Stateful] = {}
        self.staging = Staging()
        super().__init__(*args, **kwargs)
        self._clock = _Clock(self)
        self.add_callback(self._clock)

    def _take_folder(self, args: Any, model: Any) -> None:
        """Note whether the output folder holds another run, before this one writes anything there; with
        `args.overwrite` move that aside."""
        folder, state = Path(args.output_dir), PartialState()
        if from_first(state, lambda: args.overwrite and not args.resume_from_checkpoint and holds_run(folder)):
            with alone_in(folder, state):
                from_first(state, lambda: move_aside(folder, model))
        self._beside_another = from_first(state, lambda: holds_run(folder))

    def _second_run(self, folder: Path) -> bool:
        """Whether training anew would mix with another run in the folder, or with one that this trainer began."""
        others = self._beside_another or self._began or not self._evaluated  # evaluation leaves rollouts, too
        return from_first(self.accelerator, lambda: others and holds_run(folder))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As [`~trl.GRPOTrainer`]'s."""
        self._evaluated = True
        return super().evaluate(*args, **kwargs)

    # --- for subclasses ------------------------------------------------------------------------------------------

    def rollouts_per_row(self) -> int:
        """How often the sampler repeats a row: `num_generations`, or a multiple of it."""
        return self.num_generations

    def may_be_empty(self) -> bool:
        """Whether a micro-batch may have no token in the loss, because rollouts failed. The same on every process.
        Without failures the look at each micro-batch, a tiny all-reduce, is saved."""
        return True

    @contextmanager
    def while_training(self, resumes: bool) -> Iterator[None]:
        """Around training, while no other run can use the output folder.

        Args:
            resumes (`bool`): Whether an earlier run in the folder is resumed, with a checkpoint or without one yet.
        """
        yield

    # --- the order of rows ---------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Dataset | None = None) -> RepeatSampler:
        repeats = self.rollouts_per_row()
        return EpochSampler(
            data_source=self.train_dataset if dataset is None else dataset,
            mini_repeat_count=repeats,
            batch_size=self.args.generation_batch_size // repeats,
            repeat_count=self.args.num_iterations * self.args.steps_per_generation,
            shuffle=self.args.shuffle_dataset,
            seed=self.args.seed,
            epoch=lambda: int(self.state.epoch or 0),  # whole at the beginning of an epoch
        )

    def _check_rows(self) -> None:
        """Too few rows for a single step would make a run of no steps."""
        size, repeats = self.args.generation_batch_size, self.rollouts_per_row()
        if hasattr(self.train_dataset, "__len__") and len(self.train_dataset) < size // repeats:
            raise ValueError(
                f"train_dataset has {len(self.train_dataset)} rows, and a batch of {size} rollouts takes "
                f"{size // repeats} ({repeats} of each row): nothing would be trained; add rows, or make the batch "
                "smaller (per_device_train_batch_size x processes x steps_per_generation)"
            )

    # --- saving --------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self.staging.folder is None else str(self.staging.folder)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        with saved_whole(self, self.staging, Path(self._get_output_dir(trial))) as folder:
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                folder.mkdir(parents=True, exist_ok=True)  # on a node whose disk is its own
                torch.save(self._exact_state(), folder / STATE_FILE.format(self.accelerator.process_index))

    def _exact_state(self) -> dict[str, Any]:
        step, metrics = self._clock.now()
        block = self.args.steps_per_generation * self.args.num_iterations
        return {
            "world": self.accelerator.num_processes,
            "step": step,
            # At the end of a block the next one is generated anyway.
            "buffered": self._buffered_inputs if step % block else None,
            "metrics": metrics,
            "loss": float(self._tr_loss),
            "last_logged": self._globalstep_last_logged,
            "own": {name: keeper.state_dict() for name, keeper in self.keepers.items()},
        }

    # --- resuming ------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As [`~trl.GRPOTrainer`]'s.

        With `resume_from_checkpoint=True` a damaged checkpoint gives way to the whole one before it, with a warning;
        where there is none yet, training starts at the beginning: the same command begins a run and goes on with it,
        whenever it was killed. At the last step nothing is trained. Defaults to the option of that name in `args`,
        which transformers leaves unread.

        Ctrl-C ends it after the step at hand, with a checkpoint: [`checkpoint_on_interrupt`].

        Raises:
            `ValueError`: If there are too few rows for a single step; if another run trains in `output_dir`, or has
                trained there and is not resumed; if the checkpoint that was asked for is damaged; if a DeepSpeed
                checkpoint is of another number of processes. Says what can be done.
        """
        self._check_rows()
        if resume_from_checkpoint is None:
            resume_from_checkpoint = asked_to_resume(self.args)
        folder = Path(self.args.output_dir)
        lock = alone_in(folder, self.accelerator) if self.locks_folder else nullcontext()
        with lock, checkpoint_on_interrupt(self):
            if not resume_from_checkpoint and self._second_run(folder):
                raise ValueError(occupied(folder))
            checkpoint = from_first(self.accelerator, lambda: whole_checkpoint(resume_from_checkpoint, folder))
            state = (
                self._read_exact_state(checkpoint)
                if self.accelerator.distributed_type == DistributedType.DEEPSPEED
                else None
            )
            if state is not None and state["world"] != (world := self.accelerator.num_processes):
                raise ValueError(
                    f"{checkpoint} is cut by DeepSpeed for {state['world']} processes, this job has "
                    f"{world}: convert it with DeepSpeed's ds_to_universal.py and set checkpoint.load_universal in its "
                    "config, or train on from its weights alone (they are whole) with this folder as the model"
                )
            self._began = True
            with self.while_training(bool(resume_from_checkpoint)):
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
                *(state["world"], self.accelerator.num_processes),
            )
            return
        self._buffered_inputs = send_to_device(state["buffered"], self.accelerator.device)
        for mode, means in state["metrics"].items():
            self._metrics[mode].update(means)
        self._clock.unlogged = state["loss"], state["last_logged"]
        for name, keeper in self.keepers.items():
            if state["own"].get(name) is not None:
                keeper.load_state_dict(state["own"][name])

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

    # --- batches with nothing to learn from ----------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~trl.GRPOTrainer`]'s; under a gradient scaler it skips a step without a token in the loss."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.accelerator.scaler is not None:
            optimizer.register_step_pre_hook(lambda one, *_: None if self._learns else one.zero_grad(set_to_none=True))
        return optimizer

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """One micro-batch, or nothing where there is nothing to learn from."""
        model.train()
        batch = _Prepared(self._timed_inputs(inputs))
        empty = self._is_empty(batch)
        # Where gradients of an earlier micro-batch wait to be exchanged, the backward pass is what exchanges them.
        if empty and not self._gradients_waiting and self.accelerator.scaler is None:
            return self._pass_over()
        self._learns = not empty or (self._gradients_waiting and self._learns)
        loss = super().training_step(model, batch, num_items_in_batch)
        self._gradients_waiting = not self.accelerator.sync_gradients
        return loss

    def _timed_inputs(self, inputs: Any) -> Any:
        """The batch, rollouts included; TRL's clock of a step runs in its own `training_step` only, after this."""
        started = time.perf_counter()
        batch = self._prepare_inputs(inputs)
        self._current_train_step_time += time.perf_counter() - started
        return batch

    def _pass_over(self) -> torch.Tensor:
        """The end of a micro-batch without a loss: what TRL counts there is counted."""
        self._step += 1
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return torch.zeros((), device=self.accelerator.device)

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        # `training_step` has to look at the batch first, and transformers' own prepares it once more.
        prepared = isinstance(generation_batch, _Prepared)
        return generation_batch if prepared else super()._prepare_inputs(generation_batch)

    def _is_empty(self, batch: Mapping[str, torch.Tensor]) -> bool:
        """Whether no process has a token of its own in this micro-batch. The same on every process."""
        if not self.may_be_empty():
            return False
        own = (batch["tool_mask"] * batch["completion_mask"]).sum()
        return self.accelerator.reduce(own).item() == 0


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
