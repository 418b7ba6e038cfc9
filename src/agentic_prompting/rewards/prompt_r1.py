"""Prompt-R1's double-constrained reward (eq 10-13).

It scores the form of the conversation, and the answer if the form is complete. It reads parsed
turns rather than decoded text and is independent of the chat template. Malformed output is the
agent's own: it is scored and never raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..rollout import Rollout, TagGrammar, Turn, parse_turn
from .qa import exact_match, is_scorable, token_f1

_GATES = ("paper", "strict")
# In floating point 0.4 + 0.25 + 0.25 + 0.1 need not be exactly 1, as it is on paper.
_TOLERANCE = 1e-9


class PromptR1Score(NamedTuple):
    """The reward of one rollout, and its two parts.

    Attributes:
        total (`float`): R (eq 13), in [-k, 1].
        format (`float`): R_fmt (eq 10), in [0, k].
        answer (`float`): R_ans (eq 11-12), in [0, 1]; 0.0 without an answer. It counts towards
            `total` only if `format` is `k`.
    """

    total: float
    format: float
    answer: float


@dataclass(frozen=True)
class PromptR1Reward:
    """Prompt-R1's reward (eq 10-13), callable with TRL's reward signature.

        R_fmt = min(k, alpha * sum_{t<T} M_t + beta * A_p + gamma * A_n + delta * C_f)
        R     = -k + R_fmt + (R_ans if R_fmt = k else 0)

    M_t: turn t, the last one excepted, is a well-formed request; A_p: the last turn parses as an
    answer; A_n: the answer is not empty; C_f: the last turn is complete (thought and answer,
    nothing else).

    As printed the formula has a loophole: the requests' part alone can reach k, so an agent with
    enough requests (four well-formed turns and no answer) gets 0.0, as much as for a wrong answer.
    `gate="strict"` closes it: the requests' part is capped at `k - (beta + gamma + delta)`, and the
    rest has to be earned by the last turn.

    Args:
        gate (`str`, *optional*, defaults to `"paper"`): `paper`, the formula as printed, or
            `strict`.
        alpha (`float`, *optional*, defaults to `0.4`): For each well-formed request (Appendix G).
        beta (`float`, *optional*, defaults to `0.25`): For an answer that parses (Appendix G).
        gamma (`float`, *optional*, defaults to `0.25`): For an answer that is not empty
            (Appendix G).
        delta (`float`, *optional*, defaults to `0.1`): For a complete last turn (Appendix G).
        k (`float`, *optional*, defaults to `1.0`): The maximum of the format reward, and the value
            that it must reach for the answer to count (Appendix G).
        grammar ([`TagGrammar`], *optional*): Parse the text of the turns again with this grammar.
            By default the turns count as the rollout parsed them, so the trainer's grammar does not
            have to be passed again.

    Raises:
        `ValueError`: If `gate` is not known, a coefficient is negative, `k` is not positive, or a
            number is not finite.

    Example:

        >>> reward = PromptR1Reward()
        >>> reward.score_turns(
        ...     [
        ...         "<think>A city.</think><interaction_prompt>Kenya?</interaction_prompt>",
        ...         "<think>The reply is clear.</think><answer>Nairobi</answer>",
        ...     ],
        ...     answers=["Nairobi"],
        ... )
        PromptR1Score(total=1.0, format=1.0, answer=1.0)
    """

    gate: str = "paper"
    alpha: float = 0.4
    beta: float = 0.25
    gamma: float = 0.25
    delta: float = 0.1
    k: float = 1.0
    grammar: TagGrammar | None = None

    def __post_init__(self):
        # Check that the formula gives values in [-k, 1].
        if self.gate not in _GATES:
            raise ValueError(f"gate must be one of {', '.join(_GATES)}, got {self.gate!r}")
        coefficients = (self.alpha, self.beta, self.gamma, self.delta)
        are_valid = all(0 <= coefficient < math.inf for coefficient in coefficients)
        if not are_valid or not 0 < self.k < math.inf:
            raise ValueError(
                "alpha, beta, gamma and delta must be finite and at least 0, k finite and above 0; "
                f"got {self}"
            )

    @property
    def __name__(self) -> str:
        """The name of this reward in TRL's logs."""
        return "prompt_r1_reward"

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        rollout: Sequence[Rollout],
        answers: Sequence[Sequence[str]],
        **kwargs: Any,
    ) -> list[float | None]:
        """Return R (eq 13) of each rollout.

        Args:
            prompts (`Sequence`), completions (`Sequence`): Not read.
            rollout (`Sequence[Rollout]`): One rollout per row.
            answers (`Sequence[Sequence[str]]`): The accepted answers of each row.
            **kwargs: Only TRL's `log_metric` (`Callable[[str, float], None]`) is used. It gets
                `exact_match`, `f1`, `format_reward` and `answer_reward` (the part of R_ans that
                passed the gate) of every scored rollout; TRL averages them over all processes.

        Returns:
            `list[float | None]`: `None` for a rollout that failed through no fault of the agent.

        Raises:
            `ValueError`: If a row has no accepted answer.
        """
        log_metric: Callable[[str, float], None] | None = kwargs.get("log_metric")
        rewards: list[float | None] = []
        for episode, accepted in zip(rollout, answers, strict=True):
            if not is_scorable(episode):
                rewards.append(None)
                continue
            score = self.score_turns(episode.turns, accepted)
            rewards.append(score.total)
            if log_metric is not None:
                # No answer is not the answer "", which is right for a question without an answer.
                match_score = 0.0
                if episode.answer is not None:
                    match_score = exact_match(episode.answer, accepted)
                log_metric("exact_match", match_score)
                log_metric("f1", score.answer)
                log_metric("format_reward", score.format)
                log_metric("answer_reward", max(score.total, 0.0))
        return rewards

    def score(self, rollout: Rollout) -> PromptR1Score:
        """Return the reward of a rollout with its parts.

        Args:
            rollout ([`Rollout`]): Its row must have the accepted answers in the column `answers`.
        """
        return self.score_turns(rollout.turns, rollout.row["answers"])

    def score_turns(self, turns: Sequence[Turn | str], answers: Sequence[str]) -> PromptR1Score:
        """Return the reward of one conversation with its parts.

        Args:
            turns (`Sequence[Turn | str]`): The agent's turns in order, without the observations.
                The last one never counts as a request. Text is parsed with `grammar`, by default
                with Prompt-R1's tags.
            answers (`Sequence[str]`): The accepted answers, at least one.

        Raises:
            `ValueError`: If `answers` is empty.
        """
        parsed_turns = [self._parse(turn) for turn in turns]
        format_reward = self._score_format(parsed_turns)

        # R_ans (eq 11-12).
        answer = parsed_turns[-1].answer if parsed_turns else None
        # Computed without an answer, too, because an empty `answers` must raise an error.
        answer_reward = token_f1(answer or "", answers)
        if answer is None:
            answer_reward = 0.0

        # R (eq 13): the answer counts only if the form is complete.
        total = format_reward - self.k
        if format_reward == self.k:
            total += answer_reward
        return PromptR1Score(total=total, format=format_reward, answer=answer_reward)

    def _parse(self, turn: Turn | str) -> Turn:
        if isinstance(turn, str):
            return parse_turn(turn, self.grammar or TagGrammar())
        if self.grammar is not None:
            return parse_turn(turn.text, self.grammar)
        return turn

    def _score_format(self, turns: Sequence[Turn]) -> float:
        """Return R_fmt (eq 10), exactly `k` where it is reached."""
        if not turns:
            return 0.0
        *earlier_turns, last_turn = turns

        # alpha * sum_{t<T} M_t
        request_count = sum(turn.well_formed and turn.kind == "act" for turn in earlier_turns)
        requests_part = self.alpha * request_count
        if self.gate == "strict":
            cap = self.k - (self.beta + self.gamma + self.delta)
            requests_part = min(requests_part, max(0.0, cap))

        # beta * A_p + gamma * A_n + delta * C_f
        ending_part = 0.0
        if last_turn.kind == "answer":
            ending_part = self.beta
            ending_part += self.gamma * bool(last_turn.answer)
            ending_part += self.delta * last_turn.well_formed

        format_reward = requests_part + ending_part
        if format_reward >= self.k - _TOLERANCE:
            return self.k
        return format_reward
