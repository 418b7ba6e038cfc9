"""The embedded default: a small world of real facts, an oracle LLM over it, and what a tiny policy learns from.

[`OracleServer`] is imported from `.server`, where it lives: that module is also a program, and Python warns about
programs that their own package has imported already.
"""

from .oracle import Oracle
from .traces import DEFAULT_MIX, make_traces, vocabulary
from .world import Country, Question, World, all_questions, as_rows, load_world, make_split, parse_question

__all__ = [
    "DEFAULT_MIX",
    "Country",
    "Oracle",
    "Question",
    "World",
    "all_questions",
    "as_rows",
    "load_world",
    "make_split",
    "make_traces",
    "parse_question",
    "vocabulary",
]
