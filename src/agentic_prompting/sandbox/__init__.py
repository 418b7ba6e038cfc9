"""The scripted demo world behind `--sandbox`: no key, no network. It isolates nothing.

Small worlds of real facts, oracle LLMs over them, and training data for a tiny policy. Programs of
others are shut in by `harnesses/bubblewrap.py`.

Modules that need torch or trl are not imported here: `.policy`, `.setup`, `.results`. Neither is
[`OracleServer`]: its module is also a program, and Python warns about programs that their own
package has imported already.
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
