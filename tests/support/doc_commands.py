"""The mistakes in a shell line of the documentation, found without running it: files, sub-commands, options."""

from __future__ import annotations

import contextlib
import functools
import io
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


def commands_in(code: str) -> Iterator[list[str]]:
    """The commands of a shell block as words: one per line or between `&&`, `|` and `;`, without comments."""
    for line in re.sub(r"\\\n\s*", " ", code).splitlines():
        words = shlex.split(re.sub(r"\s&$", "", line.split(" # ")[0].strip()), comments=True)
        command: list[str] = []
        for word in [*words, "&&"]:
            if word in ("&&", "|", ";", "&"):
                while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                    del command[0]  # a variable for this command
                if command:
                    yield command
                command = []
            else:
                command.append(word)


def faults(command: Sequence[str]) -> list[str]:
    """The names in a command that do not exist; an empty list if it could be run."""
    name, *rest = command
    name = Path(name).name
    missing = [
        f"no file {word}"
        for word in rest
        if _KEPT_HERE.fullmatch(word) and not (ROOT / word).exists()
    ]
    check = _CHECKS.get(name)
    if check is None:
        return (
            missing if name in OTHERS else [*missing, f"{name} is no command that this test knows"]
        )
    return missing or check(rest)


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
        known = _options_of_command(name, words[1], "--help-all") | _options_of_command(name)
    elif name in ("train", "demo"):
        return []  # most options are passed on
    else:
        known = _options_of_command(name)
    return [
        f"agentic-prompting {name} has no option {option}"
        for option in _options(words)
        if option not in known
    ]


_TOP_OPTIONS = {"--help", "--version", "--install-completion", "--show-completion"}


@functools.cache
def _options_of_command(*words: str) -> frozenset[str]:
    """The options in a sub-command's help."""
    from agentic_prompting.cli import main

    shown = io.StringIO()
    help_option = [] if "--help-all" in words else ["--help"]
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main([*words, *help_option])
    names = set(re.findall(r"--?[A-Za-z][\w-]*", shown.getvalue()))
    return frozenset(names | {"--help", "--config"} if words[0] == "train" else names)


def _accelerate(words: Sequence[str]) -> list[str]:
    from accelerate.commands.launch import launch_command_parser

    if words[0] != "launch":
        return [f"accelerate {words[0]} is not looked into"]
    with contextlib.redirect_stderr(io.StringIO()) as said:
        try:
            parsed = launch_command_parser().parse_args(words[1:])
        except SystemExit:
            return [said.getvalue()]
    # argparse.REMAINDER passes unknown options to the script.
    return _python([parsed.training_script, *parsed.training_script_args])


def _python(words: Sequence[str]) -> list[str]:
    program, rest = (words[1], words[2:]) if words[0] == "-m" else (words[0], words[1:])
    if program in ("pip", "venv", "pytest", "mkdocs", "ruff"):
        return _CHECKS.get(program, lambda _: [])(rest)
    if words[0] != "-m" and not (ROOT / program).is_file():
        return [f"no file {program}"]
    known = _help_of(program, words[0] == "-m")
    return [f"{program} has no option {option}" for option in _options(rest) if option not in known]


@functools.cache
def _help_of(program: str, module: bool) -> frozenset[str]:
    """The options in a program's `--help`, after which it ends; in its `--help-all`, where it has one."""
    path = ROOT / (program.replace(".", "/") + ".py" if module else program)
    is_ours = path.is_file()
    if is_ours and not re.search(r"Parser|import main|argv", path.read_text(encoding="utf-8")):
        return frozenset()  # takes no options, and would run
    said = _printed(program, module, "--help")
    assert "--help" in said, f"{program} ran instead of printing its help"
    if "--help-all" in said:
        said += _printed(program, module, "--help-all")
    known = set(re.findall(r"--?[A-Za-z][\w-]*", said))
    # TRL's parser removes this option before argparse sees the rest, so that the help does not list it.
    return frozenset(known | {"--config"} if "--output_dir" in known else known)


def _printed(program: str, module: bool, option: str) -> str:
    said = io.StringIO()
    path = list(sys.path)
    with mock.patch.object(sys, "argv", [program, option]), contextlib.redirect_stdout(said):
        try:
            if module:
                runpy.run_module(program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(str(ROOT / program), run_name="__main__")
        except SystemExit as end:
            assert not end.code, f"{program} {option} ended with {end.code}"
        finally:
            sys.path[:] = path
    return said.getvalue()


def _make(words: Sequence[str]) -> list[str]:
    targets = re.findall(
        r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    named = [word for word in words if not _NOT_A_PATH.match(word) and not word.startswith("-")]
    return [f"the Makefile has no target {word}" for word in named if word not in targets]


def _pip(words: Sequence[str]) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = set(project["optional-dependencies"])
    named = re.findall(r"(?:agentic-prompting|\.)\[([\w,-]+)\]", " ".join(words))
    return [
        f"there is no extra [{name}]"
        for group in named
        for name in group.split(",")
        if name not in extras
    ]


_CHECKS: dict[str, Callable[[Sequence[str]], list[str]]] = {
    "agentic-prompting": _agentic_prompting,
    "accelerate": _accelerate,
    "python": _python,
    "python3": _python,
    "make": _make,
    "pip": _pip,
    "mkdocs": lambda _: [],
}
