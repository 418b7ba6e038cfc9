"""The grammar of replies that may reason first and mark their answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..rewards.answers import read_answer
from ..rollout import FreeText, Turn


@dataclass(frozen=True)
class MarkedAnswer(FreeText):
    """The answer is what a reply marks as such, by `Answer:`, a box or tags; else the whole reply.

    Tables and `headroom` find answers by the same rule, [`~rewards.read_answer`].
    """

    def parse(self, text: str) -> Turn:
        turn = super().parse(text)
        return replace(turn, answer=read_answer(text)) if turn.well_formed else turn
