"""The inputs and results of a refinement: plain values, their JSON, and their text for people."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from operator import add
from typing import Any, Literal

from ..llm import LLMError, Message, Reply, Usage, types as llm_errors

Role = Literal["task", "feedback", "optimizer", "verifier"]
StopReason = Literal["verified", "finished", "max_steps", "failed"]
Verdict = Literal["right", "wrong", "none"]

_FORMAT = 2  # of the JSON; raised when a reader of the old one would go wrong


@dataclass(frozen=True)
class Query:
    """One question.

    Args:
        text (`str`): The question itself.
        id (`str`, *optional*, defaults to `""`): For people; carried into the result.
        answers (`tuple[str, ...]`, *optional*): Accepted answers. Only a verifier that compares with them reads them.
        context (`tuple[Message, ...]`, *optional*): The messages before the question, without system messages.
        repeat (`int`, *optional*, defaults to `0`): Which of several refinements of the same question, for replay.
    """

    text: str
    id: str = ""
    answers: tuple[str, ...] = ()
    context: tuple[Message, ...] = ()
    repeat: int = 0

    @property
    def shown(self) -> str:
        """The question as critic and verifier read it: with the conversation before it, where there is one."""
        if not self.context:
            return self.text
        turns: list[Message] = [*self.context, {"role": "user", "content": self.text}]
        return "\n\n".join(f"{turn['role'].capitalize()}: {turn['content']}" for turn in turns)

    def digest(self, prompt: str) -> str:
        """64 hexadecimal digits that say which prompt is refined for which question."""
        parts = [prompt, self.text, self.answers, self.context, self.repeat]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_query(query: Query | str | Mapping[str, Any], number: int = 0) -> Query:
    """A question, or a row with `question` and, where there are any, `answers` and `id`.

    Raises:
        `ValueError`: If there is no question in it; names the row.
    """
    if isinstance(query, Query):
        return query
    row = {"question": query} if isinstance(query, str) else query
    if not isinstance(row, Mapping) or not isinstance(row.get("question"), str):
        raise ValueError(
            f"query {number} must be a text or a row with a text `question`, got {query!r:.200}"
        )
    if not row["question"].strip():
        raise ValueError(f"query {number} is empty: there is nothing to answer")
    answers = row.get("answers") or ()
    if isinstance(answers, str) or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(
            f"`answers` of query {number} must be a list of texts, got {answers!r:.200}"
        )
    return Query(row["question"], str(row.get("id", number)), tuple(answers))


def check_prompt(prompt: str) -> None:
    """Raises `ValueError` if there is no prompt to refine."""
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError(
            "the prompt is empty: there is nothing to refine; DEFAULT_PROMPT is one to begin with"
        )


@dataclass(frozen=True)
class Failure:
    """A call that failed.

    Args:
        role (`str`): `task`, `feedback`, `optimizer` or `verifier`.
        step (`int`): In which step, from 1; 0 before the first (first answer, verifier), -1 for the final answer.
        kind (`str`): The error's class name, `RateLimited` for example.
        message (`str`): What went wrong, without secrets.
        fatal (`bool`, *optional*, defaults to `False`): Whether no later call can go better.
        where (`str`, *optional*, defaults to `""`): The model and its address.
    """

    role: Role
    step: int
    kind: str
    message: str
    fatal: bool = False
    where: str = ""

    def __str__(self) -> str:
        when = {0: "before the first step", -1: "at the final answer"}.get(
            self.step, f"in step {self.step}"
        )
        return f"{self.role} model {when}: {self.kind}: {self.message}" + (
            f" ({self.where})" if self.where else ""
        )

    def as_error(self) -> LLMError:
        """The same as an [`LLMError`], for a [`Reply`]."""
        known = getattr(llm_errors, self.kind, None)
        kind = (
            known
            if isinstance(known, type) and issubclass(known, LLMError)
            else llm_errors.ServerFailed
        )
        return kind(str(replace(self, where="")), self.where)


@dataclass(frozen=True)
class RoleUsage(Usage):
    """The calls of one role, with their [`Usage`].

    Args:
        calls (`int`, *optional*, defaults to `0`): Replies received, failures and recorded ones included.
        failed (`int`, *optional*, defaults to `0`): Failed ones among them.
        cached (`int`, *optional*, defaults to `0`): Recorded ones among them, which cost nothing.
        worth_usd (`float`, *optional*, defaults to `0.0`): `cost_usd`, and the cost of the calls that were recorded.
    """

    calls: int = 0
    failed: int = 0
    cached: int = 0
    worth_usd: float = 0.0

    @classmethod
    def of(cls, reply: Reply) -> RoleUsage:
        """One reply's."""
        counts = {"calls": 1, "failed": int(reply.error is not None), "cached": int(reply.cached)}
        worth = reply.usage.cost_usd + reply.saved.cost_usd
        return cls(**asdict(reply.usage), **counts, worth_usd=worth)

    def __add__(self, other: RoleUsage) -> RoleUsage:  # type: ignore[override]  # of a kind
        return RoleUsage(*map(add, astuple(self), astuple(other)))


@dataclass
class RefinementStep:
    """One pass through the loop of Algorithm 1.

    Args:
        prompt (`str`): p* when the step began.
        new_prompt (`str`): p* after the step; the same text where nothing was changed.
        output (`str`, *optional*): o_i, at most i·k tokens of the task model; `None` if its call failed.
        complete (`bool`, *optional*, defaults to `False`): Whether `output` ends where the model ended it.
        feedback (`str`, *optional*): f_i; `None` if there is none.
        problem (`str`, *optional*): Why the prompt was kept although a new one was wanted: `task failed`,
            `feedback failed`, `optimizer failed`, `no tag`, `unclosed tag` or `empty prompt`.
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


@dataclass
class RefinementResult:
    """One refined query.

    Args:
        id (`str`), query (`str`): The query's id, and the question.
        answer (`str`): The final answer: a fresh one under `prompt`, or the first one if it was accepted. After a
            failure the best there is, possibly cut off or empty.
        initial_prompt (`str`), prompt (`str`): p, and p*, the refined one.
        stop_reason (`str`): `verified`: the verifier accepted the first answer; `finished`: the task model reached its
            end of sequence, or `max_steps`: n steps were made (Algorithm 1); `failed`: `error` says why.
        finish_reason (`str`, *optional*, defaults to `""`): Of `answer`, as its endpoint gave it: `stop`, `length`,
            ...; empty if a failure left an unfinished output or none.
        initial_answer (`str`, *optional*): The answer under `initial_prompt`; asked for where there is a verifier.
        verdict (`str`, *optional*): `right`, `wrong`, or `none`: the verifier failed or did not say. `None` where there
            is no verifier.
        steps (`tuple[RefinementStep, ...]`, *optional*): In order.
        error ([`Failure`], *optional*): What ended the query before its time. Failures it survived are in `failures`.
        failures (`tuple[Failure, ...]`, *optional*): All calls that failed, in order.
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
    usage: dict[str, RoleUsage] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def kept(self) -> int:
        """Steps whose optimizer reply could not be used: no tag, an unclosed one, an empty prompt."""
        return sum(
            step.problem is not None and not step.problem.endswith("failed") for step in self.steps
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; [`RefinementResult.from_dict`] reads it."""
        return {"format": _FORMAT, **asdict(self)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any]) -> RefinementResult:
        """The result that [`RefinementResult.to_dict`] was called on; or of a line of a file of results.

        Raises:
            `ValueError`: If it was written by a newer version, or is none.
        """
        if not isinstance(saved, Mapping) or saved.get("format", 0) > _FORMAT:
            raise ValueError(
                "not a refinement result that this version can read; upgrade agentic-prompting"
            )
        values = {one.name: saved[one.name] for one in fields(cls) if one.name in saved}
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
        `verdict/<verdict>`, counts; `kept_prompts`, optimizer replies without a usable prompt; and per role sums of
        the fields of [`RoleUsage`], `<role>/calls` for one.
    """
    counts = Counter(f"stop/{result.stop_reason}" for result in results)
    counts += Counter(f"verdict/{result.verdict}" for result in results if result.verdict)
    summary: dict[str, float] = {
        "queries": len(results),
        "steps": sum(len(result.steps) for result in results) / max(1, len(results)),
        "kept_prompts": sum(result.kept for result in results),
        **dict(sorted(counts.items())),
    }
    for role in dict.fromkeys(role for result in results for role in result.usage):
        total = sum((result.usage[role] for result in results if role in result.usage), RoleUsage())
        summary |= {f"{role}/{name}": value for name, value in asdict(total).items()}
    return summary


# For people ----------------------------------------------------------------------------------------------------------

Mark = Literal["", "-", "+", "#"]
_PIECE_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")


def prompt_diff(old: str, new: str) -> str:
    """What changed between two prompts, a sentence a line: `- ` before what is gone, `+ ` before what is new."""
    before, after = (
        [piece for piece in _PIECE_ENDS.split(text) if piece.strip()] for text in (old, new)
    )
    return "\n".join(
        line.rstrip() for line in difflib.ndiff(before, after) if not line.startswith("?")
    )


def describe(result: RefinementResult, width: int = 300) -> str:
    """A result as text: the steps with the prompt's changes, then the answer.

    Args:
        result ([`RefinementResult`]): One query's.
        width (`int`, *optional*, defaults to `300`): Outputs and feedback are shortened to this many characters.
    """
    return "\n".join(text for _, text in described_lines(result, width))


def described_lines(result: RefinementResult, width: int = 300) -> Iterator[tuple[Mark, str]]:
    """The lines of [`describe`], each with what it is: `-` gone from a prompt, `+` new in it, `#` a heading."""

    def short(text: str) -> str:
        text = " ".join(text.split())
        return text if len(text) <= width else text[: width - 4] + " ..."

    yield from (("#", f"Question: {short(result.query)}"), ("", ""), ("#", "Prompt:"))
    yield from (("", f"  {line}") for line in result.initial_prompt.splitlines())
    if result.verdict is not None:
        yield "", f"\nFirst answer: {short(result.initial_answer or '')}"
        yield "", f"Verdict: {result.verdict}"
    for number, step in enumerate(result.steps, start=1):
        yield "#", f"\nStep {number}"
        if step.output is not None:
            yield "", f"  output{'' if step.complete else ' (cut off)'}: {short(step.output)}"
        if step.feedback is not None:
            yield "", f"  feedback: {short(step.feedback)}"
        if step.problem is not None:
            yield "", f"  prompt kept: {step.problem}"
        elif step.new_prompt == step.prompt:
            yield "", "  prompt unchanged"
        else:
            for line in prompt_diff(step.prompt, step.new_prompt).splitlines():
                yield ("-" if line[0] == "-" else "+" if line[0] == "+" else ""), f"  {line}"
    changed = sum(step.new_prompt != step.prompt for step in result.steps)
    yield (
        "",
        f"\nEnded: {result.stop_reason}, {len(result.steps)} steps, prompt changed {changed} times",
    )
    if result.error is not None:
        yield "", f"Error: {result.error}"
    yield "#", "\nAnswer:"
    yield from (("", f"  {line}") for line in result.answer.splitlines())
