"""`agentic-prompting train METHOD`: a training program, launched with accelerate.

An option belongs in one of three places: that of one method in `train_prompt_r1.py`,
`train_espl.py` or `train_agent.py`, that of all methods in `train_options.py`, and an argument of
the trainer itself in `trainers/config.py`, from where it becomes an option by itself.
`train_program.py` parses them and runs the training.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from .example_files import find_example
from .launch import launch

TRAIN_METHODS = {
    "prompt-r1": "Train a small LLM to prompt a large one (multi-turn GRPO).",
    "espl": "Train under a population of system prompts that evolves.",
    "agent": (
        "Train a model inside an agent program, such as codex; `train --harness codex ...` is the "
        "same."
    ),
}


def train(arguments: Sequence[str]) -> int:
    """Train through accelerate."""
    # The first word is the method; an agent needs no name.
    words = list(arguments)
    if words and words[0].partition("=")[0] in ("--harness", "--program"):
        words.insert(0, "agent")
    if not words or words[0] in ("--help", "-h"):
        print(_methods_help())
        return 0
    method = words.pop(0)
    if method not in TRAIN_METHODS:
        raise ValueError(
            f"{method!r} is not a method of training: choose {', '.join(TRAIN_METHODS)}"
        )

    # All other options are the program's.
    parser = ArgumentParser(f"agentic-prompting train {method}", add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="YAML file with options of the program.")
    parser.add_argument(
        "--accelerate-config",
        type=Path,
        help=(
            "Configuration file of accelerate launch. Default: your `accelerate config`, else "
            "every GPU, or the CPU."
        ),
    )
    options, program_words = parser.parse_known_args(words)
    # The help of the launcher, then that of the program.
    if {"--help", "-h", "--help-all"} & set(program_words):
        from .train_program import method_help

        print(parser.format_help())
        print(method_help(method, everything="--help-all" in program_words))
        return 0

    # Check the file here: errors of the launched processes come late and several times.
    config = find_example(options.config)
    if config is not None and not config.is_file():
        raise ValueError(
            f"{config} does not exist; --config takes a YAML file such as "
            "examples/configs/qwen3_4b.yaml"
        )
    # Without a file or an option there is nothing to train.
    if config is None and not program_words:
        raise ValueError(
            f"say what to train: agentic-prompting train {method} --config FILE; --help shows "
            "every option"
        )
    if config is not None:
        program_words = ["--config", str(config), *program_words]
    return launch(method, program_words, find_example(options.accelerate_config))


def _methods_help() -> str:
    lines = ["usage: agentic-prompting train METHOD --config FILE [OPTIONS]", "", "Methods:"]
    for method, description in TRAIN_METHODS.items():
        lines.append(f"  {method:12}{description}")
    lines += ["", "`agentic-prompting train METHOD --help` shows the options of a method."]
    return "\n".join(lines)
