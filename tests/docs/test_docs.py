"""The documentation is true: its code runs, its commands exist, its files are there, its messages
are the code's.

How the blocks are read and what they run against is in `doc_blocks.py`; how shell lines are
checked, which are not run, in `doc_commands.py`. The site itself is built by `make docs`.
"""

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from importlib import import_module
from inspect import get_annotations
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

from support.doc_blocks import (
    PAGES,
    ROOT,
    Block,
    blocks_of,
    docstring_blocks,
    docstring_names,
    page_blocks,
    stand_ins,
)
from support.doc_commands import commands_in, faults
from support.marks import LONG
from support.servers import unused_url

BLOCKS = {page: page_blocks(page) for page in PAGES}
ALL = [block for blocks in BLOCKS.values() for block in blocks]
DOCSTRINGS = list(docstring_blocks())
LANGUAGES = {
    "python",
    "bash",
    "yaml",
    "json",
    "",
}  # of others it would have to be said here what is done with them
MOST_NOT_RUN = 3
TUTORIAL = ROOT / "docs" / "tutorial.md"  # run as it stands, by a shell: see test_the_tutorial


def name_of(page):
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def world(monkeypatch, tmp_path, tiny_policy):
    with ExitStack() as stack:
        yield stand_ins(monkeypatch, tmp_path, tiny_policy, stack)


@pytest.mark.parametrize(
    "page",
    [
        page
        for page, blocks in BLOCKS.items()
        if any(block.runs for block in blocks) and page != TUTORIAL
    ],
    ids=name_of,
)
def test_python_of_a_page_runs(page, world):
    """From the first block to the last, in one namespace, as a reader who follows the page would;
    and every function of the page is called.
    """
    names = {"__name__": "__main__"}
    called = set()
    for block in BLOCKS[page]:
        if block.runs:
            block.run(names, world, called)
    there = {name for block in BLOCKS[page] if block.runs for name in block.functions()}
    assert there <= called, f"functions of the page that nothing calls: {sorted(there - called)}"


@pytest.mark.parametrize(
    "block", [block for block in DOCSTRINGS if block.runs], ids=lambda one: one.where
)
def test_python_of_a_docstring_runs(block, world):
    block.run(docstring_names(block), world)


def test_few_blocks_are_not_run():
    """Each of them says why."""
    left = [block for block in [*ALL, *DOCSTRINGS] if block.language == "python" and not block.runs]
    left = [block for block in left if not block.note.startswith("title=")]
    assert len(left) <= MOST_NOT_RUN
    assert all(re.fullmatch(r"not run: \w.+", block.note) for block in left)


def test_every_block_is_of_a_kind_that_is_checked():
    assert {block.language for block in ALL} <= LANGUAGES
    # Without a language a block is a picture or an output. Commands are marked, so that they are
    # checked.
    unmarked = [
        block
        for block in ALL
        if not block.language
        for line in commands_of(block)
        if not faults(line)
    ]
    assert not unmarked


def commands_of(block):
    try:
        return [command for command in commands_in(block.code) if command[0] not in ("make", "git")]
    except ValueError:  # no shell: a quotation mark without its other half
        return []


@pytest.mark.parametrize("page", [page for page in PAGES if page != TUTORIAL], ids=name_of)
def test_commands_exist(page):
    written = [
        name for block in BLOCKS[page] for name in re.findall(r'title="(\w+\.py)"', block.note)
    ]
    wrong = [
        f"{block.where}:{block.line}: {' '.join(command)}: {fault}"
        for block in BLOCKS[page]
        if block.language == "bash"
        for command in commands_in(block.code)
        if not {"python", *written} >= set(command)
        for fault in faults(command)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line, said",
    [
        ("agentic-prompting refine --sandbx", "no option --sandbx"),
        ("agentic-prompting refin --sandbox", "no sub-command refin"),
        ("X=1 python -m benchmarks.speed.scoring --no_such", "no option --no_such"),
        ("accelerate launch --quiett examples/train_espl.py", "quiett"),
        (
            "accelerate launch --quiet examples/train_espl.py --refference_model x",
            "no option --refference_model",
        ),
        (
            "accelerate launch --config_file examples/accelerate/none.yaml examples/train_espl.py",
            "no file",
        ),
        ("make demo dmo", "no target dmo"),
        ("pip install 'agentic-prompting[srve]'", "no extra"),
        ("agentic_prompting refine", "no command"),
    ],
)
def test_a_wrong_command_is_seen(line, said):
    assert [said in fault for command in commands_in(line) for fault in faults(command)] == [True]


def test_yaml_loads():
    for block in ALL:
        if block.language == "yaml":
            assert yaml.safe_load(block.code), f"{block.where}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_linked_files_are_there(page):
    """Also in README.md, which the site's own check does not see."""
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", prose):
        assert (page.parent / target).exists(), f"{name_of(page)} links {target}"


def test_llms_txt_links_every_page_that_is_named():
    """Its links are those of the built site: `howto/agent/` is the page `howto/agent.md`."""
    text = (ROOT / "docs" / "llms.txt").read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)]+)/\)", text)
    pages = [ROOT / "docs" / f"{target}.md" for target in targets]
    pages = [page if page.is_file() else page.with_suffix("") / "index.md" for page in pages]
    assert len(targets) > 20 and [page for page in pages if not page.is_file()] == []
    assert len(targets) == len(set(targets)) == text.count("](")


# The tutorial
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "whole", [False, pytest.param(True, marks=LONG)], ids=["two steps", "as it is"]
)
def test_the_tutorial(whole, tmp_path):
    """From an empty folder to a served agent: every file is written and every command run, in
    order, by one shell. In two steps of each training nothing is learned.
    """
    port = str(urlsplit(unused_url()).port)
    script = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
    script.append("pip() { :; }  # what it would install is there")
    for block in BLOCKS[TUTORIAL]:
        code = block.code.replace("8080", port)
        if not whole:
            code = re.sub(r"(max_steps=|\(conversations, |draw\), )\d+", r"\g<1>2", code)
            code = re.sub(r"(tokenizer, |range\()\d{4}\b", r"\g<1>64", code)
        if block.language == "python":
            (file,) = re.findall(r'title="(\w+\.py)"', block.note)
            code = f"cat > {file} <<'END_OF_FILE'\n{code}END_OF_FILE"
        elif block.language != "bash":
            continue
        script.append(code)
    folder = tmp_path / "empty"
    folder.mkdir()
    paths = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=folder,
        env=os.environ | paths,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    before, after = (
        float(share) for share in re.findall(r"(\d\.\d\d) of \d+ answers are right", done.stdout)
    )
    assert not whole or (before <= 0.65 and after >= 0.8), done.stdout[-3000:]
    said = json.loads(re.search(r'^\{"id".*', done.stdout, re.MULTILINE)[0])
    assert said["model"] == "agent" and (not whole or said["choices"][0]["message"]["content"])
    assert done.stdout.count("-> the end") == 1
    assert not whole or "environment    Oslo" in done.stdout


# What scripts write
# -------------------------------------------------------------------------------------------------


def test_the_reference_has_what_readers_call():
    """What Python alone calls is not in it; signatures are wrapped, which takes a formatter where
    the site is built.
    """
    griffe = pytest.importorskip("griffe", reason="the extra [docs] is not installed")
    extension = griffe.load_extensions(ROOT / "docs" / "tools" / "huggingface_docstrings.py")
    package = griffe.load("agentic_prompting", search_paths=[ROOT / "src"], extensions=extension)
    waiting = [package]
    names = set()
    while waiting:
        inside = [member for member in waiting.pop().members.values() if not member.is_alias]
        names |= {one.name for one in inside}
        waiting += inside
    assert {"MultiTurnGRPOConfig", "limits", "__call__"} < names and "__getstate__" not in names
    settings = package["trainers.config.MultiTurnGRPOConfig"]
    assert (str(settings["max_turns"].value), str(settings["vllm_sync"].value)) == ("5", "'nccl'")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "ruff" in next(line for line in project.splitlines() if line.startswith("docs = "))


def test_every_setting_is_on_the_page_of_settings():
    """Each class of ours that a program or a command takes has a table, with a line for every
    field.
    """
    from agentic_prompting.cli import COMMANDS
    from agentic_prompting.cli.train_program import METHODS

    tables = runpy.run_path(str(ROOT / "docs" / "tools" / "settings_tables.py"))
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    shown = [
        getattr(import_module(module), name) for module, name in tables["DIRECTIVE"].findall(page)
    ]
    taken = {kind for program in METHODS.values() for kind in program}
    for name in COMMANDS:
        command = import_module(f"agentic_prompting.cli.{name.replace('-', '_')}")
        taken |= set(getattr(command, "SETTINGS", ()))
    ours = {
        part
        for kind in taken
        for part in kind.__mro__
        if part.__module__.startswith("agentic_prompting") and get_annotations(part)
    }
    assert len(shown) == len(set(shown)) and ours <= set(shown)
    text = tables["on_page_markdown"](page)
    assert "<!--" not in text
    assert all(f"| `{name}` | `" in text for kind in shown for name in get_annotations(kind))


def test_every_extra_is_on_the_installation_page():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs" / "howto" / "installation.md").read_text(encoding="utf-8")
    missing = [name for name in project["optional-dependencies"] if f"`[{name}]`" not in page]
    assert not missing


# The tools
# ----------------------------------------------------------------------------------------------------------


def test_the_reading_of_blocks():
    text = (
        "a\n\n```python\nx = 1\n```\n\n<!-- python, not shown:\ny = 2\n-->\n- b\n\n  <!-- not run: "
        "c -->\n  ```python\n  z\n  ```\n"
    )
    first, hidden, left = blocks_of(text, "page.md")
    assert first == Block("page.md", 4, "python", "", "x = 1\n")
    assert (hidden.code, hidden.line, hidden.shown, hidden.runs) == ("y = 2\n", 8, False, True)
    assert (left.code, left.note, left.runs) == ("z\n", "not run: c", False)
