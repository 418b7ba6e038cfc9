"""`agentic-prompting train agent`: its options, and the trainer of a model inside an agent program."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import signature
from typing import Any

from transformers import Trainer
from trl import ModelConfig

from ..harnesses import HARNESSES, CommandProgram, Workspace, get_harness
from ..programs import AgentProgram, Program
from ..trainers import MultiTurnGRPOConfig, MultiTurnGRPOTrainer
from .loader import load_object, load_reward
from .options import MissingOption, option, refuse_options
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
    def has_json_lines(self) -> bool:
        """Whether the tasks are a JSON lines file, whose rows keep every column."""
        return (self.dataset or "").endswith(".jsonl")

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
                f"it is for --harness; {self.program} is asked the whole row in a dialect of its choice",
            )
        self.check_rows()
        if self.has_json_lines:
            refuse_options(
                self,
                ("data_files",) if self.eval_task else ("data_files", "columns"),
                "tasks in JSON lines keep their columns, of which the program reads what it needs",
            )
        if self.held_out is not None and self.has_json_lines:
            raise ValueError(
                "--held-out needs rows of the known columns, and tasks in JSON lines keep theirs: "
                "write the held-out tasks to a file of their own"
            )
        if not self.dataset and not self.task:
            raise MissingOption(
                "name the tasks",
                "--dataset tasks.jsonl, with files and tests for the work folder",
            )

    def load(self, task: str, seed: int) -> Any:
        """The rows. Those of a JSON lines file keep every column, because a program may read any of them."""
        if self.has_json_lines:
            assert self.dataset is not None
            with open(self.dataset, encoding="utf-8") as file:
                return [json.loads(line) for line in file if line.strip()][: self.task_rows]
        return super().load(task, seed)

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
        # The file of the tasks may hold answers, which the agent must not read.
        program.keep_private([self.dataset] if self.dataset else [])
        # The program and the model are checked before the rows are loaded.
        check_before_loading(args, model, program)
        arguments = self.trainer_arguments(args, model, self.task)
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
        if self.program is not None:
            # Your own program as it is, or a function or a command made into one.
            program = load_object(self.program, "program")
            if not isinstance(program, AgentProgram) and not callable(program):
                return CommandProgram(program, workspace=workspace, reward=reward)
            self._refuse_work_folder(workspace, reward)
            return program if isinstance(program, AgentProgram) else Program(program)
        harness = get_harness(str(self.harness), self.dialect, self.ask)
        return CommandProgram(harness, workspace=workspace, reward=reward)

    def _refuse_work_folder(
        self, workspace: Workspace, reward: Callable[..., Any] | None = None
    ) -> None:
        """Raise `ValueError` for options that would have no effect on a program made in Python."""
        if workspace != Workspace():
            raise ValueError(
                "--keep_failed, --source, --shows and --isolation are for a harness or a list of texts: "
                f"{self.program} has a workspace of its own, CommandProgram(..., workspace=Workspace(...))"
            )
        if reward is not None:
            raise ValueError(
                f"a reward that reads the work folder is part of {self.program}: "
                "CommandProgram(..., reward=...)"
            )
