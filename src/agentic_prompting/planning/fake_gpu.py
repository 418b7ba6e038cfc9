"""Makes TRL, transformers and accelerate take their GPU paths for fake tensors on a CPU.

A training step is planned on fake tensors, usually in a build of torch without CUDA. The libraries
choose their code by the device, and none of them has an argument for that, so the functions that
choose are replaced here for the duration of a measurement, in a process of its own. Nothing is
patched in training. `tests/planning/test_plan.py` checks that every name still exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from torch._subclasses.fake_tensor import is_fake

TRL_HEAD = "trl.kernels.chunked_logprob"


@contextmanager
def patched(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of a module or class within the context. It need not exist."""
    # An inherited attribute is not the owner's: remove the replacement afterwards.
    exists = name in vars(owner)
    previous = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if exists:
            setattr(owner, name, previous)
        else:
            delattr(owner, name)


@contextmanager
def patched_path(path: str, value: object) -> Iterator[None]:
    """Replace `module.name` within the context."""
    module_name, _, name = path.rpartition(".")
    with patched(import_module(module_name), name, value):
        yield


class FakeKernel:
    """Stands in for a Triton kernel, which writes into tensors that exist already."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class FakeTriton:
    """The part of Triton's module that TRL uses."""

    @staticmethod
    def cdiv(a: int, b: int) -> int:
        return -(-a // b)


GPU_HEAD: dict[str, Any] = {
    "trl.trainer.utils._use_triton": lambda device: True,
    f"{TRL_HEAD}._use_triton": lambda device: True,
    f"{TRL_HEAD}._forward_kernel": FakeKernel(),
    f"{TRL_HEAD}._backward_kernel": FakeKernel(),
    f"{TRL_HEAD}.triton": FakeTriton,
    f"{TRL_HEAD}._addmm_fp32": lambda acc, a, b: None,
}
"""TRL's fused head as on a GPU: only scored positions are computed, into existing tensors."""


def convert_module(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """`Module.to` for fake parameters: torch cannot convert them in place, so they are replaced."""
    # The second of the parsed arguments is the type; the device does not matter here.
    dtype = torch._C._nn._parse_to(*args, **kwargs)[1]  # type: ignore[attr-defined]
    if dtype is None:
        return module
    # Replace each floating-point parameter that has another type.
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is None or not parameter.is_floating_point() or parameter.dtype == dtype:
                continue
            converted = parameter.detach().to(dtype)
            child._parameters[name] = torch.nn.Parameter(converted, parameter.requires_grad)
    return module


@contextmanager
def as_on_a_gpu(is_padded: bool, head: bool = True) -> Iterator[None]:
    """Let a model on fake tensors take the GPU's paths within the context.

    Args:
        is_padded (`bool`): Whether rows differ in length. A batch without padding needs no mask.
        head (`bool`, *optional*, defaults to `True`): Whether TRL's fused head takes the GPU's
            path.
    """

    def can_ignore_mask(
        padding_mask: object,
        q_length: int,
        kv_length: int,
        q_offset: int,
        kv_offset: int,
        local_attention_size: int | None = None,
    ) -> bool:
        # Without padding, sdpa needs no mask: it is causal by itself.
        # A sliding window does need one, as soon as a row is longer than the window.
        fits_window = local_attention_size is None or kv_length < local_attention_size
        return not is_padded and fits_window and q_length in (1, kv_length)

    # The experts of a mixture are multiplied in groups if their weights are bf16.
    def can_use_grouped_mm(_: object, weight: torch.Tensor, __: object) -> bool:
        return weight.dtype == torch.bfloat16

    # Each path names the function where its caller looks it up.
    replacements: dict[str, Any] = {
        "transformers.masking_utils._ignore_causal_mask_sdpa": can_ignore_mask,
        "transformers.integrations.moe._can_use_grouped_mm": can_use_grouped_mm,
    }
    if head:
        replacements |= GPU_HEAD
    with ExitStack() as stack:
        stack.enter_context(patched(torch.nn.Module, "to", convert_module))
        for path, value in replacements.items():
            stack.enter_context(patched_path(path, value))
        yield


FSDP2_VARIABLES = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
"""The environment variables that make accelerate use FSDP2."""


def fsdp2_environment(processes: int) -> dict[str, str]:
    """Return the variables with which `accelerate launch` starts the first process of FSDP2."""
    return {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
        "ACCELERATE_TORCH_DEVICE": "cpu",
        **FSDP2_VARIABLES,
    }


@contextmanager
def fsdp_on_a_cpu() -> Iterator[None]:
    """Let accelerate shard on a CPU within the context.

    torch's FSDP works there, but accelerate does not choose it. accelerate also identifies
    parameters by their address, which is 0 for all fake ones, so they get distinct addresses.
    """
    original_init = AcceleratorState.__init__
    original_address = torch.Tensor.data_ptr

    def init_with_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original_init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        # accelerate takes a CPU job for a plain one, although it has a plugin for FSDP.
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    # The id of a fake tensor stands for its address, because it is the only one with this id.
    def distinct_address(tensor: torch.Tensor) -> int:
        return id(tensor) if is_fake(tensor) else original_address(tensor)

    with (
        patched(AcceleratorState, "__init__", init_with_fsdp),
        patched(torch.Tensor, "data_ptr", distinct_address),
    ):
        yield
