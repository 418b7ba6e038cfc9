"""Calls, tokens, dollars and hours of a run: from its configuration and stated assumptions, or from a pilot run.

The speed of GPUs is arithmetic over bandwidth and FLOPs, of which assumed shares are reached; it is not measured.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ..evaluation import bootstrap_interval
from ..records import Record
from ..rollout import read_rollouts


@dataclass(frozen=True)
class Assumptions:
    """Facts that a configuration does not have.

    Args:
        calls (`float`): Calls to the large LLM in a rollout.
        agent_tokens (`float`): Tokens that the agent samples in a rollout.
        call_input (`float`), call_output (`float`): Tokens that a call reads and writes.
        call_seconds (`float`): Until its reply is there.
        bandwidth (`float`), flops (`float`): Figures of a GPU, in bytes/s and bf16 operations/s: an H100's.
        decode_share (`float`), train_share (`float`): The shares of them that sampling and training reach.
        rows_at_once (`int`): Rollouts that a GPU samples at once at most.
    """

    calls: float = 3.0
    agent_tokens: float = 800.0
    call_input: float = 700.0
    call_output: float = 250.0
    call_seconds: float = 3.0
    bandwidth: float = 3.35e12
    flops: float = 990e12
    decode_share: float = 0.5
    train_share: float = 0.35
    rows_at_once: int = 80


@dataclass
class Spending:
    """The cost of a run.

    Args:
        steps (`int`), rollouts (`int`): Steps of the run, rollouts of a step.
        calls (`float`), tokens (`float`): To the large LLM in the environment, and read and written by it, in the whole
            run; those of E-SPL's reference LLM and of judges come on top.
        usd (`float`, *optional*): Dollars of these calls; `None` if the price is not known.
        sampling (`float`), training (`float`): Seconds of a step; where a block of rollouts is for several steps, their
            share of its sampling.
        hours (`float`): Duration of the run.
        hours_ahead (`float`, *optional*): With `async_lead: 1`, on the virtual clock; `None` where the run has a lead
            or cannot have one.
        intervals (`dict`): 95 % intervals of a pilot run's means, by name, over its questions, because rollouts of one
            question are alike. A pilot of a single question has none; with fewer than about 30 questions they are
            somewhat too narrow.
        notes (`list[str]`): Where the figures are from, and warnings.
    """

    steps: int
    rollouts: int
    calls: float
    tokens: float
    usd: float | None
    sampling: float
    training: float
    hours: float
    hours_ahead: float | None = None
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        usd = "its price is not known" if self.usd is None else f"${self.usd:,.2f}"
        ahead = "" if self.hours_ahead is None else f"; about {self.hours_ahead:.1f} with async_lead: 1"
        rows = [
            f"{self.steps:,} steps of {self.rollouts:,} rollouts: {self.calls:,.0f} calls, "
            f"{self.tokens / 1e6:,.1f} million tokens, {usd}",
            f"a step: {self.sampling:.0f} s sampling, {self.training:.0f} s training; "
            f"{self.hours:.1f} hours in all{ahead}",
        ]
        rows += [f"pilot, {name}: 95 % within {low:.4g} and {high:.4g}" for name, (low, high) in self.intervals.items()]
        return "\n".join([*rows, *(f"note: {one}" for one in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """All of it as plain data."""
        return asdict(self)


def spending(
    args: Mapping[str, Any],
    parameters: int,
    *,
    gpus: int = 1,
    rows: int | None = None,
    price: tuple[float, float] | None = None,
    pilot: str | Path | None = None,
    assumed: Assumptions = Assumptions(),
    trained: int | None = None,
    kv_bytes: int = 0,
) -> Spending:
    """Calls, tokens, dollars and hours of a run.

    Args:
        args (`dict`): Training arguments by name.
        parameters (`int`): Parameters of the model.
        gpus (`int`, *optional*, defaults to `1`): GPUs that train.
        rows (`int`, *optional*): Rows of the dataset; needed where `max_steps` is not set.
        price (`tuple[float, float]`, *optional*): US dollars per million tokens that the large LLM reads and writes.
        pilot (`str` or `Path`, *optional*): A run's folder, whose records take the place of assumptions.
        assumed ([`Assumptions`], *optional*): Values for everything that is not known.
        trained (`int`, *optional*): Numbers that learn; defaults to all.
        kv_bytes (`int`, *optional*, defaults to `0`): Bytes of the keys and values of one token, as [`Plan`] has them.
            Each sampled token reads those of its context, here half of the longest one; 0 leaves that out.

    Raises:
        `ValueError`: Neither steps nor rows are known, or the pilot has no records.
    """
    found, notes = Spending(0, 0, 0, 0, None, 0, 0, 0), []
    of = {name: value for name, value in args.items() if value is not None}
    micro = int(of.get("per_device_train_batch_size", 8)) * int(of.get("gradient_accumulation_steps", 1))
    found.rollouts = micro * gpus
    found.steps = _steps(of, rows, found.rollouts)
    # A block of rollouts is played at once, for one step or several.
    block = int(of.get("generation_batch_size") or found.rollouts)
    updates = max(1, block * int(of.get("num_iterations", 1)) // found.rollouts)
    measured: dict[str, Any] = {}
    if pilot is not None:
        measured, found.intervals, over = _piloted(Path(pilot))
        notes.append(f"{', '.join(measured)} of a rollout are those of {pilot}: {over}")
    usd: float | None = measured.pop("usd", None)
    assumed = replace(assumed, **measured)
    rest = {name: value for name, value in asdict(assumed).items() if name not in measured}
    notes.append("assumed: " + ", ".join(f"{name} {value:g}" for name, value in rest.items()))
    if usd is None and price is not None:
        usd = assumed.calls * (assumed.call_input * price[0] + assumed.call_output * price[1]) / 1e6
    played = block / updates * found.steps
    found.calls = assumed.calls * played
    found.tokens = found.calls * (assumed.call_input + assumed.call_output)
    found.usd = None if usd is None else usd * played
    context = float(of.get("max_context") or of.get("max_completion_length") or 8192)
    at_once = min(block / gpus, assumed.rows_at_once)
    waves = math.ceil(block / gpus / assumed.rows_at_once)
    read = 2 * parameters + at_once * context / 2 * kv_bytes  # for one token of all rows
    token = read / (assumed.bandwidth * assumed.decode_share)  # its seconds
    found.sampling = waves * (assumed.agent_tokens * token + assumed.calls * assumed.call_seconds) / updates
    operations = found.rollouts * context / 2 * _operations(of, parameters, trained)
    found.training = operations / (gpus * assumed.flops * assumed.train_share)
    found.hours = found.steps * (found.sampling + found.training) / 3600
    if pilot is not None and (seconds := _step_seconds(Path(pilot))) is not None:
        notes.append(f"the pilot's own steps took {seconds:.1f} s, rollouts included, with its batch and GPUs")
    has_server = bool(of.get("use_vllm")) and of.get("vllm_mode") == "server"
    if not of.get("async_lead") and (has_server or not of.get("use_vllm")):  # a colocated vLLM cannot have a lead
        hidden = _hidden(assumed, token, found.training * updates / waves, has_server)
        found.hours_ahead = found.steps * (found.sampling * (1 - hidden) + found.training) / 3600
    if "prompts_per_step" in of and of.get("mode") != "rl":
        notes.append("the calls of the reference LLM come on top")
    found.notes = [*notes, *_budget(of, found)]
    return found


def _steps(of: Mapping[str, Any], rows: int | None, rollouts: int) -> int:
    if int(of.get("max_steps", -1)) > 0:
        return int(of["max_steps"])
    if rows is None:
        raise ValueError("the number of steps is not known: set max_steps, or say how many rows the dataset has")
    group = int(of.get("num_generations", 8)) * int(of.get("prompts_per_step", 1))
    played = rows * group * float(of.get("num_train_epochs", 1)) * int(of.get("num_iterations", 1))
    return max(1, math.ceil(played / rollouts))


def _operations(of: Mapping[str, Any], parameters: int, trained: int | None) -> int:
    """Operations of a training step for one token: 6 for each parameter; weights that do not learn save 2, recomputing
    adds 2, and a reference model 2."""
    has_frozen = trained is not None and trained < parameters
    recomputes = bool(of.get("gradient_checkpointing", True))
    return parameters * (6 - 2 * has_frozen + 2 * recomputes + 2 * bool(of.get("beta")))


def _piloted(folder: Path) -> tuple[dict[str, Any], dict[str, tuple[float, float]], str]:
    """The means of a pilot run's rollouts, dollars of one among them; the means' intervals; and what they are over."""
    records = [one for one in read_rollouts(folder / "rollouts") if one.get("mode", "train") == "train"]
    records = [one for one in records if one["status"] != "failed"]
    if not records:
        raise ValueError(f"{folder} holds no rollouts that came to an end: name the folder of a run that has trained")
    groups: dict[str, list[Record]] = {}
    for one in records:
        question = one.get("id", one.get("question", one.get("step")))
        groups.setdefault(f"{one.get('environment')} {question}", []).append(one)
    means: dict[str, Any] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for name, read in _FIGURES.items():
        values = [of for group in groups.values() if (of := [value for one in group for value in read(one)])]
        every = [value for of in values for value in of]
        if not every or (name == "usd" and not any(every)):  # an LLM without a price is booked as 0
            continue
        means[name] = mean = fmean(every)
        if len(values) > 1:
            size = len(every) / len(values)
            estimate = bootstrap_interval([mean + sum(value - mean for value in of) / size for of in values])
            intervals[name] = (estimate.low, estimate.high)
    return means, intervals, f"{len(records)} rollouts of {len(groups)} question{'s' * (len(groups) > 1)}"


_FIGURES: dict[str, Callable[[Record], list[float]]] = {
    "calls": lambda one: [float(len(one["observations"]))],
    "agent_tokens": lambda one: [float(one["tokens"]["agent"])],
    "call_seconds": lambda one: [call["seconds"] for call in one["observations"] if not call["cached"]],
    "usd": lambda one: [float(one["worth_usd"])],
}
"""The figures of a rollout, from its record."""


def _step_seconds(folder: Path) -> float | None:
    """The mean time of a step in a run's log."""
    seconds = []
    with suppress(OSError, ValueError):
        for line in (folder / "rollouts" / "log.jsonl").read_text(encoding="utf-8").splitlines():
            seconds += [one] if isinstance(one := json.loads(line).get("step_time"), int | float) else []
    return fmean(seconds) if seconds else None


def _hidden(assumed: Assumptions, token: float, update: float, has_server: bool) -> float:
    """The share of the time for rollouts that no step waits for with `async_lead: 1`: a smaller batch on the virtual
    clock."""
    from .clock import Pace, on_a_virtual_clock

    turns = max(1, round(assumed.calls) + 1)
    pace = Pace(
        groups=4, rollouts=4, turns=min(turns, 5), tokens=max(1.0, assumed.agent_tokens / turns / 20),
        reply=max(assumed.call_seconds, 1e-3), update=max(update, 1e-3), step=max(token, 1e-4) * 20,
    )  # fmt: skip
    layout = "server" if has_server else "one node"
    on_policy, ahead = (on_a_virtual_clock(pace, layout, lead, 6)["step_s"] for lead in (0, 1))
    return min(1.0, (on_policy - ahead) / (on_policy - pace.update))


def _budget(of: Mapping[str, Any], found: Spending) -> list[str]:
    """A warning where a budget ends before the last step."""
    notes = []
    for name, needed in (("budget_usd", found.usd), ("budget_tokens", found.tokens)):
        limit = of.get(name)
        if limit is not None and needed is not None and needed > limit:
            last = int(found.steps * limit / needed)
            notes.append(f"warning: {name}: {limit:g} ends after about step {last:,} of {found.steps:,}")
        elif limit is not None and needed is None:
            notes.append(f"warning: {name} cannot be compared: the large LLM's price is not known")
    return notes
