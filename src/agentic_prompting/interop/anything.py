"""E-SPL in the place of GEPA's engine: `optimize_anything` with GEPA's evaluators, our population (extra `optimizers`).

`gepa` 0.1.4 has no way to register an engine. What it would be given is the same call: an evaluator
`(candidate, example) -> score` or `(score, side_info)`, `oa.log()` in it included, and examples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gepa.optimize_anything import EvaluatorWrapper

from ..evolution import EvolveConfig, EvolveResult, SystemPrompt, evolve
from ..llm import Budget, ChatModel, Message
from ..rollout import FreeText


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
    """GEPA's `optimize_anything` by E-SPL: candidates are rated with TrueSkill on the same examples, mutate and cross.

    Args:
        seed_candidate (`str` or [`SystemPrompt`]): Where to start. A text is edited freely; `SystemPrompt.of(text)`
            grows numbered principles.
        evaluator (`Callable`): As in GEPA. What it raises is a failed call: no score, and counted.
        dataset (`Sequence`, *optional*): What it is called with, besides the candidate; without one, the candidate is
            all there is.
        valset (`Sequence`, *optional*): Held out, as `eval_rows` of [`evolve`].
        objective (`str`, *optional*): What is wanted, for the reference to read.
        reference ([`ChatModel`]): Reflects and edits; GEPA's `reflection_lm`.
        config ([`EvolveConfig`], *optional*): Defaults to one evaluation of at most 10 examples a step, and reflection
            on every score below 1.
        checkpoint (`str` or `Path`, *optional*): As in [`evolve`], and so is the next.
        budget ([`Budget`], *optional*): What the reference may spend.

    Returns:
        [`EvolveResult`]: `best.text` is the candidate to use.
    """
    prompt = SystemPrompt(seed_candidate) if isinstance(seed_candidate, str) else seed_candidate
    call: Any = EvaluatorWrapper(evaluator, single_instance_mode=dataset is None)
    examples: dict[str, Any] = {}

    def rows(given: Sequence[Any] | None) -> list[dict[str, str]]:
        named = [(f"example {len(examples) + at}: {_shown(one)}", one) for at, one in enumerate(given or ())]
        examples.update(named)
        return [{"question": name, "answers": objective or ""} for name, _ in named]

    def evaluated(messages: Sequence[Message]) -> str:
        *candidate, question = [str(message["content"]) for message in messages]
        score, _, side_info = call("".join(candidate), example=examples.get(question))
        return f"{float(score)!r}\n{_shown(side_info)}"

    problems = rows([objective or "the candidate alone"] if dataset is None else dataset)
    if config is None:
        size = min(10, len(problems))
        config = EvolveConfig(problems_per_step=size, num_generations=1, reflect_on="imperfect", grammar=FreeText())
    return evolve(
        evaluated, reference, problems, _score, prompt, config, checkpoint=checkpoint, budget=budget,
        eval_rows=rows(valset) or None,
    )  # fmt: skip


def _score(rollout: Sequence[Any], **columns: Any) -> list[float]:
    """The evaluator's, which is the first line of what it gave."""
    return [float(one.turns[-1].text.partition("\n")[0]) for one in rollout]


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
