"""Rollouts against slow replies: TRL's tool loop, a lock-step loop and ours, side by side in one run.

    python benchmarks/rollout.py --json            # about 6 minutes, most of it TRL's loop
    python benchmarks/rollout.py --json --quick    # every time divided by four, 64 rollouts only: under 50 s

The same questions, numbers of interactions, reply latencies and sampling times for all three. The policy is scripted,
so that nothing but waiting is measured: a batch of turns takes `--sampling` seconds whatever its size, as decoding does
that is bound by memory bandwidth. TRL's loop is TRL's own code, given an asynchronous tool; only its call to the model
is replaced by the scripted policy.

The limit no loop can beat is the longest chain of one rollout: its replies and the sampling between them. The last line
of `--json` holds `n, ours_s, lockstep_s, trl_s, limit_s` of the first setting and all `settings`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentic_prompting import LLMEnvironment
from agentic_prompting.llm.types import Message, Reply
from agentic_prompting.rollout import ChatFormat, Limits, Rollout, Sample, SampleRequest, TagGrammar, run_rollouts

MAX_INTERACTIONS = 3
LATENCIES = {
    "log-normal 0.5 s, sigma 0.6": (0.5, 0.6),
    "log-normal 1.0 s, sigma 0.8": (1.0, 0.8),
    "constant 0.5 s": (0.5, 0.0),
}


@dataclass(frozen=True)
class Workload:
    """What every loop is given: per rollout, the latency of each of its replies, in seconds.

    Args:
        latencies (`list[list[float]]`): One list per rollout, as long as it has interactions.
        sampling (`float`): Seconds that one batch of turns takes to sample.
    """

    latencies: list[list[float]]
    sampling: float

    @classmethod
    def draw(cls, n: int, median: float, sigma: float, sampling: float, seed: int) -> Workload:
        """2 or 3 interactions each, as the sandbox's questions of two and three hops take, with log-normal latencies
        (constant where `sigma` is 0)."""
        rng = random.Random(f"{seed} {n} {median} {sigma}")
        counts = [rng.randint(2, MAX_INTERACTIONS) for _ in range(n)]
        return cls([[median * rng.lognormvariate(0.0, sigma) for _ in range(count)] for count in counts], sampling)

    @property
    def limit(self) -> float:
        """The longest chain of one rollout: its replies, and the sampling before, between and after them."""
        return max(sum(chain) + (len(chain) + 1) * self.sampling for chain in self.latencies)

    @property
    def one_after_another(self) -> float:
        """What a loop takes that awaits every reply by itself."""
        turns = max(len(chain) for chain in self.latencies) + 1
        return sum(map(sum, self.latencies)) + turns * self.sampling

    def asks(self, rollout: int, turn: int) -> bool:
        return turn < len(self.latencies[rollout])


class Replies:
    """A [`ChatModel`] that answers request "rollout turn" after that reply's latency, on one event loop."""

    def __init__(self, workload: Workload):
        self.workload = workload
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def submit(
        self, messages: Sequence[Message], *, repeat: int | None = None, session: str | None = None, **sampling: Any
    ) -> Future[Reply]:
        rollout, turn = map(int, re.findall(r"\d+", messages[-1]["content"])[:2])
        return asyncio.run_coroutine_threadsafe(self.reply(rollout, turn), self.loop)

    async def reply(self, rollout: int, turn: int) -> Reply:
        await asyncio.sleep(self.workload.latencies[rollout][turn])
        return Reply(text="noted")


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte and Qwen3's own chat template, which TRL's tool loop knows how to parse."""
    import trl

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE({byte: number for number, byte in enumerate(sorted(alphabet))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
    tokenizer.add_tokens(
        [AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>", "</tool_call>")]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    return fast


# --- our loop, and the same turns in lock-step --------------------------------------------------------------------


class ScriptedPolicy:
    """A sampler that asks as often as the workload says, then answers; a batch takes `workload.sampling` seconds."""

    def __init__(self, workload: Workload, chat_format: ChatFormat):
        self.workload, self.chat_format, self.batches = workload, chat_format, 0

    def __call__(self, requests: Sequence[SampleRequest]) -> list[Sample]:
        self.batches += 1
        time.sleep(self.workload.sampling)
        return [Sample(self.chat_format.turn_ids(self.turn(request.context))) for request in requests]

    def turn(self, context: list[int]) -> str:
        text = byte_tokenizer().decode(context)
        rollout, turn = int(re.search(r"rollout (\d+)", text)[1]), text.count("<interaction_response>")
        if self.workload.asks(rollout, turn):
            return f"<think> go on </think>\n<interaction_prompt> {rollout} {turn} </interaction_prompt>"
        return "<think> done </think>\n<answer> noted </answer>"


def fresh_rollouts(workload: Workload, chat_format: ChatFormat) -> list[Rollout]:
    return [
        Rollout(chat_format.prompt_ids([{"role": "user", "content": f"rollout {i}"}]), seed=i)
        for i in range(len(workload.latencies))
    ]


def play_ours(workload: Workload, linger: float = 0.1) -> tuple[float, int]:
    """Seconds, and the number of batches it took. `linger`: see [`run_rollouts`]."""
    chat_format = ChatFormat(byte_tokenizer(), TagGrammar())
    policy, rollouts = ScriptedPolicy(workload, chat_format), fresh_rollouts(workload, chat_format)
    environment = LLMEnvironment(Replies(workload))
    started = time.perf_counter()
    run_rollouts(rollouts, policy, environment, chat_format, Limits(max_turns=MAX_INTERACTIONS + 1), linger=linger)
    seconds = time.perf_counter() - started
    check([len(rollout.turns) - 1 for rollout in rollouts], workload)
    return seconds, policy.batches


def play_in_lockstep(workload: Workload) -> float:
    """Sample all, ask all, wait for all, as a loop over turns does."""
    chat_format = ChatFormat(byte_tokenizer(), TagGrammar())
    policy, rollouts = ScriptedPolicy(workload, chat_format), fresh_rollouts(workload, chat_format)
    environment, running = LLMEnvironment(Replies(workload)), rollouts
    started = time.perf_counter()
    while running:
        samples = policy([SampleRequest(rollout.context, 1024, 0) for rollout in running])
        for rollout, sample in zip(running, samples, strict=True):
            rollout.sampled(sample, chat_format.parse(sample.ids))
        running = [rollout for rollout in running if rollout.turns[-1].kind == "act"]
        waiting = [environment.step(rollout) for rollout in running]
        for rollout, future in zip(running, waiting, strict=True):
            observation = future.result()
            rollout.observed(observation, chat_format.observation_ids(observation.text, after=rollout.ids))
    seconds = time.perf_counter() - started
    check([len(rollout.turns) - 1 for rollout in rollouts], workload)
    return seconds


# --- TRL's tool loop ----------------------------------------------------------------------------------------------


def play_trl(workload: Workload) -> float:
    """`GRPOTrainer._generate` of TRL with an asynchronous tool; the model's turns come from the same script."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    tokenizer, asked = byte_tokenizer(), [0] * len(workload.latencies)

    async def ask(rollout: int, turn: int) -> str:
        """Ask the large model.

        Args:
            rollout: Which rollout asks.
            turn: Which of its turns this is.
        """
        asked[rollout] += 1
        await asyncio.sleep(workload.latencies[rollout][turn])
        return "noted"

    def turn_of(context: list[int]) -> list[int]:
        text = tokenizer.decode(context)
        rollout, turn = int(re.search(r"rollout (\d+)", text)[1]), text.count("noted")
        said = "noted, done"
        if workload.asks(rollout, turn):
            call = {"name": "ask", "arguments": {"rollout": rollout, "turn": turn}}
            said = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
        return [*tokenizer(said)["input_ids"], tokenizer.eos_token_id]

    def sample(contexts: list[list[int]], *args: Any, **kwargs: Any) -> tuple[list[list[int]], None]:
        time.sleep(workload.sampling)
        return [turn_of(context) for context in contexts], None

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=1, head_dim=16, **shape))
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            processing_class=tokenizer,
            reward_funcs=lambda completions, **columns: [0.0] * len(completions),
            args=GRPOConfig(
                folder, use_cpu=True, bf16=False, report_to="none", max_completion_length=8192,
                per_device_train_batch_size=8, max_tool_calling_iterations=MAX_INTERACTIONS,
            ),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "rollout 0"}]}] * 8),
            tools=[ask],
        )  # fmt: skip
        trainer._generate_single_turn = sample
        prompts = [[{"role": "user", "content": f"rollout {i}"}] for i in range(len(workload.latencies))]
        trainer._sync_tool_dicts = [{} for _ in prompts]
        trainer._async_tool_dicts = [{"ask": ask} for _ in prompts]
        started = time.perf_counter()
        trainer._generate(prompts)
        seconds = time.perf_counter() - started
    check(asked, workload)
    return seconds


def check(interactions: list[int], workload: Workload) -> None:
    """Every loop must have done the same work."""
    wanted = [len(chain) for chain in workload.latencies]
    if interactions != wanted:
        raise AssertionError(f"a loop played {sum(interactions)} interactions, the workload has {sum(wanted)}")


# --- the comparison -----------------------------------------------------------------------------------------------


def measure(
    name: str, n: int, sampling: float, scale: float, with_trl: bool, repeats: int, seed: int
) -> dict[str, Any]:
    """One setting; our loops `repeats` times (the median), TRL's once."""
    median, sigma = LATENCIES[name]
    workload = Workload.draw(n, median * scale, sigma, sampling * scale, seed)
    ours = [play_ours(workload) for _ in range(repeats)]
    ours_s = statistics.median(seconds for seconds, _ in ours)
    lockstep_s = statistics.median(play_in_lockstep(workload) for _ in range(repeats))
    trl_s = play_trl(workload) if with_trl else None
    slowest = trl_s if trl_s is not None else workload.one_after_another
    row = {
        "latency": name,
        "n": n,
        "ours_s": ours_s,
        "lockstep_s": lockstep_s,
        "trl_s": trl_s,
        "trl_computed_s": workload.one_after_another,
        "limit_s": workload.limit,
        "batches": ours[0][1],
        "to_limit": ours_s / workload.limit,
        "to_lockstep": lockstep_s / ours_s,
        "to_trl": slowest / ours_s,
    }
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()}


def table(rows: Sequence[dict[str, Any]]) -> str:
    titles = ("latency of replies", "rollouts", "limit", "ours", "lock-step", "TRL's loop", "ours / limit")
    titles += ("lock-step / ours", "TRL / ours")
    lines = [" | ".join(titles), " | ".join("---" for _ in titles)]
    for row in rows:
        trl = f"{row['trl_s']:.1f} s" if row["trl_s"] is not None else f"({row['trl_computed_s']:.0f} s, computed)"
        cells = [row["latency"], row["n"], *(f"{row[name]:.2f} s" for name in ("limit_s", "ours_s", "lockstep_s")), trl]
        cells += [f"{row['to_limit']:.2f}", f"{row['to_lockstep']:.2f}", f"{row['to_trl']:.0f}"]
        lines.append(" | ".join(map(str, cells)))
    return "\n".join(f"| {line} |" for line in lines)


def linger_table(n: int, seed: int) -> str:
    """Ours / limit, and batches, by time per batch and by how long the loop waits for more replies."""
    shares = (0.0, 0.03, 0.1, 0.3, 1.0)
    lines = ["time per batch | " + " | ".join(f"linger {share:g}" for share in shares), "--- | " * len(shares) + "---"]
    for sampling in (0.01, 0.05, 0.2, 1.0):
        workload = Workload.draw(n, *next(iter(LATENCIES.values())), sampling, seed)
        played = [play_ours(workload, share) for share in shares]
        cells = [f"{seconds / workload.limit:.2f} ({batches})" for seconds, batches in played]
        lines.append(f"{sampling:g} s | " + " | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="one setting, all times divided by four")
    parser.add_argument("--linger", action="store_true", help="measure the rule for waiting instead")
    parser.add_argument("--sampling", type=float, default=0.05, help="seconds per batch of turns (default: 0.05)")
    parser.add_argument("--seed", type=int, default=0, help="of interactions and latencies")
    arguments = parser.parse_args()
    if arguments.linger:
        print(linger_table(64, arguments.seed))
        return
    first = next(iter(LATENCIES))
    if arguments.quick:
        settings = [(first, 64, 0.25, True, 3)]
    else:
        settings = [(name, n, 1.0, n == 64 and name == first, 3) for n in (64, 256) for name in LATENCIES]
    rows = [
        measure(name, n, arguments.sampling, scale, with_trl, repeats, arguments.seed)
        for name, n, scale, with_trl, repeats in settings
    ]
    print(table(rows))
    if arguments.json:
        keys = ("n", "ours_s", "lockstep_s", "trl_s", "limit_s")
        print(json.dumps({key: rows[0][key] for key in keys} | {"settings": rows}))


if __name__ == "__main__":
    main()
