"""Records of a run as far as they can be shown: a line that is damaged is left out, and named.

A run's files are written by programs that get killed, and are edited by people. One bad line is no
reason to show nothing of a run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..records import Record
from ..refine import RefinementResult
from ..rollout.recording import rollout_lines

logger = logging.getLogger(__name__)

Check = Callable[[Any], bool]


def is_number(value: object) -> bool:
    """Return whether JSON and a chart can hold it: finite, and neither text nor truth value."""
    # A bool is an int to Python, and infinity is not JSON.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def is_step(value: object) -> bool:
    """Return whether it is a whole number from 0."""
    # Numbers in a browser are exact below 2**53.
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def is_text(value: object) -> bool:
    """Return whether it is a text."""
    return isinstance(value, str)


def _maybe(check: Check) -> Check:
    # A field that is missing is `None`, too.
    return lambda value: value is None or check(value)


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _object(fields: Mapping[str, Check], needed: Iterable[str] = ()) -> Check:
    return lambda value: isinstance(value, dict) and _first_wrong(value, fields, needed) is None


def _first_wrong(
    record: Mapping[str, Any], fields: Mapping[str, Check], needed: Iterable[str]
) -> str | None:
    # Fields that are missing come first, then those with a wrong value.
    for name in needed:
        if name not in record:
            return name
    for name, is_valid in fields.items():
        if not is_valid(record.get(name)):
            return name
    return None


# Parts of the records below.
_TURN = _object({"text": is_text, "kind": _maybe(is_text), "problem": _maybe(is_text)}, ("text",))
_OBSERVATION = _object(
    {"text": _maybe(is_text), "error": _maybe(is_text), "seconds": _maybe(is_number)}
)
_COUNTS = {"agent": _maybe(is_number), "observation": _maybe(is_number)}
ROLLOUT: dict[str, Check] = {
    "step": is_step,
    "status": is_text,
    "turns": _list_of(_TURN),
    "observations": _maybe(_list_of(_OBSERVATION)),
    "run": _maybe(is_number),
    "mode": _maybe(is_text),
    "question": _maybe(is_text),
    "answers": _maybe(_list_of(is_text)),
    "answer": _maybe(is_text),
    "returned": _maybe(lambda value: isinstance(value, dict)),
    "error": _maybe(_object({"kind": _maybe(is_text), "what": _maybe(is_text)})),
    "reward": _maybe(is_number),
    "rewards": _maybe(
        lambda value: isinstance(value, dict) and all(map(_maybe(is_number), value.values()))
    ),
    "cost_usd": _maybe(is_number),
    "worth_usd": _maybe(is_number),
    "system_prompt": _maybe(is_step),
    "tokens": _maybe(_object(_COUNTS)),
}
"""The fields of [`rollout_record`] that the report reads, each with what it must be."""
LOG_ENTRY: dict[str, Check] = {"step": is_step, "run": _maybe(is_number)}
"""The fields of an entry of the trainer's log that it is sorted by."""

ANSWER: dict[str, Check] = {
    "system": is_text,
    "task": is_text,
    "run": is_step,
    "place": is_step,
    "question": is_text,
    "answers": lambda value: value != [] and _list_of(is_text)(value),
    "answer": _maybe(is_text),
    "whole": _maybe(is_text),
    "error": _maybe(is_text),
    "trajectory": _maybe(
        _object(
            {
                "turns": _maybe(_list_of(_TURN)),
                "steps": _maybe(is_number),
                "returned": _maybe(lambda value: isinstance(value, dict)),
            }
        )
    ),
    "calls": _maybe(is_number),
    "tokens": _maybe(is_number),
    "cost_usd": _maybe(is_number),
    "worth_usd": _maybe(is_number),
    "seconds": _maybe(is_number),
}
"""The fields of an evaluation's record."""
_STEP = _object(
    {
        "prompt": is_text,
        "new_prompt": is_text,
        "output": _maybe(is_text),
        "feedback": _maybe(is_text),
        "problem": _maybe(is_text),
    }
)
REFINEMENT: dict[str, Check] = {
    "query": is_text,
    "initial_prompt": is_text,
    "prompt": is_text,
    "answer": is_text,
    "stop_reason": is_text,
    "initial_answer": _maybe(is_text),
    "verdict": _maybe(is_text),
    "format": _maybe(is_number),
    "steps": _list_of(_STEP),
}
"""The fields of a refinement result that are shown."""
_FIELDS_WITH_DEFAULTS = {
    "run",
    "mode",
    "format",
    "calls",
    "tokens",
    "cost_usd",
    "worth_usd",
    "seconds",
}
"""Fields that may be missing, so `null` is left out of a record."""


def read_sound_answers(path: Path) -> list[Record]:
    """Return the answers of an evaluation in a file; none if it is a file of another kind."""
    # These four fields tell an answer from every other.
    keys = ("system", "task", "run", "place")
    if not any(set(keys) <= set(record) for record in _read_objects(path)):
        return []

    # If a question was asked again, its last answer counts.
    answers = {}
    for record in sound_objects(path, ANSWER):
        answers[tuple(record[key] for key in keys)] = record
    return list(answers.values())


def read_sound_refinements(path: Path) -> list[RefinementResult]:
    """ProRefine's results in a file; none if it is a file of another kind."""
    # A file without a single result is of another kind, and no reason for a warning.
    if not any({"query", "steps"} <= set(record) for record in _read_objects(path)):
        return []
    results = []
    for record in sound_objects(path, REFINEMENT):
        with suppress(ValueError):  # the record of a newer version
            results.append(RefinementResult.from_dict(record))
    return results


def _read_objects(path: Path) -> Iterator[Record]:
    """Yield the objects in a file of JSON lines; other lines are passed over silently."""
    with suppress(FileNotFoundError), path.open("rb") as file:
        for line in file:
            # Deeply nested brackets make the JSON parser raise RecursionError.
            with suppress(ValueError, RecursionError):
                record = json.loads(line)
                if isinstance(record, dict):
                    yield record


def read_sound_rollouts(folder: str | Path) -> Iterator[Record]:
    """Return the records of a run's `rollouts/`, as [`read_rollouts`] returns them, without those
    that cannot be shown.

    Each file with such lines is logged once, with the first of them.
    """
    return _sound(rollout_lines(folder), ROLLOUT)


def sound_objects(path: Path, fields: Mapping[str, Check]) -> Iterator[Record]:
    """Return the objects of a file of JSON lines whose `fields` are right; none where there is no
    file.
    """
    if not path.is_file():
        return iter(())
    # The text after the last newline is still being written.
    lines = path.read_bytes().split(b"\n")[:-1]
    numbered = (
        (path, number, line.decode("utf-8", "replace"))
        for number, line in enumerate(lines, start=1)
    )
    return _sound(numbered, fields)


def _sound(lines: Iterable[tuple[Path, int, str]], fields: Mapping[str, Check]) -> Iterator[Record]:
    """Yield the records without those that cannot be shown, of which there is one warning for each
    file.
    """
    # By file: what is wrong with its damaged lines.
    problems: dict[Path, list[str]] = {}
    for path, number, line in lines:
        try:
            # NaN, which JSON does not know, is neither a score nor a number.
            record = json.loads(line, parse_constant=lambda name: None)
        except (ValueError, RecursionError) as error:
            problem: str | None = str(error) or type(error).__name__
        else:
            problem = _find_problem(record, fields)
        if problem is not None:
            problems.setdefault(path, []).append(f"line {number}: {problem}")
            continue
        # `null` would take the place of a default, so it is left out.
        yield {
            name: value
            for name, value in record.items()
            if value is not None or name not in _FIELDS_WITH_DEFAULTS
        }
    # One warning for each file, with the first problem as an example.
    for path, file_problems in problems.items():
        logger.warning(
            "%s: left out %d of its lines, which are no records; %s",
            path,
            len(file_problems),
            file_problems[0],
        )


def _find_problem(record: Any, fields: Mapping[str, Check]) -> str | None:
    """Return what is wrong with a line's content; `None` if nothing is."""
    if not isinstance(record, dict):
        return "it is no object"
    try:
        # A missing field is checked as `null`, which only an optional one may be.
        name = _first_wrong(record, fields, ())
        return None if name is None else f"{name!r} is {json.dumps(record.get(name))[:80]}"
    except RecursionError as error:
        return str(error)
