"""From a table's names to systems: which model, prompt and folder; what an optimiser found is kept on disk."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, cast

from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.evaluation import (
    AgentSystem,
    PromptedSystem,
    ProRefineSystem,
    System,
)
from agentic_prompting.evaluation.harness import digest
from agentic_prompting.evaluation.systems import Row
from agentic_prompting.llm import ChatModel, OpenAIChat, ReplayCache
from agentic_prompting.records import atomic_write
from agentic_prompting.refine import ProRefiner
from agentic_prompting.rewards import exact_match, integer_match, letter_match, word_sorting_match
from agentic_prompting.rollout import SPEC_FILE, AgentSpec, prompt_r1_template

from .chats import MeteredChat, SelfReflection
from .config import SystemConfig, TableConfig
from .optimise import OPTIMISERS, Found, Objective
from .templates import CHAIN_OF_THOUGHT, DIRECT

PROMPTS = {"direct": DIRECT, "cot": CHAIN_OF_THOUGHT}
"""Prompts that a configuration can name; anything else is a file, or the prompt itself."""

_LABEL_SCORES = {one.__name__: one for one in (exact_match, integer_match, letter_match, word_sorting_match)}
_NEEDS = {"gepa": "gepa", "textgrad": "textgrad"}  # kind of system -> the package it cannot do without


class Unavailable(RuntimeError):
    """A system cannot be made here; the table says so and goes on without it."""


def connect(
    models: Mapping[str, Mapping[str, Any]], cache: ReplayCache, stack: ExitStack
) -> dict[str, tuple[ChatModel, dict[str, Any]]]:
    """A client for each model of a configuration, with the sampling that goes with it."""
    connected: dict[str, tuple[ChatModel, dict[str, Any]]] = {}
    for role, settings in models.items():
        options = {name: value for name, value in settings.items() if name not in ("name", "sampling")}
        if "price" in options:
            options["price"] = tuple(options["price"])
        client = stack.enter_context(OpenAIChat(settings.get("name", role), cache=cache, **options))
        connected[role] = (client, dict(settings.get("sampling", {})))
    return connected


class Workshop:
    """Makes the systems of a table.

    Args:
        config ([`TableConfig`]): The table.
        models (`dict`): Clients and their sampling, by the configuration's names.
        train (`list`): Rows to learn from.
        metric (`str`): What optimisers maximise, and the optimal verifier compares by.
        folder (`Path`): Where what was found and trained is kept.
        cache ([`ReplayCache`]): For models without one of their own.
    """

    def __init__(
        self,
        config: TableConfig,
        models: Mapping[str, tuple[ChatModel, dict[str, Any]]],
        train: Sequence[Row],
        metric: str,
        folder: Path,
        cache: ReplayCache | None,
    ):
        self.config, self.models, self.train, self.metric = config, models, train, metric
        self.folder, self.cache = folder, cache

    def make(self, system: SystemConfig) -> System:
        """A system.

        Raises:
            [`Unavailable`]: Its package is not installed, or its model has not been trained.
            `ValueError`: Its settings make no sense.
        """
        if system.kind in _NEEDS and importlib.util.find_spec(_NEEDS[system.kind]) is None:
            raise Unavailable(f"{_NEEDS[system.kind]} is not installed: pip install 'agentic-prompting[optimizers]'")
        settings = dict(system.settings)
        if system.kind in OPTIMISERS:
            return self._optimised(system)
        if system.kind == "prompted":
            chat, sampling = self._model(settings)
            return PromptedSystem(chat, self._prompt(settings), **sampling)
        if system.kind == "self_reflection":
            chat, sampling = self._model(settings)
            return SelfReflection(chat, self._prompt(settings), **sampling)
        if system.kind == "prorefine":
            return self._prorefine(settings)
        return self._agent(system)

    def _model(self, settings: Mapping[str, Any], role: str = "model") -> tuple[ChatModel, dict[str, Any]]:
        name = settings.get(role, role)
        if name not in self.models:
            raise ValueError(f"there is no model {name!r} in `models`; there are: {', '.join(self.models)}")
        chat, sampling = self.models[name]
        # Clients of endpoints have the cache themselves, so that it also knows their own settings.
        return MeteredChat(chat, None if isinstance(chat, OpenAIChat) else self.cache), dict(sampling)

    def _prompt(self, settings: Mapping[str, Any]) -> str:
        named = str(settings.get("prompt", "cot"))
        if named in PROMPTS:
            return PROMPTS[named]
        return Path(named).read_text(encoding="utf-8") if named.endswith(".txt") else named

    def _optimised(self, system: SystemConfig) -> System:
        """The prompt that an optimiser found; found once, then read."""
        (chat, sampling), (editor, _) = self._model(system.settings), self._model(system.settings, "editor")
        prompt = self._prompt(system.settings)
        settings = {
            "kind": system.kind,
            "prompt": prompt,
            "rows": [row["question"] for row in self.train],
            "calls": self.config.calls_budget,
            "seed": self.config.seed,
            "metric": self.metric,
        }
        path = self.folder / "prompts" / f"{system.name}-{digest(settings)}.json"
        if path.exists():
            found = Found(**json.loads(path.read_text(encoding="utf-8")))
        else:
            objective = Objective(
                chat, editor, self.train, self.metric, self.config.calls_budget, self.config.seed, **sampling
            )
            found = OPTIMISERS[system.kind](objective, prompt)
            atomic_write(path, json.dumps(asdict(found), indent=2) + "\n")
        return PromptedSystem(chat, found.prompt, found.calls, **sampling)

    def _prorefine(self, settings: Mapping[str, Any]) -> System:
        (chat, sampling), (critic, _) = self._model(settings), self._model(settings, "critic")
        setting = settings.get("setting", "verifier")
        score = None
        if setting == "optimal_verifier":
            if self.metric not in _LABEL_SCORES:
                raise ValueError(f"the optimal verifier compares with labels, which {self.metric} cannot decide")
            score = _LABEL_SCORES[self.metric]
        known = cast(Literal["no_verifier", "verifier", "optimal_verifier"], setting)
        limit = sampling.pop("max_tokens", 512)
        refiner = ProRefiner.from_paper(
            known, chat, critic, score, final_max_tokens=limit, sampling={"task": {**sampling, "temperature": 0}}
        )
        return ProRefineSystem(refiner, self._prompt(settings))

    def _agent(self, system: SystemConfig) -> System:
        from agentic_prompting.agent import PromptAgent

        from .training import TRAINED, plain_spec

        settings, environment = dict(system.settings), None
        if settings.get("environment"):
            chat, sampling = self._model(settings, "environment")
            environment = LLMEnvironment(chat, **sampling)
        if system.kind in TRAINED:
            folder = Path(settings.get("folder") or self.folder / "trained" / system.name)
            arguments = settings.get("arguments", {})
            source: Any = TRAINED[system.kind](settings["base"], self.train, folder, plain_spec(), **arguments)
            spec = None
        elif system.kind == "agent_untrained":
            source, spec = settings["base"], AgentSpec(prompt_r1_template())
            if Path(source, SPEC_FILE).exists():
                spec = AgentSpec.load(source)
        else:
            source, spec = Path(settings["folder"]), None
            if not (source / SPEC_FILE).exists():
                raise Unavailable(f"{source} holds no trained agent: train it first (examples/train_prompt_r1.py)")
        if spec is None:
            spec = AgentSpec.load(source)
        spec = _with_espl_prompt(spec, Path(source))
        if settings.get("max_turns"):
            spec = replace(spec, limits=replace(spec.limits, max_turns=settings["max_turns"]))
        agent = PromptAgent.from_pretrained(source, environment, spec)
        return AgentSystem(agent, f"{source} {settings.get('environment')} {spec.limits.max_turns}")


def _with_espl_prompt(spec: AgentSpec, folder: Path) -> AgentSpec:
    """With the system prompt that a joint run found beside its weights, as [`ESPLTrainer`] saves it."""
    path = folder / "system_prompt.txt"
    return replace(spec, system_prompt=path.read_text(encoding="utf-8")) if path.is_file() else spec
