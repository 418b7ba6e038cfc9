"""Calls, tokens, dollars and hours of a run, from its configuration or from a pilot run.

Assumptions, which the estimate states, stand for what neither of them says.

The speed of a GPU is computed from its bandwidth and FLOPs and the share of them that is assumed to
be reached. It is not measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ..environments import Worker
from ..llm.budget import find_price, price_tokens
from ..llm.numbers import count_in_words, format_usd
from .pilot_figures import PilotFigures
from .virtual_clock import Pace, run_on_virtual_clock

MILLION = 1e6
DEFAULT_CONTEXT = 8192
"""Tokens of a rollout if the configuration limits neither the context nor the completion."""


@dataclass(frozen=True)
class Assumptions:
    """Facts that a configuration does not contain.

    Args:
        calls (`float`, *optional*, defaults to `3.0`): Calls to the large LLM in a rollout.
        agent_tokens (`float`, *optional*, defaults to `800.0`): Tokens that the agent samples in a
            rollout.
        call_input (`float`, *optional*, defaults to `700.0`): Tokens that a call reads.
        call_output (`float`, *optional*, defaults to `250.0`): Tokens that a call writes.
        call_seconds (`float`, *optional*, defaults to `3.0`): Duration of a call.
        bandwidth (`float`, *optional*, defaults to `3.35e12`): Memory bandwidth of a GPU in bytes
            per second. The default is an H100's.
        flops (`float`, *optional*, defaults to `990e12`): bf16 operations per second of a GPU. The
            default is an H100's.
        decode_share (`float`, *optional*, defaults to `0.5`): Share of the bandwidth that sampling
            reaches.
        train_share (`float`, *optional*, defaults to `0.35`): Share of the FLOPs that training
            reaches.
        rows_at_once (`int`, *optional*, defaults to `80`): Rollouts that a GPU samples at once, at
            most.
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

    @property
    def turns(self) -> int:
        """Turns of a rollout: one per call, and the answer."""
        return max(1, round(self.calls) + 1)


@dataclass(frozen=True)
class WorkerCost:
    """The estimated cost of one worker of a pool.

    Args:
        calls (`float`): Its calls in the whole run.
        usd (`float`, *optional*): US dollars of these calls. `None` if the price is not known.
    """

    calls: float
    usd: float | None

    def __str__(self) -> str:
        price = "price not known" if self.usd is None else _dollars_in_words(self.usd)
        return f"{count_in_words(round(self.calls), 'call')}, {price}"


@dataclass(frozen=True)
class CostEstimate:
    """The estimated cost of a run.

    Args:
        steps (`int`): Training steps of the run.
        rollouts (`int`): Rollouts of a step.
        calls (`float`): Calls to the environment's large LLM in the whole run. Calls of E-SPL's
            reference LLM and of judges are not included.
        tokens (`float`): Tokens that these calls read and write.
        usd (`float`, *optional*): US dollars of these calls. `None` if the price is not known.
        sampling_seconds (`float`): Seconds of a step spent on rollouts. If a batch of rollouts is
            used for several steps, their share of it.
        training_seconds (`float`): Seconds of a step spent on the update.
        hours (`float`): Duration of the run.
        hours_with_lead (`float`, *optional*): Duration with `async_lead: 1`, on a virtual clock.
            `None` if the run already has a lead, or cannot have one.
        intervals (`dict[str, tuple[float, float]]`): 95 % intervals of a pilot run's means, by
            name, over its questions, because rollouts of one question are alike. A pilot of a
            single question has none. With fewer than about 30 questions they are somewhat too
            narrow.
        workers (`dict[str, WorkerCost]`): The cost of each worker of a pool, by name.
        notes (`list[str]`): Where the figures come from, and warnings.
    """

    steps: int
    rollouts: int
    calls: float
    tokens: float
    usd: float | None
    sampling_seconds: float
    training_seconds: float
    hours: float
    hours_with_lead: float | None = None
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    workers: dict[str, WorkerCost] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        # An unknown price is mentioned; an impossible lead is left out.
        price = "the price is not known" if self.usd is None else _dollars_in_words(self.usd)
        duration = f"{_duration_in_words(3600 * self.hours)} in all"
        if self.hours_with_lead is not None:
            shorter = _duration_in_words(3600 * self.hours_with_lead)
            duration += f"; about {shorter} with async_lead: 1"
        lines = [
            f"{count_in_words(self.steps, 'step')} of {count_in_words(self.rollouts, 'rollout')}: "
            f"{count_in_words(round(self.calls), 'call')}, {_tokens_in_words(self.tokens)}, "
            f"{price}",
            f"a step: {_seconds_in_words(self.sampling_seconds)} sampling, "
            f"{_seconds_in_words(self.training_seconds)} training; {duration}",
        ]
        lines += [f"worker {name}: {cost}" for name, cost in self.workers.items()]
        # The uncertainty of a pilot run's means, and where all figures come from.
        for name, (low, high) in self.intervals.items():
            lines.append(f"pilot, {name}: 95 % interval {low:.4g} to {high:.4g}")
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as plain data."""
        return asdict(self)


def _tokens_in_words(tokens: float) -> str:
    """Tokens in millions, or one by one if they are few."""
    if tokens < 0.1 * MILLION:
        return count_in_words(round(tokens), "token")
    return f"{tokens / MILLION:,.1f} million tokens"


def _dollars_in_words(dollars: float) -> str:
    """Dollars with cents, or with four digits if they are less than a dollar."""
    if 0 < dollars < 1:
        return f"${format_usd(dollars)}"
    return f"${dollars:,.2f}"


def _seconds_in_words(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2f} s"


def _duration_in_words(seconds: float) -> str:
    """A duration in hours, or in minutes or seconds if it is short."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} hours"
    if seconds >= 60:
        return f"{seconds / 60:.0f} minutes"
    return _seconds_in_words(seconds)


@dataclass(frozen=True)
class Schedule:
    """The number of rollouts and updates of a run, derived from its training arguments.

    Args:
        steps (`int`): Training steps of the run.
        rollouts_per_step (`int`): Rollouts that an update learns from, over all GPUs.
        rollouts_per_batch (`int`): Rollouts that are played at once.
        updates_per_batch (`int`): Updates that learn from such a batch.
        gpus (`int`): GPUs that train.
        context (`float`): Tokens of the longest rollout.
    """

    steps: int
    rollouts_per_step: int
    rollouts_per_batch: int
    updates_per_batch: int
    gpus: int
    context: float

    @classmethod
    def from_args(cls, args: Mapping[str, Any], gpus: int, rows: int | None) -> Schedule:
        """Read the schedule from training arguments.

        Raises:
            `ValueError`: If neither `max_steps` nor the number of rows is known.
        """
        # A step learns from all micro-batches of all GPUs.
        rows_per_gpu = int(args.get("per_device_train_batch_size", 8))
        rollouts = rows_per_gpu * int(args.get("gradient_accumulation_steps", 1)) * gpus
        # Unless the arguments set another size, the rollouts of one step are played at once.
        rollouts_per_batch = int(args.get("generation_batch_size") or rollouts)
        iterations = int(args.get("num_iterations", 1))
        context = args.get("max_context") or args.get("max_completion_length") or DEFAULT_CONTEXT
        return cls(
            steps=count_steps(args, rows, rollouts),
            rollouts_per_step=rollouts,
            rollouts_per_batch=rollouts_per_batch,
            updates_per_batch=max(1, rollouts_per_batch * iterations // rollouts),
            gpus=gpus,
            context=float(context),
        )

    @property
    def rollouts_played(self) -> float:
        """Rollouts of the whole run."""
        return self.rollouts_per_batch / self.updates_per_batch * self.steps

    @property
    def rollouts_per_gpu(self) -> float:
        """Rollouts of a batch that one GPU samples."""
        return self.rollouts_per_batch / self.gpus


def count_steps(args: Mapping[str, Any], rows: int | None, rollouts: int) -> int:
    """Return the number of training steps, given the rollouts of a step."""
    max_steps = int(args.get("max_steps", -1))
    # A limit on the steps needs no data set.
    if max_steps > 0:
        return max_steps
    if rows is None:
        raise ValueError(
            "the number of steps is not known: set max_steps, or pass the dataset's number of rows"
        )
    # Without a limit, steps follow from the rows: each is played `num_generations` times.
    rollouts_per_row = int(args.get("num_generations", 8)) * int(args.get("prompts_per_step", 1))
    passes = float(args.get("num_train_epochs", 1)) * int(args.get("num_iterations", 1))
    return max(1, math.ceil(rows * rollouts_per_row * passes / rollouts))


def estimate_cost(
    args: Mapping[str, Any],
    parameters: int,
    *,
    gpus: int = 1,
    rows: int | None = None,
    price: tuple[float, float] | None = None,
    pool: Mapping[str, Worker] | None = None,
    pilot: str | Path | None = None,
    assumptions: Assumptions = Assumptions(),
    trained: int | None = None,
    kv_bytes: int = 0,
) -> CostEstimate:
    """Estimate the calls, tokens, dollars and hours of a run.

    Args:
        args (`Mapping[str, Any]`): Training arguments by name.
        parameters (`int`): Parameters of the model.
        gpus (`int`, *optional*, defaults to `1`): GPUs that train.
        rows (`int`, *optional*): Rows of the dataset. Required if `max_steps` is not set.
        price (`tuple[float, float]`, *optional*): US dollars per million tokens that the large LLM
            reads and writes.
        pool (`Mapping[str, Worker]`, *optional*): The workers of a conductor, `Workers.pool`. Each
            is assumed to get the same share of the calls, unless there is a pilot.
        pilot (`str` or `Path`, *optional*): Folder of a run whose records replace assumptions.
        assumptions ([`Assumptions`], *optional*): Values for everything that is not known.
        trained (`int`, *optional*): Parameters that are trained. Defaults to all.
        kv_bytes (`int`, *optional*, defaults to `0`): Bytes of the keys and values of one token;
            see [`Plan`]. Each sampled token reads those of its context, which is taken as half of
            the longest one. 0 leaves that out.

    Raises:
        `ValueError`: If neither the steps nor the rows are known, or the pilot has no records.
    """
    # An option that is not set has its default, like one that is missing.
    args = {name: value for name, value in args.items() if value is not None}
    schedule = Schedule.from_args(args, gpus, rows)

    # Measurements of a pilot run replace assumptions.
    figures = None
    if pilot is not None:
        figures = PilotFigures.read(Path(pilot))
        measured: dict[str, Any] = dict(figures.assumptions)
        assumptions = replace(assumptions, **measured)

    calls = estimate_calls(schedule, assumptions, price, pool, figures)
    duration = estimate_duration(args, schedule, assumptions, parameters, trained, kv_bytes)

    # Where the figures come from, and warnings.
    notes = describe_sources(assumptions, figures)
    if calls.has_equal_shares:
        notes.append("assumed: each worker of the pool gets the same share of the calls")
    if figures is not None and figures.step_seconds is not None:
        notes.append(
            f"the pilot's own steps took {figures.step_seconds:.1f} s, rollouts included, with its "
            "batch and GPUs"
        )
    if "prompts_per_step" in args and args.get("mode") != "rl":
        notes.append("the calls of the reference LLM are not included")
    needed = {"budget_usd": calls.usd, "budget_tokens": calls.tokens}
    notes += budget_warnings(args, schedule.steps, needed)

    return CostEstimate(
        steps=schedule.steps,
        rollouts=schedule.rollouts_per_step,
        calls=calls.calls,
        tokens=calls.tokens,
        usd=calls.usd,
        sampling_seconds=duration.sampling_seconds,
        training_seconds=duration.training_seconds,
        hours=duration.hours,
        hours_with_lead=duration.hours_with_lead,
        intervals={} if figures is None else figures.intervals,
        workers=calls.workers,
        notes=notes,
    )


def describe_sources(assumptions: Assumptions, figures: PilotFigures | None) -> list[str]:
    """Return notes on what a pilot measured, and on what is assumed with its values."""
    notes = []
    measured: Mapping[str, float] = {}
    if figures is not None:
        measured = figures.means
        notes.append(
            f"measured per rollout: {', '.join(measured)}, in {figures.folder}: "
            f"{figures.description}"
        )
    # Every figure that no pilot measured is named with its value.
    assumed = []
    for setting in fields(Assumptions):
        if setting.name not in measured:
            assumed.append(f"{setting.name} {getattr(assumptions, setting.name):g}")
    notes.append("assumed: " + ", ".join(assumed))
    return notes


@dataclass(frozen=True)
class CallEstimate:
    """The estimated calls of a run: fields of [`CostEstimate`].

    Args:
        calls (`float`), tokens (`float`), usd (`float`, *optional*): As of [`CostEstimate`].
        workers (`dict[str, WorkerCost]`): As of [`CostEstimate`].
        has_equal_shares (`bool`): Whether each worker is assumed to get the same share of calls.
    """

    calls: float
    tokens: float
    usd: float | None
    workers: dict[str, WorkerCost]
    has_equal_shares: bool


def estimate_calls(
    schedule: Schedule,
    assumptions: Assumptions,
    price: tuple[float, float] | None,
    pool: Mapping[str, Worker] | None,
    figures: PilotFigures | None,
) -> CallEstimate:
    """Return the calls, tokens and dollars of a run, and those of each worker of a pool."""
    rollouts_played = schedule.rollouts_played
    calls = assumptions.calls * rollouts_played

    # Calls of each worker of a pool: those of a pilot, or equal shares.
    workers: dict[str, WorkerCost] = {}
    has_equal_shares = False
    if figures is not None and figures.workers:
        for name, (worker_calls, worker_usd) in figures.workers.items():
            workers[name] = WorkerCost(worker_calls * rollouts_played, worker_usd * rollouts_played)
        # A turn of a conductor makes several calls.
        calls = sum(worker.calls for worker in workers.values())
    elif pool:
        has_equal_shares = True
        share = calls / len(pool)
        for name, worker in pool.items():
            worker_price = usd_per_worker_call(worker, assumptions)
            share_usd = None if worker_price is None else share * worker_price
            workers[name] = WorkerCost(share, share_usd)

    # Dollars: a pilot's, or those of all workers, or tokens times price, if prices are known.
    usd_per_rollout = None if figures is None else figures.means.get("usd")
    if usd_per_rollout is None and workers:
        worker_dollars = [worker.usd for worker in workers.values()]
        if None not in worker_dollars:
            usd_per_rollout = sum(filter(None, worker_dollars)) / rollouts_played
    elif usd_per_rollout is None and price is not None:
        usd_per_call = assumptions.call_input * price[0] + assumptions.call_output * price[1]
        usd_per_rollout = assumptions.calls * usd_per_call / MILLION
    return CallEstimate(
        calls=calls,
        tokens=calls * (assumptions.call_input + assumptions.call_output),
        usd=None if usd_per_rollout is None else usd_per_rollout * rollouts_played,
        workers=workers,
        has_equal_shares=has_equal_shares,
    )


@dataclass(frozen=True)
class DurationEstimate:
    """The estimated duration of a run: fields of [`CostEstimate`].

    Args:
        sampling_seconds (`float`), training_seconds (`float`): As of [`CostEstimate`].
        hours (`float`), hours_with_lead (`float`, *optional*): As of [`CostEstimate`].
    """

    sampling_seconds: float
    training_seconds: float
    hours: float
    hours_with_lead: float | None


def estimate_duration(
    args: Mapping[str, Any],
    schedule: Schedule,
    assumptions: Assumptions,
    parameters: int,
    trained: int | None,
    kv_bytes: int,
) -> DurationEstimate:
    """Return the seconds of a step and the hours of a run."""
    # Rollouts that do not fit into a GPU's decoding batch wait for the next wave.
    token_seconds = seconds_per_token(schedule, assumptions, parameters, kv_bytes)
    waves = math.ceil(schedule.rollouts_per_gpu / assumptions.rows_at_once)
    wave_seconds = assumptions.agent_tokens * token_seconds
    wave_seconds += assumptions.calls * assumptions.call_seconds
    sampling_seconds = waves * wave_seconds / schedule.updates_per_batch

    # A rollout has half of the longest context on average.
    tokens_per_step = schedule.rollouts_per_step * schedule.context / 2
    operations = tokens_per_step * operations_per_token(args, parameters, trained)
    training_seconds = operations / (schedule.gpus * assumptions.flops * assumptions.train_share)

    # A colocated vLLM cannot have a lead.
    hours_with_lead = None
    has_server = bool(args.get("use_vllm")) and args.get("vllm_mode") == "server"
    is_colocated = bool(args.get("use_vllm")) and not has_server
    if not args.get("async_lead") and not is_colocated:
        # The virtual clock plays one wave at a time, which gets its share of the update.
        update_seconds = training_seconds * schedule.updates_per_batch / waves
        hidden = hidden_share(assumptions, token_seconds, update_seconds, has_server)
        waiting_seconds = sampling_seconds * (1 - hidden)
        hours_with_lead = schedule.steps * (waiting_seconds + training_seconds) / 3600
    return DurationEstimate(
        sampling_seconds=sampling_seconds,
        training_seconds=training_seconds,
        hours=schedule.steps * (sampling_seconds + training_seconds) / 3600,
        hours_with_lead=hours_with_lead,
    )


def usd_per_worker_call(worker: Worker, assumptions: Assumptions) -> float | None:
    """Return the dollars of a call to a worker, `None` if its price is not known.

    A worker's own price comes first, then that of its model's tokens. A tool, a search and an agent
    without a price are free.
    """
    if worker.usd or not worker.is_chat:
        return worker.usd
    model = getattr(worker.model, "model", None)
    price = find_price(model) if isinstance(model, str) else None
    if price is None:
        return None
    return price_tokens(int(assumptions.call_input), int(assumptions.call_output), price).cost_usd


def seconds_per_token(
    schedule: Schedule, assumptions: Assumptions, parameters: int, kv_bytes: int
) -> float:
    """Return the seconds of a decoding step.

    It reads the weights in bf16, and the keys and values of all rows.
    """
    rows = min(schedule.rollouts_per_gpu, assumptions.rows_at_once)
    bytes_read = 2 * parameters + rows * schedule.context / 2 * kv_bytes
    return bytes_read / (assumptions.bandwidth * assumptions.decode_share)


def operations_per_token(args: Mapping[str, Any], parameters: int, trained: int | None) -> int:
    """Return the operations of a training step for one token.

    Forward and backward passes take 6 per parameter. Frozen weights save 2; recomputing activations
    and a reference model add 2 each.
    """
    operations = 6
    # Frozen weights need no gradients of their own.
    if trained is not None and trained < parameters:
        operations -= 2
    # Recomputing activations is a second forward pass.
    if args.get("gradient_checkpointing", True):
        operations += 2
    # The KL penalty needs a forward pass of the reference model.
    if args.get("beta"):
        operations += 2
    return parameters * operations


def hidden_share(
    assumptions: Assumptions, token_seconds: float, update_seconds: float, has_server: bool
) -> float:
    """Return the share of the sampling time that no step waits for with `async_lead: 1`.

    It is measured on a virtual clock with a smaller batch.
    """
    pace = Pace(
        groups=4,
        rollouts=4,
        turns=min(assumptions.turns, 5),
        # A decoding step of the virtual clock stands for 20 tokens.
        tokens=max(1.0, assumptions.agent_tokens / assumptions.turns / 20),
        step=max(token_seconds, 1e-4) * 20,
        reply=max(assumptions.call_seconds, 1e-3),
        update=max(update_seconds, 1e-3),
    )
    layout = "server" if has_server else "one node"
    # The same pace without and with a lead, so that only the waiting differs.
    on_policy_seconds = run_on_virtual_clock(pace, layout, lead=0, steps=6)["step_s"]
    lead_seconds = run_on_virtual_clock(pace, layout, lead=1, steps=6)["step_s"]
    # Without a lead, all but the update is waiting for rollouts.
    return min(1.0, (on_policy_seconds - lead_seconds) / (on_policy_seconds - pace.update))


def budget_warnings(
    args: Mapping[str, Any], steps: int, needed: Mapping[str, float | None]
) -> list[str]:
    """Return a warning for each budget that ends before the last step, or cannot be checked."""
    warnings = []
    for option, amount in needed.items():
        limit = args.get(option)
        if limit is None:
            continue
        if amount is None:
            # A budget in dollars, with a model whose price is not known.
            warnings.append(f"warning: {option} cannot be checked: the price is not known")
        elif amount > limit:
            last_step = int(steps * limit / amount)
            warnings.append(
                f"warning: {option}: {limit:g} ends after about step {last_step:,} of {steps:,}"
            )
    return warnings
