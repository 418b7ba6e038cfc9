"""The parts of a trainer that exist before there is a model: settings, rewards, rows, and the form of the agent.

Arguments that cannot work are refused here, before the model is loaded.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..data import as_dataset
from ..llm import Budget, charge
from ..llm.guard import place_of
from ..llm.waiting import watching
from ..rollout import AgentSpec, Environment, Grammar, Limits
from .config import MultiTurnGRPOConfig
from .form import agent_spec, own_prompts
from .loss import PER_ROLLOUT
from .scoring import check_dataset, check_group_sizes
from .several import checked_rows


@dataclass(frozen=True)
class Setup:
    """The settings, rewards and rows of a trainer, and the form of its agent.

    Args:
        args ([`MultiTurnGRPOConfig`]): The settings, adapted to the other arguments.
        environment ([`Environment`], *optional*): Answers the agent's requests.
        functions (`Sequence`): The reward functions.
        train_dataset (`Dataset`): The rows.
        eval_dataset (`Dataset`, mapping or `None`): The rows of evaluations.
        spec ([`AgentSpec`]): The form of the agent.
        asked (`str`): Its prompt template and the origin of that, or the template of each environment, for warnings.
    """

    args: MultiTurnGRPOConfig
    environment: Environment | None
    functions: Sequence[Any]
    train_dataset: Any
    eval_dataset: Any
    spec: AgentSpec
    asked: str

    @property
    def has_program(self) -> bool:
        """Whether the environment is a program, whose rollouts may have several token sequences."""
        return is_program(self.environment)

    def limits(self, readable: int | None = None) -> Limits:
        """The limits of rollouts.

        Without an environment the only turn is the completion, and may be as long as that.

        Args:
            readable (`int`, *optional*): Tokens that the model can read.
        """
        limits = self.args.limits(readable)
        (own,) = (one for one in fields(self.args) if one.name == "max_turn_tokens")
        if self.environment is None and self.args.max_turn_tokens == own.default:
            limits = replace(limits, max_turn_tokens=limits.max_tokens)
        return limits


def set_up(
    args: MultiTurnGRPOConfig,
    model: Any,
    environment: Environment | None,
    reward_funcs: Any,
    added: Sequence[Any],
    train_dataset: Any,
    eval_dataset: Any,
    *,
    prompt_template: str | Mapping[str, str] | None,
    system_prompt: str | None,
    grammar: Grammar | Mapping[str, Grammar] | None,
    default_grammar: Callable[[Any], Grammar],
    default_template: Callable[[Any, Grammar], str],
) -> Setup:
    """Check a trainer's arguments and combine them.

    Args:
        args ([`MultiTurnGRPOConfig`]): The settings.
        model (`str` or `PreTrainedModel`): The policy; only the form that it was saved with is read here.
        environment ([`Environment`], *optional*): Answers the agent's requests.
        reward_funcs (`Callable` or `list`, *optional*): The trainer's.
        added (`Sequence`): The environment's own reward functions, each of weight 1.
        train_dataset (`Dataset`): The rows.
        eval_dataset (`Dataset` or mapping, *optional*): The rows of evaluations.
        prompt_template (`str` or `dict`, *optional*): The trainer's.
        system_prompt (`str`, *optional*): The trainer's.
        grammar ([`Grammar`] or `dict`, *optional*): The trainer's.
        default_grammar (`Callable`): Returns the grammar for an environment if there is no other.
        default_template (`Callable`): Returns the template for an environment and a grammar.

    Raises:
        `ValueError`: For a dataset, template or argument that cannot work.
    """
    train_dataset, eval_dataset = as_dataset(train_dataset), as_dataset(eval_dataset)
    functions = list(reward_funcs) if isinstance(reward_funcs, (list, tuple)) else [reward_funcs]
    functions = [*([] if reward_funcs is None else functions), *added]
    if added and args.reward_weights is not None:
        args = _changed(args, reward_weights=[*args.reward_weights, *[1.0] * len(added)])
    if (
        is_program(environment)
        and args.use_vllm
        and args.vllm_importance_sampling_mode == "sequence_mask"
    ):
        args = _changed(
            args, vllm_importance_sampling_mode="token_truncate"
        )  # the other is TRL's default
    check_group_sizes(functions, args, eval_dataset is not None)
    evaluated = eval_dataset.values() if isinstance(eval_dataset, Mapping) else [eval_dataset]
    train_dataset = checked_rows(environment, args, train_dataset, evaluated)
    # An environment with a `reset` may add columns.
    readers = [] if environment is not None and environment.has_reset else functions
    for dataset in [train_dataset, *(one for one in evaluated if one is not None)]:
        check_dataset(dataset, readers, prompt_template)
    prompts = prompt_format_of(train_dataset, *evaluated)
    # Rows with prompts of their own and no environment: a turn is the answer, as in TRL, whatever form was saved.
    saved_in = None if environment is None and own_prompts(train_dataset) else model
    spec, origin = agent_spec(
        saved_in,
        environment,
        args,
        prompt_template,
        system_prompt,
        grammar,
        default_grammar,
        default_template,
    )
    each = [
        f"{name}: {one.prompt_template[:300]!r}"
        for name, one in zip(spec.environments, spec.each(), strict=True)
    ]
    asked = ", ".join(each) or f"{spec.prompt_template[:300]!r} ({origin})"
    asked = "the rows' own `prompt`" if own_prompts(train_dataset) else asked
    if args.use_vllm and args.stop_at_tags:
        stops = {"stop": list(spec.stop_texts), "include_stop_str_in_output": True}
        args.generation_kwargs = {**stops, **(args.generation_kwargs or {})}
    made = Setup(args, environment, functions, train_dataset, eval_dataset, spec, asked)
    return replace(made, spec=replace(spec, limits=made.limits(), prompt_format=prompts))


def _changed(args: MultiTurnGRPOConfig, **values: Any) -> MultiTurnGRPOConfig:
    """A copy with other values, because the settings belong to the caller."""
    changed = copy(args)  # made as a pickle is, without the token
    for name, value in {"hub_token": args.hub_token, **values}.items():
        setattr(changed, name, value)
    return changed


def is_program(environment: Environment | None) -> bool:
    """Whether an environment is a program: an agent that keeps its own loop."""
    return environment is not None and environment.play_episode is not None


def charged(roles: Mapping[str, Any], args: MultiTurnGRPOConfig) -> Budget:
    """One budget for all processes of the job and for its restarts. Every component that spends from it is checked.

    Args:
        roles (`Mapping`): The components that spend, by account name.
        args ([`MultiTurnGRPOConfig`]): The settings.

    Raises:
        [`LLMError`]: A component cannot be reached, or rejects the key.
    """
    spending = Budget(
        args.budget_usd, args.budget_tokens, Path(args.output_dir) / "spending.sqlite"
    )
    charge(spending, **roles)
    if args.check_environment and args.process_index == 0:
        for component in roles.values():
            if hasattr(component, "check"):
                with watching(place_of(component.check), "check_environment=False leaves it out"):
                    component.check()
    return spending


# --- checks ----------------------------------------------------------------------------------------------------------


def check_settings(args: MultiTurnGRPOConfig, has_aux_loss: bool, prompt_format: str) -> None:
    """Refuse settings that are wrong or not supported where a program makes the rollouts.

    Args:
        args ([`MultiTurnGRPOConfig`]): The run's.
        has_aux_loss (`bool`): Whether TRL adds the auxiliary loss of a mixture of experts.
        prompt_format (`str`): `chat` or `text`.

    Raises:
        `ValueError`: The message names the setting and a value that works.
    """
    ratios = args.vllm_importance_sampling_mode
    wrong = {
        f"loss_type={args.loss_type!r} (use dapo, grpo, dr_grpo or cispo)": (
            args.loss_type not in ("dapo", "cispo", *PER_ROLLOUT)
        ),
        "importance_sampling_level='sequence' (use 'token')": args.importance_sampling_level
        != "token",
        "top_entropy_quantile (leave it at 1.0)": args.top_entropy_quantile < 1.0,
        "entropy_coef (leave it at 0)": bool(args.entropy_coef) or bool(args.use_adaptive_entropy),
        "off_policy_mask_threshold (leave it out)": args.off_policy_mask_threshold is not None,
        "mask_truncated_completions (leave it off)": args.mask_truncated_completions,
        f"vllm_importance_sampling_mode={ratios!r} (use 'token_truncate' or 'token_mask')": (
            (args.use_vllm or args.async_lead > 0)
            and args.vllm_importance_sampling_correction
            and not ratios.startswith("token")
        ),
        "the auxiliary loss of a mixture of experts (set router_aux_loss_coef=0)": has_aux_loss,
        "full_determinism (leave it off)": args.full_determinism,
        "prompts that are text (a program's calls are conversations)": prompt_format != "chat",
    }
    if found := [what for what, is_wrong in wrong.items() if is_wrong]:
        raise ValueError(
            "with a program as environment a rollout may have several token sequences, for which there is no "
            + "; no ".join(found)
        )


def prompt_format_of(*datasets: Any) -> str:
    """The form of the prompts of all data sets: `text` where rows have a `prompt` that is a string, else `chat`.

    Args:
        *datasets (`Dataset`, `IterableDataset` or `None`): The first row of each is looked at.

    Raises:
        `ValueError`: Some are text and some are not, or rows have images, which would be ignored.
    """
    firsts: list[Mapping[str, Any]] = [
        next(iter(dataset), {}) for dataset in datasets if dataset is not None
    ]
    for row in firsts:
        _refuse_images(row)
    formats = {"text" if isinstance(row.get("prompt"), str) else "chat" for row in firsts}
    if len(formats) > 1:
        raise ValueError(
            "some datasets have a column `prompt` of text, others messages or questions: give all of them one form"
        )
    return formats.pop() if formats else "chat"


def _refuse_images(row: Mapping[str, Any]) -> None:
    columns = [name for name in ("image", "images") if name in row]
    prompt = row.get("prompt")
    contents = (
        []
        if prompt is None or isinstance(prompt, str)
        else [message.get("content") for message in prompt]
    )
    parts = [part for content in contents if not isinstance(content, str) for part in content or ()]
    if columns or any(part.get("type") not in (None, "text") for part in parts):
        where = f"a column `{columns[0]}`" if columns else "a `prompt` with images"
        raise ValueError(
            f"the dataset has {where}, and this trainer reads text alone: take the images out, or use trl.GRPOTrainer, "
            "which trains models that see"
        )


def check_experts(model: Any, weight: float | None) -> None:
    """Refuse a mixture of experts whose auxiliary loss TRL cannot compute.

    Args:
        model (`PreTrainedModel`): The policy.
        weight (`float`, *optional*): The weight of that loss, `router_aux_loss_coef`. Defaults to the model's own.

    Raises:
        `ValueError`: TRL does not find the number of experts.
    """
    if has_aux_loss(model, weight) and not hasattr(model.config.get_text_config(), "num_experts"):
        raise ValueError(
            f"TRL cannot compute the auxiliary loss of {type(model).__name__}, whose configuration has no "
            "`num_experts`: set router_aux_loss_coef=0 to train without that loss"
        )


def has_aux_loss(model: Any, weight: float | None) -> bool:
    """Whether TRL adds the auxiliary loss of a mixture of experts. Arguments as [`check_experts`]'s."""
    config = model.config.get_text_config()
    weight = getattr(config, "router_aux_loss_coef", 0.0) if weight is None else weight
    return bool(weight) and hasattr(config, "output_router_logits")


def check_packed(model: Any) -> None:
    """Refuse a quantised model whose code multiplies by packed weights itself instead of calling their layers.

    Models without such code are not run. A model with it is refused if a forward pass over two tokens fails.

    Args:
        model (`PreTrainedModel` or `PeftModel`): The policy.

    Raises:
        `ValueError`: The message names the layers that must not be quantised.
    """
    found: set[str] = set()
    for module in model.modules():
        packed = {name for name, child in module.named_children() if _is_packed(child)}
        found |= packed and packed & _weights_read_by(type(module))
    if not found:
        return
    try:
        with torch.no_grad(), torch.random.fork_rng():
            model(
                input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False
            )
    except Exception as error:  # its type varies: packed weights have another shape and type
        whole = [*sorted(found), "lm_head"]
        kind = type(model.get_base_model() if hasattr(model, "peft_config") else model).__name__
        raise ValueError(
            f"the code of {kind} multiplies by the weights of {' and '.join(sorted(found))} itself, which fails where "
            f"they are quantised ({' '.join(str(error).split())[:100]}): leave them whole, with "
            f"llm_int8_skip_modules={whole} in the BitsAndBytesConfig"
        ) from error


def _is_packed(layer: Any) -> bool:
    """Whether a linear layer's weights have another shape or type than its sizes imply. Sharded weights are not
    checked."""
    weight, sizes = (
        getattr(layer, "weight", None),
        [getattr(layer, f"{way}_features", None) for way in ("out", "in")],
    )
    if (
        not isinstance(weight, torch.Tensor)
        or None in sizes
        or weight.is_meta
        or hasattr(weight, "ds_id")
    ):
        return False
    return not weight.is_floating_point() or list(weight.shape) != sizes


def _weights_read_by(kind: type) -> set[str]:
    """The layers whose weights a module's code reads."""
    try:
        code = inspect.getsource(kind)
    except (OSError, TypeError):  # a class without a source file
        return set()
    return set(re.findall(r"self\.(\w+)\.weight\b", code))
