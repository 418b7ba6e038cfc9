"""GRPO over conversations: TRL's `GRPOTrainer` with a multi-turn rollout against an environment.

TRL makes batches, groups, advantages, loss and optimizer steps. This class constructs the parts that are ours and
answers TRL's hooks with them: a [`Source`] makes the batch of rollouts (rendered by [`Prompts`], played by a
[`Player`]), the [`Batch`] gives TRL ids and mask, an [`Observer`] logs, records and watches it. No part knows this
class. `contract.py` lists the parts of TRL that it depends on.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from datasets import Dataset

from ..interop import environment_of
from ..llm import spans, start_traces
from ..local import context_length
from ..rollout import AgentSpec, Environment, FreeText, Grammar, Policy, RolloutLog, TagGrammar, template_for
from .ahead import ahead_of
from .batch import Batch, Place, completions_of
from .callbacks import LiveView, LogFile, one_line_progress
from .config import MultiTurnGRPOConfig
from .guarded_rewards import guarded_reward
from .hub import TAGS, Trained, missing_in_a_line, only_the_model, write_card
from .loss import PER_ROLLOUT, ScoredTokens, clipped_share, logp_difference, loss_in_slices, scored_only, spread
from .observer import Observer, eval_passes
from .player import Player
from .policies import PolicyUnreachable, pushed_by, tokenizer_of, trainer_backend
from .resumable import ResumableGRPOTrainer
from .setup import Setup, charged, check_experts, check_packed, check_settings, has_aux_loss, set_up
from .several import rewards_of
from .source import OnPolicy, Prompts, RowPrompts, Source
from .stopping import FailureWatch, first_reason, quiet_about_missing_rewards, stop, why_spent
from .tracing import StepSpans, job_span


class MultiTurnGRPOTrainer(ResumableGRPOTrainer):
    """Trains an agent that talks to an environment.

    Args:
        model (`str` or `PreTrainedModel`): As in [`~trl.GRPOTrainer`].
        reward_funcs (`Callable` or `list[Callable]`): TRL reward functions. They get the rollouts as the keyword
            argument `rollout` (`list[Rollout]`) beside the dataset's columns. A failed rollout has no reward, whatever
            they return for it.
        args ([`MultiTurnGRPOConfig`], *optional*): Training arguments.
        train_dataset (`Dataset`, pandas `DataFrame` or list of dicts): Columns `question` and `answers` (`list[str]`),
            as [`load_task`] returns them; or `prompt`, which is then used as it is: messages for the chat template,
            or text, which is tokenised without one (TRL's standard format). Images are refused.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*): The same for evaluation.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The agent's tokenizer. Defaults to the model's.
        environment ([`Environment`], `Callable` or `dict`): Answers the agent's requests, for example
            [`LLMEnvironment`]; or a function of the rollout that does; or a [`Program`], an agent that keeps its own
            loop. If it has `state_dict()` (plain data) and `load_state_dict(state)`, checkpoints keep its state, one
            per process. `None`: a request ends the rollout. A dict holds several environments by name; each row then
            names its own in the column `environment`, and `reward_funcs`, `prompt_template` and `grammar` may be dicts,
            too.
        tools (`list`, *optional*): Instead of `environment`: Python functions, or other objects that
            [`ToolEnvironment`] accepts.
        environment_factory (`Callable`, *optional*): Instead of `environment`: a class as [`TRLEnvironment`] accepts
            it; its `get_reward`, if it has one, is a reward function beside the others.
        prompt_template (`str` or `dict`, *optional*): The agent's user message. Defaults to the one that the model was
            saved with (`agentic_prompting.json` in its folder). Without one it describes how to ask the environment, by
            the environment's `prompt_template` or docstring; see [`template_for`].
        system_prompt (`str`, *optional*): The agent's system message. Defaults to the one saved with the model, if any.
        grammar ([`Grammar`] or `dict`, *optional*): The form of the agent's turns. Defaults to the environment's
            `grammar` if it has one, else to the one saved with the model, else to Prompt-R1's tags.
        **kwargs: The other arguments of [`~trl.GRPOTrainer`]: `callbacks`, `peft_config`, ...

    Raises:
        `TypeError`: If `args` is not one of this library's configurations, or the environment has no `step(rollout)`.
        `ValueError`: For a dataset, template or argument that cannot work, before the model is loaded.
        [`LLMError`]: If the environment cannot be reached or refuses the key (with `args.check_environment`).
        [`TrainingStopped`]: From `train`, if too many rollouts failed or the environment's error is fatal.
    """

    method = "multi-turn GRPO"  # for model cards
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
        if kwargs.get("rollout_func"):
            raise ValueError(
                "rollout_func= belongs to TRL's own loop, which this trainer replaces: pass an environment= with "
                "step(rollout) instead, or use trl.GRPOTrainer"
            )
        environment, added = environment_of(environment, tools, environment_factory)
        rewards = self._rewards(rewards_of(reward_funcs, environment), args, environment)
        form, defaults = (prompt_template, system_prompt, grammar), (self._default_grammar, self._default_template)
        made = set_up(args, model, environment, rewards, added, train_dataset, eval_dataset, form, defaults)
        args, functions, self.spec, self._plays_itself = made.args, made.functions, made.spec, made.plays_itself
        self._take_folder(args, model)
        self.spending, self._functions = charged(self.roles(environment, functions), args), functions
        with warnings.catch_warnings(), pushed_by(args), missing_in_a_line(model):
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")
            super().__init__(
                model=model,
                reward_funcs=[*map(guarded_reward, functions)] or None,
                args=args,
                train_dataset=made.train_dataset,
                eval_dataset=made.eval_dataset,
                processing_class=processing_class,
                rollout_func=lambda prompts, trainer: trainer._for_trl(),
                **kwargs,
            )
        self._compose(made)

    # --- construction --------------------------------------------------------------------------------------------

    @classmethod
    def _checked(cls, args: Any) -> Any:
        """The training arguments, if they are of this trainer's class; TRL's own are not."""
        if args is not None and not isinstance(args, cls._config):
            raise TypeError(
                f"args is a {type(args).__name__}, and this trainer takes a {cls._config.__name__}: it has the same "
                "fields as GRPOConfig, and those of its method"
            )
        return args if args is not None else cls._config(cls._default_output)

    def _compose(self, made: Setup) -> None:
        """Construct the parts that the hooks below use."""
        args, environment, run = self.args, made.environment, int(time.time())
        if self._plays_itself:
            check_settings(args, has_aux_loss(self.model, args.router_aux_loss_coef), self.spec.prompt_format)
            self.loss_type = "dapo" if args.loss_type in PER_ROLLOUT else args.loss_type  # a sum; see `loss.py`
        check_experts(self.model, args.router_aux_loss_coef)
        with self.accelerator.autocast():
            check_packed(self.model)
        self.num_generations = self.rollouts_per_group()
        self.model.add_model_tags(list(TAGS))
        backend = trainer_backend(self, self.spec.stop_texts)
        readable = min(filter(None, (backend.max_context, context_length(self.model))), default=None)
        self.player = Player(
            backend,
            environment,
            self.spec.tokens(tokenizer_of(self), self.eos_token_ids),
            made.limits(readable),
            self.accelerator,
            full_determinism=args.full_determinism,
            show_progress=not args.disable_tqdm,
            sync=self.vllm_generation.sync_weights if self.use_vllm else None,
        )
        self.prompts = self._prompts()
        self.on_policy = OnPolicy(self.prompts, self.player)
        self.source: Source = self.on_policy  # of training batches
        self.live = LiveView(
            args.report_to,
            lambda: self.callback_handler.callbacks,
            self.reward_func_names,
            self._functions,
            getattr(self, "population", None),
        )
        log = RolloutLog(Path(args.output_dir) / "rollouts", args.process_index, args.rollouts_max_mb)
        failures = FailureWatch(args.failure_window, args.max_failed_share, made.asked)
        self.observer = Observer(
            log, failures, run, self.reward_func_names, self.limits, args.process_index,
            self.live.show if self.live.is_wanted() else None, several=bool(self.spec.environments),
        )  # fmt: skip
        self.keepers["observer"] = self.observer
        if environment is not None:
            self.keepers["environment"] = environment
        if backend.sync is not None:
            self.keepers["pushed"] = backend.sync
        self._batch: Batch | None = None  # the current batch, from one of TRL's hooks to the next
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
        """The given reward functions; without any, the reward that a program returns itself."""
        by_program = not reward_funcs and environment is not None and environment.play_episode is not None
        return environment.reward if by_program else reward_funcs

    @staticmethod
    def _default_grammar(environment: Any) -> Grammar:
        """The environment's grammar. Without an environment, as in TRL, a turn is the answer."""
        return FreeText() if environment is None else environment.grammar or TagGrammar()

    @staticmethod
    def _default_template(environment: Any, grammar: Grammar) -> str:
        """The agent's user message, if none is given."""
        return template_for(environment, grammar)

    def roles(self, environment: Environment | None, functions: Sequence[Any]) -> dict[str, Any]:
        """The components that spend from the job's budget, by account name. A reward function spends if it has a
        `charge_to(budget, account)`, as clients have: a language model that judges."""
        judges = [one for one in functions if hasattr(one, "charge_to")]
        named = {f"judge_{number + 1}" if len(judges) > 1 else "judge": one for number, one in enumerate(judges)}
        return {"environment": environment, **named}

    def rollouts_per_group(self) -> int:
        """Rollouts that share a baseline."""
        return self.args.num_generations

    def _prompts(self) -> Prompts:
        """The part that renders the rows of a batch."""
        return RowPrompts(self.spec, self.num_generations)

    def rollouts_per_row(self) -> int:
        """The number of times that the sampler repeats a row: one for each of its rollouts."""
        return self.prompts.rollouts_per_row

    def _before_batch(self) -> None:
        """Called before each training batch."""
        self.prompts.new_batch(self.state.global_step)

    def _after_rewards(self, batch: Batch, totals: torch.Tensor) -> None:
        """Called when the rewards of a batch are known, for a method's own work.

        Args:
            batch ([`Batch`]): This process's part.
            totals (`torch.Tensor`): Of shape `(rollouts of all processes,)`, NaN where there is no reward.
        """

    def saved_spec(self) -> AgentSpec:
        """The form of the agent that is saved beside the weights."""
        return self.spec

    # --- TRL's hooks: rows -> rollouts -> loss -------------------------------------------------------------------

    def _place(self) -> Place:
        """The position of the next batch in the run."""
        args, step = self.args, self.state.global_step
        block = args.steps_per_generation * args.num_iterations
        number, last = self._step // block, -(-self.state.max_steps * args.gradient_accumulation_steps // block)
        if self.model.training:
            part = self._step % args.gradient_accumulation_steps
            return Place(args.seed, "train", step, part, number, last, self.num_generations)
        group = args.num_generations_eval or args.num_generations
        return Place(args.seed, "eval", step, self._eval_batches, number, last, group)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        place = self._place()
        if place.trains:
            self._before_batch()
        try:
            self.player.reach()
            if not self.use_vllm or place.step != self._last_loaded_step:
                self.player.push_weights(place.step)
            self._last_loaded_step = place.step
            self._batch = (self.source if place.trains else self.on_policy).next(inputs, place)
        except PolicyUnreachable as error:  # on every process
            self._stop(str(error))
        with self._corrected() if self._batch.off_policy else nullcontext():
            scored = super()._generate_and_score_completions(self._batch.rows)
        if self._batch.off_policy:
            clipped = {"async/clipped": clipped_share(scored, self.args, self.accelerator)}
            self.log_batch("train", {**self._batch.metrics, **clipped})
        elif place.trains:
            scored |= self._batch.sampler_columns(scored["completion_ids"])
            if "importance_sampling_ratio" in scored:  # TRL has logged the difference
                self.observer.warn_of_logps(self._metrics["train"]["sampling/sampling_logp_difference/mean"][-1])
        if self._plays_itself:
            processes, longest = self.accelerator.num_processes, self.args.max_completion_length
            scored = spread(scored, self._batch.owners, self.args.loss_type, longest, processes)
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
        seen = self.observer.seen(batch, rewards, self.args.reward_weights)
        self.log_batch(batch.place.mode, seen.metrics)
        if not batch.place.trains:
            self._eval_batches += 1
            self.log_batch("eval", eval_passes(rewards[:, 0], batch.place.group))
        if seen.stop:
            self._stop(seen.stop)
        unscored = (rewards.isnan().all(1) & ~seen.failed).any()  # by a judge; the same on every process
        if unscored and (why := first_reason(why_spent(self.spending))):
            self._stop(why)
        self._after_rewards(batch, seen.totals)
        return rewards

    def _for_trl(self) -> dict[str, Any]:
        """The batch as TRL's `rollout_func` returns it."""
        assert self._batch is not None
        parts = self.args.steps_per_generation if self._batch.place.trains else 1
        return self._batch.for_trl(self.eos_token_ids, self.use_vllm, parts if self._plays_itself else None)

    def _compute_loss(self, model, inputs):
        if not self._plays_itself:
            return self._loss_of(model, inputs)
        args = self.args
        most = args.per_device_train_batch_size if self.model.training else args.per_device_eval_batch_size
        return loss_in_slices(partial(self._loss_of, model), inputs, most, self.accelerator, model)

    def _loss_of(self, model: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
        """TRL's loss of some rows, in which only the agent's tokens are scored."""
        model, is_corrected = ScoredTokens(model, inputs["tool_mask"]), "importance_sampling_ratio" in inputs
        with self._corrected() if is_corrected else nullcontext():
            loss = super()._compute_loss(model, scored_only(inputs))
        if not is_corrected and inputs.get("sampled_at") == self.state.global_step:  # no update since
            difference = logp_difference(model.logps, inputs, self.accelerator)
            self.log_batch("train", difference)
            self.observer.warn_of_logps(difference.get("sampling/logp_difference/mean", 0.0))
        return loss

    @contextmanager
    def _corrected(self) -> Iterator[None]:
        """Within it TRL corrects samples of any policy by its importance ratio, as it does those of vLLM."""
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

    def log_batch(self, mode: str, metrics: Mapping[str, float]) -> None:
        """Add a batch's metrics to those that TRL averages at the next log."""
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def may_be_empty(self) -> bool:
        """As [`ResumableGRPOTrainer.may_be_empty`]."""
        return self.observer.some_failed

    def drop_metrics(self, mode: str) -> None:
        """Forget the metrics since the last log."""
        self._metrics[mode].clear()

    def _stop(self, why: str) -> NoReturn:
        save = partial(self._save_checkpoint, self.model, trial=None) if self.is_in_train else None
        stop(why, self.spending, self.args, self.state.global_step, save)

    # --- training, evaluation, saving and sharing ----------------------------------------------------------------

    @contextmanager
    def while_training(self, resumes: bool) -> Iterator[None]:
        """With `async_lead` > 0, groups are played ahead while training lasts; see [`ahead_of`]."""
        if not self.args.async_lead:
            yield
            return
        ahead = ahead_of(self.args, self.train_dataset, self.prompts, self.player, self.spec, self.model, resumes)
        self.source = self.keepers["ahead"] = ahead
        try:
            with ahead.running():
                yield
        finally:
            self.source = self.on_policy
            del self.keepers["ahead"]

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As [`ResumableGRPOTrainer.train`].

        Raises:
            [`TrainingStopped`]: Too many rollouts failed; or the run is over, and all of them failed.
        """
        with self._step_spans:
            output = super().train(*args, **kwargs)
        if why := self.observer.failures.why_failed():
            self._stop(why)
        return output

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """As [`~trl.GRPOTrainer`]'s; every evaluation samples with the same seeds."""
        self._eval_batches = 0
        with job_span("evaluation", self.state.global_step, self.accelerator):
            return super().evaluate(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        """As [`~trl.GRPOTrainer`]'s; also writes the agent's form and a model card."""
        super().save_model(output_dir, *args, **kwargs)
        if self.args.should_save:
            self._save_beside(Path(output_dir or self.args.output_dir))

    def _save_beside(self, folder: Path) -> None:
        """Write the files beside the weights. One process calls it."""
        self.saved_spec().save(folder)
        write_card(self.trained(), folder)

    def trained(self) -> Trained:
        """The facts for the agent's model card."""
        rows = len(self.train_dataset) if hasattr(self.train_dataset, "__len__") else None
        return Trained(
            self.args, self.model, self.saved_spec(), self.method, self.environment,
            getattr(self, "reference", None), self._functions, self.reward_func_names, rows, self.state.global_step,
            self.hub_model_id,
        )  # fmt: skip

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: str | list[str] | None = None
    ) -> None:
        """Write the model card, `output_dir/README.md`, from the files that the run's folder holds now.

        Args:
            model_name (`str`, *optional*): Name of the model.
            dataset_name (`str`, *optional*): Hub id of the training data.
            tags (`str` or `list[str]`, *optional*): Further tags.
        """
        if self.is_world_process_zero():
            tags = [tags] if isinstance(tags, str) else tags or []
            write_card(self.trained(), Path(self.args.output_dir), model_name, dataset_name, tags)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~trl.GRPOTrainer`]'s, but uploads the model alone: no rollouts, no records of spending, no recorded
        replies, no checkpoints."""
        with only_the_model(Path(self.args.output_dir), tokenizer_of(self)):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with only_the_model(Path(self.args.output_dir), tokenizer_of(self)):
            super()._push_from_checkpoint(checkpoint_folder)
