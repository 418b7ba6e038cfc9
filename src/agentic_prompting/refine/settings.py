"""The numbers and words of a refinement, checked once and written into result files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from .parsing import Unit
from .templates import RolePrompts

# The paper decodes greedily; 2,048 tokens is the released code's limit for the other roles' replies.
GREEDY: dict[str, dict[str, Any]] = {
    "task": {"temperature": 0},
    "feedback": {"temperature": 0, "max_tokens": 2048},
    "optimizer": {"temperature": 0, "max_tokens": 2048},
    "verifier": {"temperature": 0, "max_tokens": 2048},
}


@dataclass(frozen=True)
class RefineSettings:
    """Everything about a refinement but its models; the fields are described at [`ProRefiner`].

    Raises:
        `ValueError`: If one of them makes no sense.
    """

    tokens_per_step: int = 10
    max_steps: int = 25
    unit: Unit = "tokens"
    history: bool = False
    final_max_tokens: int = 512
    prompts: RolePrompts = RolePrompts()
    max_failures: int = 3
    stop_when_correct: int | None = None
    if_no_verdict: Literal["refine", "accept"] = "refine"
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self):
        for name in ("tokens_per_step", "max_steps", "final_max_tokens", "max_failures", "stop_when_correct"):
            value = getattr(self, name)
            if value is None and name == "stop_when_correct":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if self.unit not in get_args(Unit):
            raise ValueError(f"unit must be one of {', '.join(get_args(Unit))}, got {self.unit!r}")
        if self.if_no_verdict not in ("refine", "accept"):
            raise ValueError(f"if_no_verdict must be 'refine' or 'accept', got {self.if_no_verdict!r}")
        unknown = set(self.sampling) - set(GREEDY)
        if unknown:
            raise ValueError(f"sampling is given by role ({', '.join(GREEDY)}); unknown: {', '.join(sorted(unknown))}")
        if "max_tokens" in self.sampling.get("task", {}):
            raise ValueError("the task model's max_tokens follow from tokens_per_step and final_max_tokens")

    def sampling_of(self, role: str) -> dict[str, Any]:
        """What is sent with a role's calls; a `None` of the user's takes a default out, for models that refuse it."""
        merged = {**GREEDY[role], **self.sampling.get(role, {})}
        return {name: value for name, value in merged.items() if value is not None}

    @property
    def greedy(self) -> bool:
        """Whether the task model gives the same output to the same prompt."""
        return self.sampling_of("task").get("temperature") == 0

    def digest(self, **others: str) -> str:
        """16 hexadecimal digits that change with any setting, and with `others` (the models' names)."""
        text = json.dumps([asdict(self), others], sort_keys=True, default=repr)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
