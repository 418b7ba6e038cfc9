"""The model card: what a trained agent is, how it is asked, what it was trained against, and how to use it.

The words are in `model_card.md`; this fills them in. Of an endpoint the card says the model's name and the host, never
the rest of the address, where a key might stand.
"""

from __future__ import annotations

import json
import re
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from huggingface_hub import ModelCard, ModelCardData

from ..llm import ScriptedChat
from ..rewards import PromptR1Reward
from .papers import PAPERS

if TYPE_CHECKING:
    from .multi_turn_grpo import MultiTurnGRPOTrainer

TEMPLATE = Path(__file__).with_name("model_card.md")

_SETTINGS = (
    "learning_rate", "lr_scheduler_type", "max_steps", "num_train_epochs", "num_generations", "generation_batch_size",
    "num_iterations", "loss_type", "scale_rewards", "beta", "epsilon", "temperature", "top_p", "max_turns",
    "max_turn_tokens", "max_completion_length", "seed", "gate",
)  # fmt: skip
_ESPL_SETTINGS = (
    "mode", "prompts_per_step", "baseline", "window", "selection", "p_crossover", "max_ops", "reflect_on", "reflector",
    "evolution_lag", "prompt_place",
)  # fmt: skip


def model_card(
    trainer: MultiTurnGRPOTrainer, name: str | None = None, dataset: str | None = None, tags: tuple[str, ...] = ()
) -> ModelCard:
    """The card of what `trainer` has trained so far.

    Args:
        trainer ([`MultiTurnGRPOTrainer`]): Of which results in its output folder are shown as well.
        name (`str`, *optional*): Of the model. Defaults to the hub id's, then to the output folder's.
        dataset (`str`, *optional*): Hub id of the training data.
        tags (`tuple[str, ...]`, *optional*): Further ones.
    """
    folder, spec = Path(trainer.args.output_dir), trainer.saved_spec()
    place = trainer.hub_model_id or trainer.args.hub_model_id or str(folder)
    methods, sandbox = methods_of(trainer), _sandbox(trainer, folder)
    large, address = _example_of(trainer.environment)
    base = _base_model(trainer)
    kinds = {*trainer._tag_names, *tags, *(method.lower() for method in methods), *(["sandbox"] if sandbox else [])}
    data = ModelCardData(
        base_model=base if base and "/" in base and not base.startswith((".", "/")) else None,
        datasets=dataset,
        library_name="peft" if hasattr(trainer.model, "peft_config") else "transformers",
        pipeline_tag="text-generation",
        tags=sorted(kinds),
    )
    return ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        model_name=_line(name or place.rstrip("/").rpartition("/")[2]),
        version=version("agentic-prompting"),
        place=_line(place),
        sandbox=sandbox,
        what=_what(methods),
        facts=_facts(trainer, methods, base),
        large_model=_line(large),
        address=address,
        system_prompt=fenced(spec.system_prompt) if spec.system_prompt else None,
        prompt_template=fenced(spec.prompt_template),
        evaluation=evaluation_of(folder),
        settings=_settings(trainer),
        versions=", ".join(f"{package} {version(package)}" for package in ("trl", "transformers", "torch", "datasets")),
        papers=[{**paper._asdict(), "used": paper.method in methods} for paper in PAPERS],
    )


def methods_of(trainer: MultiTurnGRPOTrainer) -> list[str]:
    """The methods that a trainer trains by; both where Prompt-R1's agent learns under an evolving prompt."""
    methods = [trainer._name] if trainer._name in ("Prompt-R1", "E-SPL") else []
    rewarded = any(isinstance(reward, PromptR1Reward) for reward in trainer.reward_funcs)
    return ["Prompt-R1", "E-SPL"] if methods == ["E-SPL"] and rewarded else methods


def asked(chat: Any) -> str:
    """A large LLM in words: its name and the host it is asked at; of a router all of them."""
    routed = getattr(chat, "models", None)
    if isinstance(routed, dict):
        return ", ".join(asked(model) for model in routed.values())
    endpoint = getattr(chat, "endpoint", None)
    if endpoint is None:
        return f"{type(chat).__name__}"
    return f"{endpoint.model} at {host_of(endpoint.base_url)}"


def host_of(address: str) -> str:
    """Host and port of an address: no user, no password, no path, no query."""
    parts = urlsplit(address)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.hostname or 'an unknown host'}{port}"


def evaluation_of(folder: Path) -> str:
    """The results that a run's folder holds: `table.md` of an evaluation, `summary.json` of a sandbox run."""
    tables = [path for path in (folder / "table.md", folder / "evaluation" / "table.md") if path.is_file()]
    parts = [_demoted(path.read_text(encoding="utf-8")) for path in tables]
    summary = _summary(folder)
    rows = []
    for when in ("before", "after"):
        if f"exact_match_{when}" in summary:
            mean, interval = summary[f"exact_match_{when}"], summary.get(f"interval_{when}")
            rows.append([f"exact match {when} training", mean, interval])
    for system, measured in (summary.get("exact_match") or {}).items():
        rows.append([f"exact match, {system}", measured[0], measured[1:]])
    if rows:
        lines = [f"| {_cell(what)} | {mean:.3f} | {_interval(interval)} |" for what, mean, interval in rows]
        asked_of = f", {summary['questions']} held-out questions" if "questions" in summary else ""
        parts.append("\n".join([f"| held-out{asked_of} | | 95 % interval |", "|---|---|---|", *lines]))
    return "\n\n".join(parts) or "No evaluation was found in the run's folder: `agentic-prompting evaluate` makes one."


def fenced(text: str) -> str:
    """Text in a fence that it cannot close."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{_clean(text)}\n{fence}"


def _what(methods: list[str]) -> str:
    if methods == ["Prompt-R1", "E-SPL"]:
        return "A small agent LLM that learnt to prompt a large one (Prompt-R1) as its system prompt evolved (E-SPL)."
    if methods == ["Prompt-R1"]:
        return "A small agent LLM that learnt to prompt a large one (Prompt-R1)."
    if methods == ["E-SPL"]:
        return "A policy that learnt under an evolving system prompt (E-SPL)."
    return "A policy trained with GRPO over conversations with an environment."


def _facts(trainer: MultiTurnGRPOTrainer, methods: list[str], base: str | None) -> list[tuple[str, str]]:
    environment = trainer.environment
    inner = getattr(environment, "chat", None)
    facts = [("method", " and ".join(methods) or "multi-turn GRPO"), ("base model", base or "a local folder")]
    talks_to = "none" if environment is None else asked(inner) if inner is not None else type(environment).__name__
    facts.append(("environment model" if inner is not None else "environment", talks_to))
    if getattr(trainer, "reference", None) is not None:
        facts.append(("reflecting model", asked(trainer.reference)))
    facts.append(("reward", ", ".join(trainer.reward_func_names)))
    if hasattr(trainer.train_dataset, "__len__"):
        facts.append(("training rows", str(len(trainer.train_dataset))))
    facts.append(("steps done", str(trainer.state.global_step)))
    facts.append(("sandbox or real", "sandbox" if _sandbox(trainer, Path(trainer.args.output_dir)) else "real"))
    return [(name, _cell(value)) for name, value in facts]


def _settings(trainer: MultiTurnGRPOTrainer) -> list[tuple[str, str]]:
    names = [*_SETTINGS, *(_ESPL_SETTINGS if hasattr(trainer, "population") else ())]
    shown = [(name, getattr(trainer.args, name)) for name in names if hasattr(trainer.args, name)]
    for adapter in (getattr(trainer.model, "peft_config", None) or {}).values():
        shown += [(f"lora_{name}", getattr(adapter, name)) for name in ("r", "lora_alpha") if hasattr(adapter, name)]
    return [(name, _cell(str(getattr(value, "value", value)))) for name, value in shown if value is not None]


def _base_model(trainer: MultiTurnGRPOTrainer) -> str | None:
    """Its hub id; of a local folder the last part of its name, in brackets, as the rest is nobody's business."""
    name = getattr(trainer.model.config, "_name_or_path", "") or None
    if name and (Path(name).is_dir() or name.startswith(("/", "."))):
        return f"a local folder ({Path(name).name})"
    return name


def _sandbox(trainer: MultiTurnGRPOTrainer, folder: Path) -> str | None:
    """In what way a run was one in the sandbox, or against a script; `None` if it was real."""
    environment = trainer.environment
    parts = [environment, getattr(environment, "chat", None), getattr(trainer, "reference", None)]
    own = [part for part in parts if type(part).__module__.startswith("agentic_prompting.sandbox")]
    named = any(getattr(getattr(part, "endpoint", None), "model", "") == "sandbox-oracle" for part in parts)
    if own or named or _summary(folder).get("sandbox"):
        return "A tiny policy of 390,000 parameters in a small world with scripted models in the large LLM's place."
    if any(isinstance(part, ScriptedChat) for part in parts):
        return "A scripted stand-in took the large LLM's place."
    return None


def _summary(folder: Path) -> dict[str, Any]:
    try:
        saved = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return saved if isinstance(saved, dict) else {}


def _example_of(environment: Any) -> tuple[str, str]:
    """What a reader puts into `OpenAIChat(...)`: the model's name, and that an address belongs there."""
    endpoint = getattr(getattr(environment, "chat", None), "endpoint", None)
    if endpoint is None or endpoint.model == "sandbox-oracle":
        return "gpt-4o-mini", ""
    return endpoint.model, "" if host_of(endpoint.base_url) == "api.openai.com" else ', base_url="http://.../v1"'


def _demoted(markdown: str) -> str:
    """Its headings below the card's own."""
    return re.sub(r"^#", "###", markdown.strip(), flags=re.MULTILINE)


def _interval(interval: Any) -> str:
    return f"{interval[0]:.3f} to {interval[1]:.3f}" if interval else "–"


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|").replace("<", "&lt;")


def _line(text: str) -> str:
    return " ".join(_clean(text).split())


def _clean(text: str) -> str:
    """What UTF-8 can hold."""
    return text.encode("utf-8", "replace").decode("utf-8")
