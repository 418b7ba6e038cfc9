"""Mutation and crossover: from rollouts to a child prompt, through the reference LLM.

Mutation is 3.2 and A.1 to A.5, crossover Algorithm 2, and [`correct`], which checks learned
principles, Table 1. They are coroutines that follow the paper and await a [`ChatModel`]. They do
not change the population: a failure appears only in the [`Outcome`].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import fsum
from typing import Any, Literal

from ..llm import ChatModel, LLMError, Message, Usage, as_chat, fill, gather
from . import templates
from .parsing import ParsedEdits, final_text, parse_edits
from .results import ProblemResult, PromptResult, common_means, merge_results, sole_wins
from .settings import ESPLSettings
from .system_prompt import Draft, Edit, EditReport, SystemPrompt
from .templates import shorten

Reason = Literal[
    "child",
    "no_evidence",
    "too_few_winners",
    "call_failed",
    "unreadable",
    "no_change",
    "unchanged",
    "known",
    "copied",
]
WITHOUT_ATTEMPT = ("no_evidence", "too_few_winners")
"""The reasons for which an operator makes no call."""
FAILURES_IN_WORDS: Mapping[str, str] = {
    "call_failed": "no reply",
    "unreadable": "not readable",
    "unchanged": "same as its parent",
    "known": "same as another prompt",
    "copied": "repeats a question",
}
"""The reasons for which an attempt made no prompt, in words."""

Summaries = Sequence[tuple[float, str]]
"""Reward and summary of each attempt at one problem."""

MAX_REWRITTEN_WORDS = 500
"""Instructions that are written anew with more words are refused."""
MAX_ATTEMPT_CHARS = 20_000
"""Longer attempts are summarised without their middle."""

# Limits of an [`OperatorTrace`]: the journal's lines stay below about 100 KB.
MAX_TRACE_CHARS = 600
"""Characters of each text: question, answer, summary, edit, reason.

Longer texts lose their middle.
"""
MAX_TRACE_PROBLEMS = 20
MAX_TRACE_REFLECTIONS = 8
"""Summaries per problem."""
MAX_TRACE_EDITS = 60
MAX_TRACE_IDS = 20
"""Ids per edit."""

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass
class OperatorTrace:
    """The cause of a child: the evidence that its operator was shown, and every proposed edit.

    Args:
        parents (`tuple[int, ...]`): Ids of the prompts that the operator works from.
        problems (`list[dict]`): Each `column` (its position in the batch), `question`, `truth`,
            `reflections` (each `reward` and `text`: the summaries of the attempts).
        edits (`list[dict]`): Each `problem` (its position in `problems`; `None` in the final plan),
            `op`, `ids`, `text`, `search`, `reason`, `refused` (why it was not applied, or `None`).
        copied (`dict`, *optional*): The `question` that the child copies most of, and the
            `share` of it; see [`refuse_copy`]. `None` if it copies none.
    """

    parents: tuple[int, ...] = ()
    problems: list[dict[str, Any]] = field(default_factory=list)
    edits: list[dict[str, Any]] = field(default_factory=list)
    copied: dict[str, Any] | None = None

    def show(self, column: int, problem: ProblemResult, summaries: Summaries = ()) -> None:
        """Add a problem that the operator is shown."""
        # The journal's line stays short: further problems are left out.
        if len(self.problems) == MAX_TRACE_PROBLEMS:
            return
        reflections = [
            {"reward": reward, "text": shorten(text, MAX_TRACE_CHARS)}
            for reward, text in summaries[:MAX_TRACE_REFLECTIONS]
        ]
        self.problems.append(
            {
                "column": column,
                "question": shorten(problem.question, MAX_TRACE_CHARS),
                "truth": shorten(problem.truth, MAX_TRACE_CHARS),
                "reflections": reflections,
            }
        )

    def propose(self, report: EditReport, problem: int | None = None) -> None:
        """Add edits, each with the reason if it was refused."""
        # Keep the applied edits first, as many as the journal's line may have.
        proposals: list[tuple[Edit, str | None]] = [(edit, None) for edit in report.applied]
        proposals += report.refused
        for edit, refused in proposals[: MAX_TRACE_EDITS - len(self.edits)]:
            self.edits.append(
                {
                    "problem": problem,
                    "op": edit.op,
                    "ids": list(edit.ids)[:MAX_TRACE_IDS],
                    "text": shorten(edit.text, MAX_TRACE_CHARS),
                    "search": shorten(edit.search, MAX_TRACE_CHARS),
                    "reason": shorten(edit.reason, MAX_TRACE_CHARS),
                    "refused": refused,
                }
            )


@dataclass
class Outcome:
    """The result of one operator.

    Args:
        operator (`str`): `mutation`, `crossover` or `correction`.
        child ([`SystemPrompt`], *optional*): With parents and operator, without id: for
            [`Population.add`].
        reason (`str`): `child`; `no_evidence` and `too_few_winners`: no problem was worth
            reflecting on, and no call was made; `no_change`: the reference LLM answered that
            nothing is to be changed (an empty list of edits, or the same instructions again), which
            is no failure; `call_failed`, `unreadable`, `unchanged`, `known`, `copied`: the operator
            failed. `unchanged`: every edit was refused, or they cancel. `known`: the child says the
            same as a prompt of the population; set when it would join. `copied`: the child repeats
            a training problem.
        counts (`Counter[str]`): `calls`, `failed_calls`; `proposed` (edits of the critiques that
            fit), `applied` (edits of the final plan), `refused/<why>` of both, `unread/<why>`.
        usage ([`Usage`]): The usage of all calls.
        error ([`LLMError`], *optional*): The worst error among the calls: the first fatal one, else
            the first.
        trace ([`OperatorTrace`]): The evidence and the proposed edits.
    """

    operator: str
    child: SystemPrompt | None = None
    reason: Reason = "child"
    counts: Counter[str] = field(default_factory=Counter)
    usage: Usage = field(default_factory=Usage)
    error: LLMError | None = None
    trace: OperatorTrace = field(default_factory=OperatorTrace)

    @property
    def failed(self) -> bool:
        """Whether the operator made calls and returned no child, although a change was proposed."""
        return self.reason in ("call_failed", "unreadable", "unchanged", "known", "copied")

    def metrics(self) -> dict[str, float]:
        """Return the outcome in numbers, for logs."""
        return {
            f"evolution/{self.operator}_children": float(self.child is not None),
            f"evolution/{self.operator}_failed": float(self.failed),
            "evolution/no_change": float(self.reason == "no_change"),
            "evolution/unchanged": float(self.reason in ("unchanged", "known")),
            "evolution/copied": float(self.reason == "copied"),
            "evolution/calls": float(self.counts["calls"]),
            "evolution/failed_calls": float(self.counts["failed_calls"]),
            "evolution/cost_usd": self.usage.cost_usd,
        }

    def finish(self, reason: Reason, child: SystemPrompt | None = None) -> Outcome:
        """Set the reason and the child, and return the outcome."""
        self.reason = reason
        self.child = child
        return self


class Operation:
    """One operator at work on one prompt.

    It calls the reference LLM, reads and applies its edits, and records everything in `outcome`. An
    operator awaits [`Operation.ask`] and returns the result of [`Operation.finish`].

    Args:
        outcome ([`Outcome`]): Filled in.
        prompt ([`SystemPrompt`]): The prompt that is edited.
        reference ([`ChatModel`]), settings ([`ESPLSettings`]), sampling (`dict`): As in [`mutate`].
    """

    def __init__(
        self,
        outcome: Outcome,
        prompt: SystemPrompt,
        reference: ChatModel,
        settings: ESPLSettings,
        sampling: dict[str, Any],
    ):
        self.outcome = outcome
        self.prompt = prompt
        self.reference = as_chat(reference)
        self.settings = settings
        self.sampling = sampling
        self.is_free_text = prompt.principles is None
        # The cost of each call, in US dollars.
        self._costs: list[float] = []

    async def ask(self, template: str, stage: str = "", **values: object) -> str | None:
        """Return the reference LLM's reply to a filled-in template, without thoughts.

        Args:
            template (`str`): One of `templates`.
            stage (`str`, *optional*): The stage of a template that asks for edits, which gets the
                format of edits for this form of prompt.

        Returns:
            `str`: `None` if the call failed or the reply is empty.
        """
        # Fill in the format of edits first: it is a part of the template.
        if stage:
            form = "free text" if self.is_free_text else "principles"
            if self.settings.reflection == "rewrite" and stage in ("revise", "crossover"):
                form = "whole"
            values["answer_format"] = fill(
                templates.FORMATS[stage, form],
                max_words=self.settings.max_words,
                schema=templates.SCHEMA,
            )
        message: Message = {"role": "user", "content": fill(template, **values)}
        reply = await self.reference([message], **self.sampling)
        # A reply that was cut off inside its thoughts is empty, and so a failed call.
        text = None if reply.error else final_text(reply.text) or None

        # Count the call. The costs are summed exactly, because replies come in any order.
        outcome = self.outcome
        outcome.counts["calls"] += 1
        outcome.counts["failed_calls"] += text is None
        self._costs.append(reply.usage.cost_usd)
        outcome.usage = replace(outcome.usage + reply.usage, cost_usd=fsum(self._costs))

        # Keep the first fatal error, else the first error.
        if reply.error is not None:
            earlier_error = outcome.error
            if earlier_error is None or (reply.error.fatal and not earlier_error.fatal):
                outcome.error = reply.error
        return text

    def read(self, text: str) -> ParsedEdits:
        """Return the edits of a reply. Counts the parts that cannot be read."""
        parsed = parse_edits(text)
        # Beside search and replace blocks, these words stand for an empty list.
        if self.is_free_text and not parsed.has_block and templates.NO_CHANGE in text:
            parsed = ParsedEdits(has_block=True)
        self.outcome.counts.update(f"unread/{problem}" for problem in parsed.problems)
        return parsed

    def record_edits(self, report: EditReport, count: str, problem: int | None = None) -> None:
        """Record and count which edits were applied and which were refused."""
        self.outcome.trace.propose(report, problem)
        self.outcome.counts[count] += len(report.applied)
        self.outcome.counts.update(f"refused/{reason}" for _, reason in report.refused)

    def finish(
        self, plan: str | None, draft: Draft, allowed: Collection[str], limit: int | None = None
    ) -> Outcome:
        """Apply the edits of a final reply to the draft, like a patch, and return the outcome.

        Args:
            plan (`str`, *optional*): The reply; `None` if the call failed.
            draft ([`Draft`]): The prompt under revision.
            allowed (`Collection[str]`): The operations that were asked for, for principles.
            limit (`int`, *optional*): The largest number of edits that are applied.
        """
        if plan is None:
            return self.outcome.finish("call_failed")
        if self.settings.reflection == "rewrite":
            return self._finish_rewriting(plan)

        # Read the plan: an empty list of edits is readable, a reply without a list is not.
        parsed = self.read(plan)
        if not parsed.has_block or (parsed.problems and not parsed.edits):
            return self.outcome.finish("unreadable")

        # Without an edit, and with nothing in the draft yet, nothing was proposed.
        if not parsed.edits and draft.finish().key == self.prompt.key:
            return self.outcome.finish("no_change")

        # Apply it. Free text has only one operation.
        if self.is_free_text:
            allowed = ("replace",)
        self.record_edits(draft.apply(parsed.edits, allowed, limit), "applied")
        return self.finish_draft(draft)

    def _finish_rewriting(self, plan: str) -> Outcome:
        """Return the outcome of a reply that has the whole instructions in it."""
        text = templates.read_instructions(plan)
        child = _prompt_in_form(text, self.prompt) if text else None
        if child is None:
            self.outcome.counts["unread/no_instructions"] += 1
            return self.outcome.finish("unreadable")
        if len(text.split()) > MAX_REWRITTEN_WORDS:
            self.outcome.counts["refused/too_long"] += 1
            return self.outcome.finish("unreadable")
        # The same instructions again are a rewriting that proposes nothing.
        if text.split() == self.prompt.text.split():
            return self.outcome.finish("no_change")
        rewriting = Edit("replace", text=text, search=self.prompt.text)
        self.record_edits(EditReport([rewriting]), "applied")
        return self._finish_child(child)

    def finish_draft(self, draft: Draft) -> Outcome:
        """Return the outcome of a finished draft: a child, or `unchanged`."""
        return self._finish_child(draft.finish())

    def _finish_child(self, child: SystemPrompt) -> Outcome:
        # A change of order or case alone does not count as a change.
        if child.key == self.prompt.key:
            return self.outcome.finish("unchanged")
        # A crossed child has more parents than the prompt that was edited.
        child = replace(child, operator=self.outcome.operator, parents=self.outcome.trace.parents)
        return self.outcome.finish("child", child)


async def mutate(
    reference: ChatModel,
    result: PromptResult,
    settings: ESPLSettings | None = None,
    **sampling: Any,
) -> Outcome:
    """Mutate a prompt: summarise every attempt, critique every problem, consolidate, apply.

    This is A.2 to A.5. A summary or critique whose call failed is left out. Without any, and if
    consolidation fails, there is no child.

    Args:
        reference ([`ChatModel`]): π_ref, which reflects and edits. A fixed model, by the paper's
            ablation (4.4).
        result ([`PromptResult`]): The parent and its results.
        settings ([`ESPLSettings`], *optional*): Which problems are reflected on, and the limits of
            the edits.
        sampling (*optional*): Sampling options of every call.
    """
    settings = settings or ESPLSettings()
    prompt = result.prompt
    outcome = Outcome("mutation", trace=OperatorTrace(known_ids([prompt.id])))
    operation = Operation(outcome, prompt, reference, settings, sampling)

    # Choose the problems that are worth reflecting on (A.2).
    instructive = [
        (column, problem)
        for column, problem in enumerate(result.problems)
        if problem.is_instructive(settings.reflect_on)
    ]
    if not instructive:
        return outcome.finish("no_evidence")

    # Summarise the attempts at each problem (A.3), and critique them together (A.4).
    lessons = await gather(_critique(operation, problem) for _, problem in instructive)
    # Record the evidence, even if the critique failed.
    for (column, problem), (summaries, _) in zip(instructive, lessons, strict=True):
        outcome.trace.show(column, problem, summaries)
    # Read the critiques whose calls succeeded, by the number of the problem.
    critiques = [(number, text) for number, (_, text) in enumerate(lessons) if text is not None]
    if not critiques:
        return outcome.finish("call_failed")
    parsed_critiques = []
    for number, text in critiques:
        parsed = operation.read(text)
        if parsed.has_block:
            parsed_critiques.append((number, parsed))
    if not parsed_critiques:
        return outcome.finish("unreadable")

    # Collect the local edits of all problems.
    draft, proposals = _propose(operation, parsed_critiques)
    if not proposals:
        has_edits = any(parsed.edits for _, parsed in parsed_critiques)
        return outcome.finish("unchanged" if has_edits else "no_change")

    # Consolidate them (A.5). The draft was only added to so far: the ids are still the parent's.
    plan = await operation.ask(
        templates.CONSOLIDATE,
        "consolidate",
        prompt=draft.finish().text,
        proposals=templates.render_proposals(proposals),
    )
    return operation.finish(plan, draft, ("modify", "merge"))


async def _critique(operation: Operation, problem: ProblemResult) -> tuple[Summaries, str | None]:
    """Return the summaries of the attempts at one problem, and the critique of them together."""
    shared = {
        "prompt": operation.prompt.text,
        "question": problem.question,
        "truth": problem.truth,
    }
    # Summarise all attempts at the same time (A.3).
    texts = await gather(
        operation.ask(
            templates.SUMMARISE,
            attempt=shorten(attempt, MAX_ATTEMPT_CHARS),
            reward=f"{reward:g}",
            **shared,
        )
        for attempt, reward in problem.scored
    )
    summaries = [
        (reward, text)
        for (_, reward), text in zip(problem.scored, texts, strict=True)
        if text is not None
    ]
    if not summaries:
        return summaries, None

    # Critique the attempts together (A.4).
    critique = await operation.ask(
        templates.CRITIQUE,
        "critique",
        summaries=templates.render_summaries(summaries),
        max_ops=operation.settings.max_ops,
        **shared,
    )
    return summaries, critique


def _propose(
    operation: Operation, critiques: Sequence[tuple[int, ParsedEdits]]
) -> tuple[Draft, list[list[str]]]:
    """Collect the local edits of each problem (A.4).

    Principles: additions go into the draft, one problem after another; modifications are only
    suggested, as the problems may not agree (A.5): the plan decides. Free text: each problem's
    edits are tried on the parent, and the draft stays the parent: blocks of several writers seldom
    fit one after another.

    Returns:
        `tuple[Draft, list[list[str]]]`: The draft, and the proposals as the consolidation reads
            them.
    """
    prompt = operation.prompt
    max_words = operation.settings.max_words
    max_ops = operation.settings.max_ops
    draft = Draft(prompt, max_words)
    parent_ids = frozenset(draft.principles)
    proposals: list[list[str]] = []
    for number, critique in critiques:
        if operation.is_free_text:
            report = Draft(prompt, max_words).apply(critique.edits, ("replace",), max_ops)
        else:
            report = draft.apply(
                critique.edits, ("add", "modify"), max_ops, parent_ids, suggested=("modify",)
            )
        operation.record_edits(report, "proposed", number)

        # If two problems propose the same, the plan should know.
        duplicates = [edit for edit, reason in report.refused if reason == "duplicate"]
        if report.applied or duplicates:
            proposals.append([_describe(edit) for edit in [*report.applied, *duplicates]])
    return draft, proposals


async def crossover(
    reference: ChatModel,
    results: Sequence[PromptResult],
    settings: ESPLSettings | None = None,
    **sampling: Any,
) -> Outcome:
    """Cross the prompts of a batch (Algorithm 2).

    The best prompt learns from the problems that only others solved best. All prompts of the batch
    that could be scored are shown and are the child's parents, the best one as set A. At least two
    of them must have problems that they alone did best on, set A among them. The other arguments
    are those of [`mutate`].

    Args:
        results (`Sequence[PromptResult]`): The results of the batch.
    """
    settings = settings or ESPLSettings()
    outcome = Outcome("crossover")

    # The matrix of mean rewards, V_i and ρ_i of the prompts with any score.
    scored_results = []
    for result in merge_results(results):
        if any(value is not None for value in result.row):
            scored_results.append(result)
    rows = [result.row for result in scored_results]
    values = common_means(rows)
    wins = sole_wins(rows)

    # The best prompt comes first, as set A.
    ranking = sorted(range(len(scored_results)), key=lambda index: -(values[index] or 0.0))
    ranking = ranking[: len(_LETTERS)]
    outcome.trace.parents = known_ids(scored_results[index].prompt.id for index in ranking)
    # The prompts must be comparable, and two of them, set A included, need sole wins (ρ_i).
    winner_count = sum(map(bool, wins))
    if None in values or winner_count < 2 or not wins[ranking[0]]:
        return outcome.finish("too_few_winners")

    # Record the problems that one prompt alone did best on.
    problems = scored_results[0].problems
    columns = set(chain.from_iterable(wins[index] for index in ranking))
    for column in sorted(columns):
        outcome.trace.show(column, problems[column])

    # Show each prompt with its problems, and ask for edits of the best one.
    sets = []
    for letter, index in zip(_LETTERS, ranking, strict=False):
        pairs = [(problems[column].question, problems[column].truth) for column in wins[index]]
        sets.append((letter, scored_results[index].prompt.text, values[index] or 0.0, pairs))
    best = scored_results[ranking[0]].prompt
    operation = Operation(outcome, best, reference, settings, sampling)
    plan = await operation.ask(templates.CROSSOVER, "crossover", sets=templates.render_sets(sets))
    return operation.finish(plan, Draft(best, settings.max_words), ("add", "modify", "remove"))


async def correct(
    reference: ChatModel,
    prompt: SystemPrompt,
    settings: ESPLSettings | None = None,
    **sampling: Any,
) -> Outcome:
    """Check each principle of a prompt, and correct or remove the wrong ones (Table 1, C.1, C.2).

    Learned principles may be true only in the cases that they come from. Each is one call, beside
    the whole prompt; a check that fails leaves its principle unchanged. The child joins with
    [`Population.add`] like any other. The other arguments are those of [`mutate`].

    Args:
        prompt ([`SystemPrompt`]): With principles; free text has none to check.
    """
    settings = settings or ESPLSettings()
    outcome = Outcome("correction", trace=OperatorTrace(known_ids([prompt.id])))
    operation = Operation(outcome, prompt, reference, settings, sampling)
    draft = Draft(prompt, settings.max_words)
    principles = dict(draft.principles)
    if not principles:
        return outcome.finish("no_evidence")

    # Check all principles at the same time.
    replies = await gather(
        operation.ask(templates.CHECK, "check", prompt=prompt.text, principle=f"[{name}]. {text}")
        for name, text in principles.items()
    )
    # Read the replies. A check that failed leaves its principle as it is.
    corrections = []
    for name, reply in zip(principles, replies, strict=True):
        if reply is not None:
            corrections.append((name, operation.read(reply)))
    if not any(parsed.has_block for _, parsed in corrections):
        return outcome.finish("unreadable" if corrections else "call_failed")

    # Every check found its principle right.
    if not any(parsed.edits or parsed.problems for _, parsed in corrections):
        return outcome.finish("no_change")

    # A check may edit only its own principle.
    for name, parsed in corrections:
        report = draft.apply(parsed.edits, ("modify", "remove"), limit=1, visible_ids={name})
        operation.record_edits(report, "applied")
    return operation.finish_draft(draft)


def _prompt_in_form(text: str, parent: SystemPrompt) -> SystemPrompt | None:
    """Return a text as a prompt of the parent's form; `None` if it cannot be read as one."""
    if parent.principles is None:
        return SystemPrompt(text)
    try:
        return SystemPrompt.of(text)
    except ValueError:
        return None


def known_ids(ids: Iterable[int | None]) -> tuple[int, ...]:
    """Return the ids of prompts that belong to a population."""
    return tuple(prompt_id for prompt_id in ids if prompt_id is not None)


def _describe(edit: Edit) -> str:
    if edit.op == "replace":
        return f"a block\n<<<<<<< SEARCH\n{edit.search}\n=======\n{edit.text}\n>>>>>>> REPLACE"
    if edit.op == "modify":
        return f"modify {edit.ids[0]}: {edit.text}"
    return f"{edit.op}: {edit.text}"
