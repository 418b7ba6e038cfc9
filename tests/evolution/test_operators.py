"""Mutation and crossover with scripted reference LLMs: what is asked, in which order, and what
failures do.
"""

import asyncio
import re

import pytest

from agentic_prompting.evolution import (
    Attempt,
    ESPLSettings,
    ProblemResult,
    PromptResult,
    ReflectionTask,
    SystemPrompt,
    operators,
    propose_children,
    templates,
)
from agentic_prompting.llm import BudgetExceeded, Reply, ScriptedChat, Usage
from support.operators import MIXED, PROMPT, crossover, edits, mutate, problem, reference, task

TEXT = SystemPrompt("Search once.\nThen answer.", id=4)


def test_the_four_stages_in_order():
    chat = reference(
        critique=lambda request: edits(
            {"op": "add", "text": f"Lesson of {re.search('question (.)', request)[1]}."},
            {"op": "modify", "id": "G0", "text": "Check tiny cases."},
        ),
        plan=edits(
            {"op": "merge", "ids": ["G2", "G3"], "text": "Lessons of both."},
            {"op": "modify", "id": "G0", "text": "Check tiny cases."},
        ),
    )
    outcome = mutate(chat, MIXED, temperature=0.5)
    assert [task(call) for call in chat.calls] == ["retell"] * 4 + ["draw"] * 2 + ["turn"]
    assert all(sampling == {"temperature": 0.5} for sampling in chat.sampling)
    assert outcome.child.principles == (
        "Check tiny cases.",
        "Name the unknowns.",
        "Lessons of both.",
    )
    assert (outcome.child.parents, outcome.child.operator, outcome.child.id) == (
        (3,),
        "mutation",
        None,
    )
    assert dict(outcome.counts) == {"calls": 7, "failed_calls": 0, "proposed": 4, "applied": 2}
    assert (
        outcome.usage.tokens
        == sum(len(c[0]["content"].split()) for c in chat.calls) + outcome.usage.completion_tokens
    )
    assert not outcome.failed


def test_what_the_prompts_show():
    chat = reference()
    mutate(chat, MIXED)
    retell = chat.calls[0][0]["content"]
    critique = chat.calls[5][0]["content"]
    turn = chat.calls[6][0]["content"]
    for piece in (PROMPT.text, "question a", "truth a", "try a0", "Reward of the attempt: 1\n"):
        assert piece in retell
    # Problem c: the attempt that failed for outside reasons is no evidence; the others best first,
    # thoughts left out.
    for piece in (
        PROMPT.text,
        "question c",
        "truth c",
        "2 at most",
        "at most 32 words",
        '"add"',
        '"modify"',
    ):
        assert piece in critique
    assert critique.index('reward="1">\nIt guessed try c2') < critique.index(
        'reward="0">\nIt guessed try c0'
    )
    assert "try c1" not in critique
    assert "<think>" not in critique
    for piece in (
        "[G2]. Verify the result.",
        "From problem 1:\n- add: Verify",
        "From problem 2:\n- add: Verify",
        '"merge"',
    ):
        assert piece in turn
    assert not any(
        re.search(
            r"\{(prompt|question|truth|max_\w+|answer_format|summaries|proposals)\}",
            c[0]["content"],
        )
        for c in chat.calls
    )


def test_values_are_not_templates():
    strange = PromptResult(
        PROMPT,
        (ProblemResult("{truth} {x}", "secret", (Attempt("{question}", 1.0), Attempt("", 0.0))),),
    )
    chat = reference(critique=edits())
    chat.script = lambda messages: "It said {truth}." if task(messages) == "retell" else "[]"
    mutate(chat, strange)
    assert (
        "<problem>\n{truth} {x}\n</problem>\n<attempt>\n{question}\n</attempt>"
        in chat.calls[0][0]["content"]
    )
    assert "It said {truth}." in chat.calls[2][0]["content"]


def test_reflect_on():
    questions = lambda **kw: [  # noqa: E731
        re.search("question (.)", c[0]["content"])[1]
        for c in (lambda chat: (mutate(chat, MIXED, ESPLSettings(**kw)), chat.calls)[1])(
            reference()
        )
        if task(c) == "draw"
    ]
    assert questions() == ["a", "c"]
    assert questions(reflect_on="imperfect") == ["a", "c", "d"]
    graded = problem("g", 0.4, 0.6)
    assert graded.is_instructive()
    assert not problem("g", 0.5, 0.5).is_instructive()
    assert problem("g", 0.5, 0.5).is_instructive("imperfect")
    assert not problem("g", None, None).is_instructive("imperfect")
    assert not problem("g", 1.0, 1.0).is_instructive("imperfect")


def test_no_evidence_asks_nobody():
    chat = reference()
    outcome = mutate(chat, PromptResult(PROMPT, (problem("b", 1.0, 1.0), problem("d", 0.0, 0.0))))
    assert (outcome.reason, outcome.child, outcome.failed, chat.calls) == (
        "no_evidence",
        None,
        False,
        [],
    )


def test_a_failure_at_each_call():
    """Summaries and critiques that failed are left out; consolidation that failed is a failed
    mutation.
    """
    for position in range(7):
        outcome = mutate(reference(fail_on=lambda number, at=position: number == at), MIXED)
        assert (outcome.counts["calls"], outcome.counts["failed_calls"]) == (7, 1)
        assert outcome.error.kind == "ServerFailed"
        assert outcome.reason == ("call_failed" if position == 6 else "child")
    for stage, calls in ((range(4), 4), (range(4, 6), 6)):
        outcome = mutate(reference(fail_on=lambda number, at=stage: number in at), MIXED)
        assert (outcome.reason, outcome.child, outcome.failed) == ("call_failed", None, True)
        assert outcome.counts["calls"] == calls
    both = mutate(reference(fail_on=lambda number: number in (0, 1)), MIXED)
    assert (both.counts["calls"], both.reason) == (6, "child"), (
        "a problem without summaries is left out"
    )


def test_bad_replies():
    assert mutate(reference(critique="I have no idea."), MIXED).reason == "unreadable"
    assert mutate(reference(plan="Nice proposals!"), MIXED).reason == "unreadable"
    assert mutate(reference(critique="[]"), MIXED).reason == "no_change"
    too_long = edits({"op": "add", "text": "word " * 33}, {"op": "remove", "id": "G0"})
    outcome = mutate(reference(critique=too_long), MIXED)
    assert (outcome.reason, outcome.child) == ("unchanged", None)
    assert (outcome.counts["refused/too_long"], outcome.counts["refused/not_allowed"]) == (2, 2)
    one_bad = mutate(
        reference(
            critique=lambda request: (
                "?" if "question a" in request else edits({"op": "add", "text": "New."})
            )
        ),
        MIXED,
    )
    assert (one_bad.child.principles[-1], one_bad.counts["unread/no_json"]) == ("New.", 1)
    refused = mutate(
        reference(
            plan=edits({"op": "add", "text": "x"}, {"op": "modify", "id": "G9", "text": "y"})
        ),
        MIXED,
    )
    assert refused.child.principles[-1] == "Verify the result.", (
        "the draft stands where the plan does not fit"
    )


def test_at_most_k_edits_a_problem_and_no_edit_of_anothers():
    critique = edits(
        *({"op": "add", "text": f"New {n}."} for n in range(3)),
        {"op": "modify", "id": "G2", "text": "x"},
    )
    outcome = mutate(reference(critique=critique), PromptResult(PROMPT, (problem("a", 1.0, 0.0),)))
    assert outcome.child.principles == (*PROMPT.principles, "New 0.", "New 1.")
    assert outcome.counts["refused/too_many"] == 2
    mine = edits({"op": "modify", "id": "G2", "text": "Mine."})
    new = edits({"op": "add", "text": "New."})
    outcome = mutate(
        reference(critique=lambda request: mine if "question c" in request else new), MIXED
    )
    assert (outcome.child.principles[2:], outcome.counts["refused/unknown_id"]) == (("New.",), 1)


def test_long_attempts_are_shortened():
    chat = reference()
    long = ProblemResult(
        "q", "t", (Attempt("try A" + "x" * 30_000 + "END", 1.0), Attempt("try B", 0.0))
    )
    mutate(chat, PromptResult(PROMPT, (long,)))
    assert "characters left out" in chat.calls[0][0]["content"]
    assert "xEND\n" in chat.calls[0][0]["content"]


def test_the_plan_decides_about_suggested_wordings():
    """A.5: local `modify` edits are suggestions, seen by the plan and aggregated by its own
    `modify`; what is added locally is in the draft.
    """
    modify = edits(
        {"op": "modify", "id": "G0", "text": "Check tiny cases."}, {"op": "add", "text": "New."}
    )
    chat = reference(critique=modify, plan="[]")
    outcome = mutate(chat, MIXED)
    assert outcome.child.principles == ("Check small cases.", "Name the unknowns.", "New."), (
        "an empty plan keeps none"
    )
    turn = chat.calls[-1][0]["content"]
    assert "[G0]. Check small cases." in turn and turn.count("- modify G0: Check tiny cases.") == 2
    only = mutate(
        reference(critique=edits({"op": "modify", "id": "G1", "text": "Name all."}), plan="[]"),
        MIXED,
    )
    assert (only.reason, only.child) == ("no_change", None)
    plan = edits({"op": "modify", "id": "G0", "text": "Check tiny and odd cases."})
    assert (
        mutate(reference(critique=modify, plan=plan), MIXED).child.principles[0]
        == "Check tiny and odd cases."
    )
    added = mutate(
        reference(
            critique=edits({"op": "add", "text": "A."}, {"op": "add", "text": "B."}), plan="[]"
        ),
        MIXED,
    )
    assert added.child.principles[2:] == ("A.", "B."), "lists of `add` alone as ever"


def test_the_released_crossover_form_is_read():
    """`option` and `remove_id` are the released prompts' names."""
    cross = edits(
        {"option": "remove", "remove_id": "G0", "reason": "it lost"},
        {"option": "add", "principle": "New."},
    )
    child = crossover(reference(cross=cross), trials([1.0, 0.0], [0.0, 0.6])).child
    assert child.principles == ("New.",)


BLOCK = "<<<<<<< SEARCH\nSearch once.\n=======\nSearch twice.\n>>>>>>> REPLACE"


def test_free_text():
    chat = reference(critique=BLOCK + "\n" + BLOCK.replace("once", "never"), plan=BLOCK)
    outcome = mutate(chat, PromptResult(TEXT, MIXED.problems))
    assert outcome.child.text == "Search twice.\nThen answer."
    assert outcome.child.principles is None
    assert outcome.counts["refused/not_found"] == 2
    turn = chat.calls[-1][0]["content"]
    assert turn.count(BLOCK) == 2
    assert "Search once.\nThen answer." in turn
    assert (
        mutate(
            reference(critique=BLOCK, plan="NO CHANGE"), PromptResult(TEXT, MIXED.problems)
        ).reason
        == "no_change"
    )
    assert (
        mutate(reference(critique="NO CHANGE"), PromptResult(TEXT, MIXED.problems)).reason
        == "no_change"
    )
    assert (
        mutate(reference(critique=BLOCK, plan="Hm."), PromptResult(TEXT, MIXED.problems)).reason
        == "unreadable"
    )


# Crossover
# -----------------------------------------------------------------------------------------------------------


def trials(*rows, prompts=None):
    """Trials with the given rows of the matrix; each cell is one rollout."""
    prompts = prompts or [
        SystemPrompt(f"Prompt {n}.", (f"Rule {n}.",), id=10 + n) for n in range(len(rows))
    ]
    return [
        PromptResult(prompt, tuple(problem(f"{column}", value) for column, value in enumerate(row)))
        for prompt, row in zip(prompts, rows, strict=True)
    ]


def test_crossover_shows_sets_and_their_wins():
    chat = reference(
        cross=edits(
            {"op": "add", "text": "Rule of B."}, {"op": "remove", "id": "A.G0", "reason": "1"}
        )
    )
    batch = trials([1.0, 0.0, 0.5, 0.0], [0.0, 1.0, 1.0, 0.9], [0.0, 0.0, 0.0, 0.0])
    outcome = crossover(chat, batch)
    (call,) = chat.calls
    sets = re.findall(
        r'<set name="(.)" mean_reward="([\d.]+)">.*?</set>', call[0]["content"], re.DOTALL
    )
    assert sets == [("A", "0.725"), ("B", "0.375"), ("C", "0.000")]
    a, b, c = re.findall(r"<set .*?</set>", call[0]["content"], re.DOTALL)
    assert "Prompt 1." in a
    assert re.findall(r"question (\d)\nRight answer: truth (\d)", a) == [
        ("1", "1"),
        ("2", "2"),
        ("3", "3"),
    ]
    assert re.findall(r"question (\d)", b) == ["0"]
    assert "on 0 of the problems" in c
    assert outcome.child.principles == ("Rule of B.",)
    assert (outcome.child.preamble, outcome.child.operator, outcome.child.parents) == (
        "Prompt 1.",
        "crossover",
        (11, 10, 12),
    )


@pytest.mark.parametrize(
    "rows",
    [
        [[1.0, 1.0], [0.0, 0.5]],  # one winner only
        [[1.0, 0.0], [1.0, 0.0]],  # ties
        [[1.0, 0.0, 0.0], [0.5, 0.9, 0.0], [0.9, 0.8, 0.9]][:1],  # alone
        [
            [0.9, 0.0, 1.0, 0.0],
            [1.0, 0.4, 0.0, 0.0],
            [0.9, 0.4, 1.0, 0.0],
        ],  # the best over all wins nothing alone
        [[1.0, None], [None, 1.0]],  # nothing in common
        [],
    ],
)
def test_too_few_winners(rows):
    chat = reference()
    outcome = crossover(chat, trials(*rows))
    assert (outcome.reason, outcome.child, outcome.failed, chat.calls) == (
        "too_few_winners",
        None,
        False,
        [],
    )


def test_crossover_without_the_unscorable_and_with_doubles():
    first, second, third = (SystemPrompt(f"P{n}", (), id=n) for n in range(3))
    batch = trials(
        [1.0, 0.0], [0.0, 0.6], [None, None], [1.0, 0.0], prompts=[first, second, third, first]
    )
    outcome = crossover(reference(), batch)
    assert outcome.child.parents == (0, 1)
    with pytest.raises(ValueError, match="same problems"):
        crossover(reference(), [batch[0], MIXED])


def test_crossover_fails_as_mutation_does():
    batch = trials([1.0, 0.0], [0.0, 0.6])
    assert crossover(reference(fail_on=lambda number: True), batch).reason == "call_failed"
    assert crossover(reference(cross="Set A is best."), batch).reason == "unreadable"
    outcome = crossover(
        reference(cross=edits({"op": "modify", "id": "B.G0", "text": "Mine now."})), batch
    )
    assert (outcome.reason, dict(outcome.counts)["refused/unknown_id"]) == ("unchanged", 1)


# Correction
# ----------------------------------------------------------------------------------------------------------


def correct(*args, **options):
    return asyncio.run(operators.correct(*args, **options))


def test_principles_are_checked_one_by_one_and_corrected():
    """Table 1: what holds in some cases only is given its condition, or goes; nobody touches
    another's principle.
    """
    prompt = SystemPrompt(
        "Solve.",
        ("The minimum is the bound.", "Check small cases.", "Guess.", "Never guess."),
        id=3,
    )
    replies = {
        "The minimum is": edits(
            {"op": "modify", "id": "G0", "text": "The minimum is at least the bound."}
        ),
        "Check small": "It holds. []",
        "Guess.": edits(
            {"op": "remove", "id": "G2", "reason": "it loses"}, {"op": "remove", "id": "G1"}
        ),
        "Never guess": edits({"op": "modify", "id": "G0", "text": "Mine."}),
    }
    chat = ScriptedChat(
        lambda messages: next(
            text
            for start, text in replies.items()
            if f"]. {start}" in messages[0]["content"].split("<instruction>")[1]
        )
    )
    outcome = correct(chat, prompt, temperature=0.2)
    assert outcome.child.principles == (
        "The minimum is at least the bound.",
        "Check small cases.",
        "Never guess.",
    )
    assert (outcome.child.operator, outcome.child.parents, outcome.counts["calls"]) == (
        "correction",
        (3,),
        4,
    )
    assert outcome.counts["refused/too_many"] == outcome.counts["refused/unknown_id"] == 1
    assert all(prompt.text in call[0]["content"] for call in chat.calls)
    assert chat.sampling[0] == {"temperature": 0.2}
    assert [edit["reason"] for edit in outcome.trace.edits][1] == "it loses"


def test_correction_fails_as_the_others_do():
    assert correct(ScriptedChat(["[]"]), PROMPT).reason == "no_change"
    assert (
        correct(ScriptedChat(["[]"], fail_on=lambda number: True), PROMPT).reason == "call_failed"
    )
    assert correct(ScriptedChat(["Fine."]), PROMPT).reason == "unreadable"
    nobody = ScriptedChat(["[]"])
    assert (correct(nobody, TEXT).reason, nobody.calls) == ("no_evidence", []), (
        "free text has no principles"
    )


# Side by side
# -------------------------------------------------------------------------------------------------------


def test_both_operators_and_all_their_calls_run_side_by_side():
    chat = reference(latency=0.1)
    batch = trials([1.0, 0.0], [0.0, 0.6])
    outcomes = asyncio.run(propose_children(chat, ReflectionTask(0, MIXED, tuple(batch))))
    assert [outcome.operator for outcome in outcomes] == ["mutation", "crossover"]
    assert sorted(map(task, chat.calls[:5])) == ["let"] + ["retell"] * 4, (
        "what waits for nothing goes out at once"
    )
    assert [task(call) for call in chat.calls[5:]] == ["draw"] * 2 + ["turn"]
    assert [outcome.reason for outcome in outcomes] == ["child", "child"]
    assert [
        result.operator for result in asyncio.run(propose_children(chat, ReflectionTask(0, MIXED)))
    ] == ["mutation"]


def test_a_critique_waits_for_its_own_problem_alone():
    """The other problem's summary comes only after this problem's critique was asked for."""
    script = reference().script
    tasks = []

    async def waits(messages, **_):
        request = messages[0]["content"]
        tasks.append(task(messages))
        while "try a0" in request and task(messages) == "retell" and "draw" not in tasks:
            await asyncio.sleep(0)
        return Reply(script(messages))

    outcome = asyncio.run(asyncio.wait_for(operators.mutate(waits, MIXED), 60))
    assert tasks == ["retell"] * 4 + ["draw"] * 2 + ["turn"] and outcome.child is not None


def test_a_model_that_raises_fails_its_own_call():
    async def broken(messages, **_):
        raise KeyError("x")

    outcome = mutate(broken, MIXED)
    assert (outcome.reason, outcome.counts["failed_calls"], outcome.error.kind) == (
        "call_failed",
        4,
        "ServerFailed",
    )


def test_the_fatal_error_is_the_one_that_is_reported():
    replies = iter(
        [Reply(error=None, text="s", usage=Usage(1, 1, 0.5))] * 3
        + [Reply(error=BudgetExceeded("spent"))] * 9
    )
    outcome = mutate(ScriptedChat(lambda messages: next(replies)), MIXED)
    assert (outcome.reason, outcome.error.fatal, outcome.usage.cost_usd) == (
        "call_failed",
        True,
        1.5,
    )


def test_settings_are_checked():
    with pytest.raises(ValueError, match="reflect_on must be"):
        ESPLSettings(reflect_on="all")
    with pytest.raises(ValueError, match="at least 1"):
        ESPLSettings(max_ops=0)
    with pytest.raises(ValueError, match="reference_sampling must be a JSON object"):
        ESPLSettings(reference_sampling="0.7")
    assert ESPLSettings(reference_sampling='{"temperature": 0.7}').reference_sampling == {
        "temperature": 0.7
    }


def test_every_template_names_its_task():
    tasks = [
        text.splitlines()[0]
        for text in (
            templates.SUMMARISE,
            templates.CRITIQUE,
            templates.CONSOLIDATE,
            templates.CROSSOVER,
        )
    ]
    assert len(set(tasks)) == 4
    assert all(line.startswith("Task: ") for line in tasks)
