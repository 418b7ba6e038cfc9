"""Checks the rows of all data sets, and draws those to train on.

A row has a question, which is filled into the agent's template, or a prompt of its own. With
several environments it names the one that it is for.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import torch
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import IntervalStrategy

from ..data import validate_dataset
from ..data.validation import select_columns
from ..rewards.answer_checks import check_answers_of_rows
from ..rewards.reward_columns import (
    check_columns,
    check_keywords,
    refuse_reserved_columns,
    required_columns,
)
from ..rollout import AgentSpec, Environment, Environments
from .config import MultiTurnGRPOConfig
from .reward_functions import RewardFunction, check_group_sizes
from .setup import unknown_environment

logger = logging.getLogger(__name__)

Rows: TypeAlias = Dataset | IterableDataset


def prepare_rows(
    args: MultiTurnGRPOConfig,
    environment: Environment | None,
    reward_functions: Sequence[RewardFunction],
    train_dataset: Rows,
    eval_datasets: Sequence[Rows],
    prompt_template: str | Mapping[str, str] | None,
) -> Rows:
    """Check all rows, and return those to train on, in the shares of `environment_ratio`.

    Args:
        args ([`MultiTurnGRPOConfig`]): The settings.
        environment ([`Environment`], *optional*): Answers the agent's requests.
        reward_functions (`Sequence`): The reward functions, which need columns.
        train_dataset (`Dataset`): The rows to train on.
        eval_datasets (`Sequence[Dataset]`): The rows of evaluations.
        prompt_template (`str` or `Mapping`, *optional*): The trainer's argument, which rows with a
            prompt of their own would ignore.

    Raises:
        `ValueError`: If rows lack a column that they need, or name no environment of the run, or
            if an option would be ignored.
    """
    check_group_sizes(reward_functions, args, bool(eval_datasets))
    check_dataset_settings(args, train_dataset, eval_datasets)
    # Options by environment need several environments, and rows that name theirs.
    if isinstance(environment, Environments):
        for name in args.environment_limits or ():
            if name not in environment.by_name:
                raise unknown_environment("environment_limits", name, environment.by_name)
        for dataset in [train_dataset, *eval_datasets]:
            check_environment_column(dataset, environment)
        if args.environment_ratio:
            assert not isinstance(args.environment_ratio, str)  # checked by the settings
            train_dataset = draw_by_ratio(train_dataset, args.environment_ratio, args.seed)
    else:
        for name in ("environment_ratio", "environment_limits"):
            if getattr(args, name):
                raise ValueError(
                    f"{name} would be ignored, because it needs several environments: pass "
                    "environment={name: ...}"
                )

    # An environment with a `reset` may add the columns that reward functions need.
    may_add_columns = environment is not None and environment.has_reset
    column_readers = [] if may_add_columns else reward_functions
    for dataset in [train_dataset, *eval_datasets]:
        check_dataset(dataset, column_readers, prompt_template)
    if args.process_index == 0:
        warn_of_known_rows(train_dataset, eval_datasets)
    return train_dataset


def check_dataset_settings(
    args: MultiTurnGRPOConfig, train_dataset: Rows, eval_datasets: Sequence[Rows]
) -> None:
    """Refuse settings that do not fit the data sets, which would fail after the model is loaded.

    Raises:
        `ValueError`: If the run would evaluate without rows, or columns would be removed.
    """
    if not eval_datasets:
        strategy = IntervalStrategy(args.eval_strategy or "no")
        setting = None
        if strategy != IntervalStrategy.NO:
            setting = f"eval_strategy={strategy.value!r}"
        elif args.eval_on_start:
            setting = "eval_on_start=True"
        if setting is not None:
            raise ValueError(
                f"{setting} needs rows to evaluate on: pass eval_dataset= to the trainer "
                "(--held-out 0.3 or --eval_task on the command line), or leave the setting out"
            )

    # The base class would keep the column `prompt` alone. Streamed rows may not name theirs.
    if args.remove_unused_columns:
        columns: set[str] = set()
        for dataset in [train_dataset, *eval_datasets]:
            columns.update(getattr(dataset, "column_names", None) or ())
        removed = sorted(columns - {"prompt"})
        if removed:
            names = ", ".join(f"`{name}`" for name in removed)
            raise ValueError(
                f"remove_unused_columns=True would remove the columns {names}, which prompts, "
                "rewards and environments read: leave it at False"
            )


def warn_of_known_rows(train_dataset: Rows, eval_datasets: Sequence[Rows]) -> None:
    """Log one warning if evaluation rows are training rows, too."""

    def list_questions(dataset: Rows) -> list[str]:
        # Streamed rows can be read only once.
        if not hasattr(dataset, "__len__"):
            return []
        column = "prompt" if has_prompt_column(dataset) else "question"
        return [str(question) for question in dataset[column]]

    if not eval_datasets:
        return
    learned = set(list_questions(train_dataset))
    questions: list[str] = []
    for dataset in eval_datasets:
        questions += list_questions(dataset)
    repeated_questions = [question for question in questions if question in learned]
    if repeated_questions:
        logger.warning(
            "%d of the %d rows of eval_dataset ask what a row of train_dataset asks, such as "
            "%.80r: they say nothing about new questions. agentic_prompting.data.hold_out splits "
            "rows without one on both sides",
            len(repeated_questions),
            len(questions),
            repeated_questions[0],
        )


def check_dataset(
    dataset: Dataset | IterableDataset,
    reward_functions: Sequence[RewardFunction],
    prompt_template: str | Mapping[str, str] | None,
) -> None:
    """Check that a dataset has the columns that the prompt and the reward functions need.

    Raises:
        `ValueError`: If the rows have neither a question nor a prompt, if they lack a column that a
            reward function needs or have one that it would not get, if a reward function has no
            `**kwargs` for the other arguments, or if the rows have a prompt of their own, so that
            the template would be ignored.
    """
    # Rows with a prompt of their own need no question.
    prompt_column = "prompt" if has_prompt_column(dataset) else "question"
    validate_dataset(dataset, columns=(prompt_column,))

    if prompt_column == "prompt":
        _check_prompts(dataset)
    refuse_reserved_columns(getattr(dataset, "column_names", None) or ())

    for function in reward_functions:
        # A reward model reads the completions alone.
        if not callable(function) or isinstance(function, torch.nn.Module):
            continue
        # The reward function of one of several environments gets the rows of that one.
        rows = function.select_rows(dataset) if hasattr(function, "select_rows") else dataset
        first_row = next(iter(rows), None)
        if first_row is not None:
            check_columns(function, first_row)
            check_keywords(function)
            validate_dataset(rows, columns=required_columns(function))
            check_answers_of_rows(function, rows)

    if prompt_template is not None and prompt_column == "prompt":
        raise ValueError(
            "prompt_template would be ignored, as the dataset has a column `prompt`, which is used "
            "as it is: leave one of them out"
        )


def _check_prompts(dataset: Rows) -> None:
    """Raise `ValueError` for the first row that has neither a prompt nor a question."""
    # Of streamed rows only the first one is checked.
    rows: Any = islice(dataset, 1)
    if hasattr(dataset, "__len__"):
        rows = select_columns(dataset, ("prompt", "question"))
    for number, row in enumerate(rows):
        if not row["prompt"] and not row.get("question"):
            raise ValueError(
                f"row {number} of the dataset has an empty `prompt`, and no `question` instead"
            )


def has_prompt_column(dataset: Dataset | IterableDataset) -> bool:
    """Return whether the rows have a column `prompt`, which is used as it is."""
    return "prompt" in (getattr(dataset, "column_names", None) or ())


def warn_of_unused_system_prompt(spec: AgentSpec, datasets: Sequence[Rows]) -> None:
    """Log one warning if rows have a system message, in whose place the system prompt would be."""
    if not spec.system_prompt or spec.join_system_prompt:
        return
    for dataset in datasets:
        # Of streamed rows only the first one is read.
        rows: Any = islice(dataset, 1)
        if hasattr(dataset, "__len__"):
            rows = select_columns(dataset, ("prompt",)) if has_prompt_column(dataset) else ()
        for row in rows:
            prompt = row.get("prompt")
            is_conversation = bool(prompt) and not isinstance(prompt, str)
            if is_conversation and prompt[0].get("role") == "system":
                logger.warning(
                    "the system prompt of the agent (system_prompt=, or the one saved with the "
                    "model) is not used for rows whose `prompt` starts with a system message of "
                    "its own, such as %.80r: leave one of them out",
                    prompt[0].get("content"),
                )
                return


def list_datasets(eval_dataset: Rows | Mapping[str, Rows] | None) -> list[Rows]:
    """Return the data sets to evaluate on."""
    if eval_dataset is None:
        return []
    if isinstance(eval_dataset, Mapping):
        return [dataset for dataset in eval_dataset.values() if dataset is not None]
    return [eval_dataset]


def check_environment_column(dataset: Rows, environment: Environments) -> None:
    """Raise `ValueError` unless each row names one of the environments."""
    validate_dataset(dataset, columns=("environment",))
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            "several environments need rows that can be counted: do not stream the dataset"
        )
    for index, name in enumerate(dataset["environment"]):
        if name not in environment.by_name:
            raise unknown_environment(f"row {index} of the dataset", name, environment.by_name)


def draw_by_ratio(dataset: Dataset, ratio: Mapping[str, float], seed: int) -> Dataset:
    """Return the rows of several environments in given shares. Each row appears at least once.

    Args:
        dataset (`Dataset`): Rows with a column `environment`.
        ratio (`Mapping[str, float]`): The share of each environment, relative to their sum.
        seed (`int`): Decides the order, and which rows appear once more than others.

    Raises:
        `ValueError`: If the ratio names other environments than the rows, or a share is not above
            0.
    """
    # Group the rows by environment, and compare the groups with the ratio.
    indices_by_environment: dict[str, list[int]] = {}
    for index, name in enumerate(dataset["environment"]):
        indices_by_environment.setdefault(name, []).append(index)

    if set(ratio) != set(indices_by_environment):
        raise ValueError(
            f"environment_ratio names {', '.join(ratio)}, but the rows name "
            f"{', '.join(indices_by_environment)}"
        )
    for name, share in ratio.items():
        if not 0 < share < math.inf:
            raise ValueError(f"environment_ratio of {name!r} must be above 0, got {share}")

    # The smallest number of rows for which each environment's share has room for all of its rows.
    total_share = sum(ratio.values())
    row_count = max(
        len(indices) * total_share / ratio[name] for name, indices in indices_by_environment.items()
    )

    # Repeat the rows of each environment; the rest of its share is a sample without replacement.
    random_numbers = random.Random(seed)
    drawn: list[int] = []
    for name, indices in indices_by_environment.items():
        target_count = max(round(row_count * ratio[name] / total_share), len(indices))
        repeats, remainder = divmod(target_count, len(indices))
        drawn += indices * repeats + random_numbers.sample(indices, remainder)
    random_numbers.shuffle(drawn)
    return dataset.select(drawn)


def prompt_format_of(datasets: Sequence[Rows]) -> str:
    """Return the form of the prompts of all data sets.

    It is `text` where rows have a `prompt` that is a string, else `chat`. The first row of each
    data set decides.

    Raises:
        `ValueError`: If some are text and some are not, or if rows have images, which would be
            ignored.
    """
    formats = set()
    for dataset in datasets:
        # Streamed data sets can be read, but not be counted or indexed.
        first_row: Mapping[str, Any] = next(iter(dataset), {})
        _refuse_images(first_row)
        formats.add("text" if isinstance(first_row.get("prompt"), str) else "chat")
    if len(formats) > 1:
        raise ValueError(
            "the column `prompt` is text in some datasets, and messages or absent in others: give "
            "all datasets the same form of prompt"
        )
    return formats.pop() if formats else "chat"


def _refuse_images(row: Mapping[str, Any]) -> None:
    # Images come as columns of their own, or as parts of the messages of a prompt.
    image_source = None
    for name in ("image", "images"):
        if name in row and image_source is None:
            image_source = f"a column `{name}`"

    # The content of a message is a text, or a list of parts.
    prompt = row.get("prompt")
    messages = [] if prompt is None or isinstance(prompt, str) else prompt
    for message in messages:
        content = message.get("content")
        parts = [] if content is None or isinstance(content, str) else content
        if any(part.get("type") not in (None, "text") for part in parts):
            image_source = image_source or "a `prompt` with images"

    if image_source is not None:
        raise ValueError(
            f"the dataset has {image_source}, but this trainer is text-only: remove the images, or "
            "use trl.GRPOTrainer for vision models"
        )
