"""Weights on a real vLLM without NCCL (`make vllm`, docs/howto/vllm.md): adapters with versions,
and whole weights from a disk.
"""

import asyncio
import importlib.util
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import yaml
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from agentic_prompting import LLMEnvironment, PromptAgent, PromptR1Config, PromptR1Trainer
from agentic_prompting.harnesses import CommandProgram, get_harness
from agentic_prompting.harnesses.check_harness import play_scripted
from agentic_prompting.llm import gather
from agentic_prompting.llm.loop import run as wait_for
from agentic_prompting.local import Sampling
from agentic_prompting.programs import Program
from agentic_prompting.rollout import SampleRequest
from agentic_prompting.sandbox import Oracle
from agentic_prompting.sandbox.results import exact_match_of
from agentic_prompting.sandbox.setup import prepare_sandbox
from agentic_prompting.trainers import TrainingStopped
from agentic_prompting.trainers.policies.vllm import VLLMServerPolicy
from agentic_prompting.trainers.policies.vllm_client import connect_servers
from agentic_prompting.trainers.policies.weight_sync import AdapterVersions
from support.harnesses import needs, policy_for
from support.training import arguments
from support.vllm_rounds import Rounds, trainer_of_rounds
from support.vllm_server import LORA, VLLMServer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"
    ),
]

ROOT = Path(__file__).parents[3]
LORA_CONFIG = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
BLOCK = 128  # tokens; of the prefix cache, on a CPU


@pytest.fixture(scope="module")
def servers(tiny_policy, tmp_path_factory):
    """Two replicas of one model."""
    with ExitStack() as up, ThreadPoolExecutor() as both:
        replicas = [
            VLLMServer(tiny_policy, tmp_path_factory.mktemp("served"), *LORA) for _ in range(2)
        ]
        yield list(both.map(up.enter_context, replicas))


@pytest.fixture
def train(tiny_policy, servers, tmp_path):
    """A trainer over the first server, or those that are given."""

    def trainer(environment=None, at=servers[:1], name="run", policy=tiny_policy, **changes):
        where = ",".join(server.url for server in at)
        options = {
            "vllm_sync": "adapter",
            "peft_config": LORA_CONFIG,
            "vllm_server_timeout": 300,
            **changes,
        }
        return trainer_of_rounds(
            policy, tmp_path / name, environment, vllm_server_base_url=where, **options
        )

    return trainer


def models_of(server):
    return [model["id"] for model in json.loads(server.get("/v1/models"))["data"]]


def assert_on_policy(trainer, steps):
    """What the server said of each token is what the trainer finds, at every step; and the weights
    moved.
    """
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(log) == steps and all(entry["grad_norm"] > 1e-3 for entry in log)
    assert max(entry["sampling/sampling_logp_difference/max"] for entry in log) <= 1e-4


# --- versions of an adapter -----------------------------------------------------------------------


@torch.no_grad()
def test_two_versions_never_mix(tiny_policy, servers, tmp_path):
    """Contexts over the block size that share their beginnings, turns of one version while the next
    one is loaded and asked: each token has the log-probability that its own version gives it.
    """
    torch.manual_seed(0)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_policy), LORA_CONFIG).eval()
    versions = []
    for number in range(2):
        for name, weights in model.named_parameters():
            if "lora_" in name:
                weights.normal_(std=0.15)
        model.save_pretrained(tmp_path / f"policy-{number}")
        versions.append(
            {name: weights.clone() for name, weights in model.named_parameters() if "lora_" in name}
        )

    args = arguments(
        tmp_path, use_vllm=True, vllm_mode="server", vllm_server_base_url=servers[0].url
    )
    adapters = AdapterVersions("policy", tmp_path, connect_servers(args))
    policy = VLLMServerPolicy(adapters.servers, args, Sampling(), adapters)
    shared = [(7 * i) % 700 + 20 for i in range(4 * BLOCK)]
    requests = [SampleRequest([*shared[: 100 + 60 * i], 30 + i], 60, seed=i) for i in range(7)]
    seen = []
    lasted = []

    async def ask(request):
        version = adapters.version
        seen.append((version, request, await policy(request)))
        lasted.append(adapters.version - version)

    async def both():
        for server in adapters.servers:
            await adapters.load(server, "policy-0")
            await adapters.load(server, "policy-0")  # as another process would, too
        adapters.version = 0
        first = [asyncio.create_task(ask(request)) for request in requests]
        await policy(SampleRequest([9], 1, seed=0))
        await adapters.load(adapters.servers[0], "policy-1")
        in_use = await adapters.advance()
        await gather(ask(request) for request in requests)
        await asyncio.gather(*first)
        return in_use

    assert wait_for(both()) == {"policy-0", "policy-1"}
    assert [version for version, *_ in seen].count(1) == 7 and 1 in lasted
    assert all(set(sample.updates) == {version} for version, _, sample in seen)
    assert len({(version, tuple(sample.ids)) for version, _, sample in seen}) == 14
    for version, request, sample in seen:
        model.load_state_dict(versions[version], strict=False)
        logprobs = model(torch.tensor([[*request.context, *sample.ids]])).logits[0].log_softmax(-1)
        at = range(len(request.context) - 1, len(request.context) + len(sample.ids) - 1)
        assert (logprobs[at, sample.ids] - torch.tensor(sample.logprobs)).abs().max() <= 1e-4

    wait_for(adapters.keep({"policy-1"}))
    assert models_of(servers[0]) == ["policy", "policy-1"] and not (tmp_path / "policy-0").exists()
    wait_for(adapters.keep(set()))


def test_training_over_two_replicas(train, servers, tmp_path):
    """Each has the weights of every step; a checkpoint says which; the next start leaves nothing of
    this one behind.
    """
    trainer = train(at=servers, max_steps=6, save_strategy="steps", save_steps=6)
    trainer.train()
    assert_on_policy(trainer, 6)
    adapters = trainer.vllm_generation.adapters
    assert adapters.version == 5
    assert all(models_of(server) == ["policy", adapters.current] for server in servers)
    state = torch.load(tmp_path / "run" / "checkpoint-6" / "exact_resume_0.pt", weights_only=True)[
        "own"
    ]["pushed"]
    assert (state["name"], state["version"]) == (adapters.name, 5)

    resumed = train(at=servers, max_steps=7)
    resumed.train(resume_from_checkpoint=True)
    adapters = resumed.vllm_generation.adapters
    assert adapters.version == 6 and adapters.name != state["name"]
    assert all(models_of(server) == ["policy", adapters.current] for server in servers)


class Kills(Rounds):
    """Kills a server in the third step, once."""

    def __init__(self, server):
        self.server = server

    async def step(self, rollout):
        if self.server is not None and self.trainer.state.global_step == 2:
            server = self.server
            self.server = None
            server.kill()
            await asyncio.to_thread(self.then, server)
        return await super().step(rollout)


def test_a_program_trains_through_it(train):
    """Two calls a rollout, the second with what came before it, and one whose history is rewritten:
    two sequences.
    """
    client = DefaultAsyncHttpxClient()

    async def talks(row, base_url, api_key):
        agent = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=client)
        messages = list(row["prompt"])
        for _ in range(2):
            reply = await agent.chat.completions.create(model="agent", messages=messages)
            message = reply.choices[0].message
            messages += [
                message.model_dump(exclude_none=True),
                {"role": "user", "content": "Nairobi"},
            ]
        await agent.chat.completions.create(model="agent", messages=messages[-1:])
        return "done"

    trainer = train(Program(talks))
    trainer.train()
    assert_on_policy(trainer, steps=3)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["program/calls"] == 3 and entry["program/sequences"] == 2 for entry in log)
    assert all(entry["rollout/failed"] == 0 for entry in log)


@pytest.mark.parametrize("name", ["pi", "codex"])
def test_inside_a_harness_it_is_the_policy(name, monkeypatch, tmp_path):
    """The harness in its own process, vLLM in another: what vLLM said of each token is what the
    trainer finds.
    """
    needs(name, monkeypatch)
    _, agent = play_scripted(CommandProgram(get_harness(name)))
    model, tokenizer = policy_for(agent.prompts, positions=2**14)
    model.save_pretrained(tmp_path / "policy")
    tokenizer.save_pretrained(tmp_path / "policy")
    program = CommandProgram(
        get_harness(name), reward=lambda rollout, folder: sum(rollout.ids) % 7, timeout=300
    )
    options = {
        "peft_config": LORA_CONFIG,
        "max_completion_length": 64,
        "per_device_train_batch_size": 4,
    }
    with VLLMServer(tmp_path / "policy", tmp_path, *LORA) as server:
        trainer = trainer_of_rounds(
            tmp_path / "policy",
            tmp_path / "run",
            program,
            None,
            vllm_server_base_url=server.url,
            max_turn_tokens=24,
            vllm_sync="adapter",
            vllm_server_timeout=300,
            **options,
        )
        trainer.train()
    program.close()
    assert_on_policy(trainer, steps=3)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["rollout/failed"] == 0 and entry["program/sequences"] >= 1 for entry in log)
    assert all(entry.get("program/witness_differences", 0) == 0 for entry in log)


def test_a_server_that_comes_back_gets_the_adapter_again(train, servers):
    environment = Kills(servers[0])
    environment.then = VLLMServer.start
    environment.trainer = trainer = train(environment, max_steps=4)
    trainer.train()
    assert environment.server is None
    assert_on_policy(trainer, 4)


def test_a_server_that_takes_no_adapters_is_named(train, servers):
    """Training stops before the first step, with what the server said."""
    config = LoraConfig(
        r=32, target_modules="all-linear", task_type="CAUSAL_LM"
    )  # --max-lora-rank is 16
    with pytest.raises(TrainingStopped, match=r"does not load .*rank"):
        train(peft_config=config).train()


def test_what_adapters_cannot_carry(train):
    with pytest.raises(ValueError, match="peft_config"):
        train(peft_config=None)
    with pytest.raises(ValueError, match="modules_to_save"):
        train(peft_config=LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))


def test_another_answer_than_the_trainers_stops(train, monkeypatch):
    """A server whose adapter is not the trainer's: here one that gets all zeros for it."""
    trainer = train(max_steps=4)
    sync = trainer.vllm_generation
    write = trainer.vllm_generation._write
    monkeypatch.setattr(
        sync, "_write", lambda weights: write({name: 0 * w for name, w in weights.items()})
    )
    with pytest.raises(TrainingStopped, match="does not sample from the pushed weights"):
        trainer.train()
    assert 1 <= trainer.state.global_step < 4


def test_the_other_replica_takes_over(train, servers):
    """Until the next push, which waits for all. From here on there is one server."""
    environment = Kills(servers[1])
    environment.then = lambda server: None
    environment.trainer = trainer = train(
        environment, at=servers, max_steps=5, vllm_server_timeout=3
    )
    with pytest.raises(TrainingStopped, match=servers[1].url):
        trainer.train()
    assert_on_policy(trainer, 3)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_sandbox_learns_through_it(tmp_path):
    sandbox = prepare_sandbox(tmp_path / "sandbox", n_test=128)
    settings = yaml.safe_load((ROOT / "examples" / "configs" / "sandbox.yaml").read_text()) | {
        "output_dir": str(tmp_path / "run"),
        "max_steps": 20,
        "learning_rate": 5e-3,
        "disable_tqdm": True,
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_sync": "adapter",
    }
    del settings["sandbox"]
    environment = LLMEnvironment(Oracle())
    with VLLMServer(sandbox.model, tmp_path, *LORA) as server:
        trainer = PromptR1Trainer(
            model=str(sandbox.model),
            environment=environment,
            args=PromptR1Config(vllm_server_base_url=server.url, **settings),
            train_dataset=sandbox.train,
            prompt_template=sandbox.spec.prompt_template,
            peft_config=LoraConfig(
                r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"
            ),
        )
        trainer.train()
    assert_on_policy(trainer, 20)
    trainer.save_model()
    agent = PromptAgent.from_pretrained(tmp_path / "run", environment)
    assert exact_match_of(agent.answer_all(list(sandbox.test))).mean >= 0.85


# --- whole weights from a disk --------------------------------------------------------------------


@pytest.fixture(scope="module")
def untied(tiny_policy, tmp_path_factory):
    """A policy with an output head that is not the embedding, and its server."""
    folder = tmp_path_factory.mktemp("untied")
    policy = folder / "policy"
    shutil.copytree(tiny_policy, policy)
    model = AutoModelForCausalLM.from_pretrained(policy, tie_word_embeddings=False)
    model.lm_head.weight.data = model.get_input_embeddings().weight.detach().clone()
    model.save_pretrained(policy)
    with VLLMServer(policy, folder) as server:
        yield policy, server


@pytest.fixture
def train_from_disk(train, untied):
    def trainer(environment=None, **changes):
        policy, server = untied
        return train(
            environment, at=[server], policy=policy, vllm_sync="disk", peft_config=None, **changes
        )

    return trainer


def test_from_a_disk_with_a_head_of_its_own(train_from_disk):
    trainer = train_from_disk(max_steps=6)
    trainer.train()
    assert_on_policy(trainer, 6)


class Restarts(Rounds):
    """A server is killed and started again in the fourth step, while no turn is under way: all wait
    for a reply.
    """

    def __init__(self, server, rollouts):
        self.server = server
        self.waiting = rollouts
        self.back = asyncio.Event()

    async def step(self, rollout):
        if self.trainer.state.global_step == 3 and not self.back.is_set():
            self.waiting -= 1
            if not self.waiting:
                self.server.kill()
                await asyncio.to_thread(self.server.start)
                self.back.set()
            await self.back.wait()
        return await super().step(rollout)


def test_a_server_that_comes_back_is_told_before_it_is_asked(train_from_disk, untied):
    """It would answer with the weights it was started with, and nobody has noticed that it was
    away.
    """
    environment = Restarts(untied[1], rollouts=4)
    environment.trainer = trainer = train_from_disk(environment, max_steps=5)
    trainer.train()
    assert environment.back.is_set()
    assert_on_policy(trainer, 5)


# --- turns that outlive a step --------------------------------------------------------------------


@pytest.mark.parametrize("way", ["adapter", "disk"])
@torch.no_grad()
def test_each_token_is_as_old_as_it_says(way, request, tiny_policy):
    """With a lead: turns under way while the weights are pushed.

    Each was sampled by the weights of the update that it names, and most are older than those they
    are learnt from with.
    """
    settings = {
        "async_lead": 1,
        "max_steps": 5,
        "max_turn_tokens": 24,
        "max_completion_length": 200,
    }
    policy = tiny_policy if way == "adapter" else request.getfixturevalue("untied")[0]
    trainer = request.getfixturevalue("train" if way == "adapter" else "train_from_disk")(
        **settings
    )
    written = {}
    seen = []

    class Watched(VLLMServerPolicy):
        async def __call__(self, request):
            sample = await super().__call__(request)
            seen.append((request, sample))
            return sample

    sync = trainer.vllm_generation
    write = trainer.vllm_generation._write

    def kept(weights):
        written[trainer.state.global_step] = dict(weights)
        write(weights)

    trainer.policy.__class__ = Watched
    sync._write = kept
    with torch.enable_grad():
        trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log[0]["async/token_age"] == 0 and max(entry["async/token_age"] for entry in log) >= 0.5
    assert all(entry["async/turn_age"] >= 0 for entry in log) and list(written) == [0, 1, 2, 3, 4]
    model = AutoModelForCausalLM.from_pretrained(policy)
    model = (get_peft_model(model, LORA_CONFIG) if way == "adapter" else model).eval()
    for updates, weights in written.items():
        assert not model.load_state_dict(weights, strict=False).unexpected_keys
        for request, sample in seen:
            if set(sample.updates) == {updates}:
                logprobs = (
                    model(torch.tensor([[*request.context, *sample.ids]])).logits[0].log_softmax(-1)
                )
                at = range(len(request.context) - 1, len(request.context) + len(sample.ids) - 1)
                assert (
                    logprobs[at, sample.ids] - torch.tensor(sample.logprobs)
                ).abs().max() <= 1e-4
    assert all(len(set(sample.updates)) == 1 for _, sample in seen)


def test_a_tied_head_left_behind_stops(train, servers):
    """vLLM's CPU back end loads the embedding and keeps the head of before: the last test of this
    server.
    """
    trainer = train(vllm_sync="disk", peft_config=None, max_steps=6)
    with pytest.raises(TrainingStopped, match="does not sample from the pushed weights"):
        trainer.train()
