"""A training run as `doctor` and `plan` read it: options of the command line, then those of its
YAML file.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .client_settings import ClientSettings
from .example_files import find_example
from .option_parser import OptionParser
from .options import EnvironmentModel, ReferenceModel, Spending, option
from .yaml_file import read_options

if TYPE_CHECKING:
    from ..llm import OpenAIChat

LLM_TIMEOUT = 15.0  # seconds for one word of a large LLM


@dataclass
class RunConfiguration(EnvironmentModel, ReferenceModel, Spending):
    """The run: options of the command line, then those of the configuration."""

    run: Path | None = option("A trained agent's folder, or a model's.")
    config: Path | None = option("A training run's YAML file; everything it names is checked.")
    accelerate_config: Path | None = option(
        "The file that accelerate launches the training run with."
    )
    output_dir: Path | None = option(
        "Folder that will be written to: the configuration's, or runs."
    )

    def __post_init__(self) -> None:
        # Outside of a clone, `examples/...` means the files that came with the package.
        self.config = find_example(self.config)
        self.accelerate_config = find_example(self.accelerate_config)

    @cached_property
    def values(self) -> Mapping[str, Any]:
        """The configuration's values; empty if there is no file, or it holds no mapping."""
        if self.config is None:
            return {}
        # The check `config` of `doctor` reports what is wrong with the file.
        try:
            return read_options(self.config)
        except (OSError, ValueError):
            return {}

    @property
    def is_training(self) -> bool:
        """Whether the configuration is that of a training run, not of a table."""
        return bool(self.values) and "systems" not in self.values

    @property
    def uses_cpu(self) -> bool:
        """Whether the configuration says `use_cpu`: the run has no GPU."""
        return str(self.values.get("use_cpu")).lower() in ("true", "1")

    def value(self, name: str) -> Any:
        """A value of the command line, or else of the configuration."""
        value = getattr(self, name, None)
        return self.values.get(name) if value is None else value

    @cached_property
    def models(self) -> dict[str, OpenAIChat]:
        """The large LLMs that are named, by role."""
        models = {}
        for role in ("environment", "reference"):
            name = self.value(f"{role}_model")
            if name:
                settings = ClientSettings.read(self.value(f"{role}_client"), f"{role}-client")
                # Without retries, one call shows whether the endpoint works.
                models[role] = settings.make_client(
                    name,
                    self.value(f"{role}_base_url"),
                    timeout=LLM_TIMEOUT,
                    max_retries=0,
                    patience=1,
                )
        return models

    @cached_property
    def method(self) -> str:
        """The training method that has the most of the configuration's options."""
        from .train_program import METHODS

        def unknown_options(method: str) -> int:
            return len(set(self.values) - set(option_defaults(method)) - {"env"})

        # The method to which the fewest of the options are unknown.
        return min(METHODS, key=unknown_options)

    @property
    def command(self) -> str:
        return f"agentic-prompting train {self.method}"

    @property
    def processes(self) -> int:
        """The number of processes: accelerate's configuration, else one for each GPU."""
        if self.accelerate_config is not None:
            return int(read_options(self.accelerate_config)["num_processes"])
        # One process for each GPU, or a single one on a CPU.
        import torch

        return max(1, torch.cuda.device_count())

    def parse(self) -> tuple[Any, Any, Any]:
        """The method's own arguments, the trainer's config and the model's.

        Raises `ValueError` for wrong options.
        """
        from .train_program import METHODS

        arguments_class, config_class, model_class = METHODS[self.method]

        # The run is parsed as if on a CPU, but with its number of processes, which the config asks
        # the machine for.
        processes = self.processes
        sized_config_class = type(
            config_class.__name__,
            (config_class,),
            {"world_size": property(lambda config: processes)},
        )
        on_cpu = {"use_cpu": True, "bf16": False, "fp16": False, "report_to": "none"}
        values = {name: value for name, value in self.values.items() if name != "env"}
        method_options = option_defaults(self.method)
        # Options of the command line take precedence over those of the file.
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in method_options and value is not None:
                values[field.name] = str(value)
        parser = OptionParser(
            f"train {self.method}", (arguments_class, sized_config_class, model_class)
        )
        parser.set_config({**values, **on_cpu}, str(self.config))
        # Nothing but the findings or the plan is to be printed.
        with contextlib.redirect_stderr(io.StringIO()):
            arguments, config, model = parser.parse([])
        return arguments, config, model


def option_defaults(method: str) -> dict[str, Any]:
    """The options of a method with their defaults."""
    from .train_program import METHODS

    defaults = {}
    for settings in METHODS[method]:
        # Fields that are not arguments of the dataclass are not options.
        for field in fields(settings):
            if field.init:
                defaults[field.name] = field.default
    return defaults
