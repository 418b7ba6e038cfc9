"""Calls, tokens, dollars and hours of a run, from its configuration or from a pilot; the virtual
clock.
"""

from dataclasses import replace

import pytest

from agentic_prompting.environments import Worker
from agentic_prompting.llm import OpenAIChat, Reply, Usage
from agentic_prompting.planning import Assumptions, estimate_cost
from agentic_prompting.planning.cost import CostEstimate
from agentic_prompting.planning.virtual_clock import Pace, run_on_virtual_clock
from agentic_prompting.rollout import (
    Observation,
    Rollout,
    RolloutLog,
    Sample,
    parse_turn,
    rollout_record,
)

ARGS = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "max_steps": 100,
    "async_lead": 1.0,
}


def test_calls_tokens_and_dollars_follow_from_the_configuration():
    estimate = estimate_cost(
        ARGS,
        10**9,
        gpus=8,
        price=(1.0, 2.0),
        assumptions=Assumptions(calls=2, call_input=500, call_output=100),
    )
    assert (estimate.steps, estimate.rollouts) == (100, 64) and estimate.calls == 2 * 64 * 100
    assert estimate.tokens == estimate.calls * 600
    assert estimate.usd == pytest.approx(estimate.calls * 700 / 1e6)
    assert "assumed: calls 2" in estimate.notes[0] and estimate.hours_with_lead is None


def test_steps_follow_from_rows():
    args = {**ARGS, "max_steps": -1, "num_generations": 5, "generation_batch_size": 640}
    estimate = estimate_cost(args, 10**9, gpus=8, rows=5120)
    assert estimate.steps == 400 and estimate.calls == 3 * 640 * 40
    every_step = estimate_cost({**args, "generation_batch_size": None}, 10**9, gpus=8, rows=5120)
    assert estimate.sampling_seconds < every_step.sampling_seconds / 5  # one wait for ten steps
    with pytest.raises(ValueError, match="set max_steps"):
        estimate_cost({"max_steps": -1}, 10**9)


def test_what_evolution_costs_is_said_to_come_on_top():
    """A reference LLM of E-SPL may make more calls than the environment; the budget is for both."""
    note = "the calls of the reference LLM are not included"
    assert note in estimate_cost({**ARGS, "prompts_per_step": 3, "mode": "joint"}, 10**9).notes
    for args in (ARGS, {**ARGS, "prompts_per_step": 3, "mode": "rl"}):
        assert note not in estimate_cost(args, 10**9).notes


def test_a_budget_that_ends_early_is_warned_of():
    args = {**ARGS, "budget_usd": 5.0, "budget_tokens": 10**12}
    dear = estimate_cost(
        args, 10**9, price=(1000.0, 0.0), assumptions=Assumptions(calls=1, call_input=100)
    )
    assert dear.usd == pytest.approx(80.0)
    assert dear.notes[-1] == "warning: budget_usd: 5 ends after about step 6 of 100"
    assert "cannot be checked" in estimate_cost(args, 10**9).notes[-1]
    assert "price is not known" in str(estimate_cost(args, 10**9))


def test_a_pilot_takes_the_place_of_assumptions(tmp_path):
    log = RolloutLog(tmp_path / "rollouts")
    usage = Usage(400, 100, cost_usd=0.01)
    records = []
    for calls in (1, 3):
        rollout = Rollout([1], row={"question": f"q{calls}", "answers": ["a"]})
        for _ in range(calls):
            rollout.add_turn(
                Sample([5] * 50), parse_turn("<interaction_prompt> more </interaction_prompt>")
            )
            rollout.add_observation(
                Observation("noted", replies=(Reply("noted", usage=usage),), seconds=4.0), [6] * 10
            )
        records.append(rollout_record(rollout.finish("out_of_turns"), mode="train", step=0))
    log.write(records)
    (tmp_path / "rollouts" / "log.jsonl").write_text('{"step": 1, "step_time": 7.5}\n')
    estimate = estimate_cost(ARGS, 10**9, pilot=tmp_path)
    assert estimate.calls == 2 * 8 * 100 and estimate.usd == pytest.approx(0.02 * 8 * 100)
    assert estimate.intervals["calls"] == (1.0, 3.0)
    assert estimate.intervals["agent_tokens"] == (
        50.0,
        150.0,
    )
    names = "calls, agent_tokens, call_seconds, usd"
    pilot = f"{tmp_path}: 2 rollouts of 2 questions"
    assert names in estimate.notes[0] and pilot in estimate.notes[0]
    assert estimate.notes[1].startswith("assumed: call_input 700, call_output 250, bandwidth")
    assert "7.5 s" in estimate.notes[2]
    free = [
        {**record, "worth_usd": 0.0} for record in records
    ]  # of a large LLM whose price is not known
    RolloutLog(tmp_path / "free" / "rollouts").write(free)
    estimate = estimate_cost(ARGS, 10**9, pilot=tmp_path / "free", price=(1.0, 2.0))
    assert estimate.usd == pytest.approx(estimate.calls * 1200 / 1e6)
    assert "usd" not in estimate.intervals
    with pytest.raises(ValueError, match="no finished rollouts"):
        estimate_cost(ARGS, 10**9, pilot=tmp_path / "nothing")


def test_a_pool_is_paid_by_its_workers():
    pool = {
        "coder": Worker(lambda messages: "", usd=0.01),
        "tool": Worker(lambda text: "", takes="text"),
        "mini": Worker(OpenAIChat("gpt-4o-mini", "http://localhost:1/v1")),
    }
    assumptions = Assumptions(calls=3, call_input=1000, call_output=100)
    estimate = estimate_cost(ARGS, 10**9, pool=pool, assumptions=assumptions)
    share = estimate.calls / 3
    assert share == 8 * 100 and estimate.workers["coder"].usd == pytest.approx(0.01 * share)
    assert estimate.workers["tool"].usd == 0.0
    assert estimate.workers["mini"].usd == pytest.approx(0.00021 * share)
    assert estimate.usd == pytest.approx(0.01021 * share)
    assert "worker coder: 800 calls, $8.00" in str(estimate)
    assert "same share" in estimate.notes[1]
    unpriced = {**pool, "other": Worker(lambda messages: "")}
    estimate = estimate_cost(ARGS, 10**9, pool=unpriced, price=(1.0, 1.0))
    assert estimate.workers["other"].usd is None and estimate.usd is None


def test_a_pilot_says_who_of_a_pool_is_asked(tmp_path):
    rollout = Rollout([1], row={"question": "q"})
    rollout.add_turn(Sample([5]), parse_turn("<interaction_prompt> more </interaction_prompt>"))
    reply = Reply("noted", usage=Usage(cost_usd=0.01))
    rollout.add_observation(Observation("noted", replies=(reply, reply), seconds=1.0), [6])
    rollout.counts = {
        "workers/coder": 2.0,
        "workers_usd/coder": 0.02,
        "workers/tool": 0.0,
        "workers_usd/tool": 0.0,
    }
    record = rollout_record(rollout.finish("out_of_turns"), mode="train", step=0)
    RolloutLog(tmp_path / "rollouts").write([record])
    estimate = estimate_cost(ARGS, 10**9, pool={"coder": Worker(str, usd=1.0)}, pilot=tmp_path)
    assert estimate.calls == estimate.workers["coder"].calls == 2 * 8 * 100  # two calls in one turn
    assert estimate.usd == estimate.workers["coder"].usd == pytest.approx(0.02 * 800)
    assert estimate.to_json()["workers"]["tool"] == {"calls": 0.0, "usd": 0.0}


def piloted(folder, questions, rollouts):
    """A pilot whose questions take 0 to 4 calls, each of its rollouts as many."""
    records = []
    for number in range(questions):
        for _ in range(rollouts):
            rollout = Rollout([1], row={"question": f"q{number}"})
            for _ in range(number % 5):
                rollout.add_turn(
                    Sample([5]), parse_turn("<interaction_prompt> more </interaction_prompt>")
                )
                rollout.add_observation(Observation("noted", seconds=float(number % 3)), [6])
            records.append(rollout_record(rollout.finish("out_of_turns"), mode="train", step=0))
    RolloutLog(folder / "rollouts").write(records)
    return estimate_cost(ARGS, 10**9, pilot=folder)


def test_the_rollouts_of_a_question_are_no_independent_pilots(tmp_path):
    """Asked eight times, forty questions say as much about other questions as asked once."""
    once = piloted(tmp_path / "1", 40, 1)
    often = piloted(tmp_path / "8", 40, 8)
    for name in ("calls", "agent_tokens", "call_seconds"):
        assert often.intervals[name] == pytest.approx(once.intervals[name])
    low, high = often.intervals["calls"]
    assert high - low == pytest.approx(2 * 1.96 * 2**0.5 / 40**0.5, rel=0.1)


def test_a_pilot_of_one_question_has_no_intervals(tmp_path):
    estimate = piloted(tmp_path, 1, 8)
    assert estimate.calls == 0
    assert estimate.intervals == {}
    assert "8 rollouts of 1 question" in estimate.notes[0]
    assert "assumed: call_input" in estimate.notes[1]  # and not the calls, which were measured


def test_a_lead_hides_the_wait():
    pace = Pace(groups=2, rollouts=2, turns=2, tokens=5, reply=2.0, update=2.0)
    waiting, ahead = (run_on_virtual_clock(pace, "server", lead, 6) for lead in (0, 1))
    assert ahead["step_s"] < waiting["step_s"] and waiting["age"] == 0
    estimate = estimate_cost({**ARGS, "async_lead": 0.0}, 10**9, gpus=1)
    assert estimate.hours_with_lead < estimate.hours


def test_a_lead_hides_no_more_than_the_rollouts_of_a_block():
    """Ten steps learn from a block here: what its rollouts take is shared by them, and the updates
    remain.
    """
    args = {**ARGS, "async_lead": 0.0, "generation_batch_size": 640}
    estimate = estimate_cost(args, 4 * 10**9, gpus=8)
    assert (
        estimate.steps * estimate.training_seconds / 3600
        <= estimate.hours_with_lead
        < estimate.hours
    )
    colocated = {**args, "use_vllm": True, "vllm_mode": "colocate"}
    assert (
        estimate_cost(colocated, 4 * 10**9, gpus=8).hours_with_lead is None
    )  # the trainer refuses a lead there


def test_keys_and_values_are_read_for_each_token():
    """80 rows of 4,096 tokens on average: 8.04 GB of weights and 48.3 GB of keys and values for
    each token of all.
    """
    args = {**ARGS, "max_context": 8192, "generation_batch_size": 640}
    slow, fast = (
        estimate_cost(args, 4_020_000_000, gpus=8, kv_bytes=size) for size in (147_456, 0)
    )
    assert 10 * fast.sampling_seconds == pytest.approx(800 * 8.04 / 1675 + 9, rel=1e-3)
    assert 10 * slow.sampling_seconds == pytest.approx(800 * 56.36 / 1675 + 9, rel=1e-3)


def test_a_small_run_is_told_in_small_units():
    estimate = CostEstimate(
        steps=2,
        rollouts=8,
        calls=16,
        tokens=640,
        usd=0.0012,
        sampling_seconds=0.12,
        training_seconds=0.3,
        hours=0.84 / 3600,
    )
    text = str(estimate)
    for shown in ("640 tokens", "$0.0012", "0.12 s sampling", "0.30 s training", "0.84 s in all"):
        assert shown in text, text
    estimate = replace(estimate, tokens=2.5e6, usd=12.0, sampling_seconds=40.0, hours=0.25)
    text = str(estimate)
    for shown in ("2.5 million tokens", "$12.00", "40 s sampling", "15 minutes in all"):
        assert shown in text, text
    assert "2.0 hours in all" in str(replace(estimate, hours=2.0))
