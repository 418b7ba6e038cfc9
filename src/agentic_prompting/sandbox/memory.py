"""Memory that the C library keeps instead of giving it back."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, for the tensors of the next step.

    glibc asks the system anew for every large block and returns it at once. PyTorch on a CPU does that some thousand
    times in a step of the sandbox's policy, and each time the system clears the pages: a third of `make demo`, and
    more on a virtual machine. What a process of the sandbox keeps is a few hundred MB.

    Returns:
        `bool`: Whether the C library took it; others than glibc do not know these settings.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # macOS, musl; Windows has no library without a name
        return False
    # Returns 1 where it worked. Thresholds are C's int: 2 GB is the most there is.
    return bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1) and mallopt(_M_TOP_PAD, 64 * 2**20))
