"""A simulated user."""

import pytest

from agentic_prompting.interop import (
    Dialogue,
    UserSimulator,
)
from agentic_prompting.llm import (
    BadReply,
    ScriptedChat,
)
from agentic_prompting.llm.loop import run
from agentic_prompting.rollout import (
    Sample,
)
from support.tool_episodes import asked


def test_a_simulated_user_ends_the_episode_when_they_have_what_they_want():
    heard = []

    def person(messages):
        heard.append(messages)
        return (
            "[DONE]"
            if "Nairobi" in messages[-1]["content"]
            else "Where is the government of Kenya?"
        )

    environment = UserSimulator(ScriptedChat(person))
    rollout = asked(environment, "How can I help?", row={"goal": "the capital of Kenya"})
    observation = run(environment.step(rollout))
    assert observation.text.startswith("Where") and "the capital of Kenya" in heard[0][0]["content"]
    rollout.add_observation(observation, [2])
    rollout.add_turn(Sample([1]), Dialogue().parse("<think>easy</think>In Nairobi."))
    assert run(environment.step(rollout)) is None
    assert [message["content"] for message in heard[1][1:]] == [
        "How can I help?",
        observation.text,
        "In Nairobi.",
    ]


def test_the_agent_never_reads_the_users_thought():
    """The thought of a simulated user says what the agent has to find out, and may mention the mark
    of the end.
    """
    thought = "<think>I want the capital of Kenya and then write [DONE], but"
    environment = UserSimulator(ScriptedChat([thought]))
    observation = run(environment.step(asked(environment, "Hi", row={"goal": "the capital"})))
    assert observation is not None and observation.text == ""
    assert isinstance(observation.error, BadReply)


@pytest.mark.parametrize(
    ("text", "request_", "well_formed"),
    [
        ("How can I help?", "How can I help?", True),
        ("<think>easy</think>In Nairobi.", "In Nairobi.", True),
        ("easy</think>In Nairobi.", "In Nairobi.", True),
        ("In Nairobi. <think>or is it", "In Nairobi.", False),
        ("<think>I should say", None, False),
        ("<think>a</think> <think>b", None, False),
        ("<think>a</think>", None, False),
    ],
)
def test_a_user_reads_no_thought(text, request_, well_formed):
    turn = Dialogue().parse(text)
    assert (turn.request, turn.well_formed) == (request_, well_formed)
    assert turn.kind == ("malformed" if request_ is None else "act")


def test_a_users_template_may_hold_braces():
    environment = UserSimulator(
        ScriptedChat(["ok"]), template='Reply with {"goal": "{goal}"} or {done}.'
    )
    rollout = asked(environment, "?", row={"goal": "{x}"})
    assert environment.messages(rollout)[0]["content"] == 'Reply with {"goal": "{x}"} or [DONE].'
