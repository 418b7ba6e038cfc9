"""What is checked of a trainer's arguments before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import Dataset

from ..llm import ChatModel
from ..rollout import Environment


def reject_other_loops(kwargs: Mapping[str, Any]) -> None:
    """Raises `ValueError` for TRL arguments that bring a generation loop of their own."""
    for name in ("tools", "rollout_func", "environment_factory"):
        if kwargs.get(name):
            raise ValueError(
                f"{name}= belongs to TRL's own loop, which this trainer replaces: pass an environment= with "
                "step(rollout) instead, or use trl.GRPOTrainer"
            )


def datasets_of(dataset: Dataset | Mapping[str, Dataset] | None) -> list[Dataset]:
    """The data sets in an `eval_dataset` argument."""
    if dataset is None:
        return []
    return list(dataset.values()) if isinstance(dataset, Mapping) else [dataset]


def check_environment(environment: Environment | ChatModel | None) -> None:
    """Raises what a first call to an environment or large LLM would meet, if it can be checked."""
    check = getattr(environment, "check", None)
    if check is not None:
        check()
