"""The saved result of `headroom`, read without scipy: figures for a plan, a report, a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..llm.numbers import count_in_words
from ..llm.types import cost_in_words

HEADROOM_FILE = "headroom.json"

MEASUREMENT_NAMES = ("prompts", "signal", "refinement", "requests", "pool")
"""What `headroom` measures: the fields of [`Headroom`] that have a sentence of their own."""

Panel = Literal["score", "gain", "share"]


@dataclass(frozen=True)
class Figure:
    """One measured figure with its interval.

    Args:
        key (`str`): Identifies the figure: `floor`, `ceiling`, `differing`, `prompt_gain`, ...
        name (`str`): The name of the figure, for people.
        panel (`str`): `score`, `gain` or `share`: figures of one panel can be compared.
        low (`float`), high (`float`): The ends of its interval, or of the bracket of a ceiling.
        mean (`float`, *optional*): The estimate. A bracket has none.
    """

    key: str
    name: str
    panel: Panel
    low: float
    high: float
    mean: float | None = None

    def __str__(self) -> str:
        sign = "+" if self.panel == "gain" else ""
        if self.mean is None:
            return f"{self.low:{sign}.3f} to {self.high:{sign}.3f}"
        return f"{self.mean:{sign}.3f} [{self.low:{sign}.3f}, {self.high:{sign}.3f}]"


@dataclass(frozen=True)
class HeadroomFigures:
    """The figures of a saved result of `headroom`.

    Args:
        measured (`list[Figure]`): Everything that was measured with an interval.
        sentences (`dict[str, str]`): The verdict of each measurement, by name.
        delta (`float`): The smallest gain that is worth it.
        calls (`int`): Calls of large LLMs.
        cost_usd (`float`): Their cost.
        replayed (`int`): How many of the calls came from a replay cache and were not paid for.
        stopped (`str`, *optional*): Why the measurements ended early.
    """

    measured: list[Figure] = field(default_factory=list)
    sentences: dict[str, str] = field(default_factory=dict)
    delta: float = 0.10
    calls: int = 0
    cost_usd: float = 0.0
    replayed: int = 0
    stopped: str | None = None

    @classmethod
    def read(cls, path: str | Path) -> HeadroomFigures | None:
        """Read a file, or `headroom.json` in a folder. `None` if it is missing or damaged."""
        path = Path(path)
        if path.is_dir():
            path = path / HEADROOM_FILE
        try:
            return cls.from_json(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
            # The file may have been edited, or written by another version.
            return None

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> HeadroomFigures:
        """The figures of [`Headroom.to_json`]."""
        sentences = {}
        for name in MEASUREMENT_NAMES:
            if saved.get(name):
                sentences[name] = str(saved[name]["sentence"])
        if saved.get("training"):
            sentences["training"] = str(saved["training"])
        return cls(
            measured=[*_scores(saved), *_gains(saved), *_shares(saved)],
            sentences=sentences,
            delta=float(saved["delta"]),
            calls=sum(int(count) for count in saved["calls"].values()),
            cost_usd=float(saved["cost_usd"]),
            # Files of older versions do not count them.
            replayed=sum(int(count) for count in (saved.get("replayed") or {}).values()),
            stopped=saved.get("stopped"),
        )

    def find(self, key: str) -> Figure | None:
        """The figure with this key, if it was measured."""
        return next((figure for figure in self.measured if figure.key == key), None)

    @property
    def spending(self) -> str:
        """Calls and dollars in words."""
        # Replayed calls cost nothing, whatever the price.
        cost = cost_in_words(self.cost_usd, was_used=self.calls > self.replayed)
        return f"{count_in_words(self.calls, 'call')}, {cost}"

    def lines(self) -> list[str]:
        """A line for each figure, then calls and dollars."""
        lines = [f"{figure.name}: {figure}" for figure in self.measured]
        lines.append(f"measured with {self.spending}")
        if self.stopped:
            lines.append(f"stopped early: {self.stopped}")
        return lines


def _scores(saved: Mapping[str, Any]) -> list[Figure]:
    """Scores between 0 and 1, from the floor to the ceilings."""
    figures = []
    # The untrained agent: one rollout of each row, and the best of a group.
    signal = saved.get("signal")
    if signal:
        passes = {int(k): estimate for k, estimate in signal["pass_at"].items()}
        if 1 in passes:
            figures.append(
                _estimate("floor", "floor: the untrained agent, pass@1", "score", passes[1])
            )
        size = max(passes, default=1)
        if size > 1:
            name = f"the best of its {size} rollouts, pass@{size}"
            figures.append(_estimate("best_of_group", name, "score", passes[size]))

    # A large LLM asked as it is, and in the best of several ways.
    requests = saved.get("requests")
    if requests:
        names = requests["names"]
        plain = requests["each"][names[0]]
        figures.append(_estimate("plain_request", "the large LLM, asked as it is", "score", plain))
        name = f"ceiling: the best of {len(names)} requests for each row"
        figures.append(Figure("ceiling", name, "score", requests["low"], requests["high"]))

    # Each model or worker alone, and the choice of an oracle.
    pool = saved.get("pool")
    if pool:
        for name, estimate in pool["each"].items():
            figures.append(_estimate(f"pool/{name}", f"{name} alone", "score", estimate))
        name = f"oracle router: the best of {len(pool['names'])} for each row"
        figures.append(Figure("router", name, "score", pool["low"], pool["high"]))
    return figures


def _gains(saved: Mapping[str, Any]) -> list[Figure]:
    """Differences of scores on the same rows."""
    figures = []
    if saved.get("prompts"):
        gain = saved["prompts"]["gain"]
        figures.append(_estimate("prompt_gain", "gain of the chosen prompt", "gain", gain))
    if saved.get("refinement"):
        gain = saved["refinement"]["gain"]
        figures.append(_estimate("refine_gain", "gain of ProRefine", "gain", gain))
    if saved.get("requests"):
        gain = saved["requests"]["gain"]
        name = "gain of the best request for each row, at least"
        figures.append(_estimate("request_gain", name, "gain", gain))
    return figures


def _shares(saved: Mapping[str, Any]) -> list[Figure]:
    """Shares of groups and rollouts."""
    figures = []
    signal = saved.get("signal")
    if signal and signal["differing"]:
        name = f"groups of {signal['group_size']} with a gradient"
        figures.append(_estimate("differing", name, "share", signal["differing"]))
    if signal and signal["lost_to_form"]:
        lost = signal["lost_to_form"]
        figures.append(_estimate("lost_to_form", "rollouts lost to form", "share", lost))
    return figures


def _estimate(key: str, name: str, panel: Panel, estimate: Mapping[str, Any]) -> Figure:
    return Figure(
        key=key,
        name=name,
        panel=panel,
        low=float(estimate["low"]),
        high=float(estimate["high"]),
        mean=float(estimate["mean"]),
    )
