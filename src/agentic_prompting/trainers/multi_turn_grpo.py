"""GRPO over conversations: TRL's `GRPOTrainer` with a multi-turn rollout against an environment.

TRL makes batches, groups, advantages, loss and optimizer steps. This class constructs the parts that are ours and
answers TRL's hooks with them: a [`Source`] makes the batch of rollouts (rendered by [`Prompts`], played by a
[`Player`]), the [`Batch`] hands TRL ids and mask, an [`Observer`] logs, records and watches it. No part knows this
class. Which parts of TRL it stands on is in `contract.py`.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch
from datasets import Dataset

from ..data import as_dataset
from ..interop import environment_of
from ..llm import Budget, BudgetExceeded, charge, spans, start_traces
from ..local import context_length
from ..rollout import AgentSpec, Environment, FreeText, Grammar, Limits, Policy, RolloutLog, TagGrammar, template_for
from .ahead import Ahead, RowStream
from .batch import Batch, Place
from .callbacks import LiveView, LogFile, one_line_progress
from .config import MultiTurnGRPOConfig
from .form import agent_spec, own_prompts
from .guarded_rewards import check_groups, check_rows, guarded_reward
from .hub import Trained, missing_in_a_line, only_the_model, write_card
from .in_flight import InFlightFile, identity_of, policy_fingerprint
from .observer import Observer, eval_passes
from .player import Player
from .policies import PolicyUnreachable, pushed_by, tokenizer_of, trainer_backend
from .prompts import Prompts, RowPrompts
from .resumable import ResumableGRPOTrainer
from .sequences import PER_ROLLOUT, check_settings, loss_in_slices, padded_rows, spread
from .several import checked_rows, rewards_of
from .source import OnPolicy, Source
from .stopping import FailureWatch, first_reason, quiet_about_missing_rewards, stop
from .tracing import StepSpans, job_span
from .trl_batch import (
    ScoredTokens,
    check_experts,
    clipped_share,
    completions_of,
    has_aux_loss,
    logp_difference,
    prompt_format_of,
    scored_only,
)


class MultiTurnGRPOTrainer(ResumableGRPOTrainer):
    """Trains an agent that talks to an environment.

    Args:
        model (`str` or `PreTrainedModel`): As in [`~trl.GRPOTrainer`].
        reward_funcs (`Callable` or `list[Callable]`): TRL reward functions. They get the rollouts as the keyword
            argument `rollout` (`list[Rollout]`) beside the dataset's columns. Their value for a failed rollout is not
            used: it has no reward.
        args ([`MultiTurnGRPOConfig`], *optional*): Training arguments.
        train_dataset (`Dataset`, pandas `DataFrame` or list of dicts): Columns `question` and `answers` (`list[str]`),
            as [`load_task`] gives; or `prompt`, which is then used as it is: messages for the chat template,
            or text, which is tokenised without one (TRL's standard format). Images are refused.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*): The same for evaluation.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The agent's tokenizer. Defaults to the model's.
        environment ([`Environment`], `Callable` or `dict`): Answers the agent's requests, for example
            [`LLMEnvironment`]; or a function of the rollout that does; or a [`Program`], an agent that keeps its own
            loop. If it has `state_dict()` (plain data) and `load_state_dict(state)`, checkpoints keep its state, one
            per process. `None`: a request ends the rollout. A dict has several by name, and the rows a column
            `environment` with the name of theirs; `reward_funcs`, `prompt_template` and `grammar` may then be dicts,
            too.
        tools (`list`, *optional*): In place of `environment`: Python functions, or what else [`ToolEnvironment`] takes.
        environment_factory (`Callable`, *optional*): In place of `environment`: a class as [`TRLEnvironment`] takes it;
            its `get_reward`, if it has one, is a reward function beside the others.
        prompt_template (`str` or `dict`, *optional*): The agent's user message. Defaults to the one that the model was
            saved with (`agentic_prompting.json` in its folder); else it says how to ask the environment, in the words
            of its `prompt_template` or its docstring; see [`template_for`].
        system_prompt (`str`, *optional*): The agent's system message. Defaults to the one saved with the model, if any.
        grammar ([`Grammar`] or `dict`, *optional*): What turns look like. Defaults to the environment's `grammar` where
            it has one, else to that saved with the model, else to Prompt-R1's tags.
        **kwargs: Everything else of [`~trl.GRPOTrainer`]: `callbacks`, `peft_config`, ...

    Raises:
        `TypeError`: If `args` is not of this library's kind, or the environment has no `step(rollout)` to call.
        `ValueError`: For a dataset, template or argument that cannot work, before the model is loaded.
        [`LLMError`]: If the environment cannot be reached or refuses the key (with `args.check_environment`).
        [`TrainingStopped`]: From `train`, if too many rollouts failed or the environment can never work.
    """

    method = "multi-turn GRPO"  # for model cards
    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "agentic-prompting"]
    _config: type[MultiTurnGRPOConfig] = MultiTurnGRPOConfig
    _default_output = "trainer_output"
    use_vllm: bool  # these three are TRL's
    loss_type: str
    _last_loaded_step: int

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: MultiTurnGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: Any = None,
        *,
        environment: Any = ...,
        tools: Sequence[Any] | None = None,
        environment_factory: Callable[[], Any] | None = None,
        prompt_template: str | Mapping[str, str] | None = None,
        system_prompt: str | None = None,
        grammar: Grammar | Mapping[str, Grammar] | None = None,
        **kwargs: Any,
    ):
        args = self._checked(args)
        if args.traces:
            start_traces(args.trace_content)
        train_dataset, eval_dataset = as_dataset(train_dataset), as_dataset(eval_dataset)
        if kwargs.get("rollout_func"):
            raise ValueError(
                "rollout_func= belongs to TRL's own loop, which this trainer replaces: pass an environment= with "
                "step(rollout) instead, or use trl.GRPOTrainer"
            )
        environment, added = environment_of(environment, tools, environment_factory)
        functions = self._rewards(rewards_of(reward_funcs, environment), args, environment)
        functions = [] if functions is None else functions
        functions = [*functions, *added] if isinstance(functions, (list, tuple)) else [functions, *added]
        if added and args.reward_weights is not None:
            args = copy(args)
            args.reward_weights = [*args.reward_weights, *[1.0] * len(added)]
        plays_itself = environment is not None and environment.play_episode is not None
        if plays_itself and args.use_vllm and args.vllm_importance_sampling_mode == "sequence_mask":  # TRL's default
            args = copy(args)
            args.vllm_importance_sampling_mode = "token_truncate"  # a program's rollout may have several sequences
        check_groups(functions, args, eval_dataset is not None)
        evaluated = eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]
        train_dataset = checked_rows(environment, args, train_dataset, evaluated)
        # An environment with a `reset` may add columns.
        readers = [] if environment is not None and environment.has_reset else functions
        for dataset in [train_dataset, *(one for one in evaluated if one is not None)]:
            check_rows(dataset, readers, prompt_template)
        prompts = prompt_format_of(train_dataset, *evaluated)
        # Rows with prompts of their own and no environment: as in TRL a turn is the answer, whatever was saved.
        saved_in = None if environment is None and own_prompts(train_dataset) else model
        given, defaults = (prompt_template, system_prompt, grammar), (self._default_grammar, self._default_template)
        spec, self._template_origin = agent_spec(saved_in, environment, args, *given, *defaults)
        self.spec = replace(spec, limits=_limits(args, environment), prompt_format=prompts)
        self._take_folder(args, model)
        self.spending, self._functions = self._charged(environment, functions, args), functions
        if args.use_vllm and args.stop_at_tags:
            stops = {"stop": list(self.spec.stop_texts), "include_stop_str_in_output": True}
            args.generation_kwargs = {**stops, **(args.generation_kwargs or {})}
        with warnings.catch_warnings(), pushed_by(args), missing_in_a_line(model):
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
            super().__init__(
                model=model,
                reward_funcs=[*map(guarded_reward, functions)] or None,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                rollout_func=lambda prompts, trainer: trainer._batch.for_trl(
                    trainer.eos_token_ids, trainer.use_vllm, trainer._padded_rows
                ),
                **kwargs,
            )
        self._compose(environment)

    # --- construction --------------------------------------------------------------------------------------------

    @classmethod
    def _checked(cls, args: Any) -> Any:
        """Training arguments of this trainer's kind, which TRL's own are not."""
        if args is not None and not isinstance(args, cls._config):
            raise TypeError(
                f"args is a {type(args).__name__}, and this trainer takes a {cls._config.__name__}: it has the same "
                "fields as GRPOConfig, and those of its method"
            )
        return args if args is not None else cls._config(cls._default_output)

    def _charged(self, environment: Any, functions: Sequence[Any], args: MultiTurnGRPOConfig) -> Budget:
        """One budget for all processes of the job and for its restarts; every component that spends from it is asked
        whether it can."""
        spending = Budget(args.budget_usd, args.budget_tokens, Path(args.output_dir) / "spending.sqlite")
        roles = self.roles(environment, functions)
        charge(spending, **roles)
        if args.check_environment and args.process_index == 0:
            for component in roles.values():
                if hasattr(component, "check"):
                    component.check()
        return spending

    def _compose(self, environment: Environment | None) -> None:
        """The parts that the hooks below use."""
        args, run = self.args, int(time.time())
        self._plays_itself = environment is not None and environment.play_episode is not None
        if self._plays_itself:
            check_settings(args, has_aux_loss(self.model, args.router_aux_loss_coef), self.spec.prompt_format)
        check_experts(self.model, args.router_aux_loss_coef)
        backend = trainer_backend(self, self.spec.stop_texts)
        readable = min(filter(None, (backend.max_context, context_length(self.model))), default=None)
        self.player = Player(
            backend,
            environment,
            self.spec.tokens(tokenizer_of(self), self.eos_token_ids),
            _limits(args, environment, readable),
            self.accelerator,
            full_determinism=args.full_determinism,
            show_progress=not args.disable_tqdm,
            sync=self.vllm_generation.sync_weights if self.use_vllm else None,
        )
        self.prompts = self._prompts()
        self.on_policy = OnPolicy(self.prompts, self.player, self._group_size)
        self.source: Source = self.on_policy  # of training batches
        self.live = LiveView(
            args.report_to,
            lambda: self.callback_handler.callbacks,
            self.reward_func_names,
            self._functions,
            getattr(self, "population", None),
        )
        log = RolloutLog(Path(args.output_dir) / "rollouts", args.process_index, args.rollouts_max_mb)
        asked = f"{self.spec.prompt_template[:300]!r} ({self._template_origin})"
        if own_prompts(self.train_dataset):
            asked = "the rows' own `prompt`"
        failures = FailureWatch(args.failure_window, args.max_failed_share, asked)
        self.observer = Observer(
            log, failures, run, self.reward_func_names, self.limits, args.process_index, self.live.show,
            several=bool(self.spec.environments),
        )  # fmt: skip
        self.keepers["observer"] = self.observer
        if environment is not None:
            self.keepers["environment"] = environment
        if backend.sync is not None:
            self.keepers["pushed"] = backend.sync
        self._batch: Batch | None = None  # the batch at hand, from one of TRL's hooks to the next
        self._eval_batches = 0
        one_line_progress(self)
        self.add_callback(self.live)
        self._step_spans = StepSpans(self.accelerator)
        if spans.is_on():
            self.add_callback(self._step_spans)
        if args.rollouts_max_mb:
            self.add_callback(LogFile(log.folder, run))

    @property
    def policy(self) -> Policy:
        """Samples the agent's turns."""
        return self.player.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.player.policy = policy

    environment = property(lambda self: self.player.environment)
    chat_format = property(lambda self: self.player.chat_format)
    limits = property(lambda self: self.player.limits)

    # --- for subclasses ------------------------------------------------------------------------------------------

    @staticmethod
    def _rewards(reward_funcs: Any, args: Any, environment: Any) -> Any:
        """The reward functions, where some are given; else the reward that a program itself returns."""
        by_program = not reward_funcs and environment is not None and environment.play_episode is not None
        return environment.reward if by_program else reward_funcs

    @staticmethod
    def _default_grammar(environment: Any) -> Grammar:
        """The environment's. Without an environment there is nothing to ask, so a turn is the answer, as in TRL."""
        return FreeText() if environment is None else environment.grammar or TagGrammar()

    @staticmethod
    def _default_template(environment: Any, grammar: Grammar) -> str:
        """The agent's user message where none is given."""
        return template_for(environment, grammar)

    def roles(self, environment: Environment | None, functions: Sequence[Any]) -> dict[str, Any]:
        """The components that spend from the job's budget, by account name. A reward function spends if it has a
        `charge_to(budget, account)`, as clients have: a language model that judges."""
        judges = [one for one in functions if hasattr(one, "charge_to")]
        named = {f"judge_{number + 1}" if len(judges) > 1 else "judge": one for number, one in enumerate(judges)}
        return {"environment": environment, **named}

    def _prompts(self) -> Prompts:
        """What renders the rows of a batch."""
        return RowPrompts(self.spec, self.rollouts_per_row())

    def _before_batch(self) -> None:
        """A training batch begins."""
        self.prompts.new_batch()

    def _after_rewards(self, batch: Batch, totals: torch.Tensor) -> None:
        """A method's own work on a batch whose rewards are known.

        Args:
            batch ([`Batch`]): This process's part.
            totals (`torch.Tensor`): Of shape `(rollouts of all processes,)`, NaN where there is no reward.
        """

    def saved_spec(self) -> AgentSpec:
        """How an agent that is loaded later is asked."""
        return self.spec

    # --- TRL's hooks: rows -> rollouts -> loss -------------------------------------------------------------------

    def _place(self) -> Place:
        """Where the next batch stands in the run."""
        steps, trains = self.state.global_step, self.model.training
        part = self._step % self.args.gradient_accumulation_steps if trains else self._eval_batches
        block = self.args.steps_per_generation * self.args.num_iterations
        last = -(-self.state.max_steps * self.args.gradient_accumulation_steps // block)
        return Place(self.args.seed, "train" if trains else "eval", steps, part, self._step // block, last)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        place = self._place()
        if place.trains:
            self._before_batch()
        try:
            self.player.reach()
            if self.use_vllm and place.step != self._last_loaded_step:
                self.player.push_weights(place.step)
            self._last_loaded_step = place.step
            self._batch = (self.source if place.trains else self.on_policy).next(inputs, place)
        except PolicyUnreachable as error:  # on every process
            self._stop(str(error))
        with self._corrected() if self._batch.off_policy else nullcontext():
            scored = super()._generate_and_score_completions(self._batch.rows)
        if self._batch.off_policy:
            self.log_batch("train", {"async/clipped": clipped_share(scored, self.args, self.accelerator)})
        elif place.trains:
            scored |= self._batch.sampler_columns(scored["completion_ids"])
            if "importance_sampling_ratio" in scored:  # TRL has logged the difference
                self.observer.warn_of_logps(self._metrics["train"]["sampling/sampling_logp_difference/mean"][-1])
        if self._plays_itself:
            processes, longest = self.accelerator.num_processes, self.args.max_completion_length
            scored = spread(scored, self._batch.owners, self.loss_type, longest, processes)
        self._batch = None
        return scored

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        batch = self._batch
        assert batch is not None
        if self._plays_itself:  # TRL logs this list: one entry for each rollout
            completions[:] = batch.by_rollout(completions)
            completion_ids_list = batch.by_rollout(completion_ids_list)
        completions = completions_of(batch.rollouts, completions, self.chat_format)
        with quiet_about_missing_rewards(any(rollout.status == "failed" for rollout in batch.rollouts)):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        seen = self.observer.seen(batch, rewards, self.total_rewards)
        self.log_batch(batch.place.mode, seen.metrics)
        if not batch.place.trains:
            self._eval_batches += 1
            self.log_batch("eval", eval_passes(rewards[:, 0], self._group_size()))
        if seen.stop:
            self._stop(seen.stop)
        unscored = (rewards.isnan().all(1) & ~seen.failed).any()  # by a judge; the same on every process
        if unscored and (why := first_reason(self._out_of_budget())):
            self._stop(why)
        self._after_rewards(batch, self.total_rewards(rewards))
        return rewards

    def _group_size(self) -> int:
        """Rollouts of a group; an evaluation has a number of its own."""
        own = None if self.model.training else self.args.num_generations_eval
        return own or self.num_generations

    def _padded_rows(self, rows: int) -> int:
        """How many rows TRL is to get where a rollout may have several."""
        parts = self.args.steps_per_generation if self.model.training else 1
        return padded_rows(rows, parts) if self._plays_itself else rows

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """As TRL's, with `per_device_train_batch_size` rows at most in a pass."""
        if not self._plays_itself:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        args, compute = self.args, super().compute_loss
        most = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
        with self._summed():
            return loss_in_slices(lambda part: compute(model, part), inputs, most, self.accelerator, model)

    def _compute_loss(self, model, inputs):
        model, is_corrected = ScoredTokens(model, inputs["tool_mask"]), "importance_sampling_ratio" in inputs
        with self._corrected() if is_corrected else nullcontext():
            loss = super()._compute_loss(model, scored_only(inputs))
        if not is_corrected and inputs.get("sampled_at") == self.state.global_step:  # no update since
            difference = logp_difference(model.logps, inputs, self.accelerator)
            self.log_batch("train", difference)
            self.observer.warn_of_logps(difference.get("sampling/logp_difference/mean", 0.0))
        return loss

    @contextmanager
    def _summed(self) -> Iterator[None]:
        """TRL's loss as a plain sum over tokens, whose mask says what each counts."""
        before = self.loss_type
        self.loss_type = "dapo" if before in PER_ROLLOUT else before
        try:
            yield
        finally:
            self.loss_type = before

    @contextmanager
    def _corrected(self) -> Iterator[None]:
        """TRL's importance ratio, which it applies to what vLLM has sampled, for any policy with log-probabilities."""
        before, self.use_vllm = self.use_vllm, True
        try:
            yield
        finally:
            self.use_vllm = before

    def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        if self._batch is not None and not isinstance(model, ScoredTokens):
            scored = self._batch.scored
            assert scored is not None  # the batch has been handed to TRL
            # TRL may have padded the completions further, to a multiple.
            model = ScoredTokens(model, torch.nn.functional.pad(scored, (0, logits_to_keep - scored.shape[1])))
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    # --- rewards, logs, stops ------------------------------------------------------------------------------------

    def total_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """The rewards that are trained on: the sum over reward functions weighted by `reward_weights`, as in TRL; NaN
        where no function gave a reward."""
        weights = self.args.reward_weights or [1.0] * rewards.shape[1]
        totals = (rewards * torch.tensor(weights, device=rewards.device)).nansum(1)
        totals[rewards.isnan().all(1)] = torch.nan
        return totals

    def log_batch(self, mode: str, metrics: Mapping[str, float]) -> None:
        """Add a batch's metrics to those that TRL averages at the next log."""
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def may_be_empty(self) -> bool:
        """As [`ResumableGRPOTrainer.may_be_empty`]."""
        return self.observer.some_failed

    def _out_of_budget(self) -> str:
        try:
            self.spending.stop_when_spent()
        except BudgetExceeded as error:
            return str(error)
        return ""

    def _stop(self, why: str) -> NoReturn:
        stop(self, self.spending, why)

    # --- training, evaluation, saving and sharing ----------------------------------------------------------------

    @contextmanager
    def while_training(self, resumes: bool) -> Iterator[None]:
        """With `async_lead` > 0, groups are played ahead while training lasts. A resumed run goes on with the groups in
        flight, those that were written to `output_dir/in_flight` after the checkpoint among them.

        Raises:
            `ValueError`: A process cannot hold whole groups.
        """
        if not self.args.async_lead:
            yield
            return
        args, repeats = self.args, self.prompts.rollouts_per_row
        own = args.per_device_train_batch_size * args.steps_per_generation
        if own % repeats or not hasattr(self.train_dataset, "__len__"):
            raise ValueError(
                f"with async_lead > 0 each process must hold whole groups of rows that can be counted: make "
                f"per_device_train_batch_size x steps_per_generation (now {own}) a multiple of {repeats}, and do not "
                "stream train_dataset"
            )
        path = Path(args.output_dir, "in_flight", f"{args.process_index:05d}.jsonl")
        identity = identity_of(self.spec, self.limits, self.environment, repeats, args)
        file = InFlightFile(path, identity, policy_fingerprint(self.model), resumes)
        rows = RowStream(self.train_dataset, args.seed, args.shuffle_dataset, args.generation_batch_size // repeats)
        self.source = self.keepers["ahead"] = ahead = Ahead(
            rows, self.prompts, self.player, file, args.async_lead, args.max_staleness,
            updates_now=lambda: self.state.global_step, log=lambda metrics: self.log_batch("train", metrics),
        )  # fmt: skip
        try:
            with ahead.running():
                yield
        finally:
            self.source = self.on_policy
            del self.keepers["ahead"]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As [`ResumableGRPOTrainer.train`].

        Raises:
            [`TrainingStopped`]: Too many rollouts failed, or, at the end of a run of any length, all of them.
        """
        with self._step_spans:
            output = super().train(*args, **kwargs)
        if why := self.observer.failures.why_failed():
            self._stop(why)
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As [`~trl.GRPOTrainer`]'s; every evaluation draws the same."""
        self._eval_batches = 0
        with job_span("evaluation", self.state.global_step, self.accelerator):
            return super().evaluate(*args, **kwargs)

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:  # under ZeRO-3 every process comes here
            self._save_beside(Path(output_dir or self.args.output_dir))

    def _save_beside(self, folder: Path) -> None:
        """Write the files beside the weights. One process calls it."""
        self.saved_spec().save(folder)
        write_card(self.trained(), folder)

    def trained(self) -> Trained:
        """The facts for the agent's model card."""
        rows = len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None
        return Trained(
            self.args, self.model, self.saved_spec(), self.method, self._tag_names, self.environment,
            getattr(self, "reference", None), self._functions, self.reward_func_names, rows, self.state.global_step,
            self.hub_model_id,
        )  # fmt: skip

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the model card, `output_dir/README.md`, with what the run's folder knows now.

        Args:
            model_name (`str`, *optional*): Name of the model.
            dataset_name (`str`, *optional*): Hub id of the training data.
            tags (`str` or `list[str]`, *optional*): Further tags.
        """
        if self.is_world_process_zero():
            tags = [tags] if isinstance(tags, str) else tags or []
            write_card(self.trained(), Path(self.args.output_dir), model_name, dataset_name, tags)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~trl.GRPOTrainer`]'s, of the model alone: no rollouts, no records of spending, no recorded replies, no
        checkpoints."""
        with only_the_model(Path(self.args.output_dir), tokenizer_of(self)):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with only_the_model(Path(self.args.output_dir), tokenizer_of(self)):
            super()._push_from_checkpoint(checkpoint_folder)


def _limits(args: MultiTurnGRPOConfig, environment: Environment | None, readable: int | None = None) -> Limits:
    """The limits of `args`. Without an environment the only turn is the completion, and may be as long as one."""
    limits, (own,) = args.limits(readable), (one for one in fields(args) if one.name == "max_turn_tokens")
    if environment is None and args.max_turn_tokens == own.default:
        limits = replace(limits, max_turn_tokens=limits.max_tokens)
    return limits
