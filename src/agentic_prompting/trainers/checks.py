"""What is checked of a trainer's arguments before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from trl import GRPOConfig

from ..evolution import Population, SystemPrompt
from ..llm import ChatModel
from ..rollout import Environment
from .espl_config import ESPLConfig


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


def check_rows(dataset: Any, args: GRPOConfig, rollouts_per_row: int) -> None:
    """Raises `ValueError` if a data set is too small for a single step, of which TRL would make a run of no steps."""
    needed = args.generation_batch_size // rollouts_per_row
    if hasattr(dataset, "__len__") and len(dataset) < needed:
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, and a batch of {args.generation_batch_size} rollouts takes "
            f"{needed} ({rollouts_per_row} of each row): nothing would be trained; add rows, or make the batch smaller "
            "(per_device_train_batch_size x processes x steps_per_generation)"
        )


def check_environment(environment: Environment | ChatModel | None) -> None:
    """Raises what a first call to an environment or large LLM would meet, if it can be checked."""
    check = getattr(environment, "check", None)
    if check is not None:
        check()


def check_reflector(reference: ChatModel | None, args: ESPLConfig) -> None:
    """Raises `ValueError` unless there is exactly one that reflects, for a mode that needs it."""
    if not args.evolves:
        return
    if reference is None and args.reflector == "reference":
        raise ValueError(
            f"mode={args.mode!r} needs a reference LLM to reflect: pass reference=, or use mode='rl', or "
            "reflector='policy' to let the policy do it"
        )
    if reference is not None and args.reflector == "policy":
        raise ValueError("with reflector='policy' the reference LLM would never be asked: pass reference=None")


def population_of(population: Population | None, initial_prompt: SystemPrompt | str, args: ESPLConfig) -> Population:
    """The population to train with: a given one, or a new one from the root that `initial_prompt` is: a text with lines
    `[G0]. ...` as principles, any other as a preamble to add them to.

    Raises:
        `ValueError`: An argument would be ignored beside a population of one's own, or that does not fit the mode.
    """
    if population is not None:
        if initial_prompt:
            raise ValueError("initial_prompt would be ignored: population= brings its own prompts")
        if args.mode == "reflection" and population.window != 1:
            raise ValueError("mode='reflection' needs a Population with window=1")
        args.check_own_population()
        return population
    root = initial_prompt
    if not isinstance(root, SystemPrompt):
        root = SystemPrompt.parse(root) if "[G0]" in root else SystemPrompt(root, ())
    return args.population(root, args.seed, window=1 if args.mode == "reflection" else None)
