"""`agentic-prompting train`: Prompt-R1 or E-SPL, through accelerate."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from .launch import launch

# Everything else is an option of the program, `--help` too.
_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Config = Annotated[
    Path | None, typer.Option(help="YAML file with options of the program; those given here win over it.")
]
AccelerateConfig = Annotated[
    Path | None,
    typer.Option(help="As of accelerate launch. Default: your `accelerate config`, else every GPU, or the CPU."),
]

train = typer.Typer(
    help="Train through accelerate. Options that are not listed are the program's own: train METHOD --help shows them.",
    no_args_is_help=True,
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
    script = import_module(f"..scripts.{program}", __package__)
    TrlParser(script.ARGUMENTS, prog=context.command_path).print_help()
    return 0
