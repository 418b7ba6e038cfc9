"""`agentic-prompting demo`: a method at work in the sandbox."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from .example_files import EXAMPLES
from .launch import launch

DEMO_CONFIGS = {"prompt-r1": "sandbox.yaml", "espl": "espl/sandbox.yaml", "real": "real.yaml"}

_SUMMARY = "summary.json"  # a finished run has it


def demo(arguments: Sequence[str]) -> int:
    """See a method work in the sandbox: a tiny policy, a scripted large LLM; no key, no network.

    With --real a real small model: SmolLM2 out of a package, or the one that --model names.
    Interrupted, the same command goes on. Other options are those of the method's program, such as
    --max-steps 5.
    """
    parser = ArgumentParser("agentic-prompting demo", description=demo.__doc__, allow_abbrev=False)
    parser.add_argument(
        "--method",
        default="prompt-r1",
        help=(
            "The method to show: prompt-r1, espl or prorefine. Minutes on two CPU cores; "
            "prorefine: seconds."
        ),
    )
    parser.add_argument(
        "--output-dir", type=Path, help="Folder to write to: runs/demo, or runs/real."
    )
    parser.add_argument(
        "--real",
        action="store_true",
        help="A real model of 135M parameters learns to look facts up; see `make real`.",
    )
    # Words that are unknown here are for the program.
    options, program_words = parser.parse_known_args(arguments)
    method = options.method
    if method not in ("prompt-r1", "espl", "prorefine"):
        raise ValueError(f"--method must be prompt-r1, espl or prorefine, got {method!r}")
    if options.real and method != "prompt-r1":
        raise ValueError("--real is a demo of its own: leave --method out")
    folder = options.output_dir or Path("runs/real" if options.real else "runs/demo")
    # A finished run is not overwritten.
    if (folder / _SUMMARY).exists():
        raise ValueError(
            f"{folder} holds a finished run: look at it with `agentic-prompting report {folder}`, "
            "or take another folder with --output-dir"
        )

    # ProRefine runs in this process, while training is launched.
    if method == "prorefine":
        from .refine_table import refine_table

        refine_table(["--output_dir", str(folder), *program_words])
        print(f"\nwritten to {folder}: a file of results for each setting")
    else:
        status = _train(method, options.real, folder, program_words)
        if status:
            return status

    # Commands that show the result.
    print(f"next:  agentic-prompting report {folder}")
    if method == "prompt-r1" and not options.real:
        question = "what is the currency of the country whose capital is Nairobi ?"
        print(f'       agentic-prompting ask {folder} "{question}" --sandbox')
    if method == "prorefine":
        print("       agentic-prompting refine --sandbox")
    return 0


def _train(method: str, is_real: bool, folder: Path, program_words: Sequence[str]) -> int:
    """Start the training program, or go on with an interrupted run in the folder; the exit status."""
    # TRL's trainers send a ping to the hub when they are made.
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    # One thread that does not spin while it waits, as in `make demo`: beside other work two take
    # far longer.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")

    config = EXAMPLES / "configs" / DEMO_CONFIGS["real" if is_real else method]
    words = ["--config", str(config), "--output_dir", str(folder)]
    # The real model is trained on two processes if there are two cores.
    accelerate_file = "single.yaml"
    if is_real and (os.cpu_count() or 1) > 1:
        accelerate_file = "cpu2.yaml"
    elif is_real:
        words += ["--gradient_accumulation_steps", "4"]  # the same batch on one process

    # Autocast to bfloat16 is three times as fast as float32 with AMX, and far slower on processors
    # without instructions for it. The import is here because it loads torch.
    if is_real:
        from ..local import has_bf16_instructions

        if has_bf16_instructions():
            words += ["--bf16", "true"]

    # An interrupted run is continued from its newest checkpoint, if it has one.
    for pattern in ("checkpoint-*", "rollouts/rollouts-*"):
        if any(folder.glob(pattern)):
            words += ["--resume_from_checkpoint", "true"]
            break
    return launch(method, [*words, *program_words], EXAMPLES / "accelerate" / accelerate_file)
