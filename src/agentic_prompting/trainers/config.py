"""Training arguments: TRL's `GRPOConfig` plus those of conversations, Prompt-R1 and E-SPL."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from trl import GRPOConfig

from ..evolution import ESPLSettings
from ..evolution.population import check_choice
from ..evolution.settings import setting
from ..rollout import Limits

logger = logging.getLogger(__name__)

Args = TypeVar("Args", bound=GRPOConfig)

MODES = ("joint", "rl", "evolution", "reflection", "alternating")


def copy_args(args: Args, **changes: Any) -> Args:
    """Return a copy of training arguments with other values, because they belong to the caller."""
    copied = copy(args)
    copied.hub_token = args.hub_token  # which a pickle must not have, see `__getstate__`
    for name, value in changes.items():
        setattr(copied, name, value)
    return copied


@dataclass
class MultiTurnGRPOConfig(GRPOConfig):
    """Arguments of [`MultiTurnGRPOTrainer`].

    All arguments of [`~trl.GRPOConfig`] apply, too; `max_completion_length` is the length of the
    whole response in tokens, observations included.

    Args:
        max_turns (`int`, *optional*, defaults to `5`): Turns of the agent, the answering one
            included.
        max_turn_tokens (`int`, *optional*, defaults to `1024`): Tokens of one turn.
        max_context (`int`, *optional*): Tokens of prompt and response together. The limit of the
            model or its server holds if it is lower.
        step_timeout (`float`, *optional*, defaults to `1800`): Seconds that the environment may
            take for one step or one reset; the rollout then counts as failed. A warning names a
            method that takes longer than half a minute. `None`: no limit. An [`Environment`] may
            have its own `step_timeout`; a large LLM behind an [`OpenAIChat`] has the time limits of
            that client instead.
        stop_at_tags (`bool`, *optional*, defaults to `True`): End a turn right after a closing
            request or answer tag, whatever the model would write next.
        max_failed_share (`float`, *optional*, defaults to `0.5`): If more than this share of the
            rollouts of the last `failure_window` batches failed (the environment's fault, not the
            agent's), some of the latest batch among them, training saves a checkpoint and stops
            with an error that names the cause.
        failure_window (`int`, *optional*, defaults to `3`): Batches that `max_failed_share` looks
            at.
        budget_usd (`float`, *optional*): US dollars that the job may spend on large LLMs, all
            roles, processes and restarts together; the sum is kept in `output_dir/spending.sqlite`.
            When it is reached, calls in flight end, training saves a checkpoint and stops. A role's
            own limit is its model's `budget_usd`.
        budget_tokens (`int`, *optional*): The same in tokens, for models whose price is not known.
        vllm_sync (`str`, *optional*, defaults to `"nccl"`): With `vllm_mode="server"`, the way in
            which weights reach the server. `nccl`: TRL's push, which needs vLLM and a GPU in the
            trainer's environment. `adapter`, for LoRA: an adapter with a name per version, which
            running servers load. `disk`: all weights, which the servers load again from
            `output_dir`. The last two need neither vLLM nor a GPU, only a disk that servers and
            trainer share, and support several servers: `vllm_server_base_url` with commas.
        prefix_cache_mb (`float`, *optional*, defaults to `1024.0`): Sampling in this process (no
            vLLM, no continuous batching): MB of keys and values to keep between the turns of a
            rollout, so that a turn reads only what is new. They are freed before the training step.
            147 KB a token for Qwen3-4B in bf16. 0 keeps none.
        async_lead (`float`, *optional*, defaults to `0.0`): Steps' worth of groups to play beyond
            the step's own, so that no step waits for its slowest conversation: each trains on the
            oldest groups that are done and starts as many new ones. A larger value hides longer
            replies and makes tokens older; 0 is on-policy training. Above 0 the loss is corrected
            by TRL's truncated importance ratio, with `vllm_importance_sampling_mode`
            (`token_truncate` unless another one is set) and `_clip_max`.
        max_staleness (`int`, *optional*): The most updates of the weights between a group's start
            and its use; a step waits for groups that later steps could not use in time. Defaults to
            the updates in twice `async_lead` steps.
        environment_ratio (`dict`, *optional*): With several environments, the share of each in the
            training rows: `{"oracle": 0.7, "shop": 0.3}`. Rows are repeated to reach it; none is
            left out. By default each row is used once an epoch.
        environment_limits (`dict`, *optional*): With several environments, their own values of
            `max_turns`, `max_turn_tokens`, `max_tokens` (the completion's) and `step_timeout`:
            `{"shop": {"max_turns": 3}}`.
        traces (`bool`, *optional*, defaults to `False`): Send OpenTelemetry spans of steps,
            rollouts, turns, tools and calls of large LLMs to the back end that its environment
            variables name; see [`start_traces`]. Needs the extra `otel`.
        trace_content (`bool`, *optional*, defaults to `False`): Whether prompts, replies and
            arguments are in the spans, too.
        check_environment (`bool`, *optional*, defaults to `True`): Ask the environment once before
            training starts, so that a wrong key or address is found at once.
        overwrite (`bool`, *optional*, defaults to `False`): If `output_dir` holds another run, move
            that to a folder beside it (`output_dir.previous`) and start at the beginning. Without
            it a second run in a folder is refused.
        rollouts_max_mb (`float`, *optional*, defaults to `1024`): Size of `output_dir/rollouts` per
            process, in MB; the oldest part is dropped above it. 0 keeps none.

    Raises:
        `ValueError`: If a limit is below 1, a share is outside [0, 1], or a value would be ignored.
    """

    max_turns: int = setting(5, "Turns of the agent, the answering one included.")
    max_turn_tokens: int = setting(1024, "Tokens of one turn.")
    max_context: int | None = setting(None, "Tokens of prompt and response together.")
    step_timeout: float | None = setting(
        1800.0, "Seconds for one step or reset of the environment."
    )
    stop_at_tags: bool = setting(True, "End a turn right after a closing request or answer tag.")
    max_failed_share: float = setting(
        0.5, "Stop when more than this share of recent rollouts failed."
    )
    failure_window: int = setting(3, "Batches that max_failed_share looks at.")
    budget_usd: float | None = setting(None, "What the job may spend on large LLMs, in US $.")
    budget_tokens: int | None = setting(None, "What the job may spend, in tokens.")
    vllm_sync: str = setting(
        "nccl", "How weights reach a vLLM server: nccl (TRL's), adapter (LoRA), or disk."
    )
    prefix_cache_mb: float = setting(1024.0, "Keys and values to keep between turns, in MB.")
    async_lead: float = setting(0.0, "Steps' worth of groups to play ahead; 0: on-policy.")
    max_staleness: int | None = setting(
        None, "Updates between a group's start and its use at most."
    )
    environment_ratio: dict[str, float] | str | None = setting(
        None, "Several environments: the share of rows of each."
    )
    environment_limits: dict[str, dict[str, float]] | str | None = setting(
        None, "Several environments: own limits."
    )
    traces: bool = setting(False, "Send OpenTelemetry spans.")
    trace_content: bool = setting(False, "Put texts into the spans, too.")
    check_environment: bool = setting(True, "Ask the environment once before training.")
    overwrite: bool = setting(
        False, "Move another run in output_dir to a folder beside it, and begin anew."
    )
    rollouts_max_mb: float = setting(1024.0, "Size limit of output_dir/rollouts in MB; 0: none.")

    def __post_init__(self):
        # Check the options before TRL looks at anything.
        self._check_own_options()
        self._check_vllm_sync()

        # TRL checks its own.
        self._fit_evaluation_to_groups()
        try:
            super().__post_init__()
        except ValueError as error:
            self._explain_group_size(error)
            raise
        self._check_sampling_options()

        # Check the options by environment, which TRL has parsed if they were JSON.
        self.limits()
        for name in ("environment_ratio", "environment_limits"):
            value = getattr(self, name)
            if isinstance(value, str):
                raise ValueError(f"{name} must be a dict by environment, got {value!r}")
        if self.async_lead:
            self._check_lead()

    def _check_own_options(self) -> None:
        """Raise for a value that no run can have, and for one that would be ignored."""
        self.limits()  # raises for a limit below 1
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(
                f"max_failed_share must be between 0 and 1, got {self.max_failed_share}"
            )
        if self.failure_window < 1:
            raise ValueError(f"failure_window must be at least 1, got {self.failure_window}")
        for name in ("budget_usd", "budget_tokens"):
            budget = getattr(self, name)
            if budget is not None and not budget > 0:  # also for NaN
                raise ValueError(f"{name} must be above 0, got {budget}")
        if self.trace_content and not self.traces:
            raise ValueError("trace_content would be ignored: set traces=True as well")
        if self.max_tool_calling_iterations is not None:
            raise ValueError(
                f"max_tool_calling_iterations={self.max_tool_calling_iterations} belongs to TRL's "
                "own loop, which this trainer replaces: set max_turns"
            )

    def _fit_evaluation_to_groups(self) -> None:
        """Let the batch of evaluations take whole groups, unless its size was set."""
        defaults = {field.name: field.default for field in fields(self)}
        batch_size: int = vars(self)["per_device_eval_batch_size"]
        if batch_size == defaults["per_device_eval_batch_size"]:
            group_size = self.num_generations_eval or self.num_generations
            self.per_device_eval_batch_size: int = math.ceil(batch_size / group_size) * group_size

    def _explain_group_size(self, error: ValueError) -> None:
        """Raise a better error if TRL's is about groups that do not divide the batch.

        TRL's message names only `generation_batch_size`, which few users set themselves.
        """
        if not self.generation_batch_size or not self.steps_per_generation:
            return
        group_size = self.num_generations
        if group_size < 2 or self.generation_batch_size % group_size == 0:
            return
        raise ValueError(
            f"the num_generations={group_size} rollouts of a question do not divide "
            f"{self._name_batch_sizes(group_size)}"
        ) from error

    def _name_batch_sizes(self, rollouts_per_problem: int) -> str:
        """Return the size of the generation batch, the nearest ones that work, and its factors."""
        size = self.generation_batch_size
        lower = size // rollouts_per_problem * rollouts_per_problem
        sizes = [str(near) for near in (lower, lower + rollouts_per_problem) if near]
        return (
            f"the generation batch of {size}: make that {' or '.join(sizes)} "
            f"({self._name_batch_factors()})"
        )

    def _name_batch_factors(self) -> str:
        """Return the settings whose product is the size of the generation batch."""
        return (
            "per_device_train_batch_size x processes x steps_per_generation = "
            f"{self.per_device_train_batch_size} x {self.world_size} x {self.steps_per_generation}"
        )

    def _check_vllm_sync(self) -> None:
        if self.vllm_sync not in ("nccl", "adapter", "disk"):
            raise ValueError(f"vllm_sync must be nccl, adapter or disk, got {self.vllm_sync!r}")
        # Only servers can get their weights in other ways than through NCCL.
        has_server = self.use_vllm and self.vllm_mode == "server"
        if self.vllm_sync != "nccl" and not has_server:
            raise ValueError(
                "vllm_sync would be ignored: set use_vllm=True and vllm_mode='server' as well"
            )
        # TRL's own push knows a single server.
        if self.vllm_sync == "nccl" and "," in (self.vllm_server_base_url or ""):
            raise ValueError(
                "several addresses in vllm_server_base_url need vllm_sync='adapter' or 'disk'"
            )

        # Without a server its address would be ignored: in `colocate`, TRL's default, too.
        if self.vllm_server_base_url and not has_server:
            raise ValueError(
                "vllm_server_base_url would be ignored: set use_vllm=True and vllm_mode='server' "
                "as well"
            )

    def _check_sampling_options(self) -> None:
        """Refuse sampling options of TRL's that no turn would be sampled with."""
        # Turns that transformers samples in this process have the options of `Sampling` alone.
        uses_own_engine = not self.use_vllm and not self.use_transformers_continuous_batching
        if self.generation_kwargs and uses_own_engine:
            raise ValueError(
                f"generation_kwargs={self.generation_kwargs} would be ignored: without vLLM, turns "
                "are sampled with temperature, top_p, top_k, min_p and repetition_penalty alone. "
                "Leave it out, or set use_vllm=True"
            )
        if self.cache_implementation and uses_own_engine and self.process_index == 0:
            logger.warning(
                "cache_implementation=%r has no effect: turns are sampled with the cache of "
                "prefix_cache_mb",
                self.cache_implementation,
            )
        # Only a collective sampler calls TRL's own client of vLLM, which knows the expression.
        is_collective = self.vllm_tensor_parallel_size > 1 or self.vllm_enable_sleep_mode
        calls_trl = self.use_vllm and self.vllm_mode == "colocate" and is_collective
        if self.vllm_structured_outputs_regex is not None and not calls_trl:
            raise ValueError(
                "vllm_structured_outputs_regex would be ignored: leave it out; the form of turns "
                "follows from the trainer's grammar= and prompt"
            )

    def _check_lead(self) -> None:
        """Check the settings that `async_lead` depends on, and set those that follow from it."""
        if self.async_lead < 0:
            raise ValueError(f"async_lead must be at least 0, got {self.async_lead}")
        if not self.vllm_importance_sampling_correction:
            raise ValueError(
                "async_lead > 0 trains on samples of older weights, which needs a correction: set "
                "vllm_importance_sampling_correction=True"
            )
        for name in ("full_determinism", "use_transformers_continuous_batching"):
            if getattr(self, name):
                raise ValueError(
                    f"async_lead > 0 is incompatible with {name}=True: set async_lead=0 or unset "
                    f"{name}"
                )
        # Turns in flight would have to be removed from a colocated engine at each update.
        if self.use_vllm and self.vllm_mode != "server":
            raise ValueError(
                f"async_lead > 0 is incompatible with vllm_mode={self.vllm_mode!r}: set "
                "vllm_mode='server'"
            )

        # TRL's default drops stale sequences.
        if self.vllm_importance_sampling_mode == "sequence_mask":
            self.vllm_importance_sampling_mode: str = "token_truncate"

        # With a full lead, groups are this many updates old when they are used. Slow ones may take
        # twice as long.
        updates = self.async_lead * self.steps_per_batch
        if self.max_staleness is None:
            self.max_staleness = math.ceil(2 * updates)
        if self.max_staleness < updates:
            raise ValueError(
                f"max_staleness={self.max_staleness} is too low, because async_lead makes groups "
                f"{updates:g} updates old: set it to at least {math.ceil(updates)}"
            )

    @property
    def steps_per_batch(self) -> int:
        """Training steps that learn from one generated batch; 1 if a step takes several batches."""
        micro_batches = self.steps_per_generation * self.num_iterations
        return max(1, micro_batches // self.gradient_accumulation_steps)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the Hub's token.

        `training_args.bin` in every saved folder is a pickle of this object.
        """
        return {**vars(self), "hub_token": None}

    def limits(self, max_context: int | None = None) -> Limits:
        """Return the limits of rollouts.

        Args:
            max_context (`int`, *optional*): The number of tokens that the model can read; the lower
                of this and `max_context` of the settings holds.
        """
        # `None` means no limit; the limits of environments are a text until TRL has parsed it.
        max_tokens = self.max_completion_length
        if max_tokens is None:
            max_tokens = 2**31
        environment_limits: Mapping[str, Mapping[str, float]] = {}
        if isinstance(self.environment_limits, Mapping):
            environment_limits = self.environment_limits
        limits = Limits(
            max_turns=self.max_turns,
            max_turn_tokens=self.max_turn_tokens,
            max_tokens=max_tokens,
            max_context=self.max_context,
            environments=environment_limits,
            step_timeout=self.step_timeout,
        )
        # The settings' limit on the context, or the model's if that is lower.
        context_limits = [limit for limit in (self.max_context, max_context) if limit]
        return replace(limits, max_context=min(context_limits, default=None))


# Options that a command line passes as JSON, which transformers parses. Not a dataclass field.
MultiTurnGRPOConfig._VALID_DICT_FIELDS = [
    *GRPOConfig._VALID_DICT_FIELDS,
    "environment_ratio",
    "environment_limits",
]


@dataclass
class PromptR1Config(MultiTurnGRPOConfig):
    """Arguments of [`PromptR1Trainer`], with the paper's values as defaults.

    They are in its Table 6, Appendix G and eq 14-15. Only the batch sizes differ, because the
    paper's need eight GPUs; `examples/configs/qwen3_4b.yaml` has those.

    Args:
        gate (`str`, *optional*, defaults to `"paper"`): How the format reward is capped: `"paper"`
            (eq 10) or `"strict"`; see [`PromptR1Reward`].
    """

    gate: str = setting("paper", "Format reward: 'paper' (eq 10) or 'strict'.")
    learning_rate: float = setting(1e-6, "Table 6.")
    beta: float = setting(0.001, "KL coefficient (eq 15; value from the released script).")
    use_bias_correction_kl: bool = setting(False, "eq 15 has the KL term without a ratio.")
    epsilon: float = setting(0.2, "Clip range (eq 15).")
    loss_type: str = setting("grpo", "Mean over a trajectory's own tokens (eq 15).")
    scale_rewards: str = setting("group", "Advantages standardised in the group (eq 14).")
    num_generations: int = setting(5, "Rollouts per question (Table 6).")
    num_train_epochs: float = setting(1.0, "Table 6.")
    max_completion_length: int | None = setting(8192, "Whole response, tokens (Table 6).")
    max_context: int | None = setting(8192, "Prompt and response, tokens (Table 6).")
    # The groups of two questions: divisible by num_generations on any number of processes, and
    # small enough to begin with.
    per_device_train_batch_size: int = setting(10, "Rollouts per device and backward pass.")
    per_device_eval_batch_size: int = setting(10, "Rollouts per device in evaluation.")


@dataclass
class ESPLConfig(ESPLSettings, MultiTurnGRPOConfig):
    """Arguments of [`ESPLTrainer`].

    The settings of [`ESPLSettings`] and those of [`MultiTurnGRPOConfig`] apply, too, with the
    paper's values (Appendix A) as defaults.

    Args:
        mode (`str`, *optional*, defaults to `"joint"`): `joint`: prompts evolve and weights learn.
            `rl`: weights only, under the initial prompt. `evolution`: prompts only. `reflection`:
            prompts only, a population of one, no crossover. `alternating`: phases in turn, `rl`
            under the best prompt and then `evolution`.
        phase_steps (`int`, *optional*, defaults to `10`): Training steps of a phase of
            `alternating`.
        distill_epochs (`float`, *optional*, defaults to `0`): With more than 0, training ends with
            [`ESPLTrainer.distill`] for so many epochs, and the agent is used without the evolved
            prompt.
        baseline (`str`, *optional*, defaults to `"normal"`): Subtracted from a rollout's reward:
            `normal`, the mean over the N rollouts of the same problem under the same prompt (eq
            1-2); `marginalize`, the mean over all M·N rollouts of the problem.
        reflector (`str`, *optional*, defaults to `"reference"`): The reflecting model: `reference`,
            the fixed LLM passed to the trainer (better, by Figure 15); or `policy`, the model being
            trained, in turns of `max_turn_tokens`, when its children are due, so that training
            waits for it.
        evolution_lag (`int`, *optional*, defaults to `1`): A child joins this many batches later
            than in Algorithm 1, so that the reference LLM works while the weights are updated. 0 is
            the exact algorithm: each batch waits for the children of the last one.
        reflection_timeout (`float`, *optional*, defaults to `1800`): Seconds that the reference LLM
            may take for one batch, all its stages together. A reply that is late counts as a failed
            call: the batch has no child, which is logged, and training goes on. A model's own
            timeouts end a call earlier; this is for models that have none.

    Raises:
        `ValueError`: If a value is out of range, or M·N does not divide the generation batch; the
            message names a size that works.
    """

    mode: str = setting("joint", f"One of {', '.join(MODES)}.")
    phase_steps: int = setting(10, "Steps of a phase of mode alternating.")
    distill_epochs: float = setting(
        0.0, "In the end, distil the best prompt into the weights: epochs."
    )
    baseline: str = setting("normal", "normal (eq 1-2) or marginalize.")
    reflector: str = setting("reference", "Who reflects: reference, or policy.")
    evolution_lag: int = setting(1, "Batches that a child joins later; 0: exact algorithm.")
    reflection_timeout: float = setting(
        1800.0, "Seconds that the reference LLM may take for one batch."
    )

    learning_rate: float = setting(4e-5, "Appendix A, with LoRA of rank 32.")
    lr_scheduler_type: str = setting("constant", "Algorithm 1's step size does not change.")
    adam_beta2: float = setting(0.95, "Appendix A.")
    beta: float = setting(0.0, "No KL term with LoRA.")
    scale_rewards: str = setting("none", "eq 1-2 do not divide by a deviation.")
    # The sum over a rollout's tokens, as Algorithm 1's log-likelihood, up to a constant factor: the
    # length limit.
    loss_type: str = setting("dr_grpo", "Sum over tokens, divided by a constant.")
    per_device_train_batch_size: int = setting(15, "One problem: M·N rollouts.")
    gradient_accumulation_steps: int = setting(10, "b = 10 problems a batch.")

    def __post_init__(self):
        # Check the options before TRL looks at anything.
        check_choice("mode", self.mode, MODES)
        check_choice("baseline", self.baseline, ("normal", "marginalize"))
        check_choice("reflector", self.reflector, ("reference", "policy"))
        if self.evolution_lag < 0:
            raise ValueError(f"evolution_lag must be at least 0, got {self.evolution_lag}")
        if self.distill_epochs < 0:
            raise ValueError(f"distill_epochs must be at least 0, got {self.distill_epochs}")
        if self.phase_steps != ESPLConfig.phase_steps and self.mode != "alternating":
            raise ValueError(
                f"phase_steps={self.phase_steps} would be ignored: set mode='alternating' as well"
            )
        if not self.reflection_timeout > 0:
            raise ValueError(
                f"reflection_timeout must be above 0 seconds, got {self.reflection_timeout}"
            )
        # The settings of the evolution, then those of the trainer, which TRL completes.
        ESPLSettings.__post_init__(self)
        MultiTurnGRPOConfig.__post_init__(self)

        # Check the sizes of phases and batches, some of which TRL has set.
        if self.mode == "alternating":
            is_whole = self.phase_steps >= 1 and self.phase_steps % self.steps_per_batch == 0
            if self.async_lead or not is_whole:
                raise ValueError(
                    "mode='alternating' needs async_lead=0, and phases of whole batches: "
                    f"phase_steps={self.phase_steps} must be a multiple of {self.steps_per_batch}"
                )
        # A batch must have whole problems: name the nearest sizes that do.
        rollouts_per_problem = self.prompts_per_step * self.num_generations
        if self.generation_batch_size % rollouts_per_problem:
            raise ValueError(
                "each problem takes prompts_per_step x num_generations = "
                f"{self.prompts_per_step} x {self.num_generations} = {rollouts_per_problem} "
                f"rollouts, which does not divide {self._name_batch_sizes(rollouts_per_problem)}"
            )

    def describe_batch(self) -> str:
        """Return the number of rollouts of a batch, and the settings that it follows from."""
        rollouts_per_problem = self.prompts_per_step * self.num_generations
        return (
            f"a batch is {self.generation_batch_size // rollouts_per_problem} problems x "
            f"{self.prompts_per_step} prompts (prompts_per_step) x {self.num_generations} rollouts "
            f"(num_generations) = {self.generation_batch_size} rollouts "
            f"({self._name_batch_factors()})"
        )

    @property
    def evolves(self) -> bool:
        """Whether prompts have children."""
        return self.mode != "rl"

    def mode_at(self, step: int) -> str:
        """Return the mode of a training step, counted from 0: the run's, or that of the phase."""
        if self.mode != "alternating":
            return self.mode
        # Phases alternate, and the first one trains weights.
        phase = step // self.phase_steps
        return "rl" if phase % 2 == 0 else "evolution"
