"""The model card of a trained agent: its prompt, its environment, its training, and how to use it.

The text and citations are in `card.md`. TRL's `generate_model_card` fills the same class from a
fixed set of names, which has no place for an agent's prompt. The card names an endpoint's model and
host, never the rest of the address, which may contain a key.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from inspect import isfunction, unwrap
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import ModelCard, ModelCardData
from peft import PeftModel
from transformers import PreTrainedModel

from ..llm import ChatModel, OpenAIChat, ScriptedChat
from ..records import atomic_write
from ..rewards import PromptR1Reward
from ..rollout import AgentSpec, Environment, Environments
from .config import MultiTurnGRPOConfig
from .reward_functions import RewardFunction

logger = logging.getLogger(__name__)

CARD_FILE = "README.md"
TAGS = ("trl", "grpo", "agentic-prompting")
"""The tags of every model that was trained here."""
PACKAGES = ("trl", "transformers", "torch", "datasets")
"""The packages whose versions a card names."""
SETTINGS = (
    "learning_rate",
    "lr_scheduler_type",
    "max_steps",
    "num_train_epochs",
    "num_generations",
    "generation_batch_size",
    "num_iterations",
    "loss_type",
    "scale_rewards",
    "beta",
    "epsilon",
    "temperature",
    "top_p",
    "max_turns",
    "max_turn_tokens",
    "max_completion_length",
    "seed",
)
"""The training arguments that a card shows, besides those of the method."""
SUMMARIES = {
    (): "A policy trained with GRPO over conversations with an environment.",
    ("Prompt-R1",): "A small agent LLM that learnt to prompt a large one (Prompt-R1).",
    ("E-SPL",): "A policy that learnt under an evolving system prompt (E-SPL).",
    ("Prompt-R1", "E-SPL"): (
        "A small agent LLM that learnt to prompt a large one (Prompt-R1) as its system prompt "
        "evolved (E-SPL)."
    ),
}
SANDBOX_NOTE = (
    "A tiny policy of 390,000 parameters in a small world with scripted models in the large LLM's "
    "place."
)
POLICY_NOTE = "The policy is the sandbox's own, of 390,000 parameters and a few hundred words."
SCRIPTED_NOTE = "A scripted stand-in took the large LLM's place."


@dataclass(frozen=True)
class TrainedAgent:
    """The facts about a trained agent that a model card states.

    Args:
        args ([`MultiTurnGRPOConfig`]): The training arguments.
        model (`PreTrainedModel`): The agent.
        spec ([`AgentSpec`]): Its form.
        method (`str`): The trainer's name of its method: `Prompt-R1`, `E-SPL`, or another.
        environment ([`Environment`], *optional*): The agent's environment.
        reference ([`ChatModel`], *optional*): The LLM that wrote its system prompts.
        reward_functions (`Sequence[Callable]`): The reward functions.
        reward_names (`Sequence[str]`): Their names.
        row_count (`int`, *optional*): The number of training rows, if they can be counted.
        steps (`int`): The number of training steps.
        hub_id (`str`, *optional*): The model's name on the Hub.
    """

    args: MultiTurnGRPOConfig
    model: PreTrainedModel | PeftModel
    spec: AgentSpec
    method: str
    environment: Environment | None
    reference: ChatModel | None
    reward_functions: Sequence[RewardFunction]
    reward_names: Sequence[str]
    row_count: int | None
    steps: int
    hub_id: str | None

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods: both, if E-SPL trained an agent on Prompt-R1's reward."""
        has_prompt_r1_reward = any(
            callable(function) and isinstance(unwrap(function), PromptR1Reward)
            for function in self.reward_functions
        )
        if self.method == "E-SPL" and has_prompt_r1_reward:
            return ("Prompt-R1", "E-SPL")
        if self.method in ("Prompt-R1", "E-SPL"):
            return (self.method,)
        return ()

    @property
    def large_llm(self) -> Any:
        """The large LLM that the environment consists of, if any."""
        return getattr(self.environment, "chat", None)


# --- the card ----------------------------------------------------------------------------------


def write_card(
    agent: TrainedAgent,
    folder: Path,
    name: str | None = None,
    dataset: str | None = None,
    tags: Sequence[str] = (),
) -> None:
    """Write the [`create_card`] of an agent into a folder.

    If that fails, a warning is logged, because the model is saved anyway.
    """
    try:
        atomic_write(folder / CARD_FILE, str(create_card(agent, name, dataset, tags)))
    except Exception as error:
        logger.warning("no model card in %s: %r", folder, error)


def create_card(
    agent: TrainedAgent,
    name: str | None = None,
    dataset: str | None = None,
    tags: Sequence[str] = (),
) -> ModelCard:
    """Return the card of a trained agent.

    Args:
        agent ([`TrainedAgent`]): The agent. Results in its output folder are shown as well.
        name (`str`, *optional*): The model's name. Defaults to that of its Hub id, else to that of
            the output folder.
        dataset (`str`, *optional*): Hub id of the training data.
        tags (`Sequence[str]`, *optional*): Further tags.
    """
    folder = Path(agent.args.output_dir)
    model_id = agent.hub_id or agent.args.hub_model_id or str(folder)
    base_model = base_model_of(agent)
    sandbox_note = sandbox_note_of(agent)

    # The header.
    all_tags = {*TAGS, *tags, *(method.lower() for method in agent.methods)}
    if sandbox_note:
        all_tags.add("sandbox")
    is_adapter = hasattr(agent.model, "peft_config")
    # The header may name a base model only if it is on the Hub.
    is_hub_id = base_model is not None and "/" in base_model and base_model[0] not in "./"
    card_data = ModelCardData(
        base_model=base_model if is_hub_id else None,
        datasets=dataset,
        library_name="peft" if is_adapter else "transformers",
        pipeline_tag="text-generation",
        tags=sorted(all_tags),
    )

    # The arguments of `OpenAIChat(...)` in the example of its use.
    large_model = "gpt-4o-mini"
    address_argument = ""
    if isinstance(agent.large_llm, OpenAIChat) and agent.large_llm.model != "sandbox-oracle":
        large_model = agent.large_llm.model
        if host_of(agent.large_llm.base_url) != "api.openai.com":
            address_argument = ', base_url="http://.../v1"'
    environment_name = None
    if agent.environment is not None and not hasattr(agent.environment, "chat"):
        environment_name = name_of(agent.environment)
    is_program = agent.environment is not None and agent.environment.plays_whole_episodes
    agent_function = _find_agent_function(agent.environment) if is_program else None

    # Fill the template.
    system_prompt = agent.spec.system_prompt
    return ModelCard.from_template(
        card_data,
        template_path=str(Path(__file__).with_name("card.md")),
        model_name=_one_line(name or model_id.rstrip("/").rpartition("/")[2]),
        version=version("agentic-prompting"),
        model_id=_one_line(model_id),
        methods=agent.methods,
        sandbox_note=sandbox_note,
        summary=SUMMARIES[agent.methods],
        facts=list_facts(agent, base_model, is_sandbox=bool(sandbox_note)),
        large_model=_one_line(large_model),
        address_argument=address_argument,
        is_adapter=is_adapter,
        environment_name=environment_name,
        has_environment=agent.environment is not None,
        is_program=is_program,
        agent_function=agent_function,
        system_prompt=fence(system_prompt) if system_prompt else None,
        prompt_template=fence(agent.spec.prompt_template),
        evaluation=describe_evaluation(folder),
        settings=list_settings(agent),
        versions=", ".join(f"{package} {version(package)}" for package in PACKAGES),
    )


def _find_agent_function(program: Any) -> Callable[..., Any] | None:
    """Return the function of a program, if it can be imported by its name."""
    function = getattr(program, "agent", None)
    if not isfunction(function) or function.__module__ == "__main__":
        return None
    return function if function.__qualname__ == function.__name__ else None


# --- its parts ---------------------------------------------------------------------------------


def list_facts(
    agent: TrainedAgent, base_model: str | None, is_sandbox: bool
) -> list[tuple[str, str]]:
    """Return the rows of the card's first table."""
    facts = {
        "method": " and ".join(agent.methods) or "multi-turn GRPO",
        "base model": base_model or "a local folder",
    }
    # Models by name and host, other environments by the name of their class.
    if agent.large_llm is not None:
        facts["environment model"] = describe_chat(agent.large_llm)
    elif agent.environment is not None:
        facts["environment"] = name_of(agent.environment)
    else:
        facts["environment"] = "none"
    if agent.reference is not None:
        facts["reflecting model"] = describe_chat(agent.reference)
    # The training.
    facts["reward"] = ", ".join(agent.reward_names)
    if agent.row_count is not None:
        facts["training rows"] = str(agent.row_count)
    facts["steps done"] = str(agent.steps)
    facts["sandbox or real"] = "sandbox" if is_sandbox else "real"
    return [(name, _table_cell(value)) for name, value in facts.items()]


def list_settings(agent: TrainedAgent) -> list[tuple[str, str]]:
    """Return the most important training arguments, all of the method, and those of an adapter."""
    # Options of the method are those that the common configuration does not have.
    shared_names = {field.name for field in fields(MultiTurnGRPOConfig)}
    method_names = [field.name for field in fields(agent.args) if field.name not in shared_names]
    values = [(name, getattr(agent.args, name)) for name in (*SETTINGS, *method_names)]
    # Show the rank and scale of an adapter.
    for adapter in (getattr(agent.model, "peft_config", None) or {}).values():
        values.append(("lora_r", getattr(adapter, "r", None)))
        values.append(("lora_alpha", getattr(adapter, "lora_alpha", None)))

    # Options that are not set are left out.
    settings = []
    for name, value in values:
        if value is not None:
            text = str(getattr(value, "value", value))  # of an enum its value
            settings.append((name, _table_cell(text)))
    return settings


def base_model_of(agent: TrainedAgent) -> str | None:
    """Return the Hub id of the base model.

    Name only the last part of a local folder's path, because the rest is private.
    """
    name = getattr(agent.model.config, "_name_or_path", "") or None
    if name and (Path(name).is_dir() or name.startswith(("/", "."))):
        return f"a local folder ({Path(name).name})"
    return name


def sandbox_note_of(agent: TrainedAgent) -> str | None:
    """Return a sentence about a run in the sandbox or with scripted models, else `None`."""
    # An environment may bring a note of its own.
    environment_note = getattr(agent.environment, "card_note", None)
    if environment_note is not None:
        return str(environment_note)

    # The sandbox is recognised by its classes, or by what its run has noted in the folder.
    parts = [agent.environment, agent.large_llm, agent.reference]
    has_sandbox_part = any(
        type(part).__module__.startswith("agentic_prompting.sandbox")
        or getattr(part, "model", "") == "sandbox-oracle"
        for part in parts
    )
    if has_sandbox_part or load_summary(Path(agent.args.output_dir)).get("sandbox"):
        return SANDBOX_NOTE
    if any(isinstance(part, ScriptedChat) for part in parts):
        return SCRIPTED_NOTE
    # Its own policy may be trained in any environment.
    if getattr(agent.model.config, "sandbox_policy", False):
        return POLICY_NOTE
    return None


def describe_chat(chat: object) -> str:
    """Return the name and host of a large LLM; of a router those of all its models."""
    models = getattr(chat, "models", None)
    if isinstance(models, dict):
        return ", ".join(describe_chat(model) for model in models.values())
    if isinstance(chat, OpenAIChat):
        return f"{chat.model} at {host_of(chat.base_url)}"
    return type(chat).__name__


def host_of(address: str) -> str:
    """Return host and port of an address, without user, password, path and query."""
    parts = urlsplit(address)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        # The port is no number, so leave it out.
        port = ""
    return f"{parts.hostname or 'an unknown host'}{port}"


def name_of(environment: Environment) -> str:
    """Return the name of an environment: of its class, or of the function that it consists of."""
    if isinstance(environment, Environments):
        names = [f"{name} ({name_of(part)})" for name, part in environment.by_name.items()]
        return _one_line(", ".join(names))
    return _one_line(getattr(environment.described_by, "__name__", "environment"))


def describe_evaluation(folder: Path) -> str:
    """Return the results in a run's folder, as Markdown.

    They are in `table.md` after an evaluation, and in `summary.json` after a sandbox run.
    """
    # Tables of an evaluation.
    parts = []
    for file in (folder / "table.md", folder / "evaluation" / "table.md"):
        if file.is_file():
            text = file.read_text(encoding="utf-8").strip()
            # The headings go below the card's own.
            parts.append(re.sub(r"^#", "###", text, flags=re.MULTILINE))

    # Collect means and intervals from the summary.
    summary = load_summary(folder)
    results = []
    for when in ("before", "after"):
        if f"exact_match_{when}" in summary:
            mean = summary[f"exact_match_{when}"]
            interval = summary.get(f"interval_{when}")
            results.append((f"exact match {when} training", mean, interval))
    # Results of several systems under the names that the summary gives them.
    for system, (mean, *interval) in (summary.get("exact_match") or {}).items():
        results.append((f"exact match, {system}", mean, interval))

    # Write them as a table.
    if results:
        row_count = ""
        if "questions" in summary:
            row_count = f", {summary['questions']} held-out questions"
        lines = [f"| held-out{row_count} | | 95 % interval |", "|---|---|---|"]
        for metric, mean, interval in results:
            limits = f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "–"
            lines.append(f"| {_table_cell(metric)} | {mean:.3f} | {limits} |")
        parts.append("\n".join(lines))
    if not parts:
        return "No evaluation was found in the run's folder: run `agentic-prompting evaluate`."
    return "\n\n".join(parts)


def load_summary(folder: Path) -> dict[str, Any]:
    """Return the content of `summary.json`; empty if there is none or it is damaged."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return summary if isinstance(summary, dict) else {}


# --- Markdown ----------------------------------------------------------------------------------


def fence(text: str) -> str:
    """Return a text in a Markdown fence that is longer than any in the text."""
    longest_run = max((len(run) for run in re.findall(r"`+", text)), default=0)
    ticks = "`" * max(3, longest_run + 1)
    return f"{ticks}text\n{_encodable(text)}\n{ticks}"


def _table_cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|").replace("<", "&lt;")


def _one_line(text: str) -> str:
    return " ".join(_encodable(text).split())


def _encodable(text: str) -> str:
    """Return a text with characters that UTF-8 cannot encode replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")
