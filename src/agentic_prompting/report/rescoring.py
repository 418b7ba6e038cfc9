"""Rewards of stored rollouts, of a training run or in the answers of an evaluation, computed anew by
other reward functions; nothing is generated.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from statistics import fmean
from typing import Any

from ..evaluation import Estimate, paired_difference
from ..evaluation.intervals import estimate_mean
from ..evaluation.saved_runs import RUN_FILE
from ..llm import run as run_on_loop
from ..llm.guard import call_guarded, place_of
from ..llm.numbers import finite_float
from ..records import Record, atomic_write
from ..rewards.reward_columns import REWARD_ARGUMENTS, check_columns
from ..rollout import (
    SPEC_FILE,
    AgentSpec,
    Rollout,
    question_text,
    render_messages,
    restore_rollout,
)
from ..rollout.environment import same_columns
from ..rollout.progress import show_progress
from .evaluation_summary import read_json_object
from .rollout_records import current_records, gradient_share, group_records, total_reward
from .sound_records import read_sound_answers, read_sound_rollouts

Reward = Callable[..., Any]

Pair = tuple[Record, Mapping[str, Any]]
"""A stored rollout, and its line in the file of the new rewards."""

FOLDER = "rescored"
"""The folder of the files, in that of the run or the evaluation."""

# Columns of a row that every record has.
_ROW_COLUMNS = ("id", "question", "answers", "task", "environment", "workers", "budget")
# Arguments of TRL's reward signature that no record holds.
_NOT_RECORDED = ("completion_ids", "environments", "trainer_state")


@dataclass(frozen=True)
class RewardChange:
    """The rewards of a run's rollouts before and after.

    Args:
        mode (`str`): `train` or `eval`.
        rollouts (`int`): The rollouts, with those that failed.
        failed (`int`): Rollouts that failed. They have no reward before and after.
        unscored (`int`): Other rollouts for which the new functions return `None`.
        old ([`Estimate`], *optional*): The mean reward that was recorded, over questions.
        new ([`Estimate`], *optional*): The mean of the new rewards, over questions.
        difference ([`Estimate`], *optional*): New minus old, paired by rollout, over questions.
        old_gradient_share (`float`, *optional*): The share of groups whose recorded rewards differ.
        new_gradient_share (`float`, *optional*): The share of groups whose new rewards differ.
        step (`int`, *optional*): The step of the evaluation; `None` for the rollouts of training.
    """

    mode: str
    rollouts: int
    failed: int
    unscored: int
    old: Estimate | None
    new: Estimate | None
    difference: Estimate | None
    old_gradient_share: float | None
    new_gradient_share: float | None
    step: int | None = None


@dataclass(frozen=True)
class Rescoring:
    """The result of [`rescore`].

    Args:
        changes (`list[RewardChange]`): One for the training rollouts, then one for each evaluation,
            by its step.
        records (`list[dict]`): One for each rollout: `mode`, `step`, `id`, `question`, `seed`,
            `status`, `old`, `new`, and `rewards`, the new rewards by function.
        path (`Path`): The file of the records, JSON lines.
    """

    changes: list[RewardChange]
    records: list[dict[str, Any]]
    path: Path


@dataclass(frozen=True)
class SystemReward:
    """The mean reward of a system's answers to a task of an evaluation.

    Args:
        system (`str`), task (`str`): Their names.
        answers (`int`): The answers, with those that failed.
        failed (`int`): Answers that failed. They have no reward.
        unscored (`int`): Other answers for which the functions return `None`.
        mean ([`Estimate`], *optional*): The mean reward, over questions.
        difference ([`Estimate`], *optional*): Its difference from the first system, paired by
            question. `None` for the first system itself.
    """

    system: str
    task: str
    answers: int
    failed: int
    unscored: int
    mean: Estimate | None
    difference: Estimate | None


@dataclass(frozen=True)
class AnswerRescoring:
    """The result of [`rescore_answers`].

    Args:
        systems (`list[SystemReward]`): One for each system and task, in the order of the table.
        baseline (`str`): The first system, with which the others are compared.
        left_out (`list[str]`): Systems whose answers are no rollouts of an agent.
        records (`list[dict]`): One for each answer: `system`, `task`, `run`, `place`, `id`,
            `question`, `status`, `reward`, and `rewards`, the rewards by function.
        path (`Path`): The file of the records, JSON.
    """

    systems: list[SystemReward]
    baseline: str
    left_out: list[str]
    records: list[dict[str, Any]]
    path: Path


def rescore(
    run: str | Path,
    reward: Reward | Sequence[Reward],
    weights: Sequence[float] | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
    name: str = "",
) -> Rescoring:
    """Compute the rewards of a run's stored rollouts anew, and compare them with the recorded ones.

    The functions get `prompts`, `completions`, `rollout` and the columns of the rows as in
    training, all rollouts of a step in one call. Token ids are not recorded. A rollout that failed
    stays without a reward.

    Args:
        run (`str` or `Path`): The folder of a training run.
        reward (`Callable` or `list[Callable]`): With TRL's reward signature, plain or `async`.
        weights (`Sequence[float]`, *optional*): The weight of each function. Defaults to 1.
        rows (`Iterable[Mapping]`, *optional*): The run's dataset, for columns that records do not
            have (they have `id`, `question`, `answers` and `task`): the rows of training and of
            evaluation, `[*train_rows, *eval_rows]`. They are found by `id`, else by `question` or
            the text of `prompt`.
        name (`str`, *optional*): The name of the file. Defaults to the names of the functions.

    Raises:
        `FileNotFoundError`: There is no such folder.
        `ValueError`: The folder holds no rollouts, a function needs a column that is missing, or
            returns something else than a number or `None` for each rollout.

    Example:

        >>> result = rescore("runs/hotpot", exact_match_reward)  # doctest: +SKIP
        >>> print(result.changes[0].difference)  # doctest: +SKIP
    """
    run = Path(run)
    if not run.is_dir():
        raise FileNotFoundError(f"{run} is not a folder: name the folder of a training run")
    named_functions = _name_functions(reward)
    weights = _read_weights(weights, len(named_functions))
    records = current_records(read_sound_rollouts(run / "rollouts"))
    if not records:
        raise ValueError(
            f"{run} holds no rollouts: name the folder of a training run, or that of a finished "
            "evaluation of an agent (`evaluate --run`), such as RUN/evaluation; one by "
            "evaluate_agent in Python is finished by save_run(folder, evaluation)"
        )

    spec = _load_spec(run)
    rollouts = _restore_rollouts(records, spec, rows)
    new_rewards = _compute_rewards(
        records, rollouts, named_functions, spec, has_rows=rows is not None
    )

    # One record for each rollout, and the means of training and of each evaluation: the agent of
    # one evaluation is not that of another.
    rescored = [
        _rescored_record(record, rewards, weights)
        for record, rewards in zip(records, new_rewards, strict=True)
    ]
    training_pairs: list[Pair] = []
    evaluation_pairs: dict[int, list[Pair]] = defaultdict(list)
    for record, new in zip(records, rescored, strict=True):
        if new["mode"] == "train":
            training_pairs.append((record, new))
        else:
            evaluation_pairs[new["step"]].append((record, new))
    changes = []
    if training_pairs:
        changes.append(_compare("train", None, training_pairs))
    for step, pairs in sorted(evaluation_pairs.items()):
        changes.append(_compare("eval", step, pairs))
    path = run / FOLDER / f"{_file_name(name, named_functions)}.jsonl"
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in rescored]
    atomic_write(path, "".join(lines))
    return Rescoring(changes=changes, records=rescored, path=path)


def rescore_answers(
    folder: str | Path,
    reward: Reward | Sequence[Reward],
    weights: Sequence[float] | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
    name: str = "",
) -> AnswerRescoring:
    """Compute rewards of the answers of an evaluation, and compare the systems in them.

    The answers of an agent ([`AgentSystem`], `evaluate --run`) are stored with their rollouts. The
    functions are called as by [`rescore`], with all answers of a system in one run together.

    Args:
        folder (`str` or `Path`): The folder of a finished evaluation.
        reward (`Callable` or `list[Callable]`): With TRL's reward signature, plain or `async`.
        weights (`Sequence[float]`, *optional*): The weight of each function. Defaults to 1.
        rows (`Iterable[Mapping]`, *optional*): The rows of the evaluation, for columns that records
            do not have. They are found as by [`rescore`].
        name (`str`, *optional*): The name of the file. Defaults to the names of the functions.

    Raises:
        `FileNotFoundError`: The folder holds no finished evaluation.
        `ValueError`: No answer in it is a rollout of an agent, a function needs a column that is
            missing, or returns something else than a number or `None` for each rollout.

    Example:

        >>> result = rescore_answers("runs/hotpot/evaluation", graded)  # doctest: +SKIP
        >>> print(result.systems[-1].difference)  # doctest: +SKIP
    """
    folder = Path(folder)
    if not is_evaluation(folder):
        raise FileNotFoundError(
            f"{folder} holds no finished evaluation: run its `evaluate` to the end, or call "
            "save_run(folder, evaluation) after evaluate_agent"
        )
    named_functions = _name_functions(reward)
    weights = _read_weights(weights, len(named_functions))

    # The systems of the table, in its order. Those that are no agents have no rollouts.
    system_names = list(read_json_object(folder / RUN_FILE).get("fit_calls") or {})
    answers: list[Record] = []
    for path in sorted(folder.rglob("*.jsonl")):
        answers += [answer for answer in read_sound_answers(path) if _has_rollout(answer)]
    systems = [name for name in system_names if any(answer["system"] == name for answer in answers)]
    if not systems:
        raise ValueError(f"no answer in {folder} is a rollout of an agent, which a reward reads")
    answers = [answer for answer in answers if answer["system"] in systems]

    # A reward function is called for each system and run of the questions.
    records = [
        {**answer["trajectory"], "mode": answer["system"], "step": answer["run"]}
        for answer in answers
    ]
    # The agent of `evaluate --run` is in the folder above, unless --output-dir names another one.
    spec = _load_spec(folder.parent)
    rollouts = _restore_rollouts(records, spec, rows)
    rewards = _compute_rewards(records, rollouts, named_functions, spec, has_rows=rows is not None)
    rescored = [
        {
            "system": answer["system"],
            "task": answer["task"],
            "run": answer["run"],
            "place": answer["place"],
            "id": answer.get("id"),
            "question": answer.get("question"),
            "status": answer["trajectory"]["status"],
            "reward": _weighted_sum(answer_rewards, weights),
            "rewards": answer_rewards,
        }
        for answer, answer_rewards in zip(answers, rewards, strict=True)
    ]

    # The other files of the folder that end in .jsonl are answers.
    path = folder / FOLDER / f"{_file_name(name, named_functions)}.json"
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, json.dumps(rescored, ensure_ascii=False, indent=1) + "\n")
    return AnswerRescoring(
        systems=_compare_with_first(systems, rescored),
        baseline=systems[0],
        left_out=[name for name in system_names if name not in systems],
        records=rescored,
        path=path,
    )


def is_evaluation(folder: str | Path) -> bool:
    """Whether a folder is that of a finished evaluation, and not of a training run."""
    folder = Path(folder)
    return (folder / RUN_FILE).is_file() and not (folder / "rollouts").is_dir()


def _has_rollout(answer: Record) -> bool:
    """Whether an answer is stored with its rollout, as those of an agent are."""
    trajectory = answer.get("trajectory")
    return isinstance(trajectory, Mapping) and {"status", "turns", "observations"} <= set(
        trajectory
    )


def _compare_with_first(
    systems: Sequence[str], rescored: Sequence[Mapping[str, Any]]
) -> list[SystemReward]:
    """The mean reward of each system on each task, and its difference from the first system's."""
    rewards = []
    for task in dict.fromkeys(record["task"] for record in rescored):
        baseline_means: dict[int, float] = {}
        for system in systems:
            own_records = [
                record
                for record in rescored
                if record["system"] == system and record["task"] == task
            ]
            # The mean of each question over its runs: questions weigh alike.
            values: dict[int, list[float]] = defaultdict(list)
            for record in own_records:
                if record["reward"] is not None:
                    values[record["place"]].append(record["reward"])
            means = {question: fmean(scores) for question, scores in values.items()}

            difference = None
            if system == systems[0]:
                baseline_means = means
            elif set(means) & set(baseline_means):
                difference = paired_difference(means, baseline_means).difference
            failed = sum(record["status"] == "failed" for record in own_records)
            missing = sum(record["reward"] is None for record in own_records)
            rewards.append(
                SystemReward(
                    system=system,
                    task=task,
                    answers=len(own_records),
                    failed=failed,
                    unscored=missing - failed,
                    mean=estimate_mean(list(means.values()), is_share=True),
                    difference=difference,
                )
            )
    return rewards


def _name_functions(reward: Reward | Sequence[Reward]) -> dict[str, Reward]:
    """The reward functions by their names."""
    functions = [reward] if callable(reward) else list(reward)
    if not functions:
        raise ValueError("rescore needs at least one reward function")
    return dict(zip(_names_of(functions), functions, strict=True))


def _read_weights(weights: Sequence[float] | None, function_count: int) -> list[float]:
    if weights is None:
        return [1.0] * function_count
    if len(weights) != function_count:
        raise ValueError(f"{function_count} reward functions need as many weights: {weights}")
    return list(weights)


def _file_name(name: str, functions: Iterable[str]) -> str:
    """The name of the file of rewards, without its ending."""
    return re.sub(r"[^\w.-]+", "-", name or "-".join(functions)).strip("-.") or "rewards"


def _compute_rewards(
    records: Sequence[Record],
    rollouts: Sequence[Rollout],
    functions: Mapping[str, Reward],
    spec: AgentSpec | None,
    has_rows: bool,
) -> list[dict[str, float | None]]:
    """Return the reward of each rollout by the name of the function; `None` where it failed."""
    # Score all rollouts of a step together, because a function may compare those of a group.
    steps: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for index in _indices_by_group(records):
        record = records[index]
        if record["status"] != "failed":
            step = (record.get("run", 0), record.get("mode", "train"), record["step"])
            steps[step].append(index)

    rewards: list[dict[str, float | None]] = [dict.fromkeys(functions) for _ in records]
    with show_progress(len(steps), "steps rescored") as bar:
        for indices in steps.values():
            columns = _columns_of([rollouts[index] for index in indices], spec)
            for name, function in functions.items():
                values = _call(function, columns, len(indices), has_rows)
                for index, value in zip(indices, values, strict=True):
                    rewards[index][name] = value
            bar.update()
    return rewards


def _load_spec(run: Path) -> AgentSpec | None:
    """Return the form of the run's agent; `None` if it saved none, or one with a grammar of the
    user's.
    """
    if not (run / SPEC_FILE).exists():
        return None
    try:
        return AgentSpec.load(run)
    except ValueError:
        return None


def _restore_rollouts(
    records: Sequence[Record],
    spec: AgentSpec | None,
    rows: Iterable[Mapping[str, Any]] | None,
) -> list[Rollout]:
    # The rows by id and by question, where the caller has passed the dataset.
    rows_by_key: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in rows or ():
        # An empty cell of a spreadsheet is no id.
        if row.get("id") not in (None, ""):
            rows_by_key.setdefault(("id", str(row["id"])), row)
        rows_by_key.setdefault(("question", question_text(row)), row)

    rollouts = []
    for record in records:
        own_row: Mapping[str, Any] = {}
        for column in ("id", "question"):
            own_row = own_row or rows_by_key.get((column, str(record.get(column))), {})
        if rows is not None and not own_row:
            raise ValueError(
                f"the dataset has no row with the question {str(record.get('question'))[:80]!r} of "
                f"a rollout in {record.get('mode', 'train')!r}: pass all rows of the run, those of "
                "its evaluations too"
            )
        recorded = {column: record[column] for column in _ROW_COLUMNS if column in record}
        grammar = None if spec is None else spec.for_row(record).grammar
        rollouts.append(restore_rollout(record, {**own_row, **recorded}, grammar))
    return rollouts


def _indices_by_group(records: Sequence[Record]) -> list[int]:
    """The positions of the records, those of a group as neighbours."""
    numbered = [{**record, "index": index} for index, record in enumerate(records)]
    return [record["index"] for group in group_records(numbered) for record in group]


def _columns_of(rollouts: Sequence[Rollout], spec: AgentSpec | None) -> dict[str, Any]:
    """The arguments of the reward functions for rollouts that have not failed."""
    if spec is None:
        spec = AgentSpec()
    rows = same_columns([rollout.row for rollout in rollouts])
    columns: dict[str, Any] = {}
    for name in rows[0]:
        columns[name] = [row[name] for row in rows]
    columns.pop("prompt", None)

    # Prompts and completions in the form of training: text, or messages.
    prompts: list[Any] = []
    completions: list[Any] = []
    for rollout in rollouts:
        own_spec = spec.for_row(rollout.row)
        tools = own_spec.chat_template_kwargs.get("tools") or ()
        messages = render_messages(rollout, rollout.texts, own_spec.grammar, tools)
        has_prompt = rollout.row.get("prompt") or rollout.row.get("question")
        prompt: Any = own_spec.messages(rollout.row) if has_prompt else []
        if spec.prompt_format == "text":
            prompt = "".join(message["content"] for message in prompt)
            completions.append("".join(message["content"] for message in messages))
        else:
            completions.append(messages)
        prompts.append(prompt)

    columns["prompts"] = prompts
    columns["completions"] = completions
    columns["rollout"] = list(rollouts)
    columns["log_metric"] = _log_nothing
    columns["log_extra"] = _log_nothing
    return columns


def _log_nothing(*args: object, **kwargs: object) -> None:
    """Stands for TRL's functions that log from within a reward: there is no log here."""


def _call(
    function: Reward, columns: Mapping[str, Any], count: int, has_rows: bool
) -> list[float | None]:
    """Call a reward function, and check what it needs and returns.

    `has_rows`: whether the columns include those of the dataset, beside those of the records.
    """
    row = {name: values for name, values in columns.items() if name not in REWARD_ARGUMENTS}
    try:
        check_columns(function, row, has_all_columns=has_rows)
    except ValueError as error:
        if has_rows:
            raise
        raise ValueError(
            f"{error}; records keep no other columns: pass the run's dataset (rows=, --dataset, "
            "with --columns as in training)"
        ) from None
    for parameter in signature(function).parameters.values():
        if parameter.name in _NOT_RECORDED and parameter.default is Parameter.empty:
            raise ValueError(
                f"the reward function {place_of(function)} needs {parameter.name}, which is not "
                "recorded: give the parameter a default"
            )

    returned = run_on_loop(call_guarded(function, **columns))
    rewards: list[float | None] = []
    if not isinstance(returned, str | Mapping):
        with suppress(TypeError, ValueError):
            rewards = [None if value is None else finite_float(value) for value in returned]
    if len(rewards) != count:
        raise ValueError(
            f"the reward function {place_of(function)} must return a list of {count} numbers (or "
            f"None), one for each completion; it returned {repr(returned)[:200]}"
        )
    return rewards


def _names_of(functions: Sequence[Reward]) -> list[str]:
    """A name for each function; the second of the same name gets a number."""
    names: list[str] = []
    for function in functions:
        name = str(getattr(function, "__name__", type(function).__name__))
        is_taken = name in names
        names.append(f"{name} {len(names) + 1}" if is_taken else name)
    return names


def _rescored_record(
    record: Record, rewards: Mapping[str, float | None], weights: Sequence[float]
) -> dict[str, Any]:
    return {
        "mode": record.get("mode", "train"),
        "step": record["step"],
        "id": record.get("id"),
        "question": record.get("question"),
        "seed": record.get("seed"),
        "status": record["status"],
        "old": total_reward(record),
        "new": _weighted_sum(rewards, weights),
        "rewards": dict(rewards),
    }


def _weighted_sum(rewards: Mapping[str, float | None], weights: Sequence[float]) -> float | None:
    # As in training a missing reward counts as 0, unless all are missing.
    weighted = [
        weight * value
        for weight, value in zip(weights, rewards.values(), strict=True)
        if value is not None
    ]
    return round(sum(weighted), 6) if weighted else None


def _compare(mode: str, step: int | None, pairs: Sequence[Pair]) -> RewardChange:
    """The means of the rollouts of training, or of one evaluation, over questions."""
    old_values: dict[str, list[float]] = defaultdict(list)
    new_values: dict[str, list[float]] = defaultdict(list)
    paired_old: dict[str, list[float]] = defaultdict(list)
    paired_new: dict[str, list[float]] = defaultdict(list)
    for record, rescored in pairs:
        question = f"{record.get('environment')} {record.get('id') or record.get('question')}"
        old = rescored["old"]
        new = rescored["new"]
        if old is not None:
            old_values[question].append(old)
        if new is not None:
            new_values[question].append(new)
        if old is not None and new is not None:
            paired_old[question].append(old)
            paired_new[question].append(new)

    # Questions weigh alike, as everywhere in evaluations.
    difference = None
    if paired_new:
        questions = {question: number for number, question in enumerate(paired_new)}
        difference = paired_difference(
            {questions[question]: fmean(values) for question, values in paired_new.items()},
            {questions[question]: fmean(values) for question, values in paired_old.items()},
        ).difference
    failed = [record for record, _ in pairs if record["status"] == "failed"]
    unscored = [
        rescored
        for record, rescored in pairs
        if record["status"] != "failed" and rescored["new"] is None
    ]
    old_records = [record for record, _ in pairs]
    new_records = [{**record, "reward": rescored["new"]} for record, rescored in pairs]
    return RewardChange(
        mode=mode,
        step=step,
        rollouts=len(pairs),
        failed=len(failed),
        unscored=len(unscored),
        old=_estimate(old_values),
        new=_estimate(new_values),
        difference=difference,
        old_gradient_share=gradient_share(old_records),
        new_gradient_share=gradient_share(new_records),
    )


def _estimate(values_by_question: Mapping[str, Sequence[float]]) -> Estimate | None:
    means = [fmean(values) for values in values_by_question.values()]
    return estimate_mean(means, is_share=True)
