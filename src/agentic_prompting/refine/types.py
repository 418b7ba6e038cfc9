"""The query and the result of a refinement: plain values, and their JSON."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

from ..llm import LLMError, Message, Reply, Usage, types as llm_errors

Role = Literal["task", "feedback", "optimizer", "verifier"]
StopReason = Literal["verified", "finished", "max_steps", "failed"]
Verdict = Literal["right", "wrong", "none"]

# The version of the JSON. Raise it when an older reader would misread the new format.
_FORMAT = 2


@dataclass(frozen=True)
class Query:
    """A question to refine a prompt for.

    Args:
        text (`str`): The question itself.
        id (`str`, *optional*, defaults to `""`): A label that is copied to the result.
        answers (`tuple[str, ...]`, *optional*): The accepted answers. Only verifiers that compare
            answers read them.
        context (`tuple[Message, ...]`, *optional*): The messages before the question, without
            system messages.
        repeat (`int`, *optional*, defaults to `0`): Tells several refinements of the same question
            apart, for replay.
    """

    text: str
    id: str = ""
    answers: tuple[str, ...] = ()
    context: tuple[Message, ...] = ()
    repeat: int = 0

    @property
    def conversation(self) -> str:
        """The question as critic and verifier read it: after the messages before it, if any."""
        if not self.context:
            return self.text
        # The whole conversation as one text, each turn with its speaker.
        turns: list[Message] = [*self.context, {"role": "user", "content": self.text}]
        return "\n\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in turns)

    def digest(self, prompt: str) -> str:
        """Return 64 hexadecimal digits that identify the query and the prompt to refine."""
        # All of the query but its id, which is only a label.
        parts = [prompt, self.text, self.answers, self.context, self.repeat]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_query(query: Query | str | Mapping[str, Any], number: int = 0) -> Query:
    """Convert a question or a row to a [`Query`].

    Args:
        query ([`Query`], `str` or `dict`): A question, or a row with `question` and, optionally,
            `answers` and `id`.
        number (`int`, *optional*, defaults to `0`): The number of the row, for errors and as its
            default id.

    Raises:
        `ValueError`: There is no question, or `answers` is not a list of texts. Names the row.
    """
    if isinstance(query, Query):
        return query
    # A question alone is a row without answers.
    row = {"question": query} if isinstance(query, str) else query
    if not isinstance(row, Mapping) or not isinstance(row.get("question"), str):
        raise ValueError(
            f"query {number} must be a text or a row with a text `question`, got {query!r:.200}"
        )
    if not row["question"].strip():
        raise ValueError(f"query {number} is empty: there is nothing to answer")
    # A text for `answers` would be taken for a list of letters.
    answers = row.get("answers") or ()
    if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(
            f"`answers` of query {number} must be a list of texts, got {answers!r:.200}"
        )
    return Query(text=row["question"], id=str(row.get("id", number)), answers=tuple(answers))


def check_prompt(prompt: str) -> None:
    """Raise `ValueError` if the prompt to refine is empty."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(
            "the prompt is empty: there is nothing to refine; DEFAULT_PROMPT is one to begin with"
        )


@dataclass(frozen=True)
class Failure:
    """A call that failed.

    Args:
        role (`str`): `task`, `feedback`, `optimizer` or `verifier`.
        step (`int`): The step, from 1; 0 for the first answer and its verifier, -1 for the final
            answer.
        kind (`str`): The class name of the error, for example `RateLimited`.
        message (`str`): What went wrong, without secrets.
        fatal (`bool`, *optional*, defaults to `False`): Whether every later call would fail too.
        where (`str`, *optional*, defaults to `""`): The model and its address.
    """

    role: Role
    step: int
    kind: str
    message: str
    fatal: bool = False
    where: str = ""

    def __str__(self) -> str:
        if self.step == 0:
            moment = "before the first step"
        elif self.step == -1:
            moment = "at the final answer"
        else:
            moment = f"in step {self.step}"
        address = f" ({self.where})" if self.where else ""
        return f"{self.role} model {moment}: {self.kind}: {self.message}{address}"

    def to_error(self) -> LLMError:
        """Return the failure as an [`LLMError`] of the same kind, for a [`Reply`]."""
        # `kind` may be the name of an exception of the user's verifier.
        error_class = getattr(llm_errors, self.kind, None)
        if not isinstance(error_class, type) or not issubclass(error_class, LLMError):
            error_class = llm_errors.ServerFailed
        # The error has the address in a field of its own.
        message = str(replace(self, where=""))
        return error_class(message, self.where)


@dataclass(frozen=True)
class RoleUsage(Usage):
    """The calls of a role and their [`Usage`].

    Args:
        calls (`int`, *optional*, defaults to `0`): Replies received, including failed and recorded
            ones.
        failed (`int`, *optional*, defaults to `0`): Failed calls.
        cached (`int`, *optional*, defaults to `0`): Recorded replies, which cost nothing.
        worth_usd (`float`, *optional*, defaults to `0.0`): `cost_usd` plus what the recorded
            replies would have cost.
        worth_tokens (`int`, *optional*, defaults to `0`): All tokens, those of the recorded replies
            included.
    """

    calls: int = 0
    failed: int = 0
    cached: int = 0
    worth_usd: float = 0.0
    worth_tokens: int = 0

    @classmethod
    def from_reply(cls, reply: Reply) -> RoleUsage:
        """Return the usage of one reply."""
        return cls(
            **asdict(reply.usage),
            calls=1,
            failed=int(reply.error is not None),
            cached=int(reply.cached),
            worth_usd=reply.worth.cost_usd,
            worth_tokens=reply.worth.tokens,
        )

    def __add__(self, other: RoleUsage) -> RoleUsage:  # type: ignore[override]
        # Field by field, so that a new count is added up as well.
        sums = {
            item.name: getattr(self, item.name) + getattr(other, item.name)
            for item in fields(RoleUsage)
        }
        return RoleUsage(**sums)


@dataclass
class RefinementStep:
    """One pass through the loop of Algorithm 1.

    Args:
        prompt (`str`): p* before the step.
        new_prompt (`str`): p* after the step; equal to `prompt` if nothing was changed.
        output (`str`, *optional*): o_i, at most i·k tokens of the task model; `None` if its call
            failed.
        complete (`bool`, *optional*, defaults to `False`): Whether the model ended `output` itself.
        feedback (`str`, *optional*): f_i; `None` if there is none.
        problem (`str`, *optional*): Why there is no new prompt: `task failed`, `feedback failed`,
            `optimizer failed`, `no tag`, `unclosed tag` or `empty prompt`. `None` if the optimizer
            gave one.
        tokens (`int`, *optional*, defaults to `0`): The length of `output` as the endpoint counted
            it; 0 if it did not, and for recorded replies.
        seconds (`float`, *optional*, defaults to `0.0`): The duration of the step, including waits.
    """

    prompt: str
    new_prompt: str
    output: str | None = None
    complete: bool = False
    feedback: str | None = None
    problem: str | None = None
    tokens: int = 0
    seconds: float = 0.0


@dataclass
class RefinementResult:
    """The result of refining a prompt for one query.

    Args:
        id (`str`): The query's id.
        query (`str`): The question.
        answer (`str`): The final answer: a new one under `prompt`, or the first one if the verifier
            accepted it. After a failure the best one so far, possibly cut off or empty.
        initial_prompt (`str`): p.
        prompt (`str`): p*, the refined prompt.
        stop_reason (`str`): `verified`: the verifier accepted the first answer. `finished`: the
            task model reached its end of sequence. `max_steps`: n steps were made (Algorithm 1).
            `failed`: see `error`.
        finish_reason (`str`, *optional*, defaults to `""`): The endpoint's for `answer`: `stop`,
            `length`, ...; empty if a failure left an unfinished answer or none.
        initial_answer (`str`, *optional*): The answer under `initial_prompt`, if there is a
            verifier.
        verdict (`str`, *optional*): `right`, `wrong`, or `none` if the verifier failed or did not
            decide. `None` without a verifier.
        steps (`tuple[RefinementStep, ...]`, *optional*): The steps in order.
        error ([`Failure`], *optional*): The failure that ended the refinement early.
        failures (`tuple[Failure, ...]`, *optional*): All calls that failed, in order.
        usage (`dict[str, RoleUsage]`, *optional*): By role, for the roles that were called.
        seconds (`float`, *optional*, defaults to `0.0`): The duration, including waits.
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
    usage: dict[str, RoleUsage] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def kept_prompts(self) -> int:
        """The number of steps whose optimizer reply had no usable prompt."""
        problems = [step.problem for step in self.steps if step.problem is not None]
        return sum(not problem.endswith("failed") for problem in problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as values fit for JSON, for [`RefinementResult.from_dict`]."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RefinementResult:
        """Restore a result from [`RefinementResult.to_dict`] or a line of a results file.

        Raises:
            `ValueError`: It is not a result, or was written by a newer version.
        """
        if not isinstance(values, Mapping) or values.get("format", 0) > _FORMAT:
            raise ValueError(
                "not a refinement result that this version can read; upgrade agentic-prompting"
            )
        # A line of a results file has further keys.
        arguments = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        try:
            # Nested values are dicts and lists in JSON.
            usage = arguments["usage"].items()
            arguments["usage"] = {role: RoleUsage(**counts) for role, counts in usage}
            arguments["steps"] = tuple(RefinementStep(**step) for step in arguments["steps"])
            arguments["failures"] = tuple(Failure(**item) for item in arguments["failures"])
            arguments["error"] = Failure(**arguments["error"]) if arguments["error"] else None
            return cls(**arguments)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a refinement result: {type(error).__name__}: {error}") from error


def summarize(results: Sequence[RefinementResult]) -> dict[str, float]:
    """Return counts and means over the results of a run, flat, for logs.

    Args:
        results (`Sequence[RefinementResult]`): The results.

    Returns:
        `dict[str, float]`: `queries`; `steps`, the mean number of iterations (Figure 4); the counts
        `stop/<reason>` and `verdict/<verdict>`; `kept_prompts`, the number of optimizer replies
        without a usable prompt; and for each role the sums of the fields of [`RoleUsage`], for
        example `task/calls`.
    """
    # Count how the queries ended.
    counts = Counter(f"stop/{result.stop_reason}" for result in results)
    counts.update(f"verdict/{result.verdict}" for result in results if result.verdict)
    step_count = sum(len(result.steps) for result in results)
    summary: dict[str, float] = {
        "queries": len(results),
        # Without any results the mean is 0.
        "steps": step_count / max(1, len(results)),
        "kept_prompts": sum(result.kept_prompts for result in results),
        **dict(sorted(counts.items())),
    }

    # Sum the usage by role, in the order in which the roles were first called.
    totals: dict[str, RoleUsage] = {}
    for result in results:
        for role, usage in result.usage.items():
            totals[role] = totals.get(role, RoleUsage()) + usage
    for role, total in totals.items():
        for name, value in asdict(total).items():
            summary[f"{role}/{name}"] = value
    return summary
