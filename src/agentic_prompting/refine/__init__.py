"""ProRefine: a prompt is repaired for one question while the answer is being written. Pure over `ChatModel`."""

from .loop import Judge, LabelVerifier, RefineSettings, Verifier, refine
from .refiner import ProRefiner, RefinedChat
from .templates import DEFAULT_PROMPT, START_PROMPTS, RolePrompts, read_improved_prompt
from .types import (
    Failure,
    Query,
    RefinementResult,
    RefinementStep,
    RoleUsage,
    describe,
    prompt_diff,
    summarize,
)

__all__ = [
    "DEFAULT_PROMPT",
    "START_PROMPTS",
    "Failure",
    "Judge",
    "LabelVerifier",
    "ProRefiner",
    "Query",
    "RefineSettings",
    "RefinedChat",
    "RefinementResult",
    "RefinementStep",
    "RolePrompts",
    "RoleUsage",
    "Verifier",
    "describe",
    "prompt_diff",
    "read_improved_prompt",
    "refine",
    "summarize",
]
