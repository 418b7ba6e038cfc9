"""GRPO over conversations: TRL's `GRPOTrainer` with a multi-turn rollout against an environment.

TRL does what it does: batches, groups, advantages, loss, optimizers, engines. This class renders the prompt of each
row, plays the rollouts with [`play_all`], hands TRL ids and mask, lets rewards read the rollout, and logs, records
and watches what came back. The private parts of TRL it touches are listed in `tests/test_trl_contract.py`.
"""

from __future__ import annotations

import inspect
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object
from datasets import Dataset

from ..data import as_dataset, validate_dataset
from ..interop import environment_of
from ..llm import Budget, BudgetExceeded, charge, run
from ..local import context_length
from ..rewards import CostReward
from ..rollout import (
    AgentSpec,
    Environment,
    FreeText,
    Grammar,
    Limits,
    Rollout,
    RolloutFacts,
    RolloutLog,
    TagGrammar,
    gather,
    play_all,
    rollout_metrics,
    rollout_record,
    rollout_seed,
    template_for,
)
from ..rollout.progress import progress
from .callbacks import LiveView, LogFile, one_line_progress
from .carry_over import CarryOver, count_clipped
from .config import MultiTurnGRPOConfig
from .hub import only_the_model, write_card
from .policies import PolicyUnreachable, pushed_by, sampling_of, trainer_backend
from .resumable import ResumableGRPOTrainer
from .saving_calls import CallSaver, EndsHopeless, counted, honest_advantages, paid_share
from .stopping import FailureWatch, quiet_about_missing_rewards, rank_barrier, stop, stop_if
from .trl_batch import (
    ScoredTokens,
    completions_of,
    padded_mask,
    prompt_format_of,
    reward_columns,
    scored_only,
    to_trl_batch,
)


class MultiTurnGRPOTrainer(ResumableGRPOTrainer):
    """Trains an agent that talks to an environment.

    Args:
        model (`str` or `PreTrainedModel`): As in [`~trl.GRPOTrainer`].
        reward_funcs (`Callable` or `list[Callable]`): TRL reward functions. They get the rollouts as the keyword
            argument `rollout` (`list[Rollout]`) beside the dataset's columns. What they make of a failed rollout is not
            used: it has no reward.
        args ([`MultiTurnGRPOConfig`], *optional*): Training arguments.
        train_dataset (`Dataset`, pandas `DataFrame` or list of dicts): Columns `question` and `answers` (`list[str]`),
            as [`load_task`] gives; or `prompt`, which is then used as it is: messages, for the chat template, or text,
            which is tokenised without one (TRL's standard format). Images are refused.
        eval_dataset (`Dataset` or `dict[str, Dataset]`, *optional*): The same for evaluation.
        processing_class (`PreTrainedTokenizerBase`, *optional*): The agent's tokenizer. Defaults to the model's.
        environment ([`Environment`] or `Callable`): Answers the agent's requests, for example [`LLMEnvironment`]; or a
            function of the rollout that does. If it has `state_dict()` (plain data) and `load_state_dict(state)`,
            checkpoints keep its state, one per process. `None`: nobody answers, and a request ends the rollout.
        tools (`list`, *optional*): In place of `environment`: Python functions, or what else [`ToolEnvironment`] takes.
        environment_factory (`Callable`, *optional*): In place of `environment`: a class as [`TRLEnvironment`] takes it;
            its `get_reward`, if it has one, is a reward function beside the others.
        prompt_template (`str`, *optional*): The agent's user message. By default it says how to ask the environment,
            in the words of its `prompt_template` or its docstring; see [`template_for`].
        system_prompt (`str`, *optional*): The agent's system message.
        grammar ([`Grammar`], *optional*): What turns look like. Defaults to the environment's `grammar` where it has
            one, else Prompt-R1's tags; without an environment [`FreeText`].
        **kwargs: Everything else of [`~trl.GRPOTrainer`]: `callbacks`, `peft_config`, ...

    Raises:
        `TypeError`: If `args` is not of this library's kind, or the environment has no `step(rollout)` to call.
        `ValueError`: For a dataset, template or argument that cannot work, before the model is loaded.
        [`LLMError`]: If the environment cannot be reached or refuses the key (with `args.check_environment`).
        [`TrainingStopped`]: From `train`, if too many rollouts failed or the environment can never work.
    """

    _tag_names: ClassVar[list[str]] = ["trl", "grpo", "agentic-prompting"]
    _config: type[MultiTurnGRPOConfig] = MultiTurnGRPOConfig
    _default_output = "trainer_output"
    use_vllm: bool  # these two are TRL's
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
        prompt_template: str | None = None,
        system_prompt: str | None = None,
        grammar: Grammar | None = None,
        **kwargs: Any,
    ):
        args = self._checked(args)
        train_dataset, eval_dataset = as_dataset(train_dataset), as_dataset(eval_dataset)
        functions = self._rewards(reward_funcs, args)
        functions = [] if functions is None else functions
        functions = list(functions) if isinstance(functions, (list, tuple)) else [functions]
        if kwargs.get("rollout_func"):
            raise ValueError(
                "rollout_func= belongs to TRL's own loop, which this trainer replaces: pass an environment= with "
                "step(rollout) instead, or use trl.GRPOTrainer"
            )
        self.environment, added = environment_of(environment, tools, environment_factory)
        if args.cost_weight:
            added.append(CostReward(args.cost_weight, args.cost_unit))
        if added and args.reward_weights is not None:
            args = copy(args)
            args.reward_weights = [*args.reward_weights, *[1.0] * len(added)]
        functions += added
        self._check_datasets(train_dataset, eval_dataset, prompt_template)
        evaluated = eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]
        prompts = prompt_format_of(train_dataset, *evaluated)
        self.spec = replace(self._agent_spec(prompt_template, system_prompt, grammar, args), prompt_format=prompts)
        if args.hopeless_share < 1:
            self.environment = self._ending_hopeless(self.environment, functions, args)
        self._open_book(functions, args)
        if args.use_vllm and args.stop_at_tags:
            stops = {"stop": list(self.spec.stop_texts), "include_stop_str_in_output": True}
            args.generation_kwargs = {**stops, **(args.generation_kwargs or {})}
        with warnings.catch_warnings(), pushed_by(args):
            warnings.filterwarnings("ignore", message="You are using 'rollout_func'")  # which is why trl is pinned
            super().__init__(
                model=model,
                reward_funcs=functions or None,
                args=args,
                train_dataset=train_dataset,
                eval_dataset=eval_dataset,
                processing_class=processing_class,
                rollout_func=lambda prompts, trainer: trainer._play(prompts),
                **kwargs,
            )
        self._set_up_rollouts(args)

    @classmethod
    def _checked(cls, args: Any) -> Any:
        """Training arguments of this trainer's kind, which TRL's own are not."""
        if args is not None and not isinstance(args, cls._config):
            raise TypeError(
                f"args is a {type(args).__name__}, and this trainer takes a {cls._config.__name__}: it has the same "
                "fields as GRPOConfig, and those of its method"
            )
        return args if args is not None else cls._config(cls._default_output)

    def _check_datasets(self, train: Any, evaluation: Any, template: str | None) -> None:
        for dataset in [train, *(evaluation.values() if isinstance(evaluation, Mapping) else [evaluation])]:
            if dataset is None and dataset is not train:
                continue
            self._validate(dataset)
            if template is not None and "prompt" in (getattr(dataset, "column_names", None) or ()):
                raise ValueError(
                    "prompt_template would be ignored, as the dataset has a column `prompt`, which is used as it is: "
                    "leave one of them out"
                )

    def _agent_spec(
        self, template: str | None, system_prompt: str | None, grammar: Grammar | None, args: MultiTurnGRPOConfig
    ) -> AgentSpec:
        grammar = grammar or self._default_grammar(self.environment)
        return AgentSpec(
            prompt_template=self._default_template(self.environment, grammar) if template is None else template,
            system_prompt=system_prompt,
            grammar=grammar,
            limits=self._limits(args),
            chat_template_kwargs={
                **getattr(self.environment, "chat_template_kwargs", {}),
                **(args.chat_template_kwargs or {}),
            },
            stop_at_tags=args.stop_at_tags,
            sampling=asdict(sampling_of(args)),
        )

    def _limits(self, args: MultiTurnGRPOConfig, readable: int | None = None) -> Limits:
        """The limits of `args`. Without an environment the only turn is the completion, and may be as long as one."""
        limits, (own,) = args.limits(readable), (one for one in fields(args) if one.name == "max_turn_tokens")
        if self.environment is None and args.max_turn_tokens == own.default:
            limits = replace(limits, max_turn_tokens=limits.max_tokens)
        return limits

    def _open_book(self, functions: list[Any], args: MultiTurnGRPOConfig) -> None:
        """One book for all processes of the job and for its restarts; and who spends is asked whether it can."""
        self.spending = Budget(args.budget_usd, args.budget_tokens, Path(args.output_dir) / "spending.sqlite")
        roles = self.roles(self.environment, functions)
        charge(self.spending, **roles)
        if args.check_environment and args.process_index == 0:
            for spender in roles.values():
                if hasattr(spender, "check"):
                    spender.check()

    def _set_up_rollouts(self, args: MultiTurnGRPOConfig) -> None:
        self.chat_format = self.spec.tokens(self._tokenizer, self.eos_token_ids)
        self.backend = trainer_backend(self, self.spec.stop_texts)
        self.policy = self.backend.policy
        readable = min(filter(None, (self.backend.max_context, context_length(self.model))), default=None)
        self.limits = self._limits(args, readable)
        self.rollout_log = RolloutLog(
            Path(args.output_dir) / "rollouts", self.accelerator.process_index, args.rollouts_max_mb
        )
        # The rows of the batch being generated: TRL passes on the prompts only.
        self._rows: list[dict[str, Any]] = []
        self._notes: list[dict[str, Any]] = []  # their `metadata`
        self.carry_over: CarryOver | None = None  # while training with lead > 0
        self._taken: list[Rollout] | None = None  # from it
        self._counts: tuple[torch.Tensor, ...] | None = None  # of the batch at hand: see saving_calls.py
        self._scored: torch.Tensor | None = None  # of the batch at hand: see ScoredTokens
        self._started = int(time.time())  # tells apart the records of several runs in one output_dir
        self._failures = FailureWatch(args.failure_window, args.max_failed_share)
        self._eval_batches = 0
        self._paid = 1.0  # share of the last training batch's replies that nobody else's call had paid for
        self._saver: CallSaver | None = None
        if args.saves_calls:
            self._saver = CallSaver(args, self.train_dataset, self.num_generations, args.seed)
            if not self._free_rewards():
                raise ValueError("to save calls needs a reward function that can be asked at no cost, once more")
        one_line_progress(self)
        self.live = LiveView(self)
        self.add_callback(self.live)
        if args.rollouts_max_mb:
            self.add_callback(LogFile(self.rollout_log.folder, self._started))

    @staticmethod
    def _ending_hopeless(environment: Any, functions: list[Any], args: MultiTurnGRPOConfig) -> Any:
        hopeless = next((one.hopeless for one in functions if hasattr(one, "hopeless")), None)
        if hopeless is None or environment is None:
            raise ValueError(
                "hopeless_share would be ignored: it takes an environment, and a reward function with "
                "hopeless(turns, turns_left), as PromptR1Reward"
            )
        left = lambda rollout: args.max_turns - len(rollout.turns)  # noqa: E731
        return EndsHopeless(environment, lambda rollout: hopeless(rollout.turns, left(rollout)), args.hopeless_share)

    # --- for subclasses ------------------------------------------------------------------------------------------

    @staticmethod
    def _rewards(reward_funcs: Any, args: Any) -> Any:
        """The reward functions, where some are given."""
        return reward_funcs

    @staticmethod
    def _default_grammar(environment: Any) -> Grammar:
        """The environment's; without an environment there is nothing to ask, so a turn is the answer, as in TRL."""
        return FreeText() if environment is None else getattr(environment, "grammar", None) or TagGrammar()

    @staticmethod
    def _default_template(environment: Any, grammar: Grammar) -> str:
        """The agent's user message where none is given."""
        return template_for(environment, grammar)

    @staticmethod
    def _validate(dataset: Any) -> None:
        """Rows need a question to fill the template with, or a prompt of their own; the rest is up to the rewards."""
        own_prompt = "prompt" in (getattr(dataset, "column_names", None) or ())
        validate_dataset(dataset, columns=("prompt",) if own_prompt else ("question",))

    def roles(self, environment: Environment | None, functions: Sequence[Any]) -> dict[str, Any]:
        """Who may spend the job's budget, by the name it is booked under.

        A reward function takes part if it has a `charge_to(budget, account)`, as clients have: a language model that
        judges.
        """
        judges = [one for one in functions if hasattr(one, "charge_to")]
        named = {f"judge_{number + 1}" if len(judges) > 1 else "judge": one for number, one in enumerate(judges)}
        return {"environment": environment, **named}

    def prompt_messages(self, row: Mapping[str, Any], index: int) -> str | list[dict[str, Any]]:
        """The prompt that a row begins with: messages, or text where the data set has text.

        Args:
            row (`Mapping`): The dataset's row.
            index (`int`): Its place in the global batch, all processes together.
        """
        return self.prompt_under(row, self.metadata(index))

    def prompt_under(self, row: Mapping[str, Any], notes: Mapping[str, Any]) -> str | list[dict[str, Any]]:
        """The same for a rollout with these `metadata`, whenever they were taken.

        Raises:
            `LookupError`: They speak of what is not there.
        """
        return self.chat_format.prompt(self.spec.messages(row))

    def metadata(self, index: int) -> dict[str, Any]:
        """What else the record of the rollout at this place of the global batch should say."""
        return {}

    def saved_spec(self) -> AgentSpec:
        """How an agent that is loaded later is asked."""
        return self.spec

    # --- row -> prompt -> rollouts -------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        self._reach_server()
        try:
            if self.carry_over is None:
                return self._with_fresh(inputs)
            self._push_weights()
            if not self.model.training:
                return self._with_fresh(inputs)
            return self._with_carried(self.carry_over, len(inputs) // self.rollouts_per_row())
        except PolicyUnreachable as error:  # of pushing the weights; on every process
            stop(self, str(error))

    def _with_fresh(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """A batch of rollouts that begin and end in this step."""
        first = self.accelerator.process_index * len(inputs)
        self._note_paid()
        saver = self._saver if self.model.training else None
        chosen = inputs if saver is None else saver.choose(inputs, first, self._batch())
        self._notes = [self.metadata(first + i) for i in range(len(inputs))]
        self._rows = self._begun({first + i: row for i, row in enumerate(chosen)})
        scored = super()._generate_and_score_completions(self._rows)
        if self._counts is not None:
            own = slice(first, first + len(inputs))
            scored["advantages"] = counted(scored["advantages"], *(one[own] for one in self._counts))
        return scored

    def _note_paid(self) -> None:
        """Calls are saved by chance: where most replies are shared, further ones are nearly free, and what was left out
        for them would cost more steps than it saves calls."""
        if self._saver is not None:
            self._saver.paid = self._paid
        if isinstance(self.environment, EndsHopeless):
            self.environment.share = min(1.0, self.args.hopeless_share / self._paid)

    def _with_carried(self, carry_over: CarryOver, wanted: int) -> dict[str, Any]:
        """A batch of so many whole groups of this process that are done, whenever they were started."""
        groups = carry_over.take(wanted)
        self._taken = [rollout for group in groups for rollout in group.rollouts]
        self._notes = [note for group in groups for note in group.notes]
        self._rows = [dict(rollout.row) for rollout in self._taken]
        try:
            with self._corrected():
                batch = super()._generate_and_score_completions(self._rows)
        finally:
            self._taken = None
        clipped, tokens = self.accelerator.reduce(count_clipped(batch, self.args)).tolist()
        self._metrics["train"]["async/clipped"].append(clipped / max(tokens, 1.0))
        return batch

    def _push_weights(self) -> None:
        """To a server where turns are under way; TRL does so by itself where none are."""
        updates = self.state.global_step
        if self.use_vllm and updates != self._last_loaded_step:
            with self.backend.changing(updates, self.accelerator.wait_for_everyone):
                self.vllm_generation.sync_weights()
        self._last_loaded_step = updates

    def _reach_server(self) -> None:
        """Before TRL pushes the weights: that gives up after a minute, on the first process alone."""
        if self.backend.reach is None:
            return
        unreachable = None
        if self.accelerator.is_main_process:
            try:
                self.backend.reach()
            except PolicyUnreachable as error:
                unreachable = str(error)
        stop_if(self, unreachable)

    def run_sampling(self, work: Callable[[Callable[[], None]], Any]) -> None:
        """Do work that asks the policy, on every process; it gets a function to listen for the others with."""
        unreachable = None
        with rank_barrier(f"the rollouts of step {self.state.global_step}") as listen, self.backend.session():
            try:
                work(listen)
            except PolicyUnreachable as error:  # every process has the same server, and stops with the others
                unreachable = str(error)
        if self.use_vllm:
            stop_if(self, unreachable)

    def _play(self, prompts: list[Any]) -> dict[str, Any]:
        """TRL's `rollout_func`: one rollout per prompt; prompts come already repeated `num_generations` times."""
        rollouts = (
            self._taken if self._taken is not None else self._fresh(self.accelerator.process_index * len(prompts))
        )
        handed_over = to_trl_batch(rollouts, self.eos_token_ids, with_logprobs=self.use_vllm)
        self._scored = padded_mask(handed_over["env_mask"], self.pad_to_multiple_of)
        return handed_over

    def _fresh(self, first: int) -> list[Rollout]:
        """This step's rollouts, played to their end; `first` is the place of this process's first."""
        rollouts = [self._rollout(first + i, row) for i, row in enumerate(self._rows)]
        if self._saver is None or not self.model.training:
            self._play_all(rollouts)
            return rollouts

        def begin(i: int, row: Mapping[str, Any]) -> Rollout:
            self._rows[i].clear()  # in place: TRL hands these rows to the rewards
            self._rows[i].update(*self._begun({first + i: row}))
            return self._rollout(first + i, self._rows[i])

        self._saver.play(rollouts, first, self._batch(), self._play_all, self._earned, begin, gather_object)
        return rollouts

    def _begun(self, rows: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows, by their place in the global batch, with their prompts, and begun by an environment that begins."""
        return self.begun([{**row, "prompt": self.prompt_messages(row, index)} for index, row in rows.items()])

    def begun(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows with their prompts, begun by an environment that begins."""
        reset = getattr(self.environment, "reset", None)
        return run(gather(map(reset, rows))) if reset else rows

    def _rollout(self, index: int, row: Mapping[str, Any]) -> Rollout:
        """The rollout at this place of the global batch, to be played."""
        ids = self.chat_format.prompt_ids(row["prompt"])
        batch, group = self._batch(), index // self.num_generations
        return Rollout(ids, row=dict(row), seed=self._seed(index), batch=batch, group=group)

    def _play_all(self, rollouts: list[Rollout]) -> None:
        with progress(len(rollouts), "rollouts", shown=not self.args.disable_tqdm) as bar:
            self.run_sampling(
                lambda listen: play_all(
                    rollouts,
                    self.policy,
                    self.environment,
                    self.chat_format,
                    self.limits,
                    on_done=lambda rollout: bar.update(),
                    listen=listen,
                    full_determinism=self.args.full_determinism,
                )
            )

    def _free_rewards(self) -> list[tuple[Any, float]]:
        """The reward functions that cost nothing to ask, each with its weight."""
        both = zip(self.reward_funcs, self.reward_weights.tolist(), strict=True)
        paid = (torch.nn.Module,)
        return [
            (one, weight)
            for one, weight in both
            if not (isinstance(one, paid) or hasattr(one, "charge_to") or inspect.iscoroutinefunction(one))
        ]

    def _earned(self, rollouts: list[Rollout]) -> list[float | None]:
        """What rollouts have earned, as far as it can be asked at no cost; `None` for failed ones."""
        if not rollouts:
            return []
        columns = reward_columns(rollouts, self.chat_format)
        given = [(function(**columns), weight) for function, weight in self._free_rewards()]
        totals = [sum(weight * (rewards[i] or 0.0) for rewards, weight in given) for i in range(len(rollouts))]
        return [None if one.status == "failed" else total for one, total in zip(rollouts, totals, strict=True)]

    def _batch(self) -> str:
        """Which training batch is being played, of this run's seed; evaluation has none."""
        within = self._step % self.args.gradient_accumulation_steps
        return f"{self.args.seed}.{self.state.global_step}.{within}" if self.model.training else ""

    def _seed(self, index: int) -> int:
        """The seed of the rollout at this position of the global batch: a function of where training stands, so that
        there is no random state to save. Evaluation always draws the same."""
        if not self.model.training:
            return rollout_seed(self.args.seed, "eval", self._eval_batches, index)
        within = self._step % self.args.gradient_accumulation_steps
        return rollout_seed(self.args.seed, "train", self.state.global_step, within, index)

    # --- rollouts -> loss ----------------------------------------------------------------------------------------

    def _compute_loss(self, model, inputs):
        self._scored = inputs["tool_mask"]
        with self._corrected() if "importance_sampling_ratio" in inputs else nullcontext():
            return super()._compute_loss(model, scored_only(inputs))

    @contextmanager
    def _corrected(self) -> Iterator[None]:
        """TRL's importance ratio, which it applies to what vLLM has sampled, for any policy with log-probabilities."""
        before, self.use_vllm = self.use_vllm, True
        try:
            yield
        finally:
            self.use_vllm = before

    def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
        scored = self._scored
        return super()._get_per_token_logps_and_entropies(
            model if scored is None else ScoredTokens(model, scored), *args, **kwargs
        )

    # --- rollouts -> logs ----------------------------------------------------------------------------------------

    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        rollouts = [row["rollout"] for row in inputs]
        completions = completions_of(rollouts, completions, self.chat_format)
        with quiet_about_missing_rewards(any(one.status == "failed" or not one.weight for one in rollouts)):
            rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        mode = "train" if self.model.training else "eval"
        facts = gather_object([RolloutFacts.of(rollout) for rollout in rollouts])
        if mode == "train" and self.state.global_step == 0 and self.accelerator.is_main_process:
            self._failures.warn_of_form(facts, self.limits)
        # Without a reward: the environment's failures, and what was not played to its end to save calls.
        failed = torch.tensor([fact.status == "failed" or not fact.weight for fact in facts], device=rewards.device)
        # A failed rollout has no reward, whatever a reward function or model made of it: NaN is TRL's word for that.
        rewards[failed] = torch.nan
        self._counts = self._counted(facts, rewards) if mode == "train" else None
        everything = [*facts, *self._discarded_facts(mode)]
        for name, value in rollout_metrics(everything).items():
            self._metrics[mode][name].append(value)
        self._record(mode, rollouts, rewards)
        if mode == "train":
            self.some_failed, self._paid = bool(failed.any()), paid_share(everything)
        else:
            self._eval_batches += 1
        played = [fact for fact in facts if fact.status != "left_out"]
        why = self._failures.why_stop(played, speaks=self.accelerator.is_main_process)
        unscored = rewards.isnan().all(1) & ~failed
        if why:
            stop(self, why)
        if unscored.any():  # a judge gave no score; the same on every process
            stop_if(self, self._out_of_budget())
        return rewards

    def _counted(self, facts: Sequence[RolloutFacts], rewards: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """What each group counts, and which advantages are other than TRL's; `None` where every rollout counts 1."""
        weights = torch.tensor([fact.weight for fact in facts], device=rewards.device)
        n, by_group = self.num_generations, {} if self._saver is None else self._saver.group_weights
        groups = torch.tensor([by_group.get(i // n, 1.0) for i in range(len(facts))], device=rewards.device)
        if bool((weights == 1).all()) and bool((groups == 1).all()):
            return None
        scale = self.args.scale_rewards == "group"
        shaped = weights.view(-1, n)
        ours = honest_advantages(self.total_rewards(rewards).view(-1, n), shaped, scale).view(-1)
        return groups, ours, (shaped != 1).any(1).repeat_interleave(n)

    def _discarded_facts(self, mode: str) -> list[RolloutFacts]:
        """Of rollouts that gave their place to another question: paid for, and in no mean."""
        discarded = self._saver.discarded if self._saver is not None and mode == "train" else []
        self.rollout_log.write(
            rollout_record(one, run=self._started, step=self.state.global_step, mode="discarded", reward=None)
            for one in discarded
        )
        if self._saver is None:
            return []
        return gather_object([replace(RolloutFacts.of(one), status="left_out") for one in discarded])

    def _record(self, mode: str, rollouts: Sequence[Rollout], rewards: torch.Tensor) -> None:
        """Keep this process's rollouts and what they earned; `rewards` are those of all processes."""
        first = self.accelerator.process_index * len(rollouts)
        own = slice(first, first + len(rollouts))
        by_function, totals = rewards[own].tolist(), self.total_rewards(rewards)[own].tolist()
        self.live.note(mode, rollouts, by_function)
        self.rollout_log.write(
            rollout_record(
                rollout,
                run=self._started,
                step=self.state.global_step,
                mode=mode,
                reward=_or_none(total),
                rewards={name: _or_none(reward) for name, reward in zip(self.reward_func_names, scores, strict=True)},
                **notes,
            )
            for rollout, scores, total, notes in zip(rollouts, by_function, totals, self._notes, strict=True)
        )

    def total_rewards(self, rewards: torch.Tensor) -> torch.Tensor:
        """What is trained on: the sum over reward functions weighted by `reward_weights`, as TRL takes it; NaN where no
        function gave a reward."""
        totals = (rewards * self.reward_weights.to(rewards.device)).nansum(1)
        totals[rewards.isnan().all(1)] = torch.nan
        return totals

    def _out_of_budget(self) -> str:
        try:
            self.spending.stop_when_spent()
        except BudgetExceeded as error:
            return str(error)
        return ""

    # --- evaluation, resuming, saving and sharing ----------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As [`ResumableGRPOTrainer.train`]. With `lead` > 0 a resumed run goes on with the groups in flight, too,
        those that were written down in `output_dir/in_flight` after the checkpoint among them.

        Raises:
            `ValueError`: As there; or a process cannot hold whole groups, which `lead` > 0 needs.
        """
        if not self.args.lead:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        self.carry_over = CarryOver(self, resumes=bool(resume_from_checkpoint))
        try:
            with self.carry_over.flying():
                return super().train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.carry_over = None

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self._eval_batches = 0
        return super().evaluate(*args, **kwargs)

    def _keepers(self) -> dict[str, Any]:
        """Who has a state beside the weights, by its name in a checkpoint."""
        keepers = {
            "environment": self.environment if hasattr(self.environment, "state_dict") else None,
            "curriculum": self._saver.curriculum if self._saver else None,
            "growth": self._saver.growth if self._saver else None,
            "pushed": self.backend.sync,
            "carried": self.carry_over,
        }
        return {name: keeper for name, keeper in keepers.items() if keeper is not None}

    def resume_state(self) -> dict[str, Any]:
        states = {name: keeper.state_dict() for name, keeper in self._keepers().items()}
        return {"some_failed": self.some_failed, "paid": self._paid, **states}

    def load_resume_state(self, state: Mapping[str, Any]) -> None:
        self.some_failed, self._paid = state["some_failed"], state["paid"]
        for name, keeper in self._keepers().items():
            if state.get(name) is not None:
                keeper.load_state_dict(state[name])

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        super()._save(output_dir, state_dict)
        if self.args.should_save:  # under ZeRO-3 every process comes here
            self._save_beside(Path(output_dir or self.args.output_dir))

    def _save_beside(self, folder: Path) -> None:
        """What is written beside the weights, by one process."""
        self.saved_spec().save(folder)
        write_card(self, folder)

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
            write_card(self, Path(self.args.output_dir), model_name, dataset_name, tags)

    def push_to_hub(self, *args: Any, **kwargs: Any) -> Any:
        """As [`~trl.GRPOTrainer`]'s, of the model alone: no rollouts, no records of spending, no recorded replies, no
        checkpoints."""
        with only_the_model(Path(self.args.output_dir), self._tokenizer):
            return super().push_to_hub(*args, **kwargs)

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        with only_the_model(Path(self.args.output_dir), self._tokenizer):
            super()._push_from_checkpoint(checkpoint_folder)


def _or_none(reward: float) -> float | None:
    return None if reward != reward else round(reward, 6)  # NaN: not scored
