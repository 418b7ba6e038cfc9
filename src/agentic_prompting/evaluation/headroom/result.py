"""[`Headroom`]: the result of a measurement, with its report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from textwrap import shorten
from typing import Any

from ...llm.numbers import count_in_words, format_usd
from ...llm.types import cost_in_words
from ...records import atomic_write
from ..headroom_figures import HEADROOM_FILE, MEASUREMENT_NAMES, HeadroomFigures
from ..intervals import Estimate
from .ceiling import Ceiling
from .group_signal import GroupSignal
from .prompts import PromptHeadroom, Verdict
from .refinement import RefineHeadroom

FURTHER = 20
"""Number of further prompts whose expected gain is reported; see [`expect_further`]."""


@dataclass
class Headroom:
    """The result of [`headroom`]. A measurement that was not requested or not reached is `None`.

    Args:
        prompts ([`PromptHeadroom`], *optional*): The gain of a better system prompt.
        texts (`list[str]`): The compared prompts, the start prompt first.
        further ([`Estimate`], *optional*): The gain of the best of 20 more prompts, if they
            resemble those tried.
        router ([`Estimate`], *optional*): The gain of choosing between start prompt and chosen one
            for each row, if the rows were few enough to be answered twice; see [`route_prompts`].
        signal ([`GroupSignal`], *optional*): The signal for GRPO.
        refinement ([`RefineHeadroom`], *optional*): The gain of ProRefine.
        requests ([`Ceiling`], *optional*): Scores of a large LLM under several requests.
        pool ([`Ceiling`], *optional*): Scores of several models or workers under the plain request.
        calls (`dict[str, int]`): Calls of large LLMs of each measurement, with those that were
            replayed.
        replayed (`dict[str, int]`): How many of them came from a replay cache and were not paid
            for.
        costs (`dict[str, float]`): US dollars of each measurement.
        cost_usd (`float`): US dollars of all measurements.
        failed (`int`): Answers without a score: outages, and answers that the metric cannot grade.
        seconds (`float`): Duration from the first call to the last.
        stopped (`str`, *optional*): Why the measurement ended early.
        delta (`float`): The smallest gain that is worth it.
        asks_once (`bool`): Whether the agent has one turn to ask in; if so, the ceiling of a single
            request bounds its score.
    """

    prompts: PromptHeadroom | None = None
    texts: list[str] = field(default_factory=list)
    further: Estimate | None = None
    router: Estimate | None = None
    signal: GroupSignal | None = None
    refinement: RefineHeadroom | None = None
    requests: Ceiling | None = None
    pool: Ceiling | None = None
    calls: dict[str, int] = field(default_factory=dict)
    replayed: dict[str, int] = field(default_factory=dict)
    costs: dict[str, float] = field(default_factory=dict)
    cost_usd: float = 0.0
    failed: int = 0
    seconds: float = 0.0
    stopped: str | None = None
    delta: float = 0.10
    asks_once: bool = False

    @property
    def training(self) -> tuple[Verdict, str] | None:
        """The verdict on training an agent to ask, and its reason: the signal, or the ceiling of
        the requests.
        """
        if self.signal is None:
            return None

        # A signal is useless if even the best request gains too little. An agent that asks several
        # times may score above the ceiling of a single request. The score of the untrained agent is
        # its pass@1.
        untrained = self.signal.pass_at.get(1)
        if self.asks_once and self.requests is not None and untrained is not None:
            largest_gain = self.requests.high - untrained.low
            if largest_gain < self.delta:
                reason = (
                    f"not worth it: an agent that asks perfectly gains {largest_gain:.3f} at most"
                )
                return "not worth it", reason
        return self.signal.verdict, self.signal.sentence()

    def report(self) -> str:
        """The result as text: a sentence per measurement with its evidence, then the calls and the
        cost.
        """
        # The measurements, as far as they were made.
        lines = []
        if self.prompts is not None:
            lines += _prompt_lines(self.prompts, self.texts, self.further)
        if self.router is not None:
            lines.append(
                f"  A router of both prompts gains {_format_interval(self.router)} over the better "
                "one."
            )
        if self.signal is not None:
            lines += _signal_lines(self.signal)
        if self.refinement is not None:
            lines.append(f"ProRefine: {self.refinement.sentence()}.")
        if self.requests is not None:
            lines.append(f"Requests: {self.requests.sentence()}.")
            gain = _format_interval(self.requests.gain)
            lines.append(f"  An agent that asks once, and perfectly, gains {gain} at least.")
        if self.training is not None and self.requests is not None and self.asks_once:
            # Only with the requests does the verdict add to the sentence of the signal.
            lines.append(f"Training an agent to ask: {self.training[1]}.")
        # Each model alone, below the score of the best choice.
        if self.pool is not None:
            lines.append(f"Pool: {self.pool.sentence()}.")
            for name, estimate in self.pool.each.items():
                lines.append(f"  {name}: {estimate}")
        if self.stopped is not None:
            lines.append(f"Stopped early: {self.stopped}.")

        # The last line: calls, cost and failures.
        calls = ", ".join(self._describe_spending(name) for name in self.calls)
        failed = f"; {count_in_words(self.failed, 'answer')} without a score" if self.failed else ""
        # Replayed calls cost nothing, whatever the price.
        paid_calls = sum(self.calls.values()) - sum(self.replayed.values())
        cost = cost_in_words(self.cost_usd, was_used=paid_calls > 0)
        lines.append(f"Calls: {calls or 'none'}; {cost}, {self.seconds:.0f} s{failed}.")
        return "\n".join(lines)

    def _describe_spending(self, name: str) -> str:
        """The calls of a measurement in words, with its cost and what was replayed."""
        details = []
        if self.costs.get(name):
            details.append(f"${format_usd(self.costs[name])}")
        if self.replayed.get(name):
            details.append(f"{self.replayed[name]} replayed")
        description = f"{name} {self.calls[name]}"
        return f"{description} ({', '.join(details)})" if details else description

    def to_json(self) -> dict[str, Any]:
        """Return all fields, verdicts and sentences as JSON."""
        # Verdicts and sentences are properties and methods, which `asdict` does not include.
        saved = asdict(self)
        for name in MEASUREMENT_NAMES:
            measured = getattr(self, name)
            if measured is not None:
                saved[name]["sentence"] = measured.sentence()
        if self.signal is not None:
            saved["signal"]["verdict"] = self.signal.verdict
        if self.training is not None:
            saved["training"] = self.training[1]
        return saved

    @property
    def figures(self) -> HeadroomFigures:
        """Everything that was measured with an interval, for tables and pictures
        ([`plot_headroom`]).
        """
        return HeadroomFigures.from_json(self.to_json())

    def save(self, folder: str | Path) -> Path:
        """Write `headroom.json` into a folder, atomically, and return its path."""
        path = Path(folder) / HEADROOM_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, json.dumps(self.to_json(), indent=2, ensure_ascii=False) + "\n")
        return path


def _format_interval(estimate: Estimate) -> str:
    return f"{estimate.mean:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def _prompt_lines(
    headroom: PromptHeadroom, texts: Sequence[str], further: Estimate | None
) -> list[str]:
    # The gain, with the scores behind it and the prompt that was chosen.
    chosen_prompt = shorten(texts[headroom.chosen], 200, placeholder=" ...")
    lines = [
        f"Prompts: {headroom.sentence()}.",
        (
            f"  Start prompt {headroom.start:.3f}, the chosen one {headroom.best:.3f} on the same "
            "rows."
        ),
        f"  Chosen: {chosen_prompt or '(the empty prompt)'}",
    ]
    # Without a reference LLM and further prompts, the verdict is about the empty prompt alone.
    if not any(texts[1:]):
        lines.append(
            "  No prompt but the empty one was compared with yours, which says nothing about "
            "better ones: name --reference-model (in Python `reference`), which writes others."
        )
    # Evidence beside the verdict, as far as it was measured.
    if headroom.test is not None:
        lines.append(
            f"  Between the {headroom.tried + 1} prompts: F = {headroom.test.statistic:.2f}, p = "
            f"{headroom.test.p_value:.3f}; their spread is about {headroom.test.spread:.3f}."
        )
    if further is not None:
        lines.append(
            f"  The best of {FURTHER} more prompts, if they are like these: "
            f"{_format_interval(further)}."
        )
    if headroom.verdict == "not worth it":
        lines.append(
            f"  Up to {headroom.possible_share:.0%} of such prompts may be good although none of "
            "these is."
        )
    return lines


def _signal_lines(signal: GroupSignal) -> list[str]:
    # The share of groups that have a gradient.
    lines = [f"Signal for GRPO: {signal.sentence()}."]

    # pass@k for k = 1 and for the largest k.
    passes = []
    for k in sorted({1, signal.measured_size}):
        if k in signal.pass_at:
            passes.append(f"pass@{k} {signal.pass_at[k].mean:.3f}")
    if passes:
        first = signal.pass_at[1]
        lines.append(
            f"  {', '.join(passes)}; pass@1, the floor, is in [{first.low:.3f}, {first.high:.3f}], "
            f"over {count_in_words(signal.rows, 'row')}."
        )
    # Why groups may have no gradient: rows that are too easy or too hard, rollouts without answer.
    lines.append(
        f"  Always right: {signal.always_right:.0%} of the rows; never: {signal.never_right:.0%}."
    )
    if signal.lost_to_form is not None and signal.failed is not None:
        lines.append(
            f"  Lost to form: {signal.lost_to_form.mean:.0%} of the rollouts; failed: "
            f"{signal.failed.mean:.0%}."
        )
    return lines
