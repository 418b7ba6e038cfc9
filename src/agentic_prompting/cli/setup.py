"""The settings that `doctor` checks and `plan` plans: the command line's, then those of a run's configuration."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .findings import read_yaml
from .options import EnvironmentModel, ReferenceModel, Spending, setting

if TYPE_CHECKING:
    from ..llm import OpenAIChat

SECONDS = 15.0  # for a word of a large LLM


@dataclass
class Setup(EnvironmentModel, ReferenceModel, Spending):
    """The settings to check: options of the command line, then those of the configuration."""

    run: Path | None = setting("A trained agent's folder, or a model's.")
    config: Path | None = setting("A training run's YAML file; everything it names is checked.")
    accelerate_config: Path | None = setting("What that run is launched with.")
    output_dir: Path | None = setting(
        "Folder that will be written to: the configuration's, or runs."
    )

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The configuration's values; empty if there is no file, or it holds no mapping."""
        with contextlib.suppress(OSError, ValueError):
            values = read_yaml(self.config) if self.config else {}
            return values if isinstance(values, Mapping) else {}
        return {}

    @property
    def trains(self) -> bool:
        """Whether the configuration is that of a training run, not of a table."""
        return bool(self.values) and "systems" not in self.values

    def value(self, name: str) -> Any:
        """A value of the command line, or else of the configuration."""
        given = getattr(self, name, None)
        return self.values.get(name) if given is None else given

    @cached_property
    def models(self) -> dict[str, OpenAIChat]:
        """The large LLMs that are named, by role."""
        from ..llm import OpenAIChat

        named = {role: self.value(f"{role}_model") for role in ("environment", "reference")}
        once: dict[str, Any] = {"timeout": SECONDS, "max_retries": 0, "patience": 1}
        urls = {role: self.value(f"{role}_base_url") for role in named}
        return {
            role: OpenAIChat(str(name), base_url=urls[role], **once)
            for role, name in named.items()
            if name
        }

    @cached_property
    def program(self) -> tuple[str, tuple[type, ...], dict[str, Any]]:
        """The command whose options these are most likely to be, what its command line is made of, and its fields."""
        from .programs import PROGRAMS

        found = []
        for method, kinds in PROGRAMS.items():
            fields = {
                name: one
                for kind in kinds
                for name, one in vars(kind)["__dataclass_fields__"].items()
            }
            # `env` is read by TRL's parser itself.
            found.append((f"agentic-prompting train {method}", kinds, fields | {"env": None}))
        return min(
            found, key=lambda one: len(set(self.values) - set(one[2]))
        )  # of two alike the first

    @property
    def processes(self) -> int:
        """The number of processes: accelerate's configuration, else one for each GPU."""
        if self.accelerate_config is not None:
            return int(read_yaml(self.accelerate_config)["num_processes"])
        import torch

        return max(1, torch.cuda.device_count())


def parsed(setup: Setup, check: bool = True) -> tuple[Any, ...]:
    """The program's arguments of file and command line; with `check` only those that it would train with. Raises
    `ValueError` for what it would refuse."""
    from trl import TrlParser

    def refuse(message: str) -> NoReturn:
        raise ValueError(message)

    (script, config, model), processes = setup.program[1], setup.processes
    # How many processes there will be is asked of the machine: told here.
    sized = type(config.__name__, (config,), {"world_size": property(lambda self: processes)})
    parser = TrlParser((script, sized, model))
    parser.error = refuse  # type: ignore[method-assign,assignment]
    plain = {"use_cpu": "true", "bf16": "false", "fp16": "false", "report_to": "none"}
    shared = (
        setup.__dataclass_fields__.keys() & setup.program[2].keys()
    )  # options here that are the program's, too
    given = {name: str(getattr(setup, name)) for name in shared if getattr(setup, name) is not None}
    parser.set_defaults_with_config(
        **{k: v for k, v in setup.values.items() if k not in plain and k != "env"} | given
    )
    with contextlib.redirect_stderr(io.StringIO()):
        made = parser.parse_args_into_dataclasses(
            args=[word for k, v in plain.items() for word in (f"--{k}", v)]
        )
    if check:
        made[0].check(made[1])
    return tuple(made)
