"""From a table's names to systems: which model, prompt and folder; what an optimiser found is kept
on disk.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

from agentic_prompting.cli.client_settings import read_key
from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.evaluation import (
    AgentSystem,
    EvaluationTask,
    PromptedSystem,
    ProRefineSystem,
    System,
    find_metrics,
)
from agentic_prompting.evaluation.evaluate import file_name
from agentic_prompting.evaluation.systems import Row
from agentic_prompting.llm import ChatModel, OpenAIChat, ReplayCache
from agentic_prompting.llm.endpoint_check import CommandRole, EndpointCheck
from agentic_prompting.records import atomic_write, digest
from agentic_prompting.refine import START_PROMPTS, LabelVerifier, ProRefiner, Query, Verifier
from agentic_prompting.rewards import (
    AccuracyJudge,
    exact_match,
    integer_match,
    letter_match,
    word_sorting_match,
)
from agentic_prompting.rollout import SPEC_FILE, AgentSpec, prompt_r1_template
from agentic_prompting.versions import code_version, combine_versions, weights_version

from .chats import JudgedSystem, MeteredChat, SelfReflection
from .config import KINDS, SystemConfig, TableConfig
from .optimise import OPTIMISERS, Found, Objective
from .templates import CHAIN_OF_THOUGHT, DIRECT

PROMPTS = {"direct": DIRECT, "cot": CHAIN_OF_THOUGHT}
"""Prompts that a configuration can name; anything else is a file, or the prompt itself."""

_LABEL_SCORES = {
    "exact_match": exact_match,
    "integer_match": integer_match,
    "letter_match": letter_match,
    "word_sorting_match": word_sorting_match,
}
_NEEDS = {
    "gepa": "gepa",
    "textgrad": "textgrad",
}  # kind of system -> the package it cannot do without


class Unavailable(RuntimeError):
    """A system cannot be made here; the table says so and goes on without it."""


def connect(
    models: Mapping[str, Mapping[str, Any]], cache: ReplayCache, stack: ExitStack
) -> dict[str, tuple[OpenAIChat, dict[str, Any]]]:
    """A client for each model of a configuration, with the sampling that goes with it."""
    connected: dict[str, tuple[OpenAIChat, dict[str, Any]]] = {}
    endpoint_check = EndpointCheck()
    for role, settings in models.items():
        options = {
            name: value for name, value in settings.items() if name not in ("name", "sampling")
        }
        if "price" in options:
            options["price"] = tuple(options["price"])
        if "rate" in options:
            options["requests_per_minute"] = options.pop("rate")
        if "key" in options:
            options["api_key"] = read_key(str(options.pop("key")), f"models: {role}, key:")
        client = stack.enter_context(OpenAIChat(settings.get("name", role), cache=cache, **options))
        # Errors name the variable that was given.
        client.key_variable = settings.get("key", client.key_variable)
        client.serve_command(_command_role(role, models, client.base_url), endpoint_check)
        connected[role] = (client, dict(settings.get("sampling", {})))
    return connected


def _command_role(role: str, models: Mapping[str, Mapping[str, Any]], base_url: str) -> CommandRole:
    """The name and settings of a model for errors of its client, and an address that may have been
    forgotten.
    """
    advice = f"the settings of models: {role} are its name, base_url, key and price"
    others = [other for other, settings in models.items() if settings.get("base_url")]
    if others and not models[role].get("base_url") and "api.openai.com" in base_url:
        advice += (
            f"; models: {others[0]} has a base_url, models: {role} has none and is asked at "
            f"{base_url}"
        )
    return CommandRole(f"the model {role!r}", advice)


@dataclass(frozen=True)
class Lessons:
    """What systems learn from for one task.

    Args:
        task (`str`): The task, as the configuration has it.
        train (`list`): Rows that prompts are optimised on.
        validation (`list`, *optional*): Rows that TextGrad chooses by; by default half of those.
        fit (`Callable`, *optional*): Gives the rows that trained systems learn from, `None` for
            those of `train`.
    """

    task: str
    train: Sequence[Row]
    validation: Sequence[Row] | None = None
    fit: Callable[[], Sequence[Row] | None] = lambda: None


class Workshop:
    """Makes the systems of a table.

    Args:
        config ([`TableConfig`]): The table.
        models (`dict`): Clients and their sampling, by the configuration's names.
        folder (`Path`): Where what was found and trained is kept.
        cache ([`ReplayCache`]): For models without one of their own.
        seed (`int`, *optional*): Where several trainings are put together, the one whose folders
            are taken.
    """

    def __init__(
        self,
        config: TableConfig,
        models: Mapping[str, tuple[ChatModel, dict[str, Any]]],
        folder: Path,
        cache: ReplayCache | None,
        seed: int | None = None,
    ):
        self.config = config
        self.models = models
        self.folder = folder
        self.cache = cache
        self.seed = seed
        self.notes: dict[tuple[str, str], str] = {}
        # The last agent, by its name: loaded once for all its tasks.
        self._loaded: tuple[str, System | None] = ("", None)

    def make(self, system: SystemConfig, task: EvaluationTask, lessons: Lessons) -> System:
        """A system for a task.

        Raises:
            [`Unavailable`]: Its package is not installed, or its model has not been trained.
            `ValueError`: Its settings make no sense.
        """
        if system.kind in _NEEDS and importlib.util.find_spec(_NEEDS[system.kind]) is None:
            raise Unavailable(
                f"{_NEEDS[system.kind]} is not installed: pip install "
                "'agentic-prompting[optimizers]'"
            )
        if "judged" not in task.metrics:
            return self._make(system, task, lessons)
        if self.config.judge is None or "model" not in KINDS[system.kind]:
            raise ValueError(
                f"{task.name} is judged: that needs a `judge`, and systems that ask a `model`"
            )
        return JudgedSystem(self._make(system, task, lessons), self._judge())

    def _make(self, system: SystemConfig, task: EvaluationTask, lessons: Lessons) -> System:
        prompt = self._prompt(system.settings, lessons.task)
        if system.kind in OPTIMISERS:
            return self._optimised(system, prompt, task, lessons)
        if system.kind == "prorefine":
            return self._prorefine(system.settings, prompt, task)
        if system.kind in ("prompted", "self_reflection"):
            chat, sampling = self._model(system.settings)
            system_class = PromptedSystem if system.kind == "prompted" else SelfReflection
            return system_class(chat, prompt, **sampling)
        if self._loaded[0] != system.name:
            self._loaded = ("", None)  # one model in memory at a time
            self._loaded = (system.name, self._agent(system, lessons))
        return cast(System, self._loaded[1])

    def _judge(self) -> AccuracyJudge:
        return AccuracyJudge(self._model({"judge": self.config.judge}, "judge")[0])

    def _model(
        self, settings: Mapping[str, Any], role: str = "model"
    ) -> tuple[ChatModel, dict[str, Any]]:
        name = settings.get(role, role)
        if name not in self.models:
            raise ValueError(
                f"there is no model {name!r} in `models`; there are: {', '.join(self.models)}"
            )
        chat, sampling = self.models[name]
        # Clients of endpoints have the cache themselves, so that it also knows their own settings.
        cache = None if isinstance(chat, OpenAIChat) else self.cache
        return MeteredChat(chat, cache), dict(sampling)

    def _prompt(self, settings: Mapping[str, Any], task: str) -> str:
        prompt = str(settings.get("prompt", "cot"))
        if prompt == "start":
            return START_PROMPTS.get(task.partition("/")[0], CHAIN_OF_THOUGHT)
        if prompt in PROMPTS:
            return PROMPTS[prompt]
        if prompt.endswith(".txt"):
            return Path(prompt).read_text(encoding="utf-8")
        return prompt

    def _optimised(
        self, system: SystemConfig, prompt: str, task: EvaluationTask, lessons: Lessons
    ) -> System:
        """The prompt that an optimiser found; found once, then read."""
        chat, sampling = self._model(system.settings)
        editor, _ = self._model(system.settings, "editor")
        metric = _label_metric(task)
        validation = lessons.validation
        settings = {
            "kind": system.kind,
            "model": str(getattr(chat, "model", "")),
            "prompt": prompt,
            "rows": [row["question"] for row in (*lessons.train, *(validation or ()))],
            "calls": self.config.calls_budget,
            "seed": self.config.seed,
            "metric": metric,
        }
        path = self.folder / "prompts" / f"{system.name}-{digest(settings)}.json"
        # The file's name does not stand for everything: the rest is in the file.
        rest = {
            "labels": digest(
                [list(row["answers"]) for row in (*lessons.train, *(validation or ()))]
            ),
            "editor": str(getattr(editor, "model", "")),
            "sampling": digest(sampling),
            "metric": code_version(find_metrics([metric])[metric]) or "",
        }
        if path.exists():
            _check_found_with(path, rest, system.name)
            result = _read_result(path)
        else:
            self._check_no_other_search(system.name, task.name)
            objective = Objective(
                chat,
                editor,
                lessons.train,
                metric,
                self.config.calls_budget,
                self.config.seed,
                validation=validation,
                **sampling,
            )
            result = OPTIMISERS[system.kind](objective, prompt)
            record = {**asdict(result), "task": task.name, **rest}
            atomic_write(path, json.dumps(record, indent=2) + "\n")
        notes = []
        if result.prompt.strip() == prompt.strip():
            notes.append("found no better prompt than its first one")
        if result.note:
            notes.append(result.note)
        if notes:
            self.notes[system.name, task.name] = "; ".join(notes)
        return PromptedSystem(chat, result.prompt, result.calls, **sampling)

    def _check_no_other_search(self, system: str, task: str) -> None:
        """Raise `ValueError`, before a search is paid, if the answers in the folder are to the
        prompt of another search.
        """
        answers = self.folder / folder_of_task(task) / f"{file_name(system)}.jsonl"
        if not answers.exists():
            return
        for path in (self.folder / "prompts").glob("*.json"):
            is_of_system = path.stem.rpartition("-")[0] == system
            record = json.loads(path.read_text(encoding="utf-8"))
            if is_of_system and record.get("task") == task:
                raise ValueError(
                    f"{answers} holds answers to the prompt in {path.name}, which {system} found "
                    "with another first metric, model, start prompt, number of calls, seed or "
                    "rows: use those, or another output folder (--output-dir)"
                )

    def _prorefine(self, settings: Mapping[str, Any], prompt: str, task: EvaluationTask) -> System:
        chat, sampling = self._model(settings)
        critic, _ = self._model(settings, "critic")
        verifier: Verifier | None = None
        setting = settings.get("setting", "verifier")
        if setting == "verifier":
            verifier = critic
        elif setting == "optimal_verifier" and "judged" in task.metrics:
            verifier = _judge_verifier(self._judge())
        elif setting == "optimal_verifier":
            verifier = self._label_verifier(task)
        limit = sampling.pop("max_tokens", 512)
        options = {"final_max_tokens": limit, "sampling": {"task": {**sampling, "temperature": 0}}}
        options |= settings.get("options", {})
        refiner = ProRefiner(chat, critic, critic, verifier, **options)
        return ProRefineSystem(refiner, prompt)

    def _label_verifier(self, task: EvaluationTask) -> Verifier:
        metric = _label_metric(task)
        if metric not in _LABEL_SCORES:
            raise ValueError(
                f"the optimal verifier compares with labels, which {metric} cannot decide"
            )
        return LabelVerifier(_LABEL_SCORES[metric])

    def _agent(self, system: SystemConfig, lessons: Lessons) -> System:
        from agentic_prompting.agent import PromptAgent

        from .training import TRAINED, plain_spec

        settings = dict(system.settings)
        environment = None
        if settings.get("environment"):
            chat, sampling = self._model(settings, "environment")
            environment = LLMEnvironment(chat, **sampling)

        # The policy: trained now, not at all, or before.
        spec: AgentSpec | None = None
        if system.kind in TRAINED:
            folder = settings.get("folder") or str(self.folder / "trained" / system.name)
            rows = lessons.fit() or lessons.train
            arguments = {"seed": self.config.seed, **settings.get("arguments", {})}
            train = TRAINED[system.kind]
            source: str | Path = train(
                settings["base"], rows, self._of_seed(folder), plain_spec(), **arguments
            )
        elif system.kind == "agent_untrained":
            source = settings["base"]
            if not Path(source, SPEC_FILE).exists():
                spec = AgentSpec(prompt_r1_template())
        else:
            source = self._of_seed(settings["folder"])
            if not (source / SPEC_FILE).exists():
                raise Unavailable(
                    f"{source} holds no trained agent: train it first (examples/train_prompt_r1.py)"
                )

        spec = _with_espl_prompt(spec or AgentSpec.load(source), Path(source))
        if settings.get("max_turns"):
            spec = replace(spec, limits=replace(spec.limits, max_turns=settings["max_turns"]))
        greedy = bool(settings.get("greedy_answer"))
        agent = PromptAgent.from_pretrained(source, environment, spec, greedy_answer=greedy)
        name = f"{source} {settings.get('environment')} {spec.limits.max_turns}"
        # A folder may hold another model than before under the same name.
        version = combine_versions([weights_version(source, [SPEC_FILE, "system_prompt.txt"])])
        return AgentSystem(agent, f"{name} greedy answer" if greedy else name, version=version)

    def _of_seed(self, folder: str) -> Path:
        """The folder of this seed's training: `{seed}` filled in, else `-seed<N>` behind it."""
        if self.seed is None or Path(folder).is_relative_to(self.folder):
            return Path(folder.replace("{seed}", str(self.config.seed)))
        if "{seed}" in folder:
            return Path(folder.replace("{seed}", str(self.seed)))
        return Path(f"{folder}-seed{self.seed}")


def folder_of_task(task: str) -> str:
    """The folder of a task's answers, in that of the table."""
    return task.replace("/", "_")


def _check_found_with(path: Path, inputs: Mapping[str, str], system: str) -> None:
    """Raise `ValueError` if a prompt was found with other labels, another editor or other sampling."""
    record = json.loads(path.read_text(encoding="utf-8"))
    descriptions = {
        "labels": "other accepted answers of its training rows",
        "editor": "another editor",
        "sampling": "other sampling of its model",
        "metric": "other code of its metric",
    }
    # Files of older versions do not say all of it.
    for name, description in descriptions.items():
        if record.get(name, inputs[name]) != inputs[name]:
            raise ValueError(
                f"{path} is the prompt that {system} found with {description}: use those of then, "
                "or another output folder (--output-dir)"
            )


def _read_result(path: Path) -> Found:
    """What an optimiser found in an earlier run."""
    record = json.loads(path.read_text(encoding="utf-8"))
    return Found(record["prompt"], record["score"], record["calls"], record.get("note", ""))


def _label_metric(task: EvaluationTask) -> str:
    """The first metric that needs no judge: what is optimised, and what the optimal verifier
    compares by.
    """
    return next(name for name in task.metrics if name != "judged")


def _judge_verifier(judge: AccuracyJudge) -> Verifier:
    """The optimal verifier where answers are judged: the judge with the accepted answers before it."""

    async def verify(query: Query, answer: str) -> bool | None:
        verdict = await judge(query.text, answer, query.answers)
        return None if verdict is None else verdict == 1.0

    verify.needs_answers = True  # type: ignore[attr-defined]
    return verify


def _with_espl_prompt(spec: AgentSpec, folder: Path) -> AgentSpec:
    """With the system prompt that a joint run found beside its weights, as [`ESPLTrainer`] saves
    it.
    """
    path = folder / "system_prompt.txt"
    if not path.is_file():
        return spec
    return replace(spec, system_prompt=path.read_text(encoding="utf-8"))
