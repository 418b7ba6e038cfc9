"""Mutation and crossover: from rollouts to a child prompt, through the reference LLM (3.2, A.1 to A.5, Algorithm 2);
and correction of what was learned (Table 1).

Coroutines that follow the paper and await a [`ChatModel`]. They do not change the population: a failure appears only in
the [`Outcome`].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import fsum
from typing import Any, Literal

from ..llm import ChatModel, LLMError, Usage, as_chat, fill, gather
from . import templates
from .parsing import ParsedEdits, final_text, parse_edits
from .results import ProblemResult, PromptResult, common_means, merge_results, sole_wins
from .settings import ESPLSettings
from .system_prompt import Draft, Edit, EditReport, SystemPrompt
from .templates import shorten

Reason = Literal[
    "child", "no_evidence", "too_few_winners", "call_failed", "unreadable", "unchanged", "known"
]
Summaries = Sequence[tuple[float, str]]
"""Reward and summary of each attempt at one problem."""

MAX_ATTEMPT_CHARS = 20_000
"""Longer attempts are summarised without their middle."""

# What the journal keeps of an operator: a line of the journal stays below about 100 KB.
MAX_CHARS = 600
"""Characters of each text: question, answer, summary, edit, reason. The middle of a longer one is left out."""
MAX_PROBLEMS = 20
MAX_REFLECTIONS = 8
"""Summaries per problem."""
MAX_EDITS = 60

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass
class OperatorTrace:
    """The cause of a child: the evidence that its operator was shown, and every edit that was proposed.

    Args:
        parents (`tuple[int, ...]`): Ids of the prompts it works from.
        problems (`list[dict]`): Each `column` (its place in the batch), `question`, `truth`, `reflections` (each
            `reward` and `text`: the summaries of the attempts).
        edits (`list[dict]`): Each `problem` (its place in `problems`; `None` in the final plan), `op`, `ids`, `text`,
            `search`, `reason`, `refused` (why it was not applied, or `None`).
    """

    parents: tuple[int, ...] = ()
    problems: list[dict[str, Any]] = field(default_factory=list)
    edits: list[dict[str, Any]] = field(default_factory=list)

    def show(self, column: int, problem: ProblemResult, summaries: Summaries = ()) -> None:
        """Add a problem that the operator is shown."""
        if len(self.problems) < MAX_PROBLEMS:
            kept = [
                {"reward": reward, "text": _short(text)}
                for reward, text in summaries[:MAX_REFLECTIONS]
            ]
            shown = {
                "question": _short(problem.question),
                "truth": _short(problem.truth),
                "reflections": kept,
            }
            self.problems.append({"column": column, **shown})

    def propose(self, report: EditReport, problem: int | None = None) -> None:
        """Add edits, each with the reason if it was refused."""
        for edit, why in [*((edit, None) for edit in report.applied), *report.refused][
            : MAX_EDITS - len(self.edits)
        ]:
            texts = {name: _short(getattr(edit, name)) for name in ("text", "search", "reason")}
            self.edits.append(
                {
                    "problem": problem,
                    "op": edit.op,
                    "ids": list(edit.ids)[:20],
                    **texts,
                    "refused": why,
                }
            )


@dataclass
class Outcome:
    """The result of one operator.

    Args:
        operator (`str`): `mutation`, `crossover` or `correction`.
        child ([`SystemPrompt`], *optional*): With parents and operator, without id: for [`Population.add`].
        reason (`str`): `child`; `no_evidence` and `too_few_winners`: no problem was worth reflecting on, and no
            call was made; `call_failed`, `unreadable`, `unchanged`, `known`: the operator failed. `known`: the child
            says what a prompt of the population says; set when it would join.
        counts (`Counter[str]`): `calls`, `failed_calls`; `proposed` (edits of the critiques that fit), `applied` (of
            the final plan), `refused/<why>` of both, `unread/<why>`.
        usage ([`Usage`]): The usage of all calls.
        error ([`LLMError`], *optional*): The worst error among the calls: the first fatal one, else the first.
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
        """Whether the operator made calls and returned no child."""
        return self.reason in ("call_failed", "unreadable", "unchanged", "known")

    def metrics(self) -> dict[str, float]:
        """The outcome in numbers, for logs."""
        return {
            f"evolution/{self.operator}_children": float(self.child is not None),
            f"evolution/{self.operator}_failed": float(self.failed),
            "evolution/unchanged": float(self.reason in ("unchanged", "known")),
            "evolution/calls": float(self.counts["calls"]),
            "evolution/failed_calls": float(self.counts["failed_calls"]),
            "evolution/cost_usd": self.usage.cost_usd,
        }

    def finish(self, reason: Reason, child: SystemPrompt | None = None) -> Outcome:
        """Set the reason and the child; returns the outcome."""
        self.reason, self.child = reason, child
        return self


class Work:
    """One operator on one prompt: calls the reference LLM, reads and applies its edits, records all in `outcome`.

    The arguments are those of the operators. An operator awaits [`Work.ask`] and returns what [`Work.finish`] does.
    """

    def __init__(
        self,
        outcome: Outcome,
        prompt: SystemPrompt,
        reference: ChatModel,
        settings: ESPLSettings,
        sampling: Any,
    ):
        self.outcome, self.prompt, self.settings = outcome, prompt, settings
        self.reference, self.sampling = as_chat(reference), sampling
        self.free_text = prompt.principles is None
        self._costs: list[float] = []

    async def ask(self, template: str, stage: str = "", **values: object) -> str | None:
        """The reference LLM's reply to a filled-in template, without thoughts; `None` if it failed or is empty.

        The template of a `stage` that asks for edits gets the format of edits for this kind of prompt.
        """
        if stage:
            form = templates.FORMATS[stage, "free text" if self.free_text else "principles"]
            values["answer_format"] = fill(
                form, max_words=self.settings.max_words, schema=templates.SCHEMA
            )
        reply = await self.reference(
            [{"role": "user", "content": fill(template, **values)}], **self.sampling
        )
        text = None if reply.error else final_text(reply.text) or None
        outcome = self.outcome
        outcome.counts["calls"] += 1
        outcome.counts["failed_calls"] += text is None
        self._costs.append(reply.usage.cost_usd)  # an exact sum: replies come in any order
        outcome.usage = replace(outcome.usage + reply.usage, cost_usd=fsum(self._costs))
        if reply.error and (
            outcome.error is None or (reply.error.fatal and not outcome.error.fatal)
        ):
            outcome.error = reply.error
        return text

    def read(self, text: str) -> ParsedEdits:
        """The edits of a reply. Counts the parts that cannot be read."""
        read = parse_edits(text)
        if self.free_text and not read.found and templates.NO_CHANGE in text:
            read = ParsedEdits(found=True)
        self.outcome.counts.update(f"unread/{problem}" for problem in read.problems)
        return read

    def judged(self, report: EditReport, count: str, problem: int | None = None) -> EditReport:
        """Record and count which edits were applied and which were refused."""
        self.outcome.trace.propose(report, problem)
        self.outcome.counts[count] += len(report.applied)
        self.outcome.counts.update(f"refused/{why}" for _, why in report.refused)
        return report

    def finish(
        self, plan: str | None, draft: Draft, allowed: Collection[str], limit: int | None = None
    ) -> Outcome:
        """The last step of an operator: apply the edits of a reply to the draft, like a patch; at most `limit`."""
        if plan is None:
            return self.outcome.finish("call_failed")
        read = self.read(plan)
        if not read.found or (read.problems and not read.edits):
            return self.outcome.finish("unreadable")
        self.judged(
            draft.apply(read.edits, ("replace",) if self.free_text else allowed, limit), "applied"
        )
        return self.born(draft)

    def born(self, draft: Draft) -> Outcome:
        """The outcome of a finished draft: a child, or `unchanged`."""
        child = draft.finish()
        if child.key == self.prompt.key:
            return self.outcome.finish("unchanged")
        parents = self.outcome.trace.parents
        return self.outcome.finish(
            "child", replace(child, operator=self.outcome.operator, parents=parents)
        )


async def mutate(
    reference: ChatModel,
    result: PromptResult,
    settings: ESPLSettings | None = None,
    **sampling: Any,
) -> Outcome:
    """Mutation: summarise every attempt, critique every problem, consolidate over the batch, apply (A.2 to A.5).

    A summary or critique whose call failed is left out. Without any, and if consolidation fails, there is no child.

    Args:
        reference ([`ChatModel`]): π_ref, which reflects and edits. A fixed model, by the paper's ablation (4.4).
        result ([`PromptResult`]): The parent and its results.
        settings ([`ESPLSettings`], *optional*): Which problems are reflected on, and the limits of the edits.
        sampling (*optional*): Sampling options of every call.
    """
    settings, prompt = settings or ESPLSettings(), result.prompt
    outcome = Outcome("mutation", trace=OperatorTrace(known_ids([prompt.id])))
    work = Work(outcome, prompt, reference, settings, sampling)
    chosen = [
        (at, problem)
        for at, problem in enumerate(result.problems)
        if problem.instructive(settings.reflect_on)
    ]
    if not chosen:
        return outcome.finish("no_evidence")

    lessons = await gather(_critique(work, problem) for _, problem in chosen)
    for (column, problem), (summaries, _) in zip(chosen, lessons, strict=True):
        outcome.trace.show(column, problem, summaries)
    critiques = [(place, text) for place, (_, text) in enumerate(lessons) if text is not None]
    if not critiques:
        return outcome.finish("call_failed")
    read = [(place, edits) for place, text in critiques if (edits := work.read(text)).found]
    if not read:
        return outcome.finish("unreadable")
    draft, proposals = _propose(work, read)
    if not proposals:
        return outcome.finish("unchanged")

    # The draft was only added to so far: the ids are still the parent's.
    shown = templates.render_proposals(proposals)
    plan = await work.ask(
        templates.CONSOLIDATE, "consolidate", prompt=draft.finish().text, proposals=shown
    )
    return work.finish(plan, draft, ("modify", "merge"))


async def _critique(work: Work, problem: ProblemResult) -> tuple[Summaries, str | None]:
    """The summaries of the attempts at one problem (A.3), and the critique of them together (A.4)."""
    shared = {"prompt": work.prompt.text, "question": problem.question, "truth": problem.truth}
    texts = await gather(
        work.ask(
            templates.SUMMARISE,
            attempt=shorten(attempt, MAX_ATTEMPT_CHARS),
            reward=f"{reward:g}",
            **shared,
        )
        for attempt, reward in problem.scored
    )
    scored = zip(problem.scored, texts, strict=True)
    summaries = [(reward, text) for (_, reward), text in scored if text is not None]
    if not summaries:
        return summaries, None
    shown = {"summaries": templates.render_summaries(summaries), "max_ops": work.settings.max_ops}
    return summaries, await work.ask(templates.CRITIQUE, "critique", **shared, **shown)


def _propose(work: Work, read: Sequence[tuple[int, ParsedEdits]]) -> tuple[Draft, list[list[str]]]:
    """The local edits of each problem (A.4): a draft, and the proposals as the consolidation gets to read them.

    Principles: what is added goes into the draft, one problem after another; what is modified is a suggestion only, as
    the problems may not agree (A.5): the plan decides. Free text: each problem's edits are tried on the parent, and the
    draft stays the parent: blocks of several writers seldom fit one after another.
    """
    prompt, max_words, max_ops = work.prompt, work.settings.max_words, work.settings.max_ops
    draft, proposals = Draft(prompt, max_words), []
    known = frozenset(draft.principles)
    for place, reply in read:
        if work.free_text:
            report = Draft(prompt, max_words).apply(reply.edits, ("replace",), max_ops)
        else:
            report = draft.apply(
                reply.edits, ("add", "modify"), max_ops, known, suggested=("modify",)
            )
        work.judged(report, "proposed", place)
        # Two problems propose the same: the plan should know.
        agreed = [edit for edit, why in report.refused if why == "duplicate"]
        if report.applied or agreed:
            proposals.append([_describe(edit) for edit in [*report.applied, *agreed]])
    return draft, proposals


async def crossover(
    reference: ChatModel,
    results: Sequence[PromptResult],
    settings: ESPLSettings | None = None,
    **sampling: Any,
) -> Outcome:
    """Crossover (Algorithm 2): the best prompt of the batch learns from the problems that only others solved best.

    All prompts of the batch that could be scored are shown and are the child's parents, the best one as set A. At
    least two of them must have problems on which they alone did best, set A among them. The arguments that are not
    named are those of [`mutate`].

    Args:
        results (`Sequence[PromptResult]`): The results of the batch.
    """
    settings, outcome = settings or ESPLSettings(), Outcome("crossover")
    scored = [
        result
        for result in merge_results(results)
        if any(value is not None for value in result.row)
    ]
    rows = [result.row for result in scored]
    values, wins = common_means(rows), sole_wins(rows)
    order = sorted(range(len(scored)), key=lambda place: -(values[place] or 0.0))[: len(_LETTERS)]
    outcome.trace.parents = known_ids(scored[place].prompt.id for place in order)
    if None in values or sum(map(bool, wins)) < 2 or not wins[order[0]]:
        return outcome.finish("too_few_winners")
    problems, best = scored[0].problems, scored[order[0]].prompt
    for column in sorted({column for place in order for column in wins[place]}):
        outcome.trace.show(column, problems[column])
    sets = [
        (
            letter,
            scored[at].prompt.text,
            values[at] or 0.0,
            [(problems[c].question, problems[c].truth) for c in wins[at]],
        )
        for letter, at in zip(_LETTERS, order, strict=False)
    ]
    work = Work(outcome, best, reference, settings, sampling)
    plan = await work.ask(templates.CROSSOVER, "crossover", sets=templates.render_sets(sets))
    return work.finish(plan, Draft(best, settings.max_words), ("add", "modify", "remove"))


async def correct(
    reference: ChatModel,
    prompt: SystemPrompt,
    settings: ESPLSettings | None = None,
    **sampling: Any,
) -> Outcome:
    """Check each principle of a prompt on its own, and correct or remove what does not hold (Table 1, C.1, C.2).

    Learned principles can be true in the cases they come from only. Each is one call, beside the whole prompt; a check
    that fails leaves its principle as it is. The child joins with [`Population.add`] like any other. The arguments that
    are not named are those of [`mutate`].

    Args:
        prompt ([`SystemPrompt`]): With principles; free text has none to check.
    """
    settings = settings or ESPLSettings()
    outcome = Outcome("correction", trace=OperatorTrace(known_ids([prompt.id])))
    work, draft = (
        Work(outcome, prompt, reference, settings, sampling),
        Draft(prompt, settings.max_words),
    )
    principles = dict(draft.principles)
    if not principles:
        return outcome.finish("no_evidence")
    replies = await gather(
        work.ask(templates.CHECK, "check", prompt=prompt.text, principle=f"[{name}]. {text}")
        for name, text in principles.items()
    )
    read = [
        (name, work.read(reply))
        for name, reply in zip(principles, replies, strict=True)
        if reply is not None
    ]
    if not any(edits.found for _, edits in read):
        return outcome.finish("unreadable" if read else "call_failed")
    for name, edits in read:
        work.judged(
            draft.apply(edits.edits, ("modify", "remove"), limit=1, known={name}), "applied"
        )
    return work.born(draft)


def known_ids(ids: Iterable[int | None]) -> tuple[int, ...]:
    """The ids of prompts that belong to a population."""
    return tuple(name for name in ids if name is not None)


def _describe(edit: Edit) -> str:
    if edit.op == "replace":
        return f"a block\n<<<<<<< SEARCH\n{edit.search}\n=======\n{edit.text}\n>>>>>>> REPLACE"
    return (
        f"{edit.op} {edit.ids[0]}: {edit.text}"
        if edit.op == "modify"
        else f"{edit.op}: {edit.text}"
    )


def _short(text: str) -> str:
    return shorten(text, MAX_CHARS)
