"""Prompt optimisers to compare with, each with the same number of calls to spend: OPRO, GEPA,
TextGrad, E-SPL.

GEPA and TextGrad are their authors' packages (extra `[optimizers]`) with our [`ChatModel`]s as
their engines; OPRO is its published algorithm; E-SPL is [`~evolution.evolve`], prompts alone.
"""

from collections.abc import Callable, Mapping, Sequence

from agentic_prompting.evaluation.systems import Row

from .common import Found, Objective
from .espl import optimise_espl
from .gepa import optimise_gepa
from .opro import optimise_opro
from .textgrad import optimise_textgrad

OPTIMISERS: Mapping[str, Callable[..., Found]] = {
    "opro": optimise_opro,
    "gepa": optimise_gepa,
    "textgrad": optimise_textgrad,
    "espl": optimise_espl,
}
"""By name: functions of an [`Objective`] and the prompt to begin with."""


def calls_to_score_once(
    optimiser: str, rows: Sequence[Row], validation: Sequence[Row] | None = None
) -> int:
    """The calls that an optimiser needs for the score of its first prompt, before it can change it.

    Args:
        optimiser (`str`): One of [`OPTIMISERS`].
        rows (`Sequence[Mapping]`): Its training rows.
        validation (`Sequence[Mapping]`, *optional*): As for [`Objective`].
    """
    if optimiser == "opro":
        return len(rows)
    if optimiser in ("gepa", "textgrad"):
        return len(rows) - len(rows) // 2 if validation is None else len(validation)
    return 0  # E-SPL samples problems, and stops by itself


__all__ = [
    "OPTIMISERS",
    "Found",
    "Objective",
    "calls_to_score_once",
    "optimise_espl",
    "optimise_gepa",
    "optimise_opro",
    "optimise_textgrad",
]
