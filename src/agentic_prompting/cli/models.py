"""The models that a command line names, as [`ChatModel`]s. Heavy imports are in the functions; see `main.py`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..llm import ChatModel, OpenAIChat


def connect_roles(
    named: Mapping[str, tuple[str | None, str | None]],
    local_model: Path | None,
    replay_cache: Path | None,
    stack: ExitStack,
) -> dict[str, ChatModel]:
    """A client for each role, so that each has its own bill; they share the recording.

    Args:
        named (`Mapping`): Model name and base URL by role. `optimizer` and `verifier` may be missing: then they are the
            feedback model.
        local_model (`Path`, *optional*): Folder of a transformers model for the role `task`.
        replay_cache (`Path`, *optional*): See [`OpenAIChat`].
        stack (`ExitStack`): Closes the clients.

    Raises:
        `ValueError`: If a model is missing or given twice.
    """
    from ..llm import OpenAIChat, ReplayCache

    if (named["task"][0] is None) == (local_model is None):
        raise ValueError("name the task model with either --task-model NAME or --local-model FOLDER (or try --sandbox)")
    if named["feedback"][0] is None:
        raise ValueError("name the feedback model with --feedback-model NAME (or try --sandbox)")
    cache = ReplayCache(replay_cache) if replay_cache else None
    roles: dict[str, ChatModel] = {}
    for role, (name, url) in named.items():
        if role == "task" and local_model is not None:
            roles[role] = stack.enter_context(local_chat(local_model))
            continue
        model, address = name or named["feedback"][0] or "", url if name else url or named["feedback"][1]
        roles[role] = stack.enter_context(OpenAIChat(model, base_url=address, cache=cache))
    return roles


def large_llm(
    model: str | None,
    base_url: str | None,
    sandbox: bool,
    replay_cache: Path | None,
    budget_usd: float | None,
    stack: ExitStack,
) -> OpenAIChat:
    """The large LLM behind an agent: the one that is named, or the sandbox's oracle at an address of its own.

    Args:
        model (`str`, *optional*), base_url (`str`, *optional*), replay_cache (`Path`, *optional*),
            budget_usd (`float`, *optional*): See [`OpenAIChat`].
        sandbox (`bool`): Start the oracle and take that.
        stack (`ExitStack`): Closes client and oracle.
    """
    from ..llm import OpenAIChat, ReplayCache

    if sandbox:
        from ..sandbox import Oracle
        from ..sandbox.server import MODEL, OracleServer

        model, base_url = MODEL, stack.enter_context(OracleServer(Oracle())).base_url
    cache = ReplayCache(replay_cache) if replay_cache else None
    return stack.enter_context(OpenAIChat(model or "", base_url=base_url, cache=cache, budget_usd=budget_usd))


def another(chat: OpenAIChat, stack: ExitStack) -> OpenAIChat:
    """A client of the same model at the same address, whose spending is booked by itself."""
    from ..llm import OpenAIChat

    return stack.enter_context(OpenAIChat(chat.model, base_url=chat.endpoint.base_url, cache=chat.cache))


def local_chat(folder: Path):
    """A local model in float32, on the GPU where there is one, with lossless drafting.

    Raises:
        `ValueError`: If there is no model in the folder, or its tokenizer has no chat template.
    """
    if not (folder / "config.json").exists():
        raise ValueError(f"{folder} holds no transformers model (no config.json); give the folder of a downloaded one")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from ..local import TransformersChat

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device)
    return TransformersChat(model, AutoTokenizer.from_pretrained(folder))
