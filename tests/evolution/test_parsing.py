"""What LLMs really send, read into edits."""

import json

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.evolution import Edit, parse_edits
from agentic_prompting.evolution.parsing import escape_latex, principle_id

A = Edit("add", text="a")
SAID = {
    "bare": '[{"op": "add", "text": "a"}]',
    "fenced": 'Sure:\n```json\n[{"op": "add", "text": "a"}]\n```\nThis extends [G3].',
    "fence without a name": '```\n[{"op": "add", "text": "a"}]\n```',
    "an object": 'I propose {"op": "add", "text": "a"} because of {x}.',
    "a wrapper": '{"analysis": "fine", "edits": [{"op": "add", "text": "a"}]}',
    "JSON lines": '{"op": "add", "text": "a"}\n{"op": "frobnicate"}',
    "comments": '[ // say "why"\n {"op": "add", /* it\'s\n new */ "text": "a"} # the "end"\n]',
    "trailing commas": '[{"op": "add", "text": "a",},]',
    "single quotes": "[{'op': 'add', 'text': 'a'}]",
    "bare keys": "[{op: 'add', text: 'a'}]",
    "other names": '[{"Operation": "ADD", "principle": "a"}]',
    "no end": '[{"op": "add", "text": "a"}',
    "no end in a fence": '```json\n{"edits": [{"op": "add", "text": "a"}]\n```',
    "cut off": '[{"op": "add", "text": "a"}, {"op": "modify", "id": "G1", "text": "half a sen',
    "an id of its own": '[{"op": "add", "id": "G9", "text": "[G9]. a"}]',
    "several, the last counts": (
        '```json\n[{"op": "add", "text": "b"}]\n```\nBetter:\n[{"op": "add", "text": "a"}]'
    ),
    "a broken one first": (
        '```json\n[{"op": "add", "text": "b\n```\nAgain:\n```json\n[{"op":"add","text":"a"}]\n```'
    ),
    "after thinking": '<think>[{"op": "add", "text": "b"}]</think>[{"op": "add", "text": "a"}]',
    "intervals in the prose": 'On [0, 1] with {0}: [{"op": "add", "text": "a"}] for "x" in (0, 1].',
    "one bad item": '[{"op": "add", "text": "a"}, {"op": "frobnicate", "text": "b"}, 5, null]',
}


@pytest.mark.parametrize("text", SAID.values(), ids=SAID)
def test_forms(text):
    read = parse_edits(text)
    assert read.has_block
    assert [(edit.op, edit.text) for edit in read.edits] == [("add", "a")]


def test_problems_are_named():
    assert parse_edits(SAID["cut off"]).problems == ("cut_off",)
    assert parse_edits(SAID["one bad item"]).problems == ("unknown_operation",)
    assert parse_edits("I would not change anything.").problems == ("no_json",)
    assert not parse_edits("See [G3] and {x}.").has_block


def test_grouped_by_operation():
    reply = '{"add": ["a", {"text": "b"}], "modify": {"id": "G1", "text": "c"}, "remove": ["G2", 3], "merge": []}'
    assert parse_edits(reply).edits == (
        A,
        Edit("add", text="b"),
        Edit("modify", ("G1",), "c"),
        Edit("remove", ("G2",)),
        Edit("remove", ("G3",)),
    )
    assert parse_edits('[{"op": "replace", "id": "G1", "text": "c"}]').edits == (
        Edit("modify", ("G1",), "c"),
    )


@pytest.mark.parametrize("text", ["[]", "No change:\n```json\n[]\n```", '{"edits": []}'])
def test_an_empty_list_is_an_answer(text):
    assert parse_edits(text).has_block
    assert parse_edits(text).edits == ()


def test_quotes_and_apostrophes_inside():
    reply = """[{'op': 'add', 'text': 'Don't say "no" {yet}, it's early'}]"""
    assert parse_edits(reply).edits[0].text == """Don't say "no" {yet}, it's early"""
    reply = (
        '[{"op": "add", "text": "Write "n/a" when unsure // always", "reason": "http://x.y #1"}]'
    )
    assert parse_edits(reply).edits[0] == Edit(
        "add", text='Write "n/a" when unsure // always', reason="http://x.y #1"
    )


LATEX = [
    r"\frac{1}{2}",
    r"\beta",
    r"\nu_x",
    r"\theta",
    r"\rho",
    r"\neq",
    r"\times",
    r"\right)",
    r"\(x\)",
    r"\{y\}",
]
LATEX += [
    r"\alpha",
    r"\binom{n}{k}",
    r"\text{if }",
    r"\underline{z}",
    r"\nabla f",
    r"\to",
    r"\forall",
    r"\tau",
]


@pytest.mark.parametrize("latex", LATEX)
def test_latex_survives_escaped_or_not(latex):
    wanted = f"Use {latex} here."
    assert parse_edits('[{"op": "add", "text": "Use ' + latex + ' here."}]').edits[0].text == wanted
    assert (
        parse_edits("[{'op': 'add', 'text': 'Use " + latex + " here.',}]").edits[0].text == wanted
    )
    assert parse_edits(json.dumps([{"op": "add", "text": wanted}])).edits[0].text == wanted


def test_real_escapes_stay():
    assert json.loads('"' + escape_latex(r"a\nb\tc\"d\\e\u00e9\/\nThen\ne.g. f\n") + '"') == (
        'a\nb\tc"d\\eé/\nThen\ne.g. f\n'
    )


@pytest.mark.parametrize(
    "value", ["3", 3, "G3", "g3", "[G3]", "A.G3", "[A.G3].", "G.3", "principle 3", "A:G3", "(G3)"]
)
def test_ids_of_the_own_set(value):
    assert principle_id(value) == "G3"


@pytest.mark.parametrize(
    ("value", "wanted"),
    [("B.G3", "B.G3"), ("[b.g3]", "B.G3"), ("x", "x"), ("-3", "-3"), (True, "True"), (3.5, "3.5")],
)
def test_ids_that_are_not(value, wanted):
    assert principle_id(value) == wanted


@pytest.mark.parametrize("ids", ['["G1", "A.G4", 5]', '"G1, G4 and [G5]"', '"G1+G4+G5"'])
def test_merge(ids):
    reply = f'[{{"op": "merge", "ids": {ids}, "text": "m"}}]'
    assert parse_edits(reply).edits == (Edit("merge", ("G1", "G4", "G5"), "m"),)


def test_search_and_replace_blocks():
    reply = (
        "Two changes:\n```\n<<<<<<< SEARCH\nold \\frac line\n=======\nnew\n\nlines\n>>>>>>> REPLACE\n```\n"
        "<<<<<<< SEARCH\r\ngone\r\n=======\r\n>>>>>>> REPLACE"
    )
    assert parse_edits(reply).edits == (
        Edit("replace", text="new\n\nlines", search="old \\frac line"),
        Edit("replace", search="gone"),
    )
    assert parse_edits('[{"search": "old", "replace": "new"}]').edits == (
        Edit("replace", text="new", search="old"),
    )
    cut = parse_edits("<<<<<<< SEARCH\nold\n=======\nnew and th")
    assert (cut.edits, cut.problems, cut.has_block) == ((), ("cut_off",), True)


PIECES = [
    "[",
    "]",
    "{",
    "}",
    '"',
    "'",
    "\\",
    ",",
    ":",
    "op",
    "add",
    "text",
    "G1",
    "```",
    "\n",
    " ",
    "//",
    "/*",
    "#",
    "\\n",
]
PIECES += [
    "<<<<<<< SEARCH\n",
    "=======\n",
    ">>>>>>> REPLACE",
    "</think>",
    '{"op": "add", "text": "x"}',
    "null",
    "1e999",
]


@given(st.lists(st.sampled_from(PIECES), max_size=40).map("".join) | st.text(max_size=200))
def test_never_raises(text):
    read = parse_edits(text)
    assert all(isinstance(edit, Edit) and isinstance(edit.text, str) for edit in read.edits)
    assert all(isinstance(name, str) for edit in read.edits for name in edit.ids)
    assert read.has_block or not read.edits


plain = st.text(
    st.characters(codec="ascii", min_codepoint=32, exclude_characters='\\"[]'),
    min_size=1,
    max_size=60,
).map(str.strip)


@given(
    st.lists(plain.filter(bool), min_size=1, max_size=4),
    st.sampled_from(["{}", "Well:\n```json\n{}\n```", "So {} ok"]),
)
def test_good_json_is_read_as_it_is(texts, around):
    reply = json.dumps([{"op": "add", "text": text} for text in texts], indent=1)
    read = parse_edits(around.replace("{}", reply))
    assert [edit.text for edit in read.edits] == texts


@pytest.mark.parametrize(
    "piece", ["[{", "[['", '["\\', '{"a":', "[/*", '[{"op":"add","text":"a"},', "x' y ", "```[\n"]
)
def test_hostile_replies_take_no_time(piece):
    """Up to 2.4 MB: where the time grows with the square, longer than any test may take."""
    parse_edits(piece * 100_000)


def test_a_fence_of_many_tildes_takes_no_time():
    parse_edits("~" * 200_000 + "`")


def test_halves_of_surrogate_pairs_are_replaced():
    """JSON can write them; a prompt with one could not be saved, sent or tokenised."""
    for reply in (
        '```json\n[{"op": "add", "text": "a \\ud800 b"}]\n```',
        '[{"op": "add", "text": "a \ud800 b"}]',
    ):
        (edit,) = parse_edits(reply).edits
        assert edit.text == "a \ufffd b"
