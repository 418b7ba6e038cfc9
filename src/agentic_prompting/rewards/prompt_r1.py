"""Prompt-R1's double-constrained reward (eq 10-13): first the form of the conversation, then the answer.

Read from parsed turns, never from decoded text, so it knows no chat template. Malformed output is scored, never raised:
it is the agent's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..rollout import Rollout, TagGrammar, Turn, parse_turn
from .qa import exact_match, scorable, token_f1

_GATES = ("paper", "strict")
_TOLERANCE = 1e-9  # .4 + .25 + .25 + .1 is 1 on paper; in floating point it need not be


class PromptR1Score(NamedTuple):
    """The reward of one trajectory and what it is made of.

    Attributes:
        total (`float`): R (eq 13), in [-k, 1].
        format (`float`): R_fmt (eq 10), in [0, k].
        answer (`float`): R_ans (eq 11-12), in [0, 1]; 0.0 without an answer. Part of `total` only if `format` is `k`.
    """

    total: float
    format: float
    answer: float


@dataclass(frozen=True)
class PromptR1Reward:
    """Prompt-R1's reward as an object: the coefficients of eq 10-13, callable with TRL's reward signature.

        R_fmt = min(k, alpha * sum_{t<T} M_t + beta * A_p + gamma * A_n + delta * C_f)
        R     = -k + R_fmt + (R_ans if R_fmt = k else 0)

    M_t: turn t, the last one excepted, is a well-formed request; A_p: the last turn parses as an answer; A_n: the
    answer is not empty; C_f: the last turn is complete (thought and answer, nothing else).

    As printed the formula has a loophole: the requests' part alone can reach k, so that an agent with enough of them
    (four well-formed turns and no answer) gets 0.0, as much as for a wrong answer. `gate="strict"` closes it: the
    requests' part is capped at `k - (beta + gamma + delta)`, and the ending has to be earned.

    Args:
        gate (`str`, *optional*, defaults to `"paper"`): `paper`, the formula as printed, or `strict`.
        alpha (`float`, *optional*, defaults to `0.4`): For each well-formed request (Appendix G).
        beta (`float`, *optional*, defaults to `0.25`): For an answer that parses (Appendix G).
        gamma (`float`, *optional*, defaults to `0.25`): For an answer that is not empty (Appendix G).
        delta (`float`, *optional*, defaults to `0.1`): For a complete last turn (Appendix G).
        k (`float`, *optional*, defaults to `1.0`): The most that form is worth, and what it takes for the answer to
            count (Appendix G).
        grammar ([`TagGrammar`], *optional*): Read the turns' text anew with this grammar. By default the turns count
            as the rollout parsed them, so a trainer's own grammar needs no repeating here.

    Raises:
        `ValueError`: If `gate` is not known, a coefficient is negative, `k` is not positive, or one of them is not
            finite.
    """

    gate: str = "paper"
    alpha: float = 0.4
    beta: float = 0.25
    gamma: float = 0.25
    delta: float = 0.1
    k: float = 1.0
    grammar: TagGrammar | None = None

    def __post_init__(self):
        if self.gate not in _GATES:
            raise ValueError(f"gate must be one of {', '.join(_GATES)}, got {self.gate!r}")
        coefficients = (self.alpha, self.beta, self.gamma, self.delta)
        if (
            not all(0 <= coefficient < math.inf for coefficient in coefficients)
            or not 0 < self.k < math.inf
        ):
            raise ValueError(
                f"the reward's coefficients must not be negative, k positive and all finite, got {self}"
            )

    @property
    def __name__(self) -> str:
        """The name of this reward in TRL's logs."""
        return "prompt_r1_reward"

    def score(self, turns: Sequence[Turn], answers: Sequence[str]) -> PromptR1Score:
        """Score one trajectory of parsed turns; see [`prompt_r1_score`] for the same from text."""
        form = self._format(turns)
        answer = turns[-1].answer if turns else None
        correct = token_f1(answer or "", answers) * (
            answer is not None
        )  # raises for a row without golds in any case
        return PromptR1Score(form - self.k + (correct if form == self.k else 0.0), form, correct)

    def _format(self, turns: Sequence[Turn]) -> float:
        """R_fmt (eq 10); exactly `k` where it is reached."""
        if not turns:
            return 0.0
        *before, last = turns
        requests = self.alpha * sum(turn.well_formed and turn.kind == "act" for turn in before)
        if self.gate == "strict":
            requests = min(requests, max(0.0, self.k - (self.beta + self.gamma + self.delta)))
        ending = 0.0
        if last.kind == "answer":
            ending = self.beta + self.gamma * bool(last.answer) + self.delta * last.well_formed
        total = requests + ending
        return self.k if total >= self.k - _TOLERANCE else total

    def __call__(
        self,
        prompts: Sequence[Any],
        completions: Sequence[Any],
        rollout: Sequence[Rollout],
        answers: Sequence[Sequence[str]],
        **kwargs: Any,
    ) -> list[float | None]:
        """R (eq 13) of each rollout.

        Args:
            prompts (`Sequence`), completions (`Sequence`): Not read.
            rollout (`Sequence[Rollout]`): One episode per row.
            answers (`Sequence[Sequence[str]]`): Accepted answers per row.
            **kwargs: Only TRL's `log_metric` (`Callable[[str, float], None]`) is used: it gets `exact_match`, `f1`,
                `format_reward` and `answer_reward` (the part of R_ans that passed the gate) of every scored rollout.

        Returns:
            `list[float | None]`: `None` for a rollout that failed through no fault of the agent.

        Raises:
            `ValueError`: If a row has no accepted answer.
        """
        scores = self.scores(rollout, answers)
        log_metric: Callable[[str, float], None] = kwargs.get(
            "log_metric", lambda name, value: None
        )
        for one, accepted, score in zip(rollout, answers, scores, strict=True):
            if score is not None:  # one value each: TRL averages them over all processes
                log_metric(
                    "exact_match", 0.0 if one.answer is None else exact_match(one.answer, accepted)
                )
                log_metric("f1", score.answer)
                log_metric("format_reward", score.format)
                log_metric("answer_reward", max(score.total, 0.0))
        return [None if score is None else score.total for score in scores]

    def scores(
        self, rollouts: Sequence[Rollout], answers: Sequence[Sequence[str]]
    ) -> list[PromptR1Score | None]:
        """Like a call, with the parts of each reward kept, for logs."""
        return [
            self.score(self._turns(one), accepted) if scorable(one) else None
            for one, accepted in zip(rollouts, answers, strict=True)
        ]

    def _turns(self, rollout: Rollout) -> list[Turn]:
        return (
            rollout.turns
            if self.grammar is None
            else [parse_turn(text, self.grammar) for text in rollout.texts]
        )


def prompt_r1_score(
    turns: Sequence[str],
    answers: Sequence[str],
    *,
    grammar: TagGrammar = TagGrammar(),
    **coefficients: Any,
) -> PromptR1Score:
    """Prompt-R1's reward (eq 10-13) of one trajectory given as text.

    Args:
        turns (`Sequence[str]`): The agent's turns in order, observations left out. The last one is the final one and
            never counts as an intermediate request.
        answers (`Sequence[str]`): The accepted answers, at least one.
        grammar ([`TagGrammar`], *optional*): The tags. Defaults to Prompt-R1's.
        **coefficients: `gate`, `alpha`, `beta`, `gamma`, `delta`, `k` of [`PromptR1Reward`], with its defaults.

    Returns:
        [`PromptR1Score`]: With the default coefficients `total` is in [-1, 1].

    Raises:
        `ValueError`: If `answers` is empty, or as in [`PromptR1Reward`].

    Example:

        >>> prompt_r1_score(
        ...     [
        ...         "<think>It asks for a city.</think><interaction_prompt>Capital of Kenya?</interaction_prompt>",
        ...         "<think>The reply is clear.</think><answer>Nairobi</answer>",
        ...     ],
        ...     ["Nairobi"],
        ... )
        PromptR1Score(total=1.0, format=1.0, answer=1.0)
    """
    return PromptR1Reward(**coefficients).score(
        [parse_turn(text, grammar) for text in turns], answers
    )


prompt_r1_reward = PromptR1Reward()
"""The paper's reward with the paper's coefficients, ready to be passed as `reward_funcs`."""
