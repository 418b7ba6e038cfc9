"""Spans without and with OpenTelemetry: names, parents across threads and processes, contents,
secrets, failures.
"""

import asyncio
import logging
import sys
import threading
import urllib.request

import pytest

from agentic_prompting.environments import LLMEnvironment
from agentic_prompting.evaluation import evaluate_agent
from agentic_prompting.evolution import ReflectionTask, propose_children
from agentic_prompting.harnesses.command import run_command
from agentic_prompting.harnesses.workspace import Workspace
from agentic_prompting.interop import ToolEnvironment
from agentic_prompting.llm import (
    OpenAIChat,
    ScriptedChat,
    ServerFailed,
    complete,
    run,
    spans,
    start_traces,
)
from agentic_prompting.programs import Program
from agentic_prompting.refine import ProRefiner
from agentic_prompting.rollout import (
    ChatFormat,
    Environment,
    Environments,
    Limits,
    Rollout,
    TagGrammar,
    play,
)
from agentic_prompting.rollout.play import observe
from support.operators import MIXED, reference
from support.programs import Scripted, byte_format, called
from support.servers import LoopbackServer, unused_url
from support.traces import Collector, collected_over_grpc, in_process, traced

REQUEST = (
    "<think> planted-thought </think> <interaction_prompt> planted-request </interaction_prompt>"
)
ANSWER = "<think> done </think> <answer> planted-answer </answer>"
KEY = "qwertyuiop-planted-0815"  # of no well-known form


def turns_of(text, request):
    return ANSWER if "interaction_response" in text else REQUEST


def played(environment, say=turns_of, question="planted-question"):
    """One rollout, on the background loop."""
    form = ChatFormat(
        byte_format().tokenizer, getattr(environment, "grammar", None) or TagGrammar()
    )
    rollout = Rollout(
        form.prompt_ids([{"role": "user", "content": question}]), {"question": question}
    )
    run(
        play(
            rollout,
            Scripted(say, form),
            environment,
            form,
            Limits(max_turn_tokens=400, max_tokens=4000),
        )
    )
    return rollout


# --- off ------------------------------------------------------------------------------------------


def test_without_traces_nothing_is_made_and_nothing_imported():
    assert spans.span("a") is spans.span("b", {"x": 1}) is spans.under({"traceparent": "00-1-1-01"})
    assert not spans.is_on()
    assert spans.carrier() == spans.content("x", "y") == spans.messages("x", []) == {}
    done = in_process(
        "import sys; from agentic_prompting.llm import ScriptedChat, complete; complete(ScriptedChat(['a']), 'b')\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert done.stdout == "[]\n", done.stderr


def test_without_the_extra_its_name_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(
        ImportError, match=r"traces need the extra otel: pip install 'agentic-prompting\[otel\]'"
    ):
        start_traces()
    assert not spans.is_on()


pytest.importorskip("opentelemetry.sdk", reason="needs the extra otel")


# --- what there is --------------------------------------------------------------------------------


def test_an_episode_is_a_tree():
    with traced() as found:
        rollout = played(LLMEnvironment(ScriptedChat(["planted-reply"])))
    turns = [
        ("chat agent", []),
        ("execute_tool LLMEnvironment", [("chat ScriptedChat", [])]),
        ("chat agent", []),
    ]
    assert found.below(None) == [("invoke_agent agent", turns)]
    (episode,), (first, last), (call,) = (
        found.named(name) for name in ("invoke_agent agent", "chat agent", "chat ScriptedChat")
    )
    own = episode.attributes
    assert own["gen_ai.operation.name"] == "invoke_agent"
    assert own["agentic_prompting.status"] == "answered"
    assert own["agentic_prompting.turns"] == 2
    assert own["gen_ai.usage.output_tokens"] == sum(rollout.mask)
    assert first.attributes["gen_ai.usage.output_tokens"] + last.attributes[
        "gen_ai.usage.output_tokens"
    ] == sum(rollout.mask)
    assert call.kind.name == "CLIENT" and call.attributes["gen_ai.request.model"] == "ScriptedChat"
    assert format(episode.context.span_id, "016x") in rollout.traceparent


def test_one_of_several_environments_has_its_own_name():
    class Shop(Environment):
        def step(self, rollout):
            return 3

    with traced() as found:
        rollout = Rollout([1], {"environment": "shop"})
        observed = run(observe(Environments({"shop": Shop()}), rollout))
    assert [span.name for span in found.all] == ["execute_tool Shop"]
    assert "Shop.step" in str(observed.error) and "Environments" not in str(observed.error)


def test_contents_only_if_asked_for():
    with traced() as found:
        played(LLMEnvironment(ScriptedChat(["planted-reply"])))
        assert found.all and "planted" not in found.text
    with traced(content=True) as found:
        played(LLMEnvironment(ScriptedChat(["planted-reply"])))
        for word in ("question", "thought", "request", "reply", "answer"):
            assert f"planted-{word}" in found.text


def test_no_key_is_in_a_trace(monkeypatch):
    """Neither the endpoint's own, which it repeats in a reply, nor one in a variable of the
    environment.
    """
    monkeypatch.setenv("SOME_API_KEY", KEY)
    with (
        LoopbackServer(lambda request, n: f"your keys: {KEY} literal-{KEY[::-1]}") as server,
        traced(True) as found,
    ):
        chat = OpenAIChat("m", base_url=server.base_url, api_key=f"literal-{KEY[::-1]}")
        reply = complete(chat, f"is {KEY} right?")
        chat.close()
    assert KEY in reply.text and "your keys: [key] [key]" in found.text
    assert KEY not in found.text and KEY[::-1] not in found.text


def test_span_text_with_half_surrogate_pair_is_sent():
    with traced(content=True) as found:
        complete(ScriptedChat(["half \ud83d of a pair"]), "q")
    assert r"half \ufffd of a pair" in found.text


def test_chat_span_has_address_and_sends_traceparent():
    with LoopbackServer() as server, traced() as found:
        with OpenAIChat("gpt-x", base_url=server.base_url, price=(1e6, 1e6)) as chat:
            complete(chat, "q")
        (call,) = found.named("chat gpt-x")
    assert call.attributes["server.address"] == "127.0.0.1"
    assert f":{call.attributes['server.port']}/" in server.base_url
    assert call.attributes["gen_ai.usage.input_tokens"] == 10
    assert call.attributes["agentic_prompting.cost_usd"] == 15.0
    assert server.headers[0]["traceparent"].split("-")[1:3] == [
        format(call.context.trace_id, "032x"),
        format(call.context.span_id, "016x"),
    ]


def test_without_traces_no_header_is_sent():
    with LoopbackServer() as server, OpenAIChat("m", base_url=server.base_url) as chat:
        complete(chat, "q")
    assert "traceparent" not in server.headers[0]


def test_failures_have_their_class_and_no_text():
    with traced() as found:
        rollout = played(LLMEnvironment(ScriptedChat([ServerFailed("planted-cause")])))
    assert rollout.status == "failed"
    failed = {
        span.name: span.attributes["error.type"] for span in found.all if not span.status.is_ok
    }
    names = ("chat ScriptedChat", "execute_tool LLMEnvironment", "invoke_agent agent")
    assert failed == dict.fromkeys(names, "ServerFailed") and "planted" not in found.text


def test_a_users_model_with_a_property_that_raises():
    class Chat:
        @property
        def base_url(self):
            raise RuntimeError

        model = base_url

        def __call__(self, messages):
            return "fine"

    with traced() as found:
        assert complete(Chat(), "q").text == "fine"
    assert [span.name for span in found.all] == ["chat Chat"]


# --- parents --------------------------------------------------------------------------------------


def test_across_threads_and_the_background_loop():
    """A plain `step` runs in a thread, and its own call goes back to the loop; every rollout keeps
    its own parent.
    """
    chat = ScriptedChat(["reply"])
    threads = set()

    class Library(Environment):
        def step(self, rollout):
            threads.add(threading.current_thread().name)
            return complete(chat, rollout.row["question"]).text

    with traced() as found:
        with spans.span("outer"):
            names = [str(number) for number in range(8)]
            workers = [
                threading.Thread(target=played, args=(Library(), turns_of, name)) for name in names
            ]
            assert [played(Library(), question=name).status for name in names[:2]] == [
                "answered"
            ] * 2
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    episode = (
        "invoke_agent agent",
        [
            ("chat agent", []),
            ("execute_tool Library", [("chat ScriptedChat", [])]),
            ("chat agent", []),
        ],
    )
    # A thread that the user starts inherits no context from Python: its rollouts are traces of
    # their own.
    assert found.below(None) == [("outer", [episode] * 2), *[episode] * 8]
    assert threading.main_thread().name not in threads


def test_each_tool_of_a_turn_has_a_span():
    def add(a: int, b: int) -> int:
        """Adds.

        Args:
            a: One.
            b: Another.
        """
        return a + b

    calls = called("add", '{"a": 1, "b": 2}') + called("add", '{"a": 3}') + called("sub", "{}")
    with traced(content=True) as found:
        played(
            ToolEnvironment([add]), lambda text, request: "3" if "tool_response" in text else calls
        )
    (episode,) = found.below(None)
    assert episode[1][1] == ("execute_tool ToolEnvironment", [("execute_tool add", [])] * 2)
    results = {
        span.attributes.get("gen_ai.tool.call.result") for span in found.named("execute_tool add")
    }
    errors = {one.attributes.get("error.type") for one in found.named("execute_tool add")}
    assert results == {"3", None} and errors == {"TypeError", None}


def one_call(row, base_url, api_key):
    import openai

    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        headers = row.get("headers")
        client.chat.completions.create(
            model="agent", messages=[{"role": "user", "content": "q"}], extra_headers=headers
        )
    return "done"


@pytest.mark.parametrize(
    "headers", [None, {"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"}, {"traceparent": "x"}]
)
def test_a_programs_calls_are_below_its_rollout(headers):
    """Also if it sends no header, another trace's or nonsense."""
    program = Program(one_call)
    form = byte_format()
    rollout = Rollout([1], row={"question": "q", "headers": headers})
    with traced() as found:
        run(play(rollout, Scripted(lambda *_: "hello", form), program, form, Limits()))
    program.close()
    assert rollout.status == "answered"
    assert found.below(None) == [("invoke_agent agent", [("chat agent", [])])]


def test_a_command_gets_the_rollouts_name(tmp_path):
    code = "import os; print(os.environ.get('TRACEPARENT'))"

    place = Workspace(isolation="none").open({})

    async def commanded():
        with spans.span("outer") as outer:
            address = {"base_url": "http://x/v1", "address": "http://x", "api_key": "k"}
            command = [sys.executable, "-c", code]
            return await run_command(command, {}, address, place), outer.traceparent

    with traced():
        said, expected = run(commanded())
    place.close()
    assert said == expected and expected.startswith("00-")


def test_process_parent_comes_from_the_environment():
    code = (
        "import support.traces as t\nwith t.traced() as f:\n    with t.spans.span('a'): "
        "pass\nprint(f.all[0].to_json())"
    )
    done = in_process(code, TRACEPARENT=f"00-{'1' * 32}-{'2' * 16}-01")
    assert f'"parent_id": "0x{"2" * 16}"' in done.stdout, done.stderr


def test_service_passes_the_clients_traceparent_on(tiny_policy):
    from support.serving import running, scripted_agent, service_of  # needs the extra serve

    client = f"00-{'1' * 32}-{'2' * 16}-01"
    body = b'{"model": "agent", "messages": [{"role": "user", "content": "what is the capital of Kenya ?"}]}'
    headers = {"content-type": "application/json", "traceparent": client}
    with LoopbackServer(lambda request, n: "the answer is Nairobi .") as server, traced() as found:
        service = service_of(
            scripted_agent(tiny_policy, chat := OpenAIChat("m", base_url=server.base_url))
        )
        with chat, running(service) as at:
            urllib.request.urlopen(
                urllib.request.Request(f"{at}/v1/chat/completions", body, headers)
            ).read()
        (episode,) = found.named("invoke_agent agent")
        (call,) = found.named("chat m")
    assert format(episode.parent.span_id, "016x") == "2" * 16
    assert server.headers[0]["traceparent"] == f"00-{'1' * 32}-{call.context.span_id:016x}-01"


# --- refinements and reflections ------------------------------------------------------------------


def test_a_refinement():
    models = ScriptedChat(
        lambda messages: "<IMPROVED_PROMPT> Better. </IMPROVED_PROMPT> one two three"
    )
    with traced() as found:
        result = ProRefiner(models, models, models, max_steps=2).refine("Think.", "q")
    ((name, (step, *_)),) = found.below(None)
    assert name == "invoke_workflow refinement"
    assert step == ("invoke_workflow refinement step", [("chat ScriptedChat", [])] * 3)
    (whole,) = found.named(name)
    assert whole.attributes["agentic_prompting.stop_reason"] == result.stop_reason


def test_an_evaluation():
    chat = ScriptedChat(["1"])
    system = lambda questions: [complete(chat, question).text for question in questions]  # noqa: E731
    with traced() as found:
        evaluate_agent(
            system, {"sums": [{"question": "1", "answers": ["1"]}] * 2}, runs=2, progress=False
        )
    ((name, calls),) = found.below(None)
    assert name == "invoke_workflow evaluation" and calls == [("chat ScriptedChat", [])] * 4


def test_a_reflection():
    with traced() as found:
        asyncio.run(propose_children(reference(), ReflectionTask(0, MIXED, None, {}, {})))
    ((name, calls),) = found.below(None)
    assert name == "invoke_workflow mutation"
    assert calls
    assert {call[0] for call in calls} == {"chat ScriptedChat"}


# --- where they go --------------------------------------------------------------------------------

SEND = """
import logging, sys, time
logging.basicConfig(level=logging.WARNING)
from agentic_prompting.llm import start_traces, spans
start_traces()
for _ in range(int(sys.argv[1])):
    with spans.span("a", {"n": 1}): pass
    time.sleep(0.02)
print("the work is done")
"""


def test_standard_variables_set_the_exporter():
    with Collector() as collector:
        variables = {
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=me",
            "OTEL_RESOURCE_ATTRIBUTES": "team=blue",
        }
        done = in_process(SEND, 3, OTEL_EXPORTER_OTLP_ENDPOINT=collector.address, **variables)
    assert [span.name for span in collector.spans] == ["a"] * 3, done.stderr
    assert collector.headers[0]["x-tenant"] == "me"
    assert (
        collector.resources[0].items()
        >= {"service.name": "agentic-prompting", "team": "blue"}.items()
    )


def test_a_back_end_gets_them_over_grpc():
    pytest.importorskip(
        "opentelemetry.exporter.otlp.proto.grpc", reason="its exporter is not installed"
    )
    with collected_over_grpc() as (address, names):
        done = in_process(
            SEND, 3, OTEL_EXPORTER_OTLP_ENDPOINT=address, OTEL_EXPORTER_OTLP_PROTOCOL="grpc"
        )
    assert names == ["a"] * 3 and not done.stderr, done.stderr


def test_back_end_that_is_down_warns_once():
    down = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": unused_url().removesuffix("/v1"),
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    done = in_process(
        SEND, 40, **down, OTEL_BSP_MAX_QUEUE_SIZE="4", OTEL_BSP_MAX_EXPORT_BATCH_SIZE="2"
    )
    assert done.returncode == 0 and done.stdout == "the work is done\n"
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1 and "traces do not arrive" in lines[0] and "said once" in lines[0], (
        done.stderr
    )


@pytest.mark.parametrize(
    ("variable", "value"), [("OTEL_TRACES_EXPORTER", "none"), ("OTEL_SDK_DISABLED", "true")]
)
def test_standard_variables_switch_traces_off(variable, value):
    done = in_process(SEND, 2, **{variable: value})
    assert done.stdout == "the work is done\n" and not done.stderr


def test_an_exporter_that_is_not_installed_is_named():
    done = in_process(SEND, 1, OTEL_TRACES_EXPORTER="zipkin")
    assert "exporter zipkin: pip install opentelemetry-exporter-zipkin" in done.stderr


def test_no_secret_is_in_the_warning(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", f"authorization=Basic {KEY}")
    with traced():
        record = logging.makeLogRecord(
            {"levelno": logging.ERROR, "levelname": "ERROR", "msg": f"no: {KEY}"}
        )
        spans._ExportWarning().emit(record)
    assert "said once: no: [key]" in caplog.text and KEY not in caplog.text
