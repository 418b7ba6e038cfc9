"""The form that a model was saved with: prompts and grammar in `agentic_prompting.json`, which training goes on with.

A model that a trainer of this library saved answers in the form that it knows. Under another template nearly every
rollout would be malformed, so a trainer uses the saved one unless an argument replaces it.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from ..rollout import SPEC_FILE, AgentSpec, Grammar
from .config import MultiTurnGRPOConfig

logger = logging.getLogger(__name__)


def saved_form(
    model: Any, grammar: Grammar | None, template: str | None, args: MultiTurnGRPOConfig
) -> tuple[AgentSpec, str] | None:
    """The spec that a model was saved with, and its file; `None` if there is none, or it is of another grammar. The
    first process logs in one line what is used.

    Args:
        model (`str`, `Path` or `PreTrainedModel`): As of the trainer: a folder, a hub id, or a model loaded from one.
        grammar ([`Grammar`], *optional*): The one that the trainer or its environment asks for.
        template (`str`, *optional*): The trainer's `prompt_template`, which wins.
        args ([`MultiTurnGRPOConfig`]): Training arguments.
    """
    if (file := _saved_file(model, args)) is None:
        return None
    saved, said = None, ""
    try:
        saved = AgentSpec.load(file.parent, grammar)
        if grammar not in (None, saved.grammar):
            saved, said = None, f"{file} is of another grammar than the one asked for: its prompt template is not used"
        elif template is None:
            said = f"prompt template and grammar are those that the model was saved with, in {file}"
        elif template != saved.prompt_template:
            said = f"prompt_template= is used, not the template that the model was saved with in {file}"
    except ValueError as error:
        said = f"the prompt template and grammar that the model was saved with are not used: {error}"
    if said and args.process_index == 0:
        logger.warning("%s", said)
    return None if saved is None else (saved, str(file))


def _saved_file(model: Any, args: MultiTurnGRPOConfig) -> Path | None:
    name = str(model if isinstance(model, str | os.PathLike) else getattr(model, "name_or_path", ""))
    if not name or Path(name).exists():
        return file if name and (file := Path(name) / SPEC_FILE).is_file() else None
    try:
        return Path(hf_hub_download(name, SPEC_FILE, revision=(args.model_init_kwargs or {}).get("revision")))
    except (HfHubHTTPError, OSError, ValueError):  # a model of another kind, or one that is not there: TRL says so
        return None
