"""A batch with nothing to learn from changes nothing: no weight, no decay, no momentum.

When the environment was down for a whole step, every rollout of it failed. Gradients of zero would still let AdamW
decay the weights and move them by the momentum of earlier steps; so there is no backward pass, and optimizers
skip weights without a gradient (torch's do, and DeepSpeed's engine, which steps inside `backward`, is not called).
The schedule of the learning rate follows the count of steps and goes on. A gradient scaler (fp16) insists on a backward
pass: there the gradients, zeros, are taken away before the optimizer steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch

from . import ResumableGRPOTrainer


class _Prepared(dict):
    """A micro-batch that `_prepare_inputs` has been through."""


class SkipEmptyBatchesTrainer(ResumableGRPOTrainer):
    """[`ResumableGRPOTrainer`] that skips micro-batches without a token in the loss.

    Attributes:
        some_failed (`bool`): Whether any rollout of the batch being learnt from failed, on any process. To be kept up
            to date by the subclass; without failures the look at each micro-batch, a tiny all-reduce, is saved.
    """

    some_failed = False
    _current_train_step_time: float  # TRL's
    _gradients_waiting = False  # from an earlier micro-batch, for the optimizer's next step
    _learns = True  # whether a token has a part in the gradients of the optimizer's next step

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~trl.GRPOTrainer`]'s; under a gradient scaler it skips a step without a token in the loss."""
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.accelerator.scaler is not None:
            optimizer.register_step_pre_hook(self._drop_empty_gradients)
        return optimizer

    def _drop_empty_gradients(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        if not self._learns:
            optimizer.zero_grad(set_to_none=True)

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
        if not self.some_failed:
            return False
        own = (batch["tool_mask"] * batch["completion_mask"]).sum()
        return self.accelerator.reduce(own).item() == 0
