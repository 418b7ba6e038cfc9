"""The mistakes in a shell line of the documentation, found without running it: files, sub-commands,
options.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[2]
# Programs that are not ours and are not checked.
OTHERS = {
    "git",
    "cd",
    "export",
    "curl",
    "source",
    "jupyter",
    "vllm",
    "ollama",
    "llama-server",
    "lms",
    "convert_hf_to_gguf.py",
    "sbatch",
    "ssh",
    "rm",
    "kill",
}
_KEPT_HERE = re.compile(r"(examples|benchmarks|docs|tests|src)/[\w./-]+\.\w+")
_NOT_A_PATH = re.compile(r"^(\w+=\S*|\.\.\.)$")


_OPERATORS = frozenset({"&&", "|", ";", "&"})
_VARIABLE = re.compile(r"[A-Z_]+=.*", re.DOTALL)


def commands_in(code: str) -> Iterator[list[str]]:
    """The commands of a shell block as words: one per line or between `&&`, `|` and `;`, without
    comments.
    """
    for line in re.sub(r"\\\n\s*", " ", code).splitlines():
        words = shlex.split(re.sub(r"\s&$", "", line.split(" # ")[0].strip()), comments=True)
        for is_operator, group in itertools.groupby(words, _OPERATORS.__contains__):
            # Variables for a command stand in front of it.
            command = list(itertools.dropwhile(_VARIABLE.fullmatch, group))
            if command and not is_operator:
                yield command


def faults(command: Sequence[str]) -> list[str]:
    """The names in a command that do not exist; an empty list if it could be run."""
    name, *rest = command
    name = Path(name).name
    paths = [word for word in rest if _KEPT_HERE.fullmatch(word)]
    missing = [f"no file {path}" for path in paths if not (ROOT / path).exists()]
    if name in OTHERS:
        return missing
    if name not in _CHECKS:
        return [*missing, f"{name} is no command that this test knows"]
    return missing or _CHECKS[name](rest)


def _options(words: Sequence[str]) -> list[str]:
    return [word.split("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]


def _agentic_prompting(words: Sequence[str]) -> list[str]:
    from agentic_prompting.cli import COMMANDS

    if not words or words[0].startswith("-"):
        return [word for word in _options(words) if word not in _TOP_OPTIONS]
    name = words[0]
    if name not in COMMANDS:
        return [f"agentic-prompting has no sub-command {name}; it has: {', '.join(COMMANDS)}"]
    if name == "train" and len(words) > 1 and not words[1].startswith("-"):
        options = _options_of_command(name, words[1], "--help-all") | _options_of_command(name)
    elif name in ("train", "demo"):
        return []  # most options are passed on
    else:
        options = _options_of_command(name)
    unknown = [option for option in _options(words) if option not in options]
    return [f"agentic-prompting {name} has no option {option}" for option in unknown]


_TOP_OPTIONS = {"--help", "--version", "--install-completion", "--show-completion"}


@functools.cache
def _options_of_command(*words: str) -> frozenset[str]:
    """The options in a sub-command's help."""
    from agentic_prompting.cli import main

    printed = io.StringIO()
    help_option = [] if "--help-all" in words else ["--help"]
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main([*words, *help_option])
    options = set(re.findall(r"--?[A-Za-z][\w-]*", printed.getvalue()))
    if words[0] == "train":
        options |= {"--help", "--config"}
    return frozenset(options)


def _accelerate(words: Sequence[str]) -> list[str]:
    from accelerate.commands.launch import launch_command_parser

    if words[0] != "launch":
        return [f"accelerate {words[0]} is not looked into"]
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        try:
            parsed = launch_command_parser().parse_args(words[1:])
        except SystemExit:
            return [stderr.getvalue()]
    # argparse.REMAINDER passes unknown options to the script.
    return _python([parsed.training_script, *parsed.training_script_args])


def _python(words: Sequence[str]) -> list[str]:
    is_module = words[0] == "-m"
    program, *rest = words[1:] if is_module else words
    if program in ("pip", "venv", "pytest", "mkdocs", "ruff"):
        return _CHECKS[program](rest) if program in _CHECKS else []
    if not is_module and not (ROOT / program).is_file():
        return [f"no file {program}"]
    options = _options_of_program(program, is_module)
    unknown = [option for option in _options(rest) if option not in options]
    return [f"{program} has no option {option}" for option in unknown]


@functools.cache
def _options_of_program(program: str, is_module: bool) -> frozenset[str]:
    """The options in a program's `--help`, after which it ends; in its `--help-all`, where it has
    one.
    """
    path = ROOT / (program.replace(".", "/") + ".py" if is_module else program)
    is_ours = path.is_file()
    if is_ours and not re.search(r"[Pp]arser|import main|argv", path.read_text(encoding="utf-8")):
        return frozenset()  # takes no options, and would run
    help_text = _printed(program, is_module, "--help")
    assert "--help" in help_text, f"{program} ran instead of printing its help"
    if "--help-all" in help_text:
        help_text += _printed(program, is_module, "--help-all")
    options = set(re.findall(r"--?[A-Za-z][\w-]*", help_text))
    # TRL's parser removes this option before argparse sees the rest, so that the help does not list
    # it.
    if "--output_dir" in options:
        options.add("--config")
    return frozenset(options)


def _printed(program: str, is_module: bool, option: str) -> str:
    printed = io.StringIO()
    path = list(sys.path)
    with mock.patch.object(sys, "argv", [program, option]), contextlib.redirect_stdout(printed):
        try:
            if is_module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / program), run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{program} {option} ended with {end.code}"
        finally:
            sys.path[:] = path
    return printed.getvalue()


def _make(words: Sequence[str]) -> list[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([\w-]+):", makefile, re.MULTILINE)
    named = [word for word in words if not _NOT_A_PATH.match(word) and not word.startswith("-")]
    return [f"the Makefile has no target {word}" for word in named if word not in targets]


def _pip(words: Sequence[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    groups = re.findall(r"(?:agentic-prompting|\.)\[([\w,-]+)\]", " ".join(words))
    names = ",".join(groups).split(",") if groups else []
    return [f"there is no extra [{name}]" for name in names if name not in extras]


_CHECKS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "agentic-prompting": _agentic_prompting,
    "accelerate": _accelerate,
    "python": _python,
    "python3": _python,
    "make": _make,
    "pip": _pip,
    "mkdocs": lambda _: [],
}
