"""`interop/dspy.py`: agents and chat models as language models and modules of DSPy."""

import asyncio

import pytest

from agentic_prompting.interop import ToolGrammar
from agentic_prompting.llm import (
    BadReply,
    BadRequest,
    BudgetExceeded,
    BudgetUnavailable,
    Closed,
    LLMError,
    Misconfigured,
    RateLimited,
    Refused,
    Reply,
    ScriptedChat,
    ServerFailed,
    TimedOut,
    Unreachable,
)
from agentic_prompting.rollout import Observation, Rollout, Sample

dspy = pytest.importorskip("dspy", reason="needs the extra dspy")
from dspy import lm15  # noqa: E402
from dspy.clients import execution  # noqa: E402

from agentic_prompting.interop.dspy import AgentModule, AsyncDSPyEngine, DSPyEngine, language_model  # noqa: E402


class Agent:
    """What a [`PromptAgent`] is to DSPy: it answers, or its environment fails."""

    def __init__(self, error=None):
        self.error = error
        self.asked = []

    def answer(self, question, seed=0):
        self.asked.append((question, seed))
        rollout = Rollout([1])
        if self.error:
            return rollout.fail(Observation(error=self.error))
        rollout.add_turn(
            Sample([1]), ToolGrammar().parse("[[ ## answer ## ]]\nNairobi\n\n[[ ## completed ## ]]")
        )
        return rollout.finish("answered")


def test_an_agent_is_a_language_model_of_dspy():
    agent = Agent()
    with dspy.context(lm=dspy.LM("agent", engine=DSPyEngine(agent), cache=False)):
        assert dspy.Predict("question -> answer")(question="Kenya's capital?").answer == "Nairobi"
    assert "Kenya's capital?" in agent.asked[0][0]
    assert AgentModule(Agent())(question="Kenya's capital?").rollout.status == "answered"


def test_an_outage_is_an_error_of_dspy():
    down = Agent(ServerFailed("down"))
    with (
        dspy.context(lm=dspy.LM("agent", engine=DSPyEngine(down), cache=False, num_retries=0)),
        pytest.raises(Exception, match="down"),
    ):
        dspy.Predict("question -> answer")(question="Kenya's capital?")
    with pytest.raises(ServerFailed):
        AgentModule(down)(question="Kenya's capital?")


def test_dspy_gets_an_answer_from_a_chat_model():
    chat = ScriptedChat(lambda messages: "[[ ## answer ## ]]\nLima\n\n[[ ## completed ## ]]")
    with dspy.context(lm=dspy.LM("chat", engine=DSPyEngine(chat), cache=False)):
        assert dspy.Predict("question -> answer")(question="Peru's capital?").answer == "Lima"


def completed(model, request, awaited=False):
    if awaited:
        return asyncio.run(AsyncDSPyEngine(model).complete(request))
    return DSPyEngine(model).complete(request)


@pytest.mark.parametrize("awaited", [False, True])
def test_dspys_sampling_reaches_the_model(awaited):
    chat = ScriptedChat([Reply("Lima, END of it", finish_reason="length")])
    schema = {"type": "json_schema", "schema": {"type": "object"}, "name": "city"}
    config = lm15.Config(
        stop=("END",),
        temperature=0.5,
        max_tokens=7,
        top_p=0.9,
        seed=3,
        response_format=schema,
        user_id="me",
    )
    response = completed(
        chat, lm15.Request("m", lm15.Message.user("?"), "Be brief.", config=config), awaited
    )
    openai_schema = {
        "type": "json_schema",
        "json_schema": {"name": "city", "schema": {"type": "object"}},
    }
    assert chat.sampling == [
        {
            "temperature": 0.5,
            "max_tokens": 7,
            "top_p": 0.9,
            "seed": 3,
            "stop": ["END"],
            "response_format": openai_schema,
        }
    ]
    assert [message["role"] for message in chat.calls[0]] == ["system", "user"]
    assert response.text == "Lima, " and response.finish_reason == "stop"
    assert [(adaptation.field, adaptation.action) for adaptation in response.adaptations] == [
        ("config.user_id", "dropped")
    ]


@pytest.mark.parametrize(
    ("reason", "theirs"), [("stop", "stop"), ("length", "length"), ("eos", "stop")]
)
def test_dspy_learns_how_a_reply_ended(reason, theirs):
    request = lm15.Request("m", lm15.Message.user("?"))
    assert (
        completed(ScriptedChat([Reply("Lima", finish_reason=reason)]), request).finish_reason
        == theirs
    )


@pytest.mark.parametrize(
    ("status", "theirs"),
    [("answered", "stop"), ("truncated", "length"), ("out_of_turns", "length")],
)
def test_dspy_learns_how_an_episode_ended(status, theirs):
    class Ends(Agent):
        def answer(self, question, seed=0):
            rollout = super().answer(question, seed)
            return rollout.finish(status)

    config = lm15.Config(temperature=0.5, stop=("robi",), seed=11)
    agent = Ends()
    response = completed(agent, lm15.Request("m", lm15.Message.user("?"), config=config))
    assert agent.asked == [("?", 11)]
    assert {(adaptation.field, adaptation.action) for adaptation in response.adaptations} == {
        ("config.temperature", "dropped"),
        ("config.stop", "client_side"),
    }
    if status == "answered":
        assert response.text.endswith("Nai") and response.finish_reason == "stop"
    else:
        assert response.text == "" and response.finish_reason == theirs


def test_no_text_of_a_message_for_dspy_is_dropped():
    chat = ScriptedChat(["yes"])
    data = lm15.DataPart({"city": "Lima"})
    messages = (
        lm15.Message.user(["one", "two", data]),
        lm15.Message.assistant([lm15.ThinkingPart("hm"), lm15.TextPart("three")]),
        lm15.Message.developer("four"),
    )
    completed(chat, lm15.Request("m", messages, ["Be", " brief."]))
    assert [message["content"] for message in chat.calls[0]] == [
        "Be brief.",
        'one\ntwo\n{"city": "Lima"}',
        "three",
        "four",
    ]
    assert [message["role"] for message in chat.calls[0]] == [
        "system",
        "user",
        "assistant",
        "system",
    ]


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize("model", [ScriptedChat(["yes"]), Agent()], ids=["chat", "agent"])
def test_what_is_no_text_is_refused_before_a_call(model, awaited):
    image = lm15.Message.user(["What is this?", lm15.ImagePart(url="https://example.org/cat.png")])
    called = lm15.Message.assistant(lm15.ToolCallPart("1", "look", {}))
    looked = lm15.Message.tool("1", "a cat")
    tool = lm15.FunctionTool("look", "Looks.", {"type": "object", "properties": {}})
    asked = lm15.Message.user("?")
    for request in (
        lm15.Request("m", image),
        lm15.Request("m", (asked, called, looked)),
        lm15.Request("m", asked, tools=tool),
        lm15.Request("m", asked, config=lm15.Config(logprobs=2)),
    ):
        with pytest.raises(lm15.UnsupportedFeatureError) as refused:
            completed(model, request, awaited)
        assert refused.value.feature


def test_an_agent_writes_no_json_for_dspy():
    config = lm15.Config(response_format={"type": "json_object"})
    agent = Agent()
    with pytest.raises(lm15.UnsupportedFeatureError):
        completed(agent, lm15.Request("m", lm15.Message.user("?"), config=config))
    assert not agent.asked


@pytest.mark.parametrize("awaited", [False, True])
@pytest.mark.parametrize(
    ("error", "theirs", "again"),
    [
        (RateLimited("slow down", status=429), "LMRateLimitError", True),
        (TimedOut("late"), "LMTimeoutError", True),
        (Unreachable("no route"), "LMTransportError", True),
        (ServerFailed("broken", status=500), "LMServerError", True),
        (BadReply("empty"), "LMServerError", True),
        (BadRequest("no such field", status=400), "LMInvalidRequestError", False),
        (
            BadRequest("the maximum context length is 10 tokens", status=400),
            "ContextWindowExceededError",
            False,
        ),
        (
            BadRequest("prompt is too long: 9 tokens > 8 maximum"),
            "ContextWindowExceededError",
            False,
        ),
        (
            BadRequest("request (9 tokens) exceeds the available context size (8)"),
            "ContextWindowExceededError",
            False,
        ),
        (Misconfigured("wrong key", status=401), "LMAuthError", False),
        (Misconfigured("no such model", status=404), "LMUnsupportedModelError", False),
        (Misconfigured("no key"), "LMConfigurationError", False),
        (BudgetExceeded("$1 is spent"), "LMBillingError", False),
        (BudgetUnavailable("no file"), "LMConfigurationError", False),
        (Refused("a filter"), "LMProviderError", False),
        (Closed("closed"), "LMConfigurationError", False),
        (LLMError("another"), "LMProviderError", False),
    ],
    ids=str,
)
def test_dspy_tries_again_only_what_may_pass(error, theirs, again, awaited, monkeypatch):
    monkeypatch.setattr(execution, "_delay", lambda *_: 0)
    chat = ScriptedChat([error])
    lm = language_model(chat, num_retries=1)
    with pytest.raises(dspy.utils.exceptions.LMError) as raised:
        asyncio.run(lm.acall("?")) if awaited else lm("?")
    assert type(raised.value).__name__ == theirs and len(chat.calls) == (2 if again else 1)


def test_react_shortens_a_trajectory_that_fills_the_context():
    def reply(messages):
        text = messages[-1]["content"]
        if text.count("observation_") > 1:
            return Reply(error=BadRequest("maximum context length", status=400))
        if "[[ ## reasoning ## ]]" in text:
            return (
                "[[ ## reasoning ## ]]\nso\n\n[[ ## answer ## ]]\nNairobi\n\n[[ ## completed ## ]]"
            )
        tool = "look"
        fields = (
            f"[[ ## next_thought ## ]]\nhm\n\n[[ ## next_tool_name ## ]]\n{tool}\n\n[[ ## "
            f"next_tool_args ## ]]\n{{}}"
        )
        return f"{fields}\n\n[[ ## completed ## ]]"

    def look() -> str:
        """Looks."""
        return "a cat"

    program = dspy.ReAct("question -> answer", tools=[look], max_iters=4)
    adapter = dspy.ChatAdapter(use_json_adapter_fallback=False)
    with dspy.context(lm=language_model(ScriptedChat(reply), num_retries=0), adapter=adapter):
        assert program(question="Kenya's capital?").answer == "Nairobi"


def test_a_question_that_fills_an_agents_context():
    class Full(Agent):
        def answer(self, question, seed=0):
            return Rollout([1] * 9).finish("truncated")

    with pytest.raises(dspy.ContextWindowExceededError):
        language_model(Full())("?")


class Replies(Agent):
    """Answers with its own name."""

    def __init__(self, name):
        super().__init__()
        self.name = name

    def answer(self, question, seed=0):
        self.asked.append((question, seed))
        rollout = Rollout([1])
        rollout.add_turn(Sample([1]), ToolGrammar().parse(self.name))
        return rollout.finish("answered")

    async def aanswer(self, question, seed=0):
        return self.answer(question, seed)


def test_dspys_cache_does_not_answer_for_another_agent():
    first = language_model(Replies("first"))
    second = language_model(Replies("second"))
    assert [first("?"), second("?"), first("?")] == [["first"], ["second"], ["first"]]
    assert [seed for _, seed in first.engine.model.asked] == [0, 1]


def test_awaited_calls_of_dspy_run_together():
    waiting = []

    async def chat(messages):
        waiting.append(messages)
        while len(waiting) < 3:
            await asyncio.sleep(0.001)
        return "Lima"

    async def three(lm):
        return await asyncio.wait_for(asyncio.gather(*(lm.acall(f"{n}?") for n in range(3))), 20)

    assert asyncio.run(three(language_model(chat))) == [["Lima"]] * 3
    assert asyncio.run(language_model(Replies("first")).acall("?")) == ["first"]
    assert asyncio.run(language_model(Agent()).acall("?"))[0].startswith("[[ ## answer ## ]]"), (
        "without aanswer"
    )
    assert asyncio.run(AgentModule(Replies("first")).acall(question="?")).answer == "first"
    with pytest.raises(ServerFailed):
        asyncio.run(AgentModule(Agent(ServerFailed("down"))).acall(question="?"))


def test_replies_are_streamed_to_dspy():
    request = lm15.Request("m", lm15.Message.user("?"))

    async def events():
        return [
            event.type async for event in AsyncDSPyEngine(ScriptedChat(["Lima"])).stream(request)
        ]

    expected = [event.type for event in DSPyEngine(ScriptedChat(["Lima"])).stream(request)]
    assert asyncio.run(events()) == expected == ["start", "delta", "end"]
