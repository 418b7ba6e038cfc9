"""Mutation in one call: what is shown, what a reply may be, what failures do; in `evolve` and
resumed.
"""

import asyncio
import json

import pytest

from agentic_prompting.evolution import (
    Attempt,
    ESPLSettings,
    EvolveConfig,
    ProblemResult,
    PromptResult,
    ReflectionTask,
    SystemPrompt,
    crossover,
    evolve,
    parse_edits,
    propose_children,
    revise,
    templates,
)
from agentic_prompting.llm import Reply, ScriptedChat, ServerFailed
from agentic_prompting.rewards import exact_match_reward
from support.evolving import ROOT, ROWS, SETTINGS, WORDS, Policy
from support.operators import MIXED, PROMPT, problem

ONE_CALL = {"reflection": "one_call", "reflect_on": "imperfect"}


def object_of(*items):
    return json.dumps({"edits": items})


def ask(chat, result=MIXED, **changes):
    return asyncio.run(revise(chat, result, ESPLSettings(**{**ONE_CALL, **changes})))


NEW = {"op": "add", "text": "Read the reply."}


def test_one_call_shows_the_prompt_and_the_failed_attempts():
    chat = ScriptedChat([object_of(NEW)])
    outcome = ask(chat)
    (call,) = chat.calls
    request = call[0]["content"]
    assert request.startswith("Task: revise instructions") and len(call) == 1
    for piece in (
        PROMPT.text,
        "question a",
        "truth d",
        "try a1",
        "try c0",
        "try d0",
        "try d1",
        templates.SCHEMA,
    ):
        assert piece in request
    for piece in (
        "question b",
        "try a0",
        "try c1",
        "try c2",
        "{schema}",
        "{failures}",
        "{max_ops}",
    ):
        assert piece not in request, (
            "right attempts and those that failed for outside reasons are not shown"
        )
    assert "with 6 changes at most" in request, "two for each of the three problems"
    assert outcome.child.principles == (*PROMPT.principles, "Read the reply.")
    assert (outcome.child.parents, outcome.child.operator, outcome.operator) == (
        (3,),
        "mutation",
        "mutation",
    )
    assert dict(outcome.counts) == {"calls": 1, "failed_calls": 0, "applied": 1}
    assert [shown["question"] for shown in outcome.trace.problems] == [
        "question a",
        "question c",
        "question d",
    ]
    assert (
        ask(ScriptedChat([object_of(NEW)]), reflect_on="mixed").trace.problems[-1]["question"]
        == "question c"
    )


def test_failures_are_spread_over_the_problems():
    many = [problem(name, *([0.0] * 8)) for name in "abcde"]
    chat = ScriptedChat([object_of(NEW)])
    ask(chat, PromptResult(PROMPT, tuple(many)))
    request = chat.calls[0][0]["content"]
    assert request.count("<attempt ") == 12
    assert [request.count(f"try {name}") for name in "abcde"] == [3, 3, 2, 2, 2]
    long = ProblemResult("q", "t", (Attempt("A" + "x" * 30_000 + "END", 0.0),))
    chat = ScriptedChat([object_of(NEW)])
    ask(chat, PromptResult(PROMPT, (long,)))
    assert len(chat.calls[0][0]["content"]) < 8_000 and "xEND" in chat.calls[0][0]["content"]


def test_values_are_not_templates():
    strange = PromptResult(
        PROMPT, (ProblemResult("{prompt} {x}", "{schema}", (Attempt("{failures}", 0.0),)),)
    )
    chat = ScriptedChat([object_of(NEW)])
    ask(chat, strange)
    request = chat.calls[0][0]["content"]
    assert "{prompt} {x}\nRight answer: {schema}" in request and "{failures}\n</attempt>" in request


def test_all_four_edits_and_free_text():
    four = object_of(
        NEW,
        {"op": "modify", "ids": ["G0"], "text": "Check tiny cases."},
        {"op": "merge", "ids": ["G0", "G1"], "text": "Check and name."},
        {"op": "remove", "ids": ["G2"]},
    )
    assert ask(ScriptedChat([f"I compared them.\n```json\n{four}\n```"])).child.principles == (
        "Check and name.",
    )
    text = PromptResult(SystemPrompt("Search once.\nThen answer.", id=4), MIXED.problems)
    block = object_of({"op": "replace", "search": "once", "text": "twice"})
    assert ask(ScriptedChat([block]), text).child.text == "Search twice.\nThen answer."
    assert (
        ask(
            ScriptedChat([object_of({"op": "replace", "search": "never", "text": "x"})]), text
        ).reason
        == "unchanged"
    )


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("I would change nothing.", "unreadable"),
        ('{"edits": [{"op": "add", "text": "cut o', "unreadable"),
        ('{"edits": "none"}', "unreadable"),
        ('{"edits": 3}', "unreadable"),
        ('{"changes": {}}', "unreadable"),
        ("null", "unreadable"),
        (object_of({"op": "paint", "text": "it red"}), "unreadable"),
        (object_of(["add", "x"]), "unreadable"),
        (object_of({"op": "add"}), "unchanged"),
        (object_of({"op": "modify", "ids": ["G9"], "text": "x"}), "unchanged"),
        (object_of({"op": "add", "text": "word " * 40}), "unchanged"),
        ("[", "unreadable"),
        ('I compared them.\n```json\n{"edits": [', "unreadable"),
        ("", "call_failed"),
    ],
)
def test_a_reply_that_is_none_is_a_failed_reflection(reply, reason):
    outcome = ask(ScriptedChat([reply]))
    assert (outcome.reason, outcome.child, outcome.failed, outcome.counts["calls"]) == (
        reason,
        None,
        True,
        1,
    )
    assert outcome.metrics()["evolution/mutation_failed"] == 1.0


@pytest.mark.parametrize(
    "reply", [object_of(), "[]", "Nothing to fix.\n```json\n[]\n```", '{"edits": []']
)
def test_an_empty_list_of_edits_is_no_failure(reply):
    outcome = ask(ScriptedChat([reply]))
    assert (outcome.reason, outcome.child, outcome.failed) == ("no_change", None, False)
    metrics = outcome.metrics()
    assert metrics["evolution/no_change"] == 1.0
    assert metrics["evolution/mutation_failed"] == metrics["evolution/unchanged"] == 0.0


def test_edits_that_cancel_are_not_no_change():
    texts = [PROMPT.principles[0] + " Now.", PROMPT.principles[0]]
    edits = [{"op": "modify", "ids": ["G0"], "text": text} for text in texts]
    assert ask(ScriptedChat([object_of(*edits)])).reason == "unchanged"


def test_a_part_that_cannot_be_read_leaves_the_others():
    outcome = ask(ScriptedChat([object_of(NEW, {"op": "paint", "text": "x"})]))
    assert outcome.child.principles[-1] == "Read the reply."
    assert outcome.counts["unread/unknown_operation"] == 1


def test_failed_calls_and_no_evidence():
    outcome = ask(ScriptedChat([object_of(NEW)], fail_on=lambda number: True))
    assert (outcome.reason, outcome.error.kind, outcome.counts["failed_calls"]) == (
        "call_failed",
        "ServerFailed",
        1,
    )
    nobody = ScriptedChat(["x"])
    assert ask(nobody, PromptResult(PROMPT, (problem("a", 1.0),))).reason == "no_evidence"
    assert nobody.calls == []


def test_it_takes_the_place_of_the_mutation_alone():
    chat = ScriptedChat([object_of(NEW)])
    task = ReflectionTask(0, MIXED, (MIXED,))
    outcomes = asyncio.run(propose_children(chat, task, ESPLSettings(**ONE_CALL)))
    assert [outcome.operator for outcome in outcomes] == ["mutation", "crossover"]
    assert len(chat.calls) == 1
    with pytest.raises(ValueError, match="reflection must be one of paper, one_call"):
        ESPLSettings(reflection="two_calls")


def test_the_schema_is_the_form_that_is_read():
    schema = json.loads(templates.SCHEMA)
    operations = schema["properties"]["edits"]["items"]["properties"]["op"]["enum"]
    for op in operations:
        item = {"op": op, "ids": ["G0"], "search": "a" if op == "replace" else "", "text": "b"}
        (edit,) = parse_edits(object_of(item)).edits
        problems = parse_edits(object_of(item)).problems
        assert (edit.op, problems) == (op, ())


def learn(messages):
    """One edit for each word that a refusal names, as the schema has it."""
    request = messages[0]["content"]
    assert request.startswith("Task: revise")
    taught_words = {word for word in WORDS.values() if f"Always mention {word}." in request}
    new_words = [
        word for word in WORDS.values() if f"say {word}" in request and word not in taught_words
    ]
    return object_of(*({"op": "add", "text": f"Always mention {word}."} for word in new_words[:1]))


def test_evolve_with_one_call_learns_and_resumes_bit_for_bit(tmp_path):
    options = {"reflection": "one_call", "p_crossover": 0.0}
    config = EvolveConfig(**{**vars(SETTINGS), **options, "best_rule": "mean"})

    def run(steps, checkpoint):
        settings = EvolveConfig(**{**vars(config), "steps": steps})
        return evolve(
            Policy(),
            ScriptedChat(learn),
            ROWS,
            exact_match_reward,
            ROOT,
            settings,
            checkpoint=checkpoint,
        )

    whole = run(12, tmp_path / "whole.json")
    assert all(word in whole.best.text for word in WORDS.values())
    calls = [
        operator["counts"]["calls"]
        for log in whole.steps
        for operator in log.operators
        if operator["counts"]
    ]
    assert set(calls) == {1}
    run(5, tmp_path / "parts.json")
    assert run(12, tmp_path / "parts.json").population.state_dict() == whole.population.state_dict()
    assert (tmp_path / "parts.json").read_text() == (tmp_path / "whole.json").read_text()


def test_the_sandbox_reads_the_call():
    from agentic_prompting.sandbox import GuardedReflector

    refused = Attempt("[reply] no . the currency needs the word birch .", 0.0)
    shown = PromptResult(SystemPrompt("rules", (), id=0), (ProblemResult("q", "x", (refused,)),))
    assert ask(GuardedReflector(0.0), shown).child.principles == ("say currency birch",)


# `reflection="rewrite"`: the whole instructions in the place of edits.

REWRITE = {**ONE_CALL, "reflection": "rewrite"}


def rewrite(reply, prompt=PROMPT):
    result = PromptResult(prompt, MIXED.problems)
    chat = ScriptedChat([reply])
    return asyncio.run(revise(chat, result, ESPLSettings(**REWRITE))), chat.calls[0][0]["content"]


def test_instructions_are_written_anew():
    outcome, request = rewrite(
        "First draft: <instructions>old</instructions>. Better:\n"
        "<instructions>\nSolve it.\n[G0]. Read the reply.\n[G1]. Name the unknowns.\n</instructions>\nDone."
    )
    assert "question a" in request and "between <instructions> and </instructions>" in request
    assert templates.SCHEMA not in request, "no edits are asked for"
    child = outcome.child
    assert (child.preamble, child.principles) == (
        "Solve it.",
        ("Read the reply.", "Name the unknowns."),
    )
    assert (child.parents, child.operator) == (PROMPT.id and (PROMPT.id,), "mutation")
    (edit,) = outcome.trace.edits
    assert (edit["op"], edit["refused"], edit["search"]) == ("replace", None, PROMPT.text)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        ("Write dates as day/month/year.", "unreadable"),
        ("<instructions>Write dates as day", "unreadable"),
        ("<instructions> \n </instructions>", "unreadable"),
        ("<instructions>[G0]. Add.\n\nA paragraph of nothing.</instructions>", "unreadable"),
        (f"<instructions>{'word ' * 501}</instructions>", "unreadable"),
        (f"<instructions>{PROMPT.text}</instructions>", "no_change"),
        (None, "call_failed"),
    ],
)
def test_what_is_no_new_set_of_instructions_has_no_child(reply, reason):
    outcome, _ = rewrite(reply if reply is not None else Reply(error=ServerFailed("down")))
    assert (outcome.child, outcome.reason) == (None, reason)


def test_free_text_and_a_bare_preamble_stay_what_they_are():
    reply = "<instructions>Answer with\nthe date: day/month/year.</instructions>"
    for prompt in (SystemPrompt("Answer."), SystemPrompt("Answer.", ())):
        outcome, _ = rewrite(reply, prompt)
        assert outcome.child.text == "Answer with\nthe date: day/month/year."
        assert outcome.child.principles == prompt.principles


def test_a_crossover_is_written_anew_too():
    other = SystemPrompt("Solve it.", ("Draw it.",), id=9)
    results = [
        PromptResult(PROMPT, (problem("a", 1.0), problem("b", 0.0))),
        PromptResult(other, (problem("a", 0.0), problem("b", 1.0))),
    ]
    chat = ScriptedChat(["<instructions>Solve it, and draw it.</instructions>"])
    outcome = asyncio.run(crossover(chat, results, ESPLSettings(**REWRITE)))
    assert outcome.child.text == "Solve it, and draw it." and outcome.child.operator == "crossover"
    assert "takes the place of set A" in chat.calls[0][0]["content"]
