"""System prompts and their edits: rendering, round trips, what is refused and why."""

import json

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.evolution import Draft, Edit, SystemPrompt

PROMPT = SystemPrompt(
    "Solve the problem.", ("Check small cases.", "Name the unknowns.", "Look for symmetry."), id=7
)

words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).filter(
    lambda text: text.split()
)
principles = st.lists(words, max_size=6).map(tuple)
ids = st.sampled_from([f"G{n}" for n in range(9)] + ["B.G1", "x", ""])
edits = st.builds(
    Edit,
    op=st.sampled_from(["add", "modify", "merge", "remove", "replace", "frobnicate"]),
    ids=st.lists(ids, max_size=3).map(tuple),
    text=st.sampled_from(["", " ", "Check small cases.", "New A.", "New B.", "long " * 40]),
    search=st.sampled_from(["", "a", "ab", "zzz"]),
)


def apply_edits(prompt, edits, max_words=32, **options):
    draft = Draft(prompt, max_words)
    report = draft.apply(edits, **options)
    return draft.finish(), report


def test_rendering_and_parsing():
    text = (
        "Solve the problem.\n[G0]. Check small cases.\n[G1]. Name the unknowns.\n[G2]. Look for "
        "symmetry."
    )
    assert PROMPT.text == str(PROMPT) == text
    assert SystemPrompt.parse(text).principles == PROMPT.principles
    assert SystemPrompt("Free {text}\n").text == "Free {text}\n"
    assert SystemPrompt("Only a preamble.", ()).text == "Only a preamble."
    assert SystemPrompt("", ("One.",)).text == "[G0]. One."


@pytest.mark.parametrize("form", ["[G{}]. ", "[G{}] ", "G{}: ", "  [G{}]: ", "G{}. "])
def test_ways_to_write_a_principle(form):
    text = (
        "Preamble\n\n"
        + form.format(3)
        + "First,\n   over two lines.\n"
        + form.format(9)
        + "Second."
    )
    parsed = SystemPrompt.parse(text)
    assert (parsed.preamble, parsed.principles) == (
        "Preamble",
        ("First, over two lines.", "Second."),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Think step by step.", "no principle found .* SystemPrompt\\(text, \\(\\)\\)"),
        (
            "P\n[G0]. One.\n\nAnd answer briefly.",
            "after principle 0 belongs to none: 'And answer briefly.'",
        ),
        ("P\n[G0]. \n[G1]. One.", "principle 0 .* empty"),
    ],
)
def test_what_cannot_be_parsed(text, message):
    with pytest.raises(ValueError, match=message):
        SystemPrompt.parse(text)


def test_a_preamble_with_principles_in_it_is_refused():
    with pytest.raises(ValueError, match="use SystemPrompt.parse"):
        SystemPrompt("P\n[G0]. One.", ())


@given(preamble=st.text(max_size=40), principles=principles.filter(bool))
def test_parse_is_the_inverse_of_text(preamble, principles):
    try:
        prompt = SystemPrompt(preamble, principles)
    except ValueError:
        return  # the preamble happened to look like a principle
    again = SystemPrompt.parse(prompt.text)
    assert (again.preamble, again.principles) == (prompt.preamble, prompt.principles)
    assert SystemPrompt.from_json(json.loads(json.dumps(prompt.to_json()))) == prompt


def test_json_round_trip_keeps_everything():
    for prompt in (
        SystemPrompt("x", None, 3, (1, 2), "crossover", 9),
        PROMPT,
        SystemPrompt("y", ()),
    ):
        assert SystemPrompt.from_json(json.loads(json.dumps(prompt.to_json()))) == prompt


def test_into_the_conversation():
    prompt = SystemPrompt("Be brief.")
    user = {"role": "user", "content": "2+2?"}
    assert prompt.messages("2+2?") == [{"role": "system", "content": "Be brief."}, user]
    given_system = [{"role": "system", "content": "Use tools."}, user]
    assert prompt.messages(given_system)[0]["content"] == "Be brief.\n\nUse tools."
    assert given_system[0]["content"] == "Use tools.", (
        "the conversation that was passed in is not changed"
    )
    assert prompt.messages([user], "user") == [{"role": "user", "content": "Be brief.\n\n2+2?"}]
    assert prompt.messages([user], "after") == [{"role": "user", "content": "2+2?\n\nBe brief."}], (
        "as the release has it"
    )
    assert SystemPrompt("").messages([user]) == [user]
    with pytest.raises(ValueError, match="place must be"):
        prompt.messages("x", "assistant")
    with pytest.raises(ValueError, match="no user message"):
        prompt.messages([{"role": "system", "content": "x"}], "user")


@pytest.mark.parametrize("place", ["system", "user", "after"])
@pytest.mark.parametrize("text", ["Be brief.", "Be brief.\n[G0]. Ask.", ""])
def test_out_of_the_conversation_again(place, text):
    user = {"role": "user", "content": "\n\n2+2?"}
    system = {"role": "system", "content": "Use tools."}
    prompt = SystemPrompt.of(text)
    for conversation in ([user], [system, user]):
        assert prompt.left_out(prompt.messages(conversation, place)) == conversation


# Edits of principles
# -------------------------------------------------------------------------------------------------


def test_each_operation():
    child, report = apply_edits(
        PROMPT,
        [
            Edit("modify", ("G0",), "Check  small\ncases first."),
            Edit("add", text="Verify the result."),
            Edit("merge", ("G1", "G2"), "Name unknowns and symmetries."),
            Edit("remove", ("G3",)),
        ],
    )
    assert child.principles == ("Check small cases first.", "Name unknowns and symmetries.")
    assert (child.preamble, child.parents, child.id) == ("Solve the problem.", (7,), None)
    assert (len(report.applied), report.refused) == (4, [])
    assert PROMPT.principles[0] == "Check small cases.", "the parent is never changed"


REFUSED = {
    "unknown_id": Edit("modify", ("G3",), "x"),
    "another set's id": Edit("modify", ("B.G1",), "x"),
    "empty": Edit("add", text=" \n"),
    "too_long": Edit("add", text="word " * 33),
    "duplicate": Edit("add", text="check small  cases"),
    "unchanged": Edit("modify", ("G0",), "Check small cases."),
    "too_few_ids": Edit("merge", ("G1", "G1"), "x"),
    "too_many_ids": Edit("modify", ("G1", "G2"), "x"),
    "not_allowed": Edit("replace", text="x", search="Check"),
}


@pytest.mark.parametrize(("reason", "edit"), REFUSED.items(), ids=REFUSED)
def test_what_is_refused_and_the_rest_applied(reason, edit):
    child, report = apply_edits(PROMPT, [edit, Edit("add", text="Verify.")])
    assert [why for _, why in report.refused] == ["unknown_id" if " " in reason else reason]
    assert child.principles == (*PROMPT.principles, "Verify.")


def test_the_length_limit_is_inclusive_and_can_be_set():
    edit = Edit("add", text="word " * 32)
    assert apply_edits(PROMPT, [edit])[1].applied
    assert apply_edits(PROMPT, [edit], max_words=31)[1].counts == {"too_long": 1}


def test_merged_and_removed_principles_do_not_come_back():
    merge = Edit("merge", ("G0", "G1"), "Both.")
    remove = Edit("remove", ("G2",))
    late = [
        Edit("modify", ("G0",), "Again."),
        Edit("merge", ("G1", "G3"), "x"),
        Edit("remove", ("G2",)),
    ]
    child, report = apply_edits(PROMPT, [merge, remove, *late])
    assert child.principles == ("Both.",)
    assert report.counts == {"merged": 2, "removed": 1}


def test_ids_are_never_given_twice():
    draft = Draft(PROMPT)
    draft.apply([Edit("add", text="New."), Edit("remove", ("G3",)), Edit("add", text="Newer.")])
    assert draft.principles["G4"] == "Newer."
    assert "G3" not in draft.principles


def test_limit_counts_what_was_applied():
    edits = [Edit("modify", ("G9",), "x"), *(Edit("add", text=f"New {n}.") for n in range(3))]
    _, report = apply_edits(PROMPT, edits, limit=2)
    assert (len(report.applied), report.counts) == (2, {"unknown_id": 1, "too_many": 1})


def test_a_writer_cannot_touch_what_it_did_not_see():
    draft = Draft(PROMPT)
    draft.apply([Edit("add", text="Another problem's.")])
    assert draft.apply([Edit("modify", ("G3",), "x")], visible_ids={"G0", "G1", "G2"}).counts == {
        "unknown_id": 1
    }


@given(
    start=principles, given_edits=st.lists(edits, max_size=12), limit=st.none() | st.integers(0, 3)
)
def test_edits_never_raise_and_are_all_accounted_for(start, given_edits, limit):
    for prompt in (SystemPrompt("aab", start), SystemPrompt("aab")):
        child, report = apply_edits(prompt, given_edits, limit=limit)
        assert len(report.applied) + len(report.refused) == len(given_edits)
        assert limit is None or len(report.applied) <= limit
        assert report.applied or child is prompt
        assert (child.principles is None) == (prompt.principles is None)
        assert all(
            len(new.split()) <= 32
            for new in child.principles or ()
            if new not in (prompt.principles or ())
        )


# Free text
# -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("search", "text", "reason"),
    [
        ("Search once.", "Search twice.", ""),
        ("Answer", "Reply", "ambiguous"),
        ("answer", "Reply", "not_found"),
        ("", "x", "empty"),
        ("Search once.", "Search once.", "unchanged"),
    ],
)
def test_free_text(search, text, reason):
    prompt = SystemPrompt("Search once. Answer: short. Answer in English.")
    child, report = apply_edits(
        prompt, [Edit("replace", text=text, search=search), Edit("add", text="x")]
    )
    assert report.counts == ({reason: 1, "not_allowed": 1} if reason else {"not_allowed": 1})
    assert child.text == (prompt.text if reason else prompt.text.replace(search, text))


def test_free_text_overlapping_occurrences_are_ambiguous():
    assert apply_edits(SystemPrompt("aaa"), [Edit("replace", text="b", search="aa")])[1].counts == {
        "ambiguous": 1
    }
    assert apply_edits(SystemPrompt("aaa"), [Edit("replace", text="", search="aaa")])[1].counts == {
        "empty": 1
    }
