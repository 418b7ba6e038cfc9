"""A barrier for work that takes each process a different time, and that fails on all of them together."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from ...llm.guard import describe

STORE_PREFIX = "agentic_prompting/rank_barrier"
FIRST_PAUSE = 0.001  # seconds between two looks at the store, doubled each time
LONGEST_PAUSE = 0.25


class PeerFailed(RuntimeError):
    """Another process of the job failed in its rollouts; the message has its number and its error."""


@contextmanager
def rank_barrier(description: str) -> Iterator[Callable[[], None]]:
    """A block that every process of the job runs at its own pace, and that all leave together.

    Not a collective: processes wait through the process group's key-value store, so one that takes
    ten minutes longer causes no NCCL timeout, and the others learn at once of one that failed. It is
    the same under every launcher.

    Args:
        description (`str`): The name of the work, for messages: "the rollouts of step 3".

    Yields:
        `Callable`: Raises [`PeerFailed`] if another process has failed; call it at intervals.

    Raises:
        [`PeerFailed`]: On every process but the failing one, which raises its own error with a note
            about where.
    """
    process_count = dist.get_world_size() if dist.is_initialized() else 1
    # A single process has nobody to wait for.
    if process_count == 1:
        yield lambda: None
        return
    store = _get_default_store()
    rank = dist.get_rank()
    failure_key = f"{STORE_PREFIX}/failed"

    def check_peers() -> None:
        if store.check([failure_key]):
            raise PeerFailed(store.get(failure_key).decode())

    try:
        yield check_peers
    except PeerFailed:
        raise
    except BaseException as error:
        # After another process has failed, this error comes from a collective that it has left.
        if store.check([failure_key]):
            raise PeerFailed(store.get(failure_key).decode()) from error
        # This process is the first to fail: tell the others where and why.
        origin = (
            f"process {rank} of {process_count} ({socket.gethostname()}) failed in {description}"
        )
        store.set(failure_key, f"{origin}: {describe(error, 1000)}")
        error.add_note(f"{origin}; the other processes stop with it")
        raise

    # Wait until the others have arrived. The store counts the blocks that each process has passed,
    # because there may be several trainers in succession.
    expected_arrivals = process_count * store.add(f"{STORE_PREFIX}/{rank}", 1)
    arrivals = store.add(f"{STORE_PREFIX}/arrived", 1)
    pause = FIRST_PAUSE
    while arrivals < expected_arrivals:
        check_peers()
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)
        arrivals = store.add(f"{STORE_PREFIX}/arrived", 0)
