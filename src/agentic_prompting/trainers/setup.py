"""Checks and completes a run's settings before the model is loaded, and opens its budget.

`reward_functions.py`, `prepare_rows.py` and `resolve_spec.py` do the same for the trainer's other
arguments. What cannot work is refused there and here, before anything is paid for.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..llm import Budget, charge
from ..llm.guard import place_of, watching
from ..local import is_bf16_slow
from ..rollout import AgentSpec, Environment, Limits
from .config import MultiTurnGRPOConfig, copy_args
from .loss_inputs import PER_ROLLOUT_LOSS_TYPES

logger = logging.getLogger(__name__)


# --- settings ----------------------------------------------------------------------------------


def adapt_args(
    args: MultiTurnGRPOConfig, environment: Environment | None, environment_reward_count: int
) -> MultiTurnGRPOConfig:
    """Return the settings, adapted to the environment. The caller's own are not changed.

    Args:
        args ([`MultiTurnGRPOConfig`]): The caller's settings.
        environment ([`Environment`], *optional*): Answers the agent's requests.
        environment_reward_count (`int`): The number of reward functions that the environment
            brings, each of weight 1. They follow the caller's.
    """
    # Weights set by the caller are for the caller's reward functions: append one for each function
    # of the environment.
    if environment_reward_count and args.reward_weights is not None:
        environment_weights = [1.0] * environment_reward_count
        args = copy_args(args, reward_weights=[*args.reward_weights, *environment_weights])

    # TRL's default masks whole rows, but a program's rollout may have several.
    masks_sequences = args.vllm_importance_sampling_mode == "sequence_mask"
    is_program = environment is not None and environment.plays_whole_episodes
    if is_program and args.use_vllm and masks_sequences:
        args = copy_args(args, vllm_importance_sampling_mode="token_truncate")
    return args


def add_stop_texts(args: MultiTurnGRPOConfig, spec: AgentSpec) -> MultiTurnGRPOConfig:
    """Return the settings with which TRL's vLLM stops at the agent's closing tags."""
    if not (args.use_vllm and args.stop_at_tags):
        return args
    generation_kwargs = {
        "stop": list(spec.stop_texts),
        "include_stop_str_in_output": True,
        **(args.generation_kwargs or {}),
    }
    return copy_args(args, generation_kwargs=generation_kwargs)


def limits_for(
    args: MultiTurnGRPOConfig, environment: Environment | None, max_context: int | None = None
) -> Limits:
    """Return the limits of rollouts.

    Without an environment the only turn is the completion, and may be as long as that unless
    `max_turn_tokens` is set.

    Args:
        args ([`MultiTurnGRPOConfig`]): The settings.
        environment ([`Environment`], *optional*): Answers the agent's requests.
        max_context (`int`, *optional*): The number of tokens that the model can read.
    """
    limits = args.limits(max_context)
    # Only the default is raised: a value that was set holds for single turns, too.
    is_default = args.max_turn_tokens == MultiTurnGRPOConfig.max_turn_tokens
    if environment is None and is_default:
        limits = replace(limits, max_turn_tokens=limits.max_tokens)
    return limits


def check_program_settings(
    args: MultiTurnGRPOConfig, has_aux_loss: bool, prompt_format: str
) -> None:
    """Refuse settings that are not supported with a program as environment.

    Args:
        args ([`MultiTurnGRPOConfig`]): The settings.
        has_aux_loss (`bool`): Whether TRL adds the auxiliary loss of a mixture of experts.
        prompt_format (`str`): `chat` or `text`.

    Raises:
        `ValueError`: If there is such a setting. The message names a value that works.
    """
    # The mode of the importance ratio matters only if the ratio is computed.
    importance_mode = args.vllm_importance_sampling_mode
    corrects_importance = args.vllm_importance_sampling_correction and (
        args.use_vllm or args.async_lead > 0
    )

    # Options of the loss that weigh or drop sequences, of which a rollout may have several.
    unsupported = []
    if args.loss_type not in ("dapo", "cispo", *PER_ROLLOUT_LOSS_TYPES):
        unsupported.append(f"loss_type={args.loss_type!r} (use dapo, grpo, dr_grpo or cispo)")
    if args.importance_sampling_level != "token":
        unsupported.append("importance_sampling_level='sequence' (use 'token')")
    if args.top_entropy_quantile < 1.0:
        unsupported.append("top_entropy_quantile (leave it at 1.0)")
    if args.entropy_coef or args.use_adaptive_entropy:
        unsupported.append("entropy_coef (leave it at 0)")
    if args.off_policy_mask_threshold is not None:
        unsupported.append("off_policy_mask_threshold (leave it out)")
    if args.mask_truncated_completions:
        unsupported.append("mask_truncated_completions (leave it off)")
    if corrects_importance and not importance_mode.startswith("token"):
        unsupported.append(
            f"vllm_importance_sampling_mode={importance_mode!r} (use 'token_truncate' or "
            "'token_mask')"
        )
    # Other options.
    if has_aux_loss:
        unsupported.append(
            "the auxiliary loss of a mixture of experts (set router_aux_loss_coef=0)"
        )
    if args.full_determinism:
        unsupported.append("full_determinism (leave it off)")
    if prompt_format != "chat":
        unsupported.append("prompts that are text (a program's calls are conversations)")

    if unsupported:
        raise ValueError(
            "with a program as environment a rollout may have several token sequences, which rules "
            f"out {', '.join(unsupported)}"
        )


def warn_of_slow_precision(args: MultiTurnGRPOConfig) -> None:
    """Log a warning before training in bfloat16, TRL's default, on a processor without it."""
    on_cpu = args.device.type == "cpu"
    if args.bf16 and on_cpu and is_bf16_slow() and args.process_index == 0:
        logger.warning(
            "this processor has no instructions for bfloat16, so training may take up to a hundred "
            "times as long as in float32: set bf16=False (--bf16 false)"
        )


def unknown_environment(source: str, name: str, names: Iterable[str]) -> ValueError:
    """Return the error for a name that no environment of the run has.

    Args:
        source (`str`): Where the name stands.
        name (`str`): The name.
        names (`Iterable[str]`): The names of the environments.
    """
    return ValueError(
        f"{source} names the unknown environment {name!r}; the environments are: "
        f"{', '.join(names) or 'none'}"
    )


# --- budget ------------------------------------------------------------------------------------


def create_budget(components: Mapping[str, Any], args: MultiTurnGRPOConfig) -> Budget:
    """Return one budget for all processes of the job and its restarts; check who spends from it.

    Args:
        components (`Mapping`): The components that spend, by the name of their account.
        args ([`MultiTurnGRPOConfig`]): The settings.

    Raises:
        [`LLMError`]: If a component cannot be reached, or rejects the key.
    """
    budget = Budget(args.budget_usd, args.budget_tokens, Path(args.output_dir) / "spending.sqlite")
    # Let each component charge the budget, and find out early if one cannot be reached.
    charge(budget, **components)
    budget.warn_if_it_limits_nothing()
    if args.check_environment and args.process_index == 0:
        for component in components.values():
            if hasattr(component, "check"):
                with watching(place_of(component.check), "check_environment=False skips it"):
                    component.check()
    return budget
