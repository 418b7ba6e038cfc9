"""Question answering: exact match and token F1, as scores and as rewards.

The definitions are in Appendix F of the Prompt-R1 paper. The scores are SQuAD's, pure functions of
texts. The rewards apply them to [`Rollout.answer`].
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..llm.numbers import read_plain_number
from ..rollout import Rollout
from .answers import accepted_answers

# As in SQuAD's script.
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")
# Quotation marks, brackets and markup around an answer.
_MARKS_AROUND = " \t\r\n*_`\"'“”‘’()[]{}"


def normalize_answer(text: str) -> str:
    """Return a text as SQuAD normalises it.

    The result is in lower case, without (ASCII) punctuation and articles, and with single spaces.
    An answer that is nothing but an article or punctuation becomes empty. Where that happens to
    both sides of a comparison, the scores below keep the articles: the option `"A"` is not `"the"`.
    """
    return " ".join(_ARTICLES.sub(" ", _normalize_keeping_articles(text)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1.0 if the normalised prediction equals a normalised answer, else 0.0 (EM).

    If both are nothing but a number, perhaps in brackets or quotation marks, they are compared as
    numbers: SQuAD's normalisation drops points and signs, by which 2.5 would be 25.

    Args:
        prediction (`str`): The answer given.
        answers (`Sequence[str]`): The accepted answers, at least one; `[""]` for a question without
            an answer.

    Raises:
        `ValueError`: If there is no accepted answer, or a string is passed for the list.
    """
    pairs = _normalize_pairs(prediction, answers)
    return float(any(predicted == accepted for predicted, accepted in pairs))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the best token F1 over the accepted answers, in [0, 1] (Appendix F, eq 11-12).

    The overlap counts tokens with multiplicity. Where one side has no token left after
    normalisation this is SQuAD v2.0's rule: 1.0 if both have none, else 0.0. (v1.1 gives 0.0 in
    both cases, and would score the right answer to a question without an answer as wrong.) Two
    numbers are compared as in [`exact_match`].

    Args:
        prediction (`str`): The answer given.
        answers (`Sequence[str]`): The accepted answers, at least one; `[""]` for a question without
            an answer.

    Raises:
        `ValueError`: If there is no accepted answer, or a string is passed for the list.
    """
    pairs = _normalize_pairs(prediction, answers)
    return max(_f1(predicted.split(), accepted.split()) for predicted, accepted in pairs)


def exact_match_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rollout: Sequence[Rollout],
    answers: Sequence[Sequence[str]],
    **_: object,
) -> list[float | None]:
    """Return [`exact_match`] of each rollout's answer, with TRL's reward signature.

    Args:
        prompts (`Sequence`), completions (`Sequence`): Not read.
        rollout (`Sequence[Rollout]`): One rollout per row.
        answers (`Sequence[Sequence[str]]`): The accepted answers of each row.

    Returns:
        `list[float | None]`: `None` for a rollout that failed through no fault of the agent, 0.0
        without an answer.
    """
    return score_answers(exact_match, rollout, answers)


def token_f1_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rollout: Sequence[Rollout],
    answers: Sequence[Sequence[str]],
    **_: object,
) -> list[float | None]:
    """Return [`token_f1`] of each rollout's answer, with TRL's reward signature.

    See [`exact_match_reward`].
    """
    return score_answers(token_f1, rollout, answers)


def is_scorable(rollout: Rollout) -> bool:
    """Return whether a rollout has anything of the agent's to score.

    It has not if the environment failed, nor if no turn was ever sampled because the prompt alone
    filled the context. Neither is the agent's fault, and a reward of 0.0 would punish it.
    """
    return rollout.status != "failed" and rollout.error is None and bool(rollout.turns)


def score_answers(
    score: Callable[[str, Sequence[str]], float],
    rollouts: Sequence[Rollout],
    answers: Sequence[Sequence[str]],
) -> list[float | None]:
    """Return the score of each rollout's answer.

    `None` where there is nothing of the agent's to score.
    """
    rewards: list[float | None] = []
    for rollout, accepted in zip(rollouts, answers, strict=True):
        if not is_scorable(rollout):
            rewards.append(None)
        elif rollout.answer is None:
            # No answer is not the answer "", which is right for a question without an answer.
            rewards.append(0.0)
        else:
            rewards.append(score(rollout.answer, accepted))
    return rewards


def _normalize_pairs(prediction: str, answers: Sequence[str]) -> list[tuple[str, str]]:
    """Return the prediction and each accepted answer in the form in which they are compared."""
    pairs = []
    number = read_plain_number(prediction.strip(_MARKS_AROUND))
    for answer in accepted_answers(answers):
        # Two numbers are compared as numbers.
        accepted_number = read_plain_number(answer.strip(_MARKS_AROUND))
        if number is not None and accepted_number is not None:
            pair = (str(number), str(accepted_number))
        # Other answers without their articles, unless nothing else is left of both.
        else:
            pair = (normalize_answer(prediction), normalize_answer(answer))
            is_nothing_left = pair == ("", "")
            if is_nothing_left:
                pair = (
                    _normalize_keeping_articles(prediction),
                    _normalize_keeping_articles(answer),
                )
        pairs.append(pair)
    return pairs


def _normalize_keeping_articles(text: str) -> str:
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def _f1(predicted: list[str], expected: list[str]) -> float:
    if not predicted or not expected:
        return float(predicted == expected)
    # Tokens that both have, counted with multiplicity.
    overlap = (Counter(predicted) & Counter(expected)).total()
    return 2 * overlap / (len(predicted) + len(expected))
