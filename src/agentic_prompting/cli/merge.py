"""`agentic-prompting merge`: a trained agent as an ordinary model folder, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from .hub import check_agent
from .terminal import print_json


def merge(
    run: Annotated[Path, Argument(metavar="RUN", help="The trained agent's folder.")],
    output_dir: Annotated[
        Path | None,
        Option("--output-dir", help="Folder to write to; RUN/merged by default. It must be new."),
    ] = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Option(help="Data type of the saved weights; auto is that of the base model."),
    ] = "auto",
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> int:
    """Save a trained agent as an ordinary model: its adapter merged, with its tokenizer and its
    form.
    """
    # Everything that can be wrong is found before the model is loaded.
    check_agent(run)
    folder = output_dir or run / "merged"
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: take another folder with --output-dir")

    from ..local.merging import save_merged

    had_adapter = save_merged(run, folder, dtype)
    if as_json:
        print_json({"folder": str(folder), "merged_adapter": had_adapter})
        return 0
    weights = "the adapter merged into its base model"
    if not had_adapter:
        weights = "the model as it is (there is no adapter to merge)"
    print(f"written to {folder}: {weights}, the tokenizer, and the form of the agent")
    print(f"next:  vllm serve {folder}")
    print(f"       python convert_hf_to_gguf.py {folder} --outfile agent.gguf   # of llama.cpp")
    return 0
