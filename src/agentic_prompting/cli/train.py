"""`agentic-prompting train` and `demo`: the training programs, started the way `accelerate launch` does, with exit
status and Ctrl-C passed through. And what the programs do alike: read options, train, and end with a line and a status.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .options import option, show_help

if TYPE_CHECKING:
    from transformers import Trainer

CONFIGS = Path(__file__).parent / "configs"
"""What the demonstrations run with."""

Method = Literal["prompt-r1", "espl", "prorefine"]
Config = Annotated[Path | None, option("YAML file with options of the program; those given here win over it.")]
AccelerateConfig = Annotated[
    Path | None,
    option("As of accelerate launch. Default: your `accelerate config`, else every GPU, or the CPU."),
]

_PROGRAMS = {"prompt-r1": ("train_prompt_r1", "prompt_r1.yaml"), "espl": ("train_espl", "espl.yaml")}
INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it."""

_FINISHED = "summary.json"
# Everything else is an option of the program, `--help` too.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

train = typer.Typer(
    help="Train through accelerate. Options that are not listed are the program's own: train METHOD --help shows them.",
    invoke_without_command=True,
    callback=show_help,
    rich_markup_mode=None,
)


@train.command("prompt-r1", context_settings=_PASSED_ON)
def prompt_r1(context: typer.Context, config: Config = None, accelerate_config: AccelerateConfig = None) -> int:
    """Train a small LLM to prompt a large one (multi-turn GRPO)."""
    return _train(context, "train_prompt_r1", config, accelerate_config)


@train.command("espl", context_settings=_PASSED_ON)
def espl(context: typer.Context, config: Config = None, accelerate_config: AccelerateConfig = None) -> int:
    """Train under a population of system prompts that evolves."""
    return _train(context, "train_espl", config, accelerate_config)


def _train(context: typer.Context, program: str, config: Path | None, accelerate_config: Path | None) -> int:
    if {"--help", "-h"} & set(context.args):
        return _help(context, program)
    if config is not None and not config.is_file():
        raise ValueError(f"{config} does not exist; --config takes a YAML file such as examples/configs/qwen3_4b.yaml")
    if config is None and not context.args:
        raise ValueError(f"say what to train: {context.command_path} --config FILE; --help shows every option")
    return launch(program, [*(["--config", str(config)] if config else []), *context.args], accelerate_config)


def _help(context: typer.Context, program: str) -> int:
    """Our own options, then the program's."""
    from trl import TrlParser

    print(context.get_help())
    print(f"\nOptions of the program ({program}), on the command line or in the file of --config:\n")
    script = import_module(f".{program}", __package__)
    TrlParser(script.ARGUMENTS, prog=context.command_path).print_help()
    return 0


def demo(
    context: typer.Context,
    method: Annotated[Method, typer.Option(help="What to show. Minutes on two CPU cores; prorefine: seconds.")] = (
        "prompt-r1"
    ),
    output_dir: Annotated[Path, typer.Option(help="Folder to write to.")] = Path("runs/demo"),
) -> int:
    """See a method work in the sandbox: a tiny policy, a scripted large LLM; no key, no network.

    Interrupted, the same command goes on. Other options are those of the method's program, such as --max-steps 5.
    """
    if (output_dir / _FINISHED).exists():
        raise ValueError(
            f"{output_dir} holds a finished run: look at it with `agentic-prompting report {output_dir}`, or take "
            "another folder with --output-dir"
        )
    if method == "prorefine":
        from .refine import main as refine

        refine(["--output_dir", str(output_dir), *context.args])
        print(f"\nwritten to {output_dir}: a file of results for each setting")
    else:
        program, config = _PROGRAMS[method]
        # As `make demo`: one thread, and none that spins while it waits. Beside other work two take far longer.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        options = ["--config", str(CONFIGS / config), "--output_dir", str(output_dir), *_resumed(output_dir)]
        status = launch(program, [*options, *context.args], CONFIGS / "single.yaml")
        if status:
            return status
    print(f"next:  agentic-prompting report {output_dir}")
    if method == "prompt-r1":
        question = "what is the currency of the country whose capital is Nairobi ?"
        print(f'       agentic-prompting ask "{question}" --run {output_dir} --sandbox')
    if method == "prorefine":
        print("       agentic-prompting refine --sandbox")
    return 0


def _resumed(folder: Path) -> list[str]:
    """The option that goes on from the newest checkpoint, where a run was interrupted."""
    steps = [int(path.name.removeprefix("checkpoint-")) for path in folder.glob("checkpoint-*")]
    return ["--resume_from_checkpoint", str(folder / f"checkpoint-{max(steps)}")] if steps else []


def launch(program: str, arguments: Sequence[str], accelerate_config: Path | None = None) -> int:
    """Run a program on as many processes as accelerate is configured for.

    Args:
        program (`str`): Its module in this room.
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
    launched = launch_command_parser().parse_args([*settings, "--module", f"{__package__}.{program}", *arguments])
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


# What the programs do alike -------------------------------------------------------------------------------------------


def parse(kinds: Sequence[type], arguments: Sequence[str] | None) -> tuple[Any, ...]:
    """One object of each kind, from the command line or from `arguments`, and from the file of `--config`."""
    from trl import TrlParser

    from ..trainers.callbacks import quiet_libraries

    # About transformers' own renamed arguments, which TRL still sets under the old names; nothing a user can act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    quiet_libraries()
    return TrlParser(kinds).parse_args_and_config(arguments)


def run_training(trainer: Trainer) -> None:
    """Train, or go on from `args.resume_from_checkpoint`; Ctrl-C ends it with a checkpoint.

    `--resume_from_checkpoint true` is the newest checkpoint, and the beginning where there is none. The log of the run
    is in the output folder afterwards, as `trainer_state.json`.

    Raises:
        [`TrainingInterrupted`]: After Ctrl-C.
        `SystemExit`: With status 1 and the reason, where training stopped because of the environment.
    """
    from ..trainers import TrainingInterrupted, TrainingStopped, checkpoint_on_interrupt

    given = trainer.args.resume_from_checkpoint  # text, as it stands on a command line
    resumed = {"true": True, "false": None}.get(str(given).lower(), given)
    try:
        with checkpoint_on_interrupt(trainer):
            trainer.train(resume_from_checkpoint=resumed)
    except TrainingStopped as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except TrainingInterrupted:
        end(trainer)
        raise
    trainer.save_state()


def end(trainer: Trainer) -> None:
    """Close trackers and the process group: without it gloo may abort at exit."""
    trainer.accelerator.end_training()


def run_script(main: Callable[[], object]) -> None:
    """Run a program's `main`: no traceback for what the user can mend.

    Args:
        main (`Callable`): Called without arguments.

    Raises:
        `SystemExit`: With status 1 and a line about a bad option, file or endpoint; with 130 after Ctrl-C.
    """
    from ..llm import LLMError

    try:
        main()
    except (ValueError, FileNotFoundError, LLMError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except KeyboardInterrupt as interrupted:
        if os.environ.get("RANK", "0") == "0":  # the first process of the job speaks for all
            print(str(interrupted) or "interrupted; what is not in a checkpoint is lost", file=sys.stderr, flush=True)
        sys.exit(INTERRUPTED)
