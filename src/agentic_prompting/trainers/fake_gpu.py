"""Makes TRL and transformers take their GPU paths for fake tensors, which are on a CPU in a build without CUDA.

`planning/` runs a training step in this way. `tests/planning/test_plan.py` checks that every name still exists.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch._subclasses.fake_tensor import is_fake


class _Kernel:
    """A Triton kernel, which writes into tensors that exist already."""

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: None


class _Triton:
    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)


def _to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """`Module.to` for fake parameters, which torch cannot convert in place: new ones replace those of another type."""
    dtype = torch._C._nn._parse_to(*args, **kwargs)[1]  # type: ignore[attr-defined]
    for module in self.modules() if dtype is not None else ():
        for name, old in module._parameters.items():
            if old is not None and old.is_floating_point() and old.dtype != dtype:
                module._parameters[name] = torch.nn.Parameter(old.detach().to(dtype), old.requires_grad)
    return self


HEAD = "trl.kernels.chunked_logprob"
REPLACED: dict[str, Any] = {
    "trl.trainer.utils._use_triton": lambda device: True,
    f"{HEAD}._use_triton": lambda device: True,
    f"{HEAD}._forward_kernel": _Kernel(),
    f"{HEAD}._backward_kernel": _Kernel(),
    f"{HEAD}.triton": _Triton,
    f"{HEAD}._addmm_fp32": lambda acc, a, b: None,
}
"""TRL's fused head as on a GPU: only scored positions are computed, and kernels write into existing tensors."""


@contextmanager
def as_on_a_gpu(is_padded: bool, head: bool = True) -> Iterator[None]:
    """Within it a model on fake tensors takes a GPU's paths.

    Args:
        is_padded (`bool`): Whether rows differ in length. A batch without padding needs no attention mask.
        head (`bool`, *optional*, defaults to `True`): The fused head's GPU path; else its path on a CPU.
    """

    def ignores_mask(padding_mask: Any, q_length: int, kv_length: int, *args: Any, **kwargs: Any) -> bool:
        window = kwargs.get("local_attention_size")
        return not is_padded and (window is None or kv_length < window) and q_length in (1, kv_length)

    replaced = {
        "transformers.masking_utils._ignore_causal_mask_sdpa": ignores_mask,
        "transformers.integrations.moe._can_use_grouped_mm": lambda _, weight, __: weight.dtype == torch.bfloat16,
        **(REPLACED if head else {}),
    }
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.nn.Module, "to", _to))
        for name, value in replaced.items():
            stack.enter_context(mock.patch(name, value, create=True))
        yield


FSDP2 = {
    "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false", "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}  # fmt: skip
"""The environment variables that make accelerate use FSDP2."""


def fsdp2(processes: int) -> dict[str, str]:
    """The environment variables with which `accelerate launch` starts the first process of FSDP2."""
    return {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "ACCELERATE_TORCH_DEVICE": "cpu", **FSDP2,
    }  # fmt: skip


@contextmanager
def fsdp_on_a_cpu() -> Iterator[None]:
    """Within it accelerate shards on a CPU as well, where torch's FSDP works but accelerate does not choose it.

    accelerate identifies parameters by their address, which is 0 for all fake ones, so they get others here.
    """
    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    address = torch.Tensor.data_ptr
    with (
        mock.patch.object(AcceleratorState, "__init__", init),
        mock.patch.object(torch.Tensor, "data_ptr", lambda self: id(self) if is_fake(self) else address(self)),
    ):
        yield
