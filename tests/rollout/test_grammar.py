"""The turn grammar as documented: what happens next, what is well formed, what is inert; and the
prompt templates.
"""

import re
from dataclasses import asdict

import pytest
from hypothesis import given, settings, strategies as st

from agentic_prompting.rollout import (
    AgentSpec,
    FreeText,
    TagGrammar,
    check_template,
    escape,
    fill_template,
    parse_turn,
    prompt_r1_template,
)

PAPER = TagGrammar()
# Names that are easily confused: prefixes of each other, a hyphen, letters that are not ASCII.
CUSTOM = TagGrammar(think="t", act="tool", observation="tool-result", answer="réponse")
GRAMMARS = [PAPER, CUSTOM]

ASK = "<think> a </think>\n<interaction_prompt> b </interaction_prompt>\n"
END = "<think> a </think>\n<answer> b </answer>"


def pieces(grammar):
    """Text in which tags of the grammar are common, whole and broken."""
    tags = [f"<{slash}{tag}>" for tag in asdict(grammar).values() for slash in ("", "/")]
    odd = [
        "<",
        ">",
        "</",
        "/",
        "[answer]",
        "<Think>",
        "< think>",
        "<think",
        "answer>",
        "\n",
        " ",
        "\u2028",
        "\x1f",
        "x",
    ]
    return st.lists(
        st.one_of(st.sampled_from([*tags, *odd]), st.text(max_size=4)), max_size=10
    ).map("".join)


def contents(grammar):
    """Non-empty text without a tag, stripped."""
    return (
        pieces(grammar)
        .map(lambda text: grammar.any_tag.sub("", text).strip())
        .filter(lambda text: text and not grammar.any_tag.search(text))
    )


# --- the rules, one by one ------------------------------------------------------------------------


def test_asking():
    turn = parse_turn(ASK)
    assert (turn.kind, turn.well_formed, turn.problem) == ("act", True, "")
    assert (turn.thought, turn.request, turn.answer, turn.text) == ("a", "b", None, ASK)


def test_answering():
    turn = parse_turn(END)
    assert (turn.kind, turn.well_formed, turn.problem) == ("answer", True, "")
    assert (turn.thought, turn.request, turn.answer) == ("a", None, "b")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no tag"),
        ("Paris", "no tag"),
        ("<think> only a thought </think>", "no tag"),
        (
            "<THINK> a </THINK> <Answer> b </Answer>",
            "no tag",
        ),  # tags are case-sensitive, as the paper's reward
        ("< answer> b </ answer>", "no tag"),
        ("<interaction_prompt> b", "unclosed tag"),
        ("<think> a </think> <answer> b </answer", "unclosed tag"),
        ("<think> a", "unclosed tag"),
        ("</answer>", "stray closing tag"),
        ("a </think> <answer> b </answer>", "stray closing tag"),
        ("<answer> b </answer> </answer>", "stray closing tag"),
        ("<think> <answer> b </answer> </think>", "nested tag"),
        ("<think> a </answer>", "nested tag"),  # opened with one tag, closed with another
        ("<answer> <answer> b </answer>", "nested tag"),
        ("<interaction_response> b </interaction_response>", "observation tag"),
        (ASK + "<interaction_response> b </interaction_response>", "observation tag"),
        ("<think> a </think>" + END, "repeated tag"),
        (ASK.replace("think", "answer") + "<answer> b </answer>", "repeated tag"),
        (ASK + "<interaction_prompt> c </interaction_prompt>", "repeated tag"),
        (ASK + "<answer> b </answer>", "answer and request"),
        ("<interaction_prompt> \n </interaction_prompt>", "empty request"),
        ("<think> a </think> <interaction_prompt></interaction_prompt>", "empty request"),
    ],
)
def test_malformed(text, problem):
    turn = parse_turn(text)
    assert (turn.kind, turn.problem) == ("malformed", problem)
    assert not turn.well_formed
    assert turn.request is None
    assert turn.answer is None
    assert turn.text == text


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "<interaction_response> r </interaction_response> <answer> a </answer> <answer> b",
            "unclosed tag",
        ),
        (
            (
                "<interaction_response> r </interaction_response> <answer> a </answer> <answer> b "
                "</answer>"
            ),
            "observation tag",
        ),
        (ASK + "<answer> a </answer> <answer> b </answer>", "repeated tag"),
        ("<interaction_prompt> </interaction_prompt> <answer> a </answer>", "answer and request"),
        ("<think> a </think> <think> b </think>", "repeated tag"),
    ],
)
def test_the_first_rule_that_is_broken_is_named(text, problem):
    assert parse_turn(text).problem == problem


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<interaction_prompt> b </interaction_prompt>", "act"),  # no thought
        ("<think> </think> <interaction_prompt> b </interaction_prompt>", "act"),  # an empty one
        ("<interaction_prompt> b </interaction_prompt> <think> a </think>", "act"),  # too late
        ("Well: " + ASK, "act"),  # text outside of the tags: before, ...
        (
            "<think> a </think> so <interaction_prompt> b </interaction_prompt>",
            "act",
        ),  # ... between
        (ASK + "<|im_end|>", "act"),  # ... and behind
        ("<answer> b </answer>", "answer"),
        ("<think> a </think> <answer> </answer>", "answer"),  # an empty answer is an answer
        ("<answer> b </answer> <think> a </think>", "answer"),
        (END + " That is all.", "answer"),
    ],
)
def test_acted_on_without_being_well_formed(text, kind):
    turn = parse_turn(text)
    assert (turn.kind, turn.well_formed, turn.problem) == (kind, False, "")
    assert (turn.request is not None, turn.answer is not None) == (kind == "act", kind == "answer")


def test_an_empty_answer_is_empty_and_not_absent():
    assert parse_turn("<think> a </think><answer>\n</answer>").answer == ""


def test_the_thought_of_a_malformed_turn():
    assert parse_turn("<think> a </think> well").thought == "a"
    assert parse_turn("<think> a </think> <think> b </think>").thought is None
    assert parse_turn("well").thought is None


def test_contents_are_kept_as_written():
    text = "<think>\n a <b> & {c} \n\n</think>\n\n<answer>\t1 < 2 </answer>"
    turn = parse_turn(text)
    assert (turn.thought, turn.answer, turn.well_formed) == ("a <b> & {c}", "1 < 2", True)


# --- what holds of every text ---------------------------------------------------------------------


def well_formed_by_pattern(text, grammar):
    """A second reading of "a thought and a request (or answer), each once, not empty, nothing
    else".
    """
    tag_free = rf"(?:(?!{grammar.any_tag.pattern.replace('(', '(?:')}).)*"
    last = f"{re.escape(grammar.act)}|{re.escape(grammar.answer)}"
    think = re.escape(grammar.think)
    match = re.fullmatch(
        rf"\s*<{think}>(?P<a>{tag_free})</{think}>\s*<(?P<tag>{last})>(?P<b>{tag_free})</(?P=tag)>\s*",
        text,
        re.S,
    )
    return bool(match and match["a"].strip() and match["b"].strip())


@pytest.mark.parametrize("grammar", GRAMMARS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_any_text_is_read(grammar, data):
    text = data.draw(pieces(grammar))
    turn = parse_turn(text, grammar)
    assert turn.text == text and turn.kind in ("act", "answer", "malformed")
    assert (turn.kind == "malformed") == bool(turn.problem)
    assert (turn.request is not None) == (turn.kind == "act")
    assert (turn.answer is not None) == (turn.kind == "answer")
    assert turn.request != ""
    assert turn.well_formed == well_formed_by_pattern(text, grammar)
    if turn.well_formed:
        assert turn.kind != "malformed" and turn.thought and (turn.request or turn.answer)


@pytest.mark.parametrize("grammar", GRAMMARS)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), asks=st.booleans(), space=st.sampled_from(["", " ", "\n\n"]))
def test_parts_make_the_turn_they_came_from(grammar, data, asks, space):
    thought = data.draw(contents(grammar))
    request = data.draw(contents(grammar))
    tag = grammar.act if asks else grammar.answer
    text = f"<{grammar.think}>{space}{thought}</{grammar.think}>{space}<{tag}>{request}{space}</{tag}>{space}"
    turn = parse_turn(text, grammar)
    assert turn.well_formed and turn.thought == thought
    assert (turn.request, turn.answer) == ((request, None) if asks else (None, request))


@pytest.mark.parametrize("grammar", GRAMMARS)
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_escaped_text_is_inert(grammar, data):
    text = data.draw(pieces(grammar))
    inert = escape(text, grammar)
    assert not grammar.any_tag.search(inert)
    assert escape(inert, grammar) == inert
    assert parse_turn(inert, grammar).problem == "no tag"
    # Nothing is lost but the form of the brackets, and text without a tag is left alone.
    assert inert.translate({ord("["): "<", ord("]"): ">"}) == text.translate(
        {ord("["): "<", ord("]"): ">"}
    )
    assert grammar.any_tag.search(text) or inert == text


def test_escaped_tags_stay_readable():
    assert escape("<answer>Paris</answer> <b>", PAPER) == "[answer]Paris[/answer] <b>"
    assert escape("<<answer>answer>", PAPER) == "<[answer]answer>"


# --- grammars of one's own ------------------------------------------------------------------------


def test_the_tags_are_data():
    text = "<t> a </t> <tool> b <answer> </tool>"
    turn = parse_turn(text, CUSTOM)
    assert (turn.kind, turn.well_formed, turn.request) == ("act", True, "b <answer>")
    assert parse_turn("<réponse> oui </réponse>", CUSTOM).answer == "oui"
    assert parse_turn(ASK, CUSTOM).problem == "no tag"
    assert CUSTOM.stops == ("</tool>", "</réponse>")
    assert escape("<tool-result> <tool> <answer>", CUSTOM) == "[tool-result] [tool] <answer>"


@pytest.mark.parametrize("tag", ["", "a b", "<a>", "a>", "-a", "a.*", "a|b", "a\n", "/a"])
def test_what_is_no_tag_name(tag):
    with pytest.raises(ValueError, match="is not a tag name") as raised:
        TagGrammar(act=tag)
    assert "act=" in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "pair", [("think", "act"), ("act", "observation"), ("observation", "answer")]
)
def test_equal_tags(pair):
    with pytest.raises(ValueError, match="must differ") as raised:
        TagGrammar(**dict.fromkeys(pair, "same"))
    assert "same" in str(raised.value) and "\n" not in str(raised.value)


# --- templates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_the_templates_examples_are_well_formed_turns(grammar):
    """What the agent is told to write is what the grammar takes."""
    template = prompt_r1_template(grammar)
    asks, ends = (
        re.search(rf"^To {word}: (.*)$", template, re.M)[1].replace(" and then ", "")
        for word in ("ask", "finish")
    )
    assert parse_turn(asks, grammar).kind == "act" and parse_turn(asks, grammar).well_formed
    assert parse_turn(ends, grammar).kind == "answer" and parse_turn(ends, grammar).well_formed
    assert f"<{grammar.observation}>" in template
    assert re.findall(r"\{\w*\}", template) == ["{question}"] and template.endswith("{question}")


@given(question=st.text(), before=st.text(), after=st.text())
def test_filling_changes_nothing_else(question, before, after):
    before, after = (text.replace("{question}", "") for text in (before, after))
    assert fill_template(f"{before}{{question}}{after}", question) == before + question + after


def test_braces_are_left_alone():
    assert (
        fill_template('{"q": "{question}", {0} {{x}} {', "{question} {a}")
        == '{"q": "{question} {a}", {0} {{x}} {'
    )


@pytest.mark.parametrize("template", ["", "Answer me.", "{ question }", "{Question}", "{question"])
def test_templates_without_a_question(template):
    for refuses in (check_template, lambda text: fill_template(text, "q")):
        with pytest.raises(ValueError, match=r"no \{question\}") as raised:
            refuses(template)
        assert "\n" not in str(raised.value)
    assert check_template("{question}") is None


# --- the protocol ---------------------------------------------------------------------------------


@pytest.mark.parametrize("grammar", GRAMMARS)
@given(data=st.data())
def test_a_tag_grammar_reads_as_the_functions_do(grammar, data):
    text = data.draw(pieces(grammar))
    assert grammar.parse(text) == parse_turn(text, grammar)
    assert grammar.escape(text) == escape(text, grammar)


def test_what_a_tag_grammar_puts_around():
    assert CUSTOM.frame == ("<tool-result>\n", "\n</tool-result>")
    assert CUSTOM.thought_opening == "<t>"


def test_free_text_without_its_thought_is_an_answer():
    turn = FreeText().parse("<think>\\boxed{3}?</think>\n4")
    assert (turn.kind, turn.well_formed, turn.thought, turn.answer) == (
        "answer",
        True,
        "\\boxed{3}?",
        "4",
    )
    cut_off = FreeText().parse("<think>\\boxed{3} unless")
    assert (cut_off.well_formed, cut_off.answer) == (False, "")


@given(text=st.text().filter(lambda text: "think" not in text.lower()))
def test_free_text_is_an_answer(text):
    turn = FreeText().parse(text)
    assert (turn.kind, turn.well_formed, turn.answer, turn.text) == (
        "answer",
        True,
        text.strip(),
        text,
    )
    assert FreeText().escape(text) == text
    assert (FreeText().stops, FreeText().frame, FreeText().thought_opening) == ((), ("", ""), "")


# --- the file beside the weights ------------------------------------------------------------------

JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "3", '{"format": 1}', '{"format": "x"}', "\xff", "[" * 100_000]
)
def test_a_damaged_spec_is_one_line_with_the_file(tmp_path, text):
    (tmp_path / "agentic_prompting.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"agentic_prompting\.json is damaged") as raised:
        AgentSpec.load(tmp_path)
    assert "\n" not in str(raised.value)


@settings(max_examples=150, deadline=None)
@given(field=st.sampled_from(sorted(vars(AgentSpec()))), value=JSONS)
def test_a_spec_with_any_field_damaged_loads_or_names_the_file(tmp_path_factory, field, value):
    import json

    folder = tmp_path_factory.mktemp("spec")
    AgentSpec().save(folder)
    path = folder / "agentic_prompting.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), field: value}))
    try:
        assert AgentSpec.load(folder).messages({"question": "q"})
    except ValueError as error:
        assert "agentic_prompting.json" in str(error)
