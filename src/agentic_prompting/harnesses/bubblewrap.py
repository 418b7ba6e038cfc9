"""[`BubblewrapSandbox`]: the command line of `bwrap` that confines the command of one rollout.

The sandbox has the system's programs, the installation of the command's own program, the paths that
the command names, and a `/tmp` with the rollout's home and work folder. Only `/tmp` can be written.
Everything else of the file system is not there: other rollouts, the run's output, data sets,
sockets of services.

A trainer that runs as root starts the command as another user. The reason is that root without
capabilities still owns root's files: the kernel's settings below `/proc`, `/etc/shadow`. Two
`bwrap`s do it: the outer one shows the files (which may lie in root's home), `setpriv` changes the
user, the inner one confines.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from . import seccomp

UNPRIVILEGED_USER = 65534  # runs the commands of a trainer that runs as root
SYSTEM_PATHS = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/etc",
    "/nix/store",
    "/gnu/store",
)

# The parts of an installation below the folder that holds its `bin`.
_PARTS_OF_PROGRAMS = (
    "bin",
    "sbin",
    "shims",
    "lib",
    "lib32",
    "lib64",
    "libexec",
    "versions",
    "pyvenv.cfg",
)
# Not those of a home folder, where they hold a person's files.
_PARTS_OF_DATA = ("include", "share", "etc", "ssl")

# The command must not write these, even if the user may.
_KERNEL_SETTINGS = ("/proc/sys", "/proc/pressure")
_SHARED_MEMORY_BYTES = 2**26  # /dev/shm, as in Docker
_MOST_STEPS = 5  # links and `#!` lines that are followed from a program to its interpreter


@dataclass(frozen=True)
class BubblewrapSandbox:
    """Where a command runs and what it sees.

    Args:
        tmp (`Path`): The folder that the command has as `/tmp`.
        cwd (`str`): Its current directory.
        shows (`Iterable[str]`, *optional*): Files and folders that it can read, at the same paths,
            beside the system's.
        hides (`Iterable[str]`, *optional*): Files and folders in these that it sees empty.
        network (`bool`, *optional*, defaults to `False`): Whether it has the system's network.
        dns_settings (`Path`, *optional*): A `resolv.conf` that takes the place of the system's.
        dns_listener (`Sequence[str]`, *optional*): A command that opens the port of DNS in the
            sandbox's network, and then executes the command that follows, with the descriptor of
            its socket as a last argument.
    """

    tmp: Path
    cwd: str
    shows: Iterable[str] = ()
    hides: Iterable[str] = ()
    network: bool = False
    dns_settings: Path | None = None
    dns_listener: Sequence[str] = ()

    def command_line(self, launcher: Sequence[str], filter_descriptor: int) -> list[str]:
        """Return the command line that runs `launcher` in the sandbox.

        Args:
            launcher (`Sequence[str]`): A command.
            filter_descriptor (`int`): A descriptor of the filter of system calls, which the process
                must inherit.
        """
        confine = ["bwrap", *self._show_files()]
        before: list[str] = []

        # As root, an outer bwrap has already shown the files: the inner one takes over its view.
        if os.geteuid() == 0:
            before = self._change_user()
            confine = ["bwrap", "--ro-bind", "/", "/", "--bind", "/tmp", "/tmp"]
        if self.dns_listener:
            before += self._open_network()
        return [*before, *confine, *self._confine(filter_descriptor), "--", *launcher]

    def _change_user(self) -> list[str]:
        """Return the command in front that shows the files and gives up the rights of root."""
        user = str(UNPRIVILEGED_USER)
        return [
            "bwrap",
            # The namespace ends everything inside with the trainer. The signal for the parent's
            # death alone does not: a change of user clears it.
            *("--unshare-pid", "--die-with-parent"),
            # The files are mounted with root's rights, which can reach below root's home.
            *self._show_files(),
            # The inner bwrap replaces both.
            *("--bind", "/proc", "/proc", "--dev-bind", "/dev", "/dev"),
            # `setpriv` needs these rights to change the user, and loses them by it.
            *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--chdir", "/", "--"),
            *("setpriv", "--reuid", user, "--regid", user, "--clear-groups", "--"),
        ]

    def _open_network(self) -> list[str]:
        """Return the command in front that opens a network, and the port of DNS in it.

        Inside of the sandbox no capability for that is left.
        """
        return [
            *("bwrap", "--unshare-user", "--unshare-net", "--unshare-pid", "--die-with-parent"),
            *("--cap-add", "CAP_NET_BIND_SERVICE", "--dev-bind", "/", "/", "--"),
            *self.dns_listener,
        ]

    def _confine(self, filter_descriptor: int) -> list[str]:
        """Return options for everything but the files."""
        # New namespaces of every kind, and none that the command could open within them.
        arguments = [
            "--unshare-all",
            "--unshare-user",
            "--disable-userns",
            "--die-with-parent",
            "--new-session",
        ]

        # The system's network, or the one that the command in front has opened.
        if self.network or self.dns_listener:
            arguments += ["--share-net"]
        arguments += ["--seccomp", str(filter_descriptor)]

        # The kernel's own file systems: settings read-only, shared memory limited.
        arguments += ["--proc", "/proc"]
        for path in filter(os.path.exists, _KERNEL_SETTINGS):
            arguments += ["--ro-bind", path, path]
        arguments += ["--dev", "/dev", "--size", str(_SHARED_MEMORY_BYTES), "--tmpfs", "/dev/shm"]

        # Read-only but for the writable mounts below: /tmp and shared memory.
        arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", self.cwd]
        return arguments

    def _show_files(self) -> list[str]:
        """Return options for the files.

        A path may lie below another one, shown or hidden: the deeper one counts.
        """
        options = self._option_by_path()
        arguments: list[str] = []
        hidden_paths: list[str] = []

        # From the top down, so that a deeper mount covers the one above it.
        for path in sorted(options, key=lambda path: (path.count("/"), path)):
            option = options[path]
            above = _deepest_above(path, options)
            # Whether the mount above already shows what is really at this path.
            is_visible = above is not None and above != "/tmp" and options[above] == "--ro-bind"
            if option == "--bind":
                arguments += ["--perms", "0755", "--dir", path, "--bind", str(self.tmp), path]
            elif option == "--ro-bind" and not is_visible:
                arguments += _options_to_show(path)
            elif option == "--tmpfs" and is_visible:
                arguments += _options_to_hide(path)
                hidden_paths.append(path)

        # Put the sandbox's DNS server in the place of the system's.
        settings = os.path.realpath("/etc/resolv.conf")
        can_be_replaced = settings.startswith("/etc/") and os.path.exists(settings)
        if self.dns_settings is not None and can_be_replaced:
            arguments += ["--ro-bind", str(self.dns_settings), settings]

        # Hidden folders become read-only last: paths shown within them are mounted by now.
        for path in filter(os.path.isdir, hidden_paths):
            arguments += ["--remount-ro", path]
        return [*arguments, "--perms", "0755", "--dir", "/run"]

    def _option_by_path(self) -> dict[str, str]:
        """Return how each path is mounted: `--ro-bind` (shown), `--tmpfs` (hidden) or `--bind`
        (`/tmp`).
        """
        shown_paths = {*SYSTEM_PATHS, *map(os.path.normpath, self.shows)}
        # On many systems this is a link into /run.
        if self.network:
            shown_paths.add(os.path.realpath("/etc/resolv.conf"))
        options = {path: "--ro-bind" for path in shown_paths if os.path.exists(path)}

        # A hidden path may be reached through a link above a shown one, so real paths are
        # compared.
        real_paths = {path: os.path.realpath(path) for path in options}
        for hidden in map(os.path.realpath, self.hides):
            for path, real_path in real_paths.items():
                if Path(hidden).is_relative_to(real_path):
                    path_in_sandbox = os.path.join(path, os.path.relpath(hidden, real_path))
                    options[os.path.normpath(path_in_sandbox)] = "--tmpfs"

        # A hidden path that does not exist has nothing to cover.
        options = {path: option for path, option in options.items() if os.path.exists(path)}
        return {**options, "/tmp": "--bind"}


@cache
def why_unavailable(network: bool = False) -> str:
    """Return why commands cannot be confined here; empty if they can. Tried once."""
    if shutil.which("bwrap") is None:
        return "there is no program bwrap in PATH"
    if not seccomp.is_supported():
        return f"there is no filter of system calls for this processor ({platform.machine()})"

    # Run an interpreter that does nothing, in the sandbox that a command would get.
    command = [sys.executable, "-I", "-S", "-c", ""]
    filter_descriptor = seccomp.open_filter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            # The unprivileged user of a trainer that runs as root must be able to enter it.
            os.chmod(folder, 0o755)
            sandbox = BubblewrapSandbox(Path(folder), "/tmp", paths_of(command), network=network)
            command_line = sandbox.command_line(command, filter_descriptor)
            completed = subprocess.run(
                command_line, pass_fds=[filter_descriptor], capture_output=True
            )
    finally:
        os.close(filter_descriptor)
    if completed.returncode == 0:
        return ""
    return (
        completed.stderr.decode(errors="replace").strip()
        or f"bwrap ended with {completed.returncode}"
    )


def paths_of(command: Sequence[str]) -> set[str]:
    """Return the paths that a command needs: those that it names, the installation of its program,
    the programs in `PATH`, and this interpreter, in which the launcher runs.

    Args:
        command (`Sequence[str]`): As its user wrote it. Filled with a row, it could name any path.
    """
    # Paths that the command names as words of their own.
    paths = {
        word
        for word in command
        if os.path.isabs(word) and os.path.exists(word) and _may_be_shown(word)
    }

    # This interpreter runs the launcher; the other program is the command's own.
    for program in (sys.executable, shutil.which(command[0])):
        if program is not None:
            paths.update(_paths_of_program(os.path.abspath(program)))

    # An agent calls further programs by name.
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if os.path.isabs(folder) and os.path.isdir(folder):
            paths.add(folder)
            paths.update(_installation_around(folder))
    return {os.path.normpath(path) for path in paths if _may_be_shown(path)}


def _may_be_shown(path: str) -> bool:
    """Return whether a path is of the disk: not everything, and no folder that the sandbox has
    itself.
    """
    if os.path.normpath(path) == "/":
        return False
    return Path(path).parts[1] not in ("proc", "dev", "sys", "run")


def _paths_of_program(program: str, depth: int = 0) -> Iterator[str]:
    """Yield the installations of a program and of what it leads to: the target of a link, the
    interpreter of a script.
    """
    yield program
    yield from _installation_around(os.path.dirname(program))
    if depth == _MOST_STEPS:
        return
    # Follow the link one step at a time: each program on the way has an installation around it.
    if os.path.islink(program):
        target = os.path.join(os.path.dirname(program), os.readlink(program))
        yield from _paths_of_program(os.path.normpath(target), depth + 1)
    # A folder above may be a link, too.
    if (real_path := os.path.realpath(program)) != program:
        yield from _paths_of_program(real_path, _MOST_STEPS)
    if (interpreter := _interpreter_of(program)) is not None:
        yield from _paths_of_program(interpreter, depth + 1)


def _interpreter_of(program: str) -> str | None:
    """Return the interpreter that the first line of a script names."""
    try:
        with open(program, "rb") as file:
            line = os.fsdecode(file.readline(256))
    except OSError:
        return None
    if not line.startswith("#!"):
        return None
    # Without options (`-S`) and variables (`NAME=value`) of `env`.
    words = [
        word
        for word in line.removeprefix("#!").split()
        if not word.startswith("-") and "=" not in word
    ]
    if len(words) > 1 and words[0].endswith("/env"):
        return shutil.which(words[1])
    return words[0] if words and os.path.isabs(words[0]) else None


def _installation_around(folder: str) -> Iterator[str]:
    """Yield the parts of the installation whose programs are in a folder."""
    path = Path(folder)
    if "node_modules" in path.parts:  # of npm: packages find each other there
        end = len(path.parts) - path.parts[::-1].index("node_modules")
        yield str(Path(*path.parts[:end]))

    # Not the home folder itself (~/bin), nor a folder above it: it holds more than programs.
    prefix = path.parent
    home = Path(os.path.expanduser("~"))
    if path.name not in ("bin", "sbin", "shims") or prefix in (home, *home.parents):
        return
    parts = _PARTS_OF_PROGRAMS if prefix == home / ".local" else _PARTS_OF_PROGRAMS + _PARTS_OF_DATA
    for part in parts:
        if (prefix / part).exists():
            yield str(prefix / part)


def _deepest_above(path: str, paths: Collection[str]) -> str | None:
    """Return the deepest of some paths that a path lies in."""
    return next((str(parent) for parent in Path(path).parents if str(parent) in paths), None)


def _options_to_show(path: str) -> list[str]:
    """Return options that show a path, read-only."""
    arguments = _options_to_create_parents(path)
    # /bin and /lib are links into /usr on merged systems, and stay links.
    if path in SYSTEM_PATHS and os.path.islink(path):
        return [*arguments, "--symlink", os.readlink(path), path]
    return [*arguments, "--ro-bind", path, path]


def _options_to_hide(path: str) -> list[str]:
    """Return options that hide a path. A tmpfs covers only folders, so /dev/null covers a file."""
    if os.path.isdir(path):
        return ["--perms", "0755", "--size", "65536", "--tmpfs", path]
    return ["--ro-bind", os.devnull, path]


def _options_to_create_parents(path: str) -> list[str]:
    """Return options that create the folders above a path; those that bwrap creates by itself may
    be closed to others.
    """
    arguments = []
    # From the outermost folder inwards, without the root.
    for parent in reversed(Path(path).parents[:-1]):
        if str(parent) != "/tmp":
            arguments += ["--perms", "0755", "--dir", str(parent)]
    return arguments
