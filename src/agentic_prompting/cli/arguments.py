"""The options that both training programs share: data, environment, reward, and the form of the agent."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from transformers import AutoTokenizer
from trl import ModelConfig, get_peft_config

from ..environments import HTTPRetriever, LLMEnvironment, SearchEnvironment
from ..sandbox import Oracle
from ..sandbox.server import MODEL, OracleServer
from ..trainers import MultiTurnGRPOConfig
from .loader import GRAMMARS, REWARDS, load_environment, load_object, load_part, load_tools, text_of
from .options import EnvironmentModel, HeldOutRows, TaskRows, setting


def rewards(default: str) -> Any:
    """The option of the reward functions."""
    help = f"One or several of {', '.join(REWARDS)}, or your own as module:name."
    return field(default_factory=lambda: [default], metadata={"help": help})


@dataclass
class DataAndEnvironment(TaskRows, HeldOutRows, EnvironmentModel):
    """Options of both methods: the arguments of the trainers in Python, by name."""

    n_test: int = setting("Sandbox: held-out questions.", 256)
    environment: str | None = setting(
        "What the agent asks: llm, search, none, or your own as module:name."
    )
    environment_temperature: float | None = setting("Sent with every call of the large LLM.")
    share_replies: str | None = setting(
        "never, group or step: who shares the reply to the same conversation."
    )
    search_url: str | None = setting(
        "For environment search: a retriever with Search-R1's HTTP contract."
    )
    tools: list[str] | None = setting("Instead of an environment: functions as module:name.")
    environment_factory: str | None = setting(
        "Instead of an environment: a class as module:name, made per rollout."
    )
    prompt_template: str | None = setting(
        "The agent's user message with {question}, or a file of it."
    )
    system_prompt: str | None = setting("The agent's system message, or a file of it.")
    grammar: str | None = setting(
        f"How turns look: {', '.join(GRAMMARS)}, or your own as module:name."
    )
    tokenizer: str | None = setting("Folder or hub name, if it is not the model's.")
    callbacks: list[str] | None = setting("Callbacks of transformers' Trainer as module:name.")

    ASKS = "llm"  # the environment where none is named
    NOT_IN_SANDBOX = (
        "dataset", "eval_task", "environment", "tools", "environment_factory", "prompt_template", "system_prompt",
        "grammar", "tokenizer", "callbacks",
    )  # fmt: skip

    def __post_init__(self):
        for name in ("reward", "tools", "callbacks"):  # one stands for a list of one
            if isinstance(value := getattr(self, name), str):
                setattr(self, name, [value])

    @property
    def asks(self) -> str:
        return self.environment or self.ASKS

    @property
    def own(self) -> bool:
        """Whether the environment is the user's own."""
        return bool(self.tools or self.environment_factory or ":" in self.asks)

    def check_environment(self, sandbox: bool) -> None:
        """Raise `ValueError` for options of the environment that do not go together."""
        known = ("llm", "search", "none")
        if self.environment and self.environment not in known and ":" not in self.environment:
            near = get_close_matches(self.environment, known, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"environment must be one of {', '.join(known)}, or module:name, got {self.environment!r}{guess}"
            )
        if self.environment and (self.tools or self.environment_factory):
            raise ValueError(
                "--tools and --environment_factory take the place of --environment: leave it out"
            )
        if self.own and self.environment_model:
            raise ValueError(
                "an environment of your own takes the place of a large LLM: leave one of them out"
            )
        if sandbox and (given := [name for name in self.NOT_IN_SANDBOX if getattr(self, name)]):
            raise ValueError(f"the sandbox has its own: leave out --{', --'.join(given)}")
        if self.asks == "search" and not self.search_url:
            raise ValueError("say where to search: --search_url http://host:port/retrieve")

    def front(
        self, args: MultiTurnGRPOConfig, model: ModelConfig, environment: Any
    ) -> dict[str, Any]:
        """The trainer's arguments that these options name."""
        callbacks = [load_object(name, "callback") for name in self.callbacks or ()]
        return {
            "model": model.model_name_or_path,
            "args": args,
            "train_dataset": self.load(self.task, args.seed),  # type: ignore[attr-defined]
            "eval_dataset": self.held_out(args.seed),
            "processing_class": AutoTokenizer.from_pretrained(self.tokenizer)
            if self.tokenizer
            else None,
            **environment,
            "prompt_template": text_of(self.prompt_template),
            "system_prompt": text_of(self.system_prompt),
            "grammar": load_object(self.grammar, "grammar", GRAMMARS) if self.grammar else None,
            "callbacks": callbacks or None,
            "peft_config": get_peft_config(model),
        }

    def asked(self, seed: int, stack: ExitStack, sandbox: bool = False) -> dict[str, Any]:
        """The trainer's arguments for what the agent asks; the client of a large LLM is closed with the run."""
        if self.tools or self.environment_factory:
            factory = (
                load_part(self.environment_factory, "environment")
                if self.environment_factory
                else None
            )
            return {"tools": load_tools(self.tools or ()) or None, "environment_factory": factory}
        if self.asks == "llm":
            return {"environment": self.large_llm(seed, stack, sandbox)}
        if self.asks == "search":
            return {"environment": SearchEnvironment(HTTPRetriever(self.search_url or ""))}
        return {"environment": load_environment(self.asks) if self.own else None}

    def large_llm(self, seed: int, stack: ExitStack, sandbox: bool) -> LLMEnvironment:
        """The large LLM that the agent talks to."""
        model, base_url = self.environment_model, self.environment_base_url
        if sandbox and not base_url:
            # The embedded default, through the real client: the oracle as an OpenAI-compatible server on loopback.
            base_url = stack.enter_context(OracleServer(Oracle(seed=seed))).base_url
            model = model or MODEL
        chat, settings = (
            self.connect(stack, model, base_url),
            {"temperature": self.environment_temperature},
        )
        return self.as_environment(chat, **settings, share_replies=self.share_replies)
