"""GEPA by its authors' package `gepa`, with our models as its engines. Only the adapter is ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from agentic_prompting.evaluation.systems import Row

from .common import Found, Objective, Trial

_PART = "system_prompt"  # the one text that is optimised, by the name that GEPA's reflection sees


def optimise_gepa(objective: Objective, prompt: str, minibatch: int = 3) -> Found:
    """Optimise a prompt with `gepa.optimize` until the calls are used up.

    The training rows are cut in half: GEPA reflects on minibatches of the one and chooses by the
    other, unless there are validation rows to choose by.

    Args:
        objective ([`Objective`]): What to optimise, and its budget.
        prompt (`str`): The prompt to begin with.
        minibatch (`int`, *optional*, defaults to `3`): Rows reflected on at once (the package's
            default).

    Raises:
        `ImportError`: The package is not installed.
        `ValueError`: There are fewer than two training rows.
    """
    try:
        import gepa
    except ImportError as error:
        raise ImportError(
            "GEPA needs its package: pip install 'agentic-prompting[optimizers]'"
        ) from error
    if not objective.learned:
        raise ValueError(
            "GEPA needs at least two training rows: one to reflect on, one to choose by"
        )
    adapter = _Adapter(objective)
    optimize: Any = gepa.optimize  # its type hints do not allow a callable as a language model
    # A step scores a minibatch twice, reflects once and may score the whole validation half.
    step = 2 * minibatch + 1 + len(objective.chosen_by)
    result = optimize(
        seed_candidate={_PART: prompt},
        trainset=objective.learned,
        valset=objective.chosen_by,
        adapter=adapter,
        reflection_lm=objective.ask_editor,
        reflection_minibatch_size=min(minibatch, len(objective.learned)),
        stop_callbacks=lambda state: not objective.count.affords(step),
        logger=_Silent(),
        seed=objective.seed,
        raise_on_exception=False,
    )
    best = result.best_candidate
    return objective.found(best[_PART], float(result.val_aggregate_scores[result.best_idx]))


class _Silent:
    def log(self, message: str) -> None:
        pass


class _Adapter:
    """GEPA's view of an [`Objective`]; see `gepa.core.adapter.GEPAAdapter`."""

    propose_new_texts = None

    def __init__(self, objective: Objective):
        self.objective = objective

    def evaluate(
        self, batch: list[Row], candidate: dict[str, str], capture_traces: bool = False
    ) -> Any:
        from gepa.core.adapter import EvaluationBatch

        trials = self.objective.try_prompt(
            candidate[_PART], batch
        )  # raises for failed calls; GEPA skips those
        return EvaluationBatch(
            outputs=[trial.answer.whole for trial in trials],
            scores=[trial.score for trial in trials],
            trajectories=trials if capture_traces else None,
        )

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        trials: list[Trial] = eval_batch.trajectories or []
        examples = [
            {
                "Inputs": trial.row["question"],
                "Generated Outputs": trial.answer.whole or "(nothing)",
                "Feedback": trial.feedback,
            }
            for trial in trials
        ]
        return dict.fromkeys(components_to_update, examples)
