"""[`Headroom`]: the result of a measurement, with its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from ...records import atomic_write
from ..scoring import Estimate
from .ceiling import Ceiling
from .group_signal import GroupSignal
from .prompts import PromptHeadroom, Verdict
from .refinement import RefineHeadroom

HEADROOM_FILE = "headroom.json"
FURTHER = 20
"""How many more prompts [`expect_further`] is asked about."""


@dataclass
class Headroom:
    """What [`headroom`] returns. A part that was not asked for, or that the run did not reach, is `None`.

    Args:
        prompts ([`PromptHeadroom`], *optional*): What a better system prompt gains.
        texts (`list[str]`): The prompts that were compared, the start prompt first.
        further ([`Estimate`], *optional*): The gain of the best of 20 more prompts, if they are like those tried.
        signal ([`GroupSignal`], *optional*): The signal for GRPO.
        refinement ([`RefineHeadroom`], *optional*): What ProRefine gains.
        requests ([`Ceiling`], *optional*): A large LLM asked in several ways.
        pool ([`Ceiling`], *optional*): Several models, each asked the plain question.
        calls (`dict[str, int]`): Calls of large LLMs that each part made.
        cost_usd (`float`): What they cost.
        failed (`int`): Answers without a score: outages, and answers that the metric cannot grade.
        seconds (`float`): From the first call to the last.
        stopped (`str`, *optional*): Why it ended early.
        delta (`float`): The smallest gain that is worth it.
    """

    prompts: PromptHeadroom | None = None
    texts: list[str] = field(default_factory=list)
    further: Estimate | None = None
    signal: GroupSignal | None = None
    refinement: RefineHeadroom | None = None
    requests: Ceiling | None = None
    pool: Ceiling | None = None
    calls: dict[str, int] = field(default_factory=dict)
    cost_usd: float = 0.0
    failed: int = 0
    seconds: float = 0.0
    stopped: str | None = None
    delta: float = 0.10

    @property
    def training(self) -> tuple[Verdict, str] | None:
        """The verdict on training an agent to ask, and why: its signal, and the ceiling of its requests."""
        if self.signal is None:
            return None
        floor = self.signal.pass_at.get(1)
        if (
            self.requests is not None
            and floor is not None
            and self.requests.high - floor.low < self.delta
        ):
            most = self.requests.high - floor.low
            return (
                "not worth it",
                f"not worth it: an agent that asks perfectly gains {most:.3f} at most",
            )
        return self.signal.verdict, self.signal.sentence()

    def report(self) -> str:
        """The result as text: a sentence for each part, what it rests on, and what it took."""
        lines = []
        if self.prompts is not None:
            lines += _prompt_lines(self.prompts, self.texts, self.further)
        if self.signal is not None:
            lines += _signal_lines(self.signal)
        if self.refinement is not None:
            lines.append(f"ProRefine: {self.refinement.sentence()}.")
        if self.requests is not None:
            lines.append(f"Requests: {self.requests.sentence()}.")
            lines.append(
                f"  An agent that asks perfectly gains {_interval(self.requests.gain)} at least."
            )
        if self.training is not None and self.requests is not None:
            lines.append(f"Training an agent to ask: {self.training[1]}.")
        if self.pool is not None:
            lines.append(f"Pool: {self.pool.sentence()}.")
            for name, estimate in self.pool.each.items():
                lines.append(f"  {name}: {estimate}")
        if self.stopped is not None:
            lines.append(f"Stopped early: {self.stopped}.")
        calls = ", ".join(f"{name} {count}" for name, count in self.calls.items())
        cost = f", ${self.cost_usd:.4f}" if self.cost_usd else ""
        failed = f"; {self.failed} answers without a score" if self.failed else ""
        lines.append(f"Calls: {calls or 'none'}{cost}, {self.seconds:.0f} s{failed}.")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON, with verdicts and sentences."""
        saved = asdict(self)
        for name in ("prompts", "signal", "refinement", "requests", "pool"):
            part = getattr(self, name)
            if part is not None:
                saved[name]["sentence"] = part.sentence()
        if self.signal is not None:
            saved["signal"]["verdict"] = self.signal.verdict
        if self.training is not None:
            saved["training"] = self.training[1]
        return saved

    def save(self, folder: str | Path) -> Path:
        """Write `headroom.json` into a folder, all or nothing; its path."""
        path = Path(folder) / HEADROOM_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n")
        return path


def _interval(estimate: Estimate) -> str:
    return f"{estimate.mean:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def _prompt_lines(
    found: PromptHeadroom, texts: Sequence[str], further: Estimate | None
) -> list[str]:
    lines = [f"Prompts: {found.sentence()}."]
    lines.append(
        f"  Start prompt {found.start:.3f}, the chosen one {found.best:.3f} on the same rows."
    )
    lines.append(
        f"  Chosen: {shorten(texts[found.chosen], 200, placeholder=' ...') or '(the empty prompt)'}"
    )
    if found.test is not None:
        lines.append(
            f"  Between the {found.tried + 1} prompts: F = {found.test.statistic:.2f}, p = {found.test.p_value:.3f}; "
            f"their spread is about {found.test.spread:.3f}."
        )
    if further is not None:
        lines.append(
            f"  The best of {FURTHER} more prompts, if they are like these: {_interval(further)}."
        )
    if found.verdict == "not worth it":
        lines.append(
            f"  Up to {found.possible_share:.0%} of such prompts may be good although none of these is."
        )
    return lines


def _signal_lines(signal: GroupSignal) -> list[str]:
    lines = [f"Signal for GRPO: {signal.sentence()}."]
    passes = [
        f"pass@{k} {signal.pass_at[k].mean:.3f}"
        for k in sorted({1, signal.measured_size})
        if k in signal.pass_at
    ]
    if passes:
        first = signal.pass_at[1]
        lines.append(
            f"  {', '.join(passes)}; pass@1 is in [{first.low:.3f}, {first.high:.3f}], over {signal.rows} rows."
        )
    lines.append(
        f"  Always right: {signal.always_right:.0%} of the rows; never: {signal.never_right:.0%}."
    )
    if signal.lost_to_form is not None and signal.failed is not None:
        lines.append(
            f"  Lost to form: {signal.lost_to_form.mean:.0%} of the rollouts; failed: {signal.failed.mean:.0%}."
        )
    return lines
