"""Mutation and crossover: from rollouts to a child prompt, through the reference LLM (3.2, A.1 to A.5, Algorithm 2).

Neither touches the population: if one fails, nothing has happened but what its [`Outcome`] counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..llm import ChatModel
from . import templates
from .account import Account
from .edits import Draft, Edit
from .evidence import Evidence, Trial, merge_trials
from .matrix import common_means, sole_wins
from .parsing import ParsedEdits
from .reflection import Operator, Outcome, Reflection, Stage, answer_format, apply_plan, run_operators
from .system_prompt import SystemPrompt

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def mutation_steps(trial: Trial, settings: Reflection = Reflection()) -> Operator:
    """Mutation: summarise every attempt, critique every problem, consolidate over the batch, apply (A.2 to A.5).

    A summary or critique whose call failed is left out. Without any, and if consolidation fails, there is no child.
    """
    outcome, prompt = Outcome("mutation", account=Account(_known([trial.prompt.id]))), trial.prompt
    chosen = [
        (column, problem)
        for column, problem in enumerate(trial.evidence)
        if problem.instructive(settings.reflect_on, settings.perfect)
    ][: settings.max_problems]
    if not chosen:
        return outcome.ended("no_evidence")
    summaries = yield from _summarise(outcome, prompt, [problem for _, problem in chosen], settings)
    for (column, problem), said in zip(chosen, summaries, strict=True):
        outcome.account.show(column, problem, said)
    told = [(place, problem, summaries[place]) for place, (_, problem) in enumerate(chosen) if summaries[place]]
    if not told:
        return outcome.ended("call_failed")
    critiques = yield from _critique(outcome, prompt, told, settings)
    if not critiques:
        return outcome.ended("call_failed")
    read = [(place, reply) for place, text in critiques if (reply := outcome.read(text, prompt)).found]
    if not read:
        return outcome.ended("unreadable")
    draft, proposals = _propose(outcome, prompt, read, settings)
    if not proposals:
        return outcome.ended("unchanged")
    return (yield from _consolidate(outcome, draft, proposals, settings))


def _summarise(outcome: Outcome, prompt: SystemPrompt, problems: Sequence[Evidence], settings: Reflection) -> Stage:
    """Per problem its `(reward, summary)` pairs."""
    asked = [(place, problem, *attempt) for place, problem in enumerate(problems) for attempt in problem.scored]
    texts = yield from outcome.ask(
        [
            templates.fill(
                templates.SUMMARISE,
                prompt=prompt.text,
                question=problem.question,
                truth=problem.truth,
                attempt=templates.shorten(attempt, settings.max_attempt_chars),
                reward=f"{reward:g}",
            )
            for _, problem, attempt, reward in asked
        ]
    )
    summaries: list[list[tuple[float, str]]] = [[] for _ in problems]
    for (place, _, _, reward), text in zip(asked, texts, strict=True):
        if text is not None:
            summaries[place].append((reward, text))
    return summaries


def _critique(
    outcome: Outcome,
    prompt: SystemPrompt,
    told: Sequence[tuple[int, Evidence, Sequence[tuple[float, str]]]],
    settings: Reflection,
) -> Stage:
    """The replies that came, in the order of the problems, each with the problem's number."""
    form = answer_format(prompt, templates.CRITIQUE_FORMAT, templates.CRITIQUE_TEXT_FORMAT, settings)
    texts = yield from outcome.ask(
        [
            templates.fill(
                templates.CRITIQUE,
                prompt=prompt.text,
                question=problem.question,
                truth=problem.truth,
                summaries=templates.render_summaries(summaries),
                max_ops=settings.max_ops,
                answer_format=form,
            )
            for _, problem, summaries in told
        ]
    )
    return [(place, text) for (place, _, _), text in zip(told, texts, strict=True) if text is not None]


def _propose(
    outcome: Outcome, prompt: SystemPrompt, read: Sequence[tuple[int, ParsedEdits]], settings: Reflection
) -> tuple[Draft, list[list[str]]]:
    """The local edits of each problem (A.4): a draft, and the proposals as the consolidation gets to read them.

    Principles: all edits that fit are applied to the draft, one problem after another. Free text: each problem's are
    tried on the parent, and the draft stays the parent: blocks of several writers seldom fit one after another.
    """
    draft = Draft(prompt, settings.max_words)
    known = frozenset(draft.principles)
    proposals = []
    for place, reply in read:
        if prompt.principles is None:
            report = Draft(prompt, settings.max_words).apply(reply.edits, ("replace",), settings.max_ops)
        else:
            report = draft.apply(reply.edits, ("add", "modify"), settings.max_ops, known)
        outcome.account.propose(report, place)
        outcome.counts["proposed"] += len(report.applied)
        outcome.counts.update(f"refused/{why}" for _, why in report.refused)
        agreed = [edit for edit, why in report.refused if why == "duplicate"]  # said twice: worth knowing
        if report.applied or agreed:
            proposals.append([_describe(edit) for edit in [*report.applied, *agreed]])
    return draft, proposals


def _consolidate(outcome: Outcome, draft: Draft, proposals: Sequence[Sequence[str]], settings: Reflection) -> Stage:
    """Local to global (A.5), then apply."""
    prompt = draft.prompt
    text = templates.fill(
        templates.CONSOLIDATE,
        prompt=draft.finish().text,  # only added to and modified so far: the ids are still those of the draft
        proposals=templates.render_proposals(proposals),
        answer_format=answer_format(prompt, templates.CONSOLIDATE_FORMAT, templates.CONSOLIDATE_TEXT_FORMAT, settings),
    )
    (plan,) = yield from outcome.ask([text])
    return apply_plan(outcome, draft, plan, ("modify", "merge"), (prompt.id,))


def crossover_steps(trials: Sequence[Trial], settings: Reflection = Reflection()) -> Operator:
    """Crossover (Algorithm 2): the best prompt of the batch learns from the problems that only others solved best.

    All prompts of the batch that could be scored are shown and are the child's parents, the best one as set A. At
    least two of them must have problems on which they alone did best, set A among them.
    """
    outcome = Outcome("crossover")
    scored = [trial for trial in merge_trials(trials) if trial.row and any(value is not None for value in trial.row)]
    values = common_means([trial.row for trial in scored])
    wins = sole_wins([trial.row for trial in scored])
    order = sorted(range(len(scored)), key=lambda place: -(values[place] or 0.0))
    outcome.account.parents = _known([scored[place].prompt.id for place in order])
    if None in values or sum(map(bool, wins)) < 2 or not wins[order[0]]:
        return outcome.ended("too_few_winners")
    order = order[: len(_LETTERS)]
    best = scored[order[0]].prompt
    for column in sorted({column for place in order for column in wins[place]}):
        outcome.account.show(column, scored[0].evidence[column])
    sets = [
        (
            letter,
            scored[place].prompt.text,
            values[place] or 0.0,
            [(scored[place].evidence[column].question, scored[place].evidence[column].truth) for column in wins[place]],
        )
        for letter, place in zip(_LETTERS, order, strict=False)
    ]
    text = templates.fill(
        templates.CROSSOVER,
        sets=templates.render_sets(sets),
        answer_format=answer_format(best, templates.CROSSOVER_FORMAT, templates.CROSSOVER_TEXT_FORMAT, settings),
    )
    (plan,) = yield from outcome.ask([text])
    parents = tuple(scored[place].prompt.id for place in order)
    return apply_plan(outcome, Draft(best, settings.max_words), plan, ("add", "modify", "remove"), parents)


def _known(ids: Sequence[int | None]) -> tuple[int, ...]:
    return tuple(name for name in ids if name is not None)


def _describe(edit: Edit) -> str:
    if edit.op == "replace":
        return f"a block\n<<<<<<< SEARCH\n{edit.search}\n=======\n{edit.text}\n>>>>>>> REPLACE"
    return f"{edit.op} {edit.ids[0]}: {edit.text}" if edit.op == "modify" else f"{edit.op}: {edit.text}"


def best_trial(trials: Sequence[Trial], values: Sequence[float | None]) -> Trial | None:
    """The trial of the prompt that did best, by the V_i that [`Population.record`] returns; `None` if none has one."""
    scored = [(value, trial) for value, trial in zip(values, trials, strict=True) if value is not None]
    return max(scored, key=lambda pair: pair[0])[1] if scored else None


def breed(best: Trial | None, crossing: Sequence[Trial] | None, settings: Reflection = Reflection()) -> list[Operator]:
    """What a batch leads to (Algorithm 1): its best prompt mutates, and now and then all of them cross.

    Args:
        best ([`Trial`], *optional*): The parent of the mutation, if there is one.
        crossing (`Sequence[Trial]`, *optional*): The whole batch, if it crosses this time.
        settings ([`Reflection`], *optional*): Of both operators.
    """
    operators = [] if best is None else [mutation_steps(best, settings)]
    return operators if crossing is None else [*operators, crossover_steps(crossing, settings)]


def mutate(reference: ChatModel, trial: Trial, settings: Reflection = Reflection(), **sampling: Any) -> Outcome:
    """One mutation; blocks. See [`mutation_steps`]."""
    return run_operators(reference, [mutation_steps(trial, settings)], **sampling)[0]


def crossover(
    reference: ChatModel, trials: Sequence[Trial], settings: Reflection = Reflection(), **sampling: Any
) -> Outcome:
    """One crossover; blocks. See [`crossover_steps`]."""
    return run_operators(reference, [crossover_steps(trials, settings)], **sampling)[0]
