"""Options that several commands share: models, rows, a recording, a budget, traces.

An option is a field of a dataclass with its help. A command's own options are in its file. This
module imports no large package by itself: `--help` has to stay quick.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .hub import probe_hub, read_trained_columns
from .loader import load_environment

if TYPE_CHECKING:
    from datasets import Dataset

    from ..agent import PromptAgent
    from ..environments import LLMEnvironment
    from ..llm import Budget, OpenAIChat, ReplayCache
    from ..llm.endpoint_check import CommandRole, EndpointCheck
    from ..rollout import Environment
    from .rows_file import RowsFile


class MissingOption(ValueError):
    """An option that a run cannot do without is not set.

    Args:
        message (`str`): A description of the missing option.
        fix (`str`): The option to set, with a placeholder.
    """

    def __init__(self, message: str, fix: str):
        super().__init__(f"{message}: {fix}")
        self.message = message
        self.fix = fix


JSON_HELP = "Print one JSON object instead of text."


def option(text: str, default: Any = None, *aliases: str) -> Any:
    """A dataclass field that is an option, with its help and other names such as `--output`."""
    return field(default=default, metadata={"help": text, "aliases": list(aliases)})


def list_option(text: str) -> Any:
    """An option that takes several values, and may be given several times."""
    return field(default=None, metadata={"help": text, "action": "extend"})


ROW_OPTIONS = ("task_split", "task_rows", "data_files", "dataset", "columns", "held_out")
"""The options of [`TaskRows`]."""

CALL_OPTIONS = ("environment_base_url", "environment_client", "environment_max_tokens")
"""The options of [`EnvironmentModel`] that say how the large LLM is called."""

REFERENCE_OPTIONS = ("reference_model", "reference_base_url", "reference_client")
"""The options of [`ReferenceModel`]."""


def given_options(options: Any) -> list[str]:
    """The names of the options of a dataclass that differ from their defaults.

    An empty text or list, with which an option of a YAML file can be taken back, is not one of
    them.
    """
    names = []
    for option_field in fields(options):
        default = option_field.default
        if option_field.default_factory is not MISSING:
            default = option_field.default_factory()
        value = getattr(options, option_field.name)
        if value != default and value is not None and value not in ("", []):
            names.append(option_field.name)
    return names


def refuse_options(options: Any, names: Collection[str], reason: str) -> None:
    """Raise `ValueError` if options are given that the command does not read in the mode in use.

    Args:
        options: The dataclass of the options.
        names (`Collection[str]`): The fields that are not read.
        reason (`str`): Why, and what to do instead.
    """
    ignored = [name.replace("_", "-") for name in given_options(options) if name in names]
    if ignored:
        raise ValueError(f"--{', --'.join(ignored)} would have no effect: {reason}")


def refuse_all_but(options: Any, names: Collection[str], reason: str) -> None:
    """Raise `ValueError` if an option is given that is not one of those that the command reads in
    the mode in use.
    """
    refuse_options(options, [name for name in given_options(options) if name not in names], reason)


def client_help(model: str) -> str:
    """The help of an option that [`ClientSettings`] reads."""
    return f"How {model} is called: concurrency=8,rate=60,price=0.15/0.6,key=VARIABLE."


@dataclass
class ClientSettings:
    """How a model is called: an option such as `concurrency=8,rate=60,price=0.15/0.6,key=MY_KEY`.

    Args:
        option (`str`): The name of the option, for errors.
        concurrency (`int`, *optional*): Calls in flight.
        rate (`float`, *optional*): Requests per minute.
        price (`tuple[float, float]`, *optional*): US dollars per million tokens read and written.
        key_variable (`str`, *optional*): The environment variable that holds the key.
    """

    option: str
    concurrency: int | None = None
    rate: float | None = None
    price: tuple[float, float] | None = None
    key_variable: str | None = None

    @classmethod
    def read(cls, text: str | None, option: str) -> ClientSettings:
        """The settings of an option's text.

        Raises:
            `ValueError`: A setting does not exist, or its value is wrong. The message never shows a
            value of `key`.
        """
        settings = cls(option)
        for pair in (text or "").split(","):
            name, _, value = pair.strip().partition("=")
            try:
                if name == "concurrency":
                    settings.concurrency = int(value)
                elif name == "rate":
                    settings.rate = float(value)
                elif name == "price":
                    input_price, _, output_price = value.partition("/")
                    settings.price = (float(input_price), float(output_price))
            except ValueError:
                raise ValueError(
                    f"--{option} {name}={value}: expected {_EXPECTED_VALUES[name]}"
                ) from None
            if name == "key":
                settings.key_variable = value
            elif name and name not in _EXPECTED_VALUES:
                raise ValueError(
                    f"--{option} has no setting {name!r}: they are concurrency, rate, price and key"
                )
        return settings

    def make_client(self, model: str | None, base_url: str | None, **arguments: Any) -> OpenAIChat:
        """A client with these settings and other arguments of [`OpenAIChat`].

        Raises:
            `ValueError`: The key cannot be read, or a setting is out of range.
        """
        from ..llm import OpenAIChat

        if self.key_variable is not None:
            arguments["api_key"] = read_key(self.key_variable, f"--{self.option} key=")
        if self.concurrency is not None:
            arguments["max_concurrency"] = self.concurrency
        client = OpenAIChat(
            str(model),
            base_url=base_url,
            requests_per_minute=self.rate,
            price=self.price,
            **arguments,
        )
        # Errors name the variable that was given, whatever its name looks like.
        if self.key_variable is not None:
            client.key_variable = self.key_variable
        return client


_EXPECTED_VALUES = {
    "concurrency": "a whole number, such as concurrency=8",
    "rate": "requests per minute, such as rate=60",
    "price": "US dollars per million tokens read and written, such as price=0.15/0.6",
}


def read_key(variable: str, setting: str) -> str:
    """Return the key in an environment variable.

    Args:
        variable (`str`): The name of the variable.
        setting (`str`): The setting that has this name, for errors.

    Raises:
        `ValueError`: It is no name, or there is no such variable. A text that is no name is not
            shown: it may be a key itself.
    """
    if not re.fullmatch(r"[A-Za-z_]\w*", variable):
        raise ValueError(
            f"{setting} takes the name of an environment variable that has the key, not the key"
        )
    if not os.environ.get(variable):
        raise ValueError(f"{setting} {variable}: the environment has no variable {variable}")
    return os.environ[variable]


_ROLE_NAMES = {
    "environment": "large LLM",
    "policy": "policy",
    "reference": "reference LLM",
    "task": "task model",
    "feedback": "feedback model",
    "optimizer": "optimizer model",
    "verifier": "verifier model",
}
"""What messages call a role, by the beginning of its options."""


@dataclass
class Recording:
    """The recording of replies."""

    replay_cache: Path | None = option(
        "SQLite file of recorded replies: those in it are not paid twice."
    )

    @cached_property
    def cache(self) -> ReplayCache | None:
        """The recording, shared by all clients."""
        from ..llm import ReplayCache

        return ReplayCache(self.replay_cache) if self.replay_cache else None

    @cached_property
    def endpoint_check(self) -> EndpointCheck:
        """The check of all endpoints before the first request to any of them."""
        from ..llm.endpoint_check import EndpointCheck

        return EndpointCheck()

    def connect(
        self,
        stack: ExitStack,
        model: str | None,
        base_url: str | None,
        role: str,
    ) -> OpenAIChat:
        """A client, closed with the stack. Each role gets its own client, and so its own bill.

        Args:
            stack (`ExitStack`): Closes the client.
            model (`str`): The model's name.
            base_url (`str`, *optional*): Its endpoint.
            role (`str`): The role whose option `ROLE_client` says how the model is called.
        """
        settings = ClientSettings.read(getattr(self, f"{role}_client"), f"{role}-client")
        client = settings.make_client(model, base_url, cache=self.cache)
        client.serve_command(self._command_role(role, client), self.endpoint_check)
        return stack.enter_context(client)

    def _command_role(self, role: str, client: OpenAIChat) -> CommandRole:
        """The role's name and options for errors of its client, and an address that may have been
        forgotten.
        """
        from ..llm.endpoint_check import CommandRole

        name = f"the {_ROLE_NAMES[role]}"
        advice = (
            f"{name}'s options are --{role}-model, --{role}-base-url and --{role}-client "
            "(key=VARIABLE, price=0.15/0.6)"
        )
        # A role without an address is asked at OpenAI, which is rarely meant if another has one.
        if client.needs_key:
            for other, other_name in _ROLE_NAMES.items():
                is_named = getattr(self, f"{other}_model", None)
                if is_named and getattr(self, f"{other}_base_url", None):
                    advice += (
                        f"; the {other_name} has --{other}-base-url, {name} has no "
                        f"--{role}-base-url and is asked at {client.base_url}"
                    )
                    break
        return CommandRole(name, advice)

    def connect_role(self, stack: ExitStack, role: str) -> OpenAIChat:
        """The client of a role, whose model and address are the options `ROLE_model` and
        `ROLE_base_url`.
        """
        model = getattr(self, f"{role}_model")
        return self.connect(stack, model, getattr(self, f"{role}_base_url"), role)


@dataclass
class Spending:
    """The budget."""

    budget_usd: float | None = option(
        "The most that all models together may spend, in US dollars; the run stops there."
    )
    budget_tokens: int | None = option(
        "The most tokens that all models together may read and write, even if the price is not "
        "known."
    )

    def budget(self, account: Path | None = None) -> Budget:
        """The budget. With an account file beside the results, a resumed run continues it."""
        from ..llm import Budget

        return Budget(self.budget_usd, self.budget_tokens, account)


@dataclass
class Tracing:
    """OpenTelemetry spans."""

    traces: bool = option(
        "Send OpenTelemetry spans to where OTEL_EXPORTER_OTLP_ENDPOINT says.", False
    )
    trace_content: bool = option("Put prompts, replies and arguments into the spans, too.", False)

    def start_tracing(self) -> None:
        """Send spans from now on, if `--traces` is set.

        Raises `ValueError` if the extra is missing.
        """
        if self.trace_content and not self.traces:
            raise ValueError("--trace-content needs --traces")
        # The packages of OpenTelemetry are an extra.
        if self.traces:
            from ..llm import start_traces

            try:
                start_traces(self.trace_content)
            except ImportError as error:
                # The user can install the extra, so one line suffices.
                raise ValueError(str(error)) from error


@dataclass
class EnvironmentModel(Recording):
    """The large LLM in the environment."""

    environment_model: str | None = option("The large LLM, by its name at its endpoint.")
    environment_base_url: str | None = option("The large LLM's OpenAI-compatible endpoint.")
    environment_client: str | None = option(client_help("the large LLM"))
    environment_max_tokens: int | None = option(
        "Token limit of each reply of the large LLM; sent with every call."
    )

    def as_environment(self, chat: OpenAIChat, **sampling: Any) -> LLMEnvironment:
        """The environment around a client; sampling options that are `None` are not sent."""
        from ..environments import LLMEnvironment

        # The endpoint's own defaults hold for what is not sent.
        sampling = {"max_tokens": self.environment_max_tokens, **sampling}
        sent = {name: value for name, value in sampling.items() if value is not None}
        return LLMEnvironment(chat, **sent)


@dataclass
class ReferenceModel(Recording):
    """E-SPL's reference LLM."""

    reference_model: str | None = option(
        "The LLM that reflects and edits, by its name at its endpoint."
    )
    reference_base_url: str | None = option("The reference LLM's OpenAI-compatible endpoint.")
    reference_client: str | None = option(client_help("the reference LLM"))


@dataclass
class LargeLLM(EnvironmentModel, Spending):
    """The large LLM that a trained agent asks, or your own environment."""

    sandbox: bool = option("The sandbox's oracle is the large LLM: no key, no network.", False)
    environment: str | None = option(
        "Your own environment or agent program instead of a large LLM: module:name, or "
        "file.py:name.",
        None,
        "--program",
    )

    def check_environment(self) -> None:
        """Raise `ValueError` unless exactly one environment is named."""
        # The three ways to name an environment exclude each other.
        choices = [
            self.sandbox,
            self.environment_model is not None,
            self.environment is not None,
        ]
        if choices.count(True) != 1:
            raise ValueError(
                "name the large LLM with --environment-model NAME, or say --sandbox, or name an "
                "environment of your own with --environment MODULE:NAME, an agent program with "
                "--program MODULE:NAME"
            )
        # Options that say how the large LLM is called.
        if self.environment is not None:
            refuse_options(
                self,
                (*CALL_OPTIONS, "replay_cache"),
                f"{self.environment} calls its models by itself; set it there",
            )
        if self.sandbox:
            refuse_options(
                self,
                ("environment_base_url",),
                "the sandbox has an oracle of its own; name an endpoint's model with "
                "--environment-model instead of --sandbox",
            )

    def open_environment(self, stack: ExitStack, budget: Budget) -> Environment:
        """The checked environment, charged to `budget`; its client is closed with the stack."""
        from ..llm import charge

        environment: Any
        # Your own environment, or the large LLM at its endpoint.
        if self.environment is not None:
            environment = load_environment(self.environment)
            # Rows have the columns of `--columns` under both names.
            environment.hide_columns(read_columns(getattr(self, "columns", None)))
        else:
            model, base_url = self.start_endpoint(stack)
            chat = self.connect(stack, model, base_url, "environment")
            environment = self.as_environment(chat)

        # A budget that cannot be kept is found before anything is spent.
        charge(budget, environment=environment)
        budget.warn_if_it_limits_nothing()
        # Closed even if the check fails.
        stack.callback(environment.close)
        environment.check()
        return environment

    def start_endpoint(self, stack: ExitStack) -> tuple[str | None, str | None]:
        """Name and address of the large LLM; in the sandbox the oracle's, which runs until the
        stack is closed.
        """
        if not self.sandbox:
            return self.environment_model, self.environment_base_url
        # The oracle answers over HTTP, as a real endpoint does.
        from ..sandbox import Oracle
        from ..sandbox.server import MODEL, OracleServer

        return MODEL, stack.enter_context(OracleServer(Oracle())).base_url


def read_columns(text: str | None) -> dict[str, str]:
    """The columns of `--columns question=q,answers=a`: our name for each, and that of the file."""
    columns = {}
    for pair in (text or "").split(","):
        name, _, column = pair.partition("=")
        if pair and not (name and column):
            raise ValueError(f"--columns {text} is not of the form question=q,answers=a")
        if pair:
            columns[name] = column
    return columns


@dataclass
class AskedAgent(LargeLLM, Tracing):
    """A trained agent that is asked questions of clients, by `ask` and `serve`."""

    run: Path | None = option("The trained agent's folder, the same as the argument RUN.")
    columns: str | None = option(
        "Other names of a row's fields, for --program or --environment: question=q,context=c. "
        "Those of training need not be named again."
    )

    def check_environment(self) -> None:
        super().check_environment()
        if self.environment is None:
            refuse_options(
                self,
                ("columns", "row"),
                "only an agent program or an environment of your own reads fields of a row; name "
                "it with --program or --environment",
            )
        read_columns(self.columns)

    def name_columns(self, agent: PromptAgent) -> None:
        """Give the agent the names of `--columns` beside those of its training."""
        columns = {**agent.spec.columns, **read_columns(self.columns)}
        agent.spec = replace(agent.spec, columns=columns)


@dataclass
class TaskRows:
    """The rows to use: a task's, or your own."""

    task_split: str = option("The split to take the rows from.", "train")
    task_rows: int | None = option("Sample this many rows; all by default.")
    data_files: str | None = option("Local files with a task's rows, instead of the hub.")
    dataset: str | None = option(
        "Your own rows instead of a task: a file (.jsonl, .json, .csv, .tsv, .xlsx, .parquet)."
    )
    columns: str | None = option("Which column of your own rows is which: question=q,answers=a.")
    held_out: float | None = option(
        "Share of the rows for evaluation only, such as 0.3: the same rows in every command."
    )

    def column_names(self) -> dict[str, str]:
        """Our name for a column -> that of the file. Raises `ValueError` for another form."""
        return read_columns(self.columns)

    @property
    def reads_whole_rows(self) -> bool:
        """Whether the rows go to an agent program or an environment of the user's own."""
        return ":" in (getattr(self, "environment", None) or "")

    def check_rows(self) -> None:
        """Raise `ValueError` for an option that would have no effect on the named rows."""
        if self.dataset:
            refuse_options(
                self,
                ("task_split",),
                "the rows of --dataset have no splits; --held-out sets a share of them aside",
            )

    def add_trained_columns(self, run: str | Path) -> None:
        """Take the columns of `--dataset` from the training of an agent, where `--columns` does not
        name them.
        """
        trained_columns = read_trained_columns(run) if self.dataset else {}
        if not trained_columns:
            return
        from ..data import is_user_data

        # Anything else is refused where the rows are loaded.
        if not is_user_data(self.dataset):
            return
        columns = self.read_file(str(self.dataset)).choose_columns(trained_columns)
        if columns != self.column_names():
            self.columns = ",".join(f"{name}={file_name}" for name, file_name in columns.items())
            print(f"the columns of training are used: --columns {self.columns}", file=sys.stderr)

    def load(self, task: str, seed: int) -> Dataset:
        """The rows to learn from. Raises `ValueError`, in one line, if they cannot be loaded."""
        if self.held_out is None:
            return self._load_rows(task, self.task_rows, seed)
        from ..data import hold_out

        # Split first, so that the same rows are held out whatever is sampled from the others.
        rows, _ = hold_out(self._load_rows(task, None, seed), self.held_out)
        return self._sample(rows, seed, "are not held out")

    def load_for_evaluation(self, task: str, seed: int = 0) -> Dataset:
        """The rows to evaluate on: the share of `--held-out`, or all; of these `--task-rows`."""
        if self.held_out is None:
            return self.load(task, seed)
        return self._sample(self.load_held_out_share(task, seed), seed, "are held out")

    def load_held_out_share(self, task: str, seed: int = 0) -> Dataset:
        """The held-out rows of `--held-out`, which [`TaskRows.load`] leaves out."""
        from ..data import hold_out

        assert self.held_out is not None
        _, held_out_rows = hold_out(self._load_rows(task, None, seed), self.held_out)
        return held_out_rows

    def _sample(self, rows: Dataset, seed: int, description: str) -> Dataset:
        """`--task-rows` of the rows, or all. Raises `ValueError` if there are fewer."""
        if self.task_rows is None:
            return rows
        if self.task_rows > len(rows):
            raise ValueError(f"--task-rows {self.task_rows}: only {len(rows)} rows {description}")
        return rows.shuffle(seed).select(range(self.task_rows))

    @cached_property
    def _loaded_rows(self) -> dict[tuple[Any, ...], Dataset]:
        """The rows that have been loaded, by what they depend on."""
        return {}

    def _load_rows(self, task: str, n: int | None, seed: int) -> Dataset:
        """The rows before any are held out: loaded once, because loading warns of those that it
        drops.
        """
        self.check_rows()
        key = (self.dataset or task, self.task_split, n, seed, self.data_files, self.columns)
        if key not in self._loaded_rows:
            self._loaded_rows[key] = self._load_task(task, n, seed)
        return self._loaded_rows[key]

    def _load_task(self, task: str, n: int | None, seed: int) -> Dataset:
        from ..data import is_user_data, load_task

        # Only the rows of a task may have to come from the hub.
        source = self.dataset or task
        if not is_user_data(source) and not self.data_files:
            probe_hub()
        try:
            return load_task(
                source,
                self.task_split,
                n,
                seed,
                data_files=self.data_files,
                columns=self.column_names() or None,
                context_columns=self.context_columns(source),
            )
        except RuntimeError as error:
            # On one line, even if the message has several.
            raise ValueError(" ".join(str(error).split())) from error

    @cached_property
    def _files(self) -> dict[tuple[str, str | None], RowsFile]:
        """The files that have been read, by name and `--columns`."""
        return {}

    def read_file(self, file: str) -> RowsFile:
        """A file of the user's own rows, with the names of `--columns`. It is read once."""
        from .rows_file import RowsFile

        key = (file, self.columns)
        if key not in self._files:
            self._files[key] = RowsFile(file, self.column_names())
        return self._files[key]

    def context_columns(self, source: str) -> list[str]:
        """The columns of a file that a program or environment may read beside the question."""
        from ..data import is_user_data

        if not self.reads_whole_rows or not is_user_data(source):
            return []
        return self.read_file(source).context_columns()

    def add_file_columns(self, rows: Dataset) -> list[dict[str, Any]]:
        """The rows with all columns of the file of `--dataset`: what agent programs are given."""
        if not self.dataset:
            return list(rows)
        return self.read_file(self.dataset).join(rows)

    def rows_for(self, environment: Environment | None, rows: Dataset) -> list[dict[str, Any]]:
        """The rows that an environment is given. A program gets those that `train agent` gives it."""
        if environment is not None and environment.plays_whole_episodes:
            return self.add_file_columns(rows)
        return list(rows)


@dataclass
class HeldOutRows(TaskRows):
    """Rows to learn from, and rows for evaluation only."""

    eval_task: str | None = option(
        "Rows for evaluation only: TASK/SPLIT or a file; several with commas."
    )
    eval_task_rows: int | None = option(
        "Sample this many rows of each evaluation set; all by default."
    )

    def check_rows(self) -> None:
        super().check_rows()
        if self.eval_task is None:
            refuse_options(
                self,
                ("eval_task_rows",),
                "it samples the rows of --eval-task, which is not given",
            )

    def load_held_out(self, task: str, seed: int) -> Dataset | None:
        """The evaluation rows: those of `--eval-task`, the share of `--held-out`, or `None`."""
        from datasets import concatenate_datasets

        if self.held_out is not None:
            if self.eval_task is not None:
                raise ValueError(
                    "--held-out and --eval-task both name the evaluation rows: leave one of them "
                    "out"
                )
            return self.load_held_out_share(task, seed)

        datasets = [self.load_eval_set(name, seed) for name in self.eval_sets]
        return concatenate_datasets(datasets) if datasets else None

    @property
    def eval_sets(self) -> list[str]:
        """The evaluation sets of `--eval-task`."""
        return self.eval_task.split(",") if self.eval_task else []

    def load_eval_set(self, name: str, seed: int) -> Dataset:
        """The rows of one evaluation set.

        A task is named with its split (by default `test`). A file has none, and the columns of
        the training file.
        """
        from ..data import is_user_data, load_task

        if is_user_data(name):
            return load_task(
                name,
                n=self.eval_task_rows,
                seed=seed,
                columns=self.column_names() or None,
                context_columns=self.context_columns(name),
            )
        eval_task, _, split = name.partition("/")
        return load_task(eval_task, split or "test", self.eval_task_rows, seed)
