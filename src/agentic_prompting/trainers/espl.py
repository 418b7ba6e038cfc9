"""E-SPL: system prompts evolve while the weights learn (arXiv 2602.14697, Algorithm 1).

Each problem of a batch is attempted N times under each of M system prompts. The rollouts are used twice: TRL's group
baseline over the N of one (problem, prompt) is the paper's V_i for the policy gradient, and the mean rewards rate the
prompts and decide which of them have children.

The parts are [`Generation`] (Algorithm 1 for the prompts), [`PopulationPrompts`] (the system prompt of each slot of a
batch) and a reflector, which writes the children; this class connects them to training. Every process holds the same
population and makes the same decisions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import DistributedType, gather_object
from datasets import Dataset

from ..evolution import (
    EvolutionJournal,
    Generation,
    Population,
    SystemPrompt,
    attempt_records,
    journal_beside,
    load_state,
    question_of,
    truth_of,
)
from ..llm import ChatModel
from ..records import atomic_write
from ..rollout import AgentSpec, ChatFormat, Environment, Rollout, transcript
from .config import ESPLConfig
from .grpo import MultiTurnGRPOTrainer
from .population_prompts import PopulationPrompts
from .reflecting import PolicyReflector, ReferenceReflector, check_reflector
from .rollouts import Batch
from .warm_start import imitate_without

POPULATION_FILE, PROMPT_FILE = "population.json", "system_prompt.txt"


class ESPLTrainer(MultiTurnGRPOTrainer):
    """[`MultiTurnGRPOTrainer`] under an evolving population of system prompts.

    Args:
        model (`str` or `PreTrainedModel`): The policy.
        reward_funcs (`Callable` or `list[Callable]`): As in [`MultiTurnGRPOTrainer`].
        args ([`ESPLConfig`], *optional*): Training arguments.
        train_dataset (`Dataset`): Columns `question` and `answers`.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*): The same columns, held out.
        reference ([`ChatModel`], *optional*): π_ref: summarises, criticises and edits. Not needed in mode `rl` and with
            `reflector="policy"`.
        initial_prompt ([`SystemPrompt`] or `str`, *optional*, defaults to `""`): The root of the evolution. A text with
            lines `[G0]. ...` is read as principles, any other as a preamble that principles are added to; for free text
            pass `SystemPrompt(text)`.
        population ([`Population`], *optional*): Instead of `initial_prompt`: a population of your own, with your own
            selection rule. The settings that make one (`window`, `selection`, ...) must then keep their defaults.
        environment ([`Environment`], *optional*): Answers the policy's requests. Without one each rollout is a single
            turn, whose text is the answer.
        **kwargs: As in [`MultiTurnGRPOTrainer`]; `grammar` defaults to the model's where one was saved with it, else to
            free text without an environment.

    Attributes:
        population ([`Population`]): All system prompts of the run.
        generation ([`Generation`]): The evolution of that population.

    Raises:
        `ValueError`: For arguments that cannot work together; the message names values that do. From `train`, also with
            `distill_epochs` under DeepSpeed or FSDP.
    """

    method = "E-SPL"
    _config = ESPLConfig
    _default_output = "espl_output"
    prompts: PopulationPrompts

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
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
        args = self._check_args(args)
        if environment is None and (kwargs.get("tools") or kwargs.get("environment_factory")):
            environment = ...
        if args.eval_all and eval_dataset is None:
            raise ValueError(
                "eval_all=True needs an eval_dataset: the rows on which every rated prompt is evaluated"
            )
        check_reflector(args, reference)
        if population is not None and initial_prompt:
            raise ValueError("initial_prompt would be ignored: population= brings its own prompts")
        self.reference = reference
        alone = args.mode == "reflection"
        self.population = args.start_population(population or initial_prompt, args.seed, alone)
        self.generation = Generation(self.population, 0.0 if alone else args.p_crossover)
        self._journal = EvolutionJournal(journal_beside(Path(args.output_dir) / POPULATION_FILE))
        self._rated = self._rated_before = (
            -1,
            -1,
        )  # step and part of the latest rated batch; of the checkpoint's
        self._held_out: list[float] = []  # mean rewards of the questions of the current evaluation
        self._teacher: list[Rollout] | None = (
            None  # this process's rollouts under the prompt that is being distilled
        )
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
            print(f"E-SPL: {args.batch_in_words}", flush=True)

    @cached_property
    def _reflector(self) -> ReferenceReflector | PolicyReflector:
        main = self.accelerator.is_main_process
        if self.args.reflector == "reference":
            return ReferenceReflector(self.reference, self.args, main)
        session = self.player.backend.session
        chat_format = cast(ChatFormat, self.chat_format)
        return PolicyReflector(
            lambda: self.policy, session, chat_format, self.limits, self.args, main
        )

    def roles(self, environment: Environment | None, functions: Sequence[Any]) -> dict[str, Any]:
        return {**super().roles(environment, functions), "reference": self.reference}

    # --- row -> prompt -------------------------------------------------------------------------------------------

    def rollouts_per_group(self) -> int:
        """N, one group per problem and prompt; M·N where the baseline is the mean over all prompts of a problem."""
        prompts = self.args.prompts_per_step if self.args.baseline == "marginalize" else 1
        return prompts * self.args.num_generations

    def _create_prompts(self) -> PopulationPrompts:
        has_texts = self.args.mode != "rl" or any(
            one.prompt.text for one in self.population.members
        )
        if self.args.prompt_place == "system" and has_texts:
            self.chat_format.check_system(
                "set prompt_place='user', which puts the prompts in front of the user's message"
            )
        return PopulationPrompts(
            self.generation, self.args, self.spec.messages, self.chat_format.trust
        )

    def _before_batch(self) -> None:
        self._let_children_join()
        super()._before_batch()

    def _mode(self) -> str:
        return self.args.mode_at(self.state.global_step)

    def final_prompt(self) -> SystemPrompt:
        """The prompt that the agent is evaluated and used under: the best one, or none after [`distill`]."""
        return self.prompts.final()

    # --- rewards -> ratings -> children --------------------------------------------------------------------------

    def _after_rewards(self, batch: Batch, totals: torch.Tensor) -> None:
        if batch.position.is_training:
            self._rate([None if reward != reward else reward for reward in totals.tolist()], batch)
        else:
            known = [one[~one.isnan()] for one in totals.split(batch.position.group_size)]
            self._held_out += [one.mean().item() for one in known if len(one)]
            if self._teacher is not None:
                self._teacher += [
                    rollout for rollout in batch.rollouts if rollout.status != "failed"
                ]

    def _rate(self, rewards: Sequence[float | None], batch: Batch) -> None:
        """Rate the prompts of the batch, and start the reflection on it; once, if a checkpoint in the middle of a step
        makes a resumed run play the batch again."""
        at = batch.position.step, batch.position.index_in_step
        if at <= self._rated_before:
            return
        self._rated = at
        if self.generation.batches == 0 and self.accelerator.is_main_process:
            self._journal.keep_before(0)  # deletes the entries of another run in the same folder
        # Mode `rl` needs no texts, and those of a batch are megabytes.
        problem_texts, reflects = [("", "", "")] * len(rewards), self._mode() != "rl"
        if reflects:
            own = [
                (question_of(row), truth_of(row), transcript(rollout))
                for row, rollout in zip(batch.rows, batch.rollouts, strict=True)
            ]
            problem_texts = gather_object(own)
        matches = self.prompts.matches(rewards, problem_texts, gather_object(batch.metadata))
        job = self.generation.record(matches, reflects)
        self.log_batch("train", self.generation.metrics())
        if job is not None:
            self._reflector.begin(job)

    def _let_children_join(self) -> None:
        """Add the children that are due. Training waits for a reference LLM that takes longer than `evolution_lag`."""
        for job in self.generation.due(self.args.evolution_lag) if self.args.evolves else ():
            outcomes = self._reflector.finish(job)
            fatal = next(
                (one.error for one in outcomes if one.error is not None and one.error.fatal), None
            )
            if fatal is not None and self.args.reflector == "reference":
                # The job stays pending: a resumed run asks again.
                self._stop(f"the reference LLM failed with a fatal error, {fatal.kind}: {fatal}")
            children = self.generation.join(job, outcomes)
            for outcome in outcomes:
                self.log_batch("train", outcome.metrics())
            if self.accelerator.is_main_process:
                self._journal.write(
                    attempt_records(job.batch, outcomes, children, job.scores, self.population)
                )

    @staticmethod
    def _trains_weights(args: Any) -> bool:
        """Whether some mode or phase of the run trains weights."""
        return args.mode != "reflection"

    def updates_weights(self) -> bool:
        """Whether the current mode or phase trains weights."""
        return self._mode() in ("joint", "rl")

    # --- evaluation and distillation -----------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As [`~trl.GRPOTrainer`]'s, under the best prompt. Its mean reward is kept as `held_out` of the [`Member`]; of
        several data sets, that of the last one."""
        self._held_out = []
        metrics = super().evaluate(*args, **kwargs)
        if (prompt := self.prompts.trial or self.final_prompt()).id is not None:
            self.population.note_held_out(prompt, self._held_out)
        return metrics

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~trl.GRPOTrainer`]'s. With `eval_all` every rated prompt is evaluated after the last step; with
        `distill_epochs` the best one is then distilled."""
        if self.args.distill_epochs:
            self._check_whole()
        self.prompts.left_out = False
        output = super().train(*args, **kwargs)
        if self.args.eval_all:
            self.evaluate_prompts()
        if self.args.distill_epochs:
            self.distill(num_train_epochs=self.args.distill_epochs)
        return output

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As TRL's, except while [`evaluate_prompts`] evaluates a prompt, which is no point of the run's curve."""
        if self.prompts.trial is None:
            super().log(logs, *args, **kwargs)
        else:
            self.drop_metrics("eval")

    def evaluate_prompts(
        self, prompts: Sequence[SystemPrompt] | None = None, **kwargs: Any
    ) -> dict[int, float]:
        """Evaluate system prompts on the held-out rows, under the current weights (Figure 8).

        Args:
            prompts (`Sequence[SystemPrompt]`, *optional*): Members of the population; all that were rated by default.
            **kwargs: Those of [`~transformers.Trainer.evaluate`].

        Returns:
            `dict[int, float]`: The mean reward by id, where there is one; also kept as `held_out` of the [`Member`].
        """
        members, scores = self.population.members, {}
        for prompt in prompts or [member.prompt for member in members if member.matches]:
            self.prompts.trial = prompt
            try:
                self.evaluate(**kwargs)
            finally:
                self.prompts.trial = None
            if self._held_out:
                scores[prompt.id or 0] = sum(self._held_out) / len(self._held_out)
        return scores

    def distill(self, rows: Dataset | None = None, **sft_arguments: Any) -> None:
        """Train the weights to act without the best prompt as they act under it (context distillation).

        The policy plays the rows under its best prompt, `num_generations_eval` times each; see [`imitate_without`].
        From then on the agent is evaluated, saved and used without the prompt.

        Args:
            rows (`Dataset`, *optional*): By default all of `train_dataset`.
            **sft_arguments: Those of [`~trl.SFTConfig`]: `num_train_epochs`, `learning_rate`, ... By default the
                trainer's own rate, schedule and batches, and one epoch.

        Raises:
            `ValueError`: The weights are cut into shards (DeepSpeed, FSDP), or no rollout could be played to its end.
        """
        self._check_whole()
        prompt, self._teacher, self.prompts.left_out = self.population.best(), [], False
        try:
            super().evaluate(
                self.train_dataset if rows is None else rows, metric_key_prefix="distill"
            )
            rollouts = self._teacher
        finally:
            self._teacher = None
        imitate_without(
            prompt,
            rollouts,
            self.model,
            cast(ChatFormat, self.chat_format),
            self.args,
            **sft_arguments,
        )
        self.prompts.left_out = True

    def _check_whole(self) -> None:
        if self.accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
            raise ValueError(
                "distill needs whole weights on every process, without DeepSpeed or FSDP"
            )

    # --- saving and resuming -------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The evolution as plain JSON; see [`Generation.state_dict`]."""
        return {**self.generation.state_dict(), "rated": list(self._rated)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a [`ESPLTrainer.state_dict`]. Reflections that had not finished are asked for again."""
        self.generation.load_state_dict(state)
        self._rated = self._rated_before = tuple(state.get("rated", self._rated))

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)
        atomic_write(folder / PROMPT_FILE, self.final_prompt().text)
        state = self.state_dict()
        if (
            self.staging.folder is None
        ):  # a model, which may be published, and pending jobs hold rows and rollouts
            state["pending"] = []
        atomic_write(folder / POPULATION_FILE, json.dumps(state, indent=1, ensure_ascii=False))

    def saved_spec(self) -> AgentSpec:
        """The agent's form under the prompt of evaluations: the best one, or none after [`distill`]."""
        return self.prompts.saved_spec(self.spec)

    def _load_beside(self, checkpoint: Path | None) -> None:
        generation, self._rated_before = self.generation, (-1, -1)
        if checkpoint is not None and (path := checkpoint / POPULATION_FILE).exists():
            load_state(path, self.load_state_dict)
            if self.args.evolves and self.state.global_step < self.state.max_steps:
                for job in generation.pending:
                    self._reflector.begin(job)
        if self.accelerator.is_main_process:  # a resumed run plays the later batches again
            self._journal.keep_before(
                generation.pending[0].batch if generation.pending else generation.batches
            )
