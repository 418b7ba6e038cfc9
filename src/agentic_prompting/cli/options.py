"""How options are declared, and what several commands and programs take: models, rows, a recording, a budget.

An option is a field of a dataclass, ours or the Python API's, declared there alone: [`command`] reads it for Typer,
TRL's parser for the training programs. Light to import: heavy imports are in the functions.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, cached_property
from importlib import import_module
from inspect import Parameter, Signature, getdoc, isclass, isfunction, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

if TYPE_CHECKING:
    from datasets import Dataset

    from ..environments import LLMEnvironment
    from ..llm import Budget, OpenAIChat, ReplayCache
    from ..rollout import Environment


def setting(help: str, default: Any = None) -> Any:
    """An option of a program or of the command: a dataclass's field with its help."""
    return field(default=default, metadata={"help": help})


def option(help: str, *names: str) -> Any:
    """An option of one command alone, with its names where they are not the parameter's own."""
    return typer.Option(*names, help=help, show_default=False)


AsJson = Annotated[bool, option("Print one JSON object instead of text.", "--json")]
OutputDir = Annotated[Path | None, option("Folder to write to, instead of the default.", "--output-dir", "--output")]


@dataclass
class Recording:
    """Where replies are kept."""

    replay_cache: Path | None = setting("SQLite file of recorded replies: those in it are not paid twice.")

    @cached_property
    def cache(self) -> ReplayCache | None:
        """One for all clients."""
        from ..llm import ReplayCache

        return ReplayCache(self.replay_cache) if self.replay_cache else None

    def connect(self, stack: ExitStack, model: str | None, base_url: str | None = None, **options: Any) -> OpenAIChat:
        """A client, closed with the stack. One for each role: then each has its own bill."""
        from ..llm import OpenAIChat

        return stack.enter_context(OpenAIChat(str(model), base_url=base_url, cache=self.cache, **options))


@dataclass
class Spending:
    """What may be spent."""

    budget_usd: float | None = setting("What all models together may spend, in US $.")
    budget_tokens: int | None = setting("The same in tokens, read and written, also where the price is not known.")

    def budget(self, book: Path | None = None) -> Budget:
        """With its book beside the results, so that a run that goes on does not get the budget again."""
        from ..llm import Budget

        return Budget(self.budget_usd, self.budget_tokens, book)


@dataclass
class EnvironmentModel(Recording):
    """The large LLM in the environment."""

    environment_model: str | None = setting("The large LLM, by its name at its endpoint.")
    environment_base_url: str | None = setting("Its OpenAI-compatible endpoint.")
    environment_max_tokens: int | None = setting("Of each of its replies; sent with every call.")

    def as_environment(self, chat: OpenAIChat, **sampling: Any) -> LLMEnvironment:
        """It as an environment; of the sampling options those that are not `None` are sent."""
        from ..environments import LLMEnvironment

        given = {"max_tokens": self.environment_max_tokens, **sampling}
        return LLMEnvironment(chat, **{name: value for name, value in given.items() if value is not None})


@dataclass
class ReferenceModel(Recording):
    """E-SPL's reference LLM."""

    reference_model: str | None = setting("The LLM that reflects and edits, by its name at its endpoint.")
    reference_base_url: str | None = setting("Its OpenAI-compatible endpoint.")

    def reference(self, stack: ExitStack) -> OpenAIChat:
        return self.connect(stack, self.reference_model, self.reference_base_url)


@dataclass
class LargeLLM(EnvironmentModel, Spending):
    """The large LLM that a trained agent asks, or what it has in its place."""

    sandbox: bool = setting("The sandbox's oracle is the large LLM: no key, no network.", False)
    environment: str | None = setting("Instead of a large LLM an environment of your own: module:name.")

    def check(self) -> None:
        """Raises `ValueError` unless exactly one is named."""
        if [self.sandbox, self.environment_model is not None, self.environment is not None].count(True) != 1:
            raise ValueError(
                "name the large LLM with --environment-model NAME, or say --sandbox, or name an environment of your "
                "own with --environment MODULE:NAME"
            )

    def opened(self, stack: ExitStack, budget: Budget) -> Environment:
        """What the agent asks, checked, its spending in `budget`; a large LLM's client is closed with the stack."""
        from ..llm import charge

        opened: Any = (
            own_environment(self.environment)
            if self.environment is not None
            else self.as_environment(self.connect(stack, *self.endpoint(stack)))
        )
        charge(budget, environment=opened)  # a budget that cannot be kept is found before anything is spent
        stack.callback(opened.close)
        opened.check()
        return opened

    def endpoint(self, stack: ExitStack) -> tuple[str | None, str | None]:
        """Name and address: those that were given, or the sandbox's oracle, started and closed with the stack."""
        if not self.sandbox:
            return self.environment_model, self.environment_base_url
        from ..sandbox import Oracle
        from ..sandbox.server import MODEL, OracleServer

        return MODEL, stack.enter_context(OracleServer(Oracle())).base_url


@dataclass
class TaskRows:
    """What is taken of a task's data set."""

    task_split: str = setting("Its split.", "train")
    task_rows: int | None = setting("Sample this many rows; all by default.")
    data_files: str | None = setting("Local files instead of the hub.")
    dataset: str | None = setting("Your own rows instead of a task: a file (.jsonl, .json, .csv, .tsv, .parquet).")
    columns: str | None = setting("Which of its columns is which: question=q,answers=a.")

    def load(self, task: str, seed: int) -> Dataset:
        """The rows. Raises `ValueError`, in one line, for what cannot be had."""
        from ..data import is_own, load_task

        pairs = [pair.partition("=") for pair in (self.columns or "").split(",") if pair]
        if not all(ours and theirs for ours, _, theirs in pairs):
            raise ValueError(f"columns={self.columns} is not of the form question=q,answers=a")
        options: dict[str, Any] = {"data_files": self.data_files, "columns": {a: b for a, _, b in pairs} or None}
        if not is_own(self.dataset or task) and not self.data_files:
            hub_answers()
        try:
            return load_task(self.dataset or task, self.task_split, self.task_rows, seed, **options)
        except RuntimeError as error:
            raise ValueError(" ".join(str(error).split())) from error


# --- an environment of one's own -------------------------------------------------------------------------------------


def own_environment(name: str) -> Any:
    """What `module:name` is; a class, or a function that takes nothing, is called.

    Raises:
        `ValueError`: In one line: there is no such thing, or it is no environment.
    """
    from ..environments import as_environment

    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"say where the environment is: module:name, such as my_env:Calculator; got {name}")
    module = module.removesuffix(".py").replace("/", ".")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = vars(import_module(module))
    except ModuleNotFoundError as error:
        raise ValueError(f"no module {error.name}: start the command in the folder that holds it") from error
    finally:
        sys.path.pop(0)
    if attribute not in found:
        near = get_close_matches(attribute, found, n=1)
        raise ValueError(f"{module} has no {attribute}{f'; did you mean {near[0]}?' if near else ''}")
    one = found[attribute]
    makes_one = isclass(one) or (isfunction(one) and not signature(one).parameters)
    try:
        return as_environment(one() if makes_one else one)
    except TypeError as error:
        raise ValueError(str(error)) from error


# --- folders, looked at before anything is loaded --------------------------------------------------------------------


def check_agent(run: str | Path) -> None:
    """Raise `ValueError` for a folder that is not there or holds no model. A hub id (`user/name`) passes."""
    folder = Path(run)
    if not folder.exists() and ("/" not in str(run) or _only_a_folder(str(run))):
        raise ValueError(f"{run} does not exist; `agentic-prompting demo --output-dir {run}` trains an agent there")
    if folder.is_dir() and not any((folder / name).exists() for name in ("config.json", "adapter_config.json")):
        raise ValueError(f"{run} holds no model (no config.json); give the folder that a trainer saved")
    check_model(run)


def check_model(name: str | Path) -> None:
    """Raise `ValueError` for what is neither here nor on the hub, or for an adapter without its base model."""
    if not Path(name).exists():
        _check_on_hub(str(name))
    adapter = Path(name) / "adapter_config.json"
    if adapter.is_file():
        base = str(json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") or "")
        near = next((above for above in adapter.resolve().parents if (above / base).is_dir()), None)
        if not Path(base).exists() and (near or _only_a_folder(base)):
            there = f"start the command in {near}, or" if near else "it is not there:"
            raise ValueError(f"{name} belongs to the base model in {base}: {there} write the full path into {adapter}")


def _only_a_folder(name: str) -> bool:
    """Whether a name can be no hub id: those have one slash, and nobody has a folder of the user's name here."""
    sure = name.startswith((".", "/", "~", "runs/")) or name.count("/") > 1
    return "/" in name and (sure or Path(name).parent.is_dir())


def _check_on_hub(name: str) -> None:
    """Raise `ValueError`, at once, for a model that is in no cache and that the hub does not give."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    known = "give the folder of a model, or its name on the hub"
    if _only_a_folder(name):
        raise ValueError(f"{name} does not exist: {known}")
    try:
        if any(isinstance(try_to_load_from_cache(name, one), str) for one in ("config.json", "adapter_config.json")):
            hub_answers()
        elif not hub_answers():
            raise ValueError(f"{name} is no folder here, and the hub cannot be reached: {known} where it can be")
        else:
            HfApi().model_info(name, timeout=_HUB_SECONDS)
    except (RepositoryNotFoundError, HFValidationError):
        raise ValueError(
            f"{name} is no folder here, and the hub has no such model, or not for you (a private one needs HF_TOKEN): "
            f"{known}"
        ) from None


_HUB_SECONDS = 5


@cache
def hub_answers() -> bool:
    """Whether the hub does; asked once. If not, its libraries go on from their caches: each tries for 40 s else."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=_HUB_SECONDS)
    except Exception:  # of whichever HTTP package it has
        constants.HF_HUB_OFFLINE = True
        if "datasets" in sys.modules:
            sys.modules["datasets"].config.HF_HUB_OFFLINE = True
        print(f"{constants.ENDPOINT} cannot be reached: what the cache has is taken", file=sys.stderr)
    return not constants.HF_HUB_OFFLINE


@dataclass
class HeldOutRows:
    """What is only looked at, never learned from."""

    eval_task: str | None = setting("Held out: TASK/SPLIT or a file; several with commas.")
    eval_task_rows: int | None = setting("Sample this many of each; all by default.")

    def held_out(self, seed: int) -> Dataset | None:
        """The rows that curves are measured on, if any are named."""
        from datasets import concatenate_datasets

        from ..data import is_own, load_task

        parts = []
        for name in self.eval_task.split(",") if self.eval_task else ():
            task, _, split = (name, "", "") if is_own(name) else name.partition("/")
            parts.append(load_task(task, split or "test", self.eval_task_rows, seed))
        return concatenate_datasets(parts) if parts else None


# --- what a terminal shows -------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print what may hold a model's words: what in it would steer the terminal is shown instead."""
    from ..llm.wire import visible

    print(visible(text))


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Says what takes so long, while it does, on a terminal's error stream; nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else nullcontext():
        yield


# --- dataclasses as options ------------------------------------------------------------------------------------------


def command(function: Callable[..., int]) -> Callable[..., int]:
    """A function as Typer takes it: where a parameter is a dataclass there is an option for each of its fields."""
    hints = get_type_hints(function, include_extras=True)
    settings = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    parameters: list[Parameter] = []
    for name, parameter in signature(function).parameters.items():
        own = [parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])]
        parameters += options_of(settings[name]) if name in settings else own

    def called(**given: Any) -> int:
        for name, kind in settings.items():
            names = {one.name for one in fields(kind)}
            given[name] = kind(**{name: given.pop(name) for name in names & given.keys()})
        return function(**given)

    called.__name__, called.__doc__ = function.__name__, function.__doc__
    called.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": int}
    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return called


def options_of(settings: type) -> list[Parameter]:
    """An option for each field that a word can hold; its help is in the field or in the class's docstring."""
    hints, said = get_type_hints(settings), _documented(settings)
    return [
        _option(one, kind, one.metadata.get("help") or said[one.name])
        for one in fields(settings)
        if (kind := _of_a_word(hints[one.name])) is not None and one.default is not MISSING
    ]


def _option(one: Field[Any], kind: Any, help: str) -> Parameter:
    # A switch has no --no-...: what it is without is the default.
    names = [f"--{one.name.replace('_', '-')}"] if kind is bool else []
    default = f" Default: {one.default}." if one.default or (one.default == 0 and not names) else ""
    annotated: Any = Annotated  # of a type that is known only now
    declared = annotated[kind, option(help + default, *names)]
    return Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=declared)


def _of_a_word(kind: Any) -> Any:
    """The type as Typer knows it; `None` for what no word can say."""
    if get_origin(kind) is Literal:
        return bool if get_args(kind)[0] is True else kind
    if isinstance(kind, UnionType):
        one = _of_a_word(next((part for part in get_args(kind) if part in (int, float, str, Path)), None))
        return one and (one | None if NoneType in get_args(kind) else one)
    return kind if kind in (bool, int, float, str, Path) else None


def _documented(settings: type) -> Mapping[str, str]:
    """The first sentence on each argument in the docstrings of a class and those that it is made of."""
    found: dict[str, str] = {}
    for kind in settings.__mro__:
        for name, text in re.findall(r"^    (\w+) \(.*?\):\s+(.+?)(?=^    \w|^\w|\Z)", getdoc(kind) or "", re.M | re.S):
            sentence = re.split(r"(?<=\.)\s", " ".join(text.split()).replace("`", ""))[0]
            found.setdefault(name, sentence)
    return found
