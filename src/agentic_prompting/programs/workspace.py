"""[`Workspace`]: a fresh home and work folder for each rollout of a command, and what the command may use.

    runs/                       # in the system's folder for temporary files, one folder for each trainer's process
      1234-ab12/lock            # held while that process lives: the next start removes folders whose lock is free
      1234-ab12/7/tmp/agent/    # rollout 7: home/ and work/; the command sees tmp/ as /tmp where namespaces are allowed

`confine.py` starts the command. What the system does not allow is found out once and said before the first rollout.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..llm import ServerFailed
from .failures import OverLimit
from .lookups import Lookups

logger = logging.getLogger(__name__)

_SCRIPT = Path(__file__).with_name("confine.py")
_HERE = "tmp/agent"  # below a rollout's folder; as `/tmp/agent` for its command
_PORT = 8000  # of the gateway, in a network of the rollout's own
_KEPT = ("PATH", "LANG", "LC_ALL", "TZ", "TERM", "SSL_CERT_FILE", "SSL_CERT_DIR", "NODE_EXTRA_CA_CERTS")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
_numbers, _first = itertools.count(), threading.Lock()


@dataclass(frozen=True)
class Workspace:
    """Where the command of a program runs, and what it may use.

    Args:
        files (`str`, *optional*, defaults to `"files"`): The column that fills the work folder: a dict of texts by
            path, a folder to copy, or a git bundle to clone. A row without it has an empty folder.
        tests (`str`, *optional*, defaults to `"tests"`): The column with files, of the same kinds, that the agent must
            not see: they are written into the folder when the command has ended, before the reward.
        network (`bool`, *optional*, defaults to `False`): Whether the command may reach more than the gateway.
        keep_failed (`str`, *optional*): Move the folders of failed rollouts here.
        max_bytes (`int`, *optional*, defaults to 1 GiB): On the disk, and of one file.
        max_memory (`int`, *optional*, defaults to 4 GiB): Memory of all its processes together.
        max_processes (`int`, *optional*, defaults to `256`): At once, threads not counted.
        hides (`Sequence[str]`, *optional*): Files and folders that the command sees empty.
        on_lookup (`Callable[[str], None]`, *optional*): Gets the names that the command looks up in a network of its
            own: what it would like to reach. None of them resolves.

    Example:

    ```python
    Program(["./agent.sh", "{question}"], workspace=Workspace(max_memory=2**31))
    ```
    """

    files: str = "files"
    tests: str = "tests"
    network: bool = False
    keep_failed: str | None = None
    max_bytes: int = 2**30
    max_memory: int = 2**32
    max_processes: int = 256
    hides: Sequence[str] = field(
        default=("~/.ssh", "~/.aws", "~/.gnupg", "~/.netrc", "~/.docker", "~/.kaggle", "~/.cache/huggingface")
    )
    on_lookup: Callable[[str], None] | None = None

    def open(self, row: Mapping[str, Any]) -> Place:
        """The [`Place`] of one rollout, filled from its row. `close` has to follow.

        Raises:
            [`ServerFailed`]: The row does not say what is to be in it, or it cannot be written.
        """
        with _first:  # of several threads at once
            tell(self.network)
        root = own_folder() / str(next(_numbers))
        place = Place(self, root, namespaces=not missing(self.network))
        for folder in (place.home, place.work):
            folder.mkdir(parents=True)
        try:
            _fill(place.work, row.get(self.files))
        except BaseException:
            place.close()
            raise
        return place


@dataclass
class Place:
    """The folders of one rollout."""

    space: Workspace
    root: Path
    namespaces: bool
    listener: socket.socket | None = None
    lookups: asyncio.BaseTransport | None = None

    home = property(lambda self: self.root / _HERE / "home")
    work = property(lambda self: self.root / _HERE / "work")

    def shown(self, folder: Path) -> Path:
        """The path at which the command has a folder."""
        return Path("/", folder.relative_to(self.root)) if self.namespaces else folder

    def close(self, failed: bool = False) -> None:
        """Remove the folders; those of a failed rollout are moved where the workspace keeps them."""
        if failed and self.space.keep_failed is not None:
            kept = Path(self.space.keep_failed, f"{self.root.parent.name}-{self.root.name}")
            try:
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(self.root, kept)
            except OSError as error:  # on another disk: no room, or a pipe, which cannot be copied
                logger.warning("not all of a failed rollout is kept in %s: %s", kept, error)
        if self.root.exists():
            remove(self.root)

    def tidy(self) -> None:
        """After the command: make its folders ones that can be read, with no way out of them.

        What the agent has put in the place of a folder is removed. Inside of them, so are links that lead elsewhere and
        what is neither file nor folder: a pipe would block a reader.
        """
        for folder in (self.work.parent, self.home, self.work):
            if folder.is_symlink() or not folder.is_dir():
                folder.unlink(missing_ok=True)
                folder.mkdir()
            folder.chmod(0o700)
        for folder in (self.home, self.work):
            _tidy(folder)

    def add_tests(self, row: Mapping[str, Any]) -> None:
        """Write what the agent did not get to see.

        Raises:
            [`ServerFailed`]: The row does not say what that is, or it cannot be written.
        """
        _fill(self.work, row.get(self.space.tests))

    def base_url(self, key: str) -> str | None:
        """The address in a network of its own; `None` where the command has the system's."""
        return f"http://127.0.0.1:{_PORT}/{key}/v1" if self.namespaces and not self.space.network else None

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """The command's: none of this process's secrets."""
        kept = _KEPT + _PROXIES * self.space.network
        own = {"HOME": self.shown(self.home), "TMPDIR": self.shown(self.root / "tmp"), "PWD": self.shown(self.work)}
        given = {name: os.environ[name] for name in kept if name in os.environ}
        return {**given, **{name: str(path) for name, path in own.items()}, **more}

    async def start(
        self, command: Sequence[str], environment: Mapping[str, str], out: Any, err: Any
    ) -> asyncio.subprocess.Process:
        """Start the command; in a network of its own, `listener` is then the socket of the only address there."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            plan = _plan(self, command, theirs.fileno())
            # In a session of its own, so that Ctrl-C in a terminal does not reach it before the trainer has ended it.
            process = await asyncio.create_subprocess_exec(
                *_starter(plan), stdin=asyncio.subprocess.DEVNULL, stdout=out, stderr=err,
                env=self.environment(environment), start_new_session=True, pass_fds=[theirs.fileno()],
            )  # fmt: skip
            theirs.close()
            if self.namespaces and not self.space.network:
                _, found, _, _ = await asyncio.to_thread(socket.recv_fds, ours, 16, 2)
                self.listener, *names = (socket.socket(fileno=one) for one in found) if found else (None,)
                if names and self.space.on_lookup is not None:
                    make, loop = partial(Lookups, self.space.on_lookup), asyncio.get_running_loop()
                    self.lookups, _ = await loop.create_datagram_endpoint(make, sock=names[0])
        return process


@cache
def missing(network: bool = False) -> str:
    """Why commands get no namespaces of their own here, in plain words; empty if they get them. Tried once."""
    if sys.platform != "linux":
        return f"{sys.platform} has no namespaces"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / _HERE / "work").mkdir(parents=True)
        ours, theirs = socket.socketpair()
        with ours, theirs:
            place = Place(Workspace(network=network, hides=()), root, namespaces=True)
            tried = subprocess.run(
                _starter(_plan(place, ["true"], theirs.fileno())), pass_fds=[theirs.fileno()], capture_output=True
            )
    return tried.stderr.decode(errors="replace").strip() or f"exit code {tried.returncode}" if tried.returncode else ""


@cache
def tell(network: bool) -> None:
    """Say, once, what commands are kept from and what not."""
    if why := missing(network):
        logger.warning(
            "commands run without namespaces here (%s): they can write wherever this user can, they can read the keys "
            "of other rollouts, the network is open to them, and the paths of their folders differ between rollouts. "
            "They execute what a policy in training writes: run the trainer in a container that you can lose.", why,
        )  # fmt: skip
    elif network:
        logger.warning("commands may use the network: they execute what a policy in training writes")


def _starter(plan: Mapping[str, Any]) -> list[str]:
    return [sys.executable, "-I", "-S", str(_SCRIPT), json.dumps(plan)]


def _plan(place: Place, command: Sequence[str], answer: int) -> dict[str, Any]:
    """What `confine.py` does."""
    space, root = place.space, place.root
    hidden = [os.path.expanduser(path) for path in space.hides]
    base = str(_base())
    (root / "empty").mkdir(exist_ok=True)
    return {
        "command": list(command), "cwd": str(place.shown(place.work)), "parent": os.getpid(),
        "limits": {
            "core": 0, "open_files": 1024, "file_bytes": space.max_bytes,
            # Outside of a namespace this limit would count all processes of the user.
            **({"processes": 8 * space.max_processes} if place.namespaces else {}),
        },
        "namespaces": place.namespaces, "network": space.network, "hides_processes": True,
        "tmp": str(root / "tmp"), "empty": str(root / "empty"), "port": _PORT, "answer": answer,
        "lists_names": space.on_lookup is not None,
        "shown": _needed_of_tmp(command),
        "hidden": [path for path in (*hidden, *([] if base.startswith("/tmp/") else [base])) if os.path.exists(path)],
    }  # fmt: skip


def _needed_of_tmp(command: Sequence[str]) -> list[str]:
    """The folders in `/tmp` that hold programs of the command, which has a `/tmp` of its own."""
    named = (*command, sys.prefix, *os.environ.get("PATH", "").split(os.pathsep))
    named_and_real = (path for name in named if name.startswith("/") for path in (name, os.path.realpath(name)))
    paths = map(Path, named_and_real)
    found = {Path(*path.parts[:3]) for path in paths if path.parts[:2] == ("/", "tmp") and len(path.parts) > 2}
    return sorted(str(path) for path in found if path.exists() and path != _base())


# --- folders ---------------------------------------------------------------------------------------------------------


def _base() -> Path:
    return Path(tempfile.gettempdir(), f"agentic-prompting-{os.getuid()}")


def own_folder() -> Path:
    """This process's folder for its rollouts."""
    with _first:
        return _own_folder(os.getpid())


@cache
def _own_folder(pid: int) -> Path:
    """The folder of a process. Those of processes that were killed are removed with what is left."""
    base = _base()
    base.mkdir(mode=0o700, exist_ok=True)
    if base.stat().st_uid != os.getuid() or base.is_symlink():
        raise ServerFailed(f"{base} belongs to someone else: set TMPDIR to a folder of your own")
    start = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(start, fcntl.LOCK_EX)  # one start at a time, so that a folder without a lock was left
        for other in base.iterdir():
            _remove_if_left(other)
        own = Path(tempfile.mkdtemp(prefix=f"{pid}-", dir=base))
        lock = open(own / "lock", "w")  # noqa: SIM115 - held as long as the process lives
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(start)
    _locks.append(lock)
    atexit.register(lambda: remove(own) if os.getpid() == pid else None)
    return own


_locks: list[Any] = []


def _remove_if_left(folder: Path) -> None:
    with contextlib.suppress(OSError), open(folder / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for process in _processes_of(folder):
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        remove(folder)


def _processes_of(folder: Path) -> list[int]:
    """Processes whose environment names the folder: where there are no namespaces, they may outlive the trainer."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if str(folder).encode() + b"/" in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found


def remove(folder: Path) -> None:
    """Remove a folder, also where an agent took away the right to."""

    def retry(function: Any, path: str, error: Any) -> None:
        with contextlib.suppress(OSError):
            os.chmod(os.path.dirname(path), 0o700)
            os.chmod(path, 0o700, follow_symlinks=False) if not os.path.islink(path) else None
            shutil.rmtree(path) if function in (os.scandir, os.open, os.lstat) else function(path)

    shutil.rmtree(folder, onerror=retry)


def _fill(folder: Path, given: Any) -> None:
    """Write files of a row into a folder. What the agent left at their paths goes, links that lead elsewhere too.

    Raises:
        [`ServerFailed`]: They cannot be written, or the row does not say what they are.
    """
    try:
        _write_files(folder, given)
    except (OSError, ValueError) as error:  # no room, or a name with a zero byte
        raise ServerFailed(f"the row's files cannot be written: {error}") from error


def _write_files(folder: Path, given: Any) -> None:
    if given is None:
        return
    if isinstance(given, Mapping):
        for name, text in given.items():
            if text is not None:  # a table has every row's names in each row
                target = _inside(folder, str(name))
                target.write_bytes(text if isinstance(text, bytes) else str(text).encode())
        return
    source = Path(str(given)).expanduser()
    if source.is_dir():
        for path in sorted(source.rglob("*")):
            if path.is_file():
                shutil.copy2(path, _inside(folder, str(path.relative_to(source))))
    elif source.is_file():
        done = subprocess.run(["git", "clone", "--quiet", str(source), str(folder)], capture_output=True, text=True)
        if done.returncode:
            raise ServerFailed(f"the row's git bundle {source} cannot be cloned: {done.stderr.strip()[-200:]}")
    else:
        raise ServerFailed(f"the row's files are neither texts by path, nor a folder, nor a git bundle: {given!r:.80}")


def _inside(folder: Path, name: str) -> Path:
    """A path in the folder that can be written, with no link on the way."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise ServerFailed(f"the row has a file {name!r}: its path must lie in the folder")
    path = folder
    for i, part in enumerate(parts):
        path, is_last = path / part, i + 1 == len(parts)
        if path.is_symlink() or (path.exists() and (is_last or not path.is_dir())):
            remove(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if not is_last:
            path.mkdir(exist_ok=True)
    return path


def _tidy(folder: Path) -> None:
    top = folder.resolve()
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where, name)
            kind = path.lstat().st_mode
            is_link, is_folder = stat.S_ISLNK(kind), stat.S_ISDIR(kind)
            if not (_stays_in(path, top) if is_link else is_folder or stat.S_ISREG(kind)):
                path.unlink()
            elif not is_link:
                path.chmod(stat.S_IMODE(kind) | (0o700 if is_folder else 0o600))


def _stays_in(link: Path, top: Path) -> bool:
    try:
        link.stat()
    except FileNotFoundError:
        pass
    except OSError:  # it leads to itself, or where this process may not look
        return False
    return Path(os.path.realpath(link)).is_relative_to(top)


# --- limits that the kernel does not keep ----------------------------------------------------------------------------


async def watch(pid: int, place: Place) -> None:
    """Return when a command uses more than its place allows; look each second.

    Raises:
        [`OverLimit`]: With what it used.
    """
    space = place.space
    while True:
        await asyncio.sleep(1)
        processes, memory, size = await asyncio.to_thread(_used, pid, place.root)
        for what, used, most in (
            ("processes", processes, space.max_processes),
            ("bytes of memory", memory, space.max_memory),
            ("bytes on the disk", size, space.max_bytes),
        ):
            if used > most:
                raise OverLimit(f"the command had {used} {what}; its workspace allows {most}")


def _used(pid: int, folder: Path) -> tuple[int, int, int]:
    import psutil

    memory, processes = 0, []
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = psutil.Process(pid).children(recursive=True)
    for one in processes:
        with contextlib.suppress(psutil.Error):
            memory += one.memory_info().rss
    size = 0
    for where, _, files in os.walk(folder):
        for name in files:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(where, name)).st_blocks * 512
    return len(processes), memory, size
