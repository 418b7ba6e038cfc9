"""How options are declared, and what several commands and programs take: models, rows, a recording, a budget.

An option is a field of a dataclass, declared there alone: [`command`] reads it for Typer, transformers' and TRL's
parsers for the programs. Light to import: it is loaded for every `--help`, and heavy imports are in the functions.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cached_property
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

if TYPE_CHECKING:
    from datasets import Dataset

    from ..environments import LLMEnvironment
    from ..llm import Budget, OpenAIChat, ReplayCache


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
class Dollars:
    """What may be spent."""

    budget_usd: float | None = setting("What all models together may spend, in US $.")


@dataclass
class Spending(Dollars):
    """The same, also where the price is not known."""

    budget_tokens: int | None = setting("The same in tokens, read and written.")

    def budget(self, book: Path | None) -> Budget:
        """With its book beside the results, so that a run that goes on does not get the budget again."""
        from ..llm import Budget

        return Budget(self.budget_usd, self.budget_tokens, book)


@dataclass
class EnvironmentModel(Recording):
    """The large LLM in the environment."""

    environment_model: str | None = setting("The large LLM, by its name at its endpoint.")
    environment_base_url: str | None = setting("Its OpenAI-compatible endpoint.")


@dataclass
class ReferenceModel(Recording):
    """E-SPL's reference LLM."""

    reference_model: str | None = setting("The LLM that reflects and edits, by its name at its endpoint.")
    reference_base_url: str | None = setting("Its OpenAI-compatible endpoint.")

    def reference(self, stack: ExitStack) -> OpenAIChat:
        return self.connect(stack, self.reference_model, self.reference_base_url)


@dataclass
class AskedModel(EnvironmentModel):
    """The large LLM that an agent asks."""

    environment_max_tokens: int | None = setting("Of each of its replies; sent with every call.")

    def as_environment(self, chat: OpenAIChat, **sampling: Any) -> LLMEnvironment:
        """It as an environment; of the sampling options those that are not `None` are sent."""
        from ..environments import LLMEnvironment

        given = {"max_tokens": self.environment_max_tokens, **sampling}
        return LLMEnvironment(chat, **{name: value for name, value in given.items() if value is not None})


@dataclass
class LargeLLM(AskedModel, Dollars):
    """The large LLM that a trained agent asks."""

    sandbox: bool = setting("The sandbox's oracle is the large LLM: no key, no network.", False)

    def check(self) -> None:
        """Raises `ValueError` unless exactly one is named."""
        if self.sandbox == (self.environment_model is not None):
            raise ValueError("name the large LLM with --environment-model NAME, or say --sandbox")

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

    def load(self, task: str, seed: int) -> Dataset:
        from ..data import load_task

        return load_task(task, self.task_split, self.task_rows, seed, data_files=self.data_files)


@dataclass
class DataAndEnvironment(TaskRows, AskedModel):
    """What is trained on, and the large LLM in the environment."""

    n_test: int = setting("Sandbox: held-out questions.", 256)


def show_help(context: typer.Context) -> None:
    """What a command that only has sub-commands does alone."""
    if context.invoked_subcommand is None:
        print(context.get_help())


def command(function: Callable[..., int]) -> Callable[..., int]:
    """A function as Typer takes it: where a parameter is a dataclass there is an option for each of its fields."""
    hints = get_type_hints(function, include_extras=True)
    settings = {name: kind for name, kind in hints.items() if is_dataclass(kind) and isinstance(kind, type)}
    parameters: list[Parameter] = []
    for name, parameter in signature(function).parameters.items():
        own = [parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])]
        parameters += _options_of(settings[name]) if name in settings else own

    def called(**given: Any) -> int:
        for name, kind in settings.items():
            given[name] = kind(**{one.name: given.pop(one.name) for one in fields(kind)})
        return function(**given)

    called.__name__, called.__doc__ = function.__name__, function.__doc__
    called.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": int}
    called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return called


def _options_of(settings: type) -> list[Parameter]:
    hints = get_type_hints(settings)

    def parameter(one: Field[Any]) -> Parameter:
        # A switch has no --no-...: what it is without is the default.
        names = [f"--{one.name.replace('_', '-')}"] if hints[one.name] is bool else []
        default = f" Default: {one.default}." if one.default or (one.default == 0 and not names) else ""
        kind: Any = Annotated  # of a type that is known only now
        declared = kind[hints[one.name], option(one.metadata["help"] + default, *names)]
        return Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=declared)

    return [parameter(one) for one in fields(settings)]
