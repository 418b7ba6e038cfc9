"""Reads a YAML file with errors of one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. Raises `ValueError`, in one line, if it is not YAML."""
    import yaml

    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: {error}") from None
