"""Folders of rollouts: this process's own, what a row puts into one, and what may be left in one by
an agent.

    agentic-prompting-1000/     # of a user, in the system's folder for temporary files
      1234-ab12/lock            # of a trainer's process, which holds the lock: the next start removes what has none
      1234-ab12/7/              # of rollout 7

An agent can leave anything: links, pipes, folders that are closed or too deep for Python's
recursion and for the names that the system takes. Whole trees are therefore changed and removed by
`chmod` and `rm`, which know no such limits.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TextIO

from ..llm import ServerFailed

logger = logging.getLogger(__name__)

MAX_DEPTH = 100  # folders within each other; node_modules, the deepest that agents use, have 20
_MAX_PATH = 3000  # bytes; Linux takes 4,095
_SECONDS_TO_REMOVE = 10.0


# ---- this process's folder ----


def base_folder() -> Path:
    """Return the folder of this user, in the system's folder for temporary files."""
    return Path(tempfile.gettempdir(), f"agentic-prompting-{os.getuid()}")


_locks: list[TextIO] = []  # files that are held open as long as the process lives


@cache
def process_folder(pid: int) -> Path:
    """Return the folder of a process, created. Also removes folders of killed processes."""
    base = base_folder()
    base.mkdir(mode=0o700, exist_ok=True)
    # Anyone can create this path in a shared folder before this user does.
    if base.stat().st_uid != os.getuid() or base.is_symlink():
        raise ServerFailed(f"{base} belongs to someone else: set TMPDIR to a folder of your own")

    # One start at a time, so a folder without a lock is an abandoned one.
    base_descriptor = os.open(base, os.O_RDONLY)
    try:
        fcntl.flock(base_descriptor, fcntl.LOCK_EX)
        for folder in base.iterdir():
            _remove_if_abandoned(folder)
        folder = Path(tempfile.mkdtemp(prefix=f"{pid}-", dir=base))
        lock = open(folder / "lock", "w")  # noqa: SIM115
        fcntl.flock(lock, fcntl.LOCK_EX)
    finally:
        os.close(base_descriptor)

    # Keep the file: if it were collected, it would be closed and its lock released.
    _locks.append(lock)

    def remove_at_exit() -> None:
        if os.getpid() == pid:  # and not in a fork
            remove(folder)

    atexit.register(remove_at_exit)
    return folder


def _remove_if_abandoned(folder: Path) -> None:
    with contextlib.suppress(OSError), open(folder / "lock", "a") as lock:
        # Raises where the process that holds the lock still lives: its folder stays.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        kill_processes_of(folder)
        remove(folder)


def kill_processes_of(folder: Path) -> None:
    """Kill the processes whose environment names a folder: outside of a sandbox they may outlive
    their rollout.
    """
    # With the slash, the folder of rollout 1 is not found in that of rollout 10.
    mark = os.fsencode(folder) + b"/"
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in environment.read_bytes():
                os.kill(int(environment.parent.name), signal.SIGKILL)


# ---- what an agent left ----


def walk(folder: Path) -> Iterator[os.DirEntry[str]]:
    """Yield the entries below a folder.

    Links are not followed, and folders too deep ([`is_too_deep`]) are not opened.
    """
    top = os.fspath(folder).rstrip("/")
    # A list in the place of recursion: an agent decides how deep the folders are.
    waiting = [top]
    while waiting:
        try:
            entries = os.scandir(waiting.pop())
        except OSError:  # removed meanwhile, or closed to this user
            continue
        with entries:
            for entry in entries:
                yield entry
                if entry.is_dir(follow_symlinks=False) and not is_too_deep(entry.path, top):
                    waiting.append(entry.path)


def is_too_deep(path: str, top: str | Path) -> bool:
    """Return whether a folder lies so deep below another one that it is not looked into."""
    below = path[len(os.fspath(top)) :]
    return below.count("/") > MAX_DEPTH or len(os.fsencode(path)) > _MAX_PATH


def make_safe_to_read(folder: Path) -> bool:
    """Make everything below a folder readable, and free of links that lead out.

    Removed are links that lead elsewhere, what is neither file nor folder (a pipe would block a
    reader), and folders that are too deep. Files lose the setuid bit, with which they would run
    with the rights of their owner.

    Returns:
        `bool`: `False` if some folder was too deep to inspect; it has been removed.
    """
    # Open folders that the agent closed, and take away setuid, setgid and sticky bits.
    _run("chmod", "-R", "u+rwX,u-s,g-s,-t", folder)

    # Remove everything that could trap or mislead a later reader of the folder.
    top = folder.resolve()
    is_complete = True
    for entry in walk(folder):
        with contextlib.suppress(FileNotFoundError):
            mode = entry.stat(follow_symlinks=False).st_mode
            if stat.S_ISDIR(mode) and is_too_deep(entry.path, folder):
                _remove_at_once(Path(entry.path), folder)
                is_complete = False
            elif _is_trap(entry.path, mode, top):
                os.unlink(entry.path)
    return is_complete


def make_folder(path: Path) -> None:
    """Create a folder that this process can use, in the place of whatever an agent has put
    there.
    """
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        path.mkdir()
    path.chmod(0o700)


def _is_trap(path: str, mode: int, top: Path) -> bool:
    """Return whether a path is a link that leads out of `top`, or a pipe, a socket or a device."""
    if stat.S_ISLNK(mode):
        return not _stays_in(path, top)
    return not stat.S_ISDIR(mode) and not stat.S_ISREG(mode)


def _stays_in(link: str, top: Path) -> bool:
    try:
        # Find links in a circle, which `realpath` does not refuse.
        os.stat(link)
    except FileNotFoundError:
        # A link to nothing is judged by the place where its target would be.
        pass
    except OSError:  # it leads to itself, or where this process may not look
        return False
    return Path(os.path.realpath(link)).is_relative_to(top)


def remove(path: Path) -> None:
    """Remove a file or a folder, even if an agent took away the right to.

    Never raises: what cannot be removed is logged. After some seconds the removal goes on by
    itself: a hundred thousand folders take minutes on some disks.
    """
    # Forget the removals that have ended since the last call.
    _removals[:] = [removal for removal in _removals if removal.poll() is None]

    # In a process of its own session, which goes on if this process ends first.
    command = 'rm -rf -- "$1" || { chmod -R u+rwX -- "$1"; rm -rf -- "$1"; }'
    removal = subprocess.Popen(
        ["sh", "-c", command, "sh", os.fspath(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        if removal.wait(_SECONDS_TO_REMOVE) != 0:
            logger.warning("%s could not be removed", path)
    except subprocess.TimeoutExpired:
        _removals.append(removal)


_removals: list[subprocess.Popen[bytes]] = []


def _remove_at_once(path: Path, folder: Path) -> None:
    """Remove a folder that an agent left below `folder`. It is gone from its place at once."""
    # A rename is instant, however much the folder holds.
    aside = Path(tempfile.mkdtemp(dir=folder.parent))
    path.rename(aside / "removed")
    remove(aside)


def give_to(user: int, folder: Path) -> None:
    """Make a user the owner of a folder and of everything in it."""
    _run("chown", "-hR", f"{user}:{user}", folder)


def _run(tool: str, *arguments: str | Path) -> bool:
    """Return whether a command of the system succeeds. Its last argument is a path."""
    *options, path = map(str, arguments)
    completed = subprocess.run(
        [tool, *options, "--", path], stdin=subprocess.DEVNULL, capture_output=True
    )
    return completed.returncode == 0


# ---- what a row puts into a folder ----


def fill_folder(folder: Path, files: Any, source: str | None) -> None:
    """Write files of a row into a folder.

    What an agent left at their paths goes, links that lead elsewhere too.

    Args:
        folder (`Path`): An existing folder.
        files (`dict`, `str` or `None`): Texts by path; or the path of a folder or of a git bundle.
        source (`str`, *optional*): The folder that such a path must lie in. A row comes with a data
            set, perhaps from elsewhere: without a source it may name no path of this machine.

    Raises:
        [`ServerFailed`]: They cannot be written, or the row does not say what they are.
    """
    try:
        if isinstance(files, Mapping):
            _write_texts(folder, files)
        elif files is not None:
            _copy_files(folder, _path_in_source(files, source))
    except (OSError, ValueError) as error:  # no room, or a name with a zero byte
        raise ServerFailed(f"the row's files cannot be written: {error}") from error


def _write_texts(folder: Path, files: Mapping[Any, Any]) -> None:
    for name, text in files.items():
        if text is None:  # a table has every row's names in each row
            continue
        content = text if isinstance(text, bytes) else str(text).encode()
        _path_in(folder, str(name)).write_bytes(content)


def source_path(files: Any, source: str | None) -> Path | None:
    """Return the path of this machine that a row's files name; `None` if they name none that is
    allowed.
    """
    with contextlib.suppress(ServerFailed, OSError, ValueError):
        if files is not None and not isinstance(files, Mapping):
            return _path_in_source(files, source)
    return None


def _path_in_source(files: Any, source: str | None) -> Path:
    quoted_files = repr(files)[:80]
    if not isinstance(files, str | Path):
        raise ServerFailed(
            "the row's files are neither texts by path nor the path of a folder or git bundle: "
            f"{quoted_files}"
        )
    if source is None:
        raise ServerFailed(
            f"the row's files are a path, {quoted_files}: say with Workspace(source=FOLDER) in "
            "which folder such paths lie"
        )

    # Resolve links before the comparison, so that none leads out of the source.
    top = Path(source).expanduser().resolve()
    path = Path(top, Path(files).expanduser()).resolve()
    if not path.is_relative_to(top):
        raise ServerFailed(
            f"the row's files are a path outside of the workspace's source {top}: {quoted_files}"
        )
    if not path.exists():
        raise ServerFailed(f"the row's files are a path that does not exist: {path}")
    return path


def _copy_files(folder: Path, path: Path) -> None:
    """Copy a folder of the user's, or clone a git bundle."""
    if path.is_dir():
        for parent, _, names in os.walk(path):
            for name in names:
                _copy_file(Path(parent, name), path, folder)
    elif any(folder.iterdir()):  # git clones only into an empty folder
        # Clone elsewhere, and copy the clone's files over those that are there.
        with tempfile.TemporaryDirectory(dir=folder.parent) as clone:
            _copy_files(Path(clone), path)
            shutil.rmtree(Path(clone, ".git"))
            _copy_files(folder, Path(clone).resolve())
    else:
        command = ["git", "clone", "--quiet", "--", str(path), str(folder)]
        cloned = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if cloned.returncode:
            raise ServerFailed(
                f"the row's git bundle {path} cannot be cloned: {cloned.stderr.strip()[-200:]}"
            )


def _copy_file(file: Path, top: Path, folder: Path) -> None:
    """Copy a file from below `top` to the same place below `folder`; of a link, the file that it
    leads to.
    """
    if not file.resolve().is_relative_to(top):
        raise ServerFailed(f"the row's files have a link that leads out of their folder: {file}")
    if file.is_file():
        target = _path_in(folder, str(file.relative_to(top)))
        shutil.copyfile(file, target)
        # It keeps its permissions, without setuid; its owner can always read and write it.
        target.chmod(stat.S_IMODE(file.stat().st_mode) & 0o777 | stat.S_IRUSR | stat.S_IWUSR)


def _path_in(folder: Path, name: str) -> Path:
    """Return a path in a folder that can be written, with no link on the way."""
    parts = Path(name).parts
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise ServerFailed(f"the row has a file {name!r}: its path must lie in the folder")

    # Replace links and files by folders on the way down: a link could lead anywhere.
    path = folder
    for part in parts[:-1]:
        path = path / part
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            path.unlink()
        path.mkdir(exist_ok=True)

    # Make room for the file itself.
    path = path / parts[-1]
    if path.is_dir() and not path.is_symlink():
        _remove_at_once(path, folder)
    else:
        path.unlink(missing_ok=True)
    return path
