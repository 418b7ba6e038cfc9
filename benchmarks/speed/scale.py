"""The arithmetic of docs/performance.md: tokens, calls and money, from shapes and a few
assumptions; and the memory of a GPU by `plan`, beside the formulas that one would write down for
it.

    python -m benchmarks.speed.scale  # the tables of arithmetic
    python -m benchmarks.speed.scale --plan --record  # six plans of a minute each, into records/scale.jsonl.gz
    python -m benchmarks.recompute --write  # the table of memory from these records

Nothing here is measured on a GPU. The assumptions are the fields of `Assumptions`; change them and
run again.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.lab import RECORDS, Records, markdown

sys.path[:0] = [str(Path(__file__).parents[2] / "src")]
GIB = 2**30
STATES = "weights", "adapters", "gradients", "optimizer", "reference"


@dataclass(frozen=True)
class Model:
    """A Qwen3 model's shape, from its published config.json."""

    name: str
    parameters: float
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int = 8
    head_size: int = 128
    tied: bool = False

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token, bf16."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2

    def lora_parameters(self, rank: int) -> float:
        """Adapters on all linear layers of each block: rank x (inputs + outputs) of each."""
        queries = self.heads * self.head_size
        values = self.kv_heads * self.head_size
        attention = (self.hidden + queries) * 2 + (self.hidden + values) * 2
        return rank * self.layers * (attention + (self.hidden + self.intermediate) * 3)


MODELS = [
    Model("Qwen3-4B", 4.02e9, 36, 2560, 9728, 32, tied=True),
    Model("Qwen3-8B", 8.19e9, 36, 4096, 12288, 32),
    Model("Qwen3-32B", 32.8e9, 64, 5120, 25600, 64),
]


@dataclass(frozen=True)
class Assumptions:
    """What the arithmetic takes as given."""

    gpus: int = 8  # that train
    context: int = 8192  # tokens of prompt and response
    lora_rank: int = 32
    rollouts: int = 640  # a step: 128 questions, 5 rollouts each
    calls: float = 3.0  # to the large LLM per rollout
    agent_tokens: int = 800  # sampled per rollout, all turns together
    call_input: int = 700  # tokens of a call: what the agent wrote, and the history it is sent with
    call_output: int = 250
    call_seconds: float = 3.0
    input_price: float = 0.15  # US $ per million tokens, gpt-4o-mini
    output_price: float = 0.60
    bandwidth: float = 3.35e12  # bytes/s of an H100's memory
    flops: float = 990e12  # bf16, dense
    decode_share: float = 0.5  # of the bandwidth that decoding reaches
    train_share: float = 0.35  # of the FLOPs that training reaches
    # Bytes of an 80 GB GPU that a server has left for keys and values of a 4B model.
    kv_memory: float = 60e9
    servers: int = 8  # GPUs that sample
    # Memory of a token in a Rollout: id, mask and log-probability, Python objects in three lists.
    python_bytes: int = 80


@dataclass(frozen=True)
class Memory:
    """GiB per GPU at the two moments of a step that need most."""

    training: float
    sampling: float


def memory_by_formula(model: Model, trained: str, assumed: Assumptions) -> Memory:
    """The memory while training with ZeRO-3 or FSDP2 and activation checkpointing, one sequence per
    backward pass; and while sampling in place.
    """
    # One saved input per layer; one layer recomputed (attention and MLP, about 12 hidden + 4
    # intermediate); a tile of logits of TRL's fused head (4096 x 32768, fp32) twice.
    saved_inputs = model.layers * model.hidden
    recomputed_layer = 12 * model.hidden + 4 * model.intermediate
    activations = assumed.context * 2 * (saved_inputs + recomputed_layer)
    activations += 2 * 4096 * 32768 * 4

    # bf16 weights; of what is trained bf16 gradients, fp32 master copy, two fp32 moments; a
    # reference model for beta > 0 (with LoRA it is the same model without its adapters).
    weights = 2 * model.parameters
    if trained == "full":
        reference = weights
        trained_parameters = model.parameters
    else:
        reference = 0.0
        trained_parameters = model.lora_parameters(assumed.lora_rank)
    states = (weights + 14 * trained_parameters + reference) / assumed.gpus
    while_sampling = weights + assumed.context * model.kv_bytes * 8
    return Memory(training=(states + activations) / GIB, sampling=(states + while_sampling) / GIB)


def plans(assumed: Assumptions) -> Iterator[dict[str, Any]]:
    """The plan of each model: GiB by moment and part, without a look for what fits better."""
    from peft import LoraConfig
    from transformers import Qwen3Config

    from agentic_prompting.planning import plan

    args = {
        "bf16": True,
        "gradient_checkpointing": True,
        "beta": 0.001,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 8,
        "max_context": assumed.context,
        "max_completion_length": assumed.context,
    }
    zero3 = {"distributed_type": "DEEPSPEED", "deepspeed_config": {"zero_stage": 3}}
    for model in MODELS:
        shape = Qwen3Config(
            hidden_size=model.hidden,
            intermediate_size=model.intermediate,
            num_hidden_layers=model.layers,
            num_attention_heads=model.heads,
            num_key_value_heads=model.kv_heads,
            head_dim=model.head_size,
            vocab_size=151_936,
            max_position_embeddings=40_960,
            tie_word_embeddings=model.tied,
        )
        lora = LoraConfig(r=assumed.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
        for trained, adapters in (("full", None), ("LoRA", lora)):
            planned = plan(
                args, shape, gpus=assumed.gpus, accelerate=zero3, peft_config=adapters, seconds=0
            )
            moments = {}
            for moment, parts in planned.moments.items():
                moments[moment] = {part: round(gib, 3) for part, gib in parts.items()}
            yield {
                "model": model.name,
                "trained": trained,
                "parameters": planned.parameters,
                "moments": moments,
            }


def memory(records: Sequence[Mapping[str, Any]]) -> str:
    """The table of memory, from the latest plan of each model, with the formulas beside it."""
    latest = {(record["model"], record["trained"]): record["moments"] for record in records}
    rows = []
    for model, trained in product(MODELS, ("full", "LoRA")):
        moments = latest.get((model.name, trained))
        if moments is None:
            continue
        passes = moments["forward and backward passes"]
        states = sum(passes.get(part, 0.0) for part in STATES)
        activations = passes["activations"]
        gathered = sum(passes.values()) - states - activations
        totals = {moment: sum(parts.values()) for moment, parts in moments.items()}
        sampling = totals.pop("sampling")
        training = max(totals.values())
        planned = [states, activations, gathered, training, sampling]
        by_formula = memory_by_formula(model, trained, Assumptions())
        rows.append(
            [
                model.name,
                trained,
                *(f"{gib:.1f}" for gib in planned),
                f"{by_formula.training:.0f}",
                f"{by_formula.sampling:.0f}",
            ]
        )
    titles = [
        "model",
        "trained",
        "states",
        "activations",
        "gathered weights, buckets",
        "training",
        "sampling in place",
        "training by formula",
        "sampling by formula",
    ]
    return markdown(titles, rows)


def speed_rows(assumed: Assumptions) -> list[list[str]]:
    """Sampling on `servers` GPUs with vLLM, as many rollouts at once as fit; training on `gpus`."""
    rows = []
    for model in MODELS:
        # On average half of a rollout's context is filled.
        kv_bytes = model.kv_bytes * assumed.context / 2
        weights = 2 * model.parameters
        # GPUs that one copy of the model is spread over: 40 GB of weights on each.
        gpus_per_copy = max(1, math.ceil(int(weights) / int(40e9)))
        kv_memory = (20e9 + assumed.kv_memory) * gpus_per_copy - weights - 10e9
        batch = min(assumed.rollouts * gpus_per_copy / assumed.servers, kv_memory / kv_bytes)

        # A decoding step reads the weights, and the keys and values of its batch.
        bandwidth = assumed.bandwidth * gpus_per_copy * assumed.decode_share
        step_seconds = (weights + batch * kv_bytes) / bandwidth
        tokens_per_second = batch / step_seconds * assumed.servers / gpus_per_copy
        decoding = assumed.rollouts * assumed.agent_tokens / tokens_per_second
        sampling = decoding + assumed.calls * assumed.call_seconds

        # 6 FLOPs per parameter and token, 2 more for the recomputed forward pass, 2 for the
        # reference model.
        flops = assumed.rollouts * assumed.context / 2 * 10 * model.parameters
        training = flops / (assumed.gpus * assumed.flops * assumed.train_share)
        # With a lead of 1 the two overlap, and two steps are in flight at once.
        ahead = max(decoding, training, (sampling + training) / 2)
        rows.append(
            [
                model.name,
                f"{batch:.0f}",
                f"{tokens_per_second:,.0f}",
                f"{sampling:.0f}",
                f"{training:.0f}",
                f"{assumed.rollouts * assumed.calls / sampling:.0f}",
                f"{1000 * (sampling + training) / 3600:.0f}",
                f"{1000 * ahead / 3600:.0f}",
            ]
        )
    return rows


def dollars_per_call(assumed: Assumptions) -> float:
    input_cost = assumed.call_input * assumed.input_price
    output_cost = assumed.call_output * assumed.output_price
    return (input_cost + output_cost) / 1e6


def crowd_rows(assumed: Assumptions) -> list[list[str]]:
    """The memory and load of many rollouts at once in each part, for a 4B policy."""
    model = MODELS[0]
    rows = []
    for crowd in (100, 1_000, 10_000):
        tokens = crowd * assumed.context / 2
        kv_bytes = crowd * model.kv_bytes * assumed.context / 2
        calls_per_second = crowd * assumed.calls / (assumed.calls * assumed.call_seconds)
        rows.append(
            [
                f"{crowd:,}",
                f"{kv_bytes / 1e9:,.0f} GB",
                f"{kv_bytes / assumed.kv_memory:.1f}",
                f"{calls_per_second:,.0f}",
                f"{crowd * assumed.call_output / assumed.call_seconds:,.0f}",
                f"{tokens * assumed.python_bytes / 1e9:,.1f} GB",
            ]
        )
    return rows


def report(assumed: Assumptions = Assumptions()) -> str:
    """The tables of arithmetic."""
    calls = assumed.rollouts * assumed.calls
    price = dollars_per_call(assumed)
    dollars = calls * price
    speed_titles = [
        "model",
        "rollouts at once per copy",
        "tokens/s, all copies",
        "sampling, s",
        "training, s",
        "calls/s",
        "1,000 steps, h",
        "the same with `async_lead: 1`, h",
    ]
    crowd_titles = [
        "rollouts at once",
        "keys and values",
        "80 GB GPUs for them",
        "calls/s",
        "large LLM, tokens/s",
        "this library, memory",
    ]
    sentence = (
        f"Calls: {calls:,.0f} a step at ${1000 * price:.3f} per thousand: ${dollars:.2f} a step, "
        f"${1000 * dollars:,.0f} per 1,000 steps."
    )
    speed_table = markdown(speed_titles, speed_rows(assumed))
    crowd_table = markdown(crowd_titles, crowd_rows(assumed))
    return f"{speed_table}\n\n{sentence}\n\n{crowd_table}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--plan", action="store_true", help="plan each model, and print the table of memory"
    )
    parser.add_argument(
        "--record", action="store_true", help="append the plans to records/scale.jsonl.gz"
    )
    options = parser.parse_args()
    if not options.plan:
        print(report())
        return
    records = []
    for record in plans(Assumptions()):
        records.append(record)
        print(f"{record['model']}, {record['trained']}: {record['moments']}", flush=True)
        if options.record:
            Records(RECORDS / "scale.jsonl.gz").add(record)
    print(memory(records))


if __name__ == "__main__":
    main()
