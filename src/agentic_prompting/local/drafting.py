"""Guesses at an output, which save passes and never change it.

A *draft* is what the output might be: in ProRefine, the output under the previous prompt. Its tokens are fed to the
model several at once; those that agree with what the model itself would have written are kept, the first that disagrees
is replaced, and the rest of the draft serves as a store of guesses: where the last tokens written occur in it, what
follows there is guessed next (prompt-lookup decoding, with the old output as the text to look up in), and where they do
not, that something was put in or left out and the draft goes on behind it. transformers' own assisted decoding takes
one sequence at a time, which is why this file exists.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

# How many of the last tokens are looked up in the draft, longest first.
_LONGEST_MATCH, _SHORTEST_MATCH = 3, 2
# How far on in the draft a token counts as the same one, with something left out before it.
_NEAR = 4


class Draft:
    """What is guessed of one output, and how well that goes.

    Args:
        ids (`Sequence[int]`): The draft; empty guesses nothing.

    Attributes:
        agreed (`int`): Tokens of the output that came from guesses.
    """

    def __init__(self, ids: Sequence[int] = ()):
        self.ids, self.agreed = list(ids), 0
        self._at = 0  # where in the draft the last guess began
        self._next = 0  # where in it the output would go on
        self._failed = 0  # guesses in a row of which nothing was right
        self._quiet_until = 0

    def guess(self, written: Sequence[int], most: int) -> list[int]:
        """What may come after `written`, at most `most` tokens.

        What follows its last tokens in the draft, at the occurrence closest to where the output would go on; without
        one, what stands at that place. Wrong guesses are followed by ever longer silence.
        """
        if most <= 0 or not self.ids or len(written) < self._quiet_until:
            return []
        self._at = self._next
        for length in range(min(_LONGEST_MATCH, len(written)), _SHORTEST_MATCH - 1, -1):
            if found := self._places.get(tuple(written[-length:])):
                self._at = min(found, key=lambda place: abs(place - self._next))
                break
        return self.ids[self._at : self._at + most]

    def learn(self, guessed: int, agreed: int, written: Sequence[int]) -> None:
        """Of `guessed` tokens the first `agreed` were right; `written` is the output now, a token of the model's own
        at its end."""
        self.agreed += agreed
        if guessed:
            self._failed = 0 if agreed else self._failed + 1
            self._quiet_until = len(written) + (0 if agreed else 2 ** (self._failed - 1) - 1)
            self._next = self._at + agreed
        # Found a little further on: what is between was left out. Else the token is new.
        near = self.ids[self._next : self._next + _NEAR]
        self._next += near.index(written[-1]) + 1 if written[-1] in near else 0

    @cached_property
    def _places(self) -> dict[tuple[int, ...], list[int]]:
        """Where each short run of tokens is followed by something: the positions after it. Made once: searching in
        each pass cost a tenth of the pass of a small model."""
        places: dict[tuple[int, ...], list[int]] = {}
        for length in range(_SHORTEST_MATCH, _LONGEST_MATCH + 1):
            for end in range(length, len(self.ids)):
                places.setdefault(tuple(self.ids[end - length : end]), []).append(end)
        return places
