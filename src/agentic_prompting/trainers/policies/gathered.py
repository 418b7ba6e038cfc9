"""The whole policy in this process for as long as a batch of rollouts lasts.

ZeRO-3 and FSDP2 keep a shard per process and gather the rest where it is needed: a collective, in which all take part
or the job breaks. Rollouts differ in length, so processes differ in how often they sample. Hence one gather around the
rollouts of a batch, after which each process samples as often as it likes without asking the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from trl.models import unwrap_model_for_generation

if TYPE_CHECKING:
    from ..multi_turn_grpo import MultiTurnGRPOTrainer


class GatheredPolicy:
    """Gives a trainer's policy to engines, whole.

    Args:
        trainer ([`MultiTurnGRPOTrainer`]): Whose policy.

    Raises:
        `ValueError`: Under FSDP's first version, which cannot hold its weights through several forward passes.
    """

    def __init__(self, trainer: MultiTurnGRPOTrainer):
        if trainer._dist.fsdp_version == 1:
            raise ValueError("rollouts of several turns need FSDP2: set `fsdp_version: 2` in accelerate's fsdp_config")
        self.trainer = trainer
        self._held: PreTrainedModel | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Gather now, and give back at the end. All processes enter together; they may leave when they like."""
        with self._whole() as model:
            self._held = model
            try:
                yield
            finally:
                self._held = None

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """The policy: the one in hand, or gathered for this one use (then all processes must do so together)."""
        if self._held is not None:
            yield self._held
        else:
            with self._whole() as model:
                yield model

    @contextmanager
    def _whole(self) -> Iterator[PreTrainedModel]:
        trainer = self.trainer
        with (
            unwrap_model_for_generation(
                trainer.model_wrapped,
                trainer.accelerator,
                gather_deepspeed3_params=True,
                gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
            ) as model,
            ExitStack() as stack,
        ):
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    stack.enter_context(_unsharded(module))
            yield model


@contextmanager
def _unsharded(module: FSDPModule) -> Iterator[None]:
    """One FSDP2 unit with its parameters gathered, and left so by its forward pass."""
    groups = module._get_fsdp_state()._fsdp_param_groups  # type: ignore[operator]
    # Private because there is a setter only: the root and the head are not resharded after forward, the layers are.
    before = [group.post_forward_mesh_info for group in groups]
    module.set_reshard_after_forward(False, recurse=False)
    module.unshard()
    try:
        yield
    finally:
        for group, mesh in zip(groups, before, strict=True):
            group.post_forward_mesh_info = mesh
        module.reshard()
