"""Starts a training program as `accelerate launch` does, with exit status and Ctrl-C passed
through.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType


def launch(method: str, arguments: Sequence[str], accelerate_config: Path | None = None) -> int:
    """Run a training program on as many processes as accelerate is configured for.

    Args:
        method (`str`): `prompt-r1`, `espl` or `agent`.
        arguments (`Sequence[str]`): For the program.
        accelerate_config (`Path`, *optional*): As of `accelerate launch --config_file`. By default
            what `accelerate config` has saved, else every GPU of this machine, or its CPU.

    Returns:
        `int`: The exit status of the program, of the first process that failed.

    Raises:
        `ValueError`: If there is no such configuration.
    """
    launch_options = _launch_options(accelerate_config)
    import psutil
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun would end its processes 30 s after Ctrl-C, in the middle of a step; so we forward it.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGHUP,SIGQUIT")
    module = f"{__package__}.train_program"
    parsed = launch_command_parser().parse_args(
        [*launch_options, "--module", module, method, *arguments]
    )

    def forward_interrupt(number: int, frame: FrameType | None) -> None:
        """Send Ctrl-C to the processes of the job, even if this one got SIGTERM: it would leave
        them running without it. One in the terminal's group gets it twice and handles it once.
        Imports nothing: a second signal may interrupt the handler of the first.
        """
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGINT)

    # Handlers are replaced only while the job runs.
    previous_handlers = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        previous_handlers[number] = signal.signal(number, forward_interrupt)
    try:
        launch_command(parsed)
    except subprocess.CalledProcessError as error:
        return _shell_status(error.returncode)
    except ChildFailedError as error:
        # Processes that failed later may have done so because of the first one.
        _, failure = error.get_first_failure()
        return _shell_status(failure.exitcode)
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
    return 0


def _launch_options(config: Path | None) -> list[str]:
    """The options of `accelerate launch` that say where to run."""
    if config is not None:
        if not config.is_file():
            raise ValueError(
                f"{config} does not exist: make one with `accelerate config --config_file {config}`"
            )
        return ["--config_file", str(config)]
    import torch
    from accelerate.commands.config import default_config_file

    # accelerate finds its own default file by itself.
    if Path(default_config_file).is_file():
        return []

    # All values are given, because accelerate warns of each one that is not.
    gpus = torch.cuda.device_count()
    options = ["--num_processes", str(max(gpus, 1)), "--num_machines", "1"]
    options += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    if gpus > 1:
        options.append("--multi_gpu")
    return options


def _shell_status(code: int) -> int:
    """The exit status as in a shell: 128 plus the signal that ended the process."""
    return 128 - code if code < 0 else code
