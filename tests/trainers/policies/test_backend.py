"""The policies over a trainer's back ends in one process.

Several processes: test_distributed.py and test_vllm.py.
"""

import asyncio
import gc
from types import SimpleNamespace

import pytest
import torch

from agentic_prompting.llm import gather
from agentic_prompting.llm.loop import start
from agentic_prompting.local import Sampling
from agentic_prompting.rollout import Sample, SampleRequest, run_with_engine
from agentic_prompting.trainers.policies import PeerFailed
from agentic_prompting.trainers.policies.backend import GatheredWeights
from agentic_prompting.trainers.policies.batch_samplers import (
    CollectivePolicy,
    ContinuousBatchingSampler,
    TRLSampler,
)
from agentic_prompting.trainers.policies.vllm import VLLMServerPolicy, warn_of_shaped_logprobs
from agentic_prompting.trainers.policies.vllm_client import connect_servers
from agentic_prompting.trainers.rollouts import rank_barrier
from support.training import LEAD, arguments, trainer_for
from support.vllm_stand_in import Server


def test_each_row_is_cut_to_its_own_limit(tiny_policy, rows, tmp_path):
    """The batch's limit to vLLM, each row's own afterwards, and log-probabilities cut with the ids."""
    trainer = trainer_for(tiny_policy, tmp_path, rows)
    end = trainer.eos_token_ids[0]
    asked = []

    def generate(contexts, images, num_generations):
        asked.append((contexts, num_generations, trainer.vllm_generation.max_completion_length))
        logprobs = [[[-0.1], [-0.2], [-0.3]], [[-0.1], [-0.2], [-0.3], [-0.4]]]
        return contexts, [[7, 8, end], [7, 8, 9, 10]], logprobs, None

    trainer.vllm_generation = SimpleNamespace(max_completion_length=None, generate=generate)
    first, second = TRLSampler(trainer)(
        [SampleRequest([1, 2], 4, seed=0), SampleRequest([3], 2, seed=1)]
    )
    assert asked == [([[1, 2], [3]], 1, 4)]
    assert (first.ids, first.logprobs, first.finished) == ([7, 8, end], [-0.1, -0.2, -0.3], True)
    assert (second.ids, second.logprobs, second.finished) == ([7, 8], [-0.1, -0.2], False)


def test_continuous_batching(tiny_policy, rows, tmp_path):
    """Trains with it; the blocks are bounded, since by default it takes half of the memory."""
    bounded = {"num_blocks": 64, "max_batch_tokens": 1024}
    trainer = trainer_for(
        tiny_policy,
        tmp_path,
        rows,
        max_steps=1,
        use_transformers_continuous_batching=True,
        transformers_continuous_batching_config=bounded,
        max_turn_tokens=6,
    )
    assert isinstance(trainer.policy.sampler, ContinuousBatchingSampler)
    trainer.train()
    assert trainer.state.global_step == 1
    samples = trainer.policy.sampler(
        [SampleRequest([5, 6, 7], 4, seed=0), SampleRequest([5], 2, seed=0)]
    )
    assert [len(sample.ids) <= limit for sample, limit in zip(samples, (4, 2), strict=True)] == [
        True,
        True,
    ]


def test_a_lost_result_of_continuous_batching_raises(tiny_policy, rows, tmp_path, monkeypatch):
    trainer = trainer_for(tiny_policy, tmp_path, rows, use_transformers_continuous_batching=True)
    monkeypatch.setattr(trainer.model, "generate_batch", lambda *args, **kwargs: {}, raising=False)
    with pytest.raises(RuntimeError, match="returned 0 of 1 results"):
        trainer.policy.sampler([SampleRequest([5], 2, seed=0)])


SHAPING = {"top_p": 0.8, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.2}


@pytest.mark.parametrize("engine", [True, False], ids=["engine", "batches"])
def test_truncation_leaves_the_importance_ratio_at_one(
    asking_policy, rows, tmp_path, monkeypatch, engine
):
    """Weights that do not move: groups of earlier steps come from the same policy, whatever their
    tokens were drawn from.
    """
    if not engine:
        monkeypatch.setattr(
            "agentic_prompting.local.transformers_engine.can_slab", lambda model: False
        )
    changes = {**LEAD, **SHAPING, "temperature": 0.7, "max_steps": 3, "learning_rate": 0.0}
    trainer = trainer_for(asking_policy, tmp_path, rows, **changes)
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert max(entry["async/token_age_max"] for entry in log) > 0
    for entry in log:
        for bound in ("min", "mean", "max"):
            assert entry[f"sampling/importance_sampling_ratio/{bound}"] == pytest.approx(
                1, abs=1e-4
            )


@pytest.mark.parametrize("name", SHAPING)
def test_each_truncation_keeps_sampler_and_trainer_equal(asking_policy, rows, tmp_path, name):
    trainer = trainer_for(asking_policy, tmp_path, rows, **{name: SHAPING[name]})
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert max(entry["sampling/logp_difference/max"] for entry in log) < 1e-4


@pytest.mark.parametrize(
    ("sampling", "mode", "warns"),
    [
        (Sampling(), "processed_logprobs", False),
        (Sampling(temperature=0.5), "processed_logprobs", False),
        (Sampling(top_p=0.9), "processed_logprobs", True),
        (Sampling(repetition_penalty=1.1), "processed_logprobs", True),
        (Sampling(top_p=0.9), "raw_logprobs", False),
        (Sampling(top_p=0.9, temperature=0.5), "raw_logprobs", True),
    ],
    ids=str,
)
def test_vllm_with_truncation_warns(sampling, mode, warns, caplog):
    warn_of_shaped_logprobs(sampling, mode)
    assert ("importance ratio" in caplog.text) == warns


class Others:
    """What the other process says in each round of a lockstep of two."""

    def __init__(self, monkeypatch, *words):
        self.words = list(words)
        self.told = []
        monkeypatch.setattr(
            "agentic_prompting.trainers.policies.batch_samplers.gather_object", self.gather
        )

    def gather(self, own):
        self.told += own
        return [*own, self.words.pop(0)]


def test_a_collective_fills_up_and_plays_on(monkeypatch):
    """Rounds of 3 and 1 against 1 and 2, then nothing against 1: equally wide calls, and no trace
    of the fillers.
    """
    widths = []

    def sampler(requests):
        widths.append(len(requests))
        torch.rand(1)
        return [Sample([request.seed + 1]) for request in requests]

    others = Others(monkeypatch, 1, 2, 1, 0)
    policy = CollectivePolicy(sampler, filler=[0])
    request = SampleRequest([1, 2], 5, seed=40)
    state = None
    with policy.session():
        for number in (3, 1):
            samples = run_with_engine(policy, gather([policy(request) for _ in range(number)]))
            assert [sample.ids for sample in samples] == [[41]] * number
        state = torch.get_rng_state()
    assert widths == [3, 2, 1] and others.told == [3, 1, 0, 0]
    assert torch.equal(state, torch.get_rng_state())


def test_a_collective_tells_of_a_failure(monkeypatch):
    others = Others(monkeypatch, 1)
    with pytest.raises(KeyError), CollectivePolicy(None, [0]).session():
        raise KeyError("planted")
    assert others.told == ["KeyError: 'planted'"]
    Others(monkeypatch, "KeyError: 'planted'")
    policy = CollectivePolicy(None, [0])
    with (
        pytest.raises(PeerFailed, match="process 1 of 2.*KeyError"),
        policy.session(),
    ):
        run_with_engine(policy, gather([policy(SampleRequest([1], 1, seed=0))]))


def test_a_barrier_of_one_costs_nothing():
    with rank_barrier("anything") as listen:
        listen()


def test_fsdp_of_the_first_version_is_refused(tiny_policy, rows, tmp_path):
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(fsdp_version=1))
    first_version = SimpleNamespace(accelerator=SimpleNamespace(state=state))
    with pytest.raises(ValueError, match="fsdp_version: 2"):
        GatheredWeights(first_version)


def test_how_the_server_is_called_is_checked(tmp_path):
    with pytest.raises(ValueError, match="nccl, adapter or disk"):
        arguments(tmp_path, vllm_sync="http")
    with pytest.raises(ValueError, match="vllm_sync would be ignored"):
        arguments(tmp_path, vllm_sync="adapter")
    with pytest.raises(ValueError, match="several addresses"):
        arguments(
            tmp_path,
            use_vllm=True,
            vllm_mode="server",
            vllm_server_base_url="http://a:8000,http://b:8000",
        )


def test_a_dropped_server_policy_closes_its_connections(tiny_policy, tmp_path):
    """Left to the garbage collector, they took those of later policies off the event loop: a turn
    waited for ever.
    """
    with Server(tiny_policy, tmp_path) as server:
        args = arguments(
            tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url=server.url
        )
        policy = VLLMServerPolicy(connect_servers(args), args, Sampling())
        assert len(run_with_engine(policy, policy(SampleRequest([5, 6], 2, seed=0))).ids) == 2
        session = policy.servers[0]._session
        del policy
        gc.collect()
        start(asyncio.sleep(0)).result()  # the loop has got to what came before
        assert session.closed
