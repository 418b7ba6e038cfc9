"""Drafts: guesses at an output, which save forward passes and never change the output.

A *draft* is a text that the output may resemble: in ProRefine, the output under the previous prompt. The model reads
several of its tokens in one pass. The engine keeps the tokens that agree with the model's own choice and replaces the
first token that disagrees. The rest of the draft then serves for prompt-lookup decoding: if the last written tokens
occur in the draft, the tokens that follow them there are the next guess. If they do not occur, the guess is that some
tokens were inserted or left out, and that the draft continues after them. transformers' own assisted decoding takes
one sequence at a time, so it cannot be used in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

# How many of the last tokens are looked up in the draft, longest first.
_LONGEST_MATCH, _SHORTEST_MATCH = 3, 2
# A token found within so many positions counts as the same token, with the tokens before it left out.
_NEAR = 4


class Draft:
    """The guesses for one output, and a count of the guesses that were right.

    Args:
        ids (`Sequence[int]`): The draft.

    Attributes:
        agreed (`int`): Tokens of the output that came from guesses.
    """

    def __init__(self, ids: Sequence[int]):
        self.ids, self.agreed = list(ids), 0
        self._at = 0  # position in the draft at which the last guess began
        self._next = 0  # expected position of the next token
        self._failed = 0  # guesses in a row without a right token
        self._quiet_until = 0

    def guess(self, written: Sequence[int], most: int) -> list[int]:
        """A guess at the tokens after `written`, at most `most` of them.

        The guess starts after the last written tokens in the draft, at the occurrence nearest to the expected one.
        Without such an occurrence it starts at the expected position. After each wrong guess in a row, the number of
        tokens without a guess doubles.
        """
        if most <= 0 or len(written) < self._quiet_until:
            return []
        self._at = self._next
        for length in range(min(_LONGEST_MATCH, len(written)), _SHORTEST_MATCH - 1, -1):
            if found := self._places.get(tuple(written[-length:])):
                self._at = min(found, key=lambda place: abs(place - self._next))
                break
        return self.ids[self._at : self._at + most]

    def learn(self, guessed: int, agreed: int, written: Sequence[int]) -> None:
        """Record that the first `agreed` of `guessed` tokens were right. `written` is the output so far: the last
        token is the model's own choice."""
        self.agreed += agreed
        if guessed:
            self._failed = 0 if agreed else self._failed + 1
            self._quiet_until = len(written) + (0 if agreed else 2 ** (self._failed - 1) - 1)
            self._next = self._at + agreed
        # If the token occurs a little further on, the tokens between were left out; otherwise it was inserted.
        near = self.ids[self._next : self._next + _NEAR]
        self._next += near.index(written[-1]) + 1 if written[-1] in near else 0

    @cached_property
    def _places(self) -> dict[tuple[int, ...], list[int]]:
        """The positions after each short run of tokens in the draft. Computed once: a search in each pass took a tenth
        of the time of a small model's pass."""
        places: dict[tuple[int, ...], list[int]] = {}
        for length in range(_SHORTEST_MATCH, _LONGEST_MATCH + 1):
            for end in range(length, len(self.ids)):
                places.setdefault(tuple(self.ids[end - length : end]), []).append(end)
        return places
