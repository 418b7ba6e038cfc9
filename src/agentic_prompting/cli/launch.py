"""Starting a program of `scripts/` the way `accelerate launch` does, with its exit status and Ctrl-C passed through."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "scripts" / "configs"
"""What the demonstrations run with."""


def launch(program: str, arguments: Sequence[str], accelerate_config: Path | None = None) -> int:
    """Run a program of `scripts/` on as many processes as accelerate is configured for.

    Args:
        program (`str`): Its module in `scripts/`.
        arguments (`Sequence[str]`): For the program.
        accelerate_config (`Path`, *optional*): As of `accelerate launch --config_file`. By default what
            `accelerate config` has saved, else every GPU of this machine, or its CPU.

    Returns:
        `int`: The exit status of the program, of the first process that failed.

    Raises:
        `ValueError`: If there is no such configuration.
    """
    settings = _settings(accelerate_config)
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun would end its processes 30 s after Ctrl-C, in the middle of a step; it is ours to pass on.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGHUP,SIGQUIT")
    module = f"{__package__.rpartition('.')[0]}.scripts.{program}"
    launched = launch_command_parser().parse_args([*settings, "--module", module, *arguments])
    before = signal.signal(signal.SIGINT, _pass_on)
    try:
        launch_command(launched)
    except subprocess.CalledProcessError as error:
        return _status(error.returncode)
    except ChildFailedError as error:
        return _status(error.get_first_failure()[1].exitcode)
    finally:
        signal.signal(signal.SIGINT, before)
    return 0


def _settings(config: Path | None) -> list[str]:
    """The options of `accelerate launch` that say where to run."""
    if config is not None:
        if not config.is_file():
            raise ValueError(f"{config} does not exist: make one with `accelerate config --config_file {config}`")
        return ["--config_file", str(config)]
    import torch
    from accelerate.commands.config import default_config_file

    if Path(default_config_file).is_file():
        return []
    gpus = torch.cuda.device_count()
    # Said in full, or accelerate warns of each value that was not.
    plain = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [*(["--multi_gpu"] if gpus > 1 else []), "--num_processes", str(max(gpus, 1)), *plain]


def _pass_on(*signal_and_frame: Any) -> None:
    """Send it to the processes of the job. One in the terminal's own group gets it twice, and takes it as one."""
    import psutil

    for child in psutil.Process().children():
        child.send_signal(signal.SIGINT)


def _status(code: int) -> int:
    """As a shell has it: 128 and the signal that ended the process."""
    return 128 - code if code < 0 else code
