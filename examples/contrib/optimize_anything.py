"""E-SPL by GEPA's call: `optimize_anything` with GEPA's evaluators and E-SPL's population of
candidates.

`gepa` 0.1.4 has no way to register an engine of one's own, so the call is repeated here. Its
evaluators work as they are: `(candidate, example) -> score` or `(score, side_info)`, with
`oa.log()`.

    pip install 'agentic-prompting[optimizers]'
    PYTHONPATH=examples/contrib python improve.py

    # improve.py
    from optimize_anything import optimize_anything found = optimize_anything(text, evaluate,
    examples, objective="Short and right.", reference=OpenAIChat("gpt-4o")) print(found.best.text)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gepa.optimize_anything import EvaluatorWrapper

from agentic_prompting.evolution import EvolveConfig, EvolveResult, SystemPrompt, evolve
from agentic_prompting.llm import Budget, ChatModel, Message
from agentic_prompting.rollout import FreeText


def optimize_anything(
    seed_candidate: SystemPrompt | str,
    evaluator: Callable[..., Any],
    dataset: Sequence[Any] | None = None,
    valset: Sequence[Any] | None = None,
    objective: str | None = None,
    *,
    reference: ChatModel,
    config: EvolveConfig | None = None,
    checkpoint: str | Path | None = None,
    budget: Budget | None = None,
) -> EvolveResult:
    """Improve a text.

    Candidates are rated with TrueSkill on the same examples; they mutate and cross over.

    Args:
        seed_candidate (`str` or [`SystemPrompt`]): The text to start from. A `str` is edited
            freely; `SystemPrompt.of(text)` grows numbered principles.
        evaluator (`Callable`): As in GEPA. An exception is a failed call: no score, and counted.
        dataset (`Sequence`, *optional*): The examples that the evaluator gets beside the candidate.
            Without it, the evaluator gets the candidate alone.
        valset (`Sequence`, *optional*): Held-out examples, as `eval_rows` of [`evolve`].
        objective (`str`, *optional*): The aim in words, for the reference to read.
        reference ([`ChatModel`]): Reflects and edits; GEPA's `reflection_lm`.
        config ([`EvolveConfig`], *optional*): Defaults to one evaluation of at most 10 examples a
            step, and reflection on every score below 1.
        checkpoint (`str` or `Path`, *optional*): As in [`evolve`].
        budget ([`Budget`], *optional*): The limit on what the reference spends, as in [`evolve`].

    Returns:
        [`EvolveResult`]: `best.text` is the best candidate.
    """
    prompt = SystemPrompt(seed_candidate) if isinstance(seed_candidate, str) else seed_candidate
    call: Any = EvaluatorWrapper(evaluator, single_instance_mode=dataset is None)
    examples: dict[str, Any] = {}

    def rows(values: Sequence[Any] | None) -> list[dict[str, str]]:
        named = [
            (f"example {number}: {_as_text(value)}", value)
            for number, value in enumerate(values or (), len(examples))
        ]
        examples.update(named)
        return [{"question": name, "answers": objective or ""} for name, _ in named]

    def evaluate(messages: Sequence[Message]) -> str:
        """The evaluator as a chat model: its score on the first line, then its side information."""
        *candidate, question = [str(message["content"]) for message in messages]
        score, _, side_info = call("".join(candidate), example=examples.get(question))
        return f"{float(score)!r}\n{_as_text(side_info)}"

    problems = rows([objective or "the candidate alone"] if dataset is None else dataset)
    if config is None:
        size = min(10, len(problems))
        config = EvolveConfig(
            problems_per_step=size, num_generations=1, reflect_on="imperfect", grammar=FreeText()
        )
    return evolve(
        evaluate,
        reference,
        problems,
        _score,
        prompt,
        config,
        checkpoint=checkpoint,
        budget=budget,
        eval_rows=rows(valset) or None,
    )


def _score(rollout: Sequence[Any], **columns: Any) -> list[float]:
    """The evaluator's score, the first line of the text that `evaluate` returned."""
    return [float(played.turns[-1].text.partition("\n")[0]) for played in rollout]


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
