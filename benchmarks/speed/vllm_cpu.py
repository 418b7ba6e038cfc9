"""A real vLLM on the CPU: a hundred swaps of an adapter under load, our rollouts beside TRL's, and the tests as checks.

    make vllm
    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.speed.vllm_cpu --json            # about a quarter of an hour
    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.speed.vllm_cpu --json --quick    # without restarts: 8 minutes

- *rollouts*: conversations of three or four turns of 64 tokens each, played by our loop and by TRL's asynchronous one
  over the same server, alternating. Both send real requests; the sampled text is replaced by a request or an answer, so
  that the episodes continue. The environment replies at once, so that the figures compare the cost of each loop beside
  a busy server.
- *swaps*: before each swap, turns of the old version start that outlast it. After it, turns of the new version start
  with the same beginning, longer than a cache block. Each token's log-probability is compared with peft's for the
  version that was requested.
- *checks*: the tests against a real vLLM, and the conditions that the swaps have to fulfil.

A policy of 0.4 M parameters with random weights, float32. The last line of `--json` holds `checks`, `failed`,
`adapter_swaps`, `wrong_version_tokens`, `largest_difference`, `seconds_a_swap`, `rollouts_ratio` (ours over TRL's) and
rollouts/s of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from agentic_prompting import PromptR1Config  # noqa: E402
from agentic_prompting.llm import gather  # noqa: E402
from agentic_prompting.llm.loop import run  # noqa: E402
from agentic_prompting.local import Sampling  # noqa: E402
from agentic_prompting.rollout import Limits, Sample, SampleRequest, play_all  # noqa: E402
from agentic_prompting.trainers.policies.vllm import VLLMServerPolicy  # noqa: E402
from agentic_prompting.trainers.policies.vllm_client import connect_servers  # noqa: E402
from agentic_prompting.trainers.policies.weight_sync import AdapterVersions  # noqa: E402
from benchmarks.speed.rollout import (  # noqa: E402
    MAX_INTERACTIONS,
    Tags,
    ToolCalls,
    Workload,
    check,
    make_trl_loop,
)
from support.policies import make_tiny_policy  # noqa: E402
from support.vllm_server import LORA, VLLMServer  # noqa: E402

SWAPS = 100
ROLLOUTS = 64
TURN_TOKENS = 64
ROUNDS = 7
CLOSE = 1e-4  # difference of log-probabilities; two versions differ far more
TESTS = (
    "tests/trainers/policies/test_vllm_real.py",
    "tests/trainers/policies/test_vllm_weights.py",
)
RESTARTS = "killed or comes_back or takes_over or colocated or from_a_disk"


def policy_at(url: str, folder: Path, adapters: bool = False, **options: Any) -> VLLMServerPolicy:
    args = PromptR1Config(
        str(folder),
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=url,
        use_cpu=True,
        bf16=False,
        **options,
    )
    servers = connect_servers(args)
    versions = AdapterVersions("policy", folder / "versions", servers) if adapters else None
    return VLLMServerPolicy(servers, args, Sampling(), versions)


# --- rollouts -----------------------------------------------------------------------------------------------------


def play_ours(workload: Workload, url: str, folder: Path) -> float:
    tags = Tags(workload)
    policy = policy_at(url, folder, generation_kwargs={"ignore_eos": True})

    async def asked(request: SampleRequest) -> Sample:
        await policy(replace(request, max_new_tokens=TURN_TOKENS))
        return Sample(tags.write(request.context)[0])

    began = time.perf_counter()
    play_all(tags.rollouts, asked, tags, tags.format, Limits(max_turns=MAX_INTERACTIONS + 1))
    seconds = time.perf_counter() - began
    check([len(rollout.turns) - 1 for rollout in tags.rollouts], workload)
    return seconds


def play_trl(workload: Workload, url: str) -> float:
    import aiohttp
    from trl.experimental.async_grpo.async_rollout_worker import _AsyncRolloutLoop

    calls = ToolCalls(workload)
    tool = calls.tool()

    class Loop(_AsyncRolloutLoop):
        async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
            await super()._generate_one_turn(prompt_ids)
            said, _ = calls.write(prompt_ids)
            return said, [0.0] * len(said)

        async def _post(
            self, path: str, payload: dict[str, Any], *limits: Any, **more: Any
        ) -> dict[str, Any]:
            return await super()._post(path, {**payload, "ignore_eos": True}, *limits, **more)

    loop = make_trl_loop(Loop, tool, vllm_server_url=url, max_tokens=TURN_TOKENS)
    prompts = [
        [{"role": "user", "content": f"rollout {i}"}] for i in range(len(workload.latencies))
    ]

    async def play() -> float:
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=1024)
        ) as loop.session:
            began = time.perf_counter()
            # Without the tool's description, which our prompts do not have.
            await gather(loop._generate_one(prompt, {"ask": tool}, []) for prompt in prompts)
            return time.perf_counter() - began

    seconds = run(play())
    check(calls.asked, workload)
    return seconds


def rollouts(url: str, folder: Path) -> dict[str, float]:
    """Median rollouts/s; the ratio is the median of the pairs' ratios."""
    seconds: dict[str, list[float]] = {"ours": [], "trl": []}
    for number in range(ROUNDS + 1):
        workload = Workload.draw(ROLLOUTS, TURN_TOKENS, 0.0, 0.0, 0.0, seed=number)
        pair = {
            "ours": lambda: play_ours(workload, url, folder),  # noqa: B023
            "trl": lambda: play_trl(workload, url),  # noqa: B023
        }
        for name in ("ours", "trl") if number % 2 else ("trl", "ours"):
            seconds[name].append(pair[name]())
    ours, theirs = (
        values[1:] for values in seconds.values()
    )  # the first round imports and connects
    return {
        "rollouts_a_second": ROLLOUTS / statistics.median(ours),
        "rollouts_a_second_trl": ROLLOUTS / statistics.median(theirs),
        "rollouts_ratio": statistics.median(b / a for a, b in zip(ours, theirs, strict=True)),
    }


# --- swaps --------------------------------------------------------------------------------------------------------


class Versions:
    """Random adapters of the policy, and the log-probability that each gives a token."""

    def __init__(self, policy: Path, folder: Path):
        torch.manual_seed(0)
        config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(AutoModelForCausalLM.from_pretrained(policy), config).eval()
        self.folder = folder
        self.kept = dict[int, dict[str, torch.Tensor]]()

    @torch.no_grad()
    def write(self, version: int) -> None:
        weights = {name: one for name, one in self.model.named_parameters() if "lora_" in name}
        for weight in weights.values():
            weight.normal_(std=0.15)
        self.model.save_pretrained(self.folder / f"policy-{version}", save_embedding_layers=False)
        self.kept[version] = {name: one.clone() for name, one in weights.items()}

    @torch.no_grad()
    def differences(self, version: int, request: SampleRequest, sample: Sample) -> torch.Tensor:
        """The difference of each token's log-probability from the one of this version."""
        self.model.load_state_dict(self.kept[version], strict=False)
        logprobs = (
            self.model(torch.tensor([[*request.context, *sample.ids]])).logits[0].log_softmax(-1)
        )
        at = range(len(request.context) - 1, len(request.context) + len(sample.ids) - 1)
        return (logprobs[at, sample.ids] - torch.tensor(sample.logprobs)).abs()


def swaps(url: str, policy: Path, folder: Path, n: int) -> dict[str, Any]:
    versions = Versions(policy, folder / "versions")
    asking = policy_at(url, folder, adapters=True)
    adapters = asking.adapters
    rng = random.Random(0)
    assert adapters is not None
    (server,) = adapters.servers
    shared = [rng.randrange(20, 700) for _ in range(400)]
    seen: list[tuple[int, SampleRequest, Sample]] = []
    seconds = []
    left_over = []
    outlasted = 0

    async def ask(request: SampleRequest) -> None:
        nonlocal outlasted
        version = adapters.version
        seen.append((version, request, await asking(request)))
        outlasted += adapters.version > version

    def requests(number: int, tokens: int) -> list[SampleRequest]:
        return [
            SampleRequest([*shared[: 150 + 60 * i], 20 + i], tokens, seed=4 * number + i)
            for i in range(4)
        ]

    async def swap(number: int) -> None:
        async with asyncio.TaskGroup() as turns:
            if number:
                for request in requests(number, 40):
                    turns.create_task(ask(request))
                await asking(SampleRequest([9], 1, seed=0))  # now the turns are being sampled
            began = time.perf_counter()
            await adapters.load(server, adapters.upcoming)
            in_use = await adapters.advance()
            await asking(SampleRequest([9], 1, seed=0))
            seconds.append(time.perf_counter() - began)
            for request in requests(number, 16):
                turns.create_task(ask(request))
        await adapters.keep({adapters.current})
        left_over.append(in_use - {adapters.current})

    for number in range(n):
        versions.write(number)
        run(swap(number))
    wrong = 0
    largest = 0.0
    apart = []
    for version, request, sample in seen:
        differences = versions.differences(version, request, sample)
        wrong = wrong + int((differences > CLOSE).sum())
        largest = max(largest, float(differences.max()))
        apart.append(
            float(versions.differences(max(version - 1, 0), request, sample).mean())
            if version
            else 1.0
        )
    listed = run(server.request("/v1/models"))["data"]
    return {
        "adapter_swaps": n,
        "tokens_checked": sum(len(sample.ids) for *_, sample in seen),
        "wrong_version_tokens": wrong,
        "largest_difference": largest,
        "seconds_a_swap": statistics.median(seconds),
        "longest_swap": max(seconds),
        "checks": {
            "no token is of another version": wrong == 0,
            "versions can be told apart": min(apart) > 100 * CLOSE,
            "turns outlast a swap": sum(map(bool, left_over)) >= 0.9 * (n - 1),
            "turns end under the version they began with": outlasted >= 0.9 * (n - 1),
            "versions of before are unloaded": [model["id"] for model in listed]
            == ["policy", adapters.current],
            "and deleted": [path.name for path in adapters.folder.iterdir()] == [adapters.current],
        },
    }


# --- checks -------------------------------------------------------------------------------------------------------


def tests(quick: bool) -> dict[str, int]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "vllm and not slow",
        *TESTS,
    ]
    command += ["-k", f"not ({RESTARTS})"] if quick else []
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    print("\n".join(said.stdout.splitlines()[-8:]), flush=True)
    counted = {
        word: int(n)
        for n, word in re.findall(r"(\d+) (passed|failed|errors?)", said.stdout.splitlines()[-1])
    }
    passed = counted.pop("passed", 0)
    return {"passed": passed, "failed": max(sum(counted.values()), int(said.returncode != 0))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument(
        "--quick", action="store_true", help="without the tests that start a server again"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = make_tiny_policy(folder / "policy")
        with VLLMServer(policy, folder, *LORA) as server:
            found = rollouts(server.url, folder) | swaps(server.url, policy, folder, SWAPS)
    own = found.pop("checks")
    outcome = tests(arguments.quick)
    for check_name, holds in own.items():
        print(f"{'ok    ' if holds else 'FAILED'} {check_name}")
    found = {
        key: float(f"{value:.3g}") if isinstance(value, float) else value
        for key, value in found.items()
    }
    found["checks"] = len(own) + outcome["passed"] + outcome["failed"]
    found["failed"] = outcome["failed"] + sum(not holds for holds in own.values())
    print("\n".join(f"{key}: {value}" for key, value in found.items()))
    if arguments.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
