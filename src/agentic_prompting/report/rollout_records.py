"""Recorded rollouts: which of them count, their rewards and groups, and the curves over training
steps.

Curves are made of the recorded rollouts and not of the trainer's log: every run has records,
whether or not it saved a checkpoint, and the curves then agree with the trajectories that are shown
beside them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from ..evaluation.repeats import passes
from ..records import Record
from ..rewards import PromptR1Reward, exact_match, token_f1
from ..rollout import STATUSES, mean_diversity
from .sound_records import is_number

_CLOSE = 1e-5  # rewards are recorded with six digits
_GROUP_KEYS = ("run", "mode", "step", "id", "question", "task", "environment", "system_prompt")


def current_records(records: Iterable[Record]) -> list[Record]:
    """The records, or the entries of the log, without those that a later run in the same folder has
    replaced.

    A resumed run repeats the steps after its checkpoint, and a new run repeats all of them. So an
    earlier run's records from the step on at which the later run began to train do not belong to
    the result, but for the evaluation that was made at this step before the checkpoint was written.
    A run that only evaluates replaces no training. Where several runs evaluated at a step, the last
    one counts that had trained by then; before all training, the one that trained first.
    """
    all_records = list(records)
    # Where each run began to train, and which runs evaluated at each step.
    first_trained_step: dict[int, float] = {}
    evaluating_runs: dict[int, set[int]] = defaultdict(set)  # by step
    for record in all_records:
        run = record.get("run", 0)
        step = record["step"]
        first_step = first_trained_step.setdefault(run, float("inf"))
        if _is_evaluation(record):
            evaluating_runs[step].add(run)
            continue
        # The log ends in a summary, also that of a run that had nothing left to train.
        is_summary = "train_runtime" in record
        if not is_summary:
            first_trained_step[run] = min(first_step, step)

    # For each run the step at which a later one takes over.
    end_step: dict[int, float] = {}
    end = float("inf")
    for run in sorted(first_trained_step, reverse=True):
        end_step[run] = end
        end = min(end, first_trained_step[run])

    # Of several runs that evaluated at a step, the one that counts.
    counted_run: dict[int, int] = {}  # by step
    for step, runs in evaluating_runs.items():
        trained_runs = [run for run in runs if first_trained_step[run] <= step]
        if trained_runs:
            counted_run[step] = max(trained_runs)
        else:
            counted_run[step] = min(runs, key=lambda run: (first_trained_step[run], -run))

    # Keep what came before the later run, and the evaluation at its first step.
    current = []
    for record in all_records:
        run = record.get("run", 0)
        step = record["step"]
        is_kept = step < end_step[run]
        if _is_evaluation(record):
            is_kept = (is_kept or 0 < step == end_step[run]) and counted_run[step] == run
        if is_kept:
            current.append(record)
    return current


def _is_evaluation(record: Record) -> bool:
    """Whether a rollout was played for an evaluation, or an entry of the log is about one."""
    if "mode" in record:
        return record["mode"] == "eval"
    return any(name.startswith("eval_") for name in record)


def logged_step(record: Record) -> int:
    """The step of a record as the trainer's log and the console count it: the first one is 1.

    The record of a rollout has the number of steps before it. The log writes about a step when it
    is over, so that rollouts of training belong to the step after. An evaluation belongs to the
    step that it follows, in both; it is step 0 before all training.
    """
    return record["step"] if _is_evaluation(record) else record["step"] + 1


def total_reward(record: Record) -> float | None:
    """The reward that training used: the weighted sum, `reward`, if it was recorded, else the sum
    of the rewards; `None` if there is none.
    """
    if "reward" in record:
        return record["reward"] if is_number(record["reward"]) else None
    rewards = [reward for reward in (record.get("rewards") or {}).values() if reward is not None]
    return sum(rewards) if rewards else None


def groups_of(records: Sequence[Record]) -> tuple[list[int], list[float | None]]:
    """The groups and advantages of records.

    A group is the rollouts of one row in one step under one prompt. The advantage is GRPO's
    default: the difference from the group's mean, divided by its deviation.

    Returns:
        For each record the number of its group, and its advantage or `None` without a reward.
    """
    # Number the groups in the order of their first records.
    numbers: dict[tuple[str, ...], int] = {}
    group_numbers = []
    for record in records:
        key = tuple(str(record.get(name)) for name in _GROUP_KEYS)
        group_numbers.append(numbers.setdefault(key, len(numbers)))

    # The rewards of each group, then each record's distance from their mean.
    totals = [total_reward(record) for record in records]
    rewards: dict[int, list[float]] = defaultdict(list)
    for group, total in zip(group_numbers, totals, strict=True):
        if total is not None:
            rewards[group].append(total)

    advantages: list[float | None] = []
    for group, total in zip(group_numbers, totals, strict=True):
        if total is None:
            advantages.append(None)
            continue
        # TRL adds 1e-4 to the deviation, too, which may be 0.
        deviation = stdev(rewards[group]) if len(rewards[group]) > 1 else 0.0
        advantages.append((total - fmean(rewards[group])) / (deviation + 1e-4))
    return group_numbers, advantages


def group_records(records: Sequence[Record]) -> list[list[Record]]:
    """The records of each group."""
    groups: dict[int, list[Record]] = defaultdict(list)
    for group, record in zip(groups_of(records)[0], records, strict=True):
        groups[group].append(record)
    return list(groups.values())


def has_gradient(group: Sequence[Record]) -> bool | None:
    """Whether the rewards of a group differ, without which its advantages are all 0; `None` below
    two rewards.
    """
    totals = [total_reward(record) for record in group]
    rewards = [total for total in totals if total is not None]
    if len(rewards) < 2:
        return None
    return max(rewards) - min(rewards) > _CLOSE


def gradient_share(records: Sequence[Record]) -> float | None:
    """The share of groups with a gradient; `None` if no group has two rewards."""
    decisions = [has_gradient(group) for group in group_records(records)]
    # Groups with fewer than two rewards do not count.
    decided = [decision for decision in decisions if decision is not None]
    return sum(decided) / len(decided) if decided else None


def gradient_counts(records: Sequence[Record]) -> dict[str, Any] | None:
    """How many groups of training there are, how many have a gradient, and why the others have
    none.

    Returns:
        `groups`, `with_gradient` and `reasons`, counts by reason; `None` if no group has two
        rewards.
    """
    # Evaluation rollouts are not trained on.
    training = [record for record in records if record.get("mode", "train") == "train"]
    groups = 0
    with_gradient = 0
    reasons: Counter[str] = Counter()
    for group in group_records(training):
        decision = has_gradient(group)
        if decision is None:
            continue
        groups += 1
        with_gradient += decision
        if not decision:
            reasons[_reason_without_gradient(group)] += 1
    if not groups:
        return None
    return {"groups": groups, "with_gradient": with_gradient, "reasons": dict(reasons)}


def _reason_without_gradient(group: Sequence[Record]) -> str:
    """The property that all rollouts of a group share, besides their reward."""
    statuses = {record["status"] for record in group}
    # All rollouts answered: all of them right, all wrong, or neither.
    if statuses == {"answered"}:
        matches = {exact_match_of_record(record) for record in group}
        if matches == {1.0}:
            return "all right"
        return "all wrong" if matches == {0.0} else "all answered, with equal rewards"
    # All rollouts ended in the same way without an answer.
    if len(statuses) == 1:
        return f"all {statuses.pop().replace('_', ' ')}"
    return "different endings, with equal rewards"


def exact_match_of_record(record: Record) -> float | None:
    """1.0 for a right answer, 0.0 for a wrong one or none; `None` if there is nothing to compare
    with.
    """
    if record["status"] == "failed" or not record.get("answers"):
        return None
    return exact_match(record.get("answer") or "", record["answers"])


def reward_parts(record: Record) -> list[tuple[str, float | None]]:
    """A record's rewards by name, with the format and answer parts of Prompt-R1's, and the scores
    of the answer.

    The parts are computed from the turns with the paper's coefficients. They are shown only if
    their sum is the recorded reward: for a run with other coefficients the reward alone is shown.
    The weighted total follows several rewards, or one that it differs from.
    """
    rewards: Mapping[str, float | None] = record.get("rewards") or {}
    parts: list[tuple[str, float | None]] = []
    # Each recorded reward; that of Prompt-R1 is followed by its parts.
    for name, value in rewards.items():
        parts.append((name, value))
        if name == "prompt_r1_reward" and value is not None:
            parts += _prompt_r1_parts(record, value)
    # The total, unless it is the only reward itself.
    if "reward" in record and list(rewards.values()) != [record["reward"]]:
        parts.append(("total, as weighted in training", total_reward(record)))
    # Scores of the answer, whatever the reward was.
    match = exact_match_of_record(record)
    if match is not None:
        parts.append(("exact match", match))
        parts.append(("token F1", token_f1(record.get("answer") or "", record["answers"])))
    return parts


def _prompt_r1_parts(record: Record, recorded: float) -> list[tuple[str, float | None]]:
    if not record.get("answers"):
        return []
    texts = [turn["text"] for turn in record["turns"]]
    # The run's gate is not recorded: take the one that gives the recorded reward.
    for gate in ("paper", "strict"):
        score = PromptR1Reward(gate=gate).score_turns(texts, record["answers"])
        if abs(score.total - recorded) < _CLOSE:
            # Below 0 the format is not whole, so the answer does not count.
            answer_part = score.answer if score.total >= 0 else 0.0
            return [
                ("· format (−1 + R_fmt)", score.total - answer_part),
                ("· answer, where the format is whole", answer_part),
            ]
    return []


def history_of(records: Iterable[Record], mode: str = "train") -> list[dict[str, float]]:
    """One entry per step, in order, numbered as in `trainer.state.log_history`.

    Args:
        records (`Iterable[Mapping]`): As [`read_rollouts`] returns them.
        mode (`str`, *optional*, defaults to `"train"`): `train` or `eval`.

    Returns:
        `list[dict]`: `step` and the means `reward`, `exact_match`, `rollout/turns`, shares
        `rollout/<status>`; in training the share of `groups/with_gradient`, and `groups/diversity`
        ([`group_diversity`]); and `environment/cost_usd`, the dollars spent from the first step to
        this one, if any; with several environments the means of each, `reward in NAME`; of an
        evaluation with several rollouts a question `pass@k`, by the first reward function as
        training logs it. Keys without values are left out.
    """
    # The records of this mode by step.
    steps: dict[int, list[Record]] = defaultdict(list)
    for record in records:
        if record.get("mode", "train") == mode:
            steps[logged_step(record)].append(record)
    history = []
    spent = 0.0
    for step, step_records in sorted(steps.items()):
        # Means and shares over the rollouts of the step.
        turns = sum(len(record["turns"]) for record in step_records)
        entry: dict[str, float] = {"step": step, "rollout/turns": turns / len(step_records)}

        # Without a price, or a cost, there is no curve.
        spent += sum(record.get("cost_usd") or 0.0 for record in step_records)
        if spent:
            entry["environment/cost_usd"] = spent
        # Scores over all rollouts, then those of each environment if there are several.
        entry |= _mean_scores(step_records, "")
        for name, environment_records in _by_environment(step_records).items():
            entry |= _mean_scores(environment_records, f" in {name}")
        # How the rollouts ended.
        statuses = [record["status"] for record in step_records]
        for status in STATUSES:
            entry[f"rollout/{status}"] = statuses.count(status) / len(step_records)
        # Groups with a gradient matter in training, pass@k in evaluation.
        if mode == "train":
            share = gradient_share(step_records)
            if share is not None:
                entry["groups/with_gradient"] = share
            diversity = _mean_diversity(step_records)
            if diversity is not None:
                entry["groups/diversity"] = diversity
        if mode == "eval":
            entry |= passes([_first_rewards(group) for group in group_records(step_records)])
        history.append(entry)
    return history


def _mean_scores(records: Sequence[Record], suffix: str) -> dict[str, float]:
    """The means of reward and exact match over the records that have them."""
    means = {}
    for name, score in (("reward", total_reward), ("exact_match", exact_match_of_record)):
        scores = [score(record) for record in records]
        values = [value for value in scores if value is not None]
        if values:
            means[name + suffix] = sum(values) / len(values)
    return means


def _mean_diversity(records: Sequence[Record]) -> float | None:
    """The diversity of the turns of a group's rollouts, without the failed ones."""
    finished = [record for record in records if record["status"] != "failed"]
    groups = []
    for group in group_records(finished):
        texts = []
        for record in group:
            texts.append("\n".join(turn["text"] for turn in record["turns"]))
        groups.append(texts)
    return mean_diversity(groups)


def _first_rewards(group: Sequence[Record]) -> list[float | None]:
    """The reward of each record by the first reward function."""
    return [next(iter((record.get("rewards") or {}).values()), None) for record in group]


def _by_environment(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each environment by its name; empty if they name fewer than two."""
    environments: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        name = record.get("environment")
        if isinstance(name, str):
            environments[name].append(record)
    return dict(sorted(environments.items())) if len(environments) > 1 else {}
