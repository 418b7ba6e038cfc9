"""Training arguments: TRL's `GRPOConfig` plus what a conversation needs; and what is checked of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from datasets import Dataset
from trl import GRPOConfig

from ..rollout import Limits


@dataclass
class MultiTurnGRPOConfig(GRPOConfig):
    """Arguments of [`MultiTurnGRPOTrainer`]. Everything of [`~trl.GRPOConfig`] applies; `max_completion_length` is the
    length of the whole response in tokens, observations included.

    Args:
        max_turns (`int`, *optional*, defaults to `5`):
            Turns of the agent, the answering one included.
        max_turn_tokens (`int`, *optional*, defaults to `1024`):
            Tokens of one turn.
        stop_at_tags (`bool`, *optional*, defaults to `True`):
            End a turn right after a closing request or answer tag, whatever the model would write next.
        max_failed_share (`float`, *optional*, defaults to `0.5`):
            If more than this share of the rollouts of the last `failure_window` batches failed (the environment's
            fault, not the agent's), training saves a checkpoint and stops with an error that names the cause.
        failure_window (`int`, *optional*, defaults to `3`):
            Batches that `max_failed_share` looks at.
        budget_usd (`float`, *optional*):
            US dollars that the job may spend on large LLMs, all roles, processes and restarts together; what was spent
            is kept in `output_dir/spending.sqlite`. When it is reached, calls on their way end, training saves a
            checkpoint and stops. A role's own limit is its model's `budget_usd`.
        budget_tokens (`int`, *optional*):
            The same in tokens, for models whose price is not known.
        vllm_server_calls (`str`, *optional*, defaults to `"direct"`):
            With `vllm_mode="server"`, how rollouts reach the server: `direct`, each process by itself and as soon as a
            rollout is ready; `collective`, by TRL's own path, all processes in step through the first one.
        vllm_sync (`str`, *optional*, defaults to `"nccl"`):
            With `vllm_mode="server"`, how the weights get there. `nccl`: TRL's push, which needs vLLM and a GPU in the
            trainer's environment. `adapter`, for LoRA: as an adapter with a name per version, which running servers
            load. `disk`: all weights, which the servers load again from `output_dir`. The last two need neither, only a
            disk that servers and trainer share, and take several servers: `vllm_server_base_url` with commas.
        prefix_cache_mb (`float`, *optional*, defaults to `1024.0`):
            Sampling in this process (no vLLM, no continuous batching): MB of keys and values to keep between the turns
            of a rollout, so that a turn reads only what is new. They are freed before the training step.
            147 KB a token for Qwen3-4B in bf16. 0 keeps none.
        check_environment (`bool`, *optional*, defaults to `True`):
            Ask the environment once before training starts, so that a wrong key or address is found at once.
        rollouts_max_mb (`float`, *optional*, defaults to `1024`):
            Size of `output_dir/rollouts` per process, in MB; the oldest part is dropped above it. 0 keeps none.

    Raises:
        `ValueError`: If a limit is below 1, a share is outside [0, 1], or a value would be ignored.
    """

    max_turns: int = field(default=5, metadata={"help": "Turns of the agent, the answering one included."})
    max_turn_tokens: int = field(default=1024, metadata={"help": "Tokens of one turn."})
    stop_at_tags: bool = field(
        default=True, metadata={"help": "End a turn right after a closing request or answer tag."}
    )
    max_failed_share: float = field(
        default=0.5, metadata={"help": "Stop when more than this share of recent rollouts failed."}
    )
    failure_window: int = field(default=3, metadata={"help": "Batches that max_failed_share looks at."})
    budget_usd: float | None = field(default=None, metadata={"help": "What the job may spend on large LLMs, in US $."})
    budget_tokens: int | None = field(default=None, metadata={"help": "What the job may spend, in tokens."})
    vllm_server_calls: str = field(
        default="direct", metadata={"help": "How rollouts reach a vLLM server: direct or collective (TRL's own path)."}
    )
    vllm_sync: str = field(
        default="nccl", metadata={"help": "How weights reach a vLLM server: nccl (TRL's), adapter (LoRA), or disk."}
    )
    prefix_cache_mb: float = field(default=1024.0, metadata={"help": "Keys and values to keep between turns, in MB."})
    check_environment: bool = field(default=True, metadata={"help": "Ask the environment once before training."})
    rollouts_max_mb: float = field(
        default=1024.0, metadata={"help": "Size limit of output_dir/rollouts in MB; 0: none."}
    )

    def __post_init__(self):
        self.limits()  # raises for a limit below 1, before TRL looks at anything
        if not 0 <= self.max_failed_share <= 1:
            raise ValueError(f"max_failed_share must be between 0 and 1, got {self.max_failed_share}")
        if self.failure_window < 1:
            raise ValueError(f"failure_window must be at least 1, got {self.failure_window}")
        if self.vllm_server_calls not in ("direct", "collective"):
            raise ValueError(f"vllm_server_calls must be direct or collective, got {self.vllm_server_calls!r}")
        if self.vllm_server_calls != "direct" and not (self.use_vllm and self.vllm_mode == "server"):
            raise ValueError("vllm_server_calls would be ignored: set use_vllm=True and vllm_mode='server' as well")
        if self.vllm_sync not in ("nccl", "adapter", "disk"):
            raise ValueError(f"vllm_sync must be nccl, adapter or disk, got {self.vllm_sync!r}")
        if self.vllm_sync != "nccl" and self.vllm_server_calls != "direct":
            raise ValueError(f"vllm_sync={self.vllm_sync!r} works with vllm_server_calls='direct' only")
        if self.vllm_sync != "nccl" and not (self.use_vllm and self.vllm_mode == "server"):
            raise ValueError("vllm_sync would be ignored: set use_vllm=True and vllm_mode='server' as well")
        if self.vllm_sync == "nccl" and "," in (self.vllm_server_base_url or ""):
            raise ValueError("several addresses in vllm_server_base_url need vllm_sync='adapter' or 'disk'")
        for name in ("budget_usd", "budget_tokens"):
            if getattr(self, name) is not None and getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        super().__post_init__()

    def __getstate__(self) -> dict[str, Any]:
        """Without the hub's token: `training_args.bin` in every saved folder is a pickle of this."""
        return {**vars(self), "hub_token": None}

    def limits(self, max_context: int | None = None) -> Limits:
        """The rollout limits these arguments describe; `max_context` is the model's own, in tokens."""
        whole = 2**31 if self.max_completion_length is None else self.max_completion_length
        return Limits(self.max_turns, self.max_turn_tokens, whole, max_context)


@dataclass
class PromptR1Config(MultiTurnGRPOConfig):
    """Arguments of [`PromptR1Trainer`], with the paper's values (Table 6, Appendix G, eq 14-15) as defaults.

    The batch sizes are not the paper's, which needs eight GPUs: `examples/configs/qwen3_4b.yaml` has those.

    Args:
        gate (`str`, *optional*, defaults to `"paper"`):
            How the format reward is capped: `"paper"` (eq 10) or `"strict"`; see [`prompt_r1_score`].
    """

    gate: str = field(default="paper", metadata={"help": "Format reward: 'paper' (eq 10) or 'strict'."})
    learning_rate: float = field(default=1e-6, metadata={"help": "Table 6."})
    beta: float = field(default=0.001, metadata={"help": "KL coefficient (eq 15; value from the released script)."})
    use_bias_correction_kl: bool = field(default=False, metadata={"help": "eq 15 has the KL term without a ratio."})
    epsilon: float = field(default=0.2, metadata={"help": "Clip range (eq 15)."})
    loss_type: str = field(default="grpo", metadata={"help": "Mean over a trajectory's own tokens (eq 15)."})
    scale_rewards: str = field(default="group", metadata={"help": "Advantages standardised in the group (eq 14)."})
    num_generations: int = field(default=5, metadata={"help": "Rollouts per question (Table 6)."})
    num_train_epochs: float = field(default=1.0, metadata={"help": "Table 6."})
    max_completion_length: int | None = field(default=8192, metadata={"help": "Whole response, tokens (Table 6)."})
    # Two questions' groups: divisible by num_generations on any number of processes, and small enough to begin with.
    per_device_train_batch_size: int = field(default=10, metadata={"help": "Rollouts per device and backward pass."})
    per_device_eval_batch_size: int = field(default=10, metadata={"help": "Rollouts per device in evaluation."})


# --- what is checked of a trainer's arguments before anything is loaded -----------------------------------------------


def check_config(args: Any, kind: type[MultiTurnGRPOConfig]) -> None:
    """Raises `TypeError` for arguments of another kind, TRL's own among them."""
    if not isinstance(args, kind):
        raise TypeError(
            f"args is a {type(args).__name__}, and this trainer takes a {kind.__name__}: it has the same fields as "
            "GRPOConfig, and those of its method"
        )


def reject_other_loops(kwargs: Mapping[str, Any]) -> None:
    """Raises `ValueError` for TRL arguments that bring a generation loop of their own."""
    for name in ("tools", "rollout_func", "environment_factory"):
        if kwargs.get(name):
            raise ValueError(
                f"{name}= belongs to TRL's own loop, which this trainer replaces: pass an environment= with "
                "step(rollout) instead, or use trl.GRPOTrainer"
            )


def reject_unused_template(template: str | None, datasets: Iterable[Any]) -> None:
    """Raises `ValueError` for a template that nothing would be filled into, as the rows bring their own `prompt`."""
    if template is not None and any("prompt" in (getattr(rows, "column_names", None) or ()) for rows in datasets):
        raise ValueError(
            "prompt_template would be ignored, as the dataset has a column `prompt`, which is used as it is: leave one "
            "of them out"
        )


def datasets_of(dataset: Dataset | Mapping[str, Dataset] | None) -> list[Dataset]:
    """The data sets in an `eval_dataset` argument."""
    if dataset is None:
        return []
    return list(dataset.values()) if isinstance(dataset, Mapping) else [dataset]


def check_rows(dataset: Any, args: GRPOConfig, rollouts_per_row: int) -> None:
    """Raises `ValueError` if a data set is too small for a single step, of which TRL would make a run of no steps."""
    needed = args.generation_batch_size // rollouts_per_row
    if hasattr(dataset, "__len__") and len(dataset) < needed:
        raise ValueError(
            f"train_dataset has {len(dataset)} rows, and a batch of {args.generation_batch_size} rollouts takes "
            f"{needed} ({rollouts_per_row} of each row): nothing would be trained; add rows, or make the batch smaller "
            "(per_device_train_batch_size x processes x steps_per_generation)"
        )
