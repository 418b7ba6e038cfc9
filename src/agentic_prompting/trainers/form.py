"""The form of the agent that is trained: from the arguments, else from the model's folder, else by default.

A model that was saved by a trainer of this library answers in the form that it has learnt. Under another template
nearly every rollout would be malformed, so a trainer uses the saved form unless an argument replaces it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from ..rollout import SPEC_FILE, AgentSpec, Environment, Environments, Grammar
from .config import MultiTurnGRPOConfig
from .policies import sampling_of

logger = logging.getLogger(__name__)


def agent_spec(
    model: Any,
    environment: Environment | None,
    args: MultiTurnGRPOConfig,
    prompt_template: str | Mapping[str, str] | None,
    system_prompt: str | None,
    grammar: Grammar | Mapping[str, Grammar] | None,
    default_grammar: Callable[[Any], Grammar],
    default_template: Callable[[Any, Grammar], str],
    name: str | None = None,
) -> tuple[AgentSpec, str]:
    """The form of the agent, without its limits; and the origin of its template, for messages.

    Args:
        model (`str`, `Path` or `PreTrainedModel`): As in [`saved_form`].
        environment ([`Environment`], *optional*): Its grammar wins over the saved one.
        args ([`MultiTurnGRPOConfig`]): Training arguments.
        prompt_template (`str` or `Mapping`, *optional*): The trainer's argument, which wins, as the two that follow.
            With several environments it is for all of them; a mapping has one for each name.
        system_prompt (`str`, *optional*): The trainer's argument.
        grammar ([`Grammar`] or `Mapping`, *optional*): The trainer's argument, as `prompt_template`.
        default_grammar (`Callable`): Makes the grammar for an environment if there is no other.
        default_template (`Callable`): Makes the template for an environment and a grammar.
        name (`str`, *optional*): Name of the environment, where it is one of several.
    """
    if isinstance(environment, Environments):
        forms = {
            one: agent_spec(
                model, own, args, _of(prompt_template, one), system_prompt, _of(grammar, one), default_grammar,
                default_template, one,
            )
            for one, own in environment.by_name.items()
        }  # fmt: skip
        first, origin = next(iter(forms.values()))
        own = ("prompt_template", "grammar", "chat_template_kwargs")
        return replace(
            first,
            environments={
                one: {k: getattr(form, k) for k in own} for one, (form, _) in forms.items()
            },
        ), origin
    assert not isinstance(prompt_template, Mapping) and not isinstance(grammar, Mapping)
    brought: Mapping[str, Any] = {}
    if environment is not None:
        grammar, brought = grammar or environment.grammar, environment.chat_template_kwargs
    if (saved := saved_form(model, grammar, prompt_template, args, name)) is not None:
        form, origin = saved
    else:
        grammar = grammar or default_grammar(environment)
        form, origin = (
            AgentSpec(prompt_template or default_template(environment, grammar), grammar=grammar),
            "default",
        )
    spec = replace(
        form,
        prompt_template=form.prompt_template if prompt_template is None else prompt_template,
        system_prompt=form.system_prompt if system_prompt is None else system_prompt,
        chat_template_kwargs={
            **form.chat_template_kwargs,
            **brought,
            **(args.chat_template_kwargs or {}),
        },
        stop_at_tags=args.stop_at_tags,
        join_system_prompt=form.join_system_prompt and system_prompt is None,
        sampling=asdict(sampling_of(args)),
    )
    return spec, origin if prompt_template is None else "prompt_template="


def _of(given: Any, name: str) -> Any:
    return given.get(name) if isinstance(given, Mapping) else given


def own_prompts(dataset: Any) -> bool:
    """Whether the rows have a column `prompt`, which is used as it is."""
    return "prompt" in (getattr(dataset, "column_names", None) or ())


def saved_form(
    model: Any,
    grammar: Grammar | None,
    template: str | None,
    args: MultiTurnGRPOConfig,
    name: str | None = None,
) -> tuple[AgentSpec, str] | None:
    """The spec that a model was saved with, and its file; `None` if there is none, or it has another grammar. The
    first process logs in one line what is used.

    Args:
        model (`str`, `Path` or `PreTrainedModel`): As of the trainer: a folder, a hub id, or a model loaded from one.
        grammar ([`Grammar`], *optional*): The one that the trainer or its environment asks for.
        template (`str`, *optional*): The trainer's `prompt_template`, which wins.
        args ([`MultiTurnGRPOConfig`]): Training arguments.
        name (`str`, *optional*): Name of the environment, where it is one of several.
    """
    if (file := _saved_file(model, args)) is None:
        return None
    saved, said = None, ""
    try:
        saved = AgentSpec.load(file.parent, grammar, name)
        if grammar not in (None, saved.grammar):
            saved, said = (
                None,
                f"{file} is of another grammar than the one asked for: its prompt template is not used",
            )
        elif template is None:
            said = f"prompt template and grammar are those that the model was saved with, in {file}"
        elif template != saved.prompt_template:
            said = f"prompt_template= is used, not the template that the model was saved with in {file}"
    except ValueError as error:
        said = (
            f"the prompt template and grammar that the model was saved with are not used: {error}"
        )
    if said and args.process_index == 0:
        logger.warning("%s", said)
    return None if saved is None else (saved, str(file))


def _saved_file(model: Any, args: MultiTurnGRPOConfig) -> Path | None:
    name = str(
        model if isinstance(model, str | os.PathLike) else getattr(model, "name_or_path", "")
    )
    if not name or Path(name).exists():
        return file if name and (file := Path(name) / SPEC_FILE).is_file() else None
    try:
        return Path(
            hf_hub_download(
                name, SPEC_FILE, revision=(args.model_init_kwargs or {}).get("revision")
            )
        )
    except (
        HfHubHTTPError,
        OSError,
        ValueError,
    ):  # another kind of model, or none: TRL reports that
        return None
