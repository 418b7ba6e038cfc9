"""A `GRPOTrainer` with whole checkpoints and an exact resume, which skips steps without a loss.

**Resume.** A resumed run equals the uninterrupted one, bit for bit. transformers' checkpoint has
weights, optimizer, schedule and random states. GRPO needs more, which is saved here, in one file
per process: the position in a block of micro-batches that reuse rollouts, the rest of that block,
metrics and losses that are not logged yet, and the states of the trainer's components. The order of
the rows is a function of seed and epoch.

**Skipped steps.** If the environment is down for a whole step, every rollout of it fails, and all
gradients are zero. AdamW would still decay the weights, and move them by the momentum of earlier
steps. So there is no backward pass, and optimizers skip weights without a gradient (torch's do so;
DeepSpeed's engine, which steps inside `backward`, is not called). The schedule continues. A
gradient scaler (fp16) requires a backward pass: there the gradients, all zero, are removed before
the optimizer steps.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, send_to_device
from datasets import Dataset
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import TrainOutput
from trl import GRPOTrainer

from ..contract import check_trl
from ..patches import skip_backward_of_constants
from ..row_order import EpochSampler
from .adapter_check import check_adapter
from .find_checkpoint import STATE_FILE, find_checkpoint, read_resume_option
from .interrupts import checkpoint_on_interrupt
from .resumed_schedule import follow_present_schedule
from .run_folder import (
    contains_run,
    decide_on_main_process,
    lock_run_folder,
    move_run_aside,
    second_run_message,
)
from .save_checkpoint import CheckpointStaging, stage_checkpoint

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """A component of a trainer whose state belongs in a checkpoint."""

    def state_dict(self) -> dict[str, Any] | None:
        """Return plain data and tensors; `None` if there is nothing to keep."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""


@dataclass(frozen=True)
class LoopState:
    """The state of TRL's training loop that transformers does not save.

    Args:
        micro_batches (`int`): Micro-batches so far.
        metrics (`dict`): The values of each metric that are not logged yet, by mode.
        loss (`torch.Tensor`): The sum of losses that are not logged yet.
    """

    micro_batches: int
    metrics: dict[str, dict[str, list[float]]]
    loss: torch.Tensor


class ResumableGRPOTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] with whole checkpoints and an exact resume.

    It skips micro-batches without a token in the loss. All of this holds under DDP, DeepSpeed and
    FSDP2 alike.

    A run that is resumed on another number of processes continues with weights, optimizer, schedule
    and population; a warning names what starts afresh. With DeepSpeed this is an error, because its
    checkpoints are partitioned for a number of processes.

    Attributes:
        stateful_components (`dict[str, Stateful]`): The components whose state a checkpoint keeps,
            by name, one file per process. A component is registered here before `train` begins.
        staging ([`CheckpointStaging`]): Where a checkpoint is being saved.
        locks_folder (`bool`): Whether `train` locks the output folder. A program that holds the
            lock for longer sets it to `False`.
        handles_interrupts (`bool`): Whether the first Ctrl-C ends `train` with a checkpoint.
    """

    locks_folder = True
    handles_interrupts = True

    # Whether this trainer has trained or evaluated, which writes to the output folder.
    _has_trained = False
    _has_evaluated = False
    # Whether gradients of an earlier micro-batch wait for the optimizer's next step.
    _gradients_waiting = False
    # Whether a token has a part in the gradients of the optimizer's next step.
    _has_token_in_step = True
    # The checkpoint that training is resumed from.
    _checkpoint: str | None = None

    def __init__(self, *args: Any, **kwargs: Any):
        check_trl()
        self.stateful_components: dict[str, Stateful] = {}
        self.staging = CheckpointStaging()
        super().__init__(*args, **kwargs)
        skip_backward_of_constants(self.accelerator)
        self._step_start = StepStartCallback(self)
        self.add_callback(self._step_start)

    # --- for subclasses ------------------------------------------------------------------------

    def rollouts_per_row(self) -> int:
        """Return how often the sampler repeats a row: `num_generations`, or a multiple of it."""
        return self.num_generations

    def may_lack_loss_tokens(self) -> bool:
        """Return whether a micro-batch may have no token in the loss, because rollouts failed.

        Must be the same on every process. If `False`, micro-batches are not checked, which saves a
        tiny all-reduce for each.
        """
        return True

    def updates_weights(self) -> bool:
        """Return whether the current step has a loss. A step without one is played and counted."""
        return True

    def _load_beside(self, checkpoint: Path | None) -> None:
        """Read the files that this trainer saves beside the weights.

        Called before the first step of `train`.

        Args:
            checkpoint (`Path`, *optional*): The checkpoint that is resumed. `None`: training starts
                at the beginning.
        """

    @contextmanager
    def training_context(self, resumes: bool) -> Iterator[None]:
        """The context around training, while no other run can use the output folder.

        Args:
            resumes (`bool`): Whether an earlier run in the folder is resumed. It may not have a
                checkpoint yet.
        """
        yield

    # --- the run's folder ----------------------------------------------------------------------

    def _claim_folder(self, args: TrainingArguments, model: object) -> None:
        """Note whether the output folder holds another run, before this one writes anything there.

        With `args.overwrite` that run is moved aside.
        """
        folder = Path(args.output_dir)
        processes = PartialState()

        def must_move_aside() -> bool:
            return args.overwrite and not read_resume_option(args) and contains_run(folder)

        # Lock the folder only to move it: the lock of training comes later.
        if decide_on_main_process(processes, must_move_aside):
            with lock_run_folder(folder, processes):
                decide_on_main_process(processes, lambda: move_run_aside(folder, model))
        self._had_other_run = decide_on_main_process(processes, lambda: contains_run(folder))

    def _is_second_run(self, folder: Path) -> bool:
        """Return whether training from the beginning would mix with another run in the folder."""
        # Rollouts that this trainer's own evaluation has written are no other run.
        may_be_other_run = self._had_other_run or self._has_trained or not self._has_evaluated
        return decide_on_main_process(
            self.accelerator, lambda: may_be_other_run and contains_run(folder)
        )

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """As [`~trl.GRPOTrainer`]'s."""
        # Only `train` can refuse the folder, because it may be called to resume the run there.
        is_first = not self._has_trained and not self._has_evaluated
        is_second_run = self._had_other_run and not read_resume_option(self.args)
        if is_first and is_second_run and self.accelerator.is_main_process:
            logger.warning(
                "%s. This evaluation is played, but train() is refused otherwise",
                second_run_message(Path(self.args.output_dir)),
            )
        self._has_evaluated = True
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    # --- checks before training ----------------------------------------------------------------

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        rollouts_per_row = self.rollouts_per_row()
        return EpochSampler(
            len(self.train_dataset if dataset is None else dataset),
            rows_per_batch=self.args.generation_batch_size // rollouts_per_row,
            rollouts_per_row=rollouts_per_row,
            batch_repeats=self.args.num_iterations * self.args.steps_per_generation,
            seed=self.args.seed if self.args.shuffle_dataset else None,
            get_epoch=lambda: int(self.state.epoch or 0),  # whole at the beginning of an epoch
        )

    def _check_row_count(self) -> None:
        """Raise if there are too few rows for a single step, which would make a run of no steps."""
        # A streamed dataset cannot be counted.
        if not hasattr(self.train_dataset, "__len__"):
            return
        batch_size = self.args.generation_batch_size
        rollouts_per_row = self.rollouts_per_row()
        rows_per_batch = batch_size // rollouts_per_row
        if len(self.train_dataset) < rows_per_batch:
            raise ValueError(
                f"train_dataset has {len(self.train_dataset)} rows, and a batch of {batch_size} "
                f"rollouts takes {rows_per_batch} ({rollouts_per_row} of each row): nothing would "
                "be trained; add rows, or make the batch smaller (per_device_train_batch_size x "
                "processes x steps_per_generation)"
            )

    def _check_states(self) -> None:
        """Raise if the state of a component is not plain data: no checkpoint with it could be read."""
        # Write and read each state as a checkpoint would.
        for name, component in self.stateful_components.items():
            file = io.BytesIO()
            try:
                torch.save(component.state_dict(), file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except Exception as error:  # its type depends on what is in the state
                raise ValueError(
                    f"state_dict() of {name} must be plain data (numbers, texts, lists, dicts, "
                    "tensors): no checkpoint with it could be read again"
                ) from error

    # --- saving --------------------------------------------------------------------------------

    def _get_output_dir(self, trial: dict[str, Any] | None) -> str:
        # While a checkpoint is being saved, its files go to the staging folder.
        if self.staging.folder is not None:
            return str(self.staging.folder)
        return super()._get_output_dir(trial)

    def _save_checkpoint(self, model: torch.nn.Module, trial: dict[str, Any] | None) -> None:
        run_folder = Path(self._get_output_dir(trial))
        with stage_checkpoint(self, self.staging, run_folder) as staged_checkpoint:
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                # It does not exist yet on a node with its own disk.
                staged_checkpoint.mkdir(parents=True, exist_ok=True)
                state_file = STATE_FILE.format(self.accelerator.process_index)
                torch.save(self._exact_state(), staged_checkpoint / state_file)
        if not self.args.save_only_model:
            self._after_checkpoint()
        if self.args.push_to_hub:
            self._push_from_checkpoint(str(run_folder / staged_checkpoint.name))

    def _after_checkpoint(self) -> None:
        """Called on every process when a checkpoint from which a run can be resumed is complete."""

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        # transformers uploads the folder that it saved to, on another thread. So it is uploaded
        # only after it was moved to its final place.
        if self.staging.folder is None:
            super()._push_from_checkpoint(checkpoint_folder)

    def _exact_state(self) -> dict[str, Any]:
        # TRL plays one batch for a block of micro-batches, and keeps the rest of it.
        loop_state = self._step_start.loop_state()
        micro_batches_per_block = self.args.steps_per_generation * self.args.num_iterations
        is_within_block = loop_state.micro_batches % micro_batches_per_block != 0
        return {
            "world": self.accelerator.num_processes,
            "step": loop_state.micro_batches,
            # At the end of a block the next one is generated anyway.
            "buffered": self._buffered_inputs if is_within_block else None,
            "metrics": loop_state.metrics,
            "loss": float(loop_state.loss),
            "last_logged": self._globalstep_last_logged,
            "own": {
                name: component.state_dict() for name, component in self.stateful_components.items()
            },
        }

    # --- resuming ------------------------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: dict[str, Any] | None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As [`~trl.GRPOTrainer`]'s.

        With `resume_from_checkpoint=True` the newest whole checkpoint is resumed; damaged ones are
        skipped with a warning. Without a checkpoint training starts at the beginning, so the same
        command begins a run and resumes it after each kill. A run that has done its last step does
        no further one. Defaults to the option of that name in `args`, which transformers does not
        read.

        Ctrl-C ends training after the current step, with a checkpoint: [`checkpoint_on_interrupt`].

        Raises:
            `ValueError`: If there are too few rows for a single step; if the state of a component,
                such as the environment, is not plain data; if another run trains in `output_dir`,
                or has trained there and is not resumed; if the requested checkpoint is damaged; if
                a DeepSpeed checkpoint is of another number of processes. The message says what to
                do.
        """
        # Find mistakes before the folder is locked.
        self._check_row_count()
        self._check_states()
        if resume_from_checkpoint is None:
            resume_from_checkpoint = read_resume_option(self.args)
        folder = Path(self.args.output_dir)

        # For as long as this runs, no other run trains in the folder, and Ctrl-C saves a
        # checkpoint.
        lock: AbstractContextManager[None] = nullcontext()
        if self.locks_folder:
            lock = lock_run_folder(folder, self.accelerator)
        interrupts: AbstractContextManager[None] = nullcontext()
        if self.handles_interrupts:
            interrupts = checkpoint_on_interrupt(self)

        with lock, interrupts:
            if not resume_from_checkpoint and self._is_second_run(folder):
                raise ValueError(second_run_message(folder))

            # All processes resume from the checkpoint that the main process finds.
            checkpoint = decide_on_main_process(
                self.accelerator, lambda: find_checkpoint(resume_from_checkpoint, folder)
            )
            self._check_process_count(checkpoint)
            if checkpoint is not None:
                check_adapter(Path(checkpoint), self.accelerator.unwrap_model(self.model))
            self._has_trained = True
            self._checkpoint = checkpoint
            with self.training_context(bool(resume_from_checkpoint)):
                return super().train(checkpoint, trial, ignore_keys_for_eval)

    def _check_process_count(self, checkpoint: str | None) -> None:
        """Raise if a DeepSpeed checkpoint is of another number of processes."""
        # Other checkpoints can be continued by any number of processes.
        if self.accelerator.distributed_type != DistributedType.DEEPSPEED:
            return
        state = self._read_exact_state(checkpoint)
        process_count = self.accelerator.num_processes
        if state is not None and state["world"] != process_count:
            raise ValueError(
                f"{checkpoint} is partitioned by DeepSpeed for {state['world']} processes, this "
                f"job has {process_count}: convert it with DeepSpeed's ds_to_universal.py and set "
                "checkpoint.load_universal in its config, or train on from its weights alone (they "
                "are whole) with this folder as the model"
            )

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # transformers checks only after a step whether it was the last: each resume would take one
        # more step.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _resume(self, scheduler: LRScheduler | None) -> None:
        """Load what transformers does not load itself; it has loaded the scheduler's state."""
        self._load_exact_state()
        if scheduler is not None:
            self._follow_present_schedule(scheduler)
        self._load_beside(None if self._checkpoint is None else Path(self._checkpoint))

    def _follow_present_schedule(self, scheduler: LRScheduler) -> None:
        """Take the rate of the present schedule, and say so if the number of steps has changed."""
        if self._checkpoint is None or self.state.global_step >= self.state.max_steps:
            return
        has_other_rate = follow_present_schedule(scheduler)
        if not has_other_rate or not self.accelerator.is_main_process:
            return
        saved_state = TrainerState.load_from_json(str(Path(self._checkpoint, TRAINER_STATE_NAME)))
        change = "another schedule"
        if saved_state.max_steps != self.state.max_steps:
            change = f"max_steps {saved_state.max_steps} -> {self.state.max_steps}"
        logger.warning(
            "resumed with %s: the learning rate follows the new schedule from here", change
        )

    def _load_exact_state(self) -> None:
        state = self._read_exact_state(self._checkpoint)
        if state is None:
            return
        # The position in the block is valid for any number of processes, the rest is not.
        self._step = state["step"]
        if state["world"] != self.accelerator.num_processes:
            logger.warning(
                "the checkpoint is of %d processes, this job has %d: weights, optimizer, schedule "
                "and population continue, but random states, the rest of a generated batch and "
                "means not yet logged start afresh, and where the global batch has another size "
                "some rows of this epoch come twice or not at all",
                state["world"],
                self.accelerator.num_processes,
            )
            return

        # The rest of the block, and what is not logged yet.
        self._buffered_inputs = send_to_device(state["buffered"], self.accelerator.device)
        for mode, metrics in state["metrics"].items():
            self._metrics[mode].update(metrics)
        # The loss of steps that are not logged yet; transformers has set it to zero.
        self._tr_loss += state["loss"]
        self._globalstep_last_logged = state["last_logged"]

        # The components of the trainer.
        for name, component in self.stateful_components.items():
            component_state = state["own"].get(name)
            if component_state is not None:
                component.load_state_dict(component_state)

    def _read_exact_state(self, checkpoint: str | None) -> dict[str, Any] | None:
        """Return the state of this process, or of the first one if there is none for this one."""
        if checkpoint is None:
            return None
        # The first process's file serves a process that did not exist before.
        for process_index in (self.accelerator.process_index, 0):
            path = Path(checkpoint, STATE_FILE.format(process_index))
            if path.exists():
                try:
                    return torch.load(path, map_location="cpu", weights_only=True)
                except Exception as error:  # each type of damage raises another error
                    raise ValueError(
                        f"{path} cannot be read: resume from an earlier checkpoint"
                    ) from error
        logger.warning(
            "%s has no %s: the resumed run is not exactly the uninterrupted one",
            checkpoint,
            STATE_FILE,
        )
        return None

    # --- batches with nothing to learn from ----------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """As [`~trl.GRPOTrainer`]'s.

        Under a gradient scaler the optimizer skips a step without a token in the loss.
        """
        optimizer = super().create_optimizer(*args, **kwargs)

        # Under a scaler even an empty step has a backward pass: drop its gradients, so that nothing
        # changes.
        def remove_empty_gradients(optimizer: torch.optim.Optimizer, *args: Any) -> None:
            if not self._has_token_in_step:
                optimizer.zero_grad(set_to_none=True)

        if self.accelerator.scaler is not None:
            optimizer.register_step_pre_hook(remove_empty_gradients)
        return optimizer

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, torch.Tensor],
        return_outputs: bool = False,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """As [`~trl.GRPOTrainer`]'s; a constant if there is nothing to learn from."""
        if self.model.training and self._skips_backward(inputs):
            return torch.zeros((), device=self.accelerator.device)
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _skips_backward(self, batch: Mapping[str, torch.Tensor]) -> bool:
        # A step that only plays rollouts has no loss.
        if not self.updates_weights():
            return True
        is_empty = self._is_empty(batch)
        # Where gradients of an earlier micro-batch wait to be exchanged, the backward pass is what
        # exchanges them.
        if is_empty and not self._gradients_waiting and self.accelerator.scaler is None:
            return True
        # A step has a token if one of its micro-batches has.
        had_token = self._gradients_waiting and self._has_token_in_step
        self._has_token_in_step = not is_empty or had_token
        self._gradients_waiting = not self.accelerator.sync_gradients
        return False

    def _is_empty(self, batch: Mapping[str, torch.Tensor]) -> bool:
        """Return whether no process has a token in the loss. The same on every process."""
        if not self.may_lack_loss_tokens():
            return False
        # Sum over all processes, so that they decide alike.
        token_count = (batch["tool_mask"] * batch["completion_mask"]).sum()
        return self.accelerator.reduce(token_count).item() == 0


class StepStartCallback(TrainerCallback):
    """Keeps the loop's state at the start of each step, and resumes it when training begins.

    A checkpoint may be saved in the middle of a step, when training has to stop: it then has the
    state at the step's start. The state is loaded after transformers has reset its own.

    Args:
        trainer ([`ResumableGRPOTrainer`]): The trainer.
    """

    def __init__(self, trainer: ResumableGRPOTrainer):
        self.trainer = trainer
        self._start_state: LoopState | None = None  # within a step

    def loop_state(self) -> LoopState:
        """Return the loop's state; within a step, that at its start."""
        if self._start_state is not None:
            return self._start_state
        trainer = self.trainer
        metrics = {mode: dict(values) for mode, values in trainer._metrics.items()}
        return LoopState(trainer._step, copy.deepcopy(metrics), trainer._tr_loss.clone())

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        lr_scheduler: LRScheduler | None = None,
        **kwargs: Any,
    ) -> None:
        self.trainer._resume(lr_scheduler)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Forget the start of the previous step, so that the present state is read.
        self._start_state = None
        self._start_state = self.loop_state()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._start_state = None
