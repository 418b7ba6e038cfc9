"""The declaration of options, and those of several commands and programs: models, rows, a recording, a budget.

An option is a field of a dataclass, ours or the Python API's, declared only there: [`command`] reads it for Typer,
TRL's parser for the training programs. Light to import: heavy imports are in the functions.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache, cached_property
from inspect import Parameter, Signature, getdoc, signature
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from ..records import only_a_folder
from .loader import load_environment

if TYPE_CHECKING:
    from datasets import Dataset

    from ..environments import LLMEnvironment
    from ..llm import Budget, OpenAIChat, ReplayCache
    from ..rollout import Environment


def setting(help: str, default: Any = None, *aliases: str) -> Any:
    """An option of a program or of the command: a dataclass's field with its help, and other names of the option."""
    return field(default=default, metadata={"help": help, "aliases": list(aliases)})


def option(help: str, *names: str) -> Any:
    """An option of one command alone, with its names where they are not the parameter's own."""
    return typer.Option(*names, help=help, show_default=False)


AsJson = Annotated[bool, option("Print one JSON object instead of text.", "--json")]
RunOption = Annotated[Path | None, option("The same as RUN.", "--run")]
OutputDir = Annotated[
    Path | None, option("Folder to write to, instead of the default.", "--output-dir", "--output")
]


@dataclass
class Recording:
    """The recording of replies."""

    replay_cache: Path | None = setting(
        "SQLite file of recorded replies: those in it are not paid twice."
    )

    @cached_property
    def cache(self) -> ReplayCache | None:
        """One for all clients."""
        from ..llm import ReplayCache

        return ReplayCache(self.replay_cache) if self.replay_cache else None

    def connect(
        self, stack: ExitStack, model: str | None, base_url: str | None = None, **options: Any
    ) -> OpenAIChat:
        """A client, closed with the stack. One for each role: then each has its own bill."""
        from ..llm import OpenAIChat

        return stack.enter_context(
            OpenAIChat(str(model), base_url=base_url, cache=self.cache, **options)
        )


@dataclass
class Spending:
    """The budget."""

    budget_usd: float | None = setting(
        "The most that all models together may spend, in US dollars; the run stops there."
    )
    budget_tokens: int | None = setting(
        "The same in tokens, read and written, also where the price is not known."
    )

    def budget(self, book: Path | None = None) -> Budget:
        """The budget; its account file `book` beside the results makes a resumed run continue it."""
        from ..llm import Budget

        return Budget(self.budget_usd, self.budget_tokens, book)


@dataclass
class Tracing:
    """OpenTelemetry spans."""

    traces: bool = setting(
        "Send OpenTelemetry spans to where OTEL_EXPORTER_OTLP_ENDPOINT says.", False
    )
    trace_content: bool = setting("Prompts, replies and arguments are in the spans, too.", False)

    def start(self) -> None:
        """Make spans from now on, if asked to. Raises `ValueError` where the extra is missing."""
        if self.trace_content and not self.traces:
            raise ValueError("trace_content would be ignored: set traces as well")
        if self.traces:
            from ..llm import start_traces

            try:
                start_traces(self.trace_content)
            except ImportError as error:
                raise ValueError(str(error)) from error


@dataclass
class EnvironmentModel(Recording):
    """The large LLM in the environment."""

    environment_model: str | None = setting("The large LLM, by its name at its endpoint.")
    environment_base_url: str | None = setting("Its OpenAI-compatible endpoint.")
    environment_max_tokens: int | None = setting("Of each of its replies; sent with every call.")

    def as_environment(self, chat: OpenAIChat, **sampling: Any) -> LLMEnvironment:
        """The environment around a client; sampling options that are `None` are not sent."""
        from ..environments import LLMEnvironment

        given = {"max_tokens": self.environment_max_tokens, **sampling}
        return LLMEnvironment(
            chat, **{name: value for name, value in given.items() if value is not None}
        )


@dataclass
class ReferenceModel(Recording):
    """E-SPL's reference LLM."""

    reference_model: str | None = setting(
        "The LLM that reflects and edits, by its name at its endpoint."
    )
    reference_base_url: str | None = setting("Its OpenAI-compatible endpoint.")

    def reference(self, stack: ExitStack) -> OpenAIChat:
        return self.connect(stack, self.reference_model, self.reference_base_url)


@dataclass
class LargeLLM(EnvironmentModel, Spending):
    """The large LLM that a trained agent asks, or your own environment."""

    sandbox: bool = setting("The sandbox's oracle is the large LLM: no key, no network.", False)
    environment: str | None = setting(
        "Instead of a large LLM your own environment or agent program: module:name, or file.py:name.",
        None,
        "--program",
    )

    def check(self) -> None:
        """Raises `ValueError` unless exactly one is named."""
        if [self.sandbox, self.environment_model is not None, self.environment is not None].count(
            True
        ) != 1:
            raise ValueError(
                "name the large LLM with --environment-model NAME, or say --sandbox, or name an environment of your "
                "own with --environment MODULE:NAME, an agent program with --program MODULE:NAME"
            )

    def opened(self, stack: ExitStack, budget: Budget) -> Environment:
        """The checked environment, charged to `budget`; its client is closed with the stack."""
        from ..llm import charge

        opened: Any = (
            load_environment(self.environment)
            if self.environment is not None
            else self.as_environment(self.connect(stack, *self.endpoint(stack)))
        )
        charge(
            budget, environment=opened
        )  # a budget that cannot be kept is found before anything is spent
        stack.callback(opened.close)
        opened.check()
        return opened

    def endpoint(self, stack: ExitStack) -> tuple[str | None, str | None]:
        """Name and address of the large LLM; in the sandbox the oracle, started and closed with the stack."""
        if not self.sandbox:
            return self.environment_model, self.environment_base_url
        from ..sandbox import Oracle
        from ..sandbox.server import MODEL, OracleServer

        return MODEL, stack.enter_context(OracleServer(Oracle())).base_url


@dataclass
class TaskRows:
    """The rows to use: a task's, or your own."""

    task_split: str = setting("Its split.", "train")
    task_rows: int | None = setting("Sample this many rows; all by default.")
    data_files: str | None = setting("Local files instead of the hub.")
    dataset: str | None = setting(
        "Your own rows instead of a task: a file (.jsonl, .json, .csv, .tsv, .parquet)."
    )
    columns: str | None = setting("Which of its columns is which: question=q,answers=a.")

    def load(self, task: str, seed: int) -> Dataset:
        """The rows. Raises `ValueError`, in one line, for what cannot be had."""
        from ..data import is_own, load_task

        pairs = [pair.partition("=") for pair in (self.columns or "").split(",") if pair]
        if not all(ours and theirs for ours, _, theirs in pairs):
            raise ValueError(f"columns={self.columns} is not of the form question=q,answers=a")
        options: dict[str, Any] = {
            "data_files": self.data_files,
            "columns": {a: b for a, _, b in pairs} or None,
        }
        if not is_own(self.dataset or task) and not self.data_files:
            hub_answers()
        try:
            return load_task(self.dataset or task, self.task_split, self.task_rows, seed, **options)
        except RuntimeError as error:
            raise ValueError(" ".join(str(error).split())) from error


# --- folders, looked at before anything is loaded --------------------------------------------------------------------


def check_agent(run: str | Path) -> None:
    """Raise `ValueError` for a folder that is not there or holds no model. A hub id (`user/name`) passes."""
    folder = Path(run)
    if not folder.exists() and ("/" not in str(run) or only_a_folder(str(run))):
        raise ValueError(
            f"{run} does not exist; `agentic-prompting demo --output-dir {run}` trains an agent there"
        )
    if folder.is_dir() and not any(
        (folder / name).exists() for name in ("config.json", "adapter_config.json")
    ):
        raise ValueError(
            f"{run} holds no model (no config.json); give the folder that a trainer saved"
        )
    check_model(run)


def check_model(name: str | Path) -> None:
    """Raise `ValueError` for what is neither here nor on the hub, or for an adapter without its base model."""
    if not Path(name).exists():
        _check_on_hub(str(name))
    adapter = Path(name) / "adapter_config.json"
    if adapter.is_file():
        base = str(
            json.loads(adapter.read_text(encoding="utf-8")).get("base_model_name_or_path") or ""
        )
        near = next((above for above in adapter.resolve().parents if (above / base).is_dir()), None)
        if not Path(base).exists() and (near or only_a_folder(base)):
            there = f"start the command in {near}, or" if near else "it is not there:"
            raise ValueError(
                f"{name} belongs to the base model in {base}: {there} write the full path into {adapter}"
            )


def _check_on_hub(name: str) -> None:
    """Raise `ValueError`, at once, for a model that is in no cache and that the hub does not give."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    known = "give the folder of a model, or its name on the hub"
    if only_a_folder(name):
        raise ValueError(f"{name} does not exist: {known}")
    try:
        if any(
            isinstance(try_to_load_from_cache(name, one), str)
            for one in ("config.json", "adapter_config.json")
        ):
            hub_answers()
        elif not hub_answers():
            raise ValueError(
                f"{name} is no folder here, and the hub cannot be reached: {known} where it can be"
            )
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
    """Whether the hub answers; asked once. If not, its libraries use their caches at once, without 40 s of retries."""
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
        print(
            f"{constants.ENDPOINT} cannot be reached: what the cache has is taken", file=sys.stderr
        )
    return not constants.HF_HUB_OFFLINE


@dataclass
class HeldOutRows:
    """Rows for evaluation only."""

    eval_task: str | None = setting("Held out: TASK/SPLIT or a file; several with commas.")
    eval_task_rows: int | None = setting("Sample this many of each; all by default.")

    def held_out(self, seed: int) -> Dataset | None:
        """The evaluation rows, if any are named."""
        from datasets import concatenate_datasets

        from ..data import is_own, load_task

        parts = []
        for name in self.eval_task.split(",") if self.eval_task else ():
            task, _, split = (name, "", "") if is_own(name) else name.partition("/")
            parts.append(load_task(task, split or "test", self.eval_task_rows, seed))
        return concatenate_datasets(parts) if parts else None


# --- what a terminal shows -------------------------------------------------------------------------------------------


def say(text: str) -> None:
    """Print text that may come from a model, with terminal control characters made visible."""
    from ..llm.masking import escape_controls

    print(escape_controls(text))


@contextmanager
def busy(what: str) -> Iterator[None]:
    """Show on a terminal's error stream what is going on; print nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    with console.status(what) if console.is_terminal else nullcontext():
        yield


# --- dataclasses as options ------------------------------------------------------------------------------------------


def command(function: Callable[..., int]) -> Callable[..., int]:
    """The function for Typer, with an option for each field of its dataclass parameters."""
    hints = get_type_hints(function, include_extras=True)
    settings = {
        name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)
    }
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
    """An option for each field of a simple type; its help is in the field or in the class's docstring."""
    hints, said = get_type_hints(settings), documented(settings)
    return [
        _option(one, kind, one.metadata.get("help") or said[one.name])
        for one in fields(settings)
        if (kind := _of_a_word(hints[one.name])) is not None and one.default is not MISSING
    ]


def _option(one: Field[Any], kind: Any, help: str) -> Parameter:
    # A switch has no --no-...: what it is without is the default.
    aliases = one.metadata.get("aliases", [])
    names = [f"--{one.name.replace('_', '-')}", *aliases] if aliases or kind is bool else []
    default = (
        f" Default: {one.default}."
        if one.default or (one.default == 0 and kind is not bool)
        else ""
    )
    annotated: Any = Annotated  # of a type that is known only now
    declared = annotated[kind, option(help + default, *names)]
    return Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=declared)


def _of_a_word(kind: Any) -> Any:
    """The type for Typer; `None` if the command line has no form for it."""
    if get_origin(kind) is Literal:
        return bool if get_args(kind)[0] is True else kind
    if isinstance(kind, UnionType):
        one = _of_a_word(
            next((part for part in get_args(kind) if part in (int, float, str, Path)), None)
        )
        return one and (one | None if NoneType in get_args(kind) else one)
    return kind if kind in (bool, int, float, str, Path) else None


def documented(settings: type) -> Mapping[str, str]:
    """The first sentence on each argument in the docstrings of a class and those that it is made of."""
    found: dict[str, str] = {}
    for kind in settings.__mro__:
        for name, text in re.findall(
            r"^    (\w+) \(.*?\):\s+(.+?)(?=^    \w|^\w|\Z)", getdoc(kind) or "", re.M | re.S
        ):
            sentence = re.split(r"(?<=\.)\s", " ".join(text.split()).replace("`", ""))[0]
            found.setdefault(name, sentence)
    return found
