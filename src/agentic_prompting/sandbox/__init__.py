"""The embedded default: small worlds of real facts, oracle LLMs over them, and what a tiny policy learns from.

What needs torch or trl is imported from where it lives: `.policy`, `.setup`, `.results`. So is [`OracleServer`]: its
module is also a program, and Python warns about programs that their own package has imported already.
"""

from .guarded import GuardedOracle, draw_rules, load_guarded_world, split_by_country
from .honest import HonestReflector
from .reflector import GuardedReflector
from .traces import DEFAULT_MIX, make_traces, vocabulary
from .world import (
    Country,
    Oracle,
    Question,
    World,
    all_questions,
    as_rows,
    load_world,
    make_split,
    parse_question,
)

__all__ = [
    "DEFAULT_MIX",
    "Country",
    "GuardedOracle",
    "GuardedReflector",
    "HonestReflector",
    "Oracle",
    "Question",
    "World",
    "all_questions",
    "as_rows",
    "draw_rules",
    "load_guarded_world",
    "load_world",
    "make_split",
    "make_traces",
    "parse_question",
    "split_by_country",
    "vocabulary",
]
