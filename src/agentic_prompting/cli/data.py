"""`agentic-prompting data`: list the data sets, show one, or check them against their sources."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from typer import Argument, Option

from .terminal import print_json


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

    if action == "show" and not names:
        raise ValueError(
            "name the data set: agentic-prompting data show NAME; `data list` shows all names"
        )
    if action != "check":
        if as_json:
            print_json({"sets": [_record(name) for name in names or TASKS]})
        elif action == "list":
            print(list_tasks())
        else:
            print("\n\n".join(describe_task(name) for name in names or ()))
        return 0

    # Compare the records with their sources.
    checks = check_sources(names or (), online)
    problems = [check for check in checks if check.problem]
    if as_json:
        print_json({"checks": [asdict(check) for check in checks]})
    else:
        # Only an online check lists what is consistent.
        listed_checks = checks if online else problems
        print(
            check_table(listed_checks) if listed_checks else f"{len(checks)} records are consistent"
        )
    # The exit status says whether any check has found a problem.
    return 1 if problems else 0


def _record(requested: str) -> dict[str, Any]:
    """A set with its splits (rows), metrics, sources and licence."""
    from ..data import find_task

    name, _, task = find_task(requested)
    return {
        "name": name,
        "splits": dict(task.expected_rows),
        "metrics": list(task.metrics),
        "sources": [str(source) for source in task.sources],
        "licence": task.licence,
    }
