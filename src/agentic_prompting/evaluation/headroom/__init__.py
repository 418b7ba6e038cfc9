"""Headroom before the money: what can be gained on a task, and whether the signal to gain it exists.

The statistics are pure functions of scores: [`judge_prompts`] in two stages, [`measure_groups`] for GRPO,
[`measure_ceiling`] for an oracle's choice. Nothing else in the package imports scipy, so this room does not import this
folder: name it.
"""

from .ceiling import Ceiling, measure_ceiling
from .group_signal import GroupSignal, mean_over_rows, measure_groups, share_of_differing_groups
from .measure import aheadroom, headroom
from .prompts import (
    Gain,
    PromptHeadroom,
    PromptTest,
    StagePlan,
    Verdict,
    choose_challenger,
    compare_prompts,
    decide,
    default_delta,
    expect_further,
    judge_prompts,
    paired_gain,
    plan_stages,
    possible_share,
    route_prompts,
    rows_needed,
)
from .refinement import RefineHeadroom, judge_refinement
from .result import HEADROOM_FILE, Headroom

__all__ = [
    "HEADROOM_FILE",
    "Ceiling",
    "Gain",
    "GroupSignal",
    "Headroom",
    "PromptHeadroom",
    "PromptTest",
    "RefineHeadroom",
    "StagePlan",
    "Verdict",
    "aheadroom",
    "choose_challenger",
    "compare_prompts",
    "decide",
    "default_delta",
    "expect_further",
    "headroom",
    "judge_prompts",
    "judge_refinement",
    "mean_over_rows",
    "measure_ceiling",
    "measure_groups",
    "paired_gain",
    "plan_stages",
    "possible_share",
    "route_prompts",
    "rows_needed",
    "share_of_differing_groups",
]
