"""Reads a YAML file of options with errors of one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_options_file(file: Path) -> None:
    """Raise `ValueError` unless a file exists and contains options by name."""
    if not file.is_file():
        raise ValueError(f"{file} does not exist")
    read_options(file)


def read_options(path: Path) -> Mapping[str, Any]:
    """The options of a YAML file by name. Raises `ValueError`, in one line, if it contains none."""
    import yaml

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
    if not isinstance(values, Mapping):
        raise ValueError(f"{path} does not contain options by name")
    return values
