"""[`ControlGroup`]: limits of the kernel's control groups (version 2) for all processes of one
rollout together.

Control groups count all memory, also that of files in memory, which belongs to no process. They
need a group that this process may divide: as root it usually can, in a container mostly not, else
where systemd delegates one (`systemd-run --user --scope agentic-prompting train ...`).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

_NAME = "agentic-prompting"
_SECONDS_TO_CLOSE = 2.0
_numbers = itertools.count()


class ControlGroup:
    """The control group of one rollout.

    Args:
        folder (`Path`): Its folder, which exists.
    """

    def __init__(self, folder: Path):
        self.folder = folder

    @classmethod
    def create(cls, max_memory: int, max_processes: int) -> ControlGroup | None:
        """Create a group with limits; return `None` where this process may create none."""
        parent = _parent_group(os.getpid())
        if parent is None:
            return None
        group = cls(parent / f"{_NAME}-{os.getpid()}-{next(_numbers)}")
        try:
            group.folder.mkdir()
            group._write("memory.max", max_memory)
            # Out of memory, the kernel ends the whole group, not one process of it.
            group._write("memory.oom.group", 1)
            # These files depend on the kernel's configuration.
            for name, value in (("memory.swap.max", 0), ("pids.max", max_processes)):
                if (group.folder / name).exists():
                    group._write(name, value)
        except OSError:
            group.close()
            return None
        return group

    def add(self, processes: Iterable[int]) -> None:
        """Move processes into the group. Those that they start will be in it, too."""
        for process in processes:
            self._write("cgroup.procs", process)

    def was_out_of_memory(self) -> bool:
        """Return whether the kernel has ended a process of the group because of its limit."""
        with contextlib.suppress(OSError):
            events = dict(
                line.split() for line in (self.folder / "memory.events").read_text().splitlines()
            )
            return events.get("oom_kill", "0") != "0"
        return False

    def close(self) -> None:
        """Remove the group.

        Its processes have ended, but the kernel may still be about to notice.
        """
        deadline = time.monotonic() + _SECONDS_TO_CLOSE
        # A group can be removed when the kernel counts no process in it.
        while self.folder.exists() and time.monotonic() < deadline:
            try:
                self.folder.rmdir()
            except OSError:
                time.sleep(0.02)

    def _write(self, name: str, value: int) -> None:
        (self.folder / name).write_text(str(value))


@cache
def _parent_group(pid: int) -> Path | None:
    """Return a group in which this process may create others with a limit of memory: its own, or
    the one around it.
    """
    current_group = None
    with contextlib.suppress(OSError):  # there is no /proc outside of Linux
        current_group = _own_group(
            Path("/proc/self/cgroup").read_text(), Path("/proc/self/mountinfo").read_text()
        )
    if current_group is None:
        return None

    # The first of both in which a group with a limit of memory can be created.
    for folder in (current_group, current_group.parent):
        if not (folder / "cgroup.controllers").exists():
            break
        with contextlib.suppress(OSError):  # it has processes itself, or belongs to someone else
            if "memory" not in (folder / "cgroup.subtree_control").read_text().split():
                (folder / "cgroup.subtree_control").write_text("+memory +pids")
            _remove_left_groups(folder)
            # Try it: the rights to a folder do not tell whether the kernel allows its division.
            trial = folder / f"{_NAME}-{pid}-trial"
            trial.mkdir()
            is_usable = os.access(trial / "memory.max", os.W_OK) and os.access(
                folder / "cgroup.procs", os.W_OK
            )
            trial.rmdir()
            if is_usable:
                return folder
    return None


def _own_group(groups: str, mounts: str) -> Path | None:
    """Return the folder of this process's group of version 2, from the texts of `/proc/self/cgroup`
    and `mountinfo`.
    """
    name = next((line[3:] for line in groups.splitlines() if line.startswith("0::")), None)
    for line in mounts.splitlines():
        # The root and the folder come before ` - `, the type and the source after it.
        fields, _, rest = line.partition(" - ")
        if name is not None and rest.startswith("cgroup2 "):
            root, folder = fields.split()[3:5]
            with contextlib.suppress(ValueError):
                return Path(folder, Path(name).relative_to(root))
    return None


def _remove_left_groups(folder: Path) -> None:
    """Remove the groups of trainers that were killed."""
    for group in folder.glob(f"{_NAME}-*"):
        pid = group.name.removeprefix(f"{_NAME}-").partition("-")[0]
        if not Path("/proc", pid).exists():
            with contextlib.suppress(OSError):
                group.rmdir()
