"""The documentation is true: its code runs, its commands exist, its files are there, its messages are the code's.

How the blocks are read and what they run against is in `doc_blocks.py`; how shell lines are checked, which are not run,
in `doc_commands.py`. The site itself is built by `make docs`.
"""

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from contextlib import ExitStack
from dataclasses import is_dataclass
from importlib import import_module
from importlib.util import find_spec
from inspect import get_annotations
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from packaging.requirements import Requirement

from support.doc_blocks import PAGES, ROOT, Block, blocks_of, docstring_blocks, docstring_names, page_blocks, stand_ins
from support.doc_commands import commands_in, faults
from support.marks import LONG
from support.servers import unused_url

BLOCKS = {page: page_blocks(page) for page in PAGES}
ALL = [block for blocks in BLOCKS.values() for block in blocks]
DOCSTRINGS = list(docstring_blocks())
LANGUAGES = {"python", "bash", "yaml", "json", ""}  # of others it would have to be said here what is done with them
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
    [page for page, blocks in BLOCKS.items() if any(block.runs for block in blocks) and page != TUTORIAL],
    ids=name_of,
)
def test_python_of_a_page_runs(page, world):
    """From the first block to the last, in one namespace, as a reader who follows the page would; and every function of
    the page is called."""
    names, called = {"__name__": "__main__"}, set()
    for block in BLOCKS[page]:
        if block.runs:
            block.run(names, world, called)
    there = {name for block in BLOCKS[page] if block.runs for name in block.functions()}
    assert there <= called, f"functions of the page that nothing calls: {sorted(there - called)}"


@pytest.mark.parametrize("block", [block for block in DOCSTRINGS if block.runs], ids=lambda one: one.where)
def test_python_of_a_docstring_runs(block, world):
    block.run(docstring_names(block), world)


def test_few_blocks_are_not_run():
    """Each of them says why."""
    left = [block for block in [*ALL, *DOCSTRINGS] if block.language == "python" and not block.runs]
    left = [block for block in left if not block.note.startswith("title=")]
    assert len(left) <= MOST_NOT_RUN
    assert all(re.fullmatch(r"no-run: \w.+", block.note) for block in left)


def test_every_block_is_of_a_kind_that_is_checked():
    assert {block.language for block in ALL} <= LANGUAGES
    # Without a language a block is a picture or an output. Commands are marked, so that they are checked.
    unmarked = [block for block in ALL if not block.language for line in commands_of(block) if not faults(line)]
    assert not unmarked


def commands_of(block):
    try:
        return [command for command in commands_in(block.code) if command[0] not in ("make", "git")]
    except ValueError:  # no shell: a quotation mark without its other half
        return []


@pytest.mark.parametrize("page", [page for page in PAGES if page != TUTORIAL], ids=name_of)
def test_commands_exist(page):
    written = [name for block in BLOCKS[page] for name in re.findall(r'title="(\w+\.py)"', block.note)]
    wrong = [
        f"{block.where}:{block.line}: {' '.join(command)}: {fault}"
        for block in BLOCKS[page]
        if block.language == "bash"
        for command in commands_in(block.code)
        if not {"python", *written} >= set(command)
        for fault in faults(command)
    ]
    assert not wrong, "\n".join(wrong)


def test_the_first_hour_was_run_as_it_stands():
    """From the wheel, in an empty folder, in less than an hour; what follows a block is what it printed."""
    subprocess.run([sys.executable, ROOT / "docs" / "tools" / "first_hour.py", "--check"], check=True)


@pytest.mark.parametrize(
    "line, said",
    [
        ("agentic-prompting refine --sandbx", "no option --sandbx"),
        ("agentic-prompting refin --sandbox", "no sub-command refin"),
        ("X=1 python -m benchmarks.speed.scoring --no_such", "no option --no_such"),
        ("accelerate launch --quiett examples/train_espl.py", "quiett"),
        ("accelerate launch --quiet examples/train_espl.py --refference_model x", "no option --refference_model"),
        ("accelerate launch --config_file examples/accelerate/none.yaml examples/train_espl.py", "no file"),
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


# Messages -----------------------------------------------------------------------------------------------------------


def texts_of(path):
    """The texts in a source file, `…` where something is filled in."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)


def plain(text):
    """On one line, with a single `…` for whatever is filled in, a percentage and quotation marks around it included."""
    return re.sub(r"[…%d'\"$]*(…|%d|%s)[…'\"]*", "…", " ".join(text.split()))


def test_messages_of_the_troubleshooting_page_are_the_codes():
    """All but transformers' own, one."""
    theirs = Path(find_spec("transformers").origin).with_name("training_args.py")  # read, not imported
    files = [*(ROOT / "src").rglob("*.py"), theirs]
    texts = {plain(text) for file in files for text in texts_of(file)}
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = [heading.strip("` ") for heading in re.findall(r"^### (`.+)$", page, re.MULTILINE)]
    assert len(headings) >= 40
    gone = [heading for heading in headings if not any(plain(heading).strip("…") in text for text in texts)]
    assert not gone


def test_a_reader_of_the_readme_decides_in_a_minute():
    """Before the first heading: the purpose in three sentences, a picture, two commands, what was not measured. Then
    own data to report in a dozen lines, and five figures."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    screen, _, rest = text.partition("\n## ")
    assert text.count("\n") <= 120 and screen.count("\n") <= 24
    assert screen.count("](docs/images/") == 1 and len(screen.split("\n\n")[1].split(". ")) <= 3
    (shell,) = [one.code for one in blocks_of(screen, "README.md") if one.shown]
    assert len([line for line in shell.splitlines() if not line.startswith("git clone")]) == 2
    assert re.search(r"\*\*Not measured\*\*: [^.]*\bGPU\b[^.]*\breal large LLM\b", " ".join(screen.split()))
    code = next(one.code for one in blocks_of(rest, "README.md") if one.shown and one.language == "python")
    assert all(word in code for word in ("load_task(", "trainer.train()", "write_report(")) and code.count("\n") <= 12
    figures = rest.partition("<!-- recomputed: speed.five -->")[2].partition("<!-- /")[0]
    assert figures.count("\n| ") == 6 and "HF_HUB_DISABLE_TELEMETRY=1" in text


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_a_missed_target_is_explained_below_its_table(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    wanting = [line.split("|")[1].split(" (`")[0].strip() for line in text.splitlines() if line.endswith("| no |")]
    below = text[text.rindex("| no |") if wanting else 0 :]
    assert all(" ".join(one.split(",")[0].split()) in below for one in wanting)


# The tutorial ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=LONG)], ids=["two steps", "as it is"])
def test_the_tutorial(whole, tmp_path):
    """From an empty folder to a served agent: every file is written and every command run, in order, by one shell. In
    two steps of each training nothing is learned."""
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
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)], cwd=folder, env=os.environ | paths, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    before, after = (float(share) for share in re.findall(r"(\d\.\d\d) of \d+ answers are right", done.stdout))
    assert not whole or (before <= 0.65 and after >= 0.8), done.stdout[-3000:]
    said = json.loads(re.search(r'^\{"id".*', done.stdout, re.MULTILINE)[0])
    assert said["model"] == "agent" and (not whole or said["choices"][0]["message"]["content"])
    assert done.stdout.count("-> the end") == 1 and (not whole or "environment    Oslo" in done.stdout)


# What scripts write -------------------------------------------------------------------------------------------------


def test_the_gallery_shows_what_the_notebooks_show():
    subprocess.run([sys.executable, ROOT / "docs" / "tools" / "gallery.py", "--check"], check=True)


def test_the_picture_of_the_rooms_is_the_sources():
    subprocess.run([sys.executable, ROOT / "docs" / "tools" / "draw_rooms.py", "--check"], check=True)


def test_every_table_of_the_scale_page_is_the_scripts():
    script = [sys.executable, "-m", "benchmarks.speed.scale"]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    for part in done.stdout.strip().split("\n\n"):
        assert part in page, f"run benchmarks/speed/scale.py and copy this into docs/scale.md:\n{part}"


def test_the_reference_has_what_readers_call():
    """What Python alone calls is not in it; signatures are wrapped, which takes a formatter where the site is built."""
    griffe = pytest.importorskip("griffe", reason="the extra [docs] is not installed")
    extension = griffe.load_extensions(ROOT / "docs" / "tools" / "huggingface_docstrings.py")
    package = griffe.load("agentic_prompting", search_paths=[ROOT / "src"], extensions=extension)
    waiting, names = [package], set()
    while waiting:
        inside = [one for one in waiting.pop().members.values() if not one.is_alias]
        names |= {one.name for one in inside}
        waiting += inside
    assert {"MultiTurnGRPOConfig", "limits", "__call__"} < names and "__getstate__" not in names
    settings = package["trainers.config.MultiTurnGRPOConfig"]
    assert (str(settings["max_turns"].value), str(settings["vllm_sync"].value)) == ("5", "'nccl'")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert "ruff" in next(line for line in project.splitlines() if line.startswith("docs = "))


def test_every_setting_is_on_the_page_of_settings():
    """Each class of ours that a program or a command takes has a table, with a line for every field."""
    from agentic_prompting.cli import COMMANDS
    from agentic_prompting.cli.programs import PROGRAMS

    tables = runpy.run_path(str(ROOT / "docs" / "tools" / "settings_tables.py"))
    page = (ROOT / "docs" / "reference" / "configuration.md").read_text(encoding="utf-8")
    shown = [getattr(import_module(module), name) for module, name in tables["DIRECTIVE"].findall(page)]
    taken = {kind for program in PROGRAMS.values() for kind in program}
    for name, (file, _) in COMMANDS.items():
        command = getattr(import_module(f"agentic_prompting.cli.{file}"), name.replace("-", "_"))
        taken |= {kind for kind in get_annotations(command, eval_str=True).values() if is_dataclass(kind)}
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


def _parts(requirement):
    return [f"[{part}]" for part in requirement.extras] or [""]


def test_every_extra_is_on_the_page_of_installation():
    """With what it brings, and the very words of what is said without it."""
    from agentic_prompting.cli.findings import EXTRAS

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {f"`[{name}]`": list(map(Requirement, of)) for name, of in project["optional-dependencies"].items()}
    page = (ROOT / "docs" / "howto" / "installation.md").read_text(encoding="utf-8")
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in page.splitlines() if line[:4] == "| `["]
    assert sorted(extra for extra, *_ in rows) == sorted(extras)
    texts = {plain(text) for file in (ROOT / "src").rglob("*.py") for text in texts_of(file)}
    texts |= {
        f"extra [{name}] is missing ({', '.join(missing)}), needed for {purpose}"
        for name, (missing, purpose) in EXTRAS.items()
    }
    for extra, _, brings, without in rows:
        wanted = [f"{one.name.removeprefix(project['name'])}{part}" for one in extras[extra] for part in _parts(one)]
        assert extra == "`[all]`" or sorted(re.findall(r"`([^`]+)`", brings)) == sorted(wanted)
        for message in re.findall(r"`(\S+ [^`]+)`", without):
            assert any(plain(message).strip("…") in text for text in texts), message


# The tools ----------------------------------------------------------------------------------------------------------


def test_the_reading_of_blocks():
    text = (
        "a\n\n```python\nx = 1\n```\n\n<!-- python, not shown:\ny = 2\n-->\n- b\n\n  ```python no-run: c\n  z\n  ```\n"
    )
    first, hidden, left = blocks_of(text, "page.md")
    assert first == Block("page.md", 4, "python", "", "x = 1\n")
    assert (hidden.code, hidden.line, hidden.shown, hidden.runs) == ("y = 2\n", 8, False, True)
    assert (left.code, left.note, left.runs) == ("z\n", "no-run: c", False)
