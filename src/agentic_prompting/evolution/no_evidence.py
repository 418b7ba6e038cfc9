"""Explains why a step of [`evolve`] had no problem worth reflecting on, and how to change that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

from ..rollout import FreeText, Grammar
from .results import TRUTH_SEPARATOR, PromptResult
from .settings import EvolveConfig

NO_ANSWER_FOUND = (
    "the grammar found no answer in any reply; set grammar to 'marked', which reads the text after "
    "'Answer:' and otherwise takes the whole reply, or let the prompt ask for <answer> tags"
)


def has_no_answer(results: Sequence[PromptResult], grammar: Grammar) -> bool:
    """Return whether no reply of a step was right, and the grammar found no answer in any."""
    for attempt in chain.from_iterable(result.attempts for result in results):
        is_right = attempt.reward is not None and attempt.reward >= 1
        if is_right or grammar.parse(attempt.text).kind == "answer":
            return False
    return True


def explain_no_evidence(best: PromptResult, grammar: Grammar, config: EvolveConfig) -> str:
    """Return why no problem was worth reflecting on, and what to do about it.

    Args:
        best ([`PromptResult`]): The result of the step's best prompt.
        grammar ([`Grammar`]): Finds the answers in the replies.
        config ([`EvolveConfig`]): The settings of the run.
    """
    # Everything was right.
    if all(attempt.reward is not None and attempt.reward >= 1 for attempt in best.attempts):
        return (
            f"under prompt {best.prompt.id}, the best of the step, every attempt at every "
            "problem got the reward 1: take harder problems"
        )

    # Right answers were compared together with the words around them.
    if isinstance(grammar, FreeText):
        wrapped = _find_wrapped_answer(best)
        if wrapped:
            return (
                "an accepted answer stands inside replies that did not get the reward 1, such "
                f"as the one that ends in {wrapped[-60:]!r}: set grammar to 'marked', which "
                "reads the text after 'Answer:', or let the prompt ask for the answer alone"
            )

    # The attempts at a problem could not differ.
    if config.num_generations == 1 and config.reflect_on == "mixed":
        return (
            "num_generations is 1, so no two attempts differ: raise it, or set reflect_on to "
            "'imperfect'"
        )
    distinct_replies = []
    for problem in best.problems:
        distinct_replies.append({attempt.text for attempt in problem.attempts})
    if all(len(texts) == 1 for texts in distinct_replies):
        return (
            f"the policy gave the same reply in all {config.num_generations} attempts at every "
            "problem: sample it at a temperature above 0 "
            '(set policy_sampling to {"temperature": 0.7}), or reflect on failures too '
            "(set reflect_on to 'imperfect')"
        )
    return (
        "all attempts at a problem got the same reward, at every problem; set reflect_on to "
        "'imperfect' to look at failures without a success, too"
    )


def _find_wrapped_answer(result: PromptResult) -> str:
    """Return a reply with an accepted answer inside that did not get the reward 1; or an empty text."""
    for problem in result.problems:
        answers = [re.escape(answer) for answer in problem.truth.split(TRUTH_SEPARATOR) if answer]
        accepted = re.compile(rf"(?<!\w)({'|'.join(answers)})(?!\w)")
        for attempt in problem.attempts:
            is_imperfect = attempt.reward is not None and attempt.reward < 1
            if answers and is_imperfect and accepted.search(attempt.text):
                return attempt.text
    return ""
