"""A filter of system calls for `bwrap --seccomp`, as a program of classic BPF (see the kernel's
seccomp(2)).

The namespaces of a sandbox do not cover all of the kernel's interfaces. The filter refuses those
which reach past them (keyrings, the kernel's log, vsock), which hold memory that belongs to no
process, and which most exploits of the kernel start from. Everything else is allowed. It is written
out here because it is 40 lines: the libraries for it need the system's libseccomp.
"""

from __future__ import annotations

import errno
import os
import platform
import struct
from dataclasses import dataclass

# Operations of classic BPF.
_LOAD = 0x20  # load a 32-bit word of `struct seccomp_data`
_JUMP_IF_EQUAL = 0x15
_JUMP_IF_AT_LEAST = 0x35
_JUMP_IF_ANY_BIT = 0x45
_RETURN = 0x06

# Offsets in `struct seccomp_data`. Arguments have 64 bits; the lower half comes first on both
# machines below.
_NUMBER = 0
_MACHINE = 4
_FIRST_ARGUMENT = 16

_ALLOW = 0x7FFF0000
_FAIL_WITH = 0x00050000
_X32 = 0x40000000  # numbers of x86-64's second interface, with 32-bit pointers
_NEW_USER_NAMESPACE = 0x10000000
_FAMILIES = (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink

# "No such call" where programs have a fallback for older kernels, else "not permitted".
_UNKNOWN = (
    "memfd_create",
    "memfd_secret",
    "io_uring_setup",
    "io_uring_enter",
    "io_uring_register",
    "clone3",
    "shmget",
    "mq_open",
)
_REFUSED = (
    "unshare",
    "setns",
    "add_key",
    "request_key",
    "keyctl",
    "bpf",
    "perf_event_open",
    "userfaultfd",
    "syslog",
)


@dataclass(frozen=True)
class Machine:
    """The facts about a processor that the filter needs: its id (`AUDIT_ARCH_...`) and the numbers
    of system calls.
    """

    id: int
    calls: dict[str, int]


_NEWER_CALLS = {  # the same on all machines
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "clone3": 435,
    "memfd_secret": 447,
}
MACHINES = {
    "x86_64": Machine(
        0xC000003E,
        {
            "shmget": 29,
            "socket": 41,
            "clone": 56,
            "syslog": 103,
            "mq_open": 240,
            "add_key": 248,
            "request_key": 249,
            "keyctl": 250,
            "unshare": 272,
            "perf_event_open": 298,
            "setns": 308,
            "memfd_create": 319,
            "bpf": 321,
            "userfaultfd": 323,
            **_NEWER_CALLS,
        },
    ),
    "aarch64": Machine(
        0xC00000B7,
        {
            "unshare": 97,
            "syslog": 116,
            "mq_open": 180,
            "shmget": 194,
            "socket": 198,
            "add_key": 217,
            "request_key": 218,
            "keyctl": 219,
            "clone": 220,
            "perf_event_open": 241,
            "setns": 268,
            "memfd_create": 279,
            "bpf": 280,
            "userfaultfd": 282,
            **_NEWER_CALLS,
        },
    ),
}


def is_supported() -> bool:
    """Return whether there is a filter for this machine."""
    return platform.machine() in MACHINES


def system_call_filter() -> bytes:
    """Return the filter for this machine, as `bwrap --seccomp` reads it."""
    machine = MACHINES[platform.machine()]
    program = [
        # A call through another interface (32-bit programs) has other numbers: none is allowed.
        _step(_LOAD, _MACHINE),
        _step(_JUMP_IF_EQUAL, machine.id, if_true=1),
        _fail(errno.ENOSYS),
        _step(_LOAD, _NUMBER),
        _step(_JUMP_IF_AT_LEAST, _X32, if_false=1),
        _fail(errno.ENOSYS),
    ]

    # Compare the number loaded above with each call; another number skips the refusal.
    for name in _UNKNOWN:
        program += [_step(_JUMP_IF_EQUAL, machine.calls[name], if_false=1), _fail(errno.ENOSYS)]
    for name in _REFUSED:
        program += [_step(_JUMP_IF_EQUAL, machine.calls[name], if_false=1), _fail(errno.EPERM)]

    # A new process may not be in a user namespace of its own, in which it would have all
    # capabilities.
    program += [
        _step(_JUMP_IF_EQUAL, machine.calls["clone"], if_false=4),
        _step(_LOAD, _FIRST_ARGUMENT),
        _step(_JUMP_IF_ANY_BIT, _NEW_USER_NAMESPACE, if_false=1),
        _fail(errno.EPERM),
        _step(_RETURN, _ALLOW),
    ]
    # Sockets of the usual families alone: vsock, for example, reaches the host of a virtual
    # machine.
    program += [_step(_JUMP_IF_EQUAL, machine.calls["socket"], if_true=1), _step(_RETURN, _ALLOW)]
    program += [_step(_LOAD, _FIRST_ARGUMENT)]
    for family in _FAMILIES:
        program += [_step(_JUMP_IF_EQUAL, family, if_false=1), _step(_RETURN, _ALLOW)]
    program += [_fail(errno.EAFNOSUPPORT)]
    return b"".join(program)


def open_filter() -> int:
    """Return a descriptor from which the filter can be read once."""
    reader, writer = os.pipe()
    try:
        # The filter fits into a pipe's buffer, so the write does not wait for a reader.
        os.write(writer, system_call_filter())
    finally:
        os.close(writer)
    return reader


def _step(operation: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Encode an instruction; a jump says how many instructions it skips."""
    return struct.pack("HBBI", operation, if_true, if_false, value)


def _fail(error: int) -> bytes:
    return _step(_RETURN, _FAIL_WITH | error)
