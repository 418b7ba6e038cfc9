"""What is checked of [`ESPLTrainer`]'s own arguments before anything is loaded."""

from __future__ import annotations

from ..evolution import SystemPrompt
from ..llm import ChatModel
from .config import check_config
from .espl_config import ESPLConfig


def check_editor(reference: ChatModel | None, args: ESPLConfig) -> None:
    """Raises `TypeError` for arguments of another kind, `ValueError` unless a mode that needs an editor has one."""
    check_config(args, ESPLConfig)
    if not args.evolves:
        return
    if reference is None and args.editor == "reference":
        raise ValueError(
            f"mode={args.mode!r} needs a reference LLM to reflect: pass reference=, or use mode='rl', or "
            "editor='current' to let the policy do it"
        )
    if reference is not None and args.editor == "current":
        raise ValueError("with editor='current' the reference LLM would never be asked: pass reference=None")


def root_prompt(prompt: SystemPrompt | str) -> SystemPrompt:
    """The root of an evolution: a text with lines `[G0]. ...` as principles, any other as a preamble to add them to."""
    if isinstance(prompt, SystemPrompt):
        return prompt
    return SystemPrompt.parse(prompt) if "[G0]" in prompt else SystemPrompt(prompt, ())
