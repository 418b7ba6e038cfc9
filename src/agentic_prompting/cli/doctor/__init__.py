"""`agentic-prompting doctor`: a table of checks (`table.py`), each a small function that yields findings."""

from .command import doctor

__all__ = ["doctor"]
