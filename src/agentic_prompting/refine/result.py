"""What comes out of a refinement: one object per query with every step in it, and its JSON form.

Plain values only: a result can be written to a line of a file and read back equal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from ..llm import LLMError, Reply, Usage, errors as llm_errors

Role = Literal["task", "feedback", "optimizer", "verifier"]
StopReason = Literal["verified", "finished", "max_steps", "satisfied", "failed"]
Verdict = Literal["right", "wrong", "none"]

_FORMAT = 1  # of the JSON; raised when a reader of the old one would go wrong


@dataclass(frozen=True)
class Failure:
    """A call that gave nothing.

    Args:
        role (`str`): `task`, `feedback`, `optimizer` or `verifier`.
        step (`int`): In which step, from 1; 0 before the first (first answer, verifier), -1 for the final answer.
        kind (`str`): The error's class name, `RateLimited` for example.
        message (`str`): What went wrong, without secrets.
        fatal (`bool`, *optional*, defaults to `False`): Whether no later call can go better.
    """

    role: Role
    step: int
    kind: str
    message: str
    fatal: bool = False

    def __str__(self) -> str:
        when = {0: "before the first step", -1: "at the final answer"}.get(self.step, f"in step {self.step}")
        return f"{self.role} model {when}: {self.kind}: {self.message}"

    def as_error(self) -> LLMError:
        """The same as an [`LLMError`], for a [`Reply`]."""
        known = getattr(llm_errors, self.kind, None)
        kind = known if isinstance(known, type) and issubclass(known, LLMError) else llm_errors.ServerFailed
        return kind(str(self))


@dataclass(frozen=True)
class RoleUsage:
    """What one role's calls came to.

    Args:
        calls (`int`, *optional*, defaults to `0`): Replies received, failures and recorded ones included.
        failed (`int`, *optional*, defaults to `0`): Of these, failures.
        cached (`int`, *optional*, defaults to `0`): Of these, recorded ones, unpaid.
        prompt_tokens (`int`), completion_tokens (`int`), cost_usd (`float`), *optional*: See [`Usage`].
    """

    calls: int = 0
    failed: int = 0
    cached: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost_usd: float = 0.0

    def plus(self, reply: Reply) -> RoleUsage:
        """With one more reply counted."""
        usage = Usage(self.prompt_tokens, self.completion_tokens, self.cost_usd) + reply.usage
        failed = self.failed + (reply.error is not None)
        return RoleUsage(self.calls + 1, failed, self.cached + reply.cached, **asdict(usage))

    def __add__(self, other: RoleUsage) -> RoleUsage:
        return RoleUsage(*(getattr(self, name) + getattr(other, name) for name in asdict(self)))


@dataclass(frozen=True)
class RefinementStep:
    """One pass through the loop of Algorithm 1.

    Args:
        prompt (`str`): p* when the step began.
        output (`str`, *optional*): o_i, at most i·k tokens of the task model; `None` if its call failed.
        complete (`bool`, *optional*, defaults to `False`): Whether `output` ends where the model ended it.
        feedback (`str`, *optional*): f_i; `None` if there is none.
        new_prompt (`str`): p* after the step; the same text where nothing was changed.
        problem (`str`, *optional*):
            Why the prompt was kept although a new one was wanted: `task failed`, `feedback failed`,
            `optimizer failed`, `no tag`, `unclosed tag` or `empty prompt`.
        tokens (`int`, *optional*, defaults to `0`): Length of `output` as the endpoint counted it; 0 where it did not,
            and for recorded replies.
        seconds (`float`, *optional*, defaults to `0.0`): The whole step, waiting included.
    """

    prompt: str
    new_prompt: str
    output: str | None = None
    complete: bool = False
    feedback: str | None = None
    problem: str | None = None
    tokens: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class RefinementResult:
    """One refined query.

    Args:
        id (`str`): The query's id.
        query (`str`): The question.
        answer (`str`): The final answer: a fresh one under `prompt`, or the first one if it was accepted. After a
            failure the best there is, possibly cut off or empty.
        initial_prompt (`str`): p.
        prompt (`str`): p*, the refined prompt.
        stop_reason (`str`):
            `verified`: the first answer was accepted, by the verifier or, where asked for, without a verdict;
            `finished`: the task model reached its end of sequence (Algorithm 1);
            `max_steps`: n steps were made (Algorithm 1);
            `satisfied`: the critic said CORRECT as often as `stop_when_correct` asks for;
            `failed`: `error` says why.
        finish_reason (`str`, *optional*, defaults to `""`): Of `answer`, as its endpoint gave it: `stop`, `length`,
            ...; empty if a failure left an unfinished output or none.
        initial_answer (`str`, *optional*): The answer under `initial_prompt`; asked for where there is a verifier.
        verdict (`str`, *optional*): `right`, `wrong`, or `none`: the verifier failed or did not say. `None` where there
            is no verifier.
        steps (`tuple[RefinementStep, ...]`, *optional*): In order.
        error ([`Failure`], *optional*): What ended the query before its time. Failures it survived are in `failures`.
        failures (`tuple[Failure, ...]`, *optional*): All calls that gave nothing, in order.
        usage (`dict[str, RoleUsage]`, *optional*): By role, for roles that were asked.
        seconds (`float`, *optional*, defaults to `0.0`): The whole query, waiting included.
    """

    id: str
    query: str
    answer: str
    initial_prompt: str
    prompt: str
    stop_reason: StopReason
    finish_reason: str = ""
    initial_answer: str | None = None
    verdict: Verdict | None = None
    steps: tuple[RefinementStep, ...] = ()
    error: Failure | None = None
    failures: tuple[Failure, ...] = ()
    usage: Mapping[str, RoleUsage] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def kept(self) -> int:
        """Steps whose optimizer reply could not be used: no tag, an unclosed one, an empty prompt."""
        return sum(step.problem is not None and not step.problem.endswith("failed") for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; [`RefinementResult.from_dict`] reads it."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RefinementResult:
        """The result that [`RefinementResult.to_dict`] was called on.

        Raises:
            `ValueError`: If it was written by a newer version, or is none.
        """
        if not isinstance(saved, Mapping) or saved.get("format", 0) > _FORMAT:
            raise ValueError("not a refinement result that this version can read; upgrade agentic-prompting")
        values = {name: value for name, value in saved.items() if name != "format"}
        try:
            values["steps"] = tuple(RefinementStep(**step) for step in values["steps"])
            values["failures"] = tuple(Failure(**failure) for failure in values["failures"])
            values["usage"] = {role: RoleUsage(**usage) for role, usage in values["usage"].items()}
            values["error"] = Failure(**values["error"]) if values["error"] else None
            return cls(**values)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a refinement result: {type(error).__name__}: {error}") from error


def summarize(results: Sequence[RefinementResult]) -> dict[str, float]:
    """Counts and means over a run, flat, for logs.

    Args:
        results (`Sequence[RefinementResult]`): Of one run.

    Returns:
        `dict[str, float]`: `queries`; `steps`, the mean number of iterations (Figure 4); `stop/<reason>` and
        `verdict/<verdict>`, counts; `kept_prompts`, optimizer replies without a usable prompt; and per role
        `<role>/calls`, `/failed`, `/cached`, `/prompt_tokens`, `/completion_tokens`, `/cost_usd`, sums.
    """
    summary: dict[str, float] = {"queries": len(results)}
    summary["steps"] = sum(len(result.steps) for result in results) / max(1, len(results))
    summary["kept_prompts"] = sum(result.kept for result in results)
    for reason, count in sorted(Counter(result.stop_reason for result in results).items()):
        summary[f"stop/{reason}"] = count
    for verdict, count in sorted(Counter(result.verdict for result in results if result.verdict).items()):
        summary[f"verdict/{verdict}"] = count
    totals: dict[str, RoleUsage] = {}
    for result in results:
        for role, usage in result.usage.items():
            totals[role] = totals.get(role, RoleUsage()) + usage
    for role, usage in totals.items():
        summary.update({f"{role}/{name}": value for name, value in asdict(usage).items()})
    return summary
