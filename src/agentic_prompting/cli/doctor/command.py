"""`agentic-prompting doctor`: what would go wrong, and what to type against it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated

from ..options import option
from ..show import busy
from .finding import Finding, Setup

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    run: Annotated[Path | None, option("A trained agent's folder, or a model's.")] = None,
    environment_model: Annotated[str | None, option("The large LLM, by its name at its endpoint.")] = None,
    environment_base_url: Annotated[str | None, option("Its OpenAI-compatible endpoint.")] = None,
    reference_model: Annotated[str | None, option("E-SPL's reference LLM, by its name at its endpoint.")] = None,
    reference_base_url: Annotated[str | None, option("Its endpoint.")] = None,
    config: Annotated[Path | None, option("A training run's YAML file; everything it names is checked.")] = None,
    accelerate_config: Annotated[Path | None, option("What that run is launched with.")] = None,
    replay_cache: Annotated[Path | None, option("SQLite file of recorded replies.")] = None,
    budget_usd: Annotated[float | None, option("What is to be spent at most.")] = None,
    output_dir: Annotated[Path | None, option("Folder that will be written to: the configuration's, or runs.")] = None,
    as_json: Annotated[bool, option("Print one JSON object instead of text.", None, "--json")] = False,
) -> int:
    """Check the installation, and whatever a run needs; each warning and problem comes with its fix.

    Asks a model that is named for one word. Exit status 1 if there is a problem.
    """
    from .table import CHECKS

    setup = Setup(
        run=run,
        environment_model=environment_model,
        environment_base_url=environment_base_url,
        reference_model=reference_model,
        reference_base_url=reference_base_url,
        config=config,
        accelerate_config=accelerate_config,
        replay_cache=replay_cache,
        budget_usd=budget_usd,
        output_dir=output_dir,
    )
    with busy("looking"):
        findings = [(name, finding) for name, check in CHECKS.items() for finding in look(check, setup)]
    if as_json:
        listed = [{"check": name, **vars(finding)} for name, finding in findings]
        print(json.dumps({"status": _worst(findings), "findings": listed}, ensure_ascii=False))
    else:
        _show(findings)
    return int(_worst(findings) == "problem")


def look(check: Callable[[Setup], Iterable[Finding]], setup: Setup) -> list[Finding]:
    """What a check finds. One that cannot be done is a finding too."""
    try:
        return list(check(setup))
    except Exception as error:  # of whatever package is broken: that is what is looked for
        says = f"could not be checked: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return [Finding("problem", says, "mend what the message names")]


def _worst(findings: Iterable[tuple[str, Finding]]) -> str:
    levels = {finding.level for _, finding in findings}
    return next(level for level in ("problem", "warning", "ok") if level in levels)


def _show(findings: list[tuple[str, Finding]]) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True, highlight=False)
    for name, finding in findings:
        line = Text.assemble((f"{finding.level:8}", _STYLES[finding.level]), f" {name:14} {finding.says}")
        if finding.fix:
            line.append(f"  -> {finding.fix}", style="bold")
        console.print(line)
    counts = {level: sum(finding.level == level for _, finding in findings) for level in _STYLES}
    warnings, problems = counts["warning"], counts["problem"]
    console.print(
        f"{counts['ok']} ok, {warnings} warning{'s' * (warnings != 1)}, {problems} problem{'s' * (problems != 1)}"
    )
