"""ProRefine: a prompt is repaired for one question while the answer is being written. Pure over `ChatModel`."""

from .as_chat import RefinedChat
from .display import describe, prompt_diff
from .parsing import read_improved_prompt
from .query import Query
from .refiner import ProRefiner
from .result import Failure, RefinementResult, RefinementStep, RoleUsage, summarize
from .settings import RefineSettings
from .templates import DEFAULT_PROMPT, START_PROMPTS, RolePrompts
from .verifiers import Judge, LabelVerifier, Verifier

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
    "summarize",
]
