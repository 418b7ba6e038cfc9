"""Options that several commands share: models, a recording, a budget, traces. Those of rows are in
`task_rows.py`.

An option is a field of a dataclass with its help. A command's own options are in its file. This
module imports no large package by itself: `--help` has to stay quick.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .client_settings import ClientSettings, client_help
from .loader import load_environment

if TYPE_CHECKING:
    from ..agent import PromptAgent
    from ..environments import LLMEnvironment
    from ..llm import Budget, OpenAIChat, ReplayCache
    from ..llm.endpoint_check import CommandRole, EndpointCheck
    from ..rollout import Environment


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
