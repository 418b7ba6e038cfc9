"""Parts by name: the shipped ones by a word, your own as `module:name` or `path/to/file.py:name`.

One table for each kind of part, and one loader. The current directory is importable, as with `python -m`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isclass, isfunction, signature
from pathlib import Path
from typing import Any

REWARDS = {
    "prompt_r1": "agentic_prompting.rewards:PromptR1Reward",
    "math": "agentic_prompting.rewards:math_reward",
    "search": "agentic_prompting.rewards:search_reward",
    "exact_match": "agentic_prompting.rewards:exact_match_reward",
}
"""The shipped rewards of training and `evolve`, by name."""
SCORES = {
    f"{name}_match": f"agentic_prompting.rewards:{name}_match"
    for name in ("exact", "integer", "letter", "word_sorting")
}
"""The shipped comparisons of one answer with the accepted ones, by name."""
GRAMMARS = {
    "tags": "agentic_prompting.rollout:TagGrammar",
    "question": "agentic_prompting.rollout:QuestionGrammar",
    "free": "agentic_prompting.rollout:FreeText",
}
"""The shipped grammars, by name."""


class UnknownPart(ValueError):
    """There is no part of that name, or it is not what it should be."""


def load_part(name: str, kind: str, shipped: Mapping[str, str] = {}) -> Any:
    """The object of that name.

    Args:
        name (`str`): One of `shipped`, or `module:name`, or `path/to/file.py:name`.
        kind (`str`): The kind of part, for the error message.
        shipped (`Mapping[str, str]`, *optional*): Where the parts of this library are, by name.

    Raises:
        [`UnknownPart`]: In one line: there is no such part, with the nearest name, or its module cannot be imported.
    """
    place, colon, attribute = shipped.get(name, name).rpartition(":")
    if not colon or not place or not attribute:
        near = get_close_matches(name, shipped, n=1)
        guess = f"; did you mean {near[0]}?" if near else "."
        known = f" It is one of {', '.join(shipped)}, or your own as" if shipped else " Name it as"
        raise UnknownPart(
            f"there is no {kind} {name!r}{guess}{known} module:name, such as my_module:MyPart"
        )
    try:
        module = _of_file(Path(place)) if place.endswith(".py") else _of_name(place)
    except UnknownPart:
        raise
    except ModuleNotFoundError as error:
        here = (
            "start the command in the folder that holds it"
            if error.name == place
            else f"{place} imports it"
        )
        raise UnknownPart(f"no module {error.name}: {here}") from error
    except Exception as error:  # it is the user's code: whatever it raises
        raise UnknownPart(f"{place} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        near = get_close_matches(attribute, vars(module), n=1)
        raise UnknownPart(
            f"{place} has no {attribute}{f'; did you mean {near[0]}?' if near else ''}"
        )
    return getattr(module, attribute)


def _of_name(name: str) -> Any:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    return import_module(name)


def _of_file(file: Path) -> Any:
    """A file's module, imported once; what is beside it is importable, as with `python file.py`."""
    if not file.is_file():
        raise UnknownPart(f"{file} does not exist")
    folder, name = str(file.resolve().parent), file.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    there = sys.modules.get(name)
    if there is not None and getattr(there, "__file__", None) == str(file.resolve()):
        return there
    found = spec_from_file_location(name, file.resolve())
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    if there is None:  # so that pickles find it; a module of that name keeps its place
        sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except BaseException:
        if there is None:
            del sys.modules[name]
        raise
    return module


def load_environment(name: str) -> Any:
    """An environment: an object, its class, a function that makes one, or a function of a rollout or agent program.

    Raises:
        [`UnknownPart`]: In one line: there is no such thing, or it is no environment.
    """
    from ..environments import as_environment
    from ..programs import Program, is_agent

    try:
        made = _made(load_part(name, "environment"))
        return as_environment(Program(made) if is_agent(made) else made)
    except TypeError as error:
        raise UnknownPart(str(error)) from error


def load_tools(names: Sequence[str]) -> list[Any]:
    """Tools: functions, objects, or lists of them.

    Raises:
        [`UnknownPart`]: In one line: one of them does not exist.
    """
    parts = [load_part(name, "tool") for name in names]
    return [tool for part in parts for tool in (part if isinstance(part, list | tuple) else [part])]


def load_object(name: str, kind: str, shipped: Mapping[str, str] = {}) -> Any:
    """An object of the user's: it, an object of its class, or what a function without parameters makes.

    Raises:
        [`UnknownPart`]: In one line: there is no such thing, or making it failed.
    """
    return _made(load_part(name, kind, shipped))


def text_of(value: str | None) -> str | None:
    """A text that an option names: itself, or the content of a file of that name."""
    file = Path(value) if value and "\n" not in value and len(value) < 256 else None
    return file.read_text(encoding="utf-8") if file is not None and file.is_file() else value


def load_reward(name: str) -> Callable[..., Any]:
    """A reward function: a shipped one or your own, with TRL's signature; a class is called without arguments.

    Raises:
        [`UnknownPart`]: In one line: there is no such reward, or it cannot be called.
    """
    return _callable(_made(load_part(name, "reward", REWARDS), functions=False), name, "reward")


def load_rewards(names: Sequence[str]) -> Any:
    """The reward functions of those names; a single name may be of a dict of them by environment.

    Raises:
        [`UnknownPart`]: As [`load_reward`].
    """
    if len(names) == 1 and isinstance(part := load_part(names[0], "reward", REWARDS), Mapping):
        return part
    return [load_reward(name) for name in names]


def load_score(name: str, kind: str = "score") -> Callable[..., Any]:
    """A comparison of an answer with the accepted ones: `score(answer, answers)`, from 0 to 1.

    Raises:
        [`UnknownPart`]: In one line: there is no such comparison, or it cannot be called.
    """
    return _callable(_made(load_part(name, kind, SCORES), functions=False), name, kind)


def register_selection(name: str) -> None:
    """Make your own selection rule known by its `module:name`, under which settings and checkpoints keep it.

    It is called with the candidates (oldest first), how many to draw, and a `random.Random`; it returns positions. A
    shipped rule's name, and one without a colon, is left to the settings to check.

    Raises:
        [`UnknownPart`]: In one line: there is no such rule, or it cannot be called.
    """
    from ..evolution.selection import RULES

    if ":" in name and name not in RULES:
        RULES[name] = partial(
            _without_settings, _callable(load_part(name, "selection rule"), name, "selection rule")
        )


def register_selections(words: Sequence[str]) -> None:
    """[`register_selection`] for each `--selection` of a command line, which the settings are then made of."""
    for word, after in zip(words, [*words[1:], ""], strict=True):
        option, equals, value = word.partition("=")
        if option == "--selection":
            register_selection(value if equals else after)


def _without_settings(
    rule: Callable[..., Any], members: Any, k: int, rng: Any, **settings: float
) -> Any:
    return rule(members, k, rng)


def register_judge(name: str) -> str:
    """Make `judge(answer, answers)` a metric of that name, and return the name."""
    from ..evaluation.metrics import METRICS, each

    METRICS[name] = each(load_score(name, "judge"))  # type: ignore[index]
    return name


def _made(part: Any, functions: bool = True) -> Any:
    """An object of a class, or what a function without parameters makes."""
    makes_one = isclass(part) or (functions and isfunction(part) and not signature(part).parameters)
    try:
        return part() if makes_one else part
    except Exception as error:
        name = getattr(part, "__name__", part)
        raise UnknownPart(f"{name}() failed: {type(error).__name__}: {error}") from error


def _callable(part: Any, name: str, kind: str) -> Callable[..., Any]:
    if not callable(part):
        raise UnknownPart(f"{name} is a {type(part).__name__}, and a {kind} is called")
    return part
