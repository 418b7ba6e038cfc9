"""Tools as an environment: an outage is never text, an error of a tool is."""

import threading

import pytest

from agentic_prompting.interop import (
    ToolEnvironment,
    ask_tool,
)
from agentic_prompting.llm import (
    BadReply,
    Budget,
    Reply,
    ScriptedChat,
    ServerFailed,
    Unreachable,
    charge,
)
from agentic_prompting.llm.loop import run
from agentic_prompting.rollout import (
    ChatFormat,
    Limits,
    Rollout,
    RolloutLog,
    Sample,
    play,
    rollout_record,
)
from support.programs import byte_tokenizer
from support.tool_episodes import call, capital, currency, step


def unreachable(country: str) -> str:
    """Is down.

    Args:
        country: Any.
    """
    raise ConnectionError("no route")


def test_functions_are_called_at_once_with_their_arguments():
    environment = ToolEnvironment([capital, currency])
    text = step(
        environment, call("capital", country="Peru") + call("currency", country="Kenya", years=2)
    ).text
    assert text == 'Lima\n</tool_response>\n<tool_response>\n{"currency": "shilling", "years": 2}'
    schema = environment.chat_template_kwargs["tools"][1]["function"]
    assert schema["parameters"]["required"] == ["country"] and schema["name"] == "currency"


def test_calls_of_a_turn_run_side_by_side():
    """Each of the two returns only when the other one has been called."""
    both = threading.Barrier(2, timeout=60)

    def meet(who: str) -> str:
        """Waits for the other.

        Args:
            who: Its own name.
        """
        both.wait()
        return who

    assert step(
        ToolEnvironment([meet]), call("meet", who="a") + call("meet", who="b")
    ).text.split()[::3] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (call("capital", country="Atlantis"), "Error: KeyError"),
        (call("capital", city="Lima"), "Error: TypeError"),
        (
            call("capitals", country="Peru"),
            "there is no tool 'capitals', only: capital, unreachable",
        ),
        ("<tool_call>capital(Peru)</tool_call>", "a call must be"),
        ('<tool_call>{"name": "capital", "arguments": 3}</tool_call>', "a call must be"),
        ('<tool_call>["capital"]</tool_call>', "a call must be"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "a call must be"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_agent(turn, said):
    observation = step(ToolEnvironment([capital, unreachable]), turn)
    assert observation.error is None and said in observation.text


def test_an_outage_is_no_text():
    environment = ToolEnvironment([capital, unreachable])
    observation = step(
        environment, call("unreachable", country="Peru") + call("capital", country="Peru")
    )
    assert isinstance(observation.error, Unreachable) and "no route" in str(observation.error)


def test_a_large_llm_is_a_tool_beside_others():
    chat = ScriptedChat(
        lambda messages: (
            "It is Lima." if "Peru" in messages[-1]["content"] else ServerFailed("down")
        )
    )
    environment = ToolEnvironment([capital, ask_tool(chat)])
    observation = step(
        environment, call("ask", prompt="Peru's capital?") + call("capital", country="Kenya")
    )
    assert observation.error is None
    assert "It is Lima." in observation.text
    assert "Nairobi" in observation.text
    assert [type(reply) for reply in observation.replies] == [Reply]
    assert isinstance(step(environment, call("ask", prompt="Kenya?")).error, ServerFailed)
    assert "KeyError" in step(environment, call("ask")).text


def test_the_thought_of_a_tools_llm_is_not_shown():
    replies = ["<think>Peru? Lima.</think>\nLima.", "<think>Is it Lima, or"]
    environment = ToolEnvironment([ask_tool(ScriptedChat(replies))])
    assert step(environment, call("ask", prompt="a")).text == "Lima."
    cut_off = step(environment, call("ask", prompt="b"))
    assert isinstance(cut_off.error, BadReply) and "Lima" not in cut_off.text


def test_a_turn_makes_a_limited_number_of_calls():
    """A turn has room for hundreds, and each may ask a large LLM."""
    chat = ScriptedChat(lambda messages: f"reply {messages[-1]['content']}")
    environment = ToolEnvironment([ask_tool(chat)], max_calls=3)
    turn = "".join(call("ask", prompt=str(number)) for number in range(200))
    observation = step(environment, turn)
    assert len(observation.replies) == len(chat.calls) == 3
    responses = observation.text.split(environment.grammar.separator)
    assert responses[:3] == ["reply 0", "reply 1", "reply 2"]
    assert len(responses) == 200
    assert all("only 3 calls in one turn" in response for response in responses[3:])
    with pytest.raises(ValueError, match="max_calls"):
        ToolEnvironment([capital], max_calls=0)


def test_what_a_tools_llm_spends_is_booked():
    booked = []

    class Paid(ScriptedChat):
        def charge_to(self, budget, account):
            booked.append((budget, account))

    budget = Budget()
    charge(budget, environment=ToolEnvironment([capital, ask_tool(Paid(["Lima"]))]))
    assert booked == [(budget, "environment")]


def test_tools_need_names_of_their_own():
    with pytest.raises(ValueError, match="each with its own name"):
        ToolEnvironment([capital, capital])


def test_a_call_in_the_xml_form_reaches_its_tool():
    def stock(part: str, count: int | None = None) -> str:
        """How many of a part there are.

        Args:
            part: Its number.
            count: How many are wanted.
        """
        return f"{part!r} {count!r}"

    environment = ToolEnvironment([stock])
    body = "<function=stock>\n<parameter=part>\n0012\n</parameter>\n<parameter=count>\n3\n</parameter>\n</function>"
    assert step(environment, f"<tool_call>\n{body}\n</tool_call>").text == "'0012' 3"


@pytest.mark.parametrize("text", ["a\\ud800b", "</tool_call>", "</think>", "<tool_response>"])
def test_what_a_tool_repeats_of_the_policy_ends_no_run(text, tmp_path):
    def repeat(text: str) -> str:
        """Repeats a text.

        Args:
            text: Any.
        """
        return text

    environment = ToolEnvironment([repeat])
    form = ChatFormat(byte_tokenizer(), environment.grammar, environment.chat_template_kwargs)
    turns = iter(
        [f'<tool_call>{{"name": "repeat", "arguments": {{"text": "{text}"}}}}</tool_call>', "done"]
    )

    async def policy(request):
        return Sample(
            [
                *form.tokenizer(next(turns), add_special_tokens=False)["input_ids"],
                form.tokenizer.eos_token_id,
            ]
        )

    rollout = Rollout(form.prompt_ids("q"))
    run(play(rollout, policy, environment, form, Limits()))
    assert rollout.answer == "done" and not rollout.observations[0].text.startswith("Error")
    log = RolloutLog(tmp_path)
    log.write([rollout_record(rollout)])
