"""Starts a command with limits, in namespaces of its own where the system allows it: a script of the standard library.

    python -I -S confine.py PLAN            # JSON: see `main`

The command sees the file system read-only but for a `/tmp` of its own, in which its home and work folder are, at the
same path for every rollout; no process but its own; and a network of one address, on which the gateway listens through
a socket that is sent back. It has no capabilities and can get none. When it ends, or this process or the trainer does,
the kernel ends every process that it has started.

Nothing here is a concept of the library: it is run by path, so that a rollout does not import the package (a second).
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import struct
import sys
from typing import Any, NoReturn

_NEW = {"user": 0x10000000, "mount": 0x00020000, "process": 0x20000000, "ipc": 0x08000000, "network": 0x40000000}
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000
_NOSUID_NODEV_NOEXEC = 2 | 4 | 8
_RDONLY, _AT_FDCWD, _AT_RECURSIVE, _MOUNT_SETATTR = 1, -100, 0x8000, 442
_PDEATHSIG, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 24, 38
_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE, "file_bytes": resource.RLIMIT_FSIZE, "processes": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}  # fmt: skip
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    one, two, three = (None if text is None else text.encode() for text in (source, target, kind))
    _checked(_libc.mount(one, two, three, ctypes.c_ulong(flags), None), f"mount {target}")


def _set_read_only(path: str, on: bool, flags: int = 0) -> None:
    attributes = struct.pack("QQQQ", _RDONLY if on else 0, 0 if on else _RDONLY, 0, 0)
    made = _libc.syscall(_MOUNT_SETATTR, _AT_FDCWD, path.encode(), flags, attributes, len(attributes))
    _checked(made, f"mount_setattr {path}")


def _die_with_parent(parent: int) -> None:
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _enter(network: bool) -> None:
    """Namespaces of its own, with the same user and group."""
    user, group = os.getuid(), os.getgid()
    kinds = [flag for name, flag in _NEW.items() if name != "network" or not network]
    _checked(_libc.unshare(sum(kinds)), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _build_file_system(plan: dict[str, Any]) -> None:
    """`/tmp` is the rollout's; what the command needs of the old one is shown in it; what is hidden is empty."""
    _mount(None, "/", None, _RECURSIVE | _PRIVATE)
    own, empty = plan["tmp"], plan["empty"]
    for path in plan["shown"]:
        target = own + path.removeprefix("/tmp")
        os.makedirs(target, exist_ok=True) if os.path.isdir(path) else _touch(target)
        _mount(path, target, None, _BIND | _RECURSIVE)
    for path in plan["hidden"]:
        _mount(empty if os.path.isdir(path) else os.devnull, path, None, _BIND)
    _mount(own, "/tmp", None, _BIND | _RECURSIVE)
    _set_read_only("/", True, _AT_RECURSIVE)
    _set_read_only("/tmp", False)


def _touch(path: str) -> None:
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "w").close()


def _listen(port: int) -> socket.socket:
    """The one address that there is."""
    listener = socket.socket()
    request = struct.pack("16sh", b"lo", 0x1 | 0x40)  # up and running
    fcntl.ioctl(listener, 0x8914, request)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener


def _listen_for_names() -> socket.socket:
    """Queries for names, to whichever server: every address is then one of this network, which has no other machine."""
    header = struct.pack("=IHHII", 36, 24, 0x1 | 0x4 | 0x400, 1, 0)  # a new route, to be confirmed
    route = struct.pack("=BBBBBBBBI", socket.AF_INET, 0, 0, 0, 255, 3, 254, 2, 0)  # of all addresses, local
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(header + route + struct.pack("=HHI", 8, 4, socket.if_nametoindex("lo")))
        (error,) = struct.unpack_from("=i", kernel.recv(4096), 16)
    if error:
        raise OSError(-error, f"route: {os.strerror(-error)}")
    names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    names.bind(("0.0.0.0", 53))
    return names


def _exec(plan: dict[str, Any]) -> NoReturn:
    for name, most in plan["limits"].items():
        hard = resource.getrlimit(_LIMITS[name])[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(_LIMITS[name], (most, most))
    os.chdir(plan["cwd"])
    for number in (signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(plan["command"][0], plan["command"])
    except OSError as error:
        print(f"{plan['command'][0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


def _first_process(plan: dict[str, Any]) -> NoReturn:
    """The first process of a namespace: starts the command, reaps what it leaves, and ends everything with itself."""
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    if plan["hides_processes"]:
        _mount("proc", "/proc", "proc", _NOSUID_NODEV_NOEXEC)
    command = os.fork()
    if command == 0:
        os.setsid()
        for capability in range(64):
            _libc.prctl(_CAPBSET_DROP, capability, 0, 0, 0)
        _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
        _exec(plan)
    while True:
        ended, status = os.wait()
        if ended == command:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF if os.WIFEXITED(status) else 128 + os.WTERMSIG(status))


def main(plan: dict[str, Any]) -> None:
    """Start the command of a plan, and end with its exit code.

    Args:
        plan (`dict`): `command`, `cwd`, `parent` (the id of the process that must live), `limits` by name; and for
            namespaces (`namespaces` is true) `tmp` (the folder shown as `/tmp`), `shown`, `hidden`, `empty` (a folder),
            `network` (whether it keeps the system's), `hides_processes`, `port`, `lists_names`, and `answer` (the
            descriptor of a Unix socket that gets the listening one, and that which hears of names).
    """
    _die_with_parent(plan["parent"])
    if not plan["namespaces"]:
        _exec(plan)
    _enter(plan["network"])
    _build_file_system(plan)
    if not plan["network"]:
        with socket.socket(fileno=plan["answer"]) as answer, _listen(plan["port"]) as listener:
            names = [_listen_for_names()] if plan["lists_names"] else []
            socket.send_fds(answer, [b"x"], [one.fileno() for one in (listener, *names)])
    first = os.fork()
    if first == 0:
        _first_process(plan)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(first, signal.SIGKILL))
    os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)


if __name__ == "__main__":
    try:
        main(json.loads(sys.argv[1]))
    except OSError as failure:
        print(f"confine: {failure}", file=sys.stderr)
        sys.exit(125)
