"""`agentic-prompting train agent`: its options, and the trainer of a model inside an agent program."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature
from typing import Any

from transformers import Trainer
from trl import ModelConfig

from ..data import is_user_data
from ..harnesses import HARNESSES, CommandProgram, Harness, Workspace, get_harness
from ..programs import AgentProgram, Program
from ..rewards.reward_columns import check_columns
from ..trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from .loader import UnknownPart, load_object, load_reward
from .options import MissingOption, option, refuse_options
from .rows_file import has_labels
from .train_options import DataAndEnvironment, check_before_loading, reward_option


@dataclass
class AgentArguments(DataAndEnvironment):
    """The agent program, its tasks and its reward."""

    harness: str | None = option(
        f"A command-line agent with known settings: {', '.join(HARNESSES)}."
    )
    dialect: str = option(
        "API dialect, for a harness with several: chat, responses, messages or google.", ""
    )
    ask: str = option(
        "What a harness is asked, as a template over the columns of a row.", "{question}"
    )
    program: str | None = option("Your own agent or Program as module:name, instead of a harness.")
    keep_failed: str | None = option("Folder for the work folders of failed rollouts.")
    source: str | None = option(
        "Folder in which the paths of the columns files and tests are found."
    )
    shows: list[str] | None = option("Files and folders that a harness can read besides its own.")
    isolation: str = option(
        "Isolation of a harness: bwrap, or none, which gives it all rights of this user.", "bwrap"
    )
    task: str = option("Name of a built-in task.", "")
    reward: list[str] = reward_option("exact_match")

    DEFAULT_ENVIRONMENT = "none"
    NOT_FOR_PROGRAMS = (
        "environment",
        "tools",
        "environment_factory",
        "grammar",
        "prompt_template",
        "search_url",
        "n_test",
        "replay_cache",
        *DataAndEnvironment.LARGE_LLM_OPTIONS,
    )

    @property
    def reads_whole_rows(self) -> bool:
        return True

    def check(self, args: MultiTurnGRPOConfig) -> None:
        """Raise `ValueError` for wrong arguments before anything is loaded."""
        # Either a known agent or your own.
        if (self.harness is None) == (self.program is None):
            raise MissingOption(
                "name the agent to train", "--harness NAME, or --program module:name"
            )
        # Options that have no effect on a program are refused.
        refuse_options(self, self.NOT_FOR_PROGRAMS, "an agent program has its own; leave it out")
        if self.program is not None:
            refuse_options(
                self,
                ("dialect", "ask"),
                f"it is for --harness; {self.program} is asked the whole row in a dialect of its "
                "choice",
            )
        self.check_rows()
        if self.dataset:
            refuse_options(self, ("data_files",), "--dataset names the file of the tasks")
        if not self.dataset and not self.task:
            raise MissingOption(
                "name the tasks",
                "--dataset tasks.jsonl, with files and tests for the work folder",
            )

    def load(self, task: str, seed: int) -> Any:
        """The rows. Those of a file keep every column, because a program may read any of them."""
        if not self.dataset:
            return super().load(task, seed)
        if not self._lacks_labels(self.dataset):
            return self.add_file_columns(super().load(task, seed))
        if self.held_out is not None:
            raise ValueError(
                f"--held-out splits by the question, and not every row of {self.dataset} has "
                "`question` and an accepted answer: write the held-out tasks to a file of their own"
            )
        return _sample(self.read_file(self.dataset).rows, self.task_rows, seed, "--task-rows")

    def load_held_out(self, task: str, seed: int) -> Any:
        """The evaluation rows, with every column of their files."""
        if self.held_out is not None or not self.eval_task:
            rows = super().load_held_out(task, seed)
            return None if rows is None else self.add_file_columns(rows)
        eval_rows: list[Any] = []
        for name in self.eval_sets:
            if not is_user_data(name):
                eval_rows += self.load_eval_set(name, seed)
            elif self._lacks_labels(name):
                file_rows = self.read_file(name).rows
                eval_rows += _sample(file_rows, self.eval_task_rows, seed, "--eval-task-rows")
            else:
                eval_rows += self.read_file(name).join(self.load_eval_set(name, seed))
        return eval_rows

    def _lacks_labels(self, file: str) -> bool:
        """Whether rows of a JSON lines file have no question or no accepted answer.

        A program may judge its answers itself, and read its task from any column.
        """
        return file.lower().endswith(".jsonl") and not has_labels(self.read_file(file).rows)

    def build_trainer(
        self, args: MultiTurnGRPOConfig, model: ModelConfig, stack: ExitStack
    ) -> tuple[Trainer, None]:
        """The trainer of a model inside an agent program."""
        # A reward with a parameter `folder` reads the work folder, while the rollout still has it.
        rewards: list[Callable[..., Any]] | None = [load_reward(name) for name in self.reward]
        folder_rewards = [
            reward for reward in rewards or () if "folder" in signature(reward).parameters
        ]
        if folder_rewards and len(self.reward) > 1:
            raise ValueError(
                "a reward that reads the work folder has to be the only one: leave the others out"
            )
        # The program calls such a reward itself, so the trainer gets none.
        folder_reward = None
        if folder_rewards:
            folder_reward = folder_rewards[0]
            rewards = None
        program = self.build_program(folder_reward)
        # The files of the tasks may hold answers, which the agent must not read.
        files = [self.dataset] if self.dataset else []
        program.keep_private([*files, *filter(is_user_data, self.eval_sets)])
        # The program and the model are checked before the rows are loaded.
        check_before_loading(args, model, program)
        arguments = self.trainer_arguments(args, model, self.task)
        # The rows of a file have all of its columns: one that is missing is not in the file.
        if self.dataset and arguments["train_dataset"]:
            for function in rewards or ():
                check_columns(function, arguments["train_dataset"][0], has_all_columns=True)
        return MultiTurnGRPOTrainer(reward_funcs=rewards, environment=program, **arguments), None

    def build_program(self, reward: Callable[..., Any] | None = None) -> AgentProgram:
        """The program that the options name."""
        # A command runs in work folders of its own, one for each rollout.
        workspace = Workspace(
            source=self.source,
            keep_failed=self.keep_failed,
            shows=self.shows or (),
            isolation=self.isolation,  # type: ignore[arg-type]  # which checks it
        )
        program: AgentProgram
        if self.program is None:
            harness = get_harness(str(self.harness), self.dialect, self.ask)
            program = CommandProgram(harness, workspace=workspace, reward=reward)
        else:
            program = self._load_own_program(self.program, workspace, reward)
        program.hide_columns(self.column_names())
        return program

    def _load_own_program(
        self, name: str, workspace: Workspace, reward: Callable[..., Any] | None
    ) -> AgentProgram:
        """The user's own program as it is, or a function or a command made into one."""
        part = load_object(name, "program")
        # Options of the work folder have no effect on a program that is made in Python.
        is_made = isinstance(part, AgentProgram) or callable(part)
        if is_made and workspace != Workspace():
            raise ValueError(
                "--keep_failed, --source, --shows and --isolation are for a harness or a list of "
                f"texts: {name} has a workspace of its own, CommandProgram(..., "
                "workspace=Workspace(...))"
            )
        if is_made and reward is not None:
            raise ValueError(
                f"a reward that reads the work folder is part of {name}: CommandProgram(..., "
                "reward=...)"
            )
        if isinstance(part, AgentProgram):
            return part
        # Wrong parameters, or a command that is none, are errors of one line.
        try:
            if callable(part):
                return Program(part)
            if isinstance(part, Harness | list | tuple | str):
                return CommandProgram(part, workspace=workspace, reward=reward)
        except TypeError as error:
            raise UnknownPart(f"--program {name}: {error}") from error
        raise UnknownPart(
            f"--program {name} is a {type(part).__name__}: an agent is a function of (row, "
            "base_url, api_key), a Program, a Harness, or a command, a list of texts"
        )


def _sample(
    rows: Sequence[dict[str, Any]], n: int | None, seed: int, option: str
) -> list[dict[str, Any]]:
    """At most `n` of the rows. Raises `ValueError` if there are fewer."""
    if n is None:
        return list(rows)
    if not 1 <= n <= len(rows):
        raise ValueError(f"{option} {n}: the file has {len(rows)} rows")
    return random.Random(seed).sample(rows, n)
