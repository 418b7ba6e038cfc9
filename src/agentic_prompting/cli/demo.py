"""`agentic-prompting demo`: each method in the sandbox. No model, key or network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from .launch import CONFIGS, launch

Method = Literal["prompt-r1", "espl", "prorefine"]

_PROGRAMS = {"prompt-r1": ("train_prompt_r1", "prompt_r1.yaml"), "espl": ("train_espl", "espl.yaml")}
_FINISHED = "summary.json"


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
        from ..scripts.refine import main as refine

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
