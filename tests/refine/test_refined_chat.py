"""A refiner as a chat model."""

import asyncio

import pytest

from agentic_prompting.llm import (
    BadRequest,
    ChatModel,
    Closed,
    Reply,
    ServerFailed,
    Usage,
    complete,
)
from agentic_prompting.refine import (
    LabelVerifier,
    ProRefiner,
    RefinedChat,
)
from agentic_prompting.rewards import exact_match
from support.refine_models import PROMPT, Log, RuleModel, critic, refiner, words


def conversation(*texts, system=None):
    roles = ["user", "assistant"] * len(texts)
    expected_messages = [
        {"role": role, "content": text} for role, text in zip(roles, texts, strict=False)
    ]
    return ([{"role": "system", "content": system}] if system else []) + expected_messages


def test_a_refiner_as_a_chat_model():
    log = Log()
    chat = RefinedChat(refiner(log), prompt="By default.")
    assert isinstance(chat, ChatModel)
    reply = complete(chat, conversation("How many?", system=PROMPT))
    assert reply.text == words(35, "v4w") and reply.finish_reason == "stop" and reply.error is None
    assert reply.usage.prompt_tokens == 7 * len(log.calls) and not reply.cached
    assert log.calls[0][1] == conversation("How many?", system=PROMPT)
    complete(chat, "How many?")
    assert log.calls[13][1] == conversation("How many?", system="By default.")


def test_earlier_turns_reach_the_task_model_and_the_critic():
    log = Log()
    complete(
        RefinedChat(refiner(log)),
        conversation("Capital of Kenya?", "Nairobi.", "Its currency?", system=PROMPT),
    )
    assert log.calls[0][1] == conversation(
        "Capital of Kenya?", "Nairobi.", "Its currency?", system=PROMPT
    )
    shown = log.calls[1][1][-1]["content"]
    assert "User: Capital of Kenya?\n\nAssistant: Nairobi.\n\nUser: Its currency?" in shown


def test_sampling_of_the_caller_goes_to_the_task_model():
    log = Log()
    complete(RefinedChat(refiner(log)), "How many?", max_tokens=12, temperature=0.5, repeat=3)
    limits = [sent["max_tokens"] for role, _, sent in log.calls if role == "task"]
    assert limits == [10, 20, 30, 40, 12]
    assert {sent["temperature"] for role, _, sent in log.calls if role == "task"} == {0.5}
    assert {sent["temperature"] for role, _, sent in log.calls if role != "task"} == {0}


@pytest.mark.parametrize(
    "said", [[], conversation(" "), conversation("a", "b"), [{"role": "user"}], [{"content": 3}]]
)
def test_what_is_no_question_is_an_error_in_the_reply(said):
    reply = complete(RefinedChat(refiner()), said)
    assert isinstance(reply.error, BadRequest)
    assert "not a conversation to refine" in str(reply.error)
    assert isinstance(complete(RefinedChat(refiner()), "x", max_tokens=0).error, BadRequest)


def test_failures_come_through_as_errors():
    down = refiner(Log(fail_at=set(range(99)), error=Closed("the client was closed")))
    reply = complete(RefinedChat(down), "How many?")
    assert isinstance(reply.error, Closed)
    assert "task model in step 3" in str(reply.error)
    assert reply.text == ""
    partly = complete(RefinedChat(refiner(Log(fail_at={1, 3, 5}))), "How many?")
    assert partly.error is None and partly.text == words(
        35, "v0w"
    )  # the critic is down; the answer is there
    empty = refiner()
    empty.task.rule = lambda system, user: ""
    assert "empty" in str(complete(RefinedChat(empty), "How many?").error)


def test_it_waits_for_nothing_and_can_be_cancelled():
    async def main():
        asked = asyncio.Event()
        cancelled = []

        async def never(messages, **options):
            asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(messages)
                raise

        asking = asyncio.create_task(
            RefinedChat(refiner(log, feedback=never))(conversation("How many?"))
        )
        await asked.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        return cancelled

    log = Log()
    assert len(asyncio.run(main())) == 1 and log.roles == ["task"]


def test_what_cannot_be_a_chat_model():
    with pytest.raises(ValueError, match="which a conversation does not have"):
        RefinedChat(refiner(verifier=LabelVerifier(exact_match)))
    with pytest.raises(ValueError, match="the prompt is empty"):
        RefinedChat(refiner(), prompt="")


def test_checks_ask_each_model_once():
    checked = []

    class Checked(RuleModel):
        def check(self):
            checked.append(self.role)
            raise ServerFailed("down")

    large = Checked("critic", Log(), critic)
    checking = refiner(feedback=large, optimizer=large)
    with pytest.raises(ServerFailed):
        RefinedChat(checking).check()
    assert checked == ["critic"]


def test_a_refined_reply_is_worth_its_recorded_calls():
    """A resumed run finds them recorded: with a `CostReward` its rollouts got other rewards than
    before.
    """
    paid = Usage(1, 1, 0.25)
    saved = {"cached": True, "saved": Usage(1, 1, 0.25)}
    first, again = (
        complete(
            RefinedChat(ProRefiner(*[lambda messages, made=made: Reply("Fine.", **made)] * 3)), "q"
        )
        for made in ({"usage": paid}, saved)
    )
    assert (first.usage.cost_usd, again.usage.cost_usd) == (0.75, 0.0), "task, critic and optimizer"
    assert first.worth.cost_usd == again.worth.cost_usd == 0.75
