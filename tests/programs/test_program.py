"""Programs against the gateway, with a scripted policy: what they get, what becomes of the rollout."""

import asyncio
import concurrent.futures.thread
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
import zlib
from array import array

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from agentic_prompting.harnesses import CommandProgram, Workspace
from agentic_prompting.llm import (
    Budget,
    FunctionChat,
    Misconfigured,
    Reply,
    ServerFailed,
    Usage,
    charge,
)
from agentic_prompting.programs import Program
from agentic_prompting.rollout import Limits, PlainText, rollout_seed
from support.programs import ADD, byte_format, byte_tokenizer, called, play_program

ASK = [{"role": "user", "content": "q"}]


def client(base_url, api_key, **options):
    return AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0, **options)


async def say(base_url, api_key, messages=ASK, **options):
    completion = await client(base_url, api_key).chat.completions.create(
        model="agent", messages=messages, **options
    )
    return completion.choices[0]


def decoded(ids):
    return byte_tokenizer().decode(ids)


def test_a_history_is_one_sequence_of_sampled_ids():
    async def agent(row, base_url, api_key):
        messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
        for i in range(3):
            said = (await say(base_url, api_key, messages)).message
            messages += [
                said,
                {"role": "user", "content": f"more {i}"},
            ]  # the client's own object goes back
        return said.content

    turn = "<think>\nhm\n</think>\n\nyes  "  # whose thought the template drops from a history, and the client as well
    rollout, policy = play_program(agent, lambda text, request: turn)
    assert rollout.status == "answered" and rollout.answer == "yes" and rollout.others == []
    assert decoded(rollout.prompt_ids) == (
        "<|im_start|>system\nbe "
        "brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    between = "\n<|im_start|>user\nmore {}<|im_end|>\n<|im_start|>assistant\n"
    whole = f"{turn}<|im_end|>".join(["", between.format(0), between.format(1), ""])
    assert decoded(rollout.ids) == whole
    sampled = len(byte_tokenizer()(f"{turn}<|im_end|>")["input_ids"])
    assert sum(rollout.mask) == 3 * sampled and len(rollout.logprobs) == len(rollout.ids)
    assert len({request.conversation for request in policy.requests}) == 1
    assert len({request.seed for request in policy.requests}) == 3


def test_branches_and_rewrites_have_each_token_once_whatever_the_order():
    async def agent(row, base_url, api_key):
        async def later(number, text, before=()):
            await asyncio.sleep(0.15 * (number if row["forward"] else 2 - number))
            await say(base_url, api_key, [*before, {"role": "user", "content": text}])

        ask = [{"role": "user", "content": "plan"}]
        ask += [(await say(base_url, api_key, ask)).message]
        await asyncio.gather(*(later(i, f"branch {i}", ask) for i in range(3)))
        await asyncio.gather(*(later(i, f"a summary {i}") for i in range(2)))
        return "x"

    plays = [
        play_program(agent, lambda _, asked: str(asked.seed % 1000), row={"forward": one})[0]
        for one in (1, 0)
    ]
    found = [
        [sequence.prompt_ids + sequence.ids for sequence in rollout.sequences] for rollout in plays
    ]
    assert found[0] == found[1] and len(found[0]) == 5 and len(plays[0].turns) == 6
    sampled = sum(len(byte_tokenizer()(turn.text)["input_ids"]) + 1 for turn in plays[0].turns)
    assert sum(sum(one.mask) for one in plays[0].sequences) == sampled
    assert plays[0].counts["program/sequences"] == 5 and plays[0].counts["program/calls"] == 6


def test_the_same_question_twice_is_a_vote_with_two_samples():
    async def agent(row, base_url, api_key):
        votes = await asyncio.gather(*(say(base_url, api_key) for _ in range(3)))
        return ",".join(sorted(vote.message.content for vote in votes))

    rollout, policy = play_program(agent, lambda text, request: str(request.seed % 1000))
    assert len({request.seed for request in policy.requests}) == 3 and len(rollout.sequences) == 3
    assert (
        rollout.answer
        == play_program(agent, lambda text, request: str(request.seed % 1000))[0].answer
    )


def test_tools_and_their_results_stay_in_the_sequence():
    async def agent(row, base_url, api_key):
        messages = [{"role": "user", "content": "1+1"}]
        got = await say(base_url, api_key, messages, tools=[ADD])
        assert got.finish_reason == "tool_calls" and got.message.content == "I add."
        assert [json.loads(call.function.arguments) for call in got.message.tool_calls] == [
            {"a": 1},
            {"a": 2},
        ]
        messages += [got.message]
        messages += [
            {"role": "tool", "tool_call_id": call.id, "content": "2"}
            for call in got.message.tool_calls
        ]
        return (await say(base_url, api_key, messages, tools=[ADD])).message.content

    calls = "\n".join(["I add.", called("add", '{"a": 1}'), called("add", '{"a": 2}')])
    rollout, policy = play_program(
        agent, lambda text, _: "It is 2." if "tool_response" in text else calls
    )
    assert rollout.answer == "It is 2." and len(rollout.sequences) == 1
    functions = [
        {"type": "function", "function": {"name": "add", "arguments": {"a": i}}} for i in (1, 2)
    ]
    history = [
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "I add.", "tool_calls": functions},
        *[{"role": "tool", "content": "2"}] * 2,
    ]
    whole = byte_tokenizer().apply_chat_template(
        history, tools=[ADD], tokenize=False, add_generation_prompt=True
    )
    assert policy.contexts()[1] == whole


def test_broken_arguments_that_come_back_wrapped_are_the_same_call():
    """PydanticAI sends back what it cannot read as the value of a made-up key, under the id of the
    call.
    """
    broken = '{"a": one}'

    async def agent(row, base_url, api_key):
        messages = [*ASK]
        (call,) = (await say(base_url, api_key, messages, tools=[ADD])).message.tool_calls
        assert call.function.arguments.startswith(broken)
        wrapped = {
            "name": "add",
            "arguments": json.dumps({"INVALID_JSON": call.function.arguments}),
        }
        messages += [
            {
                "role": "assistant",
                "tool_calls": [{"id": call.id, "type": "function", "function": wrapped}],
            }
        ]
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "no JSON"}]
        return (await say(base_url, api_key, messages, tools=[ADD])).message.content

    rollout, policy = play_program(
        agent, lambda text, _: "sorry" if "no JSON" in text else called("add", broken)
    )
    assert rollout.answer == "sorry" and len(rollout.sequences) == 1
    assert "INVALID_JSON" not in policy.contexts()[1]


def test_a_call_hashes_only_its_new_tokens(monkeypatch):
    hashed = []
    monkeypatch.setattr(
        "agentic_prompting.programs.call_tree.array",
        lambda kind, ids: hashed.append(ids) or array(kind, ids),
    )

    async def agent(row, base_url, api_key):
        messages = [{"role": "user", "content": "x" * 3000}]
        for _ in range(4):
            messages += [(await say(base_url, api_key, messages)).message, *ASK]
        return "x"

    _, policy = play_program(agent)
    assert sum(map(len, hashed)) == len(policy.requests[-1].context)
    for request in policy.requests:
        whole_hash = zlib.crc32(array("q", request.context).tobytes())
        assert request.seed == rollout_seed(0, whole_hash, 0)


def test_calls_of_a_long_conversation_hold_it_once():
    calls = []

    async def agent(row, base_url, api_key):
        messages = [{"role": "user", "content": "x" * 3000}]
        for _ in range(8):
            messages += [(await say(base_url, api_key, messages, tools=[ADD])).message, *ASK]
        return "x"

    _, policy = play_program(agent, trains=lambda call: calls.append(call) or True)
    assert [call.context for call in calls] == [request.context for request in policy.requests]
    lists = [one for call in calls for one in vars(call).values() if isinstance(one, list)]
    assert sum(map(len, lists)) < 2 * len(calls[-1].context)
    assert [len(call.request.messages) for call in calls] == [*range(1, 16, 2)]
    assert (
        len({id(call.request.messages[0]) for call in calls})
        == len({id(call.request.tools) for call in calls})
        == 1
    )


def test_stop_and_max_tokens():
    async def agent(row, base_url, api_key):
        stopped = await say(base_url, api_key, stop=["</a>"])
        cut = await say(base_url, api_key, [{"role": "user", "content": "other"}], max_tokens=3)
        return {
            "answer": "x",
            "seen": [
                stopped.message.content,
                stopped.finish_reason,
                cut.message.content,
                cut.finish_reason,
            ],
        }

    rollout, _ = play_program(agent, lambda text, request: "<a>x</a> and more")
    assert rollout.returned["seen"] == ["<a>x", "stop", "<a>", "length"]
    assert {decoded(sequence.ids) for sequence in rollout.sequences} == {"<a>x</a>", "<a>"}, (
        "what came after is not learned"
    )


def test_a_stop_at_the_end_of_a_long_reply_is_found_without_reading_it_anew_for_each_token(
    monkeypatch,
):
    async def agent(row, base_url, api_key):
        return (await say(base_url, api_key, stop=["</answer>"])).message.content

    read = []
    tokenizer = byte_format("qwen3").tokenizer
    decode = tokenizer.decode
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, **options: read.append(len(ids)) or decode(ids, **options)
    )
    limits = Limits(5, 4000, 4000, 8000)
    rollout, _ = play_program(
        agent, lambda text, request: "x" * 3000 + "</answer>..", limits=limits
    )
    assert rollout.answer == "x" * 3000 and len(rollout.ids) == 3009
    assert sum(read) < 20 * 3000


def test_long_messages_are_rendered_beside_the_loop_that_serves_all_rollouts(monkeypatch):
    """The first one of a conversation, and those that follow a reply."""
    where = []
    encode = PlainText.encode

    def noted(self, text):
        where.append((len(text) > 20_000, threading.current_thread().name))
        return encode(self, text)

    async def agent(row, base_url, api_key):
        messages = []
        for _ in range(2):
            messages += [{"role": "user", "content": "x" * 30_000}]
            messages += [(await say(base_url, api_key, messages)).message]
        return "done"

    monkeypatch.setattr(PlainText, "encode", noted)
    rollout, _ = play_program(agent, limits=Limits(5, 100, 80_000, 80_000))
    assert rollout.status == "answered" and len(rollout.sequences) == 1
    long = [name for is_long, name in where if is_long]
    assert len(long) == 2 and "agentic-prompting-llm" not in long, "not on the loop"


def test_logprobs_are_those_of_the_sampled_tokens():
    async def agent(row, base_url, api_key):
        choice = await say(base_url, api_key, logprobs=True)
        return {
            "answer": "x",
            "seen": [(logprob.token, logprob.logprob) for logprob in choice.logprobs.content],
        }

    rollout, _ = play_program(agent, lambda text, request: "ab")
    assert rollout.returned["seen"] == [("a", -0.5), ("b", -0.5), ("<|im_end|>", -0.1)]


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_format_of_the_reply_is_refused_in_both_protocols_with_the_way_out(kind):
    async def agent(row, base_url, api_key):
        await say(base_url, api_key)
        with pytest.raises(openai.BadRequestError) as chat:
            await say(base_url, api_key, response_format={"type": kind})
        form = {"type": kind, "name": "x", "schema": {"type": "object"}}
        with pytest.raises(openai.BadRequestError) as responses:
            await client(base_url, api_key).responses.create(
                model="agent", input="q", text={"format": form}
            )
        assert (chat.value.param, responses.value.param) == ("response_format", "text.format")
        assert all(
            "without constraints" in str(one.value) and "mistakes=" in str(one.value)
            for one in (chat, responses)
        )
        return "refused"

    assert play_program(agent)[0].answer == "refused"


@pytest.mark.parametrize(
    "wish", [{"n": 2}, {"response_format": {"type": "json_object"}}, {"top_logprobs": 3}]
)
def test_what_is_not_offered_is_refused_by_name(wish):
    async def agent(row, base_url, api_key):
        await say(base_url, api_key)
        with pytest.raises(openai.BadRequestError) as refused:
            await say(base_url, api_key, **wish)
        return refused.value.code + " " + refused.value.param

    assert play_program(agent)[0].answer == f"unsupported_value {next(iter(wish))}"


async def raises(row, base_url, api_key):
    raise RuntimeError("boom")


async def silent(row, base_url, api_key):
    return "42"


async def slow(row, base_url, api_key):
    await say(base_url, api_key)
    await asyncio.sleep(30)


async def exits(row, base_url, api_key):
    sys.exit(3)


@pytest.mark.parametrize(
    "agent, what", [(raises, "boom"), (silent, "no call"), (slow, "longer"), (exits, "SystemExit")]
)
def test_failures_are_data(agent, what):
    rollout, _ = play_program(agent, timeout=1.5)
    assert rollout.status == "failed" and what in str(rollout.error)


def test_a_function_that_hangs_lets_the_interpreter_exit():
    end = threading.Event()
    rollout, _ = play_program(lambda row, base_url, api_key: end.wait(), timeout=0.5)
    threads = [one for one in threading.enumerate() if one.name.startswith("agentic-prompting-pr")]
    assert rollout.status == "failed" and threads
    # Python waits at exit for the threads of a ThreadPoolExecutor, and for all that are no daemons.
    known = concurrent.futures.thread._threads_queues
    assert all(thread.daemon and thread not in known for thread in threads)
    end.set()


async def reads_json(row, base_url, api_key):
    return json.loads((await say(base_url, api_key)).message.content)["a"]


def test_a_mistake_of_the_policy_learns_and_a_bug_does_not():
    assert play_program(reads_json)[0].status == "failed"
    rollout, _ = play_program(reads_json, mistakes=(ValueError, KeyError))
    assert rollout.status == "malformed" and rollout.answer is None and sum(rollout.mask)
    assert Program.reward([rollout]) == [0.0]
    assert play_program(reads_json, lambda text, request: '{"a": 7}')[0].answer == "7"


@pytest.mark.parametrize(
    "returned, status",
    [
        (None, "malformed"),
        ("  ", "malformed"),
        ({"reward": None}, "failed"),
        ({"reward": "good"}, "failed"),
        (float("nan"), "failed"),
        ({"answer": "x", "reward": float("inf")}, "failed"),
    ],
)
def test_no_answer_is_no_success(returned, status):
    async def agent(row, base_url, api_key):
        await say(base_url, api_key)
        return returned

    assert play_program(agent)[0].status == status


def test_rewards_that_the_program_returns():
    def agent(row, base_url, api_key):
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            client.chat.completions.create(model="agent", messages=ASK)
        return row["returns"]

    played = [
        play_program(agent, row={"returns": one})[0] for one in (0.25, {"answer": "x", "reward": 1})
    ]
    assert Program.reward(played) == [0.25, 1.0] and played[1].answer == "x"
    unrewarded = play_program(agent, row={"returns": "text"})[0]
    with pytest.raises(ValueError, match="no reward"):
        Program.reward([unrewarded])


def test_a_large_llm_is_counted_and_its_failure_ends_the_rollout():
    async def agent(row, base_url, api_key):
        await say(base_url, api_key)
        try:
            completions = client(base_url, api_key).chat.completions
            return (await completions.create(model="big", messages=ASK)).choices[0].message.content
        except openai.APIError:
            return "sorry"

    async def fine(messages, **options):
        return Reply(text=f"said {messages[-1]['content']}")

    async def down(messages, **options):
        return Reply(error=ServerFailed("down"))

    rollout, _ = play_program(agent, llms={"big": fine})
    assert rollout.answer == "said q" and len(rollout.replies) == 1
    assert rollout.counts["program/llm_calls"] == 1
    rollout, _ = play_program(agent, llms={"big": FunctionChat(down)})
    assert rollout.status == "failed" and "down" in str(rollout.error) and len(rollout.replies) == 1


def test_a_large_llm_is_charged_and_asked_for_another_sample_each_time():
    repeats = []

    async def fine(messages, repeat=None, session=None):
        repeats.append(repeat)
        return Reply(text="yes", usage=Usage(3, 2, 0.5))

    async def agent(row, base_url, api_key):
        await say(base_url, api_key)
        for _ in range(2):
            await client(base_url, api_key).chat.completions.create(model="big", messages=ASK)
        return "x"

    spenders = []

    class Spender(FunctionChat):
        def charge_to(self, budget, account):
            spenders.append(account)

    rollout, _ = play_program(agent, llms={"big": fine})
    assert repeats[0] == rollout.seed and len(set(repeats)) == 2
    assert sum(reply.usage.cost_usd for reply in rollout.replies) == 1.0
    charge(Budget(1.0), environment=Program(agent, llms={"big": Spender(fine)}))
    assert spenders == ["environment/big"]


def test_calls_after_the_end_are_refused_with_a_400():
    kept = {}

    async def agent(row, base_url, api_key):
        await say(base_url, api_key)
        kept["at"] = base_url, api_key
        return "x"

    play_program(agent)

    async def late():
        with pytest.raises(openai.BadRequestError) as refused:
            await say(*kept["at"])
        return refused.value

    error = asyncio.run(late())
    assert error.code == "rollout_ended" and "context" not in str(error)


def test_a_key_of_another_rollout_is_needed():
    async def agent(row, base_url, api_key):
        await say(base_url, api_key)
        with pytest.raises(openai.AuthenticationError):
            await say(base_url.replace(api_key, "x" * 43), "y")
        return "x"

    assert play_program(agent)[0].status == "answered"


def test_too_many_calls_and_sequences():
    """The refusal holds no number: opencode asks again where it reads one such as 429 or 500."""
    refusals = []

    async def agent(row, base_url, api_key):
        try:
            for i in range(9):
                await say(base_url, api_key, [{"role": "user", "content": str(i)}])
        except openai.BadRequestError as error:
            refusals.append(error.body["message"])
            raise

    for options in ({"max_calls": 3}, {"max_sequences": 3}):
        rollout, policy = play_program(agent, **options)
        assert "over" in refusals[-1] and not any(letter.isdigit() for letter in refusals[-1])
        assert rollout.status == "out_of_turns"
        assert len(policy.requests) == 3
        assert len(rollout.sequences) == 3
        assert rollout.counts["program/limits_reached"] == 1


def test_a_full_context_invites_compaction_thrice():
    codes = []

    async def agent(row, base_url, api_key):
        await say(base_url, api_key)
        for _ in range(4):
            try:
                await say(base_url, api_key, [{"role": "user", "content": "x" * 600}])
            except openai.BadRequestError as error:
                codes.append(error.code)
        return None

    rollout, _ = play_program(agent, limits=Limits(5, 100, 300, 500))
    assert codes == ["context_length_exceeded"] * 2 + ["rollout_ended"] * 2
    assert rollout.status == "truncated"


def test_a_context_that_is_full_again_after_each_summary_ends_the_rollout():
    """opencode summarises and starts anew for ever: both fit, and what comes after them does not."""
    codes = []

    async def agent(row, base_url, api_key):
        for i in range(4):
            await say(base_url, api_key, [{"role": "user", "content": f"summarise {i}"}])
            try:
                await say(base_url, api_key, [{"role": "user", "content": "x" * 600}])
            except openai.BadRequestError as error:
                codes.append(error.code)
        return None

    rollout, _ = play_program(agent, limits=Limits(5, 100, 300, 500))
    assert codes == ["context_length_exceeded"] * 2 + ["rollout_ended"] * 2
    assert rollout.status == "truncated"


def test_a_program_that_compacts_goes_on():
    async def agent(row, base_url, api_key):
        try:
            await say(base_url, api_key, [{"role": "user", "content": "x" * 600}])
        except openai.BadRequestError:
            return (await say(base_url, api_key)).message.content

    assert play_program(agent, limits=Limits(5, 100, 300, 500))[0].status == "answered"


def test_a_blocking_client_in_a_coroutine_and_a_plain_function():
    async def blocking(row, base_url, api_key):
        with OpenAI(base_url=base_url, api_key=api_key, max_retries=0, timeout=20) as client:
            return (
                client.chat.completions.create(model="agent", messages=ASK)
                .choices[0]
                .message.content
            )

    def plain(row, base_url, api_key):
        return asyncio.run(blocking(row, base_url, api_key))

    assert play_program(blocking)[0].answer == "hello"
    assert [rollout.answer for rollout in play_program(plain, n=4)[0]] == ["hello"] * 4


def test_the_system_prompt_of_the_run():
    row = {"prompt": [{"role": "system", "content": "EVOLVED"}, {"role": "user", "content": "q"}]}

    async def agent(row, base_url, api_key):
        messages = [{"role": "system", "content": "own"}, *ASK]
        messages.append((await say(base_url, api_key, messages)).message)
        await say(base_url, api_key, [*messages, *ASK])
        return "x"

    rollout, policy = play_program(agent, row=row)
    assert "system\nEVOLVED\n\nown<" in policy.contexts()[0] and len(rollout.sequences) == 1

    async def takes(row, base_url, api_key, system_prompt):
        await say(base_url, api_key, [{"role": "user", "content": f"[{system_prompt}]"}])
        return "x"

    _, policy = play_program(takes, row=row)
    assert "[EVOLVED]" in policy.contexts()[0] and "system" not in policy.contexts()[0]


def test_a_client_that_hangs_up_leaves_no_trace():
    async def agent(row, base_url, api_key):
        with pytest.raises(openai.APITimeoutError):
            await client(base_url, api_key, timeout=0.3).chat.completions.create(
                model="agent", messages=ASK
            )
        return (await say(base_url, api_key)).message.content

    rollout, policy = play_program(
        agent, lambda text, request: str(request.seed), delay=1.0, max_sequences=1
    )
    assert len(policy.requests) == 2 and len(rollout.turns) == 1 and len(rollout.sequences) == 1
    assert policy.requests[0].seed == policy.requests[1].seed, (
        "asked again, it is the same question"
    )


def test_a_reply_that_is_asked_for_again_leaves_the_loss():
    async def agent(row, base_url, api_key):
        await say(base_url, api_key)
        again = (
            await say(base_url, api_key, extra_headers={"x-stainless-retry-count": "1"})
        ).message
        return (await say(base_url, api_key, [*ASK, again, *ASK])).message.content

    rollout, policy = play_program(agent, max_sequences=1)
    assert len(policy.requests) == 3 and len(rollout.sequences) == 1 and len(rollout.turns) == 2
    assert rollout.counts["program/undelivered_tokens"] == len("hello") + 1


def test_a_vote_is_no_retry_of_another_one():
    """The second voter's first attempt was lost: it is that one which is asked again, not the first
    voter's.
    """

    async def agent(row, base_url, api_key):
        first = await say(base_url, api_key)
        with pytest.raises(openai.APITimeoutError):
            await client(base_url, api_key, timeout=0.2).chat.completions.create(
                model="agent", messages=ASK
            )
        again = await say(base_url, api_key, extra_headers={"x-stainless-retry-count": "1"})
        return first.message.content + again.message.content

    rollout, policy = play_program(agent, lambda text, request: str(request.seed % 1000), delay=0.6)
    assert len(policy.requests) == 3 and len(rollout.turns) == len(rollout.sequences) == 2


def test_the_policy_s_own_error_is_raised():
    def broken(text, request):
        raise MemoryError("no room for the model")

    async def agent(row, base_url, api_key):
        try:
            await say(base_url, api_key)
        except openai.APIError:
            await asyncio.sleep(30)

    with pytest.raises(MemoryError):
        play_program(agent, broken)


def test_untrained_calls_and_auxiliary_ones():
    async def agent(row, base_url, api_key):
        await say(base_url, api_key, [{"role": "user", "content": "a title, please"}])
        messages = [*ASK]
        messages.append((await say(base_url, api_key, messages, tools=[ADD])).message)
        summary = (
            await say(base_url, api_key, [{"role": "user", "content": "sum up"}])
        ).message.content
        await say(
            base_url, api_key, [{"role": "user", "content": f"so far: {summary}"}], tools=[ADD]
        )
        return "x"

    def write(text, request):
        return "A fine title" if "title" in text else "we did much" if "sum up" in text else "done"

    rollout, _ = play_program(agent, write)
    roles = {
        decoded(sequence.ids): (sequence.role, sum(sequence.mask) > 0)
        for sequence in rollout.sequences
    }
    assert roles["A fine title<|im_end|>"] == ("auxiliary", False)
    assert roles["we did much<|im_end|>"] == ("agent", True), "the summary comes back"
    assert rollout.counts["program/auxiliary_calls"] == 1 and rollout.role == "agent"
    chosen, _ = play_program(
        agent, write, trains=lambda call: "title" in call.request.messages[-1].text
    )
    assert [decoded(one.ids) for one in chosen.sequences if sum(one.mask)] == [
        "A fine title<|im_end|>"
    ]


def test_a_second_model_name_is_auxiliary_beside_the_first():
    async def agent(row, base_url, api_key, names=("agent", "small-router")):
        for name in names:
            await client(base_url, api_key).chat.completions.create(
                model=name, messages=[{"role": "user", "content": name}]
            )
        return "x"

    async def own_name(row, base_url, api_key):
        return await agent(row, base_url, api_key, ["gpt-4o", "gpt-4o"])

    rollout, _ = play_program(agent)
    assert [sequence.role for sequence in rollout.sequences] == ["agent", "auxiliary"]
    assert [one.role for one in play_program(own_name)[0].sequences] == ["agent", "agent"]


SCRIPT = """
import json, os, sys
from openai import OpenAI
assert sys.stdin.read() == ""
row = json.load(open(os.environ["AGENTIC_PROMPTING_ROW"]))
assert "answers" not in row and sys.argv[1] == row["question"], row
print("noise")
said = OpenAI().chat.completions.create(model="agent", messages=[{"role": "user", "content": row["question"]}])
print(json.dumps({"answer": said.choices[0].message.content}))
"""


def test_a_command_reads_its_row_from_a_file_without_the_truth(tmp_path):
    (tmp_path / "agent.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "agent.py"), "{question}"]
    rollout, policy = play_program(
        command, row={"question": "why {x}?", "answers": ["SECRET"]}, timeout=60
    )
    assert rollout.answer == "hello", rollout.error
    assert "SECRET" not in policy.contexts()[0]


@pytest.mark.timeout(120)  # a command that goes on would do so for hours
def test_commands_end_with_their_whole_group(tmp_path):
    beats = tmp_path / "beats"  # grows for as long as the grandchild lives
    grandchild = f"while true; do echo >> {beats}; sleep 0.1; done"
    # Unconfined: a sandbox ends its processes by itself, and could not write here.
    workspace = Workspace(isolation="none")
    command = ["sh", "-c", f"({grandchild}) & sleep 10000"]
    rollout, _ = play_program(command, timeout=5.0, workspace=workspace)
    assert rollout.error.kind == "TimedOut"
    size_at_end = beats.stat().st_size
    time.sleep(1)
    assert 0 < size_at_end == beats.stat().st_size


def test_exit_codes(tmp_path):
    command = [
        sys.executable,
        "-c",
        SCRIPT.replace("print(json", "sys.exit('no such thing'); print(json"),
        "q",
    ]
    rollout, _ = play_program(command, timeout=60)
    assert rollout.status == "failed" and "no such thing" in str(rollout.error)
    rollout, _ = play_program(command, mistakes=(1,), timeout=60)
    assert rollout.status == "malformed" and sum(rollout.mask)


def requested(path, data, key):
    """Status and error of a raw request."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(path, data, headers)) as reply:
            return reply.status, None
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]


def test_requests_that_no_client_sends_get_an_error_in_the_form_of_openai(caplog):
    found = []

    def agent(row, base_url, api_key):
        body = json.dumps(
            {"model": "agent", "messages": [{"role": ["user"], "content": "q"}]}
        ).encode()
        paths = "/embeddings", "/v1/chat/completions", *["/chat/completions"] * 5
        bodies = body, body, None, b"x" * (2**22 + 1), body, body, body
        found.extend(
            requested(base_url + path, given, api_key)
            for path, given in zip(paths, bodies, strict=True)
        )
        assert not any(api_key in json.dumps(error) for _, error in found)

    rollout, _ = play_program(agent)
    assert "made no call" in str(rollout.error)
    assert [status for status, _ in found] == [404, 404, 404, 413, 400, 400, 400]
    assert found[0][1]["message"].startswith("POST /v1/embeddings is not served here.")
    assert found[1][1]["message"].startswith("POST /v1/v1/chat/completions is not served here.")
    assert "base_url ends with /v1 already" in found[1][1]["message"]
    assert found[2][1]["message"].startswith("GET /v1/chat/completions is not served")
    assert found[3][1]["code"] == "request_too_large" and "4194304" in found[3][1]["message"]
    records = [
        record
        for record in caplog.records
        if "cannot be read" in record.getMessage() and record.levelname == "WARNING"
    ]
    assert len(records) == 1, "once, however often an agent sends it"


@pytest.mark.parametrize("options", [{"timeout": float("nan")}, {"timeout": 0}, {"max_calls": 0}])
def test_every_limit_is_positive(options):
    with pytest.raises(ValueError, match="must be positive"):
        Program(lambda row, base_url, api_key: "x", **options)


@pytest.mark.parametrize(
    ("options", "says"), [({"host": "no.such.host"}, "not known"), ({"port": 99999}, "0-65535")]
)
def test_an_address_that_cannot_be_opened_is_named(options, says):
    program = Program(lambda row, base_url, api_key: None, **options)
    with pytest.raises(
        Misconfigured, match=f"the address of programs cannot be opened on host=.*{says}"
    ):
        program.check()


def test_a_port_that_is_taken_is_named_and_can_be_opened_later():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        program = Program(lambda row, base_url, api_key: None, port=taken.getsockname()[1])
        with pytest.raises(Misconfigured, match="in use"):
            program.check()
    program.check()
    program.close()


def test_programs_elsewhere_get_the_public_address():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    got = []

    async def agent(row, base_url, api_key):
        got.append(base_url.replace(api_key, "KEY"))
        return (await say(base_url, api_key)).message.content

    options = {"host": "0.0.0.0", "port": port, "public_url": f"http://localhost:{port}/"}
    assert play_program(agent, **options)[0].answer == "hello"
    assert got == [f"http://localhost:{port}/KEY/v1"]


def test_an_address_of_ip_version_6():
    async def agent(row, base_url, api_key):
        return (await say(base_url, api_key)).message.content

    with socket.socket(socket.AF_INET6) as tried:
        try:
            tried.bind(("::1", 0))
        except OSError:
            pytest.skip("this system has no ::1")
    assert play_program(agent, host="::1")[0].answer == "hello"


def test_arguments_that_cannot_work():
    with pytest.raises(TypeError, match="row, base_url, api_key"):
        Program(lambda row: "x")
    for command in (["my-agent"], "my-agent"):
        with pytest.raises(TypeError, match="CommandProgram"):
            Program(command)
    with pytest.raises(TypeError, match="command"):
        CommandProgram([])
    with pytest.raises(ValueError, match="own name"):
        Program(raises, llms={"agent": FunctionChat(lambda messages: "x")})
