"""`agentic-prompting train` and `demo`: the programs of `programs.py`, started as `accelerate launch` does, with exit
status and Ctrl-C passed through."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
import typer.core

from .options import option

EXAMPLES = Path(__file__).parent / "examples"
"""Configurations of training: those of the repository's `examples/`, which no wheel has."""

CLONE = Path(__file__).parents[3]
"""The clone that the package is installed from, where it is (`pip install -e`)."""

Method = Literal["prompt-r1", "espl", "prorefine"]
Config = Annotated[
    Path | None, option("YAML file with options of the program; those given here win over it.")
]
AccelerateConfig = Annotated[
    Path | None,
    option(
        "As of accelerate launch. Default: your `accelerate config`, else every GPU, or the CPU."
    ),
]

_FINISHED = "summary.json"
# Everything else is an option of the program, `--help` too.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


class _AgentByDefault(typer.core.TyperGroup):
    """`train --harness codex` is `train agent --harness codex`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_agent = bool(args) and args[0].partition("=")[0] in ("--harness", "--program")
        return super().parse_args(ctx, ["agent", *args] if is_agent else args)


train = typer.Typer(
    cls=_AgentByDefault, invoke_without_command=True, add_completion=False, rich_markup_mode=None
)  # fmt: skip


@train.callback()
def _train(context: typer.Context) -> None:
    """Train through accelerate. Options that are not listed are the program's own: train METHOD --help shows them."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@train.command("prompt-r1", context_settings=_PASSED_ON)
def prompt_r1(
    context: typer.Context, config: Config = None, accelerate_config: AccelerateConfig = None
) -> int:
    """Train a small LLM to prompt a large one (multi-turn GRPO)."""
    return _start(context, "prompt-r1", config, accelerate_config)


@train.command("espl", context_settings=_PASSED_ON)
def espl(
    context: typer.Context, config: Config = None, accelerate_config: AccelerateConfig = None
) -> int:
    """Train under a population of system prompts that evolves."""
    return _start(context, "espl", config, accelerate_config)


@train.command("agent", context_settings=_PASSED_ON)
def agent(
    context: typer.Context, config: Config = None, accelerate_config: AccelerateConfig = None
) -> int:
    """Train a model inside an agent program, such as codex; `train --harness codex ...` is the same."""
    return _start(context, "agent", config, accelerate_config)


def _start(
    context: typer.Context, method: str, config: Path | None, accelerate_config: Path | None
) -> int:
    if {"--help", "-h", "--help-all"} & set(context.args):
        return _help(context, method)
    config, accelerate_config = example(config), example(accelerate_config)
    if config is not None and not config.is_file():
        raise ValueError(
            f"{config} does not exist; --config takes a YAML file such as examples/configs/qwen3_4b.yaml"
        )
    if config is None and not context.args:
        raise ValueError(
            f"say what to train: {context.command_path} --config FILE; --help shows every option"
        )
    return launch(
        method, [*(["--config", str(config)] if config else []), *context.args], accelerate_config
    )


def _help(context: typer.Context, method: str) -> int:
    """The command's own options, then the program's."""
    from .parser import help_of
    from .programs import PROGRAMS

    print(context.get_help())
    print(help_of(PROGRAMS[method], context.command_path, everything="--help-all" in context.args))
    return 0


def example(file: Path | None) -> Path | None:
    """The file; outside of a clone `examples/...` is the one that came with the package."""
    if file is None or file.is_file():
        return file
    return next(
        (
            root / file
            for root in (EXAMPLES.parent, CLONE, shared())
            if root and (root / file).is_file()
        ),
        file,
    )


def shared() -> Path | None:
    """The folder in which a wheel installs tables and their configurations, laid out as in a clone."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = [
            file
            for file in files("agentic-prompting") or ()
            if file.match("benchmarks/paper_tables/__init__.py")
        ]
    except PackageNotFoundError:
        return None
    return Path(str(found[0].locate())).resolve().parents[2] if found else None


def demo(
    context: typer.Context,
    method: Annotated[
        Method, typer.Option(help="What to show. Minutes on two CPU cores; prorefine: seconds.")
    ] = ("prompt-r1"),
    output_dir: Annotated[
        Path | None, option("Folder to write to: runs/demo, or runs/real.", "--output-dir")
    ] = None,
    real: Annotated[
        bool,
        option(
            "A real model of 135M parameters learns to look facts up; see `make real`.", "--real"
        ),
    ] = False,
) -> int:
    """See a method work in the sandbox: a tiny policy, a scripted large LLM; no key, no network.

    With --real a real small model: SmolLM2 out of a package, or the one that --model names. Interrupted, the same
    command goes on. Other options are those of the method's program, such as --max-steps 5.
    """
    if real and method != "prompt-r1":
        raise ValueError("--real is a demo of its own: leave --method out")
    output_dir = output_dir or Path("runs/real" if real else "runs/demo")
    if (output_dir / _FINISHED).exists():
        raise ValueError(
            f"{output_dir} holds a finished run: look at it with `agentic-prompting report {output_dir}`, or take "
            "another folder with --output-dir"
        )
    if method == "prorefine":
        from .optimize import main as refine

        refine(["--output_dir", str(output_dir), *context.args])
        print(f"\nwritten to {output_dir}: a file of results for each setting")
    else:
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = (
            "1"  # TRL's trainers send a ping to the hub when they are made
        )
        # As `make demo`: one thread, and none that spins while it waits. Beside other work two take far longer.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        config_file = (
            "real.yaml"
            if real
            else {"prompt-r1": "sandbox.yaml", "espl": "espl/sandbox.yaml"}[method]
        )
        options = [
            "--config",
            str(EXAMPLES / "configs" / config_file),
            "--output_dir",
            str(output_dir),
        ]
        accelerate_file = "single.yaml"
        if real and (os.cpu_count() or 1) > 1:
            accelerate_file = "cpu2.yaml"
        elif real:
            options += ["--gradient_accumulation_steps", "4"]
        options += [*_resumed(output_dir), *context.args]
        status = launch(method, options, EXAMPLES / "accelerate" / accelerate_file)
        if status:
            return status
    print(f"next:  agentic-prompting report {output_dir}")
    if method == "prompt-r1" and not real:
        question = "what is the currency of the country whose capital is Nairobi ?"
        print(f'       agentic-prompting ask {output_dir} "{question}" --sandbox')
    if method == "prorefine":
        print("       agentic-prompting refine --sandbox")
    return 0


def _resumed(folder: Path) -> list[str]:
    """The option that continues an interrupted run, from its newest checkpoint if it has one."""
    begun = any(any(folder.glob(left)) for left in ("checkpoint-*", "rollouts/rollouts-*"))
    return ["--resume_from_checkpoint", "true"] if begun else []


def launch(method: str, arguments: Sequence[str], accelerate_config: Path | None = None) -> int:
    """Run a training program on as many processes as accelerate is configured for.

    Args:
        method (`str`): `prompt-r1`, `espl` or `agent`.
        arguments (`Sequence[str]`): For the program.
        accelerate_config (`Path`, *optional*): As of `accelerate launch --config_file`. By default what
            `accelerate config` has saved, else every GPU of this machine, or its CPU.

    Returns:
        `int`: The exit status of the program, of the first process that failed.

    Raises:
        `ValueError`: If there is no such configuration.
    """
    settings = _settings(accelerate_config)
    import psutil
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun would end its processes 30 s after Ctrl-C, in the middle of a step; so we forward it.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", "SIGTERM,SIGHUP,SIGQUIT")
    launched = launch_command_parser().parse_args(
        [*settings, "--module", f"{__package__}.programs", method, *arguments]
    )

    def pass_on(*signal_and_frame: Any) -> None:
        """Ctrl-C for the processes of the job, also where this one got SIGTERM: it would leave them running without it.
        One in the terminal's group gets it twice and handles it once. Imports nothing: a second signal may interrupt
        the handler of the first."""
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                child.send_signal(signal.SIGINT)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        launch_command(launched)
    except subprocess.CalledProcessError as error:
        return _status(error.returncode)
    except ChildFailedError as error:
        return _status(error.get_first_failure()[1].exitcode)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 0


def _settings(config: Path | None) -> list[str]:
    """The options of `accelerate launch` that say where to run."""
    if config is not None:
        if not config.is_file():
            raise ValueError(
                f"{config} does not exist: make one with `accelerate config --config_file {config}`"
            )
        return ["--config_file", str(config)]
    import torch
    from accelerate.commands.config import default_config_file

    if Path(default_config_file).is_file():
        return []
    gpus = torch.cuda.device_count()
    # All values are given, because accelerate warns of each one that is not.
    plain = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    return [*(["--multi_gpu"] if gpus > 1 else []), "--num_processes", str(max(gpus, 1)), *plain]


def _status(code: int) -> int:
    """The exit status as in a shell: 128 plus the signal that ended the process."""
    return 128 - code if code < 0 else code
