"""A command that tries what it should not be able to, and prints what happened.

It opens files and writes none.
"""

import contextlib
import ctypes
import errno
import json
import os
import socket
import sys
import urllib.request

LIBC = ctypes.CDLL(None, use_errno=True)
NEW_USER = 0x10000000
NEW_NAMESPACE = 0x20000
# numbers of x86-64, and a family
SHARED_MEMORY_GET = 29
KEYCTL = 250
SOCKET_VSOCK = 40
with open(sys.argv[1]) as file:
    ASKED = json.load(file)


def can_open(path, flags=os.O_WRONLY):
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK))
        return True
    except OSError:
        return False


def is_readable(path):
    """Whether there is a file that can be read, or a folder that is not empty."""
    return bool(os.listdir(path)) if os.path.isdir(path) else can_open(path, os.O_RDONLY)


def error_of(call):
    ctypes.set_errno(0)
    return 0 if call() >= 0 else ctypes.get_errno()


def answers(address, family=socket.AF_UNIX):
    try:
        with socket.socket(family) as client:
            client.settimeout(3)
            client.connect(address)
            return True
    except OSError:
        return False


def writable_below(folder):
    paths = (os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names)
    return [path for path in paths if can_open(path)]


def kernel_files():
    """All of /proc but the folders of processes."""
    entries = [
        entry for entry in os.listdir("/proc") if not entry.isdigit() and not entry.endswith("self")
    ]
    files = [f"/proc/{entry}" for entry in entries if os.path.isfile(f"/proc/{entry}")]
    folders = [
        f"/proc/{entry}" for entry in entries if os.path.isdir(f"/proc/{entry}") and entry != "net"
    ]
    return [path for path in files if can_open(path)] + [
        path for folder in folders for path in writable_below(folder)
    ]


def memory_of_no_process():
    held = []
    with contextlib.suppress(OSError):
        held.append(os.memfd_create("x"))
    if os.uname().machine == "x86_64" and LIBC.syscall(SHARED_MEMORY_GET, 0, 4096, 0o1600) >= 0:
        held.append("shmget")
    return held


def places_to_write():
    folders = [
        "/",
        "/usr",
        "/etc",
        "/dev",
        "/run",
        "/home",
        "/root",
        "/proc/sys/kernel",
        "/usr/local/bin",
    ]
    return [folder for folder in folders if os.access(folder, os.W_OK)]


DEVICES = ("sd", "vd", "nvme", "mem", "kvm", "kmsg", "fuse")
with open("/proc/self/status") as file:
    status = dict(line.split(":", 1) for line in file)
seen = {
    "user": os.getuid(),
    "capabilities": [name for name in status if name.startswith("Cap") and int(status[name], 16)],
    "no_new_privileges": status["NoNewPrivs"].strip(),
    "filter": status["Seccomp"].strip(),
    "user_namespace": error_of(lambda: LIBC.unshare(NEW_USER | NEW_NAMESPACE)),
    "kernel_files": kernel_files(),
    "run": os.listdir("/run"),
    "writable": places_to_write(),
    "disks": [name for name in os.listdir("/dev") if name.startswith(DEVICES)],
    "processes": [name for name in os.listdir("/proc") if name.isdigit() and int(name) > 3],
    "readable": [path for path in ASKED["paths"] if is_readable(path)],
    "sockets": [path for path in ASKED["sockets"] if answers(path)],
    "abstract": answers("\0" + ASKED["abstract"]),
    "port": answers(("127.0.0.1", ASKED["port"]), socket.AF_INET),
    "memory": memory_of_no_process(),
    "vsock": error_of(lambda: LIBC.socket(SOCKET_VSOCK, 1, 0)) == errno.EAFNOSUPPORT,
    "keyring": error_of(lambda: LIBC.syscall(KEYCTL, 0, -3, 0))
    if os.uname().machine == "x86_64"
    else errno.EPERM,
    "secrets": [name for name in os.environ if "SECRET" in os.environ[name]],
    "home": os.environ["HOME"],
    "cwd": os.getcwd(),
}
body = json.dumps({"model": "agent", "messages": [{"role": "user", "content": "q"}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
json.load(urllib.request.urlopen(urllib.request.Request(url, body), timeout=30))
print(json.dumps({"answer": "x", "seen": seen}))
