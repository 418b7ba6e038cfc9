"""`agentic-prompting doctor`: what would go wrong, and what to type against it. Its checks: `doctor_checks.py`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from .options import AsJson, Dollars, EnvironmentModel, ReferenceModel, setting
from .show import busy

if TYPE_CHECKING:
    from ..llm import OpenAIChat

Level = Literal["ok", "warning", "problem"]
SECONDS = 15.0
"""For a first word of a large LLM."""

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


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


class Role(NamedTuple):
    """A large LLM that the run asks: `environment` or `reference`, after which its options are named."""

    name: str
    model: str
    base_url: str | None

    def client(self) -> OpenAIChat:
        from ..llm import OpenAIChat

        return OpenAIChat(self.model, base_url=self.base_url, timeout=SECONDS, max_retries=0, patience=1)


@dataclass
class Setup(EnvironmentModel, ReferenceModel, Dollars):
    """What is to be checked: the command line's options, and behind them the configuration's."""

    run: Path | None = setting("A trained agent's folder, or a model's.")
    config: Path | None = setting("A training run's YAML file; everything it names is checked.")
    accelerate_config: Path | None = setting("What that run is launched with.")
    output_dir: Path | None = setting("Folder that will be written to: the configuration's, or runs.")

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
    def roles(self) -> list[Role]:
        """The large LLMs that are named."""
        models = {name: self.value(f"{name}_model") for name in ("environment", "reference")}
        return [Role(name, str(model), self.value(f"{name}_base_url")) for name, model in models.items() if model]

    @cached_property
    def program(self) -> tuple[str, Any, dict[str, Any]]:
        """The command whose options these are most likely to be, its module, and its options' fields by name."""
        from . import train_espl, train_prompt_r1

        found = []
        for method, module in (("prompt-r1", train_prompt_r1), ("espl", train_espl)):
            fields = {name: one for kind in module.ARGUMENTS for name, one in kind.__dataclass_fields__.items()}
            fields |= {"env": None}  # which TRL's parser reads itself
            found.append((f"agentic-prompting train {method}", module, fields))
        return min(found, key=lambda one: len(set(self.values) - set(one[2])))  # of two alike the first

    @property
    def processes(self) -> int:
        """How many the run will have: what accelerate is told, else one for each GPU."""
        if self.accelerate_config is not None:
            return int(read_yaml(self.accelerate_config)["num_processes"])
        import torch

        return max(1, torch.cuda.device_count())


Check = Callable[[Setup], Iterable[Finding]]


def doctor(setup: Setup, as_json: AsJson = False) -> int:
    """Check the installation, and whatever a run needs; each warning and problem comes with its fix.

    Asks a model that is named for one word. Exit status 1 if there is a problem.
    """
    from .doctor_checks import CHECKS

    with busy("looking"):
        findings = [(name, finding) for name, check in CHECKS.items() for finding in look(check, setup)]
    counts = {level: sum(finding.level == level for _, finding in findings) for level in _STYLES}
    worst = next(level for level in ("problem", "warning", "ok") if counts[level])
    if as_json:
        listed = [{"check": name, **vars(finding)} for name, finding in findings]
        print(json.dumps({"status": worst, "findings": listed}, ensure_ascii=False))
    else:
        _show(findings, counts)
    return int(worst == "problem")


def look(check: Check, setup: Setup) -> list[Finding]:
    """What a check finds. One that cannot be done is a finding too."""
    try:
        return list(check(setup))
    except Exception as error:  # of whatever package is broken: that is what is looked for
        says = f"could not be checked: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return [Finding("problem", says, "mend what the message names")]


def _show(findings: list[tuple[str, Finding]], counts: Mapping[str, int]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for name, finding in findings:
        line = Text.assemble((f"{finding.level:8}", _STYLES[finding.level]), f" {name:14} {finding.says}")
        console.print(line.append(f"  -> {finding.fix}", style="bold") if finding.fix else line)
    console.print(", ".join(f"{n} {level}{'s' * (level != 'ok' and n != 1)}" for level, n in counts.items()))


def read_yaml(path: Path) -> Any:
    """Raises `ValueError`, in one line, for what is no YAML."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from None
