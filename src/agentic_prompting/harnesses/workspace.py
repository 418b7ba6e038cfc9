"""[`Workspace`]: a fresh home and work folder for each rollout of a command, and what the command
may use.

    7/out, 7/err                # of rollout 7: the command's output
    7/tmp/agent/row.json        # its row
    7/tmp/agent/{home,work}/    # its folders; in a sandbox, tmp/ is its /tmp

`bubblewrap.py` confines the command and `launcher.py` starts it. Limits that the kernel does not
keep are looked after here, once a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

import psutil

from ..llm import Misconfigured
from ..programs.failures import LimitExceeded
from . import seccomp
from .bubblewrap import UNPRIVILEGED_USER, BubblewrapSandbox, why_unavailable
from .cgroups import ControlGroup
from .dns_server import DNSServer
from .folders import (
    MAX_DEPTH,
    base_folder,
    fill_folder,
    give_to,
    is_too_deep,
    kill_processes_of,
    make_folder,
    make_safe_to_read,
    process_folder,
    remove,
    source_path,
    walk,
)

logger = logging.getLogger(__name__)

_LAUNCHER = Path(__file__).with_name("launcher.py")
_AGENT_FOLDER = "tmp/agent"  # below a rollout's folder; in a sandbox /tmp/agent
_PORT = 8000  # port of the gateway, in a network of the rollout's own
_INHERITED = ("PATH", "LANG", "LC_ALL", "TZ", "TERM")
_CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
# No programs are there, and container images often keep the user's project in one of them.
_SOURCE_FOLDERS = ("/usr/src", "/usr/local/src")
_BYTES_OF_ENTRY = 256  # bytes of the disk for the name and the data about an empty file
_MEMORY_HEADROOM = 2**30  # bytes above `max_memory`, for what one process asks for at once
_SECONDS_TO_END = 10.0
_numbers = itertools.count()  # numbers of rollouts
_folder_lock = threading.Lock()


@dataclass(frozen=True)
class Workspace:
    """Where the command of a program runs, and what it may use.

    Args:
        files (`str`, *optional*, defaults to `"files"`): The column that fills the work folder: a
            dict of texts by path, or the path (below `source`) of a folder to copy or of a git
            bundle to clone. A row without it has an empty folder.
        tests (`str`, *optional*, defaults to `"tests"`): The column with files, of the same kinds,
            that the agent must not see: they are written into the folder when the command has
            ended, before the reward.
        source (`str`, *optional*): The folder that the paths in these columns lie in. Without it
            they may be no paths: a data set from elsewhere could name any file of this machine.
        network (`bool`, *optional*, defaults to `False`): Whether the command may reach more than
            the gateway: all that this machine can reach, with its own ports.
        keep_failed (`str`, *optional*): Move the folders of failed rollouts here.
        max_bytes (`int`, *optional*, defaults to 1 GiB): On the disk, and of one file.
        max_files (`int`, *optional*, defaults to `100000`): Files and folders on the disk.
        max_memory (`int`, *optional*, defaults to 4 GiB): Memory of all its processes together.
        max_processes (`int`, *optional*, defaults to `256`): At once, threads not counted.
        shows (`Sequence[str]`, *optional*): Files and folders that the command can read, beside the
            system's programs, its own installation and the paths that the command names.
        hides (`Sequence[str]`, *optional*): Files and folders in these that it sees empty.
        environment (`dict[str, str]`, *optional*): Variables of its environment. It inherits none
            but `PATH`, language, time zone and certificates.
        isolation (`"bwrap"` or `"none"`, *optional*, defaults to `"bwrap"`): `"bwrap"` confines the
            command with bubblewrap, and refuses to run it where that does not work. `"none"` runs
            what the policy writes with the rights of this user, who must be able to lose
            everything.
        on_dns_lookup (`Callable[[str], None]`, *optional*): Gets the names that the command looks
            up in a network of its own: what it would like to reach. None of them resolves.

    Raises:
        `ValueError`: A limit is not positive, or there is no such isolation.

    Example:

    ```python
    CommandProgram(["my-agent", "{question}"], workspace=Workspace(max_memory=2**31))
    ```
    """

    files: str = "files"
    tests: str = "tests"
    source: str | None = None
    network: bool = False
    keep_failed: str | None = None
    max_bytes: int = 2**30
    max_files: int = 100_000
    max_memory: int = 2**32
    max_processes: int = 256
    shows: Sequence[str] = ()
    hides: Sequence[str] = field(
        default=(
            "~/.ssh",
            "~/.aws",
            "~/.gnupg",
            "~/.netrc",
            "~/.docker",
            "~/.kaggle",
            "~/.cache/huggingface",
        )
    )
    environment: Mapping[str, str] = field(default_factory=dict)
    isolation: Literal["bwrap", "none"] = "bwrap"
    on_dns_lookup: Callable[[str], None] | None = None

    def __post_init__(self) -> None:
        if self.isolation not in ("bwrap", "none"):
            raise ValueError(f"isolation must be 'bwrap' or 'none', not {self.isolation!r}")
        if min(self.max_bytes, self.max_files, self.max_memory, self.max_processes) <= 0:
            raise ValueError("max_bytes, max_files, max_memory and max_processes must be positive")

    def check(self) -> None:
        """Raise [`Misconfigured`] where a command cannot be isolated as requested; warn where it is
        not isolated.
        """
        if self.isolation == "none":
            _warn_unconfined()
            return

        # bwrap must work with the network that the workspace asks for.
        reason = why_unavailable(self.network)
        if reason:
            raise Misconfigured(
                "a command that a policy drives is confined with bubblewrap (bwrap), which does "
                f"not work here: {reason}. Install it, or allow user namespaces "
                "(docs/howto/harnesses.md). Unconfined, only on a machine, and as a user, that you "
                "can lose, it runs with Workspace(isolation='none') in Python, or with "
                "--isolation none of a --harness or of a --program that is a list of texts"
            )
        if self.network:
            _warn_of_network()

    def open(self, row: Mapping[str, Any], private_paths: Iterable[str] = ()) -> RolloutWorkspace:
        """Open the [`RolloutWorkspace`] of one rollout, filled from its row. `close` has to follow.

        Args:
            row (`dict`): The rollout's row.
            private_paths (`Iterable[str]`, *optional*): Files and folders of the run that no
                command may see.

        Raises:
            [`ServerFailed`]: The row does not say what is to be in it, or it cannot be written.
            [`Misconfigured`]: The command cannot be isolated here.
        """
        self.check()

        # The command must not read the tests at the path that they are copied from, either.
        tests = source_path(row.get(self.tests), self.source)
        private = list(private_paths)
        if tests is not None:
            private.append(str(tests))

        # Create the folders, and leave none behind where the row cannot fill them.
        root = open_process_folder() / str(next(_numbers))
        rollout_workspace = RolloutWorkspace(self, root, private)
        for folder in (rollout_workspace.home, rollout_workspace.work):
            folder.mkdir(parents=True)
        try:
            fill_folder(rollout_workspace.work, row.get(self.files), self.source)
        except BaseException:
            rollout_workspace.close()
            raise
        return rollout_workspace


class RolloutWorkspace:
    """The folders of one rollout, and the processes of its command.

    Args:
        workspace ([`Workspace`]): The settings: files, network and limits.
        root (`Path`): The folder for its folders.
        private_paths (`Sequence[str]`, *optional*): Files and folders that the command must not
            see.
    """

    def __init__(self, workspace: Workspace, root: Path, private_paths: Sequence[str] = ()):
        self.workspace = workspace
        self.root = root
        self.private_paths = private_paths
        self.home = root / _AGENT_FOLDER / "home"
        self.work = root / _AGENT_FOLDER / "work"
        self.row = root / _AGENT_FOLDER / "row.json"
        self.is_confined = workspace.isolation != "none"
        self.listener: socket.socket | None = None  # at the only address in its own network
        self.violation: str | None = None  # the limit that the command has broken
        self._dns_socket: socket.socket | None = None  # gets its DNS queries
        self._dns_server: asyncio.BaseTransport | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._handshake: asyncio.Future[bool] | None = None
        # A descriptor of the namespace's first process: all others end with it.
        self._first_process: int | None = None
        self._group: ControlGroup | None = None

    # ---- what the command sees ----

    @property
    def has_own_network(self) -> bool:
        """Whether the command's network has one address, on which `listener` listens."""
        return self.is_confined and not self.workspace.network

    @property
    def records_dns(self) -> bool:
        """Whether the command's DNS lookups are recorded: only in a network of its own."""
        return self.has_own_network and self.workspace.on_dns_lookup is not None

    def path_for_command(self, path: Path) -> Path:
        """Return the path at which the command has a path of its folders."""
        if self.is_confined:
            return Path("/", path.relative_to(self.root))
        return path

    def base_url(self, key: str) -> str | None:
        """Return the address in a network of its own; `None` where the command has the system's."""
        if not self.has_own_network:
            return None
        return f"http://127.0.0.1:{_PORT}/{key}/v1"

    def environment(self, variables: Mapping[str, str]) -> dict[str, str]:
        """Return the command's environment: none of this process's secrets."""
        # Inherited variables; a proxy only if its address contains no password.
        environment: dict[str, str] = {}
        for name in (*_INHERITED, *_CERTIFICATES):
            if name in os.environ:
                environment[name] = os.environ[name]
        if self.workspace.network:
            for name in _PROXIES:
                if name in os.environ and "@" not in os.environ[name]:
                    environment[name] = os.environ[name]

        # Its folders, at the paths where it has them.
        folders = {"HOME": self.home, "TMPDIR": self.root / "tmp", "PWD": self.work}
        for name, path in folders.items():
            environment[name] = str(self.path_for_command(path))

        # The workspace's variables override inherited ones, and the rollout's override both.
        return {**environment, **self.workspace.environment, **variables}

    # ---- its processes ----

    async def start(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        out: BinaryIO,
        err: BinaryIO,
        needed_paths: Iterable[str] = (),
    ) -> bool:
        """Start the command; `end` has to follow.

        Args:
            command (`Sequence[str]`): Program and arguments.
            environment (`dict[str, str]`): Variables beside those of `environment`.
            out (`BinaryIO`): File for its output.
            err (`BinaryIO`): File for its error output.
            needed_paths (`Iterable[str]`, *optional*): Paths that it can read, beside those of its
                workspace.

        Returns:
            `bool`: Whether it has started. If not, `err` has the reason.
        """
        await asyncio.to_thread(self._prepare)

        # Start the launcher, in a sandbox if there is one. It gets its orders over a socket.
        channel, launcher_channel = socket.socketpair()
        command_line = [*_launcher_command(), str(launcher_channel.fileno())]
        inherited_descriptors = [launcher_channel.fileno()]
        filter_descriptor: int | None = None
        if self.is_confined:
            filter_descriptor = seccomp.open_filter()
            inherited_descriptors.append(filter_descriptor)
            command_line = self._sandbox(needed_paths).command_line(command_line, filter_descriptor)

        # In a session of its own, so that Ctrl-C in a terminal does not reach it before the trainer
        # has ended it.
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command_line,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=self.environment(environment),
                cwd=self.work,
                start_new_session=True,
                pass_fds=inherited_descriptors,
            )
        except BaseException:
            channel.close()
            raise
        finally:
            launcher_channel.close()
            if filter_descriptor is not None:
                os.close(filter_descriptor)

        # Let it start the command, and answer the command's DNS lookups.
        handshake = asyncio.to_thread(self._shake_hands, channel, self._plan(command))
        self._handshake = asyncio.ensure_future(handshake)
        has_started = await asyncio.shield(self._handshake)
        if self._dns_socket is not None and self.workspace.on_dns_lookup is not None:
            self._dns_server, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                partial(DNSServer, self.workspace.on_dns_lookup), sock=self._dns_socket
            )
        return has_started

    def _prepare(self) -> None:
        """Prepare what takes a while before the start: the control group, and the owner of the
        folders.
        """
        workspace = self.workspace
        # Threads count as processes here, which the kernel does not tell apart.
        self._group = ControlGroup.create(workspace.max_memory, 8 * workspace.max_processes)

        # The command of a trainer that runs as root runs as another user, who must own its folders.
        if self.is_confined and os.geteuid() == 0:
            give_to(UNPRIVILEGED_USER, self.root / "tmp")

        # Lookups go to the sandbox's own loopback address, where they are recorded.
        if self.records_dns:
            (self.root / "resolv.conf").write_text("nameserver 127.0.0.1\n")

    def _sandbox(self, needed_paths: Iterable[str]) -> BubblewrapSandbox:
        workspace = self.workspace

        # Paths that the command reads, with the user's `~` written out.
        certificates = [os.environ[name] for name in _CERTIFICATES if name in os.environ]
        shows = [*needed_paths, *certificates]
        shows += map(os.path.expanduser, workspace.shows)

        # Paths that it must not see: the user's secrets, the run's files and other rollouts.
        hides = [*_SOURCE_FOLDERS, *self.private_paths, str(base_folder())]
        hides += map(os.path.expanduser, workspace.hides)

        return BubblewrapSandbox(
            tmp=self.root / "tmp",
            cwd=str(self.path_for_command(self.work)),
            shows=shows,
            hides=hides,
            network=workspace.network,
            dns_settings=self.root / "resolv.conf" if self.records_dns else None,
            dns_listener=[*_launcher_command(), "listen-dns"] if self.records_dns else (),
        )

    def _plan(self, command: Sequence[str]) -> dict[str, Any]:
        """Return the launcher's instructions."""
        workspace = self.workspace
        limits = {"core": 0, "open_files": 1024, "file_bytes": workspace.max_bytes}
        if self.is_confined:  # elsewhere this limit would count all processes of the user
            limits["processes"] = 8 * workspace.max_processes

        # Without a control group, each process is limited in the memory that it asks for.
        if self._group is None:
            limits["data"] = workspace.max_memory + _MEMORY_HEADROOM
        return {
            "command": list(command),
            "limits": limits,
            "port": _PORT if self.has_own_network else 0,
            "supervises": not self.is_confined,
        }

    def _shake_hands(self, channel: socket.socket, plan: Mapping[str, Any]) -> bool:
        """Send the plan to the launcher, take its sockets and let it start the command.

        In a thread: it may block.
        """
        assert self._process is not None
        with channel:
            try:
                channel.sendall(json.dumps(plan).encode() + b"\n")

                # Take the gateway's socket, and then that of the DNS server.
                ready, descriptors, _, _ = socket.recv_fds(channel, 16, 2)
                sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
                if sockets:
                    self.listener = sockets[0]
                if len(sockets) > 1:
                    self._dns_socket = sockets[1]

                # The command starts with this byte, once its processes are under the limits.
                if ready:
                    self._take_processes(self._process.pid)
                    channel.sendall(b"x")
                return bool(ready)
            except (OSError, psutil.Error):  # it has ended
                return False

    def _take_processes(self, pid: int) -> None:
        """Note what has to be ended, and put it under the limits of a control group."""
        process = psutil.Process(pid)
        # bwrap's child is the first process of the namespace.
        if self.is_confined:
            self._first_process = os.pidfd_open(process.children()[0].pid)

        # bwrap itself stays outside; an unconfined launcher joins, so that its children do.
        if self._group is not None:
            self._group.add(child.pid for child in process.children(recursive=True))
            if not self.is_confined:
                self._group.add([pid])

    async def wait(self) -> int:
        """Wait for the command's exit code.

        Raises:
            [`LimitExceeded`]: It uses more than its workspace allows.
        """
        assert self._process is not None

        # Whichever comes first: the command ends, or it breaks a limit.
        exit_code = asyncio.ensure_future(self._process.wait())
        watcher = asyncio.ensure_future(watch(self._process.pid, self))
        try:
            await asyncio.wait({exit_code, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not exit_code.done():
                # The watcher ends only with an exception: the limit that was broken.
                watcher.result()
            return await exit_code
        finally:
            exit_code.cancel()
            watcher.cancel()

    async def end(self) -> None:
        """End all processes of the command, record the limit that it has broken, and make its
        folders safe to read.
        """
        if self._process is not None:
            await self._end_processes(self._process)

        # The thread of the handshake may still use the sockets: it ends with the processes.
        if self._handshake is not None:
            await asyncio.wait({self._handshake})
        if self._dns_server is not None:
            self._dns_server.close()
        await asyncio.to_thread(self._inspect_remains)

    async def _end_processes(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            if self._first_process is not None:
                # The kernel then kills all others, and is waited for.
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._first_process, signal.SIGKILL)
            else:
                with contextlib.suppress(ProcessLookupError):
                    # An unconfined launcher then ends all that the command started.
                    process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _SECONDS_TO_END)

        # Kill what is left in the process group, even if the process has ended by itself.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)

    def _inspect_remains(self) -> None:
        """Kill processes that are left, record a broken limit, and make the folders safe to read.

        In a thread: it may block.
        """
        # The namespace's first process ends last: after it no process can change the folders.
        if self._first_process is not None:
            poll = select.poll()
            poll.register(self._first_process, select.POLLIN)
            poll.poll(1000 * _SECONDS_TO_END)
            os.close(self._first_process)
            self._first_process = None

        # Without a namespace, find the processes that are left by their environment.
        if not self.is_confined:
            kill_processes_of(self.root)

        # The kernel ends a command that is out of memory: that is a broken limit, not a crash.
        if self._group is not None:
            if self._group.was_out_of_memory():
                self.violation = (
                    "the command had more memory than its workspace allows "
                    f"({self.workspace.max_memory})"
                )
            self._group.close()

        # Measure the disk once more: the command may have filled it since the last look.
        if self.violation is None:
            use = measure_use(None, self.root, self.workspace.max_files)
            self.violation = describe_violation(use, self.workspace)
        self._make_folders_safe()

    def _make_folders_safe(self) -> None:
        """Make the command's folders readable and free of links that lead out.

        What the agent has put in the place of a folder is removed.
        """
        # The folders from the outside in: each one must be real before the next is looked at.
        for folder in (self.root / "tmp", self.work.parent, self.home, self.work):
            make_folder(folder)
        for folder in (self.home, self.work):
            make_safe_to_read(folder)

    # ---- its folders ----

    def add_tests(self, row: Mapping[str, Any]) -> None:
        """Write what the agent did not get to see.

        Raises:
            [`ServerFailed`]: The row does not say what that is, or it cannot be written.
        """
        fill_folder(self.work, row.get(self.workspace.tests), self.workspace.source)

    def close(self, failed: bool = False) -> None:
        """Remove the folders; those of a failed rollout are moved where the workspace keeps
        them.
        """
        if self.listener is not None:
            self.listener.close()

        # Keep a failed rollout for its reader, without links that lead out of the folder.
        if failed and self.workspace.keep_failed is not None:
            target = Path(self.workspace.keep_failed, f"{self.root.parent.name}-{self.root.name}")
            try:
                make_safe_to_read(self.root / "tmp")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(self.root, target)
            except (OSError, RecursionError) as error:
                # On another disk: it is full, or a folder still to be removed is left.
                logger.warning("not all of a failed rollout is kept in %s: %s", target, error)

        # Remove everything that was not moved.
        if self.root.exists():
            remove(self.root)


@cache
def _launcher_command() -> tuple[str, ...]:
    # Isolated (-I) and without site-packages (-S): it needs the standard library alone.
    return (sys.executable, "-I", "-S", "-c", _LAUNCHER.read_text(encoding="utf-8"))


def open_process_folder() -> Path:
    """This process's folder for its rollouts, created if there is none."""
    with _folder_lock:
        return process_folder(os.getpid())


@cache
def _warn_unconfined() -> None:
    logger.warning(
        "isolation='none': commands run what a policy in training writes, with all rights of this "
        "user. They can write and read what this user can, the keys of other rollouts included, "
        "and use the network. Run the trainer on a machine that you can lose."
    )


@cache
def _warn_of_network() -> None:
    logger.warning("commands may use the network: they execute what a policy in training writes")


# ---- limits that the kernel does not keep ----


@dataclass(frozen=True)
class ResourceUse:
    """The resources that a command uses."""

    processes: int
    memory: int  # bytes
    disk: int  # bytes
    files: int
    has_deep_folders: bool


async def watch(pid: int, rollout_workspace: RolloutWorkspace) -> NoReturn:
    """Measure once a second what a command uses, until it breaks a limit or this is cancelled.

    Raises:
        [`LimitExceeded`]: The command uses more than its workspace allows.
    """
    workspace = rollout_workspace.workspace
    while True:
        await asyncio.sleep(1)
        # Measured in a thread: walking a full disk takes a while.
        use = await asyncio.to_thread(measure_use, pid, rollout_workspace.root, workspace.max_files)
        violation = describe_violation(use, workspace)
        if violation is not None:
            raise LimitExceeded(violation)


def describe_violation(use: ResourceUse, workspace: Workspace) -> str | None:
    """Return the limit that is broken, in words; `None` if there is none."""
    limits = (
        (use.processes, workspace.max_processes, "processes"),
        (use.memory, workspace.max_memory, "bytes of memory"),
        (use.disk, workspace.max_bytes, "bytes on the disk"),
        (use.files, workspace.max_files, "files"),
    )
    for used, limit, unit in limits:
        if used > limit:
            return f"the command had {used} {unit}; its workspace allows {limit}"
    if use.has_deep_folders:
        return f"the command had folders more than {MAX_DEPTH} deep"
    return None


def measure_use(pid: int | None, folder: Path, max_files: int) -> ResourceUse:
    """Return what the processes below a process use, and a folder.

    Files are counted until there are more than `max_files`.
    """
    # Processes and their memory. A process may end meanwhile.
    processes: list[psutil.Process] = []
    if pid is not None:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = psutil.Process(pid).children(recursive=True)
    memory = 0
    for process in processes:
        with contextlib.suppress(psutil.Error):
            memory += process.memory_info().rss

    # The disk. An entry may be removed meanwhile.
    disk = 0
    files = 0
    has_deep_folders = False
    for entry in walk(folder):
        with contextlib.suppress(OSError):
            disk += max(entry.stat(follow_symlinks=False).st_blocks * 512, _BYTES_OF_ENTRY)
            if entry.is_dir(follow_symlinks=False) and is_too_deep(entry.path, folder):
                has_deep_folders = True
        # Stop at the first broken limit: an agent can create files without end.
        files += 1
        if files > max_files or has_deep_folders:
            break
    return ResourceUse(
        processes=len(processes),
        memory=memory,
        disk=disk,
        files=files,
        has_deep_folders=has_deep_folders,
    )
