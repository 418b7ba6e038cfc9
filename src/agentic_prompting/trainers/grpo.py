"""GRPO over conversations: TRL's `GRPOTrainer`, whose completions are rollouts in an environment.

TRL forms groups, computes advantages and the loss, and takes optimizer steps.
[`MultiTurnGRPOTrainer`] overrides the hooks between them, which are written here in the order of
their calls:

1. rows -> rollouts: a [`BatchSource`] renders the rows and plays one rollout of each;
2. rollouts -> scores: reward functions read the rollouts, a [`BatchMonitor`] measures and records
    them;
3. scores -> loss: TRL's loss of the tokens that the agent sampled.

`contract.py` lists the parts of TRL that this relies on. No other file here overrides the hooks of
these three steps.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import torch
from accelerate.utils import broadcast_object_list
from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_utils import TrainOutput
from trl import GRPOConfig

from ..data import as_dataset
from ..evolution import Population
from ..interop import NOT_GIVEN, resolve_environment
from ..llm import ChatModel, spans, start_traces
from ..llm.circuit_breaker import wait_out_outages
from ..local import context_length
from ..rollout import (
    AgentSpec,
    Environment,
    FreeText,
    Grammar,
    Limits,
    Policy,
    RolloutLog,
    TagGrammar,
    TextFormat,
    template_for,
)
from .async_rollouts import AsyncSource, make_async_source
from .batch_monitor import (
    BatchMonitor,
    FailureWatch,
    clipped_share,
    logp_difference,
    pass_at_k_metrics,
)
from .checkpointing.stop_training import check_budget, gather_first_reason, stop_training
from .config import MultiTurnGRPOConfig
from .first_batches import FirstBatchWatch
from .hub import HubGRPOTrainer, explain_missing_model
from .live_view import LiveView
from .loading import (
    check_experts,
    check_policy,
    check_quantization,
    has_aux_loss,
    load_policy,
)
from .loss_inputs import (
    MultiSequenceRows,
    ScoredTokensModel,
    SingleSequenceRows,
    prepare_loss_inputs,
)
from .model_card import TAGS, TrainedAgent
from .one_line_progress import LogFile, use_one_line_progress
from .patches import compute_importance_ratio, mute_missing_reward_warning
from .policies import Backend, PolicyUnreachable, tokenizer_of, trainer_backend, use_weight_sync
from .prepare_rows import (
    has_prompt_column,
    list_datasets,
    prepare_rows,
    prompt_format_of,
    warn_of_unused_system_prompt,
)
from .resolve_spec import SpecOptions, describe_prompt, drop_unused_template, resolve_spec
from .reward_functions import (
    RewardFunction,
    RewardFunctions,
    check_reward_weights,
    guard_reward_function,
    list_reward_functions,
    render_completions,
    warn_of_shared_names,
)
from .rollouts import (
    Batch,
    BatchPosition,
    BatchSource,
    OnPolicySource,
    Prompts,
    RolloutPlayer,
    RowPrompts,
)
from .settings_file import SettingsFile, describe_inputs
from .setup import (
    adapt_args,
    add_stop_texts,
    check_program_settings,
    create_budget,
    limits_for,
    warn_of_slow_precision,
)
from .tracing import StepSpans, job_span


class MultiTurnGRPOTrainer(HubGRPOTrainer):
    """Trains an agent that talks to an environment.

    Args:
        model (`str` or `PreTrainedModel`): As in [`~trl.GRPOTrainer`].
        reward_funcs (`Callable` or `list[Callable]`): TRL reward functions. They get the rollouts
            as the keyword argument `rollout` (`list[Rollout]`) beside the dataset's columns. A
            failed rollout has no reward, whatever they return for it.
        args ([`MultiTurnGRPOConfig`], *optional*): Training arguments.
        train_dataset (`Dataset`, pandas `DataFrame` or list of dicts): Columns `question` and
            `answers` (`list[str]`), as [`load_task`] returns them; or `prompt`, which is then
            used as it is: messages for the chat template, or text, which is tokenised without one
            (TRL's standard format). In a row with both the agent gets the `prompt`. Images are
            refused.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*): The same for evaluation.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The agent's tokenizer. Defaults
            to the model's.
        environment ([`Environment`], `Callable` or `dict`): Answers the agent's requests, for
            example [`LLMEnvironment`]; or a function of the rollout that does; or a [`Program`],
            an agent that keeps its own loop. If it has `state_dict()` (plain data) and
            `load_state_dict(state)`, checkpoints keep its state, one per process. `None`: a request
            ends the rollout. A dict holds several environments by name; each row then names its own
            in the column `environment`, and `reward_funcs`, `prompt_template` and `grammar` may be
            dicts, too.
        tools (`list`, *optional*): Instead of `environment`: Python functions, or other objects
            that [`ToolEnvironment`] accepts.
        environment_factory (`Callable`, *optional*): Instead of `environment`: a class as
            [`TRLEnvironment`] accepts it; its `get_reward`, if it has one, is a reward function
            beside the others.
        prompt_template (`str` or `dict`, *optional*): The agent's user message. Defaults to the
            one that the model was saved with (`agentic_prompting.json` in its folder). Without
            one it describes how to ask the environment, by the environment's `prompt_template` or
            docstring; see [`template_for`].
        system_prompt (`str`, *optional*): The agent's system message. Defaults to the one saved
            with the model, if any. Not used where a row's `prompt` has a system message.
        grammar ([`Grammar`] or `dict`, *optional*): The form of the agent's turns. Defaults to
            the environment's `grammar` if it has one, else to the one saved with the model, else
            to Prompt-R1's tags.
        **kwargs: The other arguments of [`~trl.GRPOTrainer`]: `callbacks`, `peft_config`, ...

    Raises:
        `TypeError`: If `args` is not one of this library's configurations, or the environment has
            no `step(rollout)`.
        `ValueError`: For a dataset, template or argument that cannot work, before the model is
            loaded.
        [`LLMError`]: If the environment cannot be reached or refuses the key (with
            `args.check_environment`).
        [`TrainingStopped`]: From `train`, if too many rollouts failed or the environment's error
            is fatal.
    """

    method = "multi-turn GRPO"  # for model cards
    _config: type[MultiTurnGRPOConfig] = MultiTurnGRPOConfig
    _default_output = "trainer_output"
    # Set by `ESPLTrainer`; shown in tracker tables and the model card.
    population: Population | None = None
    reference: ChatModel | None = None
    # Attributes of TRL's trainer.
    use_vllm: bool
    loss_type: str
    _last_loaded_step: int

    def __init__(
        self,
        model: str | PreTrainedModel,
        reward_funcs: RewardFunctions | None = None,
        args: MultiTurnGRPOConfig | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | Mapping[str, Dataset] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        *,
        environment: Any = NOT_GIVEN,
        tools: Sequence[Any] | None = None,
        environment_factory: Callable[[], Any] | None = None,
        prompt_template: str | Mapping[str, str] | None = None,
        system_prompt: str | None = None,
        grammar: Grammar | Mapping[str, Grammar] | None = None,
        **kwargs: Any,
    ):
        args = self._check_args(args)
        if kwargs.get("rollout_func"):
            raise ValueError(
                "rollout_func= belongs to TRL's own loop, which this trainer replaces: pass an "
                "environment= with step(rollout) instead, or use trl.GRPOTrainer"
            )
        if args.traces:
            start_traces(args.trace_content)

        # The order matters: a mistake is refused before the output folder is claimed, the folder is
        # claimed before anything is spent, and all of that comes before the model is loaded.
        environment, environment_rewards = resolve_environment(
            environment, tools, environment_factory
        )
        if environment is not None:
            # The output folder has the run's records, which the agent must not read.
            environment.keep_private([args.output_dir])
        # The caller's reward functions come first, then those that the environment brings.
        reward_funcs = self._choose_rewards(reward_funcs, args, environment)
        caller_rewards = list_reward_functions(reward_funcs, environment)
        check_reward_weights(args, caller_rewards)
        self._reward_functions = [*caller_rewards, *environment_rewards]
        # Complete the settings, and check the rows of all data sets.
        args = adapt_args(args, environment, len(environment_rewards))
        eval_dataset = as_dataset(eval_dataset)
        eval_datasets = list_datasets(eval_dataset)
        train_dataset = prepare_rows(
            args,
            environment,
            self._reward_functions,
            as_dataset(train_dataset),
            eval_datasets,
            prompt_template,
        )

        # Choose the agent's form. Without an environment, rows with prompts of their own are
        # answered in a single turn, as in TRL, whatever form the model was saved with.
        is_plain = environment is None and has_prompt_column(train_dataset)
        resolved_spec, origin = resolve_spec(
            None if is_plain else model,
            environment,
            args,
            SpecOptions(prompt_template, system_prompt, grammar),
            self._default_grammar,
            self._default_template,
        )
        self.spec = replace(
            resolved_spec,
            limits=limits_for(args, environment),
            prompt_format=prompt_format_of([train_dataset, *eval_datasets]),
        )
        if args.process_index == 0:
            warn_of_unused_system_prompt(self.spec, [train_dataset, *eval_datasets])
        args = add_stop_texts(args, resolved_spec)
        check_policy(model, args, kwargs.get("peft_config"), self._trains_weights(args))

        # Reserve the output folder and the budget.
        self._claim_folder(args, model)
        self.spending = create_budget(
            self.budget_spenders(environment, self._reward_functions), args
        )
        warn_of_slow_precision(args)

        # Create TRL's trainer, which loads the model.
        guarded_rewards = [guard_reward_function(function) for function in self._reward_functions]
        with warnings.catch_warnings(), use_weight_sync(args), explain_missing_model(model):
            # TRL warns that `rollout_func` is experimental, and this trainer always passes one.
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
            policy = load_policy(model, args, processing_class)
            super().__init__(
                model=policy.model,
                reward_funcs=guarded_rewards or None,
                args=policy.args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=policy.processing_class,
                rollout_func=lambda prompts, trainer: trainer._batch_for_trl(),
                **kwargs,
            )
        self._create_components(environment, describe_prompt(self.spec, origin, train_dataset))

    @classmethod
    def _check_args(cls, args: GRPOConfig | None) -> Any:
        """Return the training arguments, by default those of this class. TRL's own are refused."""
        if args is None:
            return cls._config(cls._default_output)
        if not isinstance(args, cls._config):
            raise TypeError(
                f"args is a {type(args).__name__}, and this trainer takes a "
                f"{cls._config.__name__}: it has the same fields as GRPOConfig, and those of its "
                "method"
            )
        return args

    def _create_components(self, environment: Environment | None, prompt_description: str) -> None:
        """Create the components that the hooks below use, now that the model is loaded."""
        # Identifies this start of the run in the records of all processes. Starts are ordered by
        # time: the report reads a later one in the same folder as a continuation.
        (run_id,) = broadcast_object_list([int(time.time())])

        # How rollouts become rows decides by which of its losses TRL computes ours.
        self.row_layout = self._create_row_layout(environment)
        self.loss_type = self.row_layout.trl_loss_type
        # TRL's group: this many rollouts share a baseline.
        self.num_generations = self.rollouts_per_group()

        # Check the model.
        check_experts(self.model, self.args.router_aux_loss_coef)
        with self.accelerator.autocast():
            check_quantization(self.model)
        self.model.add_model_tags(list(TAGS))

        # Rows -> rollouts.
        backend = trainer_backend(self, self.spec.stop_texts)
        self.player = self._create_player(backend, environment)
        self.prompts = self._create_prompts()
        self.on_policy_source = OnPolicySource(self.prompts, self.player)
        self.batch_source: BatchSource = self.on_policy_source  # of training batches

        # Rollouts -> scores.
        if self.args.process_index == 0:
            warn_of_shared_names(self.reward_func_names)
        self.live_view = LiveView(
            self.args.report_to,
            get_callbacks=lambda: self.callback_handler.callbacks,
            reward_names=self.reward_func_names,
            reward_functions=self._reward_functions,
            population=self.population,
        )
        rollout_log = RolloutLog(
            Path(self.args.output_dir) / "rollouts",
            self.args.process_index,
            self.args.rollouts_max_mb,
        )
        self.monitor = self._create_monitor(rollout_log, run_id, prompt_description)

        # The components whose state checkpoints keep, by the names that their files have for them.
        # "observer" and "pushed" are old names, which old checkpoints have too.
        self.stateful_components["observer"] = self.monitor
        if environment is not None:
            self.stateful_components["environment"] = environment
        if backend.weight_sync is not None:
            self.stateful_components["pushed"] = backend.weight_sync

        # The current batch; see `_processing`.
        self._batch: Batch | None = None
        # Of each batch of an evaluation: its rollouts, and those with a reward.
        self._eval_rollout_counts: list[int] = []
        self._eval_scored_counts: list[int] = []
        self._add_progress_callbacks(rollout_log, run_id)

    def _create_row_layout(
        self, environment: Environment | None
    ) -> SingleSequenceRows | MultiSequenceRows:
        """Return how rollouts become rows of TRL's batch.

        A program's rollouts may have several token sequences, each of which is a row for TRL.
        """
        args = self.args
        if environment is None or not environment.plays_whole_episodes:
            return SingleSequenceRows(args.loss_type)
        check_program_settings(
            args, has_aux_loss(self.model, args.router_aux_loss_coef), self.spec.prompt_format
        )
        return MultiSequenceRows(
            args.loss_type, args.max_completion_length, self.accelerator.num_processes
        )

    def _create_player(self, backend: Backend, environment: Environment | None) -> RolloutPlayer:
        """Return the component that plays the rollouts of a batch."""
        # The back end and the model may each limit the context: the lower limit holds.
        context_limits = [backend.max_context, context_length(self.model)]
        max_context = min((limit for limit in context_limits if limit), default=None)
        return RolloutPlayer(
            backend,
            environment,
            chat_format=self.spec.create_format(tokenizer_of(self), self.eos_token_ids),
            limits=limits_for(self.args, environment, max_context),
            accelerator=self.accelerator,
            full_determinism=self.args.full_determinism,
            show_progress=not self.args.disable_tqdm,
            sync_weights=self.vllm_generation.sync_weights if self.use_vllm else None,
        )

    def _create_monitor(
        self, rollout_log: RolloutLog, run_id: int, prompt_description: str
    ) -> BatchMonitor:
        """Return the component that measures and records the rollouts of a batch."""
        args = self.args
        return BatchMonitor(
            log=rollout_log,
            failures=FailureWatch(args.failure_window, args.max_failed_share),
            first_batches=FirstBatchWatch(
                self.reward_func_names,
                self.limits,
                prompt_description,
                has_environment=self.environment is not None,
                has_several_environments=bool(self.spec.environments),
            ),
            run_id=run_id,
            reward_names=self.reward_func_names,
            process_index=args.process_index,
            show_batch=self.live_view.show if self.live_view.is_wanted() else None,
            measure_environments=bool(self.spec.environments),
        )

    def _add_progress_callbacks(self, rollout_log: RolloutLog, run_id: int) -> None:
        """Report progress: a line for each log, tables for trackers, spans, a file of all logs."""
        use_one_line_progress(self)
        self.add_callback(self.live_view)
        self._step_spans = StepSpans(self.accelerator)
        if spans.is_on():
            self.add_callback(self._step_spans)
        if self.args.rollouts_max_mb:
            self.add_callback(LogFile(rollout_log.folder, run_id))

        # The settings go into each checkpoint, and beside the rollouts if these are recorded.
        has_length = hasattr(self.train_dataset, "__len__")  # not a streamed dataset
        row_count = len(self.train_dataset) if has_length else None

        def find_inputs() -> dict[str, str]:
            return describe_inputs(self.train_dataset, self._reward_functions, self.environment)

        self._settings_file = SettingsFile(
            row_count,
            find_inputs,
            find_checkpoint=lambda: self._checkpoint,
            writes_file=bool(self.args.rollouts_max_mb),
        )
        self.add_callback(self._settings_file)

    @property
    def policy(self) -> Policy:
        """Samples the agent's turns."""
        return self.player.policy

    @policy.setter
    def policy(self, policy: Policy) -> None:
        self.player.policy = policy

    @property
    def environment(self) -> Environment | None:
        """Answers the agent's requests."""
        return self.player.environment

    @property
    def chat_format(self) -> TextFormat:
        """Converts prompts, observations and turns between text and tokens."""
        return self.player.chat_format

    @property
    def limits(self) -> Limits:
        """The turn and token limits of rollouts."""
        return self.player.limits

    # --- rows -> rollouts ----------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """Play one rollout of each row, score them, and return the tensors that the loss needs."""
        # Play the rollouts.
        position = self._next_position()
        if position.is_training:
            self._before_batch()
        batch = self._generate_batch(inputs, position)

        # TRL gets tokens from `_batch_for_trl` and rewards from `_calculate_rewards` below, and
        # computes the advantages.
        importance_ratio = compute_importance_ratio(self) if batch.off_policy else nullcontext()
        with self._processing(batch), importance_ratio:
            scored = super()._generate_and_score_completions(batch.rows)

        # Check the sampler's log-probabilities against the trainer's. With importance correction
        # TRL has already compared the two. Otherwise `_compute_loss_of_rows` does, and needs the
        # sampler's values.
        if batch.off_policy:
            clipped = clipped_share(scored, self.args, self.accelerator)
            self.log_batch("train", {**batch.metrics, "async/clipped": clipped})
        elif position.is_training:
            scored |= batch.sampler_columns(scored["completion_ids"])
            if "importance_sampling_ratio" in scored:
                differences = self._metrics["train"]["sampling/sampling_logp_difference/mean"]
                self.monitor.check_logprob_difference(differences[-1])

        return self.row_layout.weigh_rows(scored, batch.rollout_indices)

    @contextmanager
    def _processing(self, batch: Batch) -> Iterator[None]:
        """Within this context the hooks that TRL calls find the batch in `_batch`.

        Why: TRL passes them rows and tokens only.
        """
        self._batch = batch
        try:
            yield
        finally:
            self._batch = None

    def _next_position(self) -> BatchPosition:
        """Return the position of the next batch in the run."""
        args = self.args
        mode: Literal["train", "eval"]
        # TRL generates one batch for this many micro-batches.
        micro_batches_per_batch = args.steps_per_generation * args.num_iterations
        micro_batch_count = self.state.max_steps * args.gradient_accumulation_steps
        if self.model.training:
            mode = "train"
            # A step may have several batches, each generated at another of its micro-batches.
            index_in_step = self._step % args.gradient_accumulation_steps
            group_size = self.num_generations
        else:
            mode = "eval"
            # Evaluations number their batches themselves, and may have groups of another size.
            index_in_step = len(self._eval_rollout_counts)
            group_size = args.num_generations_eval or args.num_generations
        return BatchPosition(
            seed=args.seed,
            mode=mode,
            step=self.state.global_step,
            index_in_step=index_in_step,
            batch_index=self._step // micro_batches_per_batch,
            batch_count=math.ceil(micro_batch_count / micro_batches_per_batch),
            group_size=group_size,
        )

    def _generate_batch(self, rows: list[dict[str, Any]], position: BatchPosition) -> Batch:
        """Give the policy the current weights, and return a batch of finished rollouts."""
        # Evaluations always play the current weights, even if training batches are played ahead.
        source = self.batch_source if position.is_training else self.on_policy_source
        try:
            self.player.wait_for_server()
            # As in TRL's own loop, vLLM gets the weights once per step.
            if not self.use_vllm or position.step != self._last_loaded_step:
                self.player.push_weights(position.step)
            self._last_loaded_step = position.step
            return source.next_batch(rows, position)
        except PolicyUnreachable as error:  # raised on every process
            self._stop(str(error))

    def _batch_for_trl(self) -> dict[str, Any]:
        """Return the current batch as TRL's `rollout_func` has to return it."""
        assert self._batch is not None
        # TRL splits a training batch into micro-batches, but not the batch of an evaluation.
        micro_batches = 1
        if self._batch.position.is_training:
            micro_batches = self.args.steps_per_generation
        return self._batch.to_trl(
            self.eos_token_ids,
            with_logprobs=self.use_vllm,
            row_multiple=self.row_layout.row_multiple(micro_batches),
        )

    # --- rollouts -> scores --------------------------------------------------------------------

    def _calculate_rewards(
        self,
        inputs: list[dict[str, Any]],
        prompts: list[Any],
        completions: list[Any],
        completion_ids_list: list[list[int]],
    ) -> torch.Tensor:
        """Return the rewards of all processes, of shape `(rollouts, reward functions)`."""
        batch = self._batch
        assert batch is not None

        # Rewards are per rollout, not per row. TRL logs this list, so it is changed in place.
        completions[:] = batch.select_first_rows(completions)
        completion_ids_list = batch.select_first_rows(completion_ids_list)

        # Call the reward functions. TRL's warning about missing rewards would mislead if rollouts
        # failed; the monitor reports failures.
        some_failed = any(rollout.status == "failed" for rollout in batch.rollouts)
        completions = render_completions(batch.rollouts, completions, self.chat_format)
        try:
            with mute_missing_reward_warning(some_failed):
                rewards = super()._calculate_rewards(
                    inputs, prompts, completions, completion_ids_list
                )
        except Exception as error:
            self._keep_unscored(batch, error)
            raise

        # Measure and record the batch.
        summary = self.monitor.process(batch, rewards, self.args.reward_weights)
        self.log_batch(batch.position.mode, summary.metrics)
        if not batch.position.is_training:
            self._eval_rollout_counts.append(len(summary.totals))
            self._eval_scored_counts.append(int((~summary.totals.isnan()).sum()))
            self.log_batch("eval", pass_at_k_metrics(rewards[:, 0], batch.position.group_size))

        # Stop if too many rollouts failed, or if judges gave no reward because the budget is spent.
        if summary.stop_reason:
            self._stop(summary.stop_reason)
        is_unscored = rewards.isnan().all(1) & ~summary.failed
        if is_unscored.any():  # the same on every process
            budget_reason = gather_first_reason(check_budget(self.spending))
            if budget_reason:
                self._stop(budget_reason)

        self._after_rewards(batch, summary.totals)
        return rewards

    def _keep_unscored(self, batch: Batch, error: Exception) -> None:
        """Record the rollouts of a batch whose rewards could not be computed, and say where."""
        self.monitor.record_unscored(batch)
        if self.args.rollouts_max_mb and self.is_in_train:
            error.add_note(
                f"the rollouts of this batch are in {self.monitor.log.folder}, without rewards; "
                "fix the reward function, then train with resume_from_checkpoint=True "
                "(--resume_from_checkpoint true) to go on from the last checkpoint, or with "
                "overwrite=True (--overwrite true) from the beginning"
            )

    # --- scores -> loss ------------------------------------------------------------------------

    def _compute_loss(self, model: torch.nn.Module, inputs: Mapping[str, Any]) -> torch.Tensor:
        """Return the loss of a micro-batch.

        It may have too many rows for one pass if rollouts have several sequences. The loss is then
        a sum over slices: all but the last have their backward pass here.
        """
        max_rows = self.args.per_device_eval_batch_size
        if self.model.training:
            max_rows = self.args.per_device_train_batch_size
        slices = self.row_layout.split_rows(inputs, max_rows, self.accelerator)

        # Gradients are synchronised between processes only in the backward pass of the last slice.
        earlier_loss = torch.zeros((), device=self.accelerator.device)
        for rows in slices[:-1]:
            with self.accelerator.no_sync(model):
                loss = self._compute_loss_of_rows(model, rows)
                if loss.requires_grad:  # not in evaluation
                    self.accelerator.backward(loss)
            earlier_loss += loss.detach()
        return self._compute_loss_of_rows(model, slices[-1]) + earlier_loss

    def _compute_loss_of_rows(
        self, model: torch.nn.Module, inputs: Mapping[str, Any]
    ) -> torch.Tensor:
        """Return TRL's loss of some rows, for which only the agent's tokens are scored."""
        has_ratio = "importance_sampling_ratio" in inputs
        scored_model = ScoredTokensModel(model, inputs["tool_mask"])
        with compute_importance_ratio(self) if has_ratio else nullcontext():
            loss = super()._compute_loss(scored_model, prepare_loss_inputs(inputs))

        # Before the next update, the log-probabilities of sampler and trainer should be equal.
        if not has_ratio and inputs.get("sampled_at") == self.state.global_step:
            metrics = logp_difference(scored_model.logps, inputs, self.accelerator)
            self.log_batch("train", metrics)
            self.monitor.check_logprob_difference(metrics.get("sampling/logp_difference/mean", 0.0))
        return loss

    def _get_per_token_logps_and_entropies(
        self,
        model: torch.nn.Module | ScoredTokensModel,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        logits_to_keep: int,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As TRL's; while a batch is scored, only the agent's tokens have a log-probability."""
        if self._batch is not None and not isinstance(model, ScoredTokensModel):
            loss_mask = self._batch.loss_mask
            assert loss_mask is not None  # `_batch_for_trl` has set it
            # TRL may have padded the completions further, to a multiple.
            padding = logits_to_keep - loss_mask.shape[1]
            model = ScoredTokensModel(model, torch.nn.functional.pad(loss_mask, (0, padding)))
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
        )

    # --- what subclasses replace ------------------------------------------------------------------

    @staticmethod
    def _choose_rewards(
        reward_funcs: RewardFunctions | None,
        args: MultiTurnGRPOConfig,
        environment: Environment | None,
    ) -> RewardFunctions | None:
        """Return the reward functions. By default, a program returns the reward itself."""
        is_program = environment is not None and environment.plays_whole_episodes
        if is_program and not reward_funcs:
            if not getattr(environment, "returns_reward", True):
                raise ValueError(
                    "the output of a command is no reward, because the policy may have written it: "
                    "give Program a reward=, or this trainer reward_funcs="
                )
            return cast(Any, environment).reward
        return reward_funcs

    @staticmethod
    def _trains_weights(args: MultiTurnGRPOConfig) -> bool:
        """Return whether some step of the run updates weights."""
        return True

    @staticmethod
    def _default_grammar(environment: Environment | None) -> Grammar:
        """Return the environment's grammar. Without an environment, a turn is an answer."""
        if environment is None:
            return FreeText()
        return environment.grammar or TagGrammar()

    @staticmethod
    def _default_template(environment: Environment | None, grammar: Grammar) -> str:
        """Return the agent's user message if none is passed."""
        return template_for(environment, grammar)

    @classmethod
    def untrained_spec(
        cls,
        model: str,
        environment: Environment | None,
        args: MultiTurnGRPOConfig,
        options: SpecOptions,
    ) -> AgentSpec:
        """Return the form in which a model plays the first episodes of a run, without a trainer.

        Args:
            model (`str`): The policy's folder or name on the Hub.
            environment ([`Environment`], *optional*): Answers the agent's requests.
            args ([`MultiTurnGRPOConfig`]): The settings.
            options ([`SpecOptions`]): The trainer's arguments about the agent's form.
        """
        spec, _ = resolve_spec(
            model, environment, args, options, cls._default_grammar, cls._default_template
        )
        return replace(spec, limits=limits_for(args, environment))

    def budget_spenders(
        self, environment: Environment | None, reward_functions: Sequence[RewardFunction]
    ) -> dict[str, Any]:
        """Return the components that spend from the job's budget, by the name of their account.

        Reward functions spend if they have a method `charge_to(budget, account)`, as clients of
        large LLMs do: these are judges.
        """
        components: dict[str, Any] = {"environment": environment}
        judges = [function for function in reward_functions if hasattr(function, "charge_to")]
        # Each of several judges has an account of its own.
        for number, judge in enumerate(judges, start=1):
            name = f"judge_{number}" if len(judges) > 1 else "judge"
            components[name] = judge
        return components

    # Three numbers of rollouts, which are equal unless a row is played under several prompts
    # (E-SPL):
    # - `args.num_generations`: those of a row under one prompt;
    # - `rollouts_per_group()`, TRL's attribute `num_generations`: those that share a baseline;
    # - `rollouts_per_row()`: all of a row in a batch.

    def rollouts_per_group(self) -> int:
        """Return the number of rollouts that share a baseline."""
        return self.args.num_generations

    def rollouts_per_row(self) -> int:
        """Return the number of times that the sampler repeats each row."""
        return self.prompts.rollouts_per_row

    def _create_prompts(self) -> Prompts:
        """Return the component that renders the rows of a batch."""
        return RowPrompts(self.spec, self.num_generations)

    def _before_batch(self) -> None:
        """Called before each training batch."""
        self.prompts.start_batch(self.state.global_step)

    def _after_rewards(self, batch: Batch, totals: torch.Tensor) -> None:
        """Called when the rewards of a batch are known.

        Args:
            batch ([`Batch`]): The batch of this process.
            totals (`torch.Tensor`): Of shape `(rollouts of all processes,)`, NaN where there is
                no reward.
        """

    def saved_spec(self) -> AgentSpec:
        """Return the form of the agent that is saved with the weights."""
        return drop_unused_template(self.spec, self.train_dataset)

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)
        # A resumed run is compared with what its checkpoint was trained with.
        is_checkpoint = self.staging.folder is not None
        if is_checkpoint and self._settings_file.settings is not None:
            self._settings_file.settings.write_checkpoint(folder)

    def describe_agent(self) -> TrainedAgent:
        """Return the facts about the trained agent that its model card states."""
        row_count = None
        if hasattr(self.train_dataset, "__len__"):  # not a streamed dataset
            row_count = len(self.train_dataset)
        # A resumed run keeps the learning rate of its checkpoint, whatever was requested.
        args = self.args
        if self._settings_file.settings is not None:
            args = copy.copy(args)
            args.learning_rate = self._settings_file.settings.args["learning_rate"]
        return TrainedAgent(
            args=args,
            model=self.model,
            spec=self.saved_spec(),
            method=self.method,
            environment=self.environment,
            reference=self.reference,
            reward_functions=self._reward_functions,
            reward_names=self.reward_func_names,
            row_count=row_count,
            steps=self.state.global_step,
            hub_id=self.hub_model_id,
        )

    # --- logging and stopping ------------------------------------------------------------------

    def log_batch(self, mode: str, metrics: Mapping[str, float]) -> None:
        """Add a batch's metrics to those that TRL averages at the next log."""
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As [`~trl.GRPOTrainer`]'s; metrics of an evaluation are means over its rollouts.

        TRL takes the mean of the batches' means, in which a rollout of a small last batch counts
        more than the others.
        """
        if not self.model.training:
            metrics = self._metrics["eval"]
            for name, values in metrics.items():
                is_reward = name == "reward" or name.startswith("rewards/")
                counts = self._eval_scored_counts if is_reward else self._eval_rollout_counts
                if len(values) == len(counts):
                    metrics[name] = [_weighted_mean(values, counts)]
        super().log(logs, start_time)

    def drop_metrics(self, mode: str) -> None:
        """Discard the metrics since the last log."""
        self._metrics[mode].clear()

    def may_lack_loss_tokens(self) -> bool:
        """As [`ResumableGRPOTrainer.may_lack_loss_tokens`]."""
        return self.monitor.some_failed

    def _stop(self, reason: str) -> NoReturn:
        """Save a checkpoint if training is running, and raise [`TrainingStopped`].

        Must be called on every process.
        """
        save_checkpoint = None
        if self.is_in_train:
            save_checkpoint = partial(self._save_checkpoint, self.model, trial=None)
        stop_training(reason, self.spending, self.args, self.state.global_step, save_checkpoint)

    # --- training and evaluation ---------------------------------------------------------------

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: dict[str, Any] | None = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """As [`ResumableGRPOTrainer.train`].

        Raises:
            [`TrainingStopped`]: If too many rollouts failed, or if the run is over and all of
                them failed.
        """
        # Every batch of the failure window waits for an endpoint that is down.
        with self._step_spans, wait_out_outages():
            output = super().train(resume_from_checkpoint, trial, ignore_keys_for_eval)
        failure_reason = self.monitor.failures.failure_reason()
        if failure_reason:
            self._stop(failure_reason)
        return output

    def _after_checkpoint(self) -> None:
        if isinstance(self.batch_source, AsyncSource):
            self.batch_source.release_old_entries()

    @contextmanager
    def training_context(self, resumes: bool) -> Iterator[None]:
        """The context of training, in which rollouts are played ahead if `async_lead` is above 0.

        See [`make_async_source`].
        """
        if not self.args.async_lead:
            yield
            return
        # Training batches now come from rollouts that are played several steps ahead.
        async_source = make_async_source(
            self.args, self.train_dataset, self.prompts, self.player, self.spec, self.model, resumes
        )
        self.batch_source = async_source
        # Checkpoints keep the groups in flight, under a name that old checkpoints have too.
        self.stateful_components["ahead"] = async_source
        try:
            with async_source.finish_requests_on_exit():
                yield
        finally:
            # The rollouts ahead end with training; later batches are played on demand.
            self.batch_source = self.on_policy_source
            del self.stateful_components["ahead"]

    def evaluate(
        self,
        eval_dataset: Dataset | Mapping[str, Dataset] | str | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """As [`~trl.GRPOTrainer`]'s. All evaluations sample with the same seeds."""
        self._eval_rollout_counts = []
        self._eval_scored_counts = []
        with job_span("evaluation", self.state.global_step, self.accelerator):
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)


def _weighted_mean(values: Sequence[float], weights: Sequence[int]) -> float:
    """Return the mean of the values that are numbers; NaN if none of them has a weight."""
    pairs = [pair for pair in zip(values, weights, strict=True) if not math.isnan(pair[0])]
    total_weight = sum(weight for _, weight in pairs)
    if not total_weight:
        return math.nan
    return sum(value * weight for value, weight in pairs) / total_weight
