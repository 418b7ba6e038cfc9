"""A pool of workers: numbering, references, failures, prices, framing and the drawing of pools."""

import asyncio
import re

import pytest
from hypothesis import given, strategies as st

from agentic_prompting import Limits
from agentic_prompting.environments import SearchEnvironment, Worker, Workers
from agentic_prompting.environments.retrievers import Document
from agentic_prompting.environments.workers import costs_by_worker, quote
from agentic_prompting.interop import ToolGrammar
from agentic_prompting.llm import (
    BudgetExceeded,
    Misconfigured,
    Reply,
    ScriptedChat,
    ServerFailed,
    Usage,
    run,
)
from agentic_prompting.rewards import CostReward
from agentic_prompting.rollout import (
    AgentSpec,
    AskGrammar,
    Observation,
    Rollout,
    Sample,
    rollout_record,
)
from agentic_prompting.trainers.async_rollouts.episode_log import (
    observation_from_json,
    observation_to_json,
)
from support.all_at_once import AllAtOnce

ECHO = lambda messages: f"echo {messages[-1]['content']}"  # noqa: E731


def asks(*calls):
    body = " ".join(f'<ask to="{name}">{request}</ask>' for name, request in calls)
    return f"<think>t</think> {body}"


def begin(environment, seed=0, **columns):
    row = {"question": "q", "prompt": [{"role": "user", "content": "q"}], **columns}
    return Rollout([1], row=environment.reset(row), seed=seed)


def ask(environment, rollout, *calls, text=None):
    rollout.add_turn(Sample([2]), environment.grammar.parse(text or asks(*calls)))
    observation = run(environment.step(rollout))
    rollout.add_observation(observation, [3])
    return observation


# --- references -----------------------------------------------------------------------------------


def test_replies_are_numbered_through_the_episode():
    environment = Workers({"a": lambda messages: "one", "b": lambda messages: "two"})
    rollout = begin(environment)
    assert ask(environment, rollout, ("a", "x"), ("b", "y")).text == "#1 : one\n#2 : two"
    assert ask(environment, rollout, ("b", "z")).text == "#3 : two"
    assert rollout.quotable_texts == ["one", "two", "two"]


def test_a_reference_hands_on_the_whole_reply():
    long = "word " * 1000 + "end"
    seen = ScriptedChat(lambda messages: "seen")
    environment = Workers({"long": lambda messages: long, "reader": seen}, max_reply_chars=50)
    rollout = begin(environment)
    assert len(ask(environment, rollout, ("long", "x")).text) < 60
    ask(environment, rollout, ("reader", "count #1"))
    assert seen.calls[-1][-1]["content"] == quote({1: long}, "count #1")
    assert long in seen.calls[-1][-1]["content"]


def test_a_worker_sees_only_its_request():
    seen = ScriptedChat(lambda messages: "reply")
    environment = Workers({"a": seen})
    rollout = begin(environment)
    ask(environment, rollout, ("a", "first"))
    ask(environment, rollout, ("a", "second"))
    assert [[message["content"] for message in call] for call in seen.calls] == [
        ["first"],
        ["second"],
    ]


def test_calls_of_a_turn_run_at_once():
    both = AllAtOnce(ScriptedChat(lambda messages: "reply"), 2)
    environment = Workers({"a": both, "b": both})
    assert ask(environment, begin(environment), ("a", "x"), ("b", "y")).error is None


def test_a_reference_to_the_same_turn_waits():
    slow = ScriptedChat(lambda messages: "slow", latency=0.01)
    environment = Workers({"slow": slow, "echo": ECHO})
    observation = ask(
        environment, begin(environment), ("slow", "x"), ("echo", "say #1"), ("echo", "#2")
    )
    assert (
        observation.quotable_texts[1].endswith("say #1") and "slow" in observation.quotable_texts[1]
    )
    assert "slow" in observation.quotable_texts[2]


def test_references_that_do_not_exist_cost_nothing():
    chat = ScriptedChat(lambda messages: "reply")
    environment = Workers({"a": Worker(chat, usd=1.0)})
    rollout = begin(environment)
    observation = ask(
        environment, rollout, ("a", "#1"), ("a", "#3 please"), ("a", "see #0"), ("a", "#1")
    )
    assert observation.text.splitlines() == [
        "#1 : there is no reply #1",
        "#2 : there is no reply #3",
        "#3 : there is no reply #0",
        "#4 : there is no reply #1",  # our own words about a mistake are not handed on
    ]
    assert not chat.calls and not rollout.replies and observation.quotable_texts == ("",) * 4


def test_tools_get_references_in_their_place():
    environment = Workers(
        {"number": lambda messages: "17", "sum": Worker(lambda text: eval(text), takes="text")}
    )
    rollout = begin(environment)
    observation = ask(environment, rollout, ("number", "x"), ("sum", "#1 + #1 + 1"))
    assert observation.text == "#1 : 17\n#2 : 35"
    assert ask(environment, rollout, ("sum", "1/0")).text.startswith(
        "#3 : Error: ZeroDivisionError"
    )


CALLS = st.tuples(st.sampled_from("abX"), st.integers(0, 9))
TURNS = st.lists(st.lists(CALLS, min_size=1, max_size=5), min_size=1, max_size=4)


@given(TURNS)
def test_any_episode_hands_on_what_it_refers_to(turns):
    """Every call gets exactly one number, one line and one part; a reference finds the part of its
    number.
    """
    environment = Workers({"a": ECHO, "b": ECHO}, max_calls=4)
    rollout = begin(environment)
    for calls in turns:
        before = len(rollout.quotable_texts)
        observation = ask(
            environment,
            rollout,
            *((name, f"see #{number}" if number else "go") for name, number in calls),
        )
        headers = re.findall(r"^#(\d+) : ", observation.text, re.MULTILINE)
        assert [int(number) for number in headers] == [*range(before + 1, before + len(calls) + 1)]
        assert len(observation.quotable_texts) == len(calls)
        for place, (name, number) in enumerate(calls):
            part = observation.quotable_texts[place]
            is_made = place < 4 and name != "X"
            refers_to = rollout.quotable_texts[number - 1] if 0 < number <= before + place else ""
            if is_made and (not number or refers_to):
                request = f"see #{number}" if number else "go"
                references = {number: refers_to} if number else {}
                assert part == f"echo {quote(references, request)}"
            else:
                assert part == ""


# --- framing --------------------------------------------------------------------------------------

HOSTILE = st.text(
    alphabet=st.sampled_from("#12 :\n\r\x0b\x0c\x85\u2028\u2029aRequest:<>/replis"), max_size=40
)


@given(HOSTILE, HOSTILE)
def test_no_worker_can_pose_as_another(first, second):
    replies = [first or "x", second or "x"]
    chats = {
        name: ScriptedChat(lambda messages, text=text: Reply(text))
        for name, text in zip("ab", replies, strict=True)
    }
    environment = Workers(chats)
    observation = ask(environment, begin(environment), ("a", "x"), ("b", "y"))
    lines = environment.grammar.escape(observation.text).splitlines()
    assert [line[:2] for line in lines if not line.startswith("  ")] == ["#1", "#2"]
    quoted = quote({1: first, 2: second}, "the request")
    assert [line for line in quoted.splitlines() if line and not line.startswith("  ")] == [
        "Quoted replies:",
        *(f"#{n} : {(text.splitlines() or [''])[0]}" for n, text in ((1, first), (2, second))),
        "Request:",
        "the request",
    ]


# --- mistakes and failures ------------------------------------------------------------------------


def test_references_cannot_blow_up_a_request():
    """A request of a few kilobytes could hand on a long reply thousands of times, and the next one
    that reply.
    """
    sent = []

    def repeat(text: str) -> str:
        sent.append(len(text))
        return text

    environment = Workers({"tool": Worker(repeat, takes="text")}, max_calls=8)
    rollout = begin(environment)
    ask(environment, rollout, ("tool", "x" * 10_000))
    for number in range(1, 9):
        ask(environment, rollout, ("tool", f"#{number} " * 1000))
        ask(environment, rollout, *[("tool", " ".join(f"#{i}" for i in range(1, number)))])
    assert max(sent) <= 2**20
    assert "1048576 characters" in rollout.observations[1].text
    assert rollout.counts["workers/tool"] == len(sent)

    # A reply may still be handed on whole.
    ask(environment, rollout, ("tool", "y" * 500_000))
    number = len(rollout.quotable_texts)
    ask(environment, rollout, ("tool", f"#{number} and #{number}"))
    assert sent[-1] == 1_000_005


def test_mistakes_of_the_agent_are_told_to_it():
    environment = Workers({"a": ECHO}, max_calls=2)
    observation = ask(environment, begin(environment), ("z", "x"), ("a", "y"), ("a", "y"))
    assert observation.text.splitlines() == [
        "#1 : there is no worker z , only a",
        "#2 : echo y",
        "#3 : only 2 calls in one turn",
    ]
    assert observation.error is None and observation.quotable_texts == ("", "echo y", "")


def failing(error):
    return ScriptedChat([error])


def test_a_failure_ends_the_rollout_by_default():
    environment = Workers({"a": failing(ServerFailed("down")), "b": ECHO})
    observation = ask(environment, begin(environment), ("a", "x"), ("b", "y"))
    assert isinstance(observation.error, ServerFailed)


def test_a_failure_may_be_visible():
    chat = ScriptedChat(lambda messages: "reply")
    environment = Workers(
        {"a": Worker(failing(ServerFailed("down")), usd=1.0), "b": chat}, unavailable="visible"
    )
    rollout = begin(environment)
    observation = ask(environment, rollout, ("a", "x"), ("b", "see #1"), ("b", "y"))
    assert observation.error is None
    assert observation.text.splitlines() == ["#1 : unavailable", "#2 : unavailable", "#3 : reply"]
    assert observation.quotable_texts == ("", "", "reply") and len(chat.calls) == 1
    assert [reply.error is None for reply in rollout.replies] == [False, True]
    assert sum(reply.worth.cost_usd for reply in rollout.replies) == 0


@pytest.mark.parametrize("error", [BudgetExceeded("spent"), Misconfigured("wrong key")])
def test_fatal_errors_always_end_the_rollout(error):
    environment = Workers({"a": failing(error)}, unavailable="visible")
    assert ask(environment, begin(environment), ("a", "x")).error is not None


def test_a_bug_in_a_worker_is_a_failure():
    class Agent:
        async def aanswer(self, question, seed):
            raise ValueError("a bug")

    environment = Workers({"a": Agent(), "b": ScriptedChat(lambda messages: "reply", latency=0.01)})
    observation = ask(environment, begin(environment), ("a", "x"), ("b", "y"))
    assert isinstance(observation.error, ServerFailed) and observation.quotable_texts == (
        "",
        "reply",
    )


def test_outages_of_tools_are_failures():
    def tool(text):
        raise ConnectionError("no network")

    environment = Workers({"a": Worker(tool, takes="text")})
    assert ask(environment, begin(environment), ("a", "x")).error is not None


def test_cancelling_a_step_cancels_its_calls():
    """Also the second, which waits for the reply of the first and is never made."""
    begun = asyncio.Event()
    requests = []
    cancelled = []

    async def slow(messages):
        requests.append(messages[-1]["content"])
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.append(requests[-1])
            raise

    environment = Workers({"a": slow})
    rollout = begin(environment)
    rollout.add_turn(Sample([2]), environment.grammar.parse(asks(("a", "x"), ("a", "see #1"))))

    async def cancel():
        task = asyncio.ensure_future(environment.step(rollout))
        await begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run(cancel())
    assert requests == cancelled == ["x"]


# --- kinds of workers, prices, records ------------------------------------------------------------


def test_a_search_engine_and_an_agent_as_workers():
    class Agent:
        async def aanswer(self, question, seed):
            rollout = Rollout([1], returned={"answer": f"agent on {question}"})
            rollout.observations.append(Observation("r", replies=(Reply("r"), Reply("r"))))
            return rollout.finish("answered")

    search = SearchEnvironment(
        lambda queries, k: [[Document(f"about {query}")] for query in queries]
    )
    environment = Workers({"agent": Worker(Agent(), usd=0.5), "search": search})
    rollout = begin(environment)
    observation = ask(environment, rollout, ("search", 'the "Nile"'), ("agent", "read #1"))
    assert 'about the "Nile"' in observation.quotable_texts[0]
    assert observation.quotable_texts[1].startswith("agent on Quoted replies:")
    assert len(rollout.replies) == 3 and rollout.replies[-1].usage.cost_usd == 0.5
    assert environment.chat_models == {}
    assert Workers({"a": ECHO, "b": Worker(str.upper, takes="text")}).chat_models == {"a": ECHO}


def test_prices_of_workers():
    priced = ScriptedChat(lambda messages: Reply("own price", usage=Usage(cost_usd=2.0)))
    replayed = ScriptedChat(lambda messages: Reply("replayed", cached=True))
    pool = {
        "own": Worker(priced, usd=9.0),
        "flat": Worker(ECHO, usd=0.25),
        "replayed": Worker(replayed, usd=0.5),
    }
    environment = Workers(pool)
    rollout = begin(environment)
    ask(environment, rollout, ("own", "x"), ("flat", "x"), ("replayed", "x"))
    assert [reply.worth.cost_usd for reply in rollout.replies] == [2.0, 0.25, 0.5]
    assert [reply.usage.cost_usd for reply in rollout.replies] == [2.0, 0.25, 0.0]
    rollout.finish("answered")
    assert CostReward(1.0)([rollout]) == [-2.75]
    assert rollout.counts == {
        "workers/own": 1.0,
        "workers/flat": 1.0,
        "workers/replayed": 1.0,
        "workers_usd/own": 2.0,
        "workers_usd/flat": 0.25,
        "workers_usd/replayed": 0.5,
    }
    assert costs_by_worker(rollout) == {
        "own": {"calls": 1, "cost_usd": 2.0},
        "flat": {"calls": 1, "cost_usd": 0.25},
        "replayed": {"calls": 1, "cost_usd": 0.5},
    }
    assert costs_by_worker(Rollout([1])) == {}


def test_identical_requests_of_a_step_are_shared():
    chat = ScriptedChat(lambda messages: "reply")
    environment = Workers({"a": Worker(chat, usd=1.0)}, share_replies=True)
    costs = []
    for seed in (1, 2):
        rollout = begin(environment, seed=seed)
        rollout.batch = "step 1"
        ask(environment, rollout, ("a", "x"))
        costs.append((rollout.replies[0].usage.cost_usd, rollout.replies[0].worth.cost_usd))
    assert len(chat.calls) == 1 and costs == [(1.0, 1.0), (0.0, 1.0)]


def test_who_was_in_the_pool_is_recorded():
    environment = Workers({"a": Worker(ECHO, "echoes")}, names=["P", "Q"])
    rollout = begin(environment, budget="low")
    (name,) = rollout.row["workers"]
    ask(environment, rollout, (name, "x"))
    record = rollout_record(rollout)
    assert record["workers"] == {name: "a"} and record["budget"] == "low"
    assert record["observations"][0]["parts"] == ["echo x"]


@given(st.lists(st.text(max_size=5), max_size=4))
def test_the_log_of_episodes_in_flight_keeps_parts(parts):
    observation = Observation("shown", quotable_texts=tuple(parts))
    assert observation_from_json(observation_to_json(observation)) == observation


# --- pools ----------------------------------------------------------------------------------------

POOL = {name: Worker(ECHO, f"knows {name}") for name in ("facts", "numbers", "forms", "code")}


@given(st.integers(0, 2**60), st.integers(0, 2**60))
def test_a_group_has_one_pool(seed, other):
    environment = Workers(POOL, sizes=[2, 3], names="ABCDEF")
    row = {"reset_seed": seed}
    workers = environment.draw_members(row)
    assert workers == environment.draw_members(dict(row))
    assert len(workers) in (2, 3) and set(workers) <= set("ABCDEF")
    assert len(set(workers.values())) == len(workers) and set(workers.values()) <= set(POOL)
    assert environment.draw_members({"reset_seed": other}).keys() <= set("ABCDEF")


def test_pools_differ_between_groups_and_a_row_may_fix_its_own():
    environment = Workers(POOL, sizes=[2, 3], names="ABCDEF")
    drawn = [environment.draw_members({"reset_seed": seed}) for seed in range(50)]
    assert len({tuple(workers.items()) for workers in drawn}) > 30
    assert {len(workers) for workers in drawn} == {2, 3}
    fixed = environment.draw_members({"reset_seed": 1, "pool": ["forms", "code"]})
    assert sorted(fixed.values()) == ["code", "forms"]
    with pytest.raises(ValueError, match="nobody"):
        environment.draw_members({"pool": ["nobody"]})


def test_the_prompt_describes_the_pool_and_the_budget():
    environment = Workers(POOL, names="ABCDEF")
    row = begin(environment, budget=0.5).row
    lines = row["prompt"][0]["content"].splitlines()
    assert lines[0] == "Workers:" and lines[5] == "Budget: at most $0.5" and lines[-1] == "q"
    assert [line.partition(": ")[0] for line in lines[1:5]] == list(row["workers"])
    # An empty cell among numbers is no budget.
    assert "Budget" not in str(begin(environment, budget=float("nan")).row["prompt"])
    text = environment.reset({"prompt": "plain text"})["prompt"]
    assert text.startswith("Workers:\n") and text.endswith("\n\nplain text")


def test_the_pool_is_in_the_identity():
    environment = Workers(POOL)
    other = Workers({**POOL, "code": Worker(ScriptedChat(["x"]), "knows code")})
    assert environment.identity != other.identity
    assert environment.identity == Workers(POOL).identity


@pytest.mark.parametrize(
    ("pool", "options"),
    [
        ({}, {}),
        ({"a": ECHO}, {"sizes": [2]}),
        ({"a": ECHO}, {"names": ["A"]}),  # no description
        (POOL, {"names": "ABC"}),
        (POOL, {"unavailable": "hidden"}),
        (POOL, {"max_calls": 0}),
        ({'a"b': ECHO}, {}),
    ],
)
def test_wrong_options(pool, options):
    with pytest.raises(ValueError):
        Workers(pool, **options)


def test_wrong_workers():
    with pytest.raises(TypeError):
        Workers({"a": 3})
    with pytest.raises(ValueError):
        Worker(ECHO, "two\nlines")
    with pytest.raises(ValueError):
        Worker(ECHO, usd=-1)


# --- native tool calls ----------------------------------------------------------------------------


def test_native_calls():
    environment = Workers({"a": ECHO, "b": ECHO}, grammar=ToolGrammar())
    rollout = begin(environment)
    calls = [
        '{"name": "ask", "arguments": {"worker": "a", "request": "x"}}',
        '{"name": "ask", "arguments": {"worker": "b", "request": "see #1"}}',
        '{"name": "other", "arguments": {}}',
        "no json",
    ]
    text = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    observation = ask(environment, rollout, text=text)
    shown = observation.text.split(environment.grammar.separator)
    assert [reply[:5] for reply in shown] == ["#1 : ", "#2 : ", "#3 : ", "#4 : "]
    assert observation.quotable_texts[:2] == ("echo x", f"echo {quote({1: 'echo x'}, 'see #1')}")
    assert observation.quotable_texts[2:] == ("", "")
    rollout.add_turn(Sample([4]), environment.grammar.parse("<think>t</think>#1"))
    assert rollout.finish("answered").answer == "echo x"
    assert environment.chat_template_kwargs["tools"][0]["function"]["name"] == "ask"


def test_a_form_is_saved_with_the_agent(tmp_path):
    spec = AgentSpec("{question}", grammar=AskGrammar(act="call"), limits=Limits(max_turns=3))
    spec.save(tmp_path)
    assert AgentSpec.load(tmp_path).grammar == AskGrammar(act="call")
