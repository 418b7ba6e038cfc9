"""How options of the command are declared: with help, in a panel, their default in the help's own words."""

from __future__ import annotations

from typing import Any

import typer


def option(help: str, panel: str | None = None, *names: str) -> Any:
    """An option.

    Args:
        help (`str`): Its help, the default included.
        panel (`str`, *optional*): Under which heading `--help` shows it.
        *names (`str`): Instead of the parameter's own name.
    """
    return typer.Option(*names, help=help, rich_help_panel=panel, show_default=False)
