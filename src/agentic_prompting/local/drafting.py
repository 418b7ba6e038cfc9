"""Drafts: guesses at an output, which save forward passes and never change the output.

A *draft* is a text that the output may resemble: in ProRefine, the output under the previous
prompt. The model reads several of its tokens in one pass. The engine keeps the tokens that agree
with the model's own choice and replaces the first token that disagrees. The rest of the draft then
serves for prompt-lookup decoding: if the last output tokens occur in the draft, the tokens that
follow them there are the next guess. If they do not occur, the guess is that some tokens were
inserted or left out, and that the draft continues after them. transformers' own assisted decoding
takes one sequence at a time, so it cannot be used in a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

# How many of the last output tokens are looked up in the draft, longest first.
_MAX_MATCH = 3
_MIN_MATCH = 2
# A token that occurs within this many positions counts as the same token, with the tokens before it
# left out.
_MAX_SKIP = 4


class TokenDraft:
    """The guesses for one output, and a count of the guesses that were right.

    Args:
        ids (`Sequence[int]`): The draft.

    Attributes:
        accepted (`int`): Tokens of the output that came from guesses.
    """

    def __init__(self, ids: Sequence[int]):
        self.ids = list(ids)
        self.accepted = 0
        self._guess_start = 0  # position in the draft at which the last guess began
        self._expected_position = 0  # of the next token
        self._failed_guesses = 0  # in a row, without a right token
        self._silent_until = 0  # length of the output before which nothing is guessed

    def guess(self, output_ids: Sequence[int], max_tokens: int) -> list[int]:
        """Guess at most `max_tokens` tokens that follow the output so far.

        The guess starts after the last output tokens in the draft, at the occurrence nearest to the
        expected one. Without such an occurrence it starts at the expected position. After each
        wrong guess in a row, the number of tokens without a guess doubles.
        """
        if max_tokens <= 0 or len(output_ids) < self._silent_until:
            return []
        self._guess_start = self._expected_position
        for length in range(min(_MAX_MATCH, len(output_ids)), _MIN_MATCH - 1, -1):
            positions = self._positions_after.get(tuple(output_ids[-length:]))
            if positions:
                self._guess_start = min(positions, key=self._distance_from_expected)
                break
        return self.ids[self._guess_start : self._guess_start + max_tokens]

    def learn(self, guessed: int, accepted: int, output_ids: Sequence[int]) -> None:
        """Record that the first `accepted` of `guessed` tokens were right.

        Args:
            guessed (`int`): The length of the guess.
            accepted (`int`): How many of its first tokens were right.
            output_ids (`Sequence[int]`): The output so far; its last token is the model's own
                choice.
        """
        self.accepted += accepted
        if guessed:
            self._expected_position = self._guess_start + accepted
            if accepted:
                self._failed_guesses = 0
                self._silent_until = len(output_ids)
            else:
                self._failed_guesses += 1
                self._silent_until = len(output_ids) + 2 ** (self._failed_guesses - 1) - 1

        # If the token occurs a little further on, the tokens between were left out; otherwise it
        # was inserted.
        next_ids = self.ids[self._expected_position : self._expected_position + _MAX_SKIP]
        if output_ids[-1] in next_ids:
            self._expected_position += next_ids.index(output_ids[-1]) + 1

    def _distance_from_expected(self, position: int) -> int:
        return abs(position - self._expected_position)

    @cached_property
    def _positions_after(self) -> dict[tuple[int, ...], list[int]]:
        """The positions after each short run of tokens in the draft.

        Computed once: a search in each pass took a tenth of the time of a small model's pass.
        """
        positions: dict[tuple[int, ...], list[int]] = {}
        for length in range(_MIN_MATCH, _MAX_MATCH + 1):
            for end in range(length, len(self.ids)):
                positions.setdefault(tuple(self.ids[end - length : end]), []).append(end)
        return positions
