"""The question form: a turn with a question mark asks, any other text answers."""

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.llm import ScriptedChat
from agentic_prompting.local.sampling import TurnEnd
from agentic_prompting.rollout import (
    AgentSpec,
    ChatFormat,
    Environment,
    FreeText,
    Limits,
    QuestionGrammar,
    TagGrammar,
    TextFormat,
    play_all,
    rollout_from_trace,
    template_for,
)
from support.episodes import ScriptedSampler, assert_whole, fresh
from support.linear import processor_seconds
from support.tokenizers_for_tests import FAMILIES, tokenizer_for

FORM = QuestionGrammar(frame=("Found: ", "\nNow answer."))


@pytest.fixture(params=list(FAMILIES))
def chat_format(request):
    return ChatFormat(tokenizer_for(request.param), FORM)


def play(chat_format, turns, limits=Limits(), **sampler_options):
    chat = ScriptedChat(["It is Kenya."])
    (rollout,) = rollouts = fresh(chat_format)
    play_all(
        rollouts,
        ScriptedSampler(chat_format, turns, **sampler_options),
        LLMEnvironment(chat),
        chat_format,
        limits,
    )
    assert_whole(rollout)
    return rollout, chat


# --- reading a turn -------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", ["?", "？", "؟"])
def test_a_question_mark_asks(mark):
    turn = FORM.parse(f" Which country is it{mark}\n")
    assert (turn.kind, turn.well_formed, turn.request) == (
        "act",
        True,
        f"Which country is it{mark}",
    )
    assert turn.answer is None


def test_other_text_answers():
    turn = FORM.parse(" Kenya.\n")
    assert (turn.kind, turn.well_formed, turn.answer, turn.request) == (
        "answer",
        True,
        "Kenya.",
        None,
    )


def test_text_behind_the_question_is_ignored():
    turn = FORM.parse("Which country? I think Kenya. Or not?")
    assert (turn.kind, turn.well_formed, turn.request) == ("act", False, "Which country?")


@pytest.mark.parametrize("text", ["", " \n"])
def test_an_empty_answer_is_an_answer(text):
    turn = FORM.parse(text)
    assert (turn.kind, turn.well_formed, turn.answer) == ("answer", False, "")


@pytest.mark.parametrize("text", ["?", " ?? ", '"?', "...?"])
def test_a_mark_alone_is_malformed(text):
    turn = FORM.parse(text)
    assert (turn.kind, turn.problem) == ("malformed", "empty request")


@pytest.mark.parametrize(
    ("text", "kind", "content"),
    [
        ("<think> Who? </think> Which country?", "act", "Which country?"),
        ("<think> Who? </think> Kenya", "answer", "Kenya"),
        ("<think></think>Kenya", "answer", "Kenya"),
        ("Kenya <think> Who?", "act", "Kenya <think> Who?"),  # a thought comes first, or it is text
    ],
)
def test_a_thought_is_no_part_of_it(text, kind, content):
    turn = FORM.parse(text)
    assert (turn.kind, turn.request or turn.answer) == (kind, content)


def test_a_thought_cut_at_its_question_is_malformed():
    turn = FORM.parse("<think> What do they want?")
    assert (turn.kind, turn.problem, turn.request, turn.answer) == (
        "malformed",
        "unclosed tag",
        None,
        None,
    )


@given(st.text())
def test_any_text_is_read(text):
    turn = FORM.parse(text)
    assert turn.text == text
    assert (turn.kind == "act") == (turn.request is not None)
    assert (turn.kind == "answer") == (turn.answer is not None)


@pytest.mark.parametrize("piece", ["<think>", "</think>", "?", "<think>?", "a\n", " ", "？"])
def test_reading_takes_linear_time(piece):
    def seconds(count):
        text = piece * count
        return processor_seconds(lambda: FORM.parse(text))

    # Ten times the text: quadratic time would be 100 times as long.
    assert seconds(80_000) < 30 * seconds(8_000) + 0.1


# --- an episode -----------------------------------------------------------------------------------


def test_asks_then_answers(chat_format):
    prefix = chat_format.turn_prefix and f"{chat_format.turn_prefix}</think>"
    rollout, chat = play(chat_format, [f"{prefix}Which country?", f"{prefix}Kenya"])
    assert (rollout.status, rollout.answer, len(rollout.turns)) == ("answered", "Kenya", 2)
    assert chat.calls == [[{"role": "user", "content": "Which country?"}]]
    assert "Found: It is Kenya.\nNow answer." in chat_format.tokenizer.decode(rollout.context)


def test_a_cut_answer_is_truncated():
    """The form has stop texts, but none of them closes an answer."""
    chat_format = ChatFormat(tokenizer_for("chatml"), FORM)
    rollout, _ = play(chat_format, ["Kenya is a country in the east of"], Limits(max_turn_tokens=4))
    assert (rollout.status, rollout.answer) == ("truncated", None)


def test_a_cut_turn_with_closed_tags_is_answered():
    chat_format = ChatFormat(tokenizer_for("chatml"), TagGrammar())
    text = "<think> a </think> <answer> Kenya </answer> and some more words"
    length = len(chat_format.turn_ids(text)) - 3
    rollout, _ = play(chat_format, [text], Limits(max_turn_tokens=length))
    assert (rollout.status, rollout.answer) == ("answered", "Kenya")


@pytest.mark.parametrize("mark", ["?", "？", "؟"])
def test_sampling_stops_at_the_mark(mark):
    tokenizer = tokenizer_for("chatml")
    end = TurnEnd(
        lambda: None, tokenizer, AgentSpec(grammar=FORM).stop_texts, [tokenizer.eos_token_id]
    )
    ids = tokenizer(f"Who{mark} Me", add_special_tokens=False)["input_ids"]
    length = next(count for count in range(1, len(ids)) if end.reached(ids[:count]))
    assert tokenizer.decode(ids[:length]).rstrip() == f"Who{mark}"


def test_traces_end_with_the_end_token_in_text_too():
    tokenizer = tokenizer_for("chatml")
    text_format = TextFormat(tokenizer, FORM)
    trace = {
        "question": "Which currency?",
        "turns": ["Which country?", "Kenya"],
        "observations": ["It is Kenya."],
    }
    rollout = rollout_from_trace(trace, AgentSpec(grammar=FORM), text_format)
    assert rollout.status == "answered" and rollout.ids[-1] == tokenizer.eos_token_id
    assert rollout.ids.count(tokenizer.eos_token_id) == 1


# --- the agent's form -----------------------------------------------------------------------------


def test_saved_and_loaded_by_name(tmp_path):
    spec = AgentSpec("Ask: {question}", grammar=FORM)
    spec.save(tmp_path)
    assert AgentSpec.load(tmp_path) == spec


def test_saved_and_loaded_with_several_environments(tmp_path):
    environments = {"library": {"grammar": FORM}, "oracle": {"grammar": TagGrammar()}}
    AgentSpec(grammar=FORM, environments=environments).save(tmp_path)
    loaded = AgentSpec.load(tmp_path)
    assert {
        name: spec.grammar
        for name, spec in zip(environments, loaded.environment_specs(), strict=True)
    } == {name: changes["grammar"] for name, changes in environments.items()}


def test_a_mark_ends_no_turn_of_another_form():
    spec = AgentSpec(
        grammar=FORM, environments={"a": {"grammar": FORM}, "b": {"grammar": TagGrammar()}}
    )
    assert spec.stop_texts == TagGrammar().stops
    assert AgentSpec(grammar=FORM, environments={"a": {"grammar": FORM}}).stop_texts == FORM.stops
    assert replace(spec, environments={}, stop_at_tags=False).stop_texts == ()


class Library(Environment):
    """A library of facts. It has much more."""

    def step(self, rollout):
        return "a fact"


class Described(Library):
    prompt_template = "Ask the library about: {question}"


class Tagged(Library):
    prompt_template = "Write <{act}>your request</{act}>. {question}"


class Undescribed:
    def step(self, rollout):
        return "a fact"


def test_templates_fit_the_form():
    assert "a library of facts" in template_for(Library(), FORM)
    assert "an expert" in template_for(Undescribed(), FORM)
    for environment in (Library(), Tagged(), Undescribed(), LLMEnvironment(ScriptedChat(["x"]))):
        template = template_for(environment, FORM)
        assert "{question}" in template and "{act}" not in template and "<" not in template
    assert template_for(None, FORM) == "{question}"


@pytest.mark.parametrize("grammar", [FORM, FreeText()])
def test_an_environments_template_is_kept(grammar):
    assert template_for(Described(), grammar) == Described.prompt_template


def test_the_command_line_knows_it():
    from agentic_prompting.cli.loader import load_object
    from agentic_prompting.cli.train_options import GRAMMAR_OPTIONS

    assert load_object("question", "grammar", GRAMMAR_OPTIONS) == QuestionGrammar()
