"""E-SPL: system prompts evolve while the weights learn (arXiv 2602.14697, Algorithm 1).

Each problem of a batch is attempted N times under each of M system prompts. The rollouts are used
twice: TRL's group baseline over the N rollouts of one problem and prompt is the paper's V_i for the
policy gradient, and the mean rewards rate the prompts and decide which of them have children.

Every process holds the same population and makes the same decisions. A step of Algorithm 1 is
written in the hooks of [`MultiTurnGRPOTrainer`], which are called in this order:

1. `_before_batch`: children of earlier batches join the population, and the M prompts of this batch
    are drawn;
2. the rollouts are played, each under the system prompt that [`PopulationPrompts`] chooses;
3. `_after_rewards`: [`PopulationEvolution`] rates the prompts by their mean rewards and chooses the
    parents, and a reflector (`reflectors.py`) begins to write their children;
4. TRL updates the weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset
from transformers import PreTrainedModel
from transformers.trainer_utils import TrainOutput

from ..evolution import (
    AttemptText,
    EvolutionJournal,
    Population,
    PopulationEvolution,
    SystemPrompt,
    attempt_records,
    collect_matches,
    journal_beside,
    load_state,
    question_of,
    truth_of,
)
from ..evolution.population import member_id
from ..evolution.results import mean
from ..evolution.run_files import POPULATION_FILE, PROMPT_FILE
from ..interop import NOT_GIVEN
from ..llm import ChatModel, LLMError
from ..records import atomic_write
from ..rollout import AgentSpec, ChatFormat, Environment, Rollout, transcript
from .config import ESPLConfig
from .grpo import MultiTurnGRPOTrainer
from .population_prompts import PopulationPrompts
from .reflectors import PolicyReflector, ReferenceReflector, ReflectionWatch, check_reflector
from .reward_functions import RewardFunction, RewardFunctions
from .rollouts import Batch
from .warm_start import distill_prompt


class ESPLTrainer(MultiTurnGRPOTrainer):
    """[`MultiTurnGRPOTrainer`] under an evolving population of system prompts.

    Args:
        model (`str` or `PreTrainedModel`): The policy.
        reward_funcs (`Callable` or `list[Callable]`): As in [`MultiTurnGRPOTrainer`].
        args ([`ESPLConfig`], *optional*): Training arguments.
        train_dataset (`Dataset`): Columns `question` and `answers`.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*): The same columns, held out.
        reference ([`ChatModel`], *optional*): π_ref, which summarises, criticises and edits. Not
            needed in mode `rl` and with `reflector="policy"`.
        initial_prompt ([`SystemPrompt`] or `str`, *optional*, defaults to `""`): The root of the
            evolution. A text with lines `[G0]. ...` is read as principles, any other as a preamble
            that principles are added to; for free text pass `SystemPrompt(text)`.
        population ([`Population`], *optional*): Instead of `initial_prompt`: a population of your
            own, with your own selection rule. The settings from which one would be created
            (`window`, `selection`, ...) must then keep their defaults.
        environment ([`Environment`], *optional*): Answers the policy's requests. Without one each
            rollout is a single turn, whose text is the answer.
        **kwargs: As in [`MultiTurnGRPOTrainer`]; `grammar` defaults to the one saved with the
            model, if any, else to free text without an environment.

    Attributes:
        population ([`Population`]): All system prompts of the run.
        evolution ([`PopulationEvolution`]): The evolution of that population.

    Raises:
        `ValueError`: For arguments that cannot work together; the message names values that do.
            From `train`, also with `distill_epochs` under DeepSpeed or FSDP.
    """

    method = "E-SPL"
    _config = ESPLConfig
    _default_output = "espl_output"
    prompts: PopulationPrompts
    population: Population

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: RewardFunctions,
        args: ESPLConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        *,
        reference: ChatModel | None = None,
        initial_prompt: SystemPrompt | str = "",
        population: Population | None = None,
        environment: Any = None,
        **kwargs: Any,
    ):
        # Check the arguments.
        args = self._check_args(args)
        if environment is None and (kwargs.get("tools") or kwargs.get("environment_factory")):
            # With tools or a factory, `None` would say that there is no environment: leave it
            # unset.
            environment = NOT_GIVEN
        if args.eval_all and eval_dataset is None:
            raise ValueError(
                "eval_all=True needs an eval_dataset, on which every rated prompt is evaluated"
            )
        check_reflector(args, reference)
        if population is not None and initial_prompt:
            raise ValueError("initial_prompt would be ignored: population= brings its own prompts")

        # Create the population. In mode `reflection` a single prompt is revised, without crossover.
        self.reference = reference
        self.evolution = PopulationEvolution.start(
            population or initial_prompt, args, args.seed, is_alone=args.mode == "reflection"
        )
        self.population = self.evolution.population
        self._journal = EvolutionJournal(journal_beside(Path(args.output_dir) / POPULATION_FILE))
        self._reflection_watch = ReflectionWatch()

        # Step and index of the last rated batch; and of the last one that the checkpoint had rated.
        self._rated_batch = (-1, -1)
        self._rated_in_checkpoint = (-1, -1)
        # Mean reward of each question of the current evaluation; `None` if all attempts failed.
        self._eval_scores: list[float | None] = []
        # This process's rollouts under the prompt that is being distilled.
        self._teacher_rollouts: list[Rollout] | None = None

        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            environment=environment,
            **kwargs,
        )
        if self.is_world_process_zero() and not args.disable_tqdm:
            print(f"E-SPL: {args.describe_batch()}", flush=True)

    @cached_property
    def _reflector(self) -> ReferenceReflector | PolicyReflector:
        is_main_process = self.accelerator.is_main_process
        if self.args.reflector == "reference":
            return ReferenceReflector(self.reference, self.args, is_main_process)
        # The policy reflects as it plays: with the same limits and chat template.
        return PolicyReflector(
            get_policy=lambda: self.policy,
            open_session=self.player.backend.session,
            chat_format=cast(ChatFormat, self.chat_format),
            limits=self.limits,
            args=self.args,
            sends_requests=is_main_process,
        )

    def budget_spenders(
        self, environment: Environment | None, reward_functions: Sequence[RewardFunction]
    ) -> dict[str, Any]:
        """As [`MultiTurnGRPOTrainer.budget_spenders`]; the reference LLM spends, too."""
        return {
            **super().budget_spenders(environment, reward_functions),
            "reference": self.reference,
        }

    # --- rows -> prompts -----------------------------------------------------------------------

    def rollouts_per_group(self) -> int:
        """Return the number of rollouts that share a baseline.

        N, one group for each problem and prompt; or M·N with `baseline="marginalize"`, where the
        baseline is the mean over all prompts of a problem.
        """
        if self.args.baseline == "marginalize":
            return self.args.prompts_per_step * self.args.num_generations
        return self.args.num_generations

    def _create_prompts(self) -> PopulationPrompts:
        # An agent that never gets a system message may have a chat template that allows none.
        has_text = any(member.prompt.text for member in self.population.members)
        needs_system_message = has_text or self.args.evolves
        if self.args.prompt_place == "system" and needs_system_message:
            self.chat_format.check_system(
                "set prompt_place='user', which puts the prompts in front of the user's message"
            )
        return PopulationPrompts(
            self.evolution, self.args, self.spec.messages, self.chat_format.trust
        )

    def _before_batch(self) -> None:
        self._add_children()
        super()._before_batch()

    def final_prompt(self) -> SystemPrompt:
        """Return the prompt that the agent is evaluated and used under.

        It is the best one, or an empty one after [`distill`].
        """
        return self.prompts.final_prompt()

    # --- rewards -> ratings -> children --------------------------------------------------------

    def _after_rewards(self, batch: Batch, totals: torch.Tensor) -> None:
        if batch.position.is_training:
            # A rollout without a reward has NaN as its total.
            rewards = [None if math.isnan(total) else total for total in totals.tolist()]
            self._rate(rewards, batch)
            return

        # In evaluation, the mean reward of each question, and the rollouts to distil.
        for group_totals in totals.split(batch.position.group_size):
            scored = group_totals[~group_totals.isnan()]
            self._eval_scores.append(scored.mean().item() if len(scored) else None)
        if self._teacher_rollouts is not None:
            for rollout in batch.rollouts:
                if rollout.status != "failed":
                    self._teacher_rollouts.append(rollout)

    def _rate(self, rewards: Sequence[float | None], batch: Batch) -> None:
        """Rate the prompts of a batch, and start the reflection on it.

        A run that was resumed from a checkpoint in the middle of a step plays a batch again, which
        is rated only once.
        """
        batch_id = (batch.position.step, batch.position.index_in_step)
        # A batch that was rated before the checkpoint was written must not count twice.
        if batch_id <= self._rated_in_checkpoint:
            return
        self._rated_batch = batch_id
        if self.evolution.batches == 0 and self.accelerator.is_main_process:
            self._journal.keep_before(0)  # deletes the entries of another run in the same folder

        # Mode `rl` needs no texts, and those of a batch are megabytes.
        reflects = self.args.mode_at(self.state.global_step) != "rl"
        texts = [AttemptText("", "", "")] * len(rewards)
        if reflects:
            process_texts = []
            for row, rollout in zip(batch.rows, batch.rollouts, strict=True):
                text = AttemptText(question_of(row), truth_of(row), transcript(rollout))
                process_texts.append(text)
            texts = gather_object(process_texts)

        # Rate the prompts by their rewards, and let the reflection on the batch begin.
        prompt_ids = [metadata["system_prompt"] for metadata in gather_object(batch.metadata)]
        matches = collect_matches(
            rewards,
            texts,
            [self.population.members[prompt_id].prompt for prompt_id in prompt_ids],
            prompts_per_problem=self.args.prompts_per_step,
            attempts_per_prompt=self.args.num_generations,
        )
        task = self.evolution.record(matches, reflects)
        self.log_batch("train", self.evolution.metrics())
        if task is not None:
            self._reflector.begin(task)

    def _add_children(self) -> None:
        """Add the children that are due to the population.

        Training waits for a reference LLM that takes longer than `evolution_lag` batches.
        """
        if not self.args.evolves:
            return
        for task in self.evolution.due(self.args.evolution_lag):
            # Wait for the outcomes, which are the same on every process.
            outcomes = self._reflector.finish(task)
            try:
                children = self.evolution.join(task, outcomes)
            except LLMError as error:
                self._stop(f"the reference LLM failed with a fatal error, {error.kind}: {error}")

            # Log and record what came of each attempt.
            for outcome in outcomes:
                self.log_batch("train", outcome.metrics())
            if self.accelerator.is_main_process:
                records = attempt_records(task, outcomes, children, self.population)
                self._journal.write(records)
                self._reflection_watch.note(outcomes)

    @staticmethod
    def _trains_weights(args: ESPLConfig) -> bool:
        """Return whether some mode or phase of the run trains weights."""
        return args.mode != "reflection"

    def updates_weights(self) -> bool:
        """Return whether the current mode or phase trains weights."""
        return self.args.mode_at(self.state.global_step) in ("joint", "rl")

    # --- evaluation and distillation -----------------------------------------------------------

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """As [`~trl.GRPOTrainer`]'s, under the best prompt.

        The mean reward becomes `held_out` of the prompt's [`Member`]; with several data sets, that
        of the last one.
        """
        self._eval_scores = []
        metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        # The result belongs to the prompt that was evaluated, unless it has been distilled.
        prompt = self.prompts.evaluated_prompt or self.final_prompt()
        if prompt.id is not None:
            self.population.note_held_out(prompt, self._eval_scores)
        return metrics

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: dict[str, Any] | None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As [`~trl.GRPOTrainer`]'s.

        With `eval_all` every rated prompt is evaluated after the last step; with `distill_epochs`
        the best one is then distilled.
        """
        # Refuse sharded weights now rather than after the whole training.
        if self.args.distill_epochs:
            self._check_not_sharded()
        # A new training plays under prompts again, even if an earlier one was distilled.
        self.prompts.is_distilled = False
        output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        # A run may be too short for the warning during training.
        self._reflection_watch.warn()
        if self.args.eval_all:
            self.evaluate_prompts()
        if self.args.distill_epochs:
            self.distill(num_train_epochs=self.args.distill_epochs)
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As TRL's, except in [`evaluate_prompts`], whose results are no points of the curve."""
        if self.prompts.evaluated_prompt is None:
            super().log(logs, start_time)
        else:
            self.drop_metrics("eval")

    def evaluate_prompts(
        self,
        prompts: Sequence[SystemPrompt] | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[int, float]:
        """Evaluate system prompts on the held-out rows, under the current weights (Figure 8).

        Args:
            prompts (`Sequence[SystemPrompt]`, *optional*): Members of the population. By default
                all that were rated.
            eval_dataset (`Dataset`, *optional*): As in [`~transformers.Trainer.evaluate`], like
                the other arguments.
            ignore_keys (`list[str]`, *optional*): As there.
            metric_key_prefix (`str`, *optional*, defaults to `"eval"`): As there.

        Returns:
            `dict[int, float]`: The mean reward by prompt id, where there is one; also kept as
                `held_out` of the [`Member`].
        """
        if not prompts:
            prompts = [member.prompt for member in self.population.members if member.matches]
        # An evaluation of each, in which it takes the place of the final prompt.
        scores = {}
        for prompt in prompts:
            with self.prompts.evaluate_under(prompt):
                self.evaluate(eval_dataset, ignore_keys, metric_key_prefix)
            mean_score = mean(self._eval_scores)
            if mean_score is not None:
                scores[member_id(prompt)] = mean_score
        return scores

    def distill(self, rows: Dataset | None = None, **sft_arguments: Any) -> None:
        """Train the weights to act without the best prompt as they act under it.

        This is context distillation: the policy plays the rows under its best prompt,
        `num_generations_eval` times each, and imitates these rollouts; see [`distill_prompt`]. From
        then on the agent is evaluated, saved and used without the prompt.

        Args:
            rows (`Dataset`, *optional*): By default all of `train_dataset`.
            **sft_arguments: Passed to [`~trl.SFTConfig`]: `num_train_epochs`, `learning_rate`, ...
                By default the trainer's own rate, schedule and batches, and one epoch.

        Raises:
            `ValueError`: If the weights are sharded (DeepSpeed, FSDP), or no rollout could be
                played to its end.
        """
        self._check_not_sharded()

        # Play the rows under the best prompt.
        prompt = self.population.best()
        self.prompts.is_distilled = False
        dataset = self.train_dataset if rows is None else rows
        with self._collect_teacher_rollouts() as rollouts:
            super().evaluate(dataset, metric_key_prefix="distill")

        # Imitate the rollouts without the prompt.
        chat_format = cast(ChatFormat, self.chat_format)
        distill_prompt(prompt, rollouts, self.model, chat_format, self.args, **sft_arguments)
        self.prompts.is_distilled = True

    @contextmanager
    def _collect_teacher_rollouts(self) -> Iterator[list[Rollout]]:
        """Within this context, `_after_rewards` adds this process's rollouts to the yielded list.

        Why: `evaluate` returns metrics only.
        """
        rollouts: list[Rollout] = []
        self._teacher_rollouts = rollouts
        try:
            yield rollouts
        finally:
            self._teacher_rollouts = None

    def _check_not_sharded(self) -> None:
        if self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            raise ValueError(
                "distill needs whole weights on every process: train without DeepSpeed and FSDP, "
                "or set distill_epochs=0"
            )

    # --- saving and resuming -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the evolution as plain JSON; see [`PopulationEvolution.state_dict`]."""
        return {**self.evolution.state_dict(), "rated": list(self._rated_batch)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`ESPLTrainer.state_dict`].

        Reflections that had not finished start again.
        """
        self.evolution.load_state_dict(state)
        self._rated_batch = tuple(state.get("rated", self._rated_batch))
        self._rated_in_checkpoint = self._rated_batch

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)
        # The final prompt as text, and the whole population, from which a run can continue.
        atomic_write(folder / PROMPT_FILE, self.final_prompt().text)
        state = self.state_dict()
        is_checkpoint = self.staging.folder is not None
        if not is_checkpoint:
            # A model may be published, and pending tasks hold rows and rollouts.
            state["pending"] = []
        atomic_write(folder / POPULATION_FILE, json.dumps(state, indent=1, ensure_ascii=False))

    def saved_spec(self) -> AgentSpec:
        """Return the agent's form under the final prompt."""
        return self.prompts.saved_spec(super().saved_spec())

    def _load_beside(self, checkpoint: Path | None) -> None:
        self._rated_in_checkpoint = (-1, -1)
        if checkpoint is not None and (checkpoint / POPULATION_FILE).exists():
            # Continue the evolution. Pending reflections ask again, unless no step is left to use
            # them.
            load_state(checkpoint / POPULATION_FILE, self.load_state_dict)
            is_over = self.state.global_step >= self.state.max_steps
            if self.args.evolves and not is_over:
                for task in self.evolution.pending:
                    self._reflector.begin(task)

        # A resumed run plays the later batches again.
        if self.accelerator.is_main_process:
            next_batch = self.evolution.batches
            if self.evolution.pending:
                next_batch = self.evolution.pending[0].batch
            self._journal.keep_before(next_batch)
