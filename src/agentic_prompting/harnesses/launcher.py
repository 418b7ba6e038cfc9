"""Runs inside the sandbox of a rollout and starts its command; uses the standard library alone.

    python -I -S -c TEXT_OF_THIS_FILE CHANNEL [DNS_SOCKET]    # descriptors
    python -I -S -c TEXT_OF_THIS_FILE listen-dns COMMAND ...  # before the sandbox: opens the port of DNS

CHANNEL is a Unix socket to the trainer. DNS_SOCKET is what `listen-dns` has opened: it adds the
descriptor to the end of its command, which is this program again.

The trainer sends a plan (a line of JSON). The launcher opens the sockets of the rollout's network,
sends them to the trainer, and waits for a byte: only then does the command start. Its text is
passed, not its path, because the sandbox does not have the package.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import sys
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
LIMITS = {
    "core": resource.RLIMIT_CORE,
    "data": resource.RLIMIT_DATA,
    "file_bytes": resource.RLIMIT_FSIZE,
    "open_files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
}


def main() -> None:
    """Start the command of a plan.

    The plan has `command`, `limits` (by the names in `LIMITS`), `port` (0: the network is not the
    rollout's own), and `supervises` (whether this process has to end what the command leaves
    behind).
    """
    channel, *dns_sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    plan = read_plan(channel)

    # Open the sockets and send them to the trainer, which is outside of this network.
    sockets = [*listen_for_gateway(plan["port"]), *dns_sockets]
    descriptors = [network_socket.fileno() for network_socket in sockets]
    if descriptors:
        socket.send_fds(channel, [b"ready"], descriptors)
    else:
        channel.sendall(b"ready")

    # The trainer puts this process under its limits before it answers.
    if not channel.recv(1):  # the trainer has given up
        sys.exit(1)

    # The command inherits none of the sockets.
    for inherited_socket in (channel, *sockets):
        inherited_socket.close()
    if plan["supervises"]:
        supervise(plan)
    execute(plan)


def read_plan(channel: socket.socket) -> dict[str, Any]:
    """Return the plan that the trainer sends."""
    parts: list[bytes] = []
    # A stream has no messages: read up to the end of the line.
    while not parts or not parts[-1].endswith(b"\n"):
        part = channel.recv(65536)
        if not part:
            sys.exit(1)
        parts.append(part)
    plan: dict[str, Any] = json.loads(b"".join(parts))
    return plan


def listen_for_gateway(port: int) -> list[socket.socket]:
    """Listen at the address of the gateway; nowhere if the port is 0."""
    if not port:
        return []
    return [socket.create_server(("127.0.0.1", port), backlog=128)]


def listen_for_dns(command: list[str]) -> NoReturn:
    """Open the port of DNS, and execute a command that inherits the socket.

    The socket's descriptor becomes the command's last argument. A number fixed in advance could be
    that of another descriptor which the command inherits.
    """
    dns_socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    dns_socket.bind(("127.0.0.1", 53))
    dns_socket.set_inheritable(True)
    # The command does not get the capability for this port.
    call_prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    os.execvp(command[0], [*command, str(dns_socket.fileno())])


def call_prctl(option: int, value: int) -> None:
    """Call Linux's prctl; elsewhere do nothing."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def execute(plan: dict[str, Any]) -> NoReturn:
    """Replace this process by the command, under its limits."""
    # A limit can be lowered by anyone, and raised above the hard one only by root.
    for name, limit in plan["limits"].items():
        _, hard = resource.getrlimit(LIMITS[name])
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(LIMITS[name], (limit, limit))
    # Python ignores these two signals; a command expects the default.
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    command = plan["command"]
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        os._exit(127)


def supervise(plan: dict[str, Any]) -> None:
    """Run the command as a child, and end what it started when it ends, or when the trainer does.

    Only where there is no sandbox: in one the kernel does this. Returns in the child.
    """
    trainer = os.getppid()
    call_prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of this process
    call_prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, end_children)
    # The trainer ended before its end was watched: no signal will come.
    if os.getppid() != trainer:
        sys.exit(1)

    # The child becomes the command, without this process's handler.
    command = os.fork()
    if command == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return

    # Reap orphans until the command itself ends; like a shell, add 128 to a signal's number.
    while True:
        process, status = os.wait()
        if process == command:
            code = os.waitstatus_to_exitcode(status)
            end_children(code=code if code >= 0 else 128 - code)


def end_children(*_: object, code: int = 143) -> NoReturn:
    """Kill the processes below this one until there are none, then exit."""
    while True:
        # Orphans of a killed process become children of this one: look again after each wait.
        for process in children():
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            os._exit(code)


def children() -> list[int]:
    """Return the direct children of this process, by Linux's `/proc`; elsewhere none is found."""
    try:
        entries = os.listdir("/proc")
    except OSError:
        return []
    return [int(entry) for entry in entries if entry.isdigit() and parent_of(entry) == os.getpid()]


def parent_of(process: str) -> int | None:
    """Return the parent of a process; `None` if it has ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # The name of the program, in brackets, may hold spaces: count the fields after it.
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return None


if __name__ == "__main__":
    if sys.argv[1] == "listen-dns":
        listen_for_dns(sys.argv[2:])
    main()
