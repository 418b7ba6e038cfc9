"""Token counts: every form in which endpoints report them, and the budget that they are booked
into.
"""

import asyncio
import logging

import pytest
from hypothesis import given, strategies as st

from agentic_prompting.llm import BudgetExceeded, OpenAIChat, run
from agentic_prompting.llm.numbers import count_in_words, format_usd
from agentic_prompting.llm.types import cost_in_words
from agentic_prompting.llm.usage import TokenCounts, estimate_prompt_tokens, read_token_counts
from support.servers import Answer, LoopbackServer, completion

FORMS = {
    "whole numbers": {"prompt_tokens": 600, "completion_tokens": 400},
    "floats": {"prompt_tokens": 600.0, "completion_tokens": 400.0},
    "texts": {"prompt_tokens": "600", "completion_tokens": "400.0"},
    "Anthropic's names": {"input_tokens": 600, "output_tokens": 400},
    "Bedrock's names": {"inputTokens": 600, "outputTokens": 400, "totalTokens": 1000},
    "names of the AI SDK": {"promptTokens": 600, "completionTokens": 400},
    "Cohere's": {"billed_units": {"input_tokens": 600, "output_tokens": 400}},
    "a total": {"total_tokens": 1000},
    "a total and one part": {"prompt_tokens": 600, "total_tokens": 1000},
    "thoughts in the total": {"prompt_tokens": 600, "completion_tokens": 100, "total_tokens": 1000},
    "thoughts beside": {
        "prompt_tokens": 600,
        "completion_tokens": 100,
        "completion_tokens_details": {"reasoning_tokens": 300},
    },
    "cached input beside": {
        "input_tokens": 100,
        "cache_read_input_tokens": 500,
        "output_tokens": 400,
    },
}
UNREPORTED = {
    "none": None,
    "zeros": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    "negative": {"prompt_tokens": 600, "completion_tokens": -400},
    "of another kind": [600, 400],
}


def body_with(usage, text="hello"):
    body = completion(text)
    body["usage"] = usage
    return body


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr("agentic_prompting.llm.openai_http._FIRST_WAIT", 0.01)


def play(answer, calls=60, **settings):
    """Send many calls at once under a limit of 20,000 tokens; return the counts, the replies, the
    requests.
    """
    with (
        LoopbackServer(answer) as server,
        OpenAIChat("m", server.base_url, budget_tokens=20_000, **settings) as chat,
    ):

        async def send():
            return await asyncio.gather(
                *(chat([{"role": "user", "content": str(i)}]) for i in range(calls))
            )

        replies = run(send())
        return chat.stats, replies, len(server.requests)


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_usage_is_read(form):
    counts = read_token_counts(body_with(FORMS[form]))
    assert (counts.prompt or 0) + counts.completion == 1000
    if form != "a total":
        assert counts == TokenCounts(600, 400)


@pytest.mark.parametrize(
    "body",
    [
        {"choices": [{"usage": FORMS["floats"]}]},
        {"usage": {}, "x_groq": {"usage": FORMS["floats"]}},
        {
            "usageMetadata": {
                "promptTokenCount": 600,
                "candidatesTokenCount": 100,
                "thoughtsTokenCount": 300,
            }
        },
        {"prompt_eval_count": 600, "eval_count": 400},
        {"meta": {"tokens": {"input_tokens": 600, "output_tokens": 400}}},
    ],
)
def test_usage_in_another_place_is_read(body):
    assert read_token_counts(body) == TokenCounts(600, 400)


def test_a_total_is_split_by_the_estimate():
    assert read_token_counts({"usage": {"total_tokens": 1000}}, lambda: 300) == TokenCounts(
        300, 700
    )
    assert read_token_counts({"usage": {"total_tokens": 1000}}, lambda: 3000) == TokenCounts(
        1000, 0
    )


@pytest.mark.parametrize("form", FORMS)
def test_a_budget_holds_for_each_form(form):
    stats, replies, requests = play(lambda request, n: Answer(body=body_with(FORMS[form])))
    assert requests == 20 and stats.usage.tokens == 20_000 and stats.usage.estimated_tokens == 0
    assert sum(isinstance(reply.error, BudgetExceeded) for reply in replies) == 40


@pytest.mark.parametrize("form", UNREPORTED)
def test_unreported_usage_is_estimated_and_warned_once(form, caplog):
    with caplog.at_level(logging.WARNING):
        stats, replies, requests = play(lambda request, n: Answer(body=body_with(UNREPORTED[form])))
    assert requests <= 21 and 20_000 <= stats.usage.tokens < 22_000
    assert stats.usage.estimated_tokens > 10_000
    assert sum(isinstance(reply.error, BudgetExceeded) for reply in replies) == 60 - requests
    assert len([record for record in caplog.records if "estimated" in record.message]) == 1


def test_max_tokens_bounds_an_estimate():
    stats, _, requests = play(
        lambda request, n: Answer(body=body_with(None)), calls=30, max_tokens=10
    )
    assert requests == 30 and stats.usage.completion_tokens == 300


def test_a_long_text_is_estimated_by_its_length():
    stats, _, requests = play(
        lambda request, n: Answer(body=body_with(None, "word " * 6000)), calls=4
    )
    assert requests <= 2 and stats.usage.completion_tokens >= 7500 * requests


def test_without_a_budget_nothing_is_estimated(caplog):
    unreported = Answer(body=body_with(None))
    with (
        LoopbackServer(lambda request, n: unreported) as server,
        OpenAIChat("m", server.base_url) as chat,
    ):
        assert run(chat([{"role": "user", "content": "x"}])).text == "hello"
        assert chat.usage.tokens == 0 and not caplog.records


@pytest.mark.parametrize("usage", [{"prompt_tokens": 600, "completion_tokens": 400}, None])
def test_retries_of_paid_replies_stop_at_the_budget(usage):
    """Every second reply is paid for and has no text; five retries of 60 calls would cost 360,000
    tokens.
    """
    stats, _, requests = play(
        lambda request, n: Answer(body=body_with(usage, "" if n % 2 else "hello"))
    )
    assert requests <= 21 and 20_000 <= stats.usage.tokens < 22_000


def test_reported_errors_are_free():
    """An outage behind a router must not use up a budget."""
    error = {"error": {"message": "no upstream", "code": 502}}
    stats, _, _ = play(lambda request, n: Answer(body=error), calls=2, max_retries=1)
    assert stats.failed == 2 and stats.usage.tokens == 0


def test_half_a_completion_is_billed():
    page = Answer(body=b"<html>log in</html>")
    half = Answer(body=b'{"choices": [{"mess')
    assert play(lambda request, n: page, calls=1, max_retries=0)[0].usage.tokens == 0
    assert play(lambda request, n: half, calls=1, max_retries=0)[0].usage.tokens >= 1024


def test_prompts_are_estimated_rather_high():
    english = (
        "The capital of Kenya is Nairobi, and its currency is the shilling. " * 10
    )  # 141 tokens of GPT-4's
    assert 141 <= estimate_prompt_tokens([{"role": "user", "content": english}]) < 300
    image = [
        {"type": "text", "text": english},
        {"type": "image_url", "image_url": {"url": "data:" + "x" * 10**6}},
    ]
    assert estimate_prompt_tokens([{"role": "user", "content": image}]) < 2000
    assert estimate_prompt_tokens([{"role": "assistant", "content": None}]) < 10


def test_what_was_used_and_cost_nothing_has_no_known_price():
    assert cost_in_words(0.0, was_used=False) == "$0.0000"
    assert cost_in_words(0.25, was_used=True) == "$0.2500"
    assert "no price known" in cost_in_words(0.0, was_used=True)


def test_small_costs_keep_two_digits():
    assert cost_in_words(4.6e-6, was_used=True) == "$0.0000046"
    assert cost_in_words(0.00012345, was_used=True) == "$0.00012"
    assert cost_in_words(0.0012345, was_used=True) == "$0.0012"


@given(st.floats(min_value=1e-11, max_value=1e6))
def test_no_cost_is_shown_as_nothing_or_changed(usd):
    for decimals in (4, 5):
        text = format_usd(usd, decimals)
        assert float(text) == pytest.approx(usd, rel=0.051) and "e" not in text
        if usd >= 10.0 ** (1 - decimals):
            assert text == f"{usd:.{decimals}f}"


def test_one_thing_has_no_plural():
    assert count_in_words(1, "row") == "1 row" and count_in_words(0, "row") == "0 rows"
    assert count_in_words(1200, "reply", "replies") == "1,200 replies"
