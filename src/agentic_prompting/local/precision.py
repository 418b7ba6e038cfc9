"""Whether this processor computes in bfloat16 at speed, and the dtype to load a model with."""

from __future__ import annotations

import platform

import torch


def has_bf16_instructions() -> bool:
    """Return whether this x86 processor multiplies in bfloat16 (AVX512-BF16 or AMX).

    Without these instructions a multiplication in bfloat16 takes up to a hundred times as long as
    in float32.
    """
    # The name is private to torch, so it may be missing in another version.
    is_supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return is_supported is not None and bool(is_supported())


def is_bf16_slow() -> bool:
    """Return whether this is an x86 processor without instructions for bfloat16."""
    return platform.machine() in ("x86_64", "AMD64") and not has_bf16_instructions()


def loading_dtype() -> str:
    """Return the dtype with which a model is loaded onto the CPU: float32 where bfloat16 is slow.

    Otherwise `auto`, the dtype in which the model was saved.
    """
    return "float32" if is_bf16_slow() else "auto"
