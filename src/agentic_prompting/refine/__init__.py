"""ProRefine: repairs a prompt for one question while the answer is being written."""

from .description import describe, prompt_diff
from .loop import RefineSettings, refine
from .refined_chat import RefinedChat
from .refiner import ProRefiner
from .templates import DEFAULT_PROMPT, START_PROMPTS, RolePrompts, read_improved_prompt
from .types import (
    Failure,
    Query,
    RefinementResult,
    RefinementStep,
    RoleUsage,
    summarize,
)
from .verifiers import LabelVerifier, Verifier, VerifierFunction as Judge

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
