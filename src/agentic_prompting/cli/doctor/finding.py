"""What a check says, and what it is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

Level = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`.

    Args:
        level (`str`): `ok`, `warning` (something will not work, or not as expected) or `problem` (the run will fail).
        says (`str`): What was found.
        fix (`str`, *optional*, defaults to `""`): What to type; never empty beside a warning or problem.
    """

    level: Level
    says: str
    fix: str = ""

    def __post_init__(self) -> None:
        if (self.level == "ok") == bool(self.fix):
            raise ValueError(f"a fix goes with a warning or problem, and only with those: {self}")


@dataclass(frozen=True)
class Role:
    """A large LLM that the run asks.

    Args:
        name (`str`): `environment` or `reference`: its options are named after it.
        model (`str`): As its endpoint calls it.
        base_url (`str`, *optional*): The endpoint.
    """

    name: str
    model: str
    base_url: str | None


@dataclass(frozen=True)
class Setup:
    """What is to be checked: the command line's options, and behind them the configuration's.

    Args:
        run (`Path`, *optional*): Folder of a trained agent, or of a model.
        environment_model, environment_base_url, reference_model, reference_base_url (`str`, *optional*), replay_cache,
            output_dir (`Path`, *optional*), budget_usd (`float`, *optional*): As of the other commands.
        config (`Path`, *optional*): A training run's YAML file.
        accelerate_config (`Path`, *optional*): Says on how many processes it will run.
    """

    run: Path | None = None
    environment_model: str | None = None
    environment_base_url: str | None = None
    reference_model: str | None = None
    reference_base_url: str | None = None
    config: Path | None = None
    accelerate_config: Path | None = None
    replay_cache: Path | None = None
    budget_usd: float | None = None
    output_dir: Path | None = None

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The configuration's values; none where there is no file, or it is no mapping."""
        try:
            values = read_yaml(self.config) if self.config else {}
        except (OSError, ValueError):
            return {}
        return values if isinstance(values, Mapping) else {}

    @property
    def trains(self) -> bool:
        """Whether the configuration is that of a training run, not of a table."""
        return bool(self.values) and "systems" not in self.values

    def value(self, name: str) -> Any:
        """What the command line says, or else the configuration."""
        given = getattr(self, name, None)
        return self.values.get(name) if given is None else given

    @property
    def given(self) -> dict[str, Any]:
        """What the command line says of the program's own options."""
        names = ("environment_model", "environment_base_url", "reference_model", "reference_base_url", "replay_cache",
                 "budget_usd", "output_dir")  # fmt: skip
        found = {name: getattr(self, name) for name in names}
        return {name: str(value) for name, value in found.items() if value is not None}

    @property
    def roles(self) -> list[Role]:
        """The large LLMs that are named."""
        roles = []
        for name in ("environment", "reference"):
            model = self.value(f"{name}_model")
            if model:
                roles.append(Role(name, str(model), self.value(f"{name}_base_url")))
        return roles


def read_yaml(path: Path) -> Any:
    """Raises `ValueError`, in one line, for what is no YAML."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
