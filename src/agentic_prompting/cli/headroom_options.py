"""The options of `agentic-prompting headroom`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from .client_settings import client_help
from .loader import SCORES, refuse_own_metrics
from .options import (
    CALL_OPTIONS,
    JSON_HELP,
    REFERENCE_OPTIONS,
    LargeLLM,
    ReferenceModel,
    Tracing,
    list_option,
    option,
    refuse_all_but,
    refuse_options,
)
from .refine import ROLE_OPTIONS, RefineModels
from .run_configuration import RunConfiguration
from .task_rows import ROW_OPTIONS, TaskRows
from .yaml_file import check_options_file

if TYPE_CHECKING:
    from ..llm import Budget


@dataclass
class HeadroomOptions(TaskRows, ReferenceModel, LargeLLM, RefineModels, Tracing):
    """The options of `headroom`: what to measure, and on which rows."""

    config: Path | None = option(
        "A training run's YAML file: its model, environment, rows, reward and group size are "
        "measured."
    )
    policy_model: str | None = option("Measure a better system prompt for this model, by its name.")
    policy_base_url: str | None = option("The policy's OpenAI-compatible endpoint.")
    policy_client: str | None = option(client_help("the policy"))
    prompt: str = option("The policy's system prompt so far, which others are compared with.", "")
    tried: int = option("Number of prompts to compare; --reference-model writes them.", 12)
    untrained: str | None = option(
        "Measure the signal for GRPO in this model's rollouts: a folder, a hub id, or smollm2."
    )
    group_size: int | None = option(
        "The group size of the planned training, num_generations. Default: the configuration's, "
        "or 8."
    )
    reward: str | None = option(
        "The reward of the planned training, a name or module:name. Default: the "
        "configuration's, or --score."
    )
    repeats: int = option(
        "Answers of --environment-model to each request; 1 suffices at temperature 0.", 4
    )
    task: str = option(
        "The task to take rows from, if not --dataset. `agentic-prompting data list` has all.",
        "gsm8k",
    )
    task_rows: int | None = option("Sample this many rows; all by default.", None, "--rows")
    score: str = option(
        f"How answers are compared: {', '.join(SCORES)}, or your own, module:name of "
        "score(answer, answers).",
        "exact_match",
    )
    metric: list[str] | None = list_option(
        "A metric of `evaluate` by name, instead of --score: ours, or one of the package "
        "`evaluate`."
    )
    calls: int = option("Calls of large LLMs in each measurement, at most.", 512)
    top_up_calls: int = option(
        "Calls of a second look at the prompts, if the first cannot tell.", 0
    )
    delta: float | None = option(
        "The smallest gain that is worth it. Default: 0.1, from 2,000 calls on 0.05."
    )
    seed: int = option("Seed of rows, ties and samples.", 0)
    sandbox: bool = option("Puzzles, a scripted solver and a scripted writer: no key.", False)
    replay_cache: Path | None = option(
        "SQLite file of recorded replies: those in it are not paid twice. Default: "
        "replies.sqlite in --output-dir."
    )
    output_dir: Path | None = option(
        "Folder for headroom.json. Default: the configuration's output_dir, or runs/headroom."
    )
    json: bool = option(JSON_HELP, False)

    @cached_property
    def run(self) -> RunConfiguration:
        """The training run of `--config`; empty without one."""
        return RunConfiguration(config=self.config)

    @property
    def folder(self) -> Path:
        """The folder to write to."""
        if self.output_dir is not None:
            return self.output_dir
        return Path(self.run.values.get("output_dir") or "runs/headroom")

    def open_budget(self) -> Budget:
        """The budget of the measurement, which is not that of the run in its folder."""
        return self.budget(self.folder / "headroom_spending.sqlite")

    def check(self) -> None:
        """Raise `ValueError` unless there is something to measure, and all that it takes."""
        if self.metric is not None:
            refuse_options(self, ("score",), "--metric takes its place; leave one of them out")
            if len(self.metric) != 1:
                raise ValueError(f"--metric takes one metric, got {', '.join(self.metric)}")
            refuse_own_metrics(self.metric, "--score")
        # The sandbox brings everything that is measured, and a configuration its own.
        if self.sandbox:
            refuse_all_but(
                self,
                ("sandbox", "prompt", "tried", *MEASUREMENT_OPTIONS),
                "the sandbox has its own; leave it out",
            )
            return
        if self.config is not None:
            check_options_file(self.config)
            refuse_all_but(
                self,
                ("config", "tried", "repeats", *RUN_OPTIONS, *MEASUREMENT_OPTIONS),
                "the run of --config brings its own; change it in the file, or leave --config out",
            )
            return
        # Each of the measurements needs a model.
        measured = (
            self.policy_model,
            self.untrained,
            self.environment_model,
            self.environment,
            self.feedback_model,
        )
        if not any(measured):
            raise ValueError(
                "say what to measure: --policy-model NAME (a better prompt), --untrained MODEL "
                "(a signal for GRPO), --environment-model NAME (a ceiling), --task-model and "
                "--feedback-model NAME (ProRefine), --environment MODULE:NAME of Workers (a "
                "router), --config FILE (a training run), or --sandbox"
            )
        if self.untrained and not (self.environment_model or self.environment):
            raise ValueError(
                "--untrained needs somebody to ask: --environment-model NAME, --environment "
                "MODULE:NAME, or --program MODULE:NAME for an agent program"
            )
        self._refuse_options_without_measurement()

    def _refuse_options_without_measurement(self) -> None:
        """Raise `ValueError` for options of measurements that are not requested."""
        if not self.policy_model:
            refuse_options(
                self,
                (
                    "policy_base_url",
                    "policy_client",
                    *REFERENCE_OPTIONS,
                    "tried",
                    "top_up_calls",
                ),
                "it is for a better prompt of --policy-model NAME, which is not given",
            )
        elif not self.reference_model:
            refuse_options(
                self,
                ("tried", "reference_base_url", "reference_client"),
                "--reference-model NAME, which is not given, writes the prompts",
            )
        if not self.policy_model and not self.feedback_model:
            refuse_options(self, ("prompt",), "it is the first prompt of --policy-model NAME")
        if not self.feedback_model:
            refuse_options(
                self,
                ROLE_OPTIONS,
                "ProRefine is measured with --feedback-model NAME, which is not given",
            )
        if not self.environment_model:
            refuse_options(
                self,
                CALL_OPTIONS,
                "it is for the large LLM of --environment-model NAME, which is not given",
            )
            if not self.environment or self.untrained:
                refuse_options(
                    self, ("repeats",), "it is for --environment-model NAME, which is not given"
                )
        if not self.untrained:
            refuse_options(
                self,
                ("group_size", "reward"),
                "it is for the signal of --untrained MODEL, which is not given",
            )
        if self.dataset:
            refuse_options(self, ("task",), "--dataset names the rows; leave one of them out")


MEASUREMENT_OPTIONS = (
    "calls",
    "top_up_calls",
    "delta",
    "seed",
    "budget_usd",
    "budget_tokens",
    "output_dir",
    "json",
    "traces",
    "trace_content",
)
"""The options of every measurement."""

SCRIPT_OPTIONS = (
    "environment_model",
    *CALL_OPTIONS,
    *REFERENCE_OPTIONS,
    *ROW_OPTIONS,
)
"""The options of `headroom` that take the place of those of the training run."""

RUN_OPTIONS = (
    *SCRIPT_OPTIONS,
    "untrained",
    "reward",
    "group_size",
    "score",
    "metric",
    "replay_cache",
)
"""The options that take the place of what the file of `--config` says."""
