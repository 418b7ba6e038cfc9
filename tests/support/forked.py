"""A process that has imported what training needs, and forks the processes of each job: importing
takes most of them longer than their work.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

BEFORE_TRL = ("datasets", "deepspeed", "peft", "transformers.trainer", "accelerate.data_loader")
ALL = (*BEFORE_TRL, "trl", "agentic_prompting.trainers", "agentic_prompting.llm.openai_http")

_servers: dict[tuple[str, ...], subprocess.Popen[str]] = {}


def forked(
    script: Path,
    arguments: list[str],
    processes: int,
    log: Path,
    timeout: float,
    group: bool = True,
    imported: tuple[str, ...] = ALL,
) -> list[int]:
    """Run `script` in `processes` processes that find each other as under torchrun; none of them
    imports what is slow.

    Args:
        script (`Path`): Run as `__main__`.
        arguments (`list[str]`): Its `sys.argv[1:]`.
        processes (`int`): Number of processes.
        log (`Path`): The file for all that they print.
        timeout (`float`): Seconds until they are killed; infinity is never.
        group (`bool`): Whether they are a group; `False` for one process on its own.
        imported (`tuple`): The modules that are there already.

    Returns:
        `list[int]`: Their exit codes; negative: the signal that ended a process.
    """
    server = started(imported)
    assert server.stdin is not None and server.stdout is not None
    job = {"script": str(script), "arguments": arguments, "log": str(log), "timeout": timeout}
    server.stdin.write(json.dumps({**job, "processes": processes, "group": group}) + "\n")
    server.stdin.flush()
    codes: list[int] = json.loads(server.stdout.readline())
    return codes


def started(imported: tuple[str, ...] = ALL) -> subprocess.Popen[str]:
    """The process that forks, once it has imported everything: for whoever takes the time of a job."""
    if imported not in _servers or _servers[imported].poll() is not None:
        paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
        _servers[imported] = subprocess.Popen(
            [sys.executable, __file__, *imported],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        )
        ready = _servers[imported].stdout
        assert ready is not None and ready.readline() == "ready\n"
    return _servers[imported]


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import prints is no answer
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_played(**json.loads(line))), file=answers, flush=True)


def _played(
    script: str, arguments: list[str], processes: int, log: str, timeout: float, group: bool
) -> list[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        variables = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "WORLD_SIZE": str(processes),
            "LOCAL_WORLD_SIZE": str(processes),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
        }
        child = os.fork()
        if child == 0:
            _become(script, arguments, log, variables if group else {})
        children.append(child)
    deadline = time.monotonic() + timeout
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in set(children) - set(codes):
            ended_child, status = os.waitpid(child, os.WNOHANG)
            if ended_child:
                codes[child] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[child] for child in children]


def _become(script: str, arguments: list[str], log: str, variables: dict[str, str]) -> None:
    """The forked child's whole life."""
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ |= variables
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())  # torch's names the process
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
