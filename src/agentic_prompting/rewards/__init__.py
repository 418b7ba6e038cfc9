"""Rewards: pure functions of what happened in a [`Rollout`], with TRL's reward signature."""

from .answer_checks import check_answers
from .answers import read_answer
from .cost import CostReward
from .judges import GroupJudge, RubricJudge
from .math import math_equal, math_match, math_reward
from .prompt_r1 import PromptR1Reward, PromptR1Score
from .qa import (
    exact_match,
    exact_match_reward,
    normalize_answer,
    scorable,
    search_reward,
    token_f1,
    token_f1_reward,
)
from .reasoning import (
    REASONING_SCORERS,
    AccuracyJudge,
    integer_match,
    letter_match,
    parse_integer,
    read_verdict,
    word_sorting_match,
)

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
    "letter_match",
    "math_equal",
    "math_match",
    "math_reward",
    "normalize_answer",
    "parse_integer",
    "read_answer",
    "read_verdict",
    "scorable",
    "search_reward",
    "token_f1",
    "token_f1_reward",
    "word_sorting_match",
]
