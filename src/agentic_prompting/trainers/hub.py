"""Uploads to the hub and model cards: only the model, its card and `agentic_prompting.json` leave a run's folder.

transformers uploads a trainer's whole output folder. Ours also holds every rollout, records of spending, recorded
replies and reports, which do not belong to a published model.

The card describes a trained agent, the prompt it is asked with, what it was trained against, and how to use it. Its
text and citations are in `card.md`. TRL's `generate_model_card` fills the same class from a fixed set of names, which
has no place for an agent's prompt. The card names an endpoint's model and host, never the rest of the address, which
may contain a key.
"""

from __future__ import annotations

import glob
import json
import logging
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from importlib.metadata import version
from inspect import unwrap
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from huggingface_hub import ModelCard, ModelCardData
from transformers import trainer as transformers_trainer

from ..llm import OpenAIChat, ScriptedChat
from ..records import atomic_write, only_a_folder
from ..rewards import PromptR1Reward
from ..rollout import SPEC_FILE, AgentSpec, Environments
from .config import MultiTurnGRPOConfig

logger = logging.getLogger(__name__)

CARD_FILE = "README.md"
# A list of names, because a run's folder may hold any other file: our files about a model, those that `save_pretrained`
# writes for models and adapters, and those for tokenizers and processors, besides the ones that a tokenizer names.
SHARED = (
    CARD_FILE, SPEC_FILE, "system_prompt.txt", "population.json", "summary.json", "table.md",
    "config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
    "model-?????-of-?????.safetensors", "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "additional_chat_templates/*.jinja", "vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "processor_config.json", "preprocessor_config.json",
    "video_preprocessor_config.json",
)  # fmt: skip
_SETTINGS = (
    "learning_rate", "lr_scheduler_type", "max_steps", "num_train_epochs", "num_generations", "generation_batch_size",
    "num_iterations", "loss_type", "scale_rewards", "beta", "epsilon", "temperature", "top_p", "max_turns",
    "max_turn_tokens", "max_completion_length", "seed",
)  # fmt: skip
_WHAT = {
    (): "A policy trained with GRPO over conversations with an environment.",
    ("Prompt-R1",): "A small agent LLM that learnt to prompt a large one (Prompt-R1).",
    ("E-SPL",): "A policy that learnt under an evolving system prompt (E-SPL).",
    (
        "Prompt-R1",
        "E-SPL",
    ): "A small agent LLM that learnt to prompt a large one (Prompt-R1) as its system prompt "
    "evolved (E-SPL).",
}


# --- errors in one line ----------------------------------------------------------------------------------------------


@contextmanager
def missing_in_a_line(model: Any) -> Iterator[None]:
    """Within it a model that cannot be loaded, or a hub that cannot be written to, raises an error of one line."""
    if isinstance(model, str) and only_a_folder(model) and not Path(model).exists():
        raise FileNotFoundError(
            f"{model} does not exist: give the folder of a model, or its name on the hub"
        )
    try:
        yield
    except Exception as error:
        calls = {frame.f_code.co_name for frame, _ in traceback.walk_tb(error.__traceback__)}
        why = str(error).strip().split("\n")[0]
        if "init_hf_repo" in calls:
            what = f"push_to_hub=True, but the hub cannot be written to: {why}"
            raise ConnectionError(f"{what}. push_to_hub=False trains without it") from None
        if (
            isinstance(error, OSError | ValueError)
            and isinstance(model, str)
            and "from_pretrained" in calls
        ):
            folder = Path(model).exists()
            what = (
                "holds no model that can be loaded"
                if folder
                else (
                    "is neither a folder here nor a model that the hub gives; a private one needs HF_TOKEN"
                )
            )
            raise FileNotFoundError(f"{model} {what}: {why}") from None
        raise


# --- uploads ---------------------------------------------------------------------------------------------------------


@contextmanager
def only_the_model(folder: Path, tokenizer: Any) -> Iterator[None]:
    """Within it transformers uploads from this folder only the files named in [`SHARED`] and by the tokenizer. A
    checkpoint is uploaded whole, if `hub_strategy` asks for it."""
    vocabulary = [
        glob.escape(name) for name in getattr(tokenizer, "vocab_files_names", {}).values()
    ]
    uploads = transformers_trainer.hf_api
    transformers_trainer.hf_api = lambda: _Selective(uploads(), folder, [*SHARED, *vocabulary])
    try:
        yield
    finally:
        transformers_trainer.hf_api = uploads


class _Selective:
    """An `HfApi` whose `upload_folder` uploads only the files of the model."""

    def __init__(self, api: Any, folder: Path, shared: list[str]):
        self._api, self._folder, self._shared = api, folder, shared

    def __getattr__(self, name: str) -> Any:
        return getattr(self._api, name)

    def upload_folder(self, *, folder_path: Any, **options: Any) -> Any:
        if Path(folder_path) == self._folder:
            options["allow_patterns"] = self._shared
        return self._api.upload_folder(folder_path=folder_path, **options)


# --- the card --------------------------------------------------------------------------------------------------------


TAGS = ("trl", "grpo", "agentic-prompting")
"""The tags of every model that was trained here."""


@dataclass(frozen=True)
class Trained:
    """The facts about a trained agent that a model card states.

    Args:
        args ([`MultiTurnGRPOConfig`]): The run's.
        model (`PreTrainedModel`): The agent.
        spec ([`AgentSpec`]): Its form.
        method (`str`): The trainer's own name of its method: `Prompt-R1`, `E-SPL`, or another.
        environment ([`Environment`], *optional*): The agent's environment.
        reference ([`ChatModel`], *optional*): The LLM that wrote its system prompts.
        reward_funcs (`Sequence[Callable]`), reward_names (`Sequence[str]`): The reward functions.
        rows (`int`, *optional*): The number of training rows, if they can be counted.
        steps (`int`): The number of training steps.
        hub_id (`str`, *optional*): The model's name on the hub.
    """

    args: MultiTurnGRPOConfig
    model: Any
    spec: AgentSpec
    method: str
    environment: Any
    reference: Any
    reward_funcs: Sequence[Any]
    reward_names: Sequence[str]
    rows: int | None
    steps: int
    hub_id: str | None

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods it was trained by: both, if Prompt-R1's agent learnt under an evolving prompt."""
        rewarded = any(isinstance(unwrap(reward), PromptR1Reward) for reward in self.reward_funcs)
        if self.method == "E-SPL":
            return ("Prompt-R1", "E-SPL") if rewarded else ("E-SPL",)
        return ("Prompt-R1",) if self.method == "Prompt-R1" else ()


def write_card(trained: Trained, folder: Path, *args: Any) -> None:
    """Write the [`model_card`] into a folder. If it cannot be made, log a warning: the model is saved anyway."""
    try:
        atomic_write(folder / CARD_FILE, str(model_card(trained, *args)))
    except Exception as error:
        logger.warning("no model card in %s: %r", folder, error)


def model_card(
    trained: Trained, name: str | None = None, dataset: str | None = None, tags: Sequence[str] = ()
) -> ModelCard:
    """The card of a trained agent.

    Args:
        trained ([`Trained`]): The agent; results in its output folder are shown as well.
        name (`str`, *optional*): The model's name. Defaults to that of the hub id, then to that of the output folder.
        dataset (`str`, *optional*): Hub id of the training data.
        tags (`Sequence[str]`, *optional*): Further tags.
    """
    folder, spec = Path(trained.args.output_dir), trained.spec
    place = trained.hub_id or trained.args.hub_model_id or str(folder)
    methods, sandbox, base = trained.methods, _sandbox(trained, folder), _base_model(trained)
    large, address = _example_of(trained.environment)
    kinds = {
        *TAGS,
        *tags,
        *(method.lower() for method in methods),
        *(["sandbox"] if sandbox else []),
    }
    data = ModelCardData(
        base_model=base if base and "/" in base and not base.startswith((".", "/")) else None,
        datasets=dataset,
        library_name="peft" if hasattr(trained.model, "peft_config") else "transformers",
        pipeline_tag="text-generation",
        tags=sorted(kinds),
    )
    return ModelCard.from_template(
        data,
        template_path=str(Path(__file__).with_name("card.md")),
        model_name=_line(name or place.rstrip("/").rpartition("/")[2]),
        version=version("agentic-prompting"),
        place=_line(place),
        methods=methods,
        sandbox=sandbox,
        what=_WHAT[methods],
        facts=_facts(trained, methods, base, sandbox),
        large_model=_line(large),
        address=address,
        own=_name_of(trained.environment)
        if trained.environment and not hasattr(trained.environment, "chat")
        else None,
        alone=trained.environment is None,
        system_prompt=fenced(spec.system_prompt) if spec.system_prompt else None,
        prompt_template=fenced(spec.prompt_template),
        evaluation=evaluation_of(folder),
        settings=_settings(trained),
        versions=", ".join(
            f"{package} {version(package)}"
            for package in ("trl", "transformers", "torch", "datasets")
        ),
    )


def asked(chat: Any) -> str:
    """A large LLM in words: its name and its host; for a router those of all its models."""
    routed = getattr(chat, "models", None)
    if isinstance(routed, dict):
        return ", ".join(asked(model) for model in routed.values())
    return (
        f"{chat.model} at {host_of(chat.base_url)}"
        if isinstance(chat, OpenAIChat)
        else type(chat).__name__
    )


def host_of(address: str) -> str:
    """Host and port of an address: no user, no password, no path, no query."""
    parts = urlsplit(address)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.hostname or 'an unknown host'}{port}"


def evaluation_of(folder: Path) -> str:
    """The results in a run's folder: `table.md` of an evaluation, `summary.json` of a sandbox run."""
    tables = [
        path for path in (folder / "table.md", folder / "evaluation" / "table.md") if path.is_file()
    ]
    # Their headings go below the card's own.
    parts = [
        re.sub(r"^#", "###", path.read_text(encoding="utf-8").strip(), flags=re.MULTILINE)
        for path in tables
    ]
    summary = _summary(folder)
    measured = [
        (
            f"exact match {when} training",
            summary[f"exact_match_{when}"],
            summary.get(f"interval_{when}"),
        )
        for when in ("before", "after")
        if f"exact_match_{when}" in summary
    ]
    for system, (mean, *interval) in (summary.get("exact_match") or {}).items():
        measured.append((f"exact match, {system}", mean, interval))
    if measured:
        asked_of = f", {summary['questions']} held-out questions" if "questions" in summary else ""
        lines = [f"| held-out{asked_of} | | 95 % interval |", "|---|---|---|"]
        for what, mean, interval in measured:
            between = f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "–"
            lines.append(f"| {_cell(what)} | {mean:.3f} | {between} |")
        parts.append("\n".join(lines))
    return (
        "\n\n".join(parts)
        or "No evaluation was found in the run's folder: `agentic-prompting evaluate` makes one."
    )


def fenced(text: str) -> str:
    """The text in a Markdown fence that is longer than any in the text."""
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall(r"`+", text)), 3)
    return f"{fence}text\n{_clean(text)}\n{fence}"


def _facts(
    trained: Trained, methods: Sequence[str], base: str | None, sandbox: str | None
) -> list[tuple[str, str]]:
    environment, reference = trained.environment, trained.reference
    inner = getattr(environment, "chat", None)
    talks_to = (
        "none"
        if environment is None
        else asked(inner)
        if inner is not None
        else _name_of(environment)
    )
    facts = {
        "method": " and ".join(methods) or "multi-turn GRPO",
        "base model": base or "a local folder",
        "environment model" if inner is not None else "environment": talks_to,
        "reflecting model": reference and asked(reference),
        "reward": ", ".join(trained.reward_names),
        "training rows": None if trained.rows is None else str(trained.rows),
        "steps done": str(trained.steps),
        "sandbox or real": "sandbox" if sandbox else "real",
    }
    return [(name, _cell(value)) for name, value in facts.items() if value is not None]


def _settings(trained: Trained) -> list[tuple[str, str]]:
    """The most important training arguments, all of the method's own, and those of an adapter."""
    own = [
        field.name
        for field in fields(trained.args)
        if field.name not in MultiTurnGRPOConfig.__dataclass_fields__
    ]
    shown = [(name, getattr(trained.args, name)) for name in (*_SETTINGS, *own)]
    for adapter in (getattr(trained.model, "peft_config", None) or {}).values():
        shown += [(f"lora_{name}", getattr(adapter, name, None)) for name in ("r", "lora_alpha")]
    return [
        (name, _cell(str(getattr(value, "value", value))))
        for name, value in shown
        if value is not None
    ]


def _base_model(trained: Trained) -> str | None:
    """Its hub id; for a local folder the last part of the path alone, in brackets, because the rest is private."""
    name = getattr(trained.model.config, "_name_or_path", "") or None
    if name and (Path(name).is_dir() or name.startswith(("/", "."))):
        return f"a local folder ({Path(name).name})"
    return name


def _sandbox(trained: Trained, folder: Path) -> str | None:
    """A sentence about a run in the sandbox or against a scripted model; `None` if the run was real."""
    if (note := getattr(trained.environment, "card_note", None)) is not None:
        return str(note)
    parts = [trained.environment, getattr(trained.environment, "chat", None), trained.reference]
    own = any(type(part).__module__.startswith("agentic_prompting.sandbox") for part in parts)
    named = any(getattr(part, "model", "") == "sandbox-oracle" for part in parts)
    if own or named or _summary(folder).get("sandbox"):
        return "A tiny policy of 390,000 parameters in a small world with scripted models in the large LLM's place."
    scripted = any(isinstance(part, ScriptedChat) for part in parts)
    return "A scripted stand-in took the large LLM's place." if scripted else None


def _summary(folder: Path) -> dict[str, Any]:
    try:
        saved = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def _example_of(environment: Any) -> tuple[str, str]:
    """The arguments of `OpenAIChat(...)` in the example: the model's name, and a placeholder for an address."""
    chat = getattr(environment, "chat", None)
    if not isinstance(chat, OpenAIChat) or chat.model == "sandbox-oracle":
        return "gpt-4o-mini", ""
    return chat.model, "" if host_of(
        chat.base_url
    ) == "api.openai.com" else ', base_url="http://.../v1"'


def _name_of(environment: Any) -> str:
    """The name of a user's environment: its class, or the function itself."""
    if isinstance(environment, Environments):
        return _line(
            ", ".join(f"{name} ({_name_of(one)})" for name, one in environment.by_name.items())
        )
    return _line(getattr(environment.described_by, "__name__", "environment"))


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|").replace("<", "&lt;")


def _line(text: str) -> str:
    return " ".join(_clean(text).split())


def _clean(text: str) -> str:
    """The text with characters that UTF-8 cannot encode replaced."""
    return text.encode("utf-8", "replace").decode("utf-8")
