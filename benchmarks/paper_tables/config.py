"""A table's configuration: its fields, and their checks when the YAML file is read."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

_PROMPTED = frozenset({"model", "prompt"})
_AGENT = frozenset({"environment", "max_turns", "greedy_answer", "seeds"})
_TRAINED = frozenset({"base", "folder", "arguments"})
KINDS: dict[str, frozenset[str]] = {
    "prompted": _PROMPTED,
    "self_reflection": _PROMPTED,
    "prorefine": _PROMPTED | {"critic", "setting", "options"},
    **dict.fromkeys(("opro", "gepa", "textgrad", "espl"), _PROMPTED | {"editor"}),
    "agent": _AGENT | {"folder"},
    "agent_untrained": _AGENT | {"base"},
    **dict.fromkeys(("sft", "grpo_single_turn"), _TRAINED),
}
"""Every kind of system, and the settings it has."""

_MODEL_SETTINGS = frozenset(
    {"name", "base_url", "key", "rate", "budget_usd", "price", "max_concurrency", "sampling"}
)


@dataclass(frozen=True)
class SystemConfig:
    """One system of a table.

    Args:
        name (`str`): Its name in the table.
        kind (`str`): One of [`KINDS`].
        settings (`dict`): The settings of its kind.
        group (`str`, *optional*, defaults to `""`): The model of `each_of` that it is made with.
    """

    name: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    group: str = ""


@dataclass(frozen=True)
class TableConfig:
    """A table.

    Args:
        title (`str`): The table's title.
        systems (`list[SystemConfig]`): Its rows.
        tasks (`list[str]`): Names that [`load_task`] knows, with a split behind a slash where it
            matters.
        data_files (`dict`, *optional*): Local files, such as the released ones, by the task whose
            rows they hold (those of `train_task`, `validation_task` and `fit_task` too); other sets
            come from the hub.
        columns (`dict`, *optional*): The column names of files of your own, as [`load_task`] takes
            them.
        held_out (`float`, *optional*): Of files of your own this share of the rows fills the table,
            and optimisers and trained systems learn from the others. See [`~data.hold_out`].
        models (`dict`): For each name that systems use: `name` at its endpoint, `base_url`, `key`
            (the environment variable that has its key), `price` (two numbers, dollars per million
            tokens read and written), `rate` (requests per minute), `max_concurrency`, `budget_usd`,
            `sampling`.
        each_of (`list[str]`, *optional*): Models; every system that names none of its own (`model`,
            for an agent its `environment`) is made with each of them.
        metrics (`list[str]` or `dict`, *optional*): As [`find_metrics`] takes them, for all tasks
            or by task, `default` for those not named; each task's own by default. `judged` is the
            verdict of the model `judge`.
        judge (`str`, *optional*): The one of `models` that compares answers with the accepted ones,
            for `judged`.
        averages (`dict`, *optional*): Name of a row to the tasks whose means it is the mean of.
        n (`int`, *optional*, defaults to `128`), runs (`int`, *optional*, defaults to `3`), seed
        (`int`, *optional*,
            defaults to `0`): See [`evaluate_agent`].
        baseline (`str`, *optional*): The system that the others are compared with; under `each_of`,
            the one of the same model.
        marks (`list[str]`, *optional*): Baselines that earn a system a star each where its Wald
            interval lies above.
        train_task (`str` or `dict`, *optional*): The optimisers' training set, as in `tasks`; or by
            task.
        train_rows (`int`, *optional*, defaults to `50`): How many rows of it.
        validation_task (`str` or `dict`, *optional*), validation_rows (`int`, *optional*): The rows
            by which GEPA and TextGrad choose; half of the training rows by default.
        fit_task (`str`, *optional*), fit_rows (`int`, *optional*): The training set of trained
            systems, by default all its rows; without a task, the optimisers' rows.
        calls_budget (`int`, *optional*, defaults to `500`): Calls that each optimiser may make.
        budget_usd (`float`, *optional*), budget_tokens (`int`, *optional*): What all models
            together may spend, restarts included; what was spent is kept in the folder's
            `spending.sqlite`. A model's own limit holds too.
        encoder (`str`, *optional*): The sentence encoder for `semantic_similarity`.
        output (`str`, *optional*): Folder for answers and tables.
        figures (`dict`, *optional*): Name of a picture to its `metric` (or `metrics`, by task),
            `systems` and `tasks`.
        case (`str`, *optional*): The system whose right answers `case.md` compares with the other
            systems' answers.
        left_out (`dict`, *optional*): The parts of the paper's table that are missing here, with
            the reasons; printed below the table.
        sandbox (`dict`, *optional*): The values of these fields under `--sandbox`.
    """

    title: str
    systems: list[SystemConfig]
    tasks: list[str]
    data_files: Mapping[str, str] = field(default_factory=dict)
    columns: Mapping[str, str] = field(default_factory=dict)
    held_out: float | None = None
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    each_of: Sequence[str] = ()
    metrics: list[str] | Mapping[str, list[str]] | None = None
    judge: str | None = None
    averages: Mapping[str, list[str]] = field(default_factory=dict)
    n: int | None = 128
    runs: int = 3
    seed: int = 0
    baseline: str | None = None
    marks: Sequence[str] = ()
    train_task: str | Mapping[str, str] | None = None
    train_rows: int = 50
    validation_task: str | Mapping[str, str] | None = None
    validation_rows: int | None = None
    fit_task: str | None = None
    fit_rows: int | None = None
    calls_budget: int = 500
    budget_usd: float | None = None
    budget_tokens: int | None = None
    encoder: str | None = None
    output: str = "runs/evaluation"
    figures: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    case: str | None = None
    left_out: Mapping[str, str] = field(default_factory=dict)
    sandbox: Mapping[str, Any] = field(default_factory=dict)

    def in_sandbox(self) -> TableConfig:
        """The same table with the sandbox's values; systems and task names stay."""
        size = max(6, min(self.n or 32, 96 // len(self.tasks)))
        sizes: dict[str, Any] = {"n": size, "runs": 1, "train_rows": 16, "calls_budget": 300}
        sizes["judge"] = self.judge and "editor"
        values = {**sizes, "output": f"{self.output}-sandbox", **self.sandbox}
        return replace(self, **{name: value for name, value in values.items() if name != "systems"})

    def metrics_of(self, task: str) -> list[str] | None:
        """The metrics of a task; `None` for the task's own."""
        metrics = self.metrics
        if isinstance(metrics, Mapping):
            metrics = metrics.get(task, metrics.get("default"))
        return None if metrics is None else list(metrics)

    def baseline_of(self, system: SystemConfig, name: str | None = None) -> str:
        """The baseline (or the one called `name`) that a system is compared with."""
        name = name or self.baseline or ""
        names = {system.name for system in self.systems}
        if system.group and name not in names:
            return f"{name}, {system.group}"
        return name


def load_config(path: str | Path) -> TableConfig:
    """Read a table's YAML file.

    Raises:
        `FileNotFoundError`: It does not exist.
        `ValueError`: A field is unknown or missing; the message suggests the nearest name.
    """
    import yaml

    # The file's text.
    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}: expected settings by name, got {type(values).__name__}")

    # The table's fields.
    field_names = {setting.name for setting in fields(TableConfig)}
    _check_names(values, field_names, str(path))
    for needed in ("title", "systems", "tasks"):
        if not values.get(needed):
            raise ValueError(f"{path}: `{needed}` is missing")

    # Its systems, each perhaps with several models.
    each_of = values.get("each_of", ())
    _check_names(each_of, values.get("models", {}), f"{path}, each_of")
    systems: list[SystemConfig] = []
    for name, settings in values["systems"].items():
        systems += _systems(name, settings or {}, each_of, path)
    config = TableConfig(**{**values, "systems": systems})

    # Names within the fields.
    _check_names(config.sandbox, field_names, f"{path}, sandbox")
    for name, model in config.models.items():
        _check_names(model, _MODEL_SETTINGS, f"{path}, model {name}")
    for name in filter(None, (config.baseline, *config.marks)):
        if name not in values["systems"]:
            raise ValueError(f"{path}: the baseline {name!r} is none of the systems")
    for name, tasks in config.averages.items():
        _check_names(tasks, config.tasks, f"{path}, average {name}")
    return config


def _systems(
    name: str, values: Mapping[str, Any], each_of: Sequence[str], path: str | Path
) -> list[SystemConfig]:
    """A system, or one for each of the models."""
    system_kind = values.get("kind", name)
    _check_names([system_kind], set(KINDS), f"{path}, kind of {name}")
    settings = {key: value for key, value in values.items() if key != "kind"}
    _check_names(settings, KINDS[system_kind], f"{path}, system {name} ({system_kind})")
    prompt = str(settings.get("prompt", ""))
    if prompt.endswith(".txt") and not Path(prompt).is_file():
        raise ValueError(
            f"{path}, system {name}: its prompt is the file {prompt}, which is missing"
        )

    # The setting that names a model of `each_of`.
    if "model" in KINDS[system_kind]:
        role = "model"
    elif "environment" in KINDS[system_kind]:
        role = "environment"
    else:
        role = None
    if not each_of or role is None or role in settings:
        return [SystemConfig(name, system_kind, settings)]

    systems = []
    for model in each_of:
        model_settings = {**settings, role: model}
        systems.append(SystemConfig(f"{name}, {model}", system_kind, model_settings, group=model))
    return systems


def _check_names(names: Iterable[str], valid_names: Collection[str], where: str) -> None:
    for name in names:
        if name not in valid_names:
            matches = difflib.get_close_matches(str(name), valid_names, n=1, cutoff=0.5)
            hint = f"did you mean {matches[0]!r}? " if matches else ""
            listing = ", ".join(sorted(valid_names))
            raise ValueError(f"{where}: unknown {name!r}; {hint}known: {listing}")
