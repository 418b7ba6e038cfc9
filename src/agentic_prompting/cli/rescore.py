"""`agentic-prompting rescore`: other rewards for the stored rollouts of a run, without generating."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..llm.numbers import count_in_words
from .loader import REWARDS, load_reward
from .option_parser import OptionParser
from .options import JSON_HELP, list_option, option, refuse_options
from .task_rows import TaskRows
from .terminal import print_json, print_text

if TYPE_CHECKING:
    from ..evaluation import Estimate
    from ..report import AnswerRescoring, Rescoring, RewardChange, SystemReward


@dataclass
class RescoreOptions(TaskRows):
    """The options of `rescore`."""

    reward: list[str] | None = list_option(
        "The rewards to score the rollouts with, one or several whose sum counts: "
        f"{', '.join(REWARDS)}, or your own as module:name."
    )
    task: str | None = option("The run's data set, if the reward needs more of its columns.")
    json: bool = option(JSON_HELP, False)

    @property
    def reads_whole_rows(self) -> bool:
        return True  # the rollouts may be those of a program, and a reward reads every column


SETTINGS = (RescoreOptions,)  # the parser returns an object of each


def rescore(arguments: Sequence[str]) -> int:
    """Compute the rewards of stored rollouts anew, by another reward function.

    Nothing is generated. For a training run it prints the old and the new mean reward and their
    difference, paired by rollout, for training and for each evaluation, with 95 % intervals over
    questions; RUN/rescored/NAME.jsonl gets a line for each rollout. For the answers of
    `evaluate --run`, in RUN/evaluation, it prints the mean reward of each system and its difference
    from the first one, paired by question. A rollout that failed stays without a reward.
    """
    parser = OptionParser("rescore", SETTINGS, rescore.__doc__, words="RUN")
    options, words = parser.parse_with_words(arguments)
    if len(words) != 1:
        raise ValueError("name one run: agentic-prompting rescore RUN --reward module:name")
    if not options.reward:
        raise ValueError(f"name the reward: --reward module:name, or one of {', '.join(REWARDS)}")

    from ..report import is_evaluation, rescore as rescore_run, rescore_answers

    folder = Path(words[0])
    rows = _load_rows(options, folder)
    rewards = [load_reward(reward) for reward in options.reward]
    name = "-".join(options.reward)
    if is_evaluation(folder):
        answers = rescore_answers(folder, rewards, rows=rows, name=name)
        _print_systems(answers, options.json)
    else:
        result = rescore_run(folder, rewards, rows=rows, name=name)
        _print_changes(result, options.json)
    return 0


def _load_rows(options: RescoreOptions, folder: Path) -> Iterable[Mapping[str, Any]] | None:
    """The rows of `--dataset` or `--task`, for columns that the records do not have."""
    from ..report import is_evaluation

    if not options.task and not options.dataset:
        refuse_options(
            options,
            ("task_split", "task_rows", "data_files", "columns", "held_out"),
            "it is for the rows of --task or --dataset, which are not given",
        )
        return None
    if not options.dataset:
        return options.load(options.task or "", 0)
    reason = "--dataset names the rows; leave one of them out"
    refuse_options(options, ("task", "data_files"), reason)
    options.check_rows()
    # The agent of `evaluate --run` is in the folder above that of its answers.
    options.add_trained_columns(folder.parent if is_evaluation(folder) else folder)
    return _load_own_rows(options)


def _load_own_rows(options: RescoreOptions) -> list[dict[str, Any]]:
    """The rows of `--dataset` with all their columns, any of which a reward may need."""
    from .rows_file import has_labels

    assert options.dataset
    file_rows = options.read_file(options.dataset).rows
    # Rows that `load_task` reads also have what it makes of them: an id, a task and `meta`. Those
    # of a script's own Dataset need no accepted answers, and no question.
    is_selected = options.held_out is not None or options.task_rows is not None
    if not has_labels(file_rows) and not is_selected:
        return file_rows
    return options.add_file_columns(options.load("", 0))


def _print_changes(result: Rescoring, as_json: bool) -> None:
    """Print the old and the new rewards of a training run, and the name of the file."""
    if as_json:
        # Of several evaluations, `changes` has the last one.
        changes = {change.mode: asdict(change) for change in result.changes}
        evaluations = [asdict(change) for change in result.changes if change.step is not None]
        print_json({"changes": changes, "evaluations": evaluations, "path": str(result.path)})
        return
    for change in result.changes:
        print_text(_describe_change(change))
    print_text(f"written to {result.path}")


def _describe_change(change: RewardChange) -> str:
    """A few lines about the rewards of training or of one evaluation."""
    title = change.mode if change.step is None else f"{change.mode} at step {change.step}"
    lines = [f"{title}: {count_in_words(change.rollouts, 'rollout')}, {change.failed} failed"]
    if change.unscored:
        lines[0] += f", {change.unscored} without a new reward"
    # Each line has a mean over questions, or nothing where no rollout has a reward.
    for label, estimate in (
        ("recorded reward", change.old),
        ("new reward", change.new),
        ("difference, paired", change.difference),
    ):
        lines.append(f"  {label:22} {_describe_estimate(estimate)}")
    if change.old_gradient_share is not None and change.new_gradient_share is not None:
        lines.append(
            f"  groups with a gradient {change.old_gradient_share:.0%} before, "
            f"{change.new_gradient_share:.0%} now"
        )
    return "\n".join(lines)


def _print_systems(result: AnswerRescoring, as_json: bool) -> None:
    """Print the mean reward of each system of an evaluation, and the name of the file."""
    if as_json:
        systems = [asdict(system) for system in result.systems]
        print_json(
            {
                "systems": systems,
                "baseline": result.baseline,
                "left_out": result.left_out,
                "path": str(result.path),
            }
        )
        return
    for system in result.systems:
        print_text(_describe_system(system, result.baseline))
    for name in result.left_out:
        print_text(f"left out: {name}: its answers are no rollouts of an agent")
    print_text(f"written to {result.path}")


def _describe_system(system: SystemReward, baseline: str) -> str:
    """A few lines about the rewards of a system on a task."""
    title = f"{system.system} on {system.task}: {count_in_words(system.answers, 'answer')}"
    title += f", {system.failed} failed"
    if system.unscored:
        title += f", {system.unscored} without a reward"
    lines = [title, f"  {'reward':22} {_describe_estimate(system.mean)}"]
    if system.system != baseline:
        label = f"minus {baseline}, paired"
        lines.append(f"  {label:22} {_describe_estimate(system.difference)}")
    return "\n".join(lines)


def _describe_estimate(estimate: Estimate | None) -> str:
    """A mean with its interval, or `none` where nothing has a reward."""
    if estimate is None:
        return "none"
    return (
        f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}] over "
        f"{count_in_words(estimate.n, 'question')}"
    )
