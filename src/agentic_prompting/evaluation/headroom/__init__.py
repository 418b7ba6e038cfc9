"""Headroom: how much can be gained on a task, and whether a signal to gain it exists, before money
is spent.

The statistics are pure functions of scores: [`judge_prompts`] in two stages, [`measure_groups`] for
GRPO, [`measure_ceiling`] for an oracle's choice. This is the only part of the package that imports
scipy, which is slow; therefore `evaluation` does not import it, and it has to be imported by its
own name.
"""

from ..headroom_figures import HEADROOM_FILE, Figure, HeadroomFigures
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
from .result import Headroom
from .settings import HeadroomSettings

__all__ = [
    "HEADROOM_FILE",
    "Ceiling",
    "Figure",
    "Gain",
    "GroupSignal",
    "Headroom",
    "HeadroomFigures",
    "HeadroomSettings",
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
