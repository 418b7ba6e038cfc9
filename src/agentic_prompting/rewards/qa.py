"""Question answering: exact match and token F1 (Appendix F of the Prompt-R1 paper), as scores and as TRL rewards.

And the reward of agentic search. The scores are SQuAD's, pure functions of two texts. What an answer *is* in an
episode is not decided here: the rewards read [`Rollout.answer`].
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

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """SQuAD's normalisation: lower case, no (ASCII) punctuation, no articles, white space folded.

    An answer that is nothing but an article or punctuation becomes empty. Where that happens to both sides of a
    comparison, the scores below compare them with their articles: the option `"A"` is not `"the"`.
    """
    return " ".join(_ARTICLES.sub(" ", _folded(text)).split())


def _folded(text: str) -> str:
    return " ".join(text.lower().translate(_PUNCTUATION).split())


def _pairs(prediction: str, answers: Sequence[str]) -> list[tuple[str, str]]:
    """Prediction and each accepted answer in the form in which they are compared."""
    pairs = []
    number = read_plain_number(prediction)
    for answer in accepted_answers(answers):
        accepted_number = read_plain_number(answer)
        if number is not None and accepted_number is not None:
            # SQuAD drops points and signs, by which 2.5 is 25 and -5 is 5.
            pair = (str(number), str(accepted_number))
        else:
            pair = (normalize_answer(prediction), normalize_answer(answer))
            if not any(pair):
                pair = (_folded(prediction), _folded(answer))
        pairs.append(pair)
    return pairs


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if the normalised prediction equals one of the normalised answers, else 0.0 (Appendix F, EM).

    Where both are nothing but a number they are compared as numbers: to SQuAD's normalisation, which drops points and
    signs, 2.5 is 25.

    Args:
        prediction (`str`): The answer given.
        answers (`Sequence[str]`): The accepted answers, at least one; `[""]` for a question without an answer.

    Raises:
        `ValueError`: If there is no accepted answer, or a bare string is passed for the list.
    """
    return float(any(given == answer for given, answer in _pairs(prediction, answers)))


def token_f1(prediction: str, answers: Sequence[str]) -> float:
    """Token F1, the best over the accepted answers, in [0, 1] (eq 11-12; Appendix F, F1).

    The overlap counts tokens with multiplicity. Where one side has no token left after normalisation this is SQuAD
    v2.0's rule: 1.0 if both have none, else 0.0. (v1.1 gives 0.0 in both cases, and would score the right answer to a
    question without an answer as wrong.) Two numbers are compared as in [`exact_match`].

    Args:
        prediction (`str`): The answer given.
        answers (`Sequence[str]`): The accepted answers, at least one; `[""]` for a question without an answer.

    Raises:
        `ValueError`: If there is no accepted answer, or a bare string is passed for the list.
    """
    return max(_f1(given.split(), answer.split()) for given, answer in _pairs(prediction, answers))


def exact_match_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rollout: Sequence[Rollout],
    answers: Sequence[Sequence[str]],
    **_: Any,
) -> list[float | None]:
    """[`exact_match`] of each rollout's answer, with TRL's reward signature.

    Args:
        prompts (`Sequence`), completions (`Sequence`): Not read.
        rollout (`Sequence[Rollout]`): One episode per row.
        answers (`Sequence[Sequence[str]]`): Accepted answers per row.

    Returns:
        `list[float | None]`: `None` for a rollout that failed through no fault of the agent, 0.0 without an answer.
    """
    return rewards_of(exact_match, rollout, answers)


def token_f1_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rollout: Sequence[Rollout],
    answers: Sequence[Sequence[str]],
    **_: Any,
) -> list[float | None]:
    """[`token_f1`] of each rollout's answer, with TRL's reward signature. See [`exact_match_reward`]."""
    return rewards_of(token_f1, rollout, answers)


def search_reward(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    rollout: Sequence[Rollout],
    answers: Sequence[Sequence[str]],
    **_: Any,
) -> list[float | None]:
    """Agentic search: exact match, and a little for form: `0.1 · (format - 1) + correct` (released E-SPL recipe).

    `correct` is 1 if the answer matches one of `answers` after SQuAD normalisation; `format` is 1 if the last turn has
    exactly one `Answer:`. An episode that ended without an answer (too many searches, an unclosed tag, out of tokens)
    has reward 0, as in the recipe. The arguments are those of [`exact_match_reward`].

    Args:
        rollout (`Sequence[Rollout]`): One episode per row, under [`SearchGrammar`].

    Returns:
        `list[float | None]`: In [-0.1, 1]; `None` for a rollout that failed through no fault of the agent.
    """
    # A gold that is empty after normalisation is not matched by an empty answer: the recipe asks for one.
    correct = rewards_of(
        lambda answer, accepted: exact_match(answer, accepted) if answer else 0.0, rollout, answers
    )
    form = [0.0 if one.answer is None else 0.1 * (one.turns[-1].well_formed - 1) for one in rollout]
    return [
        None if score is None else score + bonus for score, bonus in zip(correct, form, strict=True)
    ]


def scorable(rollout: Rollout) -> bool:
    """Whether there is anything of the agent's to score.

    Not if the environment failed, and not if no turn was ever sampled because the prompt alone filled the context:
    neither is the agent's doing, and a 0.0 would teach it something that is not true.
    """
    return rollout.status != "failed" and rollout.error is None and bool(rollout.turns)


def rewards_of(
    score: Callable[[str, Sequence[str]], float],
    rollouts: Sequence[Rollout],
    answers: Sequence[Sequence[str]],
) -> list[float | None]:
    """The score of each rollout's answer; `None` where there is nothing of the agent's to score."""
    # Not answering is not the same as answering "": the latter is right where there is no answer.
    return [
        None if not scorable(one) else 0.0 if one.answer is None else score(one.answer, accepted)
        for one, accepted in zip(rollouts, answers, strict=True)
    ]


def _f1(predicted: list[str], expected: list[str]) -> float:
    if not predicted or not expected:
        return float(predicted == expected)
    overlap = (Counter(predicted) & Counter(expected)).total()
    return 2 * overlap / (len(predicted) + len(expected))
