"""`agentic-prompting data`: the data sets there are, one of them in full, and whether their sources are as recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer


class Action(StrEnum):
    """What to do."""

    list = "list"
    show = "show"
    check = "check"


def data(
    action: Annotated[Action, typer.Argument(help="list all, show one in full, or check the records.")],
    names: Annotated[list[str] | None, typer.Argument(help="Data sets; check takes all by default.")] = None,
    online: Annotated[
        bool, typer.Option("--online", help="check: ask the hub; streams one row of each split.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")] = False,
) -> int:
    """List the data sets, show one, or check them against their sources."""
    from ..data import TASKS, check_sources, check_table, describe_task, list_tasks

    if action.value == "list":
        print(_as_json(TASKS) if as_json else list_tasks())
        return 0
    if action.value == "show":
        if not names:
            raise ValueError("say which data set: agentic-prompting data show NAME; `data list` shows their names")
        print(_as_json(names) if as_json else "\n\n".join(map(describe_task, names)))
        return 0
    checks = check_sources(names or (), online)
    wrong = [check for check in checks if check.problem]
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}))
        return int(bool(wrong))
    print(check_table(checks if online else wrong) if online or wrong else f"{len(checks)} records are consistent")
    return int(bool(wrong))


def _as_json(names: Iterable[str]) -> str:
    """The sets with their splits (rows), metrics, sources and licence."""
    from ..data.loading import find_task

    found = [find_task(name)[::2] for name in names]
    sets = [
        {
            "name": name,
            "splits": dict(task.expected_rows),
            "metrics": list(task.metrics),
            "sources": list(map(str, task.sources)),
            "licence": task.licence,
        }
        for name, task in found
    ]
    return json.dumps({"sets": sets}, ensure_ascii=False)
