"""Parts by name: the shipped ones by a word, your own as `module:name` or `path/to/file.py:name`.

One table for each type of part, and one loader. The current directory is importable, as with
`python -m`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import partial, wraps
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import isclass, iscoroutinefunction, isfunction, signature
from pathlib import Path
from random import Random
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..rollout import AgentSpec, Environment

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


class UnknownPart(ValueError):
    """There is no part of that name, or it is not what it should be."""


def load_part(name: str, part_type: str, shipped: Mapping[str, str] = {}) -> Any:
    """The object of that name.

    Args:
        name (`str`): One of `shipped`, or `module:name`, or `path/to/file.py:name`.
        part_type (`str`): The type of part, such as `reward`, for the error message.
        shipped (`Mapping[str, str]`, *optional*): Where the parts of this library are, by name.

    Raises:
        [`UnknownPart`]: In one line: there is no such part, with the nearest name, or its module
        cannot be imported.
    """
    # A shipped part has an entry in the table, any other name is `module:name` already.
    module_name, colon, attribute = shipped.get(name, name).rpartition(":")
    if not colon or not module_name or not attribute:
        choices = f"one of {', '.join(shipped)}, or your own as " if shipped else ""
        suggestion = suggest(name, shipped) or "."
        raise UnknownPart(
            f"there is no {part_type} {name!r}{suggestion} Name {choices}module:name, such as "
            "my_module:MyPart"
        )
    # Import the module from its file, or by its name.
    try:
        if module_name.endswith(".py"):
            module = _import_file(Path(module_name))
        else:
            module = _import_module(module_name)
    except UnknownPart:
        raise
    except ModuleNotFoundError as error:
        # Either the module itself is missing, or one that it imports.
        reason = f"{module_name} imports it"
        if error.name == module_name:
            reason = "start the command in the folder that holds it"
        raise UnknownPart(f"no module {error.name}: {reason}") from error
    except Exception as error:  # the user's code may raise anything
        raise UnknownPart(
            f"{module_name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    # The module is there, but the name in it may be misspelt.
    if not hasattr(module, attribute):
        raise UnknownPart(f"{module_name} has no {attribute}{suggest(attribute, vars(module))}")
    return getattr(module, attribute)


def suggest(name: str, names: Collection[str]) -> str:
    """The end of an error that names the nearest of the right names; empty if none is near."""
    nearest = get_close_matches(name, names, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _import_module(name: str) -> ModuleType:
    # The current directory is importable, as with `python -m`.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return import_module(name)


def _import_file(file: Path) -> ModuleType:
    """A file's module, imported once; modules beside it are importable, as with `python file.py`."""
    if not file.is_file():
        raise UnknownPart(f"{file} does not exist")
    path = file.resolve()
    folder = str(path.parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    # A second part from the same file comes from the same module.
    name = file.stem
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) == str(path):
        return loaded
    # Pickles look the module up by its name, unless another module has that name already.
    return import_file(path, name, is_registered=loaded is None)


def import_file(path: Path, name: str, is_registered: bool = True) -> ModuleType:
    """Import a file as a module of that name, which other imports find only if it is registered."""
    spec = spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    if is_registered:
        sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if is_registered:
            # A half-imported module must not be found the next time.
            del sys.modules[name]
        raise
    return module


def find_source_file(name: str) -> Path | None:
    """The file of a part that has been loaded by its name; `None` if its module has none."""
    module_name = name.partition(":")[0]
    if module_name.endswith(".py"):
        return Path(module_name)
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return Path(file) if file else None


def load_environment(name: str) -> Any:
    """An environment: an object, its class, a function that makes one, or a function of a rollout
    or agent program.

    Raises:
        [`UnknownPart`]: In one line: there is no such thing, or it is not an environment.
    """
    from ..environments import as_environment
    from ..programs import Program, is_agent

    try:
        # An agent becomes an environment as a program.
        part = _make_object(load_part(name, "environment"))
        environment = as_environment(Program(part) if is_agent(part) else part)
    except TypeError as error:
        raise UnknownPart(str(error)) from error
    if environment is None:
        raise UnknownPart(
            f"{name} is None, or returns it: an environment is an object with a step(rollout) or a "
            "function of the rollout, an agent a function of (row, base_url, api_key)"
        )
    return environment


def make_untrained_spec(environment: Environment) -> AgentSpec:
    """The prompt, grammar and tools of an agent in an environment: those of training without
    options.
    """
    from ..rollout import AgentSpec, TagGrammar, template_for

    grammar = environment.grammar or TagGrammar()
    return AgentSpec(
        prompt_template=template_for(environment, grammar),
        grammar=grammar,
        chat_template_kwargs=dict(environment.chat_template_kwargs),
    )


def load_tools(names: Sequence[str]) -> list[Any]:
    """Tools: functions, objects, or lists of them.

    Raises:
        [`UnknownPart`]: In one line: one of them does not exist.
    """
    tools: list[Any] = []
    for name in names:
        part = load_part(name, "tool")
        tools += part if isinstance(part, list | tuple) else [part]
    return tools


def load_object(name: str, part_type: str, shipped: Mapping[str, str] = {}) -> Any:
    """Load a user's object.

    A class or a function without parameters is called; anything else is returned as it is.

    Raises:
        [`UnknownPart`]: In one line: there is no such thing, or making it failed.
    """
    return _make_object(load_part(name, part_type, shipped))


def text_or_file(value: str | None) -> str | None:
    """A text that an option names: itself, or the content of a file of that name."""
    # A text of several lines, or a long one, is not a file name.
    may_be_file_name = value and "\n" not in value and len(value) < 256
    if value and may_be_file_name and Path(value).is_file():
        return Path(value).read_text(encoding="utf-8")
    return value


def load_reward(name: str) -> Callable[..., Any]:
    """A reward function: a shipped one or your own, with TRL's signature; a class is called without
    arguments.

    Raises:
        [`UnknownPart`]: In one line: there is no such reward, or it cannot be called.
    """
    return _load_callable(name, "reward", REWARDS)


def load_rewards(names: Sequence[str]) -> Any:
    """The reward functions of those names; a single name may be of a dict of them by environment.

    Raises:
        [`UnknownPart`]: As [`load_reward`].
    """
    # A dict of reward functions by environment has to stand alone.
    if len(names) == 1:
        part = load_part(names[0], "reward", REWARDS)
        if isinstance(part, Mapping):
            return part
    return [load_reward(name) for name in names]


def load_score(name: str, part_type: str = "score") -> Callable[..., Any]:
    """A comparison of an answer with the accepted ones: `score(answer, answers)`, from 0 to 1.

    Raises:
        [`UnknownPart`]: In one line: there is no such comparison, or it cannot be called with these
            two. One of your own raises it when called, too, if it fails or returns a number that is
            not from 0 to 1.
    """
    score = _load_callable(name, part_type, SCORES)
    is_shipped = name in SCORES or name in SCORES.values()
    return score if is_shipped else _guard_score(score, f"the {part_type} {name}")


def register_selection(name: str | None) -> None:
    """Make your own selection rule known by its `module:name`, under which settings and checkpoints
    keep it.

    It is called with the candidates (oldest first), how many to draw, and a `random.Random`; it
    returns positions. A shipped rule's name, and one without a colon, is left to the settings to
    check.

    Raises:
        [`UnknownPart`]: In one line: there is no such rule, or it cannot be called.
    """
    from ..evolution.selection import SELECTION_RULES

    if name and ":" in name and name not in SELECTION_RULES:
        rule = _load_callable(name, "selection rule")
        # Shipped rules also take settings, which a rule of your own does not know.
        SELECTION_RULES[name] = partial(_call_rule, rule)


def _call_rule(
    rule: Callable[..., Any], members: Any, k: int, rng: Random, **settings: float
) -> Any:
    """Call a rule of the user's, without the settings that only shipped rules take."""
    return rule(members, k, rng)


def register_judge(name: str) -> str:
    """Make `judge(answer, answers)` a metric of that name, and return the name."""
    from ..evaluation.metrics import METRICS, each

    METRICS[name] = each(load_score(name, "judge"))  # type: ignore[index]
    return name


def refuse_own_metrics(names: Sequence[str], option: str) -> None:
    """Refuse names of metrics that are functions of the user's own, which another option takes.

    Args:
        names (`Sequence[str]`): The names that `--metric` has.
        option (`str`): The option for such functions.

    Raises:
        `ValueError`: One of them is such a function, or is missing in a module of the current
        directory.
    """
    from ..evaluation.metrics import METRICS

    for name in names:
        module_name, colon, _ = name.rpartition(":")
        if not colon or name in METRICS:
            continue
        try:
            is_own = callable(load_part(name, "metric"))
        except UnknownPart:
            # It may be a metric of the package `evaluate` with a key, such as rouge:rougeL.
            if Path(f"{module_name.replace('.', '/')}.py").is_file():
                raise
            continue
        if is_own:
            raise ValueError(
                f"--metric {name} is a function of your own: name it with {option} {name}"
            )


def _guard_score(score: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A user's score whose faults are errors of one line."""
    from ..llm.guard import failure_of

    # Wrong parameters are found before anything is paid.
    try:
        signature(score).bind("answer", ["accepted answer"])
    except TypeError as error:
        raise UnknownPart(
            f"{name} is called with an answer and the list of accepted ones: {error}"
        ) from None
    except ValueError:  # functions written in C may have no signature
        pass

    @wraps(score)
    def guarded(answer: str, answers: Sequence[str]) -> Any:
        try:
            value = score(answer, answers)
        except Exception as error:  # the user's code may raise anything
            raise failure_of(UnknownPart, name, error) from error
        if isinstance(value, int | float) and (value < 0 or value > 1):
            raise UnknownPart(f"{name} returned {value:g}, but a score is from 0 to 1")
        return value

    return guarded


def _make_object(part: Any) -> Any:
    """An object of a class, or what a function without parameters returns."""
    # A function with parameters is itself the part, such as a reward.
    is_factory = (
        isfunction(part) and not iscoroutinefunction(part) and not signature(part).parameters
    )
    if not isclass(part) and not is_factory:
        return part
    # The user's code may raise anything.
    try:
        return part()
    except Exception as error:
        name = getattr(part, "__name__", part)
        raise UnknownPart(f"{name}() failed: {type(error).__name__}: {error}") from error


def _load_callable(
    name: str, part_type: str, shipped: Mapping[str, str] = {}
) -> Callable[..., Any]:
    """A function, or an object of a class that can be called."""
    part = load_part(name, part_type, shipped)
    if isclass(part):
        part = _make_object(part)
    if not callable(part):
        raise UnknownPart(
            f"{name} is a {type(part).__name__}, but a {part_type} has to be callable"
        )
    return part
