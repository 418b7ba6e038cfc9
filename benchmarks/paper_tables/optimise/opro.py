"""OPRO: a model that is shown instructions with their scores writes better ones (Yang et al. 2023,
"Large Language Models as Optimizers").

The published algorithm, small: at each step the best instructions so far in rising order and a few
examples make the meta-prompt, several new instructions are drawn from it, and each is scored.
"""

from __future__ import annotations

import logging
import random
import re

from agentic_prompting.llm import LLMError

from ..templates import OPRO_ANSWER_LINE, OPRO_META, OPRO_SAME_FORM
from .common import Found, Objective, mean_score

logger = logging.getLogger(__name__)

_TAGS = re.compile(r"<INS>(.*?)</INS>", re.DOTALL)


def optimise_opro(
    objective: Objective, prompt: str, best_count: int = 20, per_step: int = 8, examples: int = 3
) -> Found:
    """Optimise a prompt until the calls are used up.

    Args:
        objective ([`Objective`]): What to optimise, and its budget.
        prompt (`str`): The instruction to begin with.
        best_count (`int`, *optional*, defaults to `20`): Instructions in the meta-prompt (section
            5.1 of the paper).
        per_step (`int`, *optional*, defaults to `8`): New instructions a step (section 5.1).
        examples (`int`, *optional*, defaults to `3`): Questions shown (section 5.1).

    Returns:
        [`Found`]: The instruction with the best score on all training rows.

    Raises:
        [`LLMError`]: The first instruction could not be scored.
    """
    rng = random.Random(objective.seed)
    scored = {prompt: mean_score(objective.try_prompt(prompt))}
    requests = 0
    unread = 0
    repeated = 0
    while objective.count.affords(1 + len(objective.rows)):
        meta = _meta_prompt(objective, scored, best_count, examples, rng)
        for _ in range(per_step):
            if not objective.count.affords(1 + len(objective.rows)):
                break
            requests += 1
            try:
                new = read_instruction(objective.ask_editor(meta, repeat=requests))
                unread += not new
                repeated += new in scored
                if new and new not in scored:
                    scored[new] = mean_score(objective.try_prompt(new))
            except LLMError as error:
                if error.fatal:
                    return _best(objective, scored)
    note = ""
    if unread:
        note = f"{unread} of {requests} replies of the editor could not be read"
        logger.warning(
            "OPRO: %d of %d replies of the editor had no instruction between <INS> and </INS>: use "
            "a model that follows its instructions, or raise its max_tokens",
            unread,
            requests,
        )
    # An editor that repeats an earlier instruction has not failed: it has nothing new to propose.
    if repeated:
        logger.info(
            "OPRO: %d of %d replies of the editor repeated an instruction of before, which was not "
            "scored again",
            repeated,
            requests,
        )
    return _best(objective, scored, note)


def read_instruction(reply: str) -> str:
    """The last instruction in `<INS>` tags; empty if there is none."""
    instructions = _TAGS.findall(reply)
    return instructions[-1].strip() if instructions else ""


def _meta_prompt(
    objective: Objective,
    scored: dict[str, float],
    best_count: int,
    examples: int,
    rng: random.Random,
) -> str:
    best = sorted(scored.items(), key=lambda item: item[1])[-best_count:]
    scored_texts = [f"<INS>{text}</INS>\nscore: {round(100 * score)}" for text, score in best]
    rows = rng.sample(objective.rows, min(examples, len(objective.rows)))
    # A task may have another form than the line "Answer: ..."; the first instruction says so.
    first_instruction = next(iter(scored))
    has_answer_line = "answer:" in first_instruction.lower()
    label = "Answer" if has_answer_line else "Accepted"
    questions = [f"Question: {row['question']}\n{label}: {row['answers'][0]}" for row in rows]
    values = {
        "history": "\n\n".join(scored_texts),
        "examples": "\n\n".join(questions),
        "form": OPRO_ANSWER_LINE if has_answer_line else OPRO_SAME_FORM,
    }
    return re.sub(r"\{(history|examples|form)\}", lambda match: values[match[1]], OPRO_META)


def _best(objective: Objective, scored: dict[str, float], note: str = "") -> Found:
    prompt, score = max(scored.items(), key=lambda item: item[1])
    return objective.found(prompt, score, note)
