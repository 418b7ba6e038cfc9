"""`examples/contrib/rollout_worker.py`: our episodes under TRL's `AsyncGRPOTrainer`."""

import dataclasses
import sys
import time
import types
from collections import defaultdict
from itertools import islice

import pytest
from rollout_worker import ASYNC_GRPO_MODULES, RolloutWorker, find_in_trl
from transformers import AutoTokenizer

from agentic_prompting.rollout import AgentSpec, ChatFormat
from agentic_prompting.trainers import TrainingStopped
from support.asking import Counts, Policy

RolloutQueueDataset = find_in_trl("RolloutQueueDataset")
RolloutWorkerProtocol = find_in_trl("RolloutWorkerProtocol")


def worker_on(tiny_policy, rows, environment, **changes):
    tokenizer = AutoTokenizer.from_pretrained(tiny_policy)
    spec = AgentSpec.load(tiny_policy)
    policy = Policy(ChatFormat(tokenizer, spec.grammar))
    rewards = [lambda rollout, **columns: [float(episode.seed % 2) for episode in rollout]]
    return RolloutWorker(
        policy, environment, spec, tokenizer, rewards, rows, num_generations=4, **changes
    )


def taken(worker, n):
    """As TRL's trainer takes them."""
    metrics = defaultdict(list)
    samples = RolloutQueueDataset(
        worker.rollout_buffer,
        lambda: worker.version,
        worker.check_health,
        60,
        metrics,
        poll_interval_s=0.05,
    )
    return list(islice(samples, n)), metrics


def test_a_rollout_worker_keeps_trls_protocol(tiny_policy, rows):
    protocol = [name for name in vars(RolloutWorkerProtocol) if not name.startswith("_")]
    assert set(protocol) == {"start", "stop", "update_model_version", "check_health"}
    worker = worker_on(tiny_policy, rows, Counts(), max_groups=2, buffer_size=8)
    worker.start()
    samples, _ = taken(worker, 12)
    deadline = time.monotonic() + 60
    while worker.rollout_buffer.empty():  # a sample of the old weights
        assert time.monotonic() < deadline
        time.sleep(0.01)
    worker.update_model_version(1)
    later, metrics = taken(worker, 12)
    worker.stop()
    for sample in samples:
        assert (
            len(sample["input_ids"])
            == len(sample["completion_mask"])
            == len(sample["old_log_probs"])
        )
        own = sample["completion_mask"] == 1
        assert own.any()
        assert (sample["old_log_probs"][own] == -0.5).all()
        assert not sample["old_log_probs"][~own].any()
        assert own[-1] and not own.all(), "prompt and observations are outside"
    by_group = defaultdict(list)
    for sample in samples:
        by_group[sample["group_id"]].append(sample["advantage"])
    assert all(abs(sum(group)) < 1e-6 for group in by_group.values() if len(group) == 4)
    assert metrics["sample/staleness_max"][0] == 1.0
    assert later[-1]["group_id"] > samples[-1]["group_id"]
    assert worker.metrics_queue.get()["rollout/failed"] == 0


def test_a_rollout_worker_under_failures(tiny_policy, rows):
    """A failed rollout has no gradient.

    Too many end the training, with the reason; so does a policy that raises.
    """

    class Fails(Counts):
        async def step(self, rollout):
            if rollout.seed % 4 == 1 or self.down:
                raise RuntimeError("down")
            return await super().step(rollout)

    environment = Fails()
    environment.down = False
    worker = worker_on(tiny_policy, rows, environment, max_failed_share=0.9)
    worker.start()
    samples, _ = taken(worker, 20)
    assert {sample["metrics"]["reward"] for sample in samples} <= {0.0, 1.0}
    environment.down = True
    with pytest.raises(TrainingStopped, match="recent rollouts.*ServerFailed.*down"):
        taken(worker, 10_000)
    broken = worker_on(tiny_policy, rows, Counts())
    broken.policy = None
    broken.start()
    with pytest.raises(RuntimeError, match="rollouts ended: TypeError"):
        taken(broken, 1)


def test_a_rollout_sample_is_what_our_worker_fills():
    """`RolloutSample`; which of the worker's methods the trainer calls, the tests above show."""
    sample_fields = dataclasses.fields(find_in_trl("RolloutSample"))
    assert [field.name for field in sample_fields] == [
        "prompt",
        "completion",
        "input_ids",
        "completion_mask",
        "old_log_probs",
        "advantage",
        "model_version",
        "group_id",
        "metrics",
        "enqueued_at",
    ]


def test_the_stable_place_comes_first(monkeypatch):
    """As in TRL 1.18, where the experimental modules are gone."""
    stable = types.ModuleType(ASYNC_GRPO_MODULES[0])
    stable.RolloutSample = type("RolloutSample", (), {})
    monkeypatch.setitem(sys.modules, ASYNC_GRPO_MODULES[0], stable)
    assert find_in_trl("RolloutSample") is stable.RolloutSample
    for name in ("trl.experimental.async_grpo", *ASYNC_GRPO_MODULES[1:]):
        monkeypatch.setitem(sys.modules, name, None)
    assert find_in_trl("RolloutSample") is stable.RolloutSample
    with pytest.raises(ImportError, match="RolloutQueueDataset"):
        find_in_trl("RolloutQueueDataset")
