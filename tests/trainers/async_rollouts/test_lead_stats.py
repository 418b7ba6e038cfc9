"""The metrics of rollouts in flight, over all processes."""

import time
from collections import Counter

import pytest

from agentic_prompting.trainers.async_rollouts import lead_stats
from agentic_prompting.trainers.async_rollouts.lead_stats import IdleClock, LeadStats


def test_metrics_are_over_all_processes(monkeypatch):
    first = LeadStats(
        Counter({0: 3, 2: 1}), [0, 1], 2, trainer_idle=0.5, policy_idle=0.0, played_anew=4
    )
    second = LeadStats(Counter({1: 4}), [], 1, trainer_idle=0.1, policy_idle=0.2, played_anew=0)
    monkeypatch.setattr(lead_stats, "gather_object", lambda stats: [*stats, second])
    assert lead_stats.gather_lead_metrics(first) == {
        "async/played_anew": 4.0,
        "async/token_age": 6 / 8,
        "async/token_age_max": 2.0,
        "async/turn_age": 0.5,
        "async/groups_in_flight": 3.0,
        "async/trainer_idle": pytest.approx(0.3),
        "async/policy_idle": pytest.approx(0.1),
    }


def test_metrics_of_a_batch_without_tokens_are_zero():
    stats = LeadStats(Counter(), [], 0, trainer_idle=0.0, policy_idle=1.0, played_anew=0)
    metrics = lead_stats.gather_lead_metrics(stats)
    assert metrics["async/token_age"] == metrics["async/token_age_max"] == 0.0
    assert metrics["async/turn_age"] == 0.0


@pytest.mark.parametrize(("needs_trainer_thread", "policy_idle"), [(False, 0.5), (True, 1.0)])
def test_a_policy_on_the_trainers_thread_idles_while_it_trains(
    monkeypatch, needs_trainer_thread, policy_idle
):
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    clock = IdleClock()
    clock.needs_trainer_thread = needs_trainer_thread
    clock.turn_started()
    now += 2
    clock.turn_ended()
    clock.set_trainer_waits(True)
    now += 2
    clock.set_trainer_waits(False)
    assert clock.read_idle_shares() == (0.5, policy_idle)
