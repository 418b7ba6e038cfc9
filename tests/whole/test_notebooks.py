"""The notebooks in `examples/`: they run from top to bottom, show what their files show, and their
files are clean.

Each is run by nbclient in a folder of its own, in the kernel of the environment that runs the
tests, without a key.
"""

import ast
import base64
import importlib
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from support.marks import LONG

EXAMPLES = Path(__file__).parents[2] / "examples"
# That one cell may take; on a free machine a whole notebook takes less than half of it.
SECONDS = 120
MAX_BYTES = 1_000_000

# What each is there to show, as code that is run after its last cell. Also: these are all there
# are.
STORIES = {
    "01_prompt_r1": "right = lambda all: sum(exact_match(one.answer or '', one.row['answers']) for one in all)\n"
    "assert right(after) > right(before), 'training did not help'\n"
    "assert rollout.answer, 'the question at the end was not answered'",
    "02_espl": "first, best = await held_out(root), await held_out(result.best)\n"
    "assert best.low > first.high, 'the best prompt is no better than the first'\n"
    "assert len(line) > 2, 'the best prompt has no line of descent to show'",
    "03_prorefine": "plain, verified = estimates['no refinement'], estimates['verifier']\n"
    "assert verified.low > plain.high, 'refining did not help'\n"
    "assert drafted_passes < plain_passes, 'drafting saved nothing'",
    "04_your_own_environment_and_reward": "assert scores['after'].low > scores['before'].high, 'no better'\n"
    "assert failed and all(set(one['rewards'].values()) == {None} for one in failed)\n"
    "assert unscored['forgetful'] and not unscored['right_and_frugal']",
    "05_agent_program": "assert last.low > first.high, 'training did not help'\n"
    "assert statuses['failed'] == 0 and len(voted.sequences) > 1",
    "06_conductor": "assert scores['after'].low > scores['before'].high, 'no better'\n"
    "assert right_calls['after'] > right_calls['before'], 'it does not choose workers better'",
}
NOTEBOOKS = [EXAMPLES / f"{name}.ipynb" for name in STORIES]
by_name = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)

# Folders of a machine, and the forms of keys of OpenAI and Hugging Face.
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.])/(?:home|root|tmp|work|usr|opt|mnt|var|Users|private)/|[A-Z]:\\\\"
)
KEY = re.compile(r"\b(?:sk-|hf_)[A-Za-z0-9_-]{16,}")


def read(path):
    return nbformat.read(path, as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def kinds_shown(cell):
    """What a reader sees under a cell: text, pictures, Markdown; progress bars and warnings do not
    count.
    """
    kinds = set()
    for output in cell.outputs:
        data = output.get("data", {})
        if output.output_type == "stream":
            kinds |= (
                {"text"} if output.name == "stdout" and not output.text.startswith("[20") else set()
            )
        elif "image/png" in data or "text/markdown" in data:
            kinds.add("image/png" if "image/png" in data else "text/markdown")
        elif "text/html" not in data and not any("widget" in kind for kind in data):
            kinds.add("text")
    return kinds


def texts_of(cell):
    """Everything readable in a cell's outputs."""
    for output in cell.outputs:
        yield output.get("text", "")
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/"):
                yield value


def test_these_are_all_notebooks():
    assert sorted(EXAMPLES.glob("*.ipynb")) == NOTEBOOKS


def quick(cell):
    """Two steps where there are some dozens: reinforcement learning, not the warm starts, of
    hundreds, before it.
    """
    cell.source = re.sub(r'(max_steps"?[=:] ?)\d\d\b', r"\g<1>2", cell.source)


@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=LONG)], ids=["two steps", "as it is"]
)
@by_name
def test_it_runs_and_shows_what_its_file_shows(path, whole, tmp_path, monkeypatch):
    """What it is there to show only where it trains as long as it says, or not at all."""
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    source = str(EXAMPLES.parent / "src")
    monkeypatch.setenv(
        "PYTHONPATH", os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    )
    committed = read(path)
    run = read(path)
    for cell in code_cells(run):
        cell.outputs = []
        if not whole:
            quick(cell)
    if same := [cell.source for cell in run.cells] == [cell.source for cell in committed.cells]:
        run.cells.append(nbformat.v4.new_code_cell(STORIES[path.stem]))
    place = {"metadata": {"path": tmp_path}}
    NotebookClient(
        run, timeout=SECONDS, startup_timeout=SECONDS, kernel_name="python3", resources=place
    ).execute()
    shown = [kinds_shown(cell) for cell in code_cells(run)[: -1 if same else None]]
    assert shown == [kinds_shown(cell) for cell in code_cells(committed)], (
        "run it again and commit the outputs"
    )


@by_name
def test_its_file_is_clean(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    assert all(cell.id for cell in notebook.cells)
    assert notebook.metadata.kernelspec.name == "python3"
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert not any(cell.metadata for cell in notebook.cells)
    assert path.stat().st_size < MAX_BYTES


@by_name
def test_its_outputs_are_those_of_one_run_without_errors(path):
    cells = code_cells(read(path))
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(map(bool, (cell.outputs for cell in cells))) >= len(cells) // 2
    assert any("image/png" in kinds_shown(cell) for cell in cells), "no picture"
    for output in (output for cell in cells for output in cell.outputs):
        assert output.output_type != "error" and output.get("name") != "stderr"
        assert not {"text/html", "application/javascript"} & set(output.get("data", {})), (
            "widgets do not last"
        )


@by_name
def test_its_outputs_give_nothing_away(path):
    for text in (text for cell in code_cells(read(path)) for text in texts_of(cell)):
        assert not ABSOLUTE_PATH.search(text), text
        assert not KEY.search(text), "this looks like a key"
    assert not KEY.search(path.read_text(encoding="utf-8"))


@by_name
def test_its_pictures_are_pictures(path):
    outputs = [output for cell in code_cells(read(path)) for output in cell.outputs]
    for picture in (
        output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})
    ):
        assert base64.b64decode(picture).startswith(b"\x89PNG")


@by_name
def test_what_its_text_promises_is_there(path):
    """The code for real models reads, its names can be imported, and links lead somewhere."""
    text = "\n\n".join(cell.source for cell in read(path).cells if cell.cell_type == "markdown")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks, "says nothing of real models"
    for node in (node for block in blocks for node in ast.walk(ast.parse(block))):
        if isinstance(node, ast.ImportFrom):
            assert all(
                hasattr(importlib.import_module(node.module), alias.name) for alias in node.names
            )
    for target in re.findall(r"\]\(([^):]+)\)", text):
        assert (EXAMPLES / target.partition("#")[0]).exists(), target
    for target in re.findall(r"`(docs/\S+)`", text):
        assert (EXAMPLES.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize(
    "text", ["saved in /tmp/x/run", "'/root/a'", "C:\\\\Users\\x", "see /work/main/y"]
)
def test_absolute_paths_are_seen(text):
    assert ABSOLUTE_PATH.search(text)


@pytest.mark.parametrize("text", ["runs/tmp/x", "http://localhost:8000/v1", "a/work/b", "and/or"])
def test_other_text_is_not_taken_for_a_path(text):
    assert not ABSOLUTE_PATH.search(text)
