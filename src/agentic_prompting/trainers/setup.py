"""Checks and completes a trainer's arguments before the model is loaded.

In the order in which a trainer needs them: settings, reward functions, rows, the agent's form, and
the budget. Arguments that cannot work are refused here.
"""

from __future__ import annotations

import logging
import math
import os
import platform
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from datasets import Dataset, IterableDataset
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedModel

from ..data import validate_dataset
from ..llm import Budget, charge
from ..llm.guard import call_guarded, place_of, watching
from ..local import has_bf16_instructions
from ..rewards.answer_checks import check_answers_of_rows
from ..rewards.reward_columns import check_columns, required_columns
from ..rollout import SPEC_FILE, AgentSpec, Environment, Environments, Grammar, Limits
from .config import MultiTurnGRPOConfig, copy_args
from .loss import PER_ROLLOUT
from .policies import sampling_of
from .scoring import RewardFunction, RewardFunctions, check_rewards

logger = logging.getLogger(__name__)

Rows: TypeAlias = Dataset | IterableDataset

MAX_TEMPLATE_LENGTH = 300  # characters of a prompt template in a warning


# --- settings ----------------------------------------------------------------------------------


def is_program(environment: Environment | None) -> bool:
    """Return whether an environment is a program: an agent that keeps its own loop."""
    return environment is not None and environment.play_episode is not None


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
    if is_program(environment) and args.use_vllm and masks_sequences:
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
    if args.loss_type not in ("dapo", "cispo", *PER_ROLLOUT):
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


# --- reward functions --------------------------------------------------------------------------


class EnvironmentReward:
    """A reward function for the rollouts of one of several environments.

    Other rollouts get no reward from it. Its other attributes are those of the wrapped function.

    Args:
        environment_name (`str`): Name of the environment.
        function (`Callable`): Its reward function.
    """

    def __init__(self, environment_name: str, function: Callable[..., Any]):
        function_name = getattr(function, "__name__", type(function).__name__)
        self.environment_name = environment_name
        self.__name__ = f"{environment_name}/{function_name}"
        self.__wrapped__ = function  # whose signature says which columns it needs

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # while a copy is being made
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    def select_rows(self, dataset: Dataset) -> Dataset:
        """Return the environment's rows."""
        return dataset.select(self._indices(dataset["environment"]))

    async def __call__(self, **columns: Any) -> list[Any]:
        """Return the function's rewards of the environment's rollouts, `None` for the others."""
        rollout_count = len(columns["completions"])
        # The function is called only if it has a rollout to score.
        indices = self._indices(columns["environment"])
        if not indices:
            return [None] * rollout_count

        # Columns have a value for each rollout; other arguments are passed as they are.
        selected_columns = {}
        for name, values in columns.items():
            if isinstance(values, list) and len(values) == rollout_count:
                values = [values[index] for index in indices]
            selected_columns[name] = values

        returned = await call_guarded(self.__wrapped__, **selected_columns)
        # Put the rewards back to the places of their rollouts.
        rewards = [None] * rollout_count
        checked = check_rewards(returned, len(indices), self.__wrapped__)
        for index, reward in zip(indices, checked, strict=True):
            rewards[index] = reward
        return rewards

    def _indices(self, environment_names: Sequence[str]) -> list[int]:
        return [
            index for index, name in enumerate(environment_names) if name == self.environment_name
        ]


def list_reward_functions(
    reward_funcs: RewardFunctions | None, environment: Environment | None
) -> list[RewardFunction]:
    """Return a trainer's reward functions as a list.

    Args:
        reward_funcs (`Callable`, `list` or `Mapping`, *optional*): The trainer's argument. A
            mapping has the reward functions of each environment by its name; they become
            [`EnvironmentReward`] objects.
        environment ([`Environment`], *optional*): Answers the agent's requests.

    Raises:
        `ValueError`: If a mapping names an unknown environment, or lacks one.
    """
    if reward_funcs is None:
        return []
    if not isinstance(reward_funcs, Mapping):
        return _as_list(reward_funcs)

    # A mapping must name exactly the environments of the run.
    environment_names: list[str] = []
    if isinstance(environment, Environments):
        environment_names = list(environment.by_name)
    for name in environment_names:
        if name not in reward_funcs:
            raise ValueError(f"reward_funcs has no reward function for the environment {name!r}")
    for name in reward_funcs:
        if name not in environment_names:
            raise _unknown_environment("reward_funcs", name, environment_names)

    # Each function sees the rollouts of its own environment.
    reward_functions: list[RewardFunction] = []
    for name, functions in reward_funcs.items():
        for function in _as_list(functions):
            if not callable(function):
                raise ValueError(
                    f"reward_funcs of the environment {name!r} has {function!r}, which cannot be "
                    "called"
                )
            reward_functions.append(EnvironmentReward(name, function))
    return reward_functions


def _as_list(functions: RewardFunction | Sequence[RewardFunction]) -> list[RewardFunction]:
    if isinstance(functions, list | tuple):
        return list(functions)
    return [cast(RewardFunction, functions)]


# --- rows --------------------------------------------------------------------------------------


def prepare_rows(
    args: MultiTurnGRPOConfig,
    environment: Environment | None,
    reward_functions: Sequence[RewardFunction],
    train_dataset: Rows,
    eval_datasets: Sequence[Rows],
    prompt_template: str | Mapping[str, str] | None,
) -> Rows:
    """Check all rows, and return those to train on, in the shares of `environment_ratio`.

    Args:
        args ([`MultiTurnGRPOConfig`]): The settings.
        environment ([`Environment`], *optional*): Answers the agent's requests.
        reward_functions (`Sequence`): The reward functions, which need columns.
        train_dataset (`Dataset`): The rows to train on.
        eval_datasets (`Sequence[Dataset]`): The rows of evaluations.
        prompt_template (`str` or `Mapping`, *optional*): The trainer's argument, which rows with a
            prompt of their own would ignore.

    Raises:
        `ValueError`: If rows lack a column that they need, or name no environment of the run, or
            if an option would be ignored.
    """
    check_group_sizes(reward_functions, args, bool(eval_datasets))
    # Options by environment need several environments, and rows that name theirs.
    if isinstance(environment, Environments):
        for name in args.environment_limits or ():
            if name not in environment.by_name:
                raise _unknown_environment("environment_limits", name, environment.by_name)
        for dataset in [train_dataset, *eval_datasets]:
            check_environment_column(dataset, environment)
        if args.environment_ratio:
            assert not isinstance(args.environment_ratio, str)  # checked by the settings
            train_dataset = draw_by_ratio(train_dataset, args.environment_ratio, args.seed)
    else:
        for name in ("environment_ratio", "environment_limits"):
            if getattr(args, name):
                raise ValueError(
                    f"{name} would be ignored, because it needs several environments: pass "
                    "environment={name: ...}"
                )

    # An environment with a `reset` may add the columns that reward functions need.
    may_add_columns = environment is not None and environment.has_reset
    column_readers = [] if may_add_columns else reward_functions
    for dataset in [train_dataset, *eval_datasets]:
        check_dataset(dataset, column_readers, prompt_template)
    return train_dataset


def check_dataset(
    dataset: Dataset | IterableDataset,
    reward_functions: Sequence[RewardFunction],
    prompt_template: str | Mapping[str, str] | None,
) -> None:
    """Check that a dataset has the columns that the prompt and the reward functions need.

    Raises:
        `ValueError`: If the rows have neither a question nor a prompt, if they lack a column that
            a reward function needs, or if they have a prompt of their own, so that the template
            would be ignored.
    """
    # Rows with a prompt of their own need no question.
    prompt_column = "prompt" if has_prompt_column(dataset) else "question"
    validate_dataset(dataset, columns=(prompt_column,))

    for function in reward_functions:
        # A reward model reads the completions alone.
        if not callable(function) or isinstance(function, torch.nn.Module):
            continue
        # The reward function of one of several environments gets the rows of that one.
        rows = function.select_rows(dataset) if hasattr(function, "select_rows") else dataset
        first_row = next(iter(rows), None)
        if first_row is not None:
            check_columns(function, first_row)
            validate_dataset(rows, columns=required_columns(function))
            check_answers_of_rows(function, rows)

    if prompt_template is not None and prompt_column == "prompt":
        raise ValueError(
            "prompt_template would be ignored, as the dataset has a column `prompt`, which is used "
            "as it is: leave one of them out"
        )


def has_prompt_column(dataset: Dataset | IterableDataset) -> bool:
    """Return whether the rows have a column `prompt`, which is used as it is."""
    return "prompt" in (getattr(dataset, "column_names", None) or ())


def check_group_sizes(
    reward_functions: Sequence[RewardFunction], args: MultiTurnGRPOConfig, has_eval_dataset: bool
) -> None:
    """Check that reward functions that compare rollouts, such as [`GroupJudge`], get whole groups.

    Raises:
        `ValueError`: If a group has a single rollout or is split between processes.
    """
    # Group size and rows per process: in training, and in evaluation if there is one.
    train_rows = args.per_device_train_batch_size * args.steps_per_generation
    group_and_row_counts = [(args.num_generations, train_rows)]
    if has_eval_dataset:
        eval_group_size = args.num_generations_eval or args.num_generations
        group_and_row_counts.append((eval_group_size, args.per_device_eval_batch_size))

    for group_size, rows_per_process in group_and_row_counts:
        # A function may get a single rollout of a group that is split between processes.
        is_split = rows_per_process % group_size != 0
        for function in reward_functions:
            if hasattr(function, "check_group"):
                function.check_group(1 if is_split else group_size)


def list_datasets(eval_dataset: Rows | Mapping[str, Rows] | None) -> list[Rows]:
    """Return the data sets to evaluate on."""
    if eval_dataset is None:
        return []
    if isinstance(eval_dataset, Mapping):
        return [dataset for dataset in eval_dataset.values() if dataset is not None]
    return [eval_dataset]


def check_environment_column(dataset: Rows, environment: Environments) -> None:
    """Raise `ValueError` unless each row names one of the environments."""
    validate_dataset(dataset, columns=("environment",))
    if not hasattr(dataset, "__len__"):
        raise ValueError(
            "several environments need rows that can be counted: do not stream the dataset"
        )
    for index, name in enumerate(dataset["environment"]):
        if name not in environment.by_name:
            raise _unknown_environment(f"row {index} of the dataset", name, environment.by_name)


def _unknown_environment(source: str, name: str, names: Iterable[str]) -> ValueError:
    return ValueError(
        f"{source} names the unknown environment {name!r}; the environments are: "
        f"{', '.join(names) or 'none'}"
    )


def draw_by_ratio(dataset: Dataset, ratio: Mapping[str, float], seed: int) -> Dataset:
    """Return the rows of several environments in given shares. Each row appears at least once.

    Args:
        dataset (`Dataset`): Rows with a column `environment`.
        ratio (`Mapping[str, float]`): The share of each environment, relative to their sum.
        seed (`int`): Decides the order, and which rows appear once more than others.

    Raises:
        `ValueError`: If the ratio names other environments than the rows, or a share is not above
            0.
    """
    # Group the rows by environment, and compare the groups with the ratio.
    indices_by_environment: dict[str, list[int]] = {}
    for index, name in enumerate(dataset["environment"]):
        indices_by_environment.setdefault(name, []).append(index)

    if set(ratio) != set(indices_by_environment):
        raise ValueError(
            f"environment_ratio names {', '.join(ratio)}, but the rows name "
            f"{', '.join(indices_by_environment)}"
        )
    for name, share in ratio.items():
        if not 0 < share < math.inf:
            raise ValueError(f"environment_ratio of {name!r} must be above 0, got {share}")

    # The smallest number of rows for which each environment's share has room for all of its rows.
    total_share = sum(ratio.values())
    row_count = max(
        len(indices) * total_share / ratio[name] for name, indices in indices_by_environment.items()
    )

    # Repeat the rows of each environment; the rest of its share is a sample without replacement.
    random_numbers = random.Random(seed)
    drawn: list[int] = []
    for name, indices in indices_by_environment.items():
        target_count = max(round(row_count * ratio[name] / total_share), len(indices))
        repeats, remainder = divmod(target_count, len(indices))
        drawn += indices * repeats + random_numbers.sample(indices, remainder)
    random_numbers.shuffle(drawn)
    return dataset.select(drawn)


def prompt_format_of(datasets: Sequence[Rows]) -> str:
    """Return the form of the prompts of all data sets.

    It is `text` where rows have a `prompt` that is a string, else `chat`. The first row of each
    data set decides.

    Raises:
        `ValueError`: If some are text and some are not, or if rows have images, which would be
            ignored.
    """
    formats = set()
    for dataset in datasets:
        # Streamed data sets can be read, but not be counted or indexed.
        first_row: Mapping[str, Any] = next(iter(dataset), {})
        _refuse_images(first_row)
        formats.add("text" if isinstance(first_row.get("prompt"), str) else "chat")
    if len(formats) > 1:
        raise ValueError(
            "the column `prompt` is text in some datasets, and messages or absent in others: give "
            "all datasets the same form of prompt"
        )
    return formats.pop() if formats else "chat"


def _refuse_images(row: Mapping[str, Any]) -> None:
    # Images come as columns of their own, or as parts of the messages of a prompt.
    image_source = None
    for name in ("image", "images"):
        if name in row and image_source is None:
            image_source = f"a column `{name}`"

    # The content of a message is a text, or a list of parts.
    prompt = row.get("prompt")
    messages = [] if prompt is None or isinstance(prompt, str) else prompt
    for message in messages:
        content = message.get("content")
        parts = [] if content is None or isinstance(content, str) else content
        if any(part.get("type") not in (None, "text") for part in parts):
            image_source = image_source or "a `prompt` with images"

    if image_source is not None:
        raise ValueError(
            f"the dataset has {image_source}, but this trainer is text-only: remove the images, or "
            "use trl.GRPOTrainer for vision models"
        )


# --- the agent's form --------------------------------------------------------------------------


@dataclass(frozen=True)
class SpecOptions:
    """The trainer's arguments about the agent's form.

    With several environments each is for all of them, or has a value by environment.
    """

    prompt_template: str | Mapping[str, str] | None = None
    system_prompt: str | None = None
    grammar: Grammar | Mapping[str, Grammar] | None = None

    def for_environment(self, name: str) -> SpecOptions:
        """Return the arguments for one of several environments."""
        prompt_template = self.prompt_template
        if isinstance(prompt_template, Mapping):
            prompt_template = prompt_template.get(name)
        grammar = self.grammar
        if isinstance(grammar, Mapping):
            grammar = grammar.get(name)
        return SpecOptions(prompt_template, self.system_prompt, grammar)


def resolve_spec(
    model: str | PreTrainedModel | None,
    environment: Environment | None,
    args: MultiTurnGRPOConfig,
    options: SpecOptions,
    default_grammar: Callable[[Environment | None], Grammar],
    default_template: Callable[[Environment | None, Grammar], str],
    environment_name: str | None = None,
) -> tuple[AgentSpec, str]:
    """Return the agent's form, without its limits, and the origin of its template for messages.

    A model that was saved by one of our trainers answers in the form that it has learnt. Under
    another template nearly every rollout would be malformed, so the saved form is used unless an
    argument replaces it.

    Args:
        model (`str` or `PreTrainedModel`, *optional*): The policy, as in [`load_saved_spec`].
        environment ([`Environment`], *optional*): Answers the agent's requests. Its grammar takes
            precedence over the saved one.
        args ([`MultiTurnGRPOConfig`]): The settings.
        options ([`SpecOptions`]): The trainer's arguments, which take precedence over all else.
        default_grammar (`Callable`): Returns the grammar for an environment if there is no other.
        default_template (`Callable`): Returns the template for an environment and a grammar if
            there is no other.
        environment_name (`str`, *optional*): Name of the environment if it is one of several.
    """
    if isinstance(environment, Environments):
        return _resolve_specs(model, environment, args, options, default_grammar, default_template)
    assert not isinstance(options.prompt_template, Mapping)
    assert not isinstance(options.grammar, Mapping)

    # The environment's grammar comes after the trainer's, and before the saved one.
    grammar = options.grammar
    environment_kwargs: Mapping[str, Any] = {}
    if environment is not None:
        grammar = grammar or environment.grammar
        environment_kwargs = environment.chat_template_kwargs

    # Start from the saved form, else from the default.
    saved = load_saved_spec(model, grammar, options.prompt_template, args, environment_name)
    if saved is not None:
        spec, origin = saved
    else:
        grammar = grammar or default_grammar(environment)
        template = options.prompt_template or default_template(environment, grammar)
        spec = AgentSpec(template, grammar=grammar)
        origin = "default"

    # The trainer's arguments replace its parts.
    if options.prompt_template is not None:
        spec = replace(spec, prompt_template=options.prompt_template)
        origin = "prompt_template="
    if options.system_prompt is not None:
        spec = replace(spec, system_prompt=options.system_prompt, join_system_prompt=False)
    chat_template_kwargs = {
        **spec.chat_template_kwargs,
        **environment_kwargs,
        **(args.chat_template_kwargs or {}),
    }
    spec = replace(
        spec,
        chat_template_kwargs=chat_template_kwargs,
        stop_at_tags=args.stop_at_tags,
        sampling=asdict(sampling_of(args)),
    )
    return spec, origin


def _resolve_specs(
    model: str | PreTrainedModel | None,
    environments: Environments,
    args: MultiTurnGRPOConfig,
    options: SpecOptions,
    default_grammar: Callable[[Environment | None], Grammar],
    default_template: Callable[[Environment | None, Grammar], str],
) -> tuple[AgentSpec, str]:
    """As [`resolve_spec`]; what differs between environments is kept in the spec by their names."""
    # Resolve the form for each environment.
    resolved = {}
    for name, environment in environments.by_name.items():
        resolved[name] = resolve_spec(
            model,
            environment,
            args,
            options.for_environment(name),
            default_grammar,
            default_template,
            name,
        )
    # The first one stands for what is common to all.
    settings = {}
    for name, (spec, _) in resolved.items():
        settings[name] = {
            "prompt_template": spec.prompt_template,
            "grammar": spec.grammar,
            "chat_template_kwargs": spec.chat_template_kwargs,
        }
    first_spec, origin = next(iter(resolved.values()))
    return replace(first_spec, environments=settings), origin


def load_saved_spec(
    model: str | os.PathLike[str] | PreTrainedModel | None,
    grammar: Grammar | None,
    prompt_template: str | None,
    args: MultiTurnGRPOConfig,
    environment_name: str | None = None,
) -> tuple[AgentSpec, str] | None:
    """Return the form that a model was saved with, and its file.

    `None` if there is none, or if it has another grammar. The first process logs which is used.

    Args:
        model (`str`, `Path` or `PreTrainedModel`, *optional*): A folder, a Hub id, or a model that
            was loaded from one.
        grammar ([`Grammar`], *optional*): The one that the trainer or its environment needs.
        prompt_template (`str`, *optional*): The trainer's argument, which takes precedence.
        args ([`MultiTurnGRPOConfig`]): The settings.
        environment_name (`str`, *optional*): Name of the environment if it is one of several.
    """
    file = _find_spec_file(model, args)
    if file is None:
        return None

    # Read the file. A damaged one, or one of a newer version, is not used.
    message = ""
    spec = None
    try:
        spec = AgentSpec.load(file.parent, grammar, environment_name)
    except ValueError as error:
        message = f"ignoring the prompt template and grammar that the model was saved with: {error}"

    # Compare it with the arguments.
    if spec is not None:
        if grammar not in (None, spec.grammar):
            message = (
                f"ignoring the prompt template in {file}, because it was saved with another "
                "grammar than the environment's or the trainer's"
            )
            spec = None
        elif prompt_template is None:
            message = f"using the prompt template and grammar that the model was saved with: {file}"
        elif prompt_template != spec.prompt_template:
            message = (
                f"using prompt_template= instead of the template that the model was saved with: "
                f"{file}"
            )

    if message and args.process_index == 0:
        logger.warning("%s", message)
    if spec is None:
        return None
    return spec, str(file)


def warn_of_slow_precision(args: MultiTurnGRPOConfig) -> None:
    """Warn of training in bfloat16, TRL's default, on a processor that has no instructions for it."""
    on_x86_cpu = args.device.type == "cpu" and platform.machine() in ("x86_64", "AMD64")
    if args.bf16 and on_x86_cpu and not has_bf16_instructions() and args.process_index == 0:
        logger.warning(
            "this processor has no instructions for bfloat16, so that training may take up to a "
            "hundred times as long as in float32: set bf16=False (--bf16 false)"
        )


def _find_spec_file(
    model: str | os.PathLike[str] | PreTrainedModel | None, args: MultiTurnGRPOConfig
) -> Path | None:
    # A model that was loaded from a folder or the Hub remembers its name.
    if isinstance(model, str | os.PathLike):
        name = str(model)
    else:
        name = str(getattr(model, "name_or_path", ""))
    if not name:
        return None
    # A name that exists on disk is never looked up on the Hub.
    if Path(name).exists():
        file = Path(name) / SPEC_FILE
        return file if file.is_file() else None
    # Otherwise the name is that of a repository on the Hub.
    revision = (args.model_init_kwargs or {}).get("revision")
    try:
        return Path(hf_hub_download(name, SPEC_FILE, revision=revision))
    except (HfHubHTTPError, OSError, ValueError):
        return None  # a model without the file, or none at all, which TRL reports


def describe_prompt(spec: AgentSpec, origin: str, dataset: Rows) -> str:
    """Return the agent's prompt and its origin in words, for warnings about failed rollouts."""
    # Rows with a prompt of their own ignore the template.
    if has_prompt_column(dataset):
        return "the rows' own `prompt`"
    if spec.environments:
        descriptions = []
        for name, environment_spec in zip(spec.environments, spec.each(), strict=True):
            template = environment_spec.prompt_template[:MAX_TEMPLATE_LENGTH]
            descriptions.append(f"{name}: {template!r}")
        return ", ".join(descriptions)
    return f"{spec.prompt_template[:MAX_TEMPLATE_LENGTH]!r} ({origin})"


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
    if args.check_environment and args.process_index == 0:
        for component in components.values():
            if hasattr(component, "check"):
                with watching(place_of(component.check), "check_environment=False skips it"):
                    component.check()
    return budget
