"""Prompt optimisers to compare with, each with the same number of calls to spend: OPRO, GEPA, TextGrad, E-SPL.

GEPA and TextGrad are their authors' packages (extra `[optimizers]`) with our [`ChatModel`]s as their engines; OPRO is
its published algorithm; E-SPL is [`~evolution.evolve`], prompts alone.
"""

from collections.abc import Callable, Mapping

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

__all__ = [
    "OPTIMISERS",
    "Found",
    "Objective",
    "optimise_espl",
    "optimise_gepa",
    "optimise_opro",
    "optimise_textgrad",
]
