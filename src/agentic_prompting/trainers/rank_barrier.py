"""Where the processes of a job wait for each other after rollouts of uneven length.

Not a collective: the waiting goes over the process group's key-value store, so a process that needs ten minutes longer
runs into no NCCL timeout, and one that failed is heard of at once instead of being waited for. Under every launcher and
back end the same.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

_PREFIX = "agentic_prompting/rank_barrier"


class PeerFailed(RuntimeError):
    """Another process of the job failed in its rollouts; the message says which, and with what."""


@contextmanager
def rank_barrier(what: str) -> Iterator[Callable[[], None]]:
    """A stretch that every process of the job goes through in its own time, and leaves together with the others.

    Args:
        what (`str`): What is being done, for messages: "the rollouts of step 3".

    Yields:
        `Callable`: Raises [`PeerFailed`] if another process has failed; to be called now and then.

    Raises:
        [`PeerFailed`]: On every process but the failing one, which raises its own error with a note about where.
    """
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        yield lambda: None
        return
    store, rank = _get_default_store(), dist.get_rank()

    def listen() -> None:
        if store.check([f"{_PREFIX}/failed"]):
            raise PeerFailed(store.get(f"{_PREFIX}/failed").decode())

    try:
        yield listen
    except PeerFailed:
        raise
    except BaseException as error:
        if store.check([f"{_PREFIX}/failed"]):  # what broke here is a collective that the failed process has left
            raise PeerFailed(store.get(f"{_PREFIX}/failed").decode()) from error
        where = f"process {rank} of {world} ({socket.gethostname()}) failed in {what}"
        store.set(f"{_PREFIX}/failed", f"{where}: {type(error).__name__}: {error}")
        error.add_note(f"{where}; the other processes stop with it")
        raise
    # How many stretches this process has been through is counted in the store: there may be several trainers.
    expected = world * store.add(f"{_PREFIX}/{rank}", 1)
    arrived = store.add(f"{_PREFIX}/arrived", 1)
    pause = 0.001
    while arrived < expected:
        listen()
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
        arrived = store.add(f"{_PREFIX}/arrived", 0)
