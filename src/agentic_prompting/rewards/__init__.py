"""Scores of answers, and reward functions of rollouts with TRL's signature.

To add one, define it in a module of this package and export it here. A name for the command line is
an entry of `REWARDS` or `SCORES` in `cli/loader.py`.
"""

from .answer_checks import check_answers
from .answers import read_answer
from .cost import CostReward
from .judges import AccuracyJudge, GroupJudge, RubricJudge, read_verdict
from .math import math_equal, math_match, math_reward
from .prompt_r1 import PromptR1Reward, PromptR1Score
from .qa import (
    exact_match,
    exact_match_reward,
    is_scorable,
    normalize_answer,
    token_f1,
    token_f1_reward,
)
from .reasoning import (
    REASONING_SCORERS,
    integer_match,
    letter_match,
    parse_integer,
    word_sorting_match,
)
from .search import search_reward

__all__ = [
    "REASONING_SCORERS",
    "AccuracyJudge",
    "CostReward",
    "GroupJudge",
    "PromptR1Reward",
    "PromptR1Score",
    "RubricJudge",
    "check_answers",
    "exact_match",
    "exact_match_reward",
    "integer_match",
    "is_scorable",
    "letter_match",
    "math_equal",
    "math_match",
    "math_reward",
    "normalize_answer",
    "parse_integer",
    "read_answer",
    "read_verdict",
    "search_reward",
    "token_f1",
    "token_f1_reward",
    "word_sorting_match",
]
