"""What mutation and crossover share: their settings, what becomes of them, and how their calls are sent.

An operator is a generator: it yields the conversations of one stage, gets the replies, and returns an [`Outcome`]. It
neither sends nor waits; [`run_operators`] does, for several operators together and all calls of a stage at once. So the
stages can be tested without a model, and a trainer can run them beside the weight update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ..llm import ChatModel, LLMError, Message, Reply, Usage
from . import templates
from .account import Account
from .edits import MAX_WORDS, Draft, EditReport
from .evidence import ReflectOn
from .parsing import ParsedEdits, final_text, parse_edits
from .system_prompt import SystemPrompt

Conversation = list[Message]
Operator = Generator[list[Conversation], list[Reply], "Outcome"]
Stage = Generator[list[Conversation], list[Reply], Any]
Reason = Literal["child", "no_evidence", "too_few_winners", "call_failed", "unreadable", "unchanged"]


@dataclass(frozen=True)
class Reflection:
    """How the operators work.

    Args:
        reflect_on (`str`, *optional*, defaults to `"mixed"`): The problems a mutation looks at, see
            [`Evidence.instructive`]. `mixed` is the paper's (A.2); `imperfect` also shows those where all failed.
        perfect (`float`, *optional*, defaults to `1.0`): The best reward there is, for `imperfect`.
        max_ops (`int`, *optional*, defaults to `2`): K_ops: edits per problem (A.4).
        max_words (`int`, *optional*, defaults to `32`): Longer principles are refused.
        max_problems (`int`, *optional*): A mutation looks at the first so many. By default at all.
        max_attempt_chars (`int`, *optional*, defaults to `20000`): Longer attempts are shown without their middle.

    Raises:
        `ValueError`: An argument is out of range.
    """

    reflect_on: ReflectOn = "mixed"
    perfect: float = 1.0
    max_ops: int = 2
    max_words: int = MAX_WORDS
    max_problems: int | None = None
    max_attempt_chars: int = 20_000

    def __post_init__(self):
        if self.reflect_on not in ("mixed", "imperfect"):
            raise ValueError(f"reflect_on must be 'mixed' or 'imperfect', got {self.reflect_on!r}")
        problems = 1 if self.max_problems is None else self.max_problems
        if min(self.max_ops, self.max_words, self.max_attempt_chars, problems) < 1:
            raise ValueError(f"every limit must be at least 1, got {self}")


@dataclass
class Outcome:
    """What became of one operator.

    Args:
        operator (`str`): `mutation` or `crossover`.
        child ([`SystemPrompt`], *optional*): With parents and operator, without id: for [`Population.add`].
        reason (`str`): `child`; `no_evidence` and `too_few_winners`: there was nothing to work on, and nobody was
            asked; `call_failed`, `unreadable`, `unchanged`: the operator failed.
        counts (`Counter[str]`): `calls`, `failed_calls`; `proposed` (edits of the critiques that fit), `applied` (of
            the final plan), `refused/<why>` of both, `unread/<why>`.
        usage ([`Usage`]): Of all calls.
        error ([`LLMError`], *optional*): The worst error among the calls: the first fatal one, else the first.
        account ([`Account`]): What it was shown and what edits were proposed.
    """

    operator: str
    child: SystemPrompt | None = None
    reason: Reason = "child"
    counts: Counter[str] = field(default_factory=Counter)
    usage: Usage = field(default_factory=Usage)
    error: LLMError | None = None
    account: Account = field(default_factory=Account)

    @property
    def failed(self) -> bool:
        """Whether it was tried and gave no child."""
        return self.reason in ("call_failed", "unreadable", "unchanged")

    def ask(self, prompts: Sequence[str]) -> Stage:
        """One stage: all prompts at once, each a conversation of its own. Returns a text or `None` for each."""
        replies: list[Reply] = yield [[{"role": "user", "content": prompt}] for prompt in prompts]
        texts = [None if reply.error else final_text(reply.text) or None for reply in replies]
        self.counts["calls"] += len(replies)
        self.counts["failed_calls"] += sum(text is None for text in texts)
        for reply in replies:
            self.usage += reply.usage
            if reply.error and (self.error is None or (reply.error.fatal and not self.error.fatal)):
                self.error = reply.error
        return texts

    def read(self, text: str, prompt: SystemPrompt) -> ParsedEdits:
        """The edits of a reply, what cannot be read counted."""
        read = parse_edits(text)
        if prompt.principles is None and not read.found and templates.NO_CHANGE in text:
            read = ParsedEdits(found=True)
        self.counts.update(f"unread/{problem}" for problem in read.problems)
        return read

    def count(self, report: EditReport) -> EditReport:
        """Add the application of the final plan to the counts and to the account."""
        self.account.propose(report)
        self.counts["applied"] += len(report.applied)
        self.counts.update(f"refused/{why}" for _, why in report.refused)
        return report

    def ended(self, reason: Reason, child: SystemPrompt | None = None) -> Outcome:
        """This outcome, complete."""
        self.reason, self.child = reason, child
        return self


def apply_plan(
    outcome: Outcome, draft: Draft, plan: str | None, allowed: Collection[str], parents: Sequence[int | None]
) -> Outcome:
    """The last step of both operators: edits of a reply onto the draft, and the child."""
    if plan is None:
        return outcome.ended("call_failed")
    read = outcome.read(plan, draft.prompt)
    if not read.found:
        return outcome.ended("unreadable")
    free_text = draft.prompt.principles is None
    outcome.count(draft.apply(read.edits, ("replace",) if free_text else allowed))
    child = draft.finish()
    if child.text == draft.prompt.text:
        return outcome.ended("unchanged")
    known = tuple(parent for parent in parents if parent is not None)
    return outcome.ended("child", replace(child, operator=outcome.operator, parents=known))


def answer_format(prompt: SystemPrompt, principles: str, free_text: str, settings: Reflection) -> str:
    """How edits are to be written, for this kind of prompt, with the limits filled in."""
    return templates.fill(free_text if prompt.principles is None else principles, max_words=settings.max_words)


Answer = Callable[[list[Conversation]], list[Reply]]
"""Answers the conversations of a stage, all at once, in their order."""


def run_operators(reference: ChatModel, operators: Sequence[Operator], **sampling: Any) -> list[Outcome]:
    """Run operators side by side until all are done; blocks. Their calls go out together, stage by stage.

    Args:
        reference ([`ChatModel`]): π_ref, which reflects and edits. A fixed model, by the paper's ablation (4.4).
        operators (`Sequence[Operator]`): What [`mutation_steps`] and [`crossover_steps`] return; each can run once.
        sampling (*optional*): Passed on with every call.

    Returns:
        `list[Outcome]`: In the order of the operators.
    """

    def answer(conversations: list[Conversation]) -> list[Reply]:
        futures = [reference.submit(conversation, **sampling) for conversation in conversations]
        return [future.result() for future in futures]

    return drive(operators, answer)


def drive(operators: Sequence[Operator], answer: Answer) -> list[Outcome]:
    """[`run_operators`] for whatever can answer: each stage of all operators is one call of `answer`."""
    outcomes: dict[int, Outcome] = {}
    waiting: dict[int, list[Conversation]] = {}

    def go_on(place: int, replies: list[Reply] | None) -> None:
        try:
            waiting[place] = next(operators[place]) if replies is None else operators[place].send(replies)
        except StopIteration as done:
            outcomes[place] = done.value

    for place in range(len(operators)):
        go_on(place, None)
    while waiting:
        stage = dict(waiting)
        waiting.clear()
        replies = iter(answer([conversation for conversations in stage.values() for conversation in conversations]))
        for place, conversations in stage.items():
            go_on(place, [next(replies) for _ in conversations])
    return [outcomes[place] for place in range(len(operators))]
