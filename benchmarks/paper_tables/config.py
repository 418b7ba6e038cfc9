"""A table as a YAML file: what stands in it, checked when it is read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

KINDS: dict[str, frozenset[str]] = {
    "prompted": frozenset({"model", "prompt"}),
    "self_reflection": frozenset({"model", "prompt"}),
    "prorefine": frozenset({"model", "critic", "setting", "prompt"}),
    "opro": frozenset({"model", "editor", "prompt"}),
    "gepa": frozenset({"model", "editor", "prompt"}),
    "textgrad": frozenset({"model", "editor", "prompt"}),
    "espl": frozenset({"model", "editor", "prompt"}),
    "agent": frozenset({"folder", "environment", "max_turns"}),
    "agent_untrained": frozenset({"base", "environment", "max_turns"}),
    "sft": frozenset({"base", "folder", "arguments"}),
    "grpo_single_turn": frozenset({"base", "folder", "arguments"}),
}
"""Every kind of system, and the settings it has."""

_MODEL_SETTINGS = frozenset({"name", "base_url", "budget_usd", "price", "max_concurrency", "sampling"})


@dataclass(frozen=True)
class SystemConfig:
    """One system of a table.

    Args:
        name (`str`): What it is called there.
        kind (`str`): Of [`KINDS`].
        settings (`dict`): As its kind has them.
    """

    name: str
    kind: str
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TableConfig:
    """A table.

    Args:
        title (`str`): What it shows.
        systems (`list[SystemConfig]`): Its rows.
        tasks (`list[str]`): Names that [`load_task`] knows, with a split behind a slash where it matters.
        models (`dict`): By the names that systems use: `name` at its endpoint, `base_url`, `budget_usd`, `sampling`.
        metrics (`list[str]`, *optional*): For all tasks, as [`find_metrics`] takes them; each task's own by default.
        n (`int`, *optional*, defaults to `128`), runs (`int`, *optional*, defaults to `3`), seed (`int`, *optional*,
            defaults to `0`): See [`evaluate_agent`].
        baseline (`str`, *optional*): The system that the others are compared with.
        train_task (`str`, *optional*): What optimisers and trained systems learn from, as in `tasks`.
        train_rows (`int`, *optional*, defaults to `50`): How many rows of it.
        calls_budget (`int`, *optional*, defaults to `500`): Calls that each optimiser may make.
        budget_usd (`float`, *optional*), budget_tokens (`int`, *optional*): What all models together may spend,
            restarts included; what was spent is kept in the folder's `spending.sqlite`. A model's own limit holds too.
        encoder (`str`, *optional*): For `semantic_similarity`.
        output (`str`, *optional*): Folder for answers and tables.
        left_out (`dict`, *optional*): What the paper's table has and this one has not, and why; said with the table.
        sandbox (`dict`, *optional*): Values of the above that `--sandbox` puts in their place.
    """

    title: str
    systems: list[SystemConfig]
    tasks: list[str]
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    metrics: list[str] | None = None
    n: int | None = 128
    runs: int = 3
    seed: int = 0
    baseline: str | None = None
    train_task: str | None = None
    train_rows: int = 50
    calls_budget: int = 500
    budget_usd: float | None = None
    budget_tokens: int | None = None
    encoder: str | None = None
    output: str = "runs/evaluation"
    left_out: Mapping[str, str] = field(default_factory=dict)
    sandbox: Mapping[str, Any] = field(default_factory=dict)

    def in_sandbox(self) -> TableConfig:
        """The same table with the sandbox's tasks and sizes; its systems stay."""
        sizes: dict[str, Any] = {
            "n": min(self.n or 32, 32),
            "runs": 1,
            "train_rows": 16,
            "metrics": None,
            "calls_budget": 300,
        }
        values = {**sizes, "output": f"{self.output}-sandbox", **self.sandbox}
        return replace(self, **{name: value for name, value in values.items() if name != "systems"})


def load_config(path: str | Path) -> TableConfig:
    """Read a table's YAML file.

    Raises:
        `FileNotFoundError`: It does not exist.
        `ValueError`: Something in it is not known or missing; the nearest name is offered.
    """
    import yaml

    try:
        values = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"{path}: expected settings by name, got {type(values).__name__}")
    known = {one.name for one in fields(TableConfig)}
    _check_names(values, known, str(path))
    for needed in ("title", "systems", "tasks"):
        if not values.get(needed):
            raise ValueError(f"{path}: `{needed}` is missing")
    systems = [_system(name, one or {}, path) for name, one in values["systems"].items()]
    config = TableConfig(**{**values, "systems": systems})
    _check_names(config.sandbox, known, f"{path}, sandbox")
    for name, model in config.models.items():
        _check_names(model, _MODEL_SETTINGS, f"{path}, model {name}")
    if config.baseline is not None and config.baseline not in values["systems"]:
        raise ValueError(f"{path}: the baseline {config.baseline!r} is none of the systems")
    return config


def _system(name: str, values: Mapping[str, Any], path: str | Path) -> SystemConfig:
    kind = values.get("kind", name)
    _check_names([kind], set(KINDS), f"{path}, kind of {name}")
    settings = {key: value for key, value in values.items() if key != "kind"}
    _check_names(settings, KINDS[kind], f"{path}, system {name} ({kind})")
    return SystemConfig(name, kind, settings)


def _check_names(names: Any, known: Any, where: str) -> None:
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ValueError(f"{where}: unknown {name!r}; {hint}known: {', '.join(sorted(known))}")
