"""The table of results on the first screen, from the records: what was learned, on what, in which
time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from agentic_prompting.evaluation import wilson_interval
from benchmarks.lab import RECORDS, Records, interval, markdown, share, shown
from benchmarks.learning import harness_world, league
from benchmarks.real import calculator

COLUMNS = ("what it learned", "model", "time", "before → after [95 %]", "command")
SMALL = "SmolLM2-135M, LoRA"
TINY = "sandbox, 0.4 M"
NOT_MEASURED = "not measured"


def table(folder: Path = RECORDS) -> str:
    """Return a row for each kind of training; those without a measurement say so."""
    rows = _library(folder)
    rows += [_langgraph(folder), _calculator(folder), _large_llm(folder), _conductor(folder)]
    rows.append(_demo(folder))
    rows += [*_harnesses(folder), _espl(folder)]
    rows.append(
        ("to ask `gpt-4o-mini` on HotpotQA", "Qwen3-4B, one GPU", "", NOT_MEASURED, "`examples/`")
    )
    return markdown(COLUMNS, rows)


def _read(folder: Path, name: str) -> list[dict[str, Any]]:
    return Records(folder / f"{name}.jsonl.gz").read()


def _library(folder: Path) -> list[Sequence[str]]:
    """A real model that learns to look facts up: the demonstration on two cores, and twice its
    steps on a GPU.
    """
    task = "to look facts up"
    runs = {
        # Device and setting: the command, the setting that the minutes are of, and where they were
        # measured.
        ("cpu", "demo"): ("`make real`", "alone", ""),
        ("gpu", "longer"): ("`benchmarks/real/library.py`", "longer", " on one H200"),
    }
    summaries_of = defaultdict(list)
    for record in _read(folder, "real"):
        summaries_of[record["device"], record["setting"]].append(record["summary"])
    rows: list[Sequence[str]] = []
    for (device, setting), (command, timed_setting, where) in runs.items():
        summaries = summaries_of[device, setting]
        if not summaries:
            rows.append((task, SMALL, "", NOT_MEASURED, command))
            continue

        before = mean(summary["exact_match_before"] for summary in summaries)
        after = interval([summary["exact_match_after"] for summary in summaries])
        timed_summaries = summaries_of[device, timed_setting] or summaries
        minutes = _minutes(mean(summary["seconds"] for summary in timed_summaries)) + where
        scores = f"{before:.3f} → {shown(after)}, {len(summaries)} seeds"
        rows.append((task, SMALL, minutes, scores, command))
    return rows


def _langgraph(folder: Path) -> Sequence[str]:
    """A real model inside an agent that knows nothing of the training.

    Each seed by itself: one of them gained nothing, which a mean would hide.
    """
    records = _read(folder, "langgraph_agent")
    before = mean(share(record["before"]["correct"]) for record in records)
    after = []
    for record in records:
        right = record["after"]["correct"]
        after.append(_share(right.count("1"), len(right)))
    scores = f"{before:.3f} → {', '.join(after)} on {len(records)} seeds"
    minutes = _minutes(mean(record["seconds"] for record in records))
    task = "to look facts up, inside a LangGraph agent"
    return (task, SMALL, minutes, scores, "`benchmarks/real/langgraph_agent.py`")


def _calculator(folder: Path) -> Sequence[str]:
    """A real model that calls a tool; the seeds of the protocol that has not been replaced."""
    records = [
        record for record in _read(folder, "calculator") if record["seed"] in calculator.SEEDS
    ]
    before = mean(share(record["before"]["right"]) for record in records)
    after = mean(share(record["after"]["right"]) for record in records)
    scores = f"{before:.3f} → {after:.3f}, {len(records)} seeds"
    minutes = _minutes(mean(record["seconds"] for record in records))
    task = "to use a calculator (second protocol)"
    return (task, SMALL, minutes, scores, "`benchmarks/real/calculator.py`")


def _large_llm(folder: Path) -> Sequence[str]:
    """A real model that asks a large LLM, beside the LLM without it."""
    records = _read(folder, "large_llm")
    before = mean(share(record["before"]["correct"]) for record in records)
    after = interval([share(record["after"]["correct"]) for record in records])
    alone = mean(share(record["llm_alone"]["right"]) for record in records)
    scores = f"{before:.3f} → {shown(after)}, {len(records)} seeds; the LLM alone {alone:.3f}"
    minutes = _minutes(mean(record["seconds"] for record in records))
    task = "to ask a 1.5B LLM about chemical elements"
    return (task, SMALL, minutes, scores, "`benchmarks/real/large_llm.py`")


def _conductor(folder: Path) -> Sequence[str]:
    """A real model that leads a large LLM and two functions."""
    (record,) = _read(folder, "conductor_coder")
    task = "to lead a 1.5B LLM, an archive and a calculator"
    return _real_run(record, task, "`benchmarks/real/conductor_coder.py`")


def _real_run(record: Mapping[str, Any], task: str, command: str) -> Sequence[str]:
    """The row of one run with a real model, whose record has a character for each held-out
    question.
    """
    before = share(record["before"]["correct"])
    right = record["after"]["correct"]
    scores = f"{before:.3f} → {_share(right.count('1'), len(right))}"
    return (task, SMALL, _minutes(record["seconds"]), scores, command)


def _demo(folder: Path) -> Sequence[str]:
    """Prompt-R1 against the scripted large model."""
    summary = _read(folder, "demo")[-1]["summary"]
    scores = _before_and_after(summary)
    return ("to ask in two hops", TINY, _minutes(summary["seconds"]), scores, "`make demo`")


def _harnesses(folder: Path) -> list[Sequence[str]]:
    """Command-line agents that train unchanged."""
    records = _read(folder, "harness_world")
    rows: list[Sequence[str]] = []
    for harness, summary in harness_world.summarise(records).items():
        seconds = mean(record["seconds"] for record in records if record["harness"] == harness)
        scores = (
            f"{summary['before']['mean']:.3f} → {summary['after']['mean']:.3f}, "
            f"gain {shown(summary['gain'], '+')}"
        )
        task = f"to use a tool inside `{harness}`"
        command = "`benchmarks/learning/harness_world.py`"
        rows.append((task, TINY, _minutes(seconds), scores, command))
    return rows


def _espl(folder: Path) -> Sequence[str]:
    """Weights and system prompts together, sixteen seeds."""
    summary = league.summarise(_read(folder, "league_two"))["rules, easy"]["joint"]
    scores = f"{summary['base, first']:.3f} → {shown(summary)}"
    task = "house rules, by weights and prompts"
    return (task, TINY, "", scores, "`benchmarks/learning/league.py`")


def _before_and_after(summary: Mapping[str, Any]) -> str:
    low, high = summary["interval_after"]
    after = summary["exact_match_after"]
    return f"{summary['exact_match_before']:.3f} → {after:.3f} [{low:.3f}, {high:.3f}]"


def _share(right: int, count: int) -> str:
    estimate = wilson_interval(right, count)
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _minutes(seconds: float) -> str:
    return f"{max(1, round(seconds / 60))} min"
