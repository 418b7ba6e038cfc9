"""A report that is written again while its run goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from .page import write_report

logger = logging.getLogger(__name__)


def watch_report(
    run: str | Path,
    output: str | Path | None = None,
    max_trajectories: int = 20_000,
    wait: Callable[[], Any] = partial(time.sleep, 5),
) -> Path:
    """Write the report again whenever the run has written something, until Ctrl-C.

    The run may not have begun yet.

    Args:
        run (`str` or `Path`): The run's folder, as in [`write_report`].
        output (`str` or `Path`, *optional*): The folder of the page, as in [`write_report`].
        max_trajectories (`int`, *optional*, defaults to `20000`): The most trajectories on the
            page.
        wait (`Callable`, *optional*): Called between two checks. By default it sleeps for five
            seconds.

    Returns:
        `Path`: The page.
    """
    folder = Path(run)
    # The page is where `write_report` puts it.
    page_folder = Path(output) if output is not None else folder / "report"
    page = page_folder / "index.html"
    # The page reloads itself, and has no pictures beside it.
    write = partial(write_report, folder, output, max_trajectories, pictures=False, watch=True)
    last_state: set[tuple[str, int, int]] = set()
    problem = ""
    with suppress(KeyboardInterrupt):
        # Write the page whenever a file of the run has changed.
        while True:
            state = _state_of_files(folder, page)
            if state != last_state:
                last_state = state
                last_problem = problem
                problem = _write(write, last_problem)
                # Each problem is logged once, and not again while it lasts.
                if problem not in ("", last_problem):
                    logger.warning("the page stays as it was: %s", problem)
            wait()
    return page


def _state_of_files(run: Path, page: Path) -> set[tuple[str, int, int]]:
    """Return name, time and size of the run's files, without the page itself."""
    # The folders that a run writes to.
    folders = [run, run / "rollouts", run / "evaluation", *run.glob("checkpoint-*")]
    state = set()
    for folder in folders:
        for path in folder.glob("*"):
            if path == page:
                continue
            with suppress(FileNotFoundError):  # the run may have just removed it
                if path.is_file():
                    stat = path.stat()
                    state.add((str(path), stat.st_mtime_ns, stat.st_size))
    return state


def _write(write: Callable[[], Any], last_problem: str) -> str:
    """Call `write` and return its error; an empty text if there is none, `last_problem` if a file
    is missing.
    """
    try:
        write()
    except FileNotFoundError:  # the run has written nothing yet, or has just removed a file
        return last_problem
    except (ValueError, OSError) as error:  # a damaged file, a full disk: it may work later
        return str(error)
    return ""
