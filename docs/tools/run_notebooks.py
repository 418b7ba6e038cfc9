"""Run the notebooks of `examples/` from top to bottom and keep those outputs that do not change or
reveal anything.

    python docs/tools/run_notebooks.py                       # all of them
    python docs/tools/run_notebooks.py examples/02_espl.ipynb

Each runs in an empty temporary folder. Printed text, pictures and Markdown are kept; progress bars,
warnings, widgets and metadata are not. `tests/whole/test_notebooks.py` compares the outputs of a
run with those in the file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}
LOGGED = "[20"  # a library's log line on stdout begins with the year


def run(path: Path) -> float:
    """Run one notebook and write it with its outputs; returns the seconds it took."""
    notebook = nbformat.read(path, as_version=4)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        place = {"metadata": {"path": folder}}
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources=place).execute()
    seconds = time.perf_counter() - started
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = _joined([output for output in map(_kept, cell.outputs) if output])
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    nbformat.write(notebook, path)
    return seconds


def _kept(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    """The parts of an output that are kept: an output, or nothing."""
    if output.output_type == "stream":
        lines = [
            line for line in output.text.splitlines(keepends=True) if not line.startswith(LOGGED)
        ]
        output.text = "".join(lines) if output.name == "stdout" else ""
        return output if output.text.strip() else None
    if output.output_type not in ("display_data", "execute_result") or "text/html" in output.data:
        return None  # HTML is a progress bar or a table of the trainer
    if any("widget" in kind for kind in output.data):
        return None
    output.metadata = {}
    if "image/png" in output.data:
        output.data = nbformat.from_dict({"image/png": output.data["image/png"]})
    return output


def _joined(outputs: list[nbformat.NotebookNode]) -> list[nbformat.NotebookNode]:
    """Printed text that follows printed text as one output."""
    joined: list[nbformat.NotebookNode] = []
    for output in outputs:
        if joined and output.output_type == joined[-1].output_type == "stream":
            joined[-1].text += output.text
        else:
            joined.append(output)
    return joined


def main() -> None:
    parser = argparse.ArgumentParser(description="Run notebooks and keep their outputs.")
    parser.add_argument("notebooks", type=Path, nargs="*", default=sorted(EXAMPLES.glob("*.ipynb")))
    for path in parser.parse_args().notebooks:
        print(f"{path.name}: {run(path):.0f} s", flush=True)


if __name__ == "__main__":
    main()
