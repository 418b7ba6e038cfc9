"""The options that all training methods share: data, environment, reward, and the form of the
agent.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from transformers import AutoTokenizer
from trl import ModelConfig, get_peft_config

from ..environments import HTTPRetriever, LLMEnvironment, SearchEnvironment
from ..rollout.grammars import GRAMMARS
from ..sandbox import Oracle
from ..sandbox.server import MODEL, OracleServer
from ..trainers import MultiTurnGRPOConfig
from .hub import check_model
from .loader import (
    REWARDS,
    load_environment,
    load_object,
    load_part,
    load_tools,
    suggest,
    text_or_file,
)
from .options import (
    CALL_OPTIONS,
    EnvironmentModel,
    MissingOption,
    option,
    refuse_options,
)
from .task_rows import ROW_OPTIONS, HeldOutRows

# The shipped environments. With `none` the agent has no environment.
ENVIRONMENTS = ("llm", "search", "none")
# The shipped grammars that `--grammar` names. `ask` is not among them: its environment brings it.
GRAMMAR_OPTIONS = {
    name: f"{GRAMMARS[name].__module__}:{GRAMMARS[name].__name__}"
    for name in ("tags", "question", "free")
}


def reward_option(default: str) -> Any:
    """The option of the reward functions."""
    text = f"Reward functions: one or several of {', '.join(REWARDS)}, or your own as module:name."
    return field(default_factory=lambda: [default], metadata={"help": text})


@dataclass
class DataAndEnvironment(HeldOutRows, EnvironmentModel):
    """Options of all methods: the arguments of the trainers in Python, by name."""

    n_test: int = option("Number of held-out questions in the sandbox.", 256)
    environment: str | None = option(
        "What the agent asks: llm, search, none, or your own as module:name."
    )
    environment_temperature: float | None = option(
        "Temperature, sent with every call of the large LLM."
    )
    share_replies: str | None = option(
        "Who shares the reply to the same conversation: never, group or step."
    )
    search_url: str | None = option(
        "URL of the search environment's retriever, with Search-R1's HTTP contract."
    )
    tools: list[str] | None = option("Tools instead of an environment: functions as module:name.")
    environment_factory: str | None = option(
        "A class as module:name, made per rollout, instead of an environment."
    )
    prompt_template: str | None = option(
        "The agent's user message with {question}, or a file of it."
    )
    system_prompt: str | None = option("The agent's system message, or a file of it.")
    grammar: str | None = option(
        f"Format of the agent's turns: {', '.join(GRAMMAR_OPTIONS)}, or your own as module:name."
    )
    tokenizer: str | None = option("Folder or hub name of the tokenizer, if it is not the model's.")
    callbacks: list[str] | None = option("Callbacks of transformers' Trainer as module:name.")

    DEFAULT_ENVIRONMENT = "llm"
    # Options of parts that the sandbox has of its own.
    NOT_IN_SANDBOX = (
        *ROW_OPTIONS,
        "eval_task",
        "eval_task_rows",
        "environment",
        "search_url",
        "tools",
        "environment_factory",
        "prompt_template",
        "system_prompt",
        "grammar",
        "tokenizer",
        "callbacks",
    )

    # Options of the large LLM in the environment.
    LARGE_LLM_OPTIONS = (
        "environment_model",
        *CALL_OPTIONS,
        "environment_temperature",
        "share_replies",
    )

    @property
    def environment_name(self) -> str:
        return self.environment or self.DEFAULT_ENVIRONMENT

    @property
    def has_own_environment(self) -> bool:
        """Whether the environment is the user's own."""
        return bool(self.tools or self.environment_factory or ":" in self.environment_name)

    @property
    def asks_large_llm(self) -> bool:
        """Whether the environment is the large LLM."""
        return self.environment_name == "llm" and not self.has_own_environment

    def check_environment(self, sandbox: bool) -> None:
        """Raise `ValueError` for options of the environment that are incompatible."""
        # A name without a colon has to be a shipped one.
        name = self.environment
        if name and name not in ENVIRONMENTS and ":" not in name:
            raise ValueError(
                f"--environment must be one of {', '.join(ENVIRONMENTS)}, or module:name, got "
                f"{name!r}{suggest(name, ENVIRONMENTS)}"
            )
        # There is only one environment, however it is given.
        if name and (self.tools or self.environment_factory):
            raise ValueError(
                "--tools and --environment_factory take the place of --environment: leave it out"
            )
        if self.has_own_environment and self.environment_model:
            raise ValueError(
                "--environment_model is incompatible with an environment of your own: leave one of "
                "them out"
            )
        # Options that would have no effect are refused.
        if sandbox:
            refuse_options(self, self.NOT_IN_SANDBOX, "the sandbox has its own; leave it out")
            return
        refuse_options(
            self, ("n_test", "warm_start_steps"), "it is for the sandbox, which makes its own data"
        )
        self.check_rows()
        if not self.asks_large_llm:
            refuse_options(
                self,
                self.LARGE_LLM_OPTIONS,
                "the environment is not the large LLM; leave it out, or say --environment llm",
            )
        if self.environment_name != "search" or self.has_own_environment:
            refuse_options(self, ("search_url",), "it is for --environment search")
        elif not self.search_url:
            raise MissingOption("name the retriever", "--search_url http://host:port/retrieve")

    def build_environment(self, seed: int, stack: ExitStack) -> dict[str, Any]:
        """The trainer's `environment`, or `tools` and `environment_factory`.

        A client is closed with the stack.
        """
        # Functions, or a class made per rollout, take the place of an environment.
        if self.tools or self.environment_factory:
            factory = None
            if self.environment_factory:
                factory = load_part(self.environment_factory, "environment")
            return {"tools": load_tools(self.tools or ()) or None, "environment_factory": factory}
        # A shipped environment, your own, or none.
        if self.environment_name == "llm":
            return {"environment": self.connect_large_llm(seed, stack)}
        if self.environment_name == "search":
            return {"environment": SearchEnvironment(HTTPRetriever(self.search_url or ""))}
        if self.has_own_environment:
            return {"environment": load_environment(self.environment_name)}
        return {"environment": None}

    def connect_large_llm(
        self, seed: int, stack: ExitStack, sandbox: bool = False
    ) -> LLMEnvironment:
        """The large LLM that the agent talks to; in the sandbox its oracle, unless another one is
        named by its address.
        """
        model = self.environment_model
        base_url = self.environment_base_url
        if sandbox and not base_url:
            # The oracle is asked through the real client, as an OpenAI-compatible server on
            # loopback.
            base_url = stack.enter_context(OracleServer(Oracle(seed=seed))).base_url
            model = model or MODEL
        # The client is closed with the stack, and options that are not set are not sent.
        return self.as_environment(
            self.connect(stack, model, base_url, "environment"),
            temperature=self.environment_temperature,
            share_replies=self.share_replies,
        )

    def agent_form(self) -> dict[str, Any]:
        """The agent's prompt and grammar by argument; for `None` the trainer has its own."""
        grammar = None
        if self.grammar:
            grammar = load_object(self.grammar, "grammar", GRAMMAR_OPTIONS)
        return {
            "prompt_template": text_or_file(self.prompt_template),
            "system_prompt": text_or_file(self.system_prompt),
            "grammar": grammar,
        }

    def trainer_arguments(
        self, args: MultiTurnGRPOConfig, model: ModelConfig, task: str
    ) -> dict[str, Any]:
        """The arguments of every trainer but the environment and the reward, with the rows loaded."""
        rows = self.load(task, args.seed)
        held_out = self.load_held_out(task, args.seed)
        tokenizer = None
        if self.tokenizer:
            tokenizer = AutoTokenizer.from_pretrained(self.tokenizer)
        callbacks = [load_object(name, "callback") for name in self.callbacks or ()]
        return {
            "model": model.model_name_or_path,
            "args": args,
            "train_dataset": rows,
            "eval_dataset": held_out,
            "processing_class": tokenizer,
            "callbacks": callbacks or None,
            "peft_config": get_peft_config(model),
            **self.agent_form(),
        }


def refuse_model(model: ModelConfig) -> None:
    """Raise `ValueError` if a run in the sandbox, whose policy is made there, is given a model."""
    refuse_options(
        model,
        ("model_name_or_path",),
        "the sandbox trains a tiny policy of its own; leave it out, or leave the sandbox out",
    )


def check_before_loading(args: MultiTurnGRPOConfig, model: ModelConfig, *endpoints: Any) -> None:
    """Check endpoints and model, in the order of `doctor`, before data or weights are loaded."""
    # One process asks the endpoints for all.
    if args.check_environment and args.process_index == 0:
        for endpoint in endpoints:
            if hasattr(endpoint, "check"):
                endpoint.check()
    # Endpoints come first, then the model, as in `doctor`.
    if not model.model_name_or_path:
        raise MissingOption(
            "name the model to train", "--model_name_or_path FOLDER or a name on the hub"
        )
    check_model(model.model_name_or_path)
