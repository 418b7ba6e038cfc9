"""The `agentic-prompting` command. A sub-command is a function in a file of its own, named in `main.py`'s table."""

from .main import main

__all__ = ["main"]
