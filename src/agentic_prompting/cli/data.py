"""`agentic-prompting data`: list the data sets, show one, or check them against their sources."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated, Literal

from typer import Argument, Option


def data(
    action: Annotated[
        Literal["list", "show", "check"],
        Argument(help="What to do: list all, show one in full, or check the records."),
    ],
    names: Annotated[
        list[str] | None, Argument(help="Data sets; check takes all by default.")
    ] = None,
    online: Annotated[
        bool,
        Option("--online", help="With check: ask the hub, too; streams one row of each split."),
    ] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print one JSON object instead of text.")
    ] = False,
) -> int:
    """List the data sets, show one, or check them against their sources."""
    if online and action != "check":
        raise ValueError(f"--online would have no effect: it is for `data check`, not {action}")
    if names and action == "list":
        raise ValueError(
            f"`data list` shows all data sets: agentic-prompting data show {' '.join(names)}"
        )
    from ..data import TASKS, check_sources, check_table, describe_task, list_tasks

    if action == "list":
        print(_sets_as_json(TASKS) if as_json else list_tasks())
        return 0
    if action == "show":
        if not names:
            raise ValueError(
                "name the data set: agentic-prompting data show NAME; `data list` shows all names"
            )
        print(_sets_as_json(names) if as_json else "\n\n".join(map(describe_task, names)))
        return 0

    # Compare the records with their sources.
    checks = check_sources(names or (), online)
    problems = [check for check in checks if check.problem]
    if as_json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}))
    else:
        # Only an online check lists what is consistent.
        listed_checks = checks if online else problems
        print(
            check_table(listed_checks) if listed_checks else f"{len(checks)} records are consistent"
        )
    # The exit status says whether any check has found a problem.
    return 1 if problems else 0


def _sets_as_json(names: Iterable[str]) -> str:
    """The sets with their splits (rows), metrics, sources and licence."""
    from ..data import find_task

    sets = []
    for requested in names:
        name, _, task = find_task(requested)
        sets.append(
            {
                "name": name,
                "splits": dict(task.expected_rows),
                "metrics": list(task.metrics),
                "sources": [str(source) for source in task.sources],
                "licence": task.licence,
            }
        )
    return json.dumps({"sets": sets}, ensure_ascii=False)
