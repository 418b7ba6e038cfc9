"""TextGrad by its authors' package `textgrad`, with our models as its engines: the prompt is its
variable.

The loop is that of the package's prompt-optimisation example: a minibatch, a loss in words for each
answer, one step, and back to the old prompt if the new one is worse on the validation half.
"""

from __future__ import annotations

import atexit
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from itertools import count
from typing import Any

from agentic_prompting.evaluation.systems import Row
from agentic_prompting.llm import ChatModel, LLMError, complete, with_system

from .common import Found, Objective, mean_score

_ROLE = "the system prompt of a language model that answers questions"


def optimise_textgrad(objective: Objective, prompt: str, minibatch: int = 3) -> Found:
    """Optimise a prompt with textual gradient descent until the calls are used up.

    The training rows are cut in half: steps are made on minibatches of the one, checked on the
    other, unless there are validation rows to check on.

    Args:
        objective ([`Objective`]): What to optimise, and its budget.
        prompt (`str`): The prompt to begin with.
        minibatch (`int`, *optional*, defaults to `3`): Rows a step (the package's examples use 3).

    Raises:
        `ImportError`: The package is not installed.
        `ValueError`: There are fewer than two training rows.
        [`LLMError`]: The first prompt could not be scored.
    """
    textgrad = _library()
    if not objective.learned:
        raise ValueError(
            "TextGrad needs at least two training rows: one to learn from, one to check by"
        )
    training = objective.learned
    validation = objective.chosen_by
    rng = random.Random(objective.seed)
    best = prompt
    best_score = mean_score(objective.try_prompt(prompt, validation))
    # A row costs an answer, a loss and at most two gradients; a step one edit and the validation
    # half.
    step = 4 * minibatch + 2 + len(validation)
    while objective.count.affords(step):
        rows = rng.sample(training, min(minibatch, len(training)))
        try:
            new = _step(textgrad, objective, best, rows)
            score = best_score
            if new != best:
                score = mean_score(objective.try_prompt(new, validation))
        except LLMError as error:
            if error.fatal:
                break
            continue
        except IndexError:  # textgrad's word for an edit without tags
            continue
        if score >= best_score:
            best = new
            best_score = score
    return objective.found(best, best_score)


def _step(textgrad: Any, objective: Objective, prompt: str, rows: Sequence[Row]) -> str:
    """One step of textual gradient descent; the new prompt."""
    answering, editing = _engines(textgrad, objective)
    _number_variables(textgrad)
    variable = textgrad.Variable(prompt, requires_grad=True, role_description=_ROLE)
    model = textgrad.BlackboxLLM(answering, variable)
    losses = []
    for row in rows:
        question = textgrad.Variable(
            row["question"], requires_grad=False, role_description="the question"
        )
        accepted = " or ".join(row["answers"])
        loss = textgrad.TextLoss(
            f"The right answer is: {accepted}. Say in few words whether the given answer is right, "
            "and what led it astray if not.",
            engine=editing,
        )
        losses.append(loss(model(question)))
    textgrad.sum(losses).backward(engine=editing)
    textgrad.TextualGradientDescent(parameters=[variable], engine=editing).step()
    return str(variable.value)


def _engines(textgrad: Any, objective: Objective) -> tuple[Any, Any]:
    class Engine(textgrad.EngineLM):
        """A [`ChatModel`] as TextGrad's engine. A failed call raises instead of returning text."""

        def __init__(self, chat: ChatModel, **sampling: Any):
            self.chat = chat
            self.sampling = sampling
            self.model_string = "agentic-prompting"

        def generate(self, prompt: Any, system_prompt: str | None = None, **_: Any) -> str:
            messages = with_system(system_prompt, [{"role": "user", "content": str(prompt)}])
            reply = complete(self.chat, messages, repeat=objective.seed, **self.sampling)
            if reply.error is not None:
                raise reply.error
            return reply.text

        def __call__(self, prompt: Any, system_prompt: str | None = None, **options: Any) -> str:
            return self.generate(prompt, system_prompt, **options)

    return Engine(objective.chat, **objective.sampling), Engine(objective.editor)


def _number_variables(textgrad: Any) -> None:
    """Give the package's variables numbers as hashes, so that the same seed sends the same
    requests.

    The package keeps variables in sets, whose order is otherwise that of their addresses: each
    start would send other prompts, and a resumed run would pay again.
    """
    counter = count()
    textgrad.Variable.__hash__ = lambda variable: variable.__dict__.setdefault(
        "number", next(counter)
    )


@cache
def _private_folder() -> str:
    """A folder with an unpredictable name that only this user can read, removed when the process
    ends.
    """
    folder = tempfile.mkdtemp(prefix="textgrad-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _library() -> Any:
    # When it is imported, the package opens a log of all requests and replies, by default in the
    # working directory.
    if "TEXTGRAD_LOG_DIR" not in os.environ:
        os.environ["TEXTGRAD_LOG_DIR"] = _private_folder()
    os.environ.setdefault(
        "LITELLM_LOCAL_MODEL_COST_MAP", "True"
    )  # otherwise it fetches a price list at import
    try:
        import textgrad
    except ImportError as error:
        raise ImportError(
            "TextGrad needs its package: pip install 'agentic-prompting[optimizers]'"
        ) from error
    return textgrad
