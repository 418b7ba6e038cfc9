"""Turns that ask several workers: how they are read, and that no text can pass for their tags."""

from hypothesis import given, strategies as st

from agentic_prompting.rollout import AskGrammar, Observation, Rollout, Sample

GRAMMAR = AskGrammar()
MARKS = [
    "<think>",
    "</think>",
    "<ask>",
    '<ask to="A">',
    "<ask to='B'>",
    "<ask to=C>",
    "</ask>",
    "<answer>",
    "</answer>",
    "<replies>",
    "</replies>",
    "< ask >",
    "#1",
    "text",
    "\n",
    '"',
    ">",
]
texts = st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=12).map("".join)


def read(text):
    turn = GRAMMAR.parse(text)
    calls = [
        (call.arguments["worker"], call.arguments["request"]) for call in GRAMMAR.read_calls(text)
    ]
    return turn, calls


def test_several_requests_in_one_turn():
    turn, calls = read('<think>both</think> <ask to="A">one #1</ask>\n<ask to=" B C ">two</ask>')
    assert turn.kind == "act" and turn.well_formed and turn.thought == "both"
    assert calls == [("A", "one #1"), ("B C", "two")]
    assert turn.request == "A: one #1\nB C: two"


def test_names_with_and_without_quotes():
    for text in ("<ask to='A'>q</ask>", "<ask to=A>q</ask>", '<ask x="1" to="A">q</ask>'):
        assert read(text)[1] == [("A", "q")]


def test_request_without_worker_is_not_well_formed():
    turn, calls = read("<think>t</think><ask>q</ask>")
    assert turn.kind == "act" and not turn.well_formed and calls == [("", "q")]


def test_problems():
    problems = {
        "no tags": "no tag",
        '<ask to="A">q': "unclosed tag",
        "q</ask>": "stray closing tag",
        '<ask to="A"><think>t</think></ask>': "nested tag",
        "<answer>a</answer><answer>b</answer>": "repeated tag",
        '<ask to="A">q</ask><answer>a</answer>': "answer and request",
        '<ask to="A"> </ask>': "empty request",
        "<replies>r</replies><answer>a</answer>": "observation tag",
    }
    for text, problem in problems.items():
        turn = GRAMMAR.parse(text)
        assert (turn.kind, turn.problem) == ("malformed", problem), text


@given(texts)
def test_reading_never_raises_and_agrees(text):
    turn, calls = read(text)
    if turn.kind == "act":
        assert calls and all(request for _, request in calls)
    if turn.kind == "answer":
        assert not calls


@given(texts)
def test_escaped_text_has_no_tag(text):
    escaped = GRAMMAR.escape(text)
    assert GRAMMAR.any_tag.search(escaped) is None
    assert GRAMMAR.escape(escaped) == escaped


def answered(answer, *parts):
    rollout = Rollout([1])
    rollout.add_turn(Sample([2]), GRAMMAR.parse('<ask to="A">q</ask>'))
    rollout.add_observation(Observation("shown", quotable_texts=parts), [3])
    rollout.add_turn(Sample([4]), GRAMMAR.parse(f"<answer>{answer}</answer>"))
    return rollout.finish("answered")


def test_answer_by_reference_is_the_whole_part():
    rollout = answered("#2", "one", "line 1\nline 2")
    assert rollout.answer == "line 1\nline 2"
    assert rollout.turns[-1].answer_reference == 2
    assert rollout.turns[-1].text == "<answer>#2</answer>"


def test_other_answers_stay():
    for answer in ("#3", "#0", "#1 and #2", "1"):
        rollout = answered(answer, "one", "")
        assert rollout.answer == answer and rollout.turns[-1].answer_reference is None
    assert answered("#2", "one", "").answer == "#2"  # an empty part has nothing to hand on
    assert answered("#1").answer == "#1"
