"""A `GRPOTrainer` whose resumed run equals the uninterrupted one, bit for bit, and that skips steps without a token in
the loss.

transformers' checkpoint holds weights, optimizer, schedule and random states. GRPO needs more, and it is saved here, in
one file per process beside the rest: the position in a block of reused rollouts and the rest of that block, means and
losses not yet logged, and the states of the keepers. The order of the rows is a function of seed and epoch.

If the environment is down for a whole step, every rollout of it fails. With gradients of zero AdamW would still decay
the weights and move them by the momentum of earlier steps. So there is no backward pass, and optimizers skip weights
without a gradient (torch's do, and DeepSpeed's engine, which steps inside `backward`, is not called). The schedule goes
on. A gradient scaler (fp16) requires a backward pass: there the gradients, all zero, are removed before the optimizer
steps.
"""

from __future__ import annotations

import copy
import io
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType, send_to_device
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import TrainerCallback
from trl import GRPOTrainer

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
from .rollouts import EpochSampler
from .stopping import checkpoint_on_interrupt

logger = logging.getLogger(__name__)


class Stateful(Protocol):
    """A part of a trainer whose state belongs in a checkpoint."""

    def state_dict(self) -> dict[str, Any] | None:
        """Plain data and tensors; `None` if there is nothing to keep."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""


class ResumableGRPOTrainer(GRPOTrainer):
    """[`~trl.GRPOTrainer`] with whole checkpoints and an exact resume, under DDP, DeepSpeed and FSDP2 alike, that skips
    micro-batches without a token in the loss.

    A run resumed on another number of processes goes on with weights, optimizer, schedule and population; a warning
    names what starts afresh. DeepSpeed, whose checkpoints are cut for a number of processes, cannot be resumed so.

    Attributes:
        keepers (`dict[str, Stateful]`): The parts whose state a checkpoint keeps, by name, one file per process. A part
            is registered here before `train` begins.
        staging ([`Staging`]): Where a checkpoint is being saved.
        locks_folder (`bool`): Whether `train` locks the output folder. A program that holds the lock for longer sets
            it to `False`.
    """

    locks_folder = True

    _began = _evaluated = (
        False  # whether this trainer has trained or evaluated, which writes to the output folder
    )
    _gradients_waiting = False  # from an earlier micro-batch, for the optimizer's next step
    _learns = True  # whether a token has a part in the gradients of the optimizer's next step
    _checkpoint: str | None = None  # that training is resumed from

    def __init__(self, *args: Any, **kwargs: Any):
        check_trl()
        self.keepers: dict[str, Stateful] = {}
        self.staging = Staging()
        super().__init__(*args, **kwargs)
        backward = self.accelerator.backward
        # The loss of a batch with nothing to learn from is a constant and has no backward pass.
        self.accelerator.backward = lambda loss, **options: (
            backward(loss, **options) if loss.requires_grad else None
        )
        self._clock = _Clock(self)
        self.add_callback(self._clock)

    def _take_folder(self, args: Any, model: Any) -> None:
        """Note whether the output folder holds another run, before this one writes anything there; with
        `args.overwrite` move that aside."""
        folder, state = Path(args.output_dir), PartialState()
        if from_first(
            state, lambda: args.overwrite and not asked_to_resume(args) and holds_run(folder)
        ):
            with alone_in(folder, state):
                from_first(state, lambda: move_aside(folder, model))
        self._beside_another = from_first(state, lambda: holds_run(folder))

    def _second_run(self, folder: Path) -> bool:
        """Whether training from the beginning would mix with another run in the folder, or with one of this trainer."""
        others = (
            self._beside_another or self._began or not self._evaluated
        )  # an evaluation writes rollouts, too
        return from_first(self.accelerator, lambda: others and holds_run(folder))

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As [`~trl.GRPOTrainer`]'s."""
        self._evaluated = True
        return super().evaluate(*args, **kwargs)

    # --- for subclasses ------------------------------------------------------------------------------------------

    def rollouts_per_row(self) -> int:
        """The number of times that the sampler repeats a row: `num_generations`, or a multiple of it."""
        return self.num_generations

    def may_be_empty(self) -> bool:
        """Whether a micro-batch may have no token in the loss, because rollouts failed. The same on every process. If
        `False`, micro-batches are not checked, which saves a tiny all-reduce for each."""
        return True

    def updates_weights(self) -> bool:
        """Whether the current step has a loss. A step without one plays its rollouts and is counted."""
        return True

    def _load_beside(self, checkpoint: Path | None) -> None:
        """Read the files that this trainer saves beside the weights, before the first step of `train`.

        Args:
            checkpoint (`Path`, *optional*): The checkpoint that is resumed. `None`: training starts at the beginning.
        """

    @contextmanager
    def while_training(self, resumes: bool) -> Iterator[None]:
        """The context around training, while no other run can use the output folder.

        Args:
            resumes (`bool`): Whether an earlier run in the folder is resumed. It may not have a checkpoint yet.
        """
        yield

    # --- the order of rows ---------------------------------------------------------------------------------------

    def _get_train_sampler(self, dataset: Dataset | None = None) -> Sampler:
        repeats = self.rollouts_per_row()
        return EpochSampler(
            len(self.train_dataset if dataset is None else dataset),
            rows_per_batch=self.args.generation_batch_size // repeats,
            rollouts_per_row=repeats,
            batch_repeats=self.args.num_iterations * self.args.steps_per_generation,
            seed=self.args.seed if self.args.shuffle_dataset else None,
            get_epoch=lambda: int(self.state.epoch or 0),  # whole at the beginning of an epoch
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

    def _check_states(self) -> None:
        """A part whose state is no plain data would make every checkpoint unreadable."""
        for name, keeper in self.keepers.items():
            file = io.BytesIO()
            try:
                torch.save(keeper.state_dict(), file)
                file.seek(0)
                torch.load(file, weights_only=True)
            except Exception as error:  # its type depends on what is in the state
                raise ValueError(
                    f"state_dict() of {name} must be plain data (numbers, texts, lists, dicts, tensors): no checkpoint "
                    "with it could be read again"
                ) from error

    # --- saving --------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        return (
            super()._get_output_dir(trial)
            if self.staging.folder is None
            else str(self.staging.folder)
        )

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        run = Path(self._get_output_dir(trial))
        with saved_whole(self, self.staging, run, self._push_from_checkpoint) as folder:
            super()._save_checkpoint(model, trial)
            if not self.args.save_only_model:
                folder.mkdir(parents=True, exist_ok=True)  # on a node whose disk is its own
                torch.save(
                    self._exact_state(), folder / STATE_FILE.format(self.accelerator.process_index)
                )

    def _exact_state(self) -> dict[str, Any]:
        step, metrics, loss = self._clock.now()
        block = self.args.steps_per_generation * self.args.num_iterations
        return {
            "world": self.accelerator.num_processes,
            "step": step,
            # At the end of a block the next one is generated anyway.
            "buffered": self._buffered_inputs if step % block else None,
            "metrics": metrics,
            "loss": float(loss),
            "last_logged": self._globalstep_last_logged,
            "own": {name: keeper.state_dict() for name, keeper in self.keepers.items()},
        }

    # --- resuming ------------------------------------------------------------------------------------------------

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As [`~trl.GRPOTrainer`]'s.

        With `resume_from_checkpoint=True` the newest whole checkpoint is resumed; damaged ones are skipped with a
        warning. Without a checkpoint training starts at the beginning, so that the same command begins a run and
        resumes it whenever it was killed. A run that has done its last step trains no more. Defaults to the option of
        that name in `args`, which transformers does not read.

        Ctrl-C ends training after the current step, with a checkpoint: [`checkpoint_on_interrupt`].

        Raises:
            `ValueError`: If there are too few rows for a single step; if the state of a part, such as the environment,
                is no plain data; if another run trains in `output_dir`, or has trained there and is not resumed; if the
                checkpoint that was asked for is damaged; if a DeepSpeed checkpoint is of another number of processes.
                The message says what to do.
        """
        self._check_rows()
        self._check_states()
        if resume_from_checkpoint is None:
            resume_from_checkpoint = asked_to_resume(self.args)
        folder = Path(self.args.output_dir)
        lock = alone_in(folder, self.accelerator) if self.locks_folder else nullcontext()
        with lock, checkpoint_on_interrupt(self):
            if not resume_from_checkpoint and self._second_run(folder):
                raise ValueError(occupied(folder))
            checkpoint = from_first(
                self.accelerator, lambda: whole_checkpoint(resume_from_checkpoint, folder)
            )
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
            self._began, self._checkpoint = True, checkpoint
            with self.while_training(bool(resume_from_checkpoint)):
                return super().train(checkpoint, *args, **kwargs)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        # transformers checks only after a step whether it was the last: each resume would take one more step.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
        else:
            super()._run_epoch(*args, **kwargs)

    def _resume(self) -> None:
        """Load what transformers does not load itself."""
        self._load_exact_state()
        self._load_beside(None if self._checkpoint is None else Path(self._checkpoint))

    def _load_exact_state(self) -> None:
        state = self._read_exact_state(self._checkpoint)
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
        self._tr_loss += state[
            "loss"
        ]  # of the steps not yet logged; transformers has set it to zero
        self._globalstep_last_logged = state["last_logged"]
        for name, keeper in self.keepers.items():
            if state["own"].get(name) is not None:
                keeper.load_state_dict(state["own"][name])

    def _read_exact_state(self, checkpoint: str | None) -> dict[str, Any] | None:
        """The state of this process; of the first process, if the checkpoint has none for this one."""
        if checkpoint is None:
            return None
        for process in (self.accelerator.process_index, 0):
            path = Path(checkpoint, STATE_FILE.format(process))
            if path.exists():
                try:
                    return torch.load(path, map_location="cpu", weights_only=True)
                except Exception as error:  # each kind of damage raises another type
                    raise ValueError(
                        f"{path} cannot be read: resume from an earlier checkpoint"
                    ) from error
        logger.warning(
            "%s has no %s: the resumed run is not exactly the uninterrupted one",
            checkpoint,
            STATE_FILE,
        )
        return None

    # --- batches with nothing to learn from ----------------------------------------------------------------------

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~trl.GRPOTrainer`]'s; under a gradient scaler it skips a step without a token in the loss."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.accelerator.scaler is not None:
            optimizer.register_step_pre_hook(
                lambda one, *_: None if self._learns else one.zero_grad(set_to_none=True)
            )
        return optimizer

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As [`~trl.GRPOTrainer`]'s; in training a constant where there is nothing to learn from."""
        if self.model.training and self._passes_over(inputs):
            return torch.zeros((), device=self.accelerator.device)
        return super().compute_loss(model, inputs, *args, **kwargs)

    def _passes_over(self, batch: Mapping[str, torch.Tensor]) -> bool:
        if not self.updates_weights():
            return True
        empty = self._is_empty(batch)
        # Where gradients of an earlier micro-batch wait to be exchanged, the backward pass is what exchanges them.
        if empty and not self._gradients_waiting and self.accelerator.scaler is None:
            return True
        self._learns = not empty or (self._gradients_waiting and self._learns)
        self._gradients_waiting = not self.accelerator.sync_gradients
        return False

    def _is_empty(self, batch: Mapping[str, torch.Tensor]) -> bool:
        """Whether no process has a token of its own in this micro-batch. The same on every process."""
        if not self.may_be_empty():
            return False
        own = (batch["tool_mask"] * batch["completion_mask"]).sum()
        return self.accelerator.reduce(own).item() == 0


class _Clock(TrainerCallback):
    """Remembers the state at the beginning of a step, because a checkpoint may be saved in the middle of one (when
    training has to stop), and resumes the run after transformers has reset its own state."""

    def __init__(self, trainer: ResumableGRPOTrainer):
        self.trainer = trainer
        self.began: tuple[int, dict[str, dict[str, list[float]]], torch.Tensor] | None = None

    def now(self) -> tuple[int, dict[str, dict[str, list[float]]], torch.Tensor]:
        """Micro-batches so far, means and the sum of losses to be logged; within a step, those at its beginning."""
        if self.began is not None:
            return self.began
        trainer = self.trainer
        metrics = copy.deepcopy({mode: dict(means) for mode, means in trainer._metrics.items()})
        return trainer._step, metrics, trainer._tr_loss.clone()

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.trainer._resume()

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = None
        self.began = self.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.began = None
