"""The settings and weights by which a run recognises its own log of groups in flight."""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict
from typing import Any

import torch

from ...rollout import AgentSpec, Environment, Limits
from ...versions import code_version, combine_versions
from ..config import MultiTurnGRPOConfig

ENVIRONMENT_CODE = "environment_code"
"""The setting that files of older versions lack."""


def describe_run(
    spec: AgentSpec,
    limits: Limits,
    environment: Environment | None,
    rollouts_per_row: int,
    args: MultiTurnGRPOConfig,
) -> dict[str, Any]:
    """Return the settings that decide what a group in flight is.

    With other settings its logged entries would describe another rollout.

    Args:
        spec ([`AgentSpec`]): The form of the agent.
        limits ([`Limits`]): Turn and token limits of a rollout.
        environment ([`Environment`], *optional*): Identified by its name, that of its large LLM
            and its `identity`.
        rollouts_per_row (`int`): Rollouts of a group.
        args ([`MultiTurnGRPOConfig`]): The run's.
    """
    # An environment may dispatch to several by name; each of them counts.
    environments: list[Environment] = []
    if environment is not None:
        environments = list(getattr(environment, "by_name", {"": environment}).values())
    environment_names = [environment.described_by.__qualname__ for environment in environments]

    # The large LLMs that they ask.
    chats = [getattr(environment, "chat", None) for environment in environments]
    chat_names = []
    for chat in chats:
        if chat is not None:
            chat_names.append(str(getattr(chat, "model", type(chat).__qualname__)))

    # The agent's grammar in each of them.
    grammars = [environment_spec.grammar for environment_spec in spec.environment_specs() or [spec]]
    grammar_names = [f"{type(grammar).__name__} {grammar}" for grammar in grammars]

    description = {
        "seed": args.seed,
        "num_generations": args.num_generations,
        "rollouts_per_row": rollouts_per_row,
        "generation_batch_size": args.generation_batch_size,
        "processes": args.world_size,
        "limits": _describe_token_limits(limits),
        "grammar": ", ".join(grammar_names),
        "sampling": dict(spec.sampling),
        "chat_template_kwargs": json.dumps(spec.chat_template_kwargs, sort_keys=True, default=str),
        "environment": ", ".join(environment_names),
        "model": ", ".join(chat_names),
    }
    # Left out if there are none, as in logs that were written before there were any.
    if environment is not None and environment.identity:
        description["environment_settings"] = dict(environment.identity)
    # Replies of an environment of the user's own hold for its code. The library's has none here.
    code = combine_versions(code_version(environment.described_by) for environment in environments)
    if code is not None:
        description[ENVIRONMENT_CODE] = code
    return description


def _describe_token_limits(limits: Limits) -> dict[str, Any]:
    """Return the limits without time limits, which may change between two starts of a run."""
    settings = asdict(limits)
    for environment_limits in (settings, *settings["environments"].values()):
        environment_limits.pop("step_timeout", None)
    return settings


def fingerprint_weights(model: torch.nn.Module) -> int:
    """Return a number that differs for other weights.

    It is computed from 64 elements of each parameter (of this process's shard).

    Args:
        model (`torch.nn.Module`): Whole, or sharded by ZeRO-3 or FSDP2.
    """
    fingerprint = 0
    for name, parameter in model.named_parameters():
        # This process's shard: `ds_tensor` with ZeRO-3, the local part of a DTensor with FSDP2.
        shard = getattr(parameter, "ds_tensor", parameter)
        if hasattr(shard, "to_local"):
            shard = shard.to_local()
        elements = shard.detach().reshape(-1)
        stride = max(1, elements.numel() // 64)
        sampled_elements = elements[::stride][:64].float().cpu()
        fingerprint = zlib.crc32(name.encode() + sampled_elements.numpy().tobytes(), fingerprint)
    return fingerprint


def fingerprint_prompts(prompts: list[Any]) -> int:
    """Return a number that differs for other rendered prompts."""
    return zlib.crc32(json.dumps(prompts, default=str).encode())
