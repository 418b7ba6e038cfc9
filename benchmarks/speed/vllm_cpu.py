"""A real vLLM on the CPU: a hundred swaps of an adapter under load, our rollouts beside TRL's, and
the tests as checks.

    make vllm
    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.speed.vllm_cpu --json            # about a quarter of an hour
    OMP_NUM_THREADS=1 .venv-vllm/bin/python -m benchmarks.speed.vllm_cpu --json --quick    # without restarts: 8 minutes

- *rollouts*: conversations of three or four turns of 64 tokens each, played by our loop and by
  TRL's asynchronous one over the same server, alternating. Both send real requests; the sampled
  text is replaced by a request or an answer, so that the episodes continue. The environment replies
  at once, so that the figures compare the cost of each loop beside a busy server.
- *swaps*: before each swap, turns of the old version start that outlast it. After it, turns of the
  new version start with the same beginning, longer than a cache block. Each token's log-probability
  is compared with peft's for the version that was requested.
- *checks*: the tests against a real vLLM, and the conditions that the swaps have to fulfil.

A policy of 0.4 M parameters with random weights, float32. The last line of `--json` holds `checks`,
`failed`, `adapter_swaps`, `wrong_version_tokens`, `largest_difference`, `seconds_a_swap`,
`rollouts_ratio` (ours over TRL's) and rollouts/s of each.
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
    prompts_of,
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
    """A policy that samples at a server's address."""
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
    versions = None
    if adapters:
        versions = AdapterVersions("policy", folder / "versions", servers)
    return VLLMServerPolicy(servers, args, Sampling(), versions)


# --- rollouts -------------------------------------------------------------------------------------


def play_ours(workload: Workload, url: str, folder: Path) -> float:
    tags = Tags(workload)
    policy = policy_at(url, folder, generation_kwargs={"ignore_eos": True})

    async def sample(request: SampleRequest) -> Sample:
        await policy(replace(request, max_new_tokens=TURN_TOKENS))
        ids, _ = tags.write(request.context)
        return Sample(ids)

    limits = Limits(max_turns=MAX_INTERACTIONS + 1)
    started = time.perf_counter()
    play_all(tags.rollouts, sample, tags, tags.format, limits)
    seconds = time.perf_counter() - started
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
            ids, _ = calls.write(prompt_ids)
            return ids, [0.0] * len(ids)

        async def _post(
            self, path: str, payload: dict[str, Any], *limits: Any, **options: Any
        ) -> dict[str, Any]:
            payload = {**payload, "ignore_eos": True}
            return await super()._post(path, payload, *limits, **options)

    loop = make_trl_loop(Loop, tool, vllm_server_url=url, max_tokens=TURN_TOKENS)
    prompts = prompts_of(workload)

    async def play() -> float:
        connector = aiohttp.TCPConnector(limit=1024)
        async with aiohttp.ClientSession(connector=connector) as loop.session:
            started = time.perf_counter()
            # Without the tool's description, which our prompts do not have.
            await gather(loop._generate_one(prompt, {"ask": tool}, []) for prompt in prompts)
            return time.perf_counter() - started

    seconds = run(play())
    check(calls.asked, workload)
    return seconds


def measure_rollouts(url: str, folder: Path) -> dict[str, float]:
    """Median rollouts/s; the ratio is the median of the pairs' ratios."""
    our_seconds: list[float] = []
    trl_seconds: list[float] = []
    for number in range(ROUNDS + 1):
        workload = Workload.draw(ROLLOUTS, TURN_TOKENS, 0.0, 0.0, 0.0, seed=number)
        if number % 2:
            our_seconds.append(play_ours(workload, url, folder))
            trl_seconds.append(play_trl(workload, url))
        else:
            trl_seconds.append(play_trl(workload, url))
            our_seconds.append(play_ours(workload, url, folder))

    # The first round imports and connects.
    del our_seconds[0], trl_seconds[0]
    pairs = zip(our_seconds, trl_seconds, strict=True)
    return {
        "rollouts_a_second": ROLLOUTS / statistics.median(our_seconds),
        "rollouts_a_second_trl": ROLLOUTS / statistics.median(trl_seconds),
        "rollouts_ratio": statistics.median(theirs / ours for ours, theirs in pairs),
    }


# --- swaps ----------------------------------------------------------------------------------------


class Versions:
    """Random adapters of the policy, and the log-probability that each gives a token."""

    def __init__(self, policy: Path, folder: Path):
        torch.manual_seed(0)
        config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        self.model = get_peft_model(AutoModelForCausalLM.from_pretrained(policy), config).eval()
        self.folder = folder
        self.weights: dict[int, dict[str, torch.Tensor]] = {}

    @torch.no_grad()
    def write(self, version: int) -> None:
        """Draw the weights of a version and save them for the server."""
        adapters = {}
        for name, weight in self.model.named_parameters():
            if "lora_" in name:
                adapters[name] = weight
        for weight in adapters.values():
            weight.normal_(std=0.15)
        self.model.save_pretrained(self.folder / f"policy-{version}", save_embedding_layers=False)
        self.weights[version] = {name: weight.clone() for name, weight in adapters.items()}

    @torch.no_grad()
    def differences(self, version: int, request: SampleRequest, sample: Sample) -> torch.Tensor:
        """The difference of each token's log-probability from the one of this version."""
        self.model.load_state_dict(self.weights[version], strict=False)
        ids = torch.tensor([[*request.context, *sample.ids]])
        logprobs = self.model(ids).logits[0].log_softmax(-1)
        # The logits at a token are of the token that follows.
        first = len(request.context) - 1
        positions = range(first, first + len(sample.ids))
        return (logprobs[positions, sample.ids] - torch.tensor(sample.logprobs)).abs()


def measure_swaps(url: str, policy: Path, folder: Path, swap_count: int) -> dict[str, Any]:
    versions = Versions(policy, folder / "versions")
    server_policy = policy_at(url, folder, adapters=True)
    adapters = server_policy.adapters
    rng = random.Random(0)
    assert adapters is not None
    (server,) = adapters.servers
    shared_ids = [rng.randrange(20, 700) for _ in range(400)]
    samples: list[tuple[int, SampleRequest, Sample]] = []
    seconds: list[float] = []
    old_versions_in_use: list[set[str]] = []
    outlasting_turns = 0

    async def sample_turn(request: SampleRequest) -> None:
        nonlocal outlasting_turns
        version = adapters.version
        samples.append((version, request, await server_policy(request)))
        outlasting_turns += adapters.version > version

    async def sample_one_token() -> None:
        await server_policy(SampleRequest([9], 1, seed=0))

    def make_requests(number: int, tokens: int) -> list[SampleRequest]:
        """Turns with the same beginning, longer than a cache block."""
        requests = []
        for row in range(4):
            context = [*shared_ids[: 150 + 60 * row], 20 + row]
            requests.append(SampleRequest(context, tokens, seed=4 * number + row))
        return requests

    async def swap(number: int) -> None:
        async with asyncio.TaskGroup() as turns:
            # Turns of the old version, which outlast the swap.
            if number:
                for request in make_requests(number, 40):
                    turns.create_task(sample_turn(request))
                await sample_one_token()  # now the turns are being sampled
            started = time.perf_counter()
            await adapters.load(server, adapters.upcoming)
            in_use = await adapters.advance()
            await sample_one_token()
            seconds.append(time.perf_counter() - started)
            for request in make_requests(number, 16):
                turns.create_task(sample_turn(request))
        await adapters.keep({adapters.current})
        old_versions_in_use.append(in_use - {adapters.current})

    for number in range(swap_count):
        versions.write(number)
        run(swap(number))

    # Compare each token with its version, and with the one before: those must differ.
    wrong_tokens = 0
    largest = 0.0
    mean_distances = []
    for version, request, sample in samples:
        differences = versions.differences(version, request, sample)
        wrong_tokens += int((differences > CLOSE).sum())
        largest = max(largest, float(differences.max()))
        if version:
            previous = versions.differences(version - 1, request, sample)
            mean_distances.append(float(previous.mean()))

    listed = run(server.request("/v1/models"))["data"]
    listed_names = [model["id"] for model in listed]
    folder_names = [path.name for path in adapters.folder.iterdir()]
    outlasted_swaps = sum(bool(in_use) for in_use in old_versions_in_use)
    enough = 0.9 * (swap_count - 1)
    return {
        "adapter_swaps": swap_count,
        "tokens_checked": sum(len(sample.ids) for *_, sample in samples),
        "wrong_version_tokens": wrong_tokens,
        "largest_difference": largest,
        "seconds_a_swap": statistics.median(seconds),
        "longest_swap": max(seconds),
        "checks": {
            "no token is of another version": wrong_tokens == 0,
            "versions can be told apart": min(mean_distances, default=1.0) > 100 * CLOSE,
            "turns outlast a swap": outlasted_swaps >= enough,
            "turns end under the version they began with": outlasting_turns >= enough,
            "versions of before are unloaded": listed_names == ["policy", adapters.current],
            "and deleted": folder_names == [adapters.current],
        },
    }


# --- checks ---------------------------------------------------------------------------------------


def run_tests(quick: bool) -> dict[str, int]:
    """How many of the tests against a real vLLM passed and failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-m", "vllm and not slow", *TESTS]
    if quick:
        command += ["-k", f"not ({RESTARTS})"]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    lines = finished.stdout.splitlines()
    print("\n".join(lines[-8:]), flush=True)

    # The last line counts the tests by outcome; a run that failed otherwise counts as one failure.
    passed = 0
    failed = 0
    for count, outcome in re.findall(r"(\d+) (passed|failed|errors?)", lines[-1]):
        if outcome == "passed":
            passed += int(count)
        else:
            failed += int(count)
    return {"passed": passed, "failed": max(failed, int(finished.returncode != 0))}


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
            figures: dict[str, Any] = measure_rollouts(server.url, folder)
            figures |= measure_swaps(server.url, policy, folder, SWAPS)
    checks = figures.pop("checks")
    outcome = run_tests(arguments.quick)
    for check_name, holds in checks.items():
        print(f"{'ok    ' if holds else 'FAILED'} {check_name}")
    for name, value in figures.items():
        if isinstance(value, float):
            figures[name] = float(f"{value:.3g}")
    figures["checks"] = len(checks) + outcome["passed"] + outcome["failed"]
    figures["failed"] = outcome["failed"] + sum(not holds for holds in checks.values())
    print("\n".join(f"{name}: {value}" for name, value in figures.items()))
    if arguments.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
