"""The grammars of this package by name: the one table for settings, command lines and saved agents.

`interop.ToolGrammar` is not in the table, because an environment brings it and nothing names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .ask_grammar import AskGrammar
from .grammar import FreeText, QuestionGrammar, TagGrammar

GRAMMARS: Mapping[str, type[Any]] = {
    "tags": TagGrammar,
    "ask": AskGrammar,
    "question": QuestionGrammar,
    "free": FreeText,
}


def find_grammar_class(class_name: str) -> type[Any] | None:
    """Return the grammar with a class name, as saved agents have it; `None` if it is not ours."""
    for grammar_class in GRAMMARS.values():
        if grammar_class.__name__ == class_name:
            return grammar_class
    return None
