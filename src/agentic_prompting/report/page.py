"""A run as one HTML file: our own page, style and script, and the run's data in inert blocks.

Text of a model cannot run, for two independent reasons: data is packed and shown with `textContent` only, and
the page's content security policy allows our own script by its hash, no other, and no network.
"""

from __future__ import annotations

import base64
import difflib
import gzip
import hashlib
import json
import logging
import random
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..evaluation import (
    Evaluation,
    compare_runs,
    compare_systems,
    differences_table,
    repeats_table,
    results_table,
)
from ..evolution import Lineage, plot_lineage
from ..evolution.lineage import LINES, Node
from ..records import Record, atomic_write
from ..refine import RefinementResult
from .plots import PANELS, panels_in, plot_panels
from .summary import (
    RunSummary,
    cost_points,
    exact_match_of_record,
    first_scores,
    groups_of,
    reward_parts,
    total_reward,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Change = Literal["=", "-", "+"]
Block = tuple[str, Any]
"""Data of the page: its name for the page's script, and its content."""

TRAJECTORIES, STORIES, REFINEMENTS, ANSWERS = 200, 20, 50, 200
"""The number of items in each compressed piece of data."""

_TITLE = 140  # characters of a question in a list
_PAGE = Path(__file__).parent / "page"
# In the order in which they need each other.
_SCRIPTS = (
    "base",
    "charts",
    "browser",
    "trajectories",
    "stories",
    "tree",
    "refinements",
    "answers",
    "main",
)
# With the blanks behind them, so that unchanged blanks part no changes; a line's end is none: the last line has none.
_WORDS = re.compile(r"\w+[^\S\n]*|[^\w\s][^\S\n]*|\s+")
_LINES = re.compile(r"[^\n]*\n|[^\n]+")
_MOST_WORDS = (
    3000  # the comparison is quadratic: longer texts are compared by lines, then as wholes
)


def write_report(
    run: str | Path | Sequence[str | Path],
    output: str | Path | None = None,
    max_trajectories: int = 20_000,
    pictures: bool = True,
    watch: bool = False,
) -> Path:
    """Write the report of a run, or of several side by side.

    It shows whatever the run has: `rollouts/` as curves and a browser of trajectories, the trainer's log as curves,
    `population.json` (or the checkpoint of [`evolve`]) as an evolutionary tree, ProRefine's results (`*.jsonl`) as
    diffs of its prompts, `summary.json` as the held-out result, the answers of [`evaluate_agent`] (`*.jsonl`) with
    tables, intervals and paired tests. Several runs have their curves in the same charts, paired evaluations, and a
    chart of scores against costs.

    Args:
        run (`str`, `Path` or a list of them): A run's output folder, or a single file of results or of a population.
        output (`str` or `Path`, *optional*): Folder to write to; `report` in the (first) run's folder by default,
            `comparison` for several.
        max_trajectories (`int`, *optional*, defaults to `20000`): The most trajectories on the page, chosen evenly from
            the run; curves are made of all.
        watch (`bool`, *optional*, defaults to `False`): The page reloads itself while it is not in use.
        pictures (`bool`, *optional*, defaults to `True`): Write PNGs as well, which needs matplotlib.

    Returns:
        `Path`: The HTML file. It needs no network and no other file.

    Raises:
        `FileNotFoundError`: If there is no such run, or nothing in it that a report could show.
        `ValueError`: If a population cannot be read.
    """
    runs = [Path(run)] if isinstance(run, str | Path) else [Path(one) for one in run]
    found, several = RunSummary.read(runs[0]), len(runs) > 1
    home = runs[0].parent if runs[0].is_file() else runs[0]
    folder = Path(output) if output is not None else home / ("comparison" if several else "report")
    page = folder / "index.html"
    if several:
        others = [RunSummary.read(one) for one in runs[1:]]
        atomic_write(page, render_page(f"{len(runs)} runs", compared_blocks([found, *others])))
    else:
        atomic_write(page, render_page(found.name, blocks_of(found, max_trajectories, watch)))
    if pictures and not several:
        for mode in ("train", "optimisation"):
            plot_panels(found.history.get(mode, []), folder)
        if found.lineage:
            plot_lineage(found.lineage, folder / "tree.png")
    return page


def watch_report(
    run: str | Path,
    output: str | Path | None = None,
    max_trajectories: int = 20_000,
    wait: Callable[[], Any] = partial(time.sleep, 5),
) -> Path:
    """Write the report again whenever the run has written something, until Ctrl-C. The run may not have begun yet.

    Args:
        run (`str` or `Path`): The run's folder, as in [`write_report`].
        output (`str` or `Path`, *optional*): The folder of the page, as in [`write_report`].
        max_trajectories (`int`, *optional*, defaults to `20000`): The most trajectories on the page.
        wait (`Callable`, *optional*): Called between two checks. By default it sleeps for five seconds.

    Returns:
        `Path`: The page.
    """
    folder = Path(run)
    page = (Path(output) if output is not None else folder / "report") / "index.html"
    write = partial(write_report, folder, output, max_trajectories, pictures=False, watch=True)
    seen: set[tuple[str, int, int]] = set()
    problem = ""
    with suppress(KeyboardInterrupt):
        while True:
            looked = [
                folder,
                folder / "rollouts",
                folder / "evaluation",
                *folder.glob("checkpoint-*"),
            ]
            files = [
                path
                for place in looked
                for path in place.glob("*")
                if path.is_file() and path != page
            ]
            there = {(str(path), *_state(path)) for path in files}
            if there != seen:
                seen, before, problem = there, problem, _problem_of(write, problem)
                if problem not in ("", before):
                    logger.warning("the page stays as it was: %s", problem)
            wait()
    return page


def _problem_of(write: Callable[[], Any], before: str) -> str:
    """Call `write` and return its error in words; an empty text if there is none, `before` if a file is missing."""
    try:
        write()
    except FileNotFoundError:  # the run has written nothing yet, or has just removed a file
        return before
    except (
        ValueError,
        OSError,
    ) as error:  # a damaged file, a full disk: the next attempt may succeed
        return str(error)
    return ""


def _state(path: Path) -> tuple[int, int]:
    """Time and size of a file, which change with it; zeros if the run has just removed it."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def render_page(title: str, blocks: Iterable[Block]) -> str:
    """The whole page around its data."""
    from jinja2 import Environment, FileSystemLoader

    style = (_PAGE / "page.css").read_text(encoding="utf-8")
    script = '"use strict";\n' + "\n".join(
        (_PAGE / f"{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS
    )
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'"
    )
    page = Environment(loader=FileSystemLoader(_PAGE), autoescape=True).get_template("page.html")
    packed = ((name, pack(data)) for name, data in blocks)
    return page.render(title=title, policy=policy, style=style, script=script, blocks=packed)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def pack(data: Any) -> str:
    """Data as base64 of compressed JSON: no `<`, quote or ampersand, whatever a model wrote, so nothing to escape.

    It is also a tenth of the size, and the browser unpacks a piece only when it is shown. Lone surrogates
    survive, as JSON's escapes.
    """
    # The same data gives the same page: no time stamp.
    return base64.b64encode(
        gzip.compress(json.dumps(data, separators=(",", ":")).encode(), 6, mtime=0)
    ).decode()


# --- data ------------------------------------------------------------------------------------------------------------


def blocks_of(run: RunSummary, max_trajectories: int, watch: bool = False) -> Iterator[Block]:
    """The data of a run's page, in the order of its sections."""
    about = {
        "name": run.name,
        "folder": run.folder,
        "sandbox": run.sandbox,
        "heldOut": run.held_out,
    }
    about |= {"rollouts": len(run.rollouts)}
    yield "run", {**about, "watch": watch}
    if any(run.history.values()):
        panels = [
            panel._asdict()
            for panel in PANELS
            if any(panel in panels_in(log) for log in run.history.values())
        ]
        panels[1:1] = _own_panels(run)
        yield (
            "history",
            {"panels": panels, "modes": run.history, "dashes": [dashes for _, dashes in LINES]},
        )
    if run.lineage:
        yield from _lineage(run.lineage)
    if run.rollouts:
        yield from _trajectories(run.rollouts, max_trajectories)
    if run.refinements:
        yield from _refinements(run.refinements)
    if run.evaluation:
        yield from _front([run], [run.name])
        yield from _evaluation(run.evaluation)


def _own_panels(run: RunSummary) -> list[dict[str, Any]]:
    """Panels whose lines depend on the run: reward and exact match of several environments, and pass@k."""
    found = dict.fromkeys(key for log in run.history.values() for entry in log for key in entry)
    titles = {
        "reward in ": "mean reward by environment",
        "exact_match in ": "exact match by environment",
    }
    panels = []
    for prefix, title in {**titles, "pass@": "pass@k: a right answer among k"}.items():
        keys = {key: key.removeprefix(prefix) for key in sorted(found) if key.startswith(prefix)}
        if prefix == "pass@":
            keys = {
                key: f"k = {k}" for key, k in sorted(keys.items(), key=lambda pair: int(pair[1]))
            }
        panels += [{"name": title.replace(" ", "_"), "title": title, "keys": keys}] if keys else []
    return panels


def compared_blocks(runs: Sequence[RunSummary]) -> Iterator[Block]:
    """The data of a page of several runs: every curve that any of them has, a line for each."""
    if len(runs) > len(LINES):
        raise ValueError(f"at most {len(LINES)} runs can be told apart in a chart, got {len(runs)}")
    names = short_names([run.folder for run in runs])
    panels, entries = [], defaultdict[float, dict[str, float]](dict)
    for mode, of_mode in (("train", ""), ("optimisation", ""), ("eval", "evaluation: ")):
        for panel, key, label in ((one, *pair) for one in PANELS for pair in one.keys.items()):
            keys = {f"{of_mode}{key} {number}": name for number, name in enumerate(names)}
            points = [
                (entry["step"], column, entry[key])
                for column, run in zip(keys, runs, strict=True)
                for entry in run.history.get(mode, ())
                if key in entry
            ]
            for step, column, value in points:
                entries[step][column] = value
            if any(value for *_, value in points):
                title = panel.title if len(panel.keys) == 1 else f"{panel.title}: {label}"
                panels.append({"name": panel.name, "title": of_mode + title, "keys": keys})
    evaluations = [
        (name, run.evaluation) for name, run in zip(names, runs, strict=True) if run.evaluation
    ]
    differences = [
        row
        for (first, one), (second, other) in combinations(evaluations, 2)
        for row in differences_table(compare_runs(one, other, (first, second)))
    ]
    held_out = [[name, *row] for name, run in zip(names, runs, strict=True) for row in run.held_out]
    about = {"folder": runs[0].folder, "sandbox": any(run.sandbox for run in runs), "heldOut": []}
    yield "run", {"name": " · ".join(names), **about}
    yield (
        "comparison",
        {
            "folders": [run.folder for run in runs],
            "panels": panels,
            "entries": [{"step": step, **entries[step]} for step in sorted(entries)],
            "dashes": [dashes for _, dashes in LINES],
            "heldOut": held_out,
            "intervals": _intervals(
                [(f"{name}: ", evaluation) for name, evaluation in evaluations]
            ),
            "differences": differences,
        },
    )
    yield from _front(runs, names)


def _front(runs: Sequence[RunSummary], names: Sequence[str]) -> Iterator[Block]:
    """Score against dollars, where there are several points and anything costs anything."""
    points = cost_points(runs, names)
    if len(points) > 1 and any(point.usd for point in points):
        yield "front", [point._asdict() for point in points]


def short_names(folders: Sequence[str]) -> list[str]:
    """What tells these folders apart: the paths without the folders that all of them are in."""
    parts = [Path(folder).parts for folder in folders]
    while min(map(len, parts)) > 1 and len({path[0] for path in parts}) == 1:
        parts = [path[1:] for path in parts]
    return ["/".join(path) for path in parts]


def _evaluation(evaluation: Evaluation) -> Iterator[Block]:
    """Tables as they are printed, every pair of systems tested, and each answer."""
    systems = list(dict.fromkeys(result.system for result in evaluation.results))
    pairs = set(combinations(systems, 2))
    compared = [
        one
        for name in systems
        for one in compare_systems(evaluation, name)
        if (name, one.first) in pairs
    ]
    records = evaluation.records
    columns: dict[str, Any] = {
        name: [record[name] for record in records] for name in ("system", "task", "run", "place")
    }
    columns["title"] = [str(record["question"])[:_TITLE] for record in records]
    columns["match"] = first_scores(evaluation)
    tables = {"results": results_table(evaluation), "repeats": repeats_table(evaluation)}
    tables["differences"] = differences_table(compared)
    yield (
        "evaluation",
        {
            **tables,
            "intervals": _intervals([("", evaluation)]),
            "chunk": ANSWERS,
            "columns": columns,
        },
    )
    names = (
        "question",
        "answers",
        "answer",
        "whole",
        "error",
        "calls",
        "tokens",
        "cost_usd",
        "seconds",
    )
    kept = [
        {name: record[name] for name in names if record.get(name) is not None} for record in records
    ]
    yield from _chunks("answers", kept, ANSWERS)


def _intervals(evaluations: Iterable[tuple[str, Evaluation]]) -> list[dict[str, Any]]:
    """For each task and its first metric, where that is a share, the systems with mean and interval."""
    figures: dict[tuple[str, str], list[tuple[str, float, float, float]]] = defaultdict(list)
    for before, result in (
        (before, result) for before, evaluation in evaluations for result in evaluation.results
    ):
        metric, found = next(iter(result.estimates.items()))
        if found and 0 <= found.low <= found.high <= 1:
            figures[result.task, metric].append(
                (before + result.system, found.mean, found.low, found.high)
            )
    return [
        {"task": task, "metric": metric, "systems": systems}
        for (task, metric), systems in figures.items()
    ]


def _chunks(name: str, items: Sequence[Any], size: int) -> Iterator[Block]:
    """`items` in blocks of `size` each, `<name>-0`, `<name>-1`, ..."""
    return (
        (f"{name}-{start // size}", items[start : start + size])
        for start in range(0, len(items), size)
    )


def sample_evenly(records: Sequence[T], most: int) -> list[T]:
    """At most `most` records, drawn over the whole run, in their order. The same ones each time."""
    if len(records) <= most:
        return list(records)
    return [records[place] for place in sorted(random.Random(0).sample(range(len(records)), most))]


def _trajectories(all_records: Sequence[Record], most: int) -> Iterator[Block]:
    """An index to filter by, and the texts in chunks."""
    groups, advantages = groups_of(all_records)
    places = sample_evenly(range(len(all_records)), most)
    records = [all_records[place] for place in places]
    columns: dict[str, Any] = {
        "number": places,
        "group": [groups[place] for place in places],
        "advantage": [advantages[place] for place in places],
        "step": [record["step"] for record in records],
        "mode": [record.get("mode", "train") for record in records],
        "status": [record["status"] for record in records],
        "task": [str(record.get("task") or "") for record in records],
        "reward": [total_reward(record) for record in records],
        "match": [exact_match_of_record(record) for record in records],
        "turns": [len(record["turns"]) for record in records],
        "prompt": [record.get("system_prompt") for record in records],
        "title": [str(record.get("question") or "")[:_TITLE] for record in records],
    }
    yield "trajectories", {"total": len(all_records), "chunk": TRAJECTORIES, "columns": columns}
    yield from _chunks("trajectories", [_trajectory(record) for record in records], TRAJECTORIES)


def _trajectory(record: Record) -> dict[str, Any]:
    """What one opened trajectory shows, the reward in its parts included."""
    names = (
        "question",
        "answers",
        "answer",
        "error",
        "turns",
        "observations",
        "tokens",
        "cost_usd",
        "run",
    )
    kept = {name: record[name] for name in names if record.get(name) is not None}
    # A browser's numbers end at 2**53, seeds do not.
    return {**kept, "seed": str(record.get("seed", "")), "parts": reward_parts(record)}


def _lineage(lineage: Lineage) -> Iterator[Block]:
    """One entry per prompt, with the diff to each of its parents. What led to it is in chunks."""
    texts = [node.member.prompt.text for node in lineage.nodes]
    refused = [
        [one[name] for name in ("step", "operator", "reason", "parents")] for one in lineage.refused
    ]
    told = any(node.story for node in lineage.nodes) or bool(lineage.refused)
    nodes = [_prompt(node, texts) for node in lineage.nodes]
    yield (
        "lineage",
        {
            "nodes": nodes,
            "window": lineage.window,
            "chunk": STORIES if told else None,
            "refused": refused,
        },
    )
    if told:
        yield from _chunks("stories", [node.story for node in lineage.nodes], STORIES)


def _prompt(node: Node, texts: Sequence[str]) -> dict[str, Any]:
    prompt, rating = node.member.prompt, node.member.rating
    return {
        "operator": prompt.operator,
        "born": prompt.born_at,
        "parents": list(prompt.parents),
        "mu": rating.mu,
        "sigma": rating.sigma,
        "matches": node.member.matches,
        "lane": node.lane,
        "alive": node.in_window,
        "best": node.best,
        "counts": node.counts,
        "heldOut": node.member.held_out,
        "text": prompt.text,
        "diffs": [word_diff(texts[parent], prompt.text) for parent in prompt.parents],
    }


def _refinements(results: Sequence[RefinementResult]) -> Iterator[Block]:
    """ProRefine's results: each query's steps, each step's change of the prompt as a diff."""
    columns: dict[str, Any] = {
        "title": [result.query[:_TITLE] for result in results],
        "stop": [result.stop_reason for result in results],
        "verdict": [result.verdict for result in results],
        "steps": [len(result.steps) for result in results],
        "changed": [
            sum(step.new_prompt != step.prompt for step in result.steps) for result in results
        ],
    }
    yield "refinements", {"chunk": REFINEMENTS, "columns": columns}
    yield from _chunks("refinements", [_refinement(result) for result in results], REFINEMENTS)


def _refinement(result: RefinementResult) -> dict[str, Any]:
    steps = [
        {name: getattr(step, name) for name in ("output", "complete", "feedback", "problem")}
        | {
            "diff": word_diff(step.prompt, step.new_prompt)
            if step.new_prompt != step.prompt
            else None
        }
        for step in result.steps
    ]
    return {
        "query": result.query,
        "prompt": result.initial_prompt,
        "first": result.initial_answer,
        "answer": result.answer,
        "error": None if result.error is None else str(result.error),
        "steps": steps,
        "diff": word_diff(result.initial_prompt, result.prompt),
    }


def word_diff(old: str, new: str) -> list[tuple[Change, str]]:
    """The pieces of both texts in reading order: `=` in both, `-` gone, `+` new.

    The pieces marked `=` and `-` put together are `old`, those marked `=` and `+` are `new`.

    Example:

        >>> word_diff("Check small cases.", "Check all cases.")
        [('=', 'Check '), ('-', 'small '), ('+', 'all '), ('=', 'cases.')]
    """
    for words in (_WORDS, _LINES):
        before, after = words.findall(old), words.findall(new)
        if len(before) + len(after) <= _MOST_WORDS:
            break
    else:
        before, after = [old], [new]
    changes: list[tuple[Change, str]] = []
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    for kind, start, end, new_start, new_end in matcher.get_opcodes():
        gone, new = "".join(before[start:end]), "".join(after[new_start:new_end])
        pieces: list[tuple[Change, str]] = (
            [("=", gone)] if kind == "equal" else [("-", gone), ("+", new)]
        )
        changes += [piece for piece in pieces if piece[1]]
    return changes
