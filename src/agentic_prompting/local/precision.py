"""Whether this processor computes in bfloat16 at speed."""

from __future__ import annotations

import torch


def has_bf16_instructions() -> bool:
    """Return whether this x86 processor multiplies in bfloat16 (AVX512-BF16 or AMX).

    Without these instructions a multiplication in bfloat16 takes up to a hundred times as long as
    in float32.
    """
    # The name is private to torch, so it may be missing in another version.
    is_supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return is_supported is not None and bool(is_supported())
