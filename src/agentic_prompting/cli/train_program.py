"""The program of a training run: `python -m agentic_prompting.cli.train_program prompt-r1 --config
FILE`, or `espl`, or `agent`.

Every option of a method's arguments, of its trainer's config, and of TRL's `ModelConfig` can be in
the YAML file or on the command line, where it wins. The same program trains in the sandbox on a
laptop and on many GPUs; `agentic-prompting train` launches it with accelerate.
"""

from __future__ import annotations

import re
import sys
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate import PartialState
from transformers import Trainer
from trl import GRPOConfig, ModelConfig, get_quantization_config

from ..trainers import (
    MultiTurnGRPOConfig,
    PromptR1Config,
    TrainingInterrupted,
    TrainingStopped,
)
from ..trainers.checkpointing.find_checkpoint import read_resume_option
from ..trainers.checkpointing.run_folder import (
    contains_run,
    decide_on_main_process,
    lock_run_folder,
    move_run_aside,
    second_run_message,
)
from ..trainers.one_line_progress import hide_library_bars
from .extras import check_extras
from .headroom_pointer import point_to_headroom
from .hub import find_model
from .option_parser import OptionParser
from .script import print_error, run_script
from .train_agent import AgentArguments
from .train_espl import ESPLArguments, ESPLRunConfig
from .train_prompt_r1 import PromptR1Arguments
from .yaml_file import read_options

METHODS: dict[str, tuple[type, type, type]] = {
    "prompt-r1": (PromptR1Arguments, PromptR1Config, ModelConfig),
    "agent": (AgentArguments, MultiTurnGRPOConfig, ModelConfig),
    "espl": (ESPLArguments, ESPLRunConfig, ModelConfig),
}
"""The dataclasses of each method's options: its own, its trainer's, the model's."""

COMMON_OPTIONS = [
    "model_name_or_path",
    "output_dir",
    "resume_from_checkpoint",
    "max_steps",
    "num_train_epochs",
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "max_completion_length",
    "temperature",
    "beta",
    "seed",
    "use_peft",
    "lora_r",
    "use_vllm",
    "vllm_mode",
    "bf16",
    "use_cpu",
    "logging_steps",
    "save_steps",
    "eval_strategy",
    "eval_steps",
    "report_to",
    "push_to_hub",
]
"""The options of TRL and transformers that most runs set; `--help` shows them beside ours."""


def main(method: str, arguments: Sequence[str]) -> None:
    """Train, save, and in the sandbox print the results.

    Args:
        method (`str`): `prompt-r1`, `espl` or `agent`.
        arguments (`Sequence[str]`): The command line.
    """
    # The seconds in the report include what loading took.
    started = time.perf_counter()
    if {"--help", "-h", "--help-all"} & set(arguments):
        print(method_help(method, everything="--help-all" in arguments))
        return
    # Wrong options and missing extras are found before anything is loaded.
    script, args, model = parse_method_options(method, arguments)
    script.check(args)
    check_extras({**vars(args), **vars(script)})
    if model.model_name_or_path:
        model.model_name_or_path = find_model(model.model_name_or_path)
    args.model_init_kwargs = {**loading_arguments(model), **(args.model_init_kwargs or {})} or None

    folder = Path(args.output_dir)
    state = PartialState()
    if state.is_main_process:
        _warn_of_long_turns(args)
    with ExitStack() as stack:
        # The lock is held to the end, because files are written before and after training, too.
        stack.enter_context(lock_run_folder(folder, state))
        # A new run in the folder of an earlier one is refused, or moves the earlier one aside.
        if not read_resume_option(args) and decide_on_main_process(
            state, lambda: contains_run(folder)
        ):
            if not args.overwrite:
                raise ValueError(second_run_message(folder, as_options=True))
            decide_on_main_process(state, lambda: move_run_aside(folder, model.model_name_or_path))
        trainer, report = script.build_trainer(args, model, stack)
        # Saved with the agent, for questions that it is asked later.
        if script.dataset:
            trainer.spec = replace(trainer.spec, columns=script.column_names())
        # Before anything is spent; a run that goes on has spent already. Demonstrations, which have
        # a report of their own, spend nothing.
        if report is None and state.is_main_process and not read_resume_option(args):
            options = headroom_options(arguments, folder, script, model.model_name_or_path)
            point_to_headroom(folder, options, sys.stderr)
        # The folder is locked already.
        trainer.locks_folder = False
        run_training(trainer)
        trainer.save_model(args.output_dir)
        # One process prints for all: the results of the sandbox, or where to look for one's own.
        if trainer.accelerator.is_main_process:
            if report is not None:
                report(trainer, time.perf_counter() - started)
            else:
                print(f"written to {folder}")
                print(f"next:  agentic-prompting report {folder}")
        trainer.accelerator.end_training()  # without it gloo may abort at exit


def _warn_of_long_turns(args: MultiTurnGRPOConfig) -> None:
    """Print a line if a turn may be longer than all turns of a rollout together."""
    is_default = args.max_turn_tokens == MultiTurnGRPOConfig.max_turn_tokens
    max_length = args.max_completion_length
    if not is_default and max_length is not None and args.max_turn_tokens > max_length:
        print_error(
            f"max_turn_tokens={args.max_turn_tokens} is above max_completion_length={max_length}, "
            "which limits all turns of a rollout together: lower the one or raise the other"
        )


def headroom_options(
    arguments: Sequence[str], folder: Path, script: Any, model_name: str | None
) -> dict[str, Any]:
    """The options with which `headroom` measures a training run."""
    config, _ = _split_config(arguments)
    if config:
        return {"config": config}
    # Those of this run that `headroom` has, too.
    return {
        "untrained": model_name,
        "program": getattr(script, "program", None),
        "environment-model": script.environment_model,
        "dataset": script.dataset,
        "columns": script.columns,
        "output-dir": folder,
    }


def parse_method_options(method: str, arguments: Sequence[str]) -> tuple[Any, Any, Any]:
    """The method's own arguments, the trainer's config and the model's, from a command line and its
    `--config` file.

    Raises:
        `ValueError`: An option does not exist, or its value is wrong.
    """
    config, words = _split_config(arguments)
    # TRL's long name has a short one here.
    words = [re.sub("^--model(?==|$)", "--model_name_or_path", word) for word in words]
    values = read_options(config) if config else {}

    # These warn of transformers' renamed arguments, which TRL still sets under the old names.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    hide_library_bars()
    parser = method_parser(method)
    parser.set_config(values, str(config))
    try:
        script, args, model = parser.parse(words)
    except ValueError as error:
        # transformers' message names only one of the two options that are needed.
        if "bf16" in str(error):
            raise ValueError(
                f"{error} On a machine without a GPU: --use_cpu true --bf16 false"
            ) from None
        raise
    return script, args, model


def _split_config(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file of `--config`, and the other words of a command line."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    options, words = parser.parse_known_args(arguments)
    return options.config, words


def method_parser(method: str) -> OptionParser:
    """The parser of a method's options."""
    return OptionParser(f"train {method}", METHODS[method])


def method_help(method: str, everything: bool = False) -> str:
    """The help on our options and the usual ones of TRL and transformers, or on all of theirs."""
    parser = method_parser(method)
    if everything:
        return parser.format_help()
    # TRL and transformers have many options: show only the usual ones.
    trl_options = {*GRPOConfig.__dataclass_fields__, *ModelConfig.__dataclass_fields__}
    parser.hide_options(trl_options - set(COMMON_OPTIONS))
    return (
        f"{parser.format_help()}\n"
        f"{parser.prog} --help-all shows all options of TRL and transformers. --config FILE reads options from YAML.\n"
    )


def loading_arguments(model: ModelConfig) -> dict[str, Any]:
    """The arguments of `from_pretrained` that options set."""
    arguments: dict[str, Any] = {}
    # Options at their defaults are left to `from_pretrained`.
    if model.model_revision != ModelConfig.model_revision:
        arguments["revision"] = model.model_revision
    if model.dtype != ModelConfig.dtype:
        arguments["dtype"] = model.dtype
    if model.attn_implementation != ModelConfig.attn_implementation:
        arguments["attn_implementation"] = model.attn_implementation
    quantization = get_quantization_config(model)
    if quantization is not None:
        arguments["quantization_config"] = quantization
    return arguments


def run_training(trainer: Trainer) -> None:
    """Train, or go on from `args.resume_from_checkpoint`; Ctrl-C ends it with a checkpoint.

    `--resume_from_checkpoint true` takes the newest checkpoint; without one, training starts from
    the beginning. The log of the run is in the output folder afterwards, as `trainer_state.json`.

    Raises:
        `KeyboardInterrupt`: After Ctrl-C; with the option that resumes the run.
        `SystemExit`: With status 1 and the reason, where training stopped because of the
        environment.
    """
    try:
        trainer.train()
    except TrainingStopped as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from None
    except TrainingInterrupted as interrupt:
        # As at the end of a run: without it gloo may abort at exit.
        trainer.accelerator.end_training()
        raise KeyboardInterrupt(
            f"interrupted after step {interrupt.step}, a checkpoint was saved; to go on, run the "
            f"same command with --resume_from_checkpoint {interrupt.checkpoint}"
        ) from None
    trainer.save_state()


if __name__ == "__main__":
    run_script(lambda: main(sys.argv[1], sys.argv[2:]))
