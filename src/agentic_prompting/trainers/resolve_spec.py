"""Chooses the agent's form: by the trainer's arguments, its environment, the saved model, or
default.

A form is a prompt template, a system prompt and a grammar, with what depends on them; see
[`AgentSpec`].
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError
from transformers import PreTrainedModel

from ..rollout import SPEC_FILE, AgentSpec, Environment, Environments, Grammar
from .config import MultiTurnGRPOConfig
from .policies import sampling_of
from .prepare_rows import Rows, has_prompt_column
from .setup import unknown_environment

logger = logging.getLogger(__name__)

MAX_TEMPLATE_LENGTH = 300  # characters of a prompt template in a warning


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
    _check_names(options, environment)
    if isinstance(environment, Environments):
        return _resolve_specs(model, environment, args, options, default_grammar, default_template)
    assert not isinstance(options.prompt_template, Mapping)
    assert not isinstance(options.grammar, Mapping)

    # The environment's grammar comes after the trainer's, and before the saved one.
    grammar = options.grammar
    environment_kwargs: Mapping[str, Any] = {}
    uses_template = True
    if environment is not None:
        grammar = grammar or environment.grammar
        environment_kwargs = environment.chat_template_kwargs
        # A program writes its prompts itself.
        uses_template = not environment.plays_whole_episodes

    # Start from the saved form, else from the default.
    saved = load_saved_spec(
        model, grammar, options.prompt_template, args, environment_name, uses_template
    )
    if saved is not None:
        spec, origin = saved
    else:
        grammar = grammar or default_grammar(environment)
        template = options.prompt_template or default_template(environment, grammar)
        spec = AgentSpec(template, grammar=grammar)
        origin = "the default, which prompt_template= replaces"

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
        columns={},  # those of the saved model's rows
    )
    return spec, origin


def _check_names(options: SpecOptions, environment: Environment | None) -> None:
    """Raise `ValueError` if an argument by environment names one that the run does not have."""
    names: list[str] = []
    if isinstance(environment, Environments):
        names = list(environment.by_name)
    for argument in ("prompt_template", "grammar"):
        value = getattr(options, argument)
        if isinstance(value, Mapping):
            for name in value:
                if name not in names:
                    raise unknown_environment(argument, name, names)


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
    uses_template: bool = True,
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
        uses_template (`bool`, *optional*, defaults to `True`): Whether the form writes the agent's
            prompts. Otherwise nothing is logged.
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

    if message and uses_template and args.process_index == 0:
        logger.warning("%s", message)
    if spec is None:
        return None
    return spec, str(file)


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
        return (
            "the rows' own `prompt`, to which nothing is added; rows with a `question` instead get "
            "the trainer's instructions"
        )
    if spec.environments:
        descriptions = []
        for name, environment_spec in zip(spec.environments, spec.environment_specs(), strict=True):
            template = environment_spec.prompt_template[:MAX_TEMPLATE_LENGTH]
            descriptions.append(f"{name}: {template!r}")
        return ", ".join(descriptions)
    return f"{spec.prompt_template[:MAX_TEMPLATE_LENGTH]!r} ({origin})"


def drop_unused_template(spec: AgentSpec, dataset: Rows) -> AgentSpec:
    """Return the form to save with an agent that was trained on a dataset.

    Rows with a prompt of their own are shown to the agent as they are. The saved agent must not be
    asked with instructions that it has never seen, so its template is then the bare question,
    unless the rows' prompts were made with the template.
    """
    # The first row decides, as for the form of prompts.
    row: Mapping[str, Any] = {}
    if has_prompt_column(dataset):
        row = next(iter(dataset), row)
    prompt = row.get("prompt")
    if not prompt:
        return spec
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    before, _, after = spec.for_row(row).prompt_template.partition("{question}")
    if isinstance(text, str) and text.startswith(before) and text.endswith(after):
        return spec

    bare_template = "{question}"
    environments = {}
    for name, settings in spec.environments.items():
        environments[name] = {**settings, "prompt_template": bare_template}
    return replace(spec, prompt_template=bare_template, environments=environments)
