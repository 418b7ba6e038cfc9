"""What an evolution costs at least, said before its first call."""

import logging
from dataclasses import replace

import pytest

from agentic_prompting.evolution import EvolveConfig, Population, estimate_least_budget, evolve
from agentic_prompting.llm import Budget, OpenAIChat
from agentic_prompting.rewards import exact_match_reward
from support.evolving import ROOT, ROWS, SETTINGS, Policy, reflect, run


def estimate(policy=None, reference=None, prompt=ROOT, **changes):
    config = replace(SETTINGS, **changes)
    return estimate_least_budget(policy or Policy(), reference or reflect, ROWS, prompt, config)


def test_calls_are_those_of_two_steps():
    """With 6 problems and 4 attempts each: 24 replies for one prompt, then 48 for two."""
    least = estimate()
    assert (least.policy_calls, least.reference_calls) == (72, 2 * (24 + 6 + 1))
    assert estimate(mode="reflection").policy_calls == 48
    assert estimate(reflection="one_call").reference_calls == 2
    assert estimate(prompt=Population(ROOT)) == least


def test_the_first_two_steps_make_no_more_calls():
    policy = Policy()
    policy_calls = []
    reference_calls = []

    async def counting_policy(messages, **options):
        policy_calls.append(messages)
        return await policy(messages, **options)

    def counting_reference(messages):
        reference_calls.append(messages)
        return reflect(messages)

    config = replace(SETTINGS, steps=2, p_crossover=0.0)
    evolve(counting_policy, counting_reference, ROWS, exact_match_reward, ROOT, config)
    least = estimate(p_crossover=0.0)
    assert len(policy_calls) == least.policy_calls
    assert 0 < len(reference_calls) <= least.reference_calls


def test_dollars_need_both_prices():
    priced = OpenAIChat("m", base_url="http://127.0.0.1:9/v1", api_key="x", price=(1.0, 2.0))
    dear = OpenAIChat("m", base_url="http://127.0.0.1:9/v1", api_key="x", price=(10.0, 20.0))
    assert estimate(priced).usd is None and estimate().usd is None
    least = estimate(priced, priced)
    assert least.usd == pytest.approx(estimate(dear, dear).usd / 10) and least.usd > 0
    assert "$" in str(least) and "$" not in str(estimate())


def test_a_limit_of_replies_lowers_the_estimate():
    short = estimate(policy_sampling={"max_tokens": 10})
    assert short.tokens < estimate().tokens and short.reply_tokens == 10


@pytest.mark.parametrize(("tokens", "is_warned"), [(1_000, True), (10_000_000, False)])
def test_a_budget_below_it_is_warned_of(tokens, is_warned, caplog):
    with caplog.at_level(logging.WARNING):
        run(config=replace(SETTINGS, steps=1), budget=Budget(tokens=tokens))
    assert ("least useful" in caplog.text) == is_warned


def test_it_is_announced_before_the_first_call():
    policy = Policy()
    announced = []

    def announce(least):
        announced.append((least, policy.calls))

    run(policy, replace(SETTINGS, steps=1), on_start=announce)
    assert announced == [(estimate(), 0)]


def test_dollars_are_compared_with_dollars():
    priced = OpenAIChat("m", base_url="http://127.0.0.1:9/v1", api_key="x", price=(1.0, 2.0))
    least = estimate(priced, priced)
    assert least.exceeds(Budget(usd=least.usd / 2)) and not least.exceeds(Budget(usd=least.usd * 2))
    assert not estimate().exceeds(Budget(usd=0.0001)), "without a price nobody knows"
    assert not least.exceeds(Budget())


def test_defaults_of_the_paper_have_an_estimate():
    rows = ROWS * 4
    least = estimate_least_budget(Policy(), reflect, rows, "", EvolveConfig())
    assert least.policy_calls == 150 and least.tokens > 0
