"""A real vLLM on the CPU (`make vllm`, docs/howto/vllm.md): what it does to the policies over it.

A tiny policy, so that the time goes into starting vLLM. The stand-in of test_vllm.py is left with
what a CPU cannot show: TRL's push of weights, which asks for a GPU, in two processes.
"""

import asyncio
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import openai
import pytest
import torch

from agentic_prompting import OpenAIChat
from agentic_prompting.evaluation import EvaluationTask
from agentic_prompting.llm.loop import background_loop, gather
from agentic_prompting.local import Sampling
from agentic_prompting.rollout import (
    ChatFormat,
    Limits,
    Rollout,
    SampleRequest,
    TagGrammar,
    play,
    run_with_engine,
)
from agentic_prompting.trainers.policies.vllm import VLLMEnginePolicy, VLLMServerPolicy
from agentic_prompting.trainers.policies.vllm_client import PolicyUnreachable, connect_servers
from support.espl_training import trainer_for as espl_trainer_for
from support.serving import running, scripted_agent, service_of
from support.training import arguments
from support.vllm_server import VLLMServer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"
    ),
]

ROOT = Path(__file__).parents[3]
PLAIN = Sampling()
CONTEXT = 4096  # tokens
REQUESTS = [
    SampleRequest([(7 * i + j) % 700 + 20 for j in range(5 + i)], 40, seed=i) for i in range(32)
]
LONG = [SampleRequest([20 + i] * 10, 300, seed=i) for i in range(64)]


@pytest.fixture(scope="module")
def server(tiny_policy, tmp_path_factory):
    """With room for what the commands ask of a large LLM."""
    folder = tmp_path_factory.mktemp("served")
    shutil.copytree(tiny_policy, folder / "policy")
    config = json.loads((tiny_policy / "config.json").read_text()) | {
        "max_position_embeddings": CONTEXT
    }
    (folder / "policy" / "config.json").write_text(json.dumps(config))
    with VLLMServer(folder / "policy", folder) as server:
        yield server


@pytest.fixture(scope="module")
def model(tiny_policy):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_policy).eval()


@pytest.fixture(scope="module")
def tokenizer(tiny_policy):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_policy)


@pytest.fixture
def policy_for(server, tmp_path):
    def policy(sampling=PLAIN, **changes):
        where = {"vllm_mode": "server", "vllm_server_base_url": server.url, "use_vllm": True}
        args = arguments(tmp_path, **where, **changes)
        return VLLMServerPolicy(connect_servers(args), args, sampling)

    return policy


def sampled(policy, requests):
    return run_with_engine(policy, gather(policy(request) for request in requests))


def ids(samples):
    return [sample.ids for sample in samples]


@torch.no_grad()
def distributions(model, request, sample, sampling=PLAIN):
    """What each token of a sample was drawn from, by transformers: log-probabilities, tokens x
    vocabulary.
    """
    read = torch.tensor([[*request.context, *sample.ids]])
    temperature = sampling.temperature or 1.0  # greedy sampling scales nothing
    scores = model(read).logits[0] / temperature
    first = len(request.context)
    rows = [
        sampling.shaping(read[:, :n], scores[n - 1 : n].clone())
        for n in range(first, read.shape[1])
    ]
    return torch.cat(rows).log_softmax(-1)


def largest_difference(model, requests, samples, sampling=PLAIN):
    differences = []
    for request, sample in zip(requests, samples, strict=True):
        expected = distributions(model, request, sample, sampling)[
            range(len(sample.ids)), sample.ids
        ]
        differences.append((expected - torch.tensor(sample.logprobs)).abs().max())
    return float(max(differences))


def test_turns_repeat_and_their_logprobs_are_those_of_transformers(policy_for, model):
    """Whoever shares the batch: all at once, in another order, and one by one."""
    policy = policy_for()
    samples = sampled(policy, REQUESTS)
    assert ids(samples) == ids(sampled(policy, REQUESTS[::-1])[::-1])
    assert ids(samples[:3]) == [ids(sampled(policy, [request]))[0] for request in REQUESTS[:3]]
    assert largest_difference(model, REQUESTS, samples) <= 1e-4
    assert all(len(sample.ids) == 40 or sample.finished for sample in samples)


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=0.0, repetition_penalty=1.5),
        Sampling(temperature=1.3),
        Sampling(top_k=5),
        Sampling(top_p=0.5),
        Sampling(min_p=0.3),
        Sampling(0.7, 0.8, 20, 0.05, 1.3),
    ],
    ids=str,
)
def test_sampling_settings_mean_what_they_mean_to_transformers(policy_for, model, sampling):
    """Each token's log-probability under the distribution that the settings leave: none was drawn
    from outside it.
    """
    requests = REQUESTS[:12]
    samples = sampled(policy_for(sampling), requests)
    assert largest_difference(model, requests, samples, sampling) <= 1e-4
    if sampling.temperature == 0:
        for request, sample in zip(requests, samples, strict=True):
            assert distributions(model, request, sample, sampling).argmax(-1).tolist() == sample.ids


def test_a_stop_text_that_ends_inside_a_token(policy_for, tokenizer):
    """The turn ends with that token, the whole of it: what was sampled is what is trained on."""
    stop = {"stop": ["air"], "include_stop_str_in_output": True}
    requests = [SampleRequest([50, 51, 52], 300, seed=i) for i in range(24)]
    ended = 0
    for sample in sampled(policy_for(generation_kwargs=stop), requests):
        held = ["air" in tokenizer.decode([token]) for token in sample.ids]
        assert not any(held[:-1]) and len(sample.logprobs) == len(sample.ids)
        assert sample.finished == (held[-1] or sample.ids[-1] == tokenizer.eos_token_id)
        ended += held[-1] and tokenizer.decode([sample.ids[-1]]).strip() != "air"
    assert ended >= 3


def test_a_rollout_fills_the_context_to_the_last_token(policy_for, server, tokenizer):
    policy = policy_for()
    chat_format = ChatFormat(tokenizer, TagGrammar())
    limits = Limits(max_turn_tokens=10_000, max_tokens=10_000, max_context=policy.max_context)
    assert policy.max_context == CONTEXT
    prompts = [[50] * n for n in (CONTEXT - 24, CONTEXT - 1, CONTEXT)]
    rollouts = [Rollout(prompt, row={}, seed=3) for prompt in prompts]
    run_with_engine(
        policy, gather(play(rollout, policy, None, chat_format, limits) for rollout in rollouts)
    )
    assert [len(one.prompt_ids) + len(one.ids) for one in rollouts[1:]] == [CONTEXT, CONTEXT]
    assert {one.status for one in rollouts[1:]} == {"truncated"} and len(rollouts[0].ids) <= 24


# --- what happens to a server ---------------------------------------------------------------------


async def disturbed(policy, disturb):
    """The long turns, with `disturb` done to the tasks when all are at work."""
    tasks = [asyncio.create_task(policy(request)) for request in LONG]
    await asyncio.sleep(0)  # they ask first
    await policy(SampleRequest([9], 1, seed=0))
    await asyncio.to_thread(disturb, tasks)
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_paused_and_resumed_under_load(policy_for, server, mode):
    """As whoever loads weights does it: every turn is what it would have been."""
    policy = policy_for()
    reasons = Counter()
    undisturbed = ids(sampled(policy, LONG))
    complete = policy._complete

    async def counted(*asked):
        choice = await complete(*asked)
        reasons[choice["finish_reason"]] += 1
        return choice

    policy._complete = counted

    def pause(tasks):
        server.post(f"/pause?mode={mode}")
        server.post("/resume")

    assert ids(run_with_engine(policy, disturbed(policy, pause))) == undisturbed
    assert (reasons["abort"] > 0) == (mode == "abort")
    assert reasons["length"] + reasons["stop"] == 65


def test_one_of_64_is_cancelled(policy_for):
    policy = policy_for()
    undisturbed = ids(sampled(policy, LONG))

    def cancel(tasks):
        background_loop().call_soon_threadsafe(tasks[5].cancel)

    results = run_with_engine(policy, disturbed(policy, cancel))
    assert isinstance(results.pop(5), asyncio.CancelledError)
    assert ids(results) == undisturbed[:5] + undisturbed[6:]


def test_who_cancels_leaves_nothing_running(policy_for, server):
    """The server is paused meanwhile: how far the turns are does not depend on the clock, nor what
    comes after.
    """
    policy = policy_for(generation_kwargs={"ignore_eos": True})
    begun = server.counted("vllm:generation_tokens_total")

    async def cancel_all():
        tasks = [
            asyncio.create_task(policy(SampleRequest([30 + i], 1000, seed=i))) for i in range(8)
        ]
        # A fast machine may end the first turns before the last ones begin.
        while await asyncio.to_thread(server.counted, "vllm:num_requests_running") < 1:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(server.post, "/pause?mode=keep")
        before = server.counted("vllm:generation_tokens_total")
        assert before - begun < 8000
        for task in tasks:
            task.cancel()
        # The count need not get to 0 while the server is paused; the tokens at the end decide.
        for _ in range(100):
            if not server.counted("vllm:num_requests_running"):
                break
            await asyncio.sleep(0.1)
        await asyncio.to_thread(server.post, "/resume")
        await policy(SampleRequest([9], 10, seed=0))
        return server.counted("vllm:generation_tokens_total") - before

    assert run_with_engine(policy, cancel_all()) == 10


def test_killed_and_restarted_in_mid_step(policy_for, server):
    """`kill -9`; the turns wait, and come out as they would have."""
    policy = policy_for(vllm_server_timeout=300)
    undisturbed = ids(sampled(policy, LONG))

    def kill(tasks):
        server.kill()
        server.start()

    assert ids(run_with_engine(policy, disturbed(policy, kill))) == undisturbed


# --- as the large LLM of the commands -------------------------------------------------------------


def test_as_the_large_llm(server):
    """It only babbles; what counts is that each call is answered and its tokens are counted."""
    chat = OpenAIChat("policy", base_url=f"{server.url}/v1", api_key="none", max_concurrency=64)
    asked = [[{"role": "user", "content": "Kenya " * (i + 1)}] for i in range(64)]
    replies = run_with_engine(chat, gather(chat(messages, max_tokens=8) for messages in asked))
    assert all(reply.error is None and reply.usage.prompt_tokens > 0 for reply in replies)
    assert max(reply.usage.completion_tokens for reply in replies) == 8


@pytest.fixture
def command(server, run, monkeypatch):
    """Runs a command, and says what it has printed and how many requests the server has answered
    for it.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "none")

    def asked(*arguments):
        before = server.counted("vllm:request_success_total")
        status, printed, said = run(*arguments)
        assert status == (3 if arguments[0] == "evolve" else 0), (
            said
        )  # one attempt each teaches nothing
        return printed, server.counted("vllm:request_success_total") - before

    return asked


def test_ask(command, server, asking_policy):
    large = ("--environment-model", "policy", "--environment-base-url", f"{server.url}/v1")
    given = ("--run", asking_policy, *large, "--environment-max-tokens", 8, "--json")
    printed, asked = command("ask", "what is the language of Kenya ?", *given)
    assert json.loads(printed).get("error") is None and asked > 0


def test_refine(command, server):
    models = [
        part
        for role in ("task", "feedback")
        for part in (f"--{role}-model", "policy", f"--{role}-base-url", f"{server.url}/v1")
    ]
    given = ("--tokens-per-step", 8, "--max-steps", 2, "--final-max-tokens", 8, "--json")
    printed, asked = command(
        "refine", "--prompt", "Think.", "--query", "what is the capital of Kenya ?", *models, *given
    )
    (result,) = json.loads(printed)["results"]
    assert result["steps"] and asked >= 3


def test_evaluate(command, server, tmp_path, monkeypatch):
    task = EvaluationTask(
        "puzzles", [{"question": f"How many in {i}?", "answers": ["7"]} for i in range(4)]
    )
    monkeypatch.setattr("paper_tables.run.load_evaluation_task", lambda *_: task)
    config = tmp_path / "table.yaml"
    config.write_text(
        f"""
title: Small
tasks: [puzzles]
models:
  small: {{name: policy, base_url: "{server.url}/v1", sampling: {{max_tokens: 8}}}}
systems:
  cot: {{kind: prompted, model: small}}
"""
    )
    printed, asked = command("evaluate", "--config", config, "--output", tmp_path / "out")
    assert "puzzles" in printed and asked == 3 * 4  # a table asks three times


def test_evolve(command, server, tmp_path):
    """As the policy; the reference is asked where a rollout was better than another, which none of
    these is.
    """
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"question": f"{i}?", "answer": "#### 7"}) + "\n" for i in range(4))
    )
    models = [
        part
        for role in ("policy", "reference")
        for part in (f"--{role}-model", "policy", f"--{role}-base-url", f"{server.url}/v1")
    ]
    sizes = ("--steps", 1, "--problems-per-step", 2, "--num-generations", 1)
    printed, asked = command(
        "evolve",
        *models,
        *sizes,
        "--data-files",
        rows,
        "--output-dir",
        tmp_path,
        "--initial-prompt",
        "Think.",
        "--json",
    )
    assert json.loads(printed)["usage"]["policy"]["prompt_tokens"] > 0 and asked == 2


def test_serve(server, tiny_policy):
    """A service whose agent asks it.

    The agent's turns are scripted, because after a reply that random weights have sampled a real
    policy answers in most runs and writes a malformed turn in some.
    """
    chat = OpenAIChat("policy", base_url=f"{server.url}/v1", api_key="none", max_tokens=8)
    with running(service_of(scripted_agent(tiny_policy, chat))) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        question = [{"role": "user", "content": "what is the language of Kenya ?"}]
        answer = client.chat.completions.create(model="agent", messages=question)
    assert answer.choices[0].message.content == "Nairobi"
    assert chat.stats.calls == 1 and chat.stats.failed == 0


def test_as_the_reference_of_espl(server, tiny_policy, rows, tmp_path):
    """What it babbles is no edit; it was asked, and answered each time."""
    reference = OpenAIChat("policy", base_url=f"{server.url}/v1", api_key="none", max_tokens=8)
    trainer = espl_trainer_for(tiny_policy, tmp_path, rows, reference)
    trainer.train()
    assert trainer.state.global_step == trainer.args.max_steps
    assert reference.stats.calls > 0 and reference.stats.failed == 0


# --- what examples and pages say ------------------------------------------------------------------


def test_every_flag_is_one_of_this_version():
    """Of all `vllm serve` in examples/ and docs/, and of the lines there that hold flags alone;
    variables, too.
    """
    given = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--help=all"]
    known = set(
        re.findall(
            r"--[a-z][\w-]*",
            subprocess.run(given, capture_output=True, text=True, check=True).stdout,
        )
    )
    variables = Path(importlib.util.find_spec("vllm").origin).with_name("envs.py").read_text()
    used = set()
    for path in [*ROOT.glob("examples/**/*.sbatch"), *ROOT.glob("docs/**/*.md")]:
        text = path.read_text().replace("\\\n", " ")
        commands = re.findall(r"\bvllm serve\b.*|^--[a-z-]+ .*--.*", text, re.M)
        used |= {
            flag for command in commands for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", command)
        }
        for variable in set(re.findall(r"\bVLLM_[A-Z_]+", text)):
            assert f'"{variable}"' in variables, f"{path.name}: {variable}"
    assert (
        {"--weight-transfer-config", "--data-parallel-size", "--enable-lora", "--enforce-eager"}
        <= used
        <= known
    )


# --- in this process ------------------------------------------------------------------------------


def in_process(model, requests, folder):
    """Twice the same requests through the engine, the second time beside one that is cancelled on
    its way. In a process of its own, because the engine starts a process group.
    """
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from vllm import LLM

    llm = LLM(
        str(model),
        dtype="float32",
        enforce_eager=True,
        enable_chunked_prefill=False,
        max_num_batched_tokens=16384,
        logprobs_mode="processed_logprobs",
    )
    policy = VLLMEnginePolicy(llm, arguments(folder), PLAIN)

    async def with_one_cancelled():
        tasks = [
            asyncio.create_task(policy(request))
            for request in [*requests, SampleRequest([9], 1000, seed=0)]
        ]
        await tasks[0]
        tasks[-1].cancel()
        return (await asyncio.gather(*tasks, return_exceptions=True))[:-1]

    return (
        sampled(policy, requests),
        run_with_engine(policy, with_one_cancelled()),
        policy.active_count,
    )


def test_colocated(tiny_policy, model, tmp_path):
    """Turns of 4 to 88 tokens, each handed over when it is done."""
    requests = [SampleRequest([50 + i] * (5 + i), 4 + 12 * i, seed=i) for i in range(8)]
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as other:
        samples, again, left = other.submit(in_process, tiny_policy, requests, tmp_path).result(
            timeout=300
        )
    assert [len(sample.ids) for sample in samples] == [4 + 12 * i for i in range(8)]
    assert ids(again) == ids(samples) and left == 0
    assert largest_difference(model, requests, samples) <= 1e-4


def test_one_that_stays_away_is_named(policy_for, server):
    """The last one here: it is not started again."""
    policy = policy_for(vllm_server_timeout=1)
    server.kill()
    with pytest.raises(PolicyUnreachable, match=server.url):
        sampled(policy, LONG[:4])
