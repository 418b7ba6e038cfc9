"""Sharded weights (ZeRO-3, FSDP2), gathered once for the rollouts of a batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation

from ..patches import keep_unsharded, remove_zero3_start_hook


class GatheredWeights:
    """A trainer's model with its sharded weights gathered once for a whole batch of rollouts.

    ZeRO-3 and FSDP2 keep a shard per process and gather the rest where it is needed: a collective,
    in which all processes must take part. Rollouts differ in length, so processes differ in how
    often they sample. Hence one gather around the rollouts of a batch, after which each process
    samples as often as it needs to.

    Args:
        trainer ([`~trl.GRPOTrainer`]): The trainer of the policy.

    Raises:
        `ValueError`: Under FSDP's first version, which cannot hold its weights through several
            forward passes.
    """

    def __init__(self, trainer: GRPOTrainer):
        plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)  # exists with FSDP only
        if plugin is not None and plugin.fsdp_version == 1:
            raise ValueError(
                "rollouts of several turns need FSDP2: set `fsdp_version: 2` in accelerate's "
                "fsdp_config"
            )
        self.trainer = trainer
        self._held_model: PreTrainedModel | None = None

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Gather the policy now, and release it at the end.

        All processes enter together; each may leave when it is done.
        """
        with self._gather() as model:
            self._held_model = model
            try:
                yield
            finally:
                self._held_model = None

    @contextmanager
    def model(self) -> Iterator[PreTrainedModel]:
        """Yield the policy that [`GatheredWeights.hold`] has gathered.

        Without it the policy is gathered for this use, by all processes together. It runs under the
        autocast in which the trainer computes log-probabilities. PyTorch keeps the weights that it
        has cast until the context ends, so they are not cast again for each token.
        """
        gathered: AbstractContextManager[PreTrainedModel] = self._gather()
        # Within `hold` the policy is already gathered.
        if self._held_model is not None:
            gathered = nullcontext(self._held_model)
        with gathered as model, self.trainer.accelerator.autocast():
            yield model

    @contextmanager
    def _gather(self) -> Iterator[PreTrainedModel]:
        trainer = self.trainer
        # TRL gathers the shards of ZeRO-3, FSDP2 gathers those of each of its units.
        unwrapped = unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=True,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        )
        with (
            unwrapped as model,
            remove_zero3_start_hook(trainer.model_wrapped),
            ExitStack() as stack,
        ):
            # Each unit of FSDP2 keeps its parameters until the context ends.
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    stack.enter_context(keep_unsharded(module))
            yield model
