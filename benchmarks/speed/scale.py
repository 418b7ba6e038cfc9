"""The arithmetic of docs/performance.md: tokens, calls and money, from shapes and a few assumptions; and the memory of a GPU
by `plan`, beside the formulas that one would write down for it.

    python -m benchmarks.speed.scale  # the tables of arithmetic
    python -m benchmarks.speed.scale --plan --record  # six plans of a minute each, into records/scale.jsonl.gz
    python -m benchmarks.recompute --write  # the table of memory from these records

Nothing here is measured on a GPU. The assumptions are the fields of `Assumptions`; change them and run again.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
    kv_memory: float = (
        60e9  # bytes of an 80 GB GPU that a server has left for keys and values of a 4B model
    )
    servers: int = 8  # GPUs that sample
    python_bytes: int = (
        80  # of a token in a Rollout: id, mask and log-probability as Python objects in three lists
    )


def formulas(model: Model, kind: str, a: Assumptions) -> tuple[float, float]:
    """GiB per GPU while training with ZeRO-3 or FSDP2 and activation checkpointing, one sequence per backward pass; and
    while sampling in place."""
    # One saved input per layer; one layer recomputed (attention and MLP, about 12 hidden + 4 intermediate); a tile of
    # logits of TRL's fused head (4096 x 32768, fp32) twice.
    activations = (
        a.context * 2 * (model.layers * model.hidden + 12 * model.hidden + 4 * model.intermediate)
    )
    activations += 2 * 4096 * 32768 * 4
    trained = model.parameters if kind == "full" else model.lora_parameters(a.lora_rank)
    # bf16 weights; of what is trained bf16 gradients, fp32 master copy, two fp32 moments; a reference model for
    # beta > 0 (with LoRA it is the same model without its adapters).
    states = (
        2 * model.parameters + 14 * trained + (2 * model.parameters if kind == "full" else 0)
    ) / a.gpus
    held = 2 * model.parameters + a.context * model.kv_bytes * 8
    return (states + activations) / GIB, (states + held) / GIB


def plans(a: Assumptions) -> Iterator[dict[str, Any]]:
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
        "max_context": a.context,
        "max_completion_length": a.context,
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
        for kind in ("full", "LoRA"):
            peft = LoraConfig(r=a.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")
            adapters = None if kind == "full" else peft
            made = plan(args, shape, gpus=a.gpus, accelerate=zero3, peft_config=adapters, seconds=0)
            moments = {
                name: {part: round(gib, 3) for part, gib in of.items()}
                for name, of in made.moments.items()
            }
            yield {
                "model": model.name,
                "trained": kind,
                "parameters": made.parameters,
                "moments": moments,
            }


def memory(records: Sequence[Mapping[str, Any]]) -> str:
    """The table of memory, from the latest plan of each model, with the formulas beside it."""
    latest = {(record["model"], record["trained"]): record["moments"] for record in records}
    rows = []
    for model in MODELS:
        for kind in ("full", "LoRA"):
            if (moments := latest.get((model.name, kind))) is None:
                continue
            passes = moments["forward and backward passes"]
            sampling = sum(moments["sampling"].values())
            training = max(sum(of.values()) for name, of in moments.items() if name != "sampling")
            states = sum(passes.get(part, 0.0) for part in STATES)
            activations = passes["activations"]
            by_hand = [f"{gib:.0f}" for gib in formulas(model, kind, Assumptions())]
            found = [
                states,
                activations,
                sum(passes.values()) - states - activations,
                training,
                sampling,
            ]
            rows.append([model.name, kind, *(f"{gib:.1f}" for gib in found), *by_hand])
    titles = [
        "model",
        "trained",
        "states",
        "activations",
        "gathered weights, buckets",
        "training",
        "sampling in place",
    ]
    return markdown([*titles, "training by formula", "sampling by formula"], rows)


def speed_rows(a: Assumptions) -> list[list[str]]:
    """Sampling on `servers` GPUs with vLLM, as many rollouts at once as fit; training on `gpus`."""
    rows = []
    for model in MODELS:
        held = model.kv_bytes * a.context / 2  # on average half of a rollout's context is filled
        ways = max(
            1, -(-int(2 * model.parameters) // int(40e9))
        )  # GPUs that one copy of the model is spread over
        room = (20e9 + a.kv_memory) * ways - 2 * model.parameters - 10e9
        batch = min(a.rollouts * ways / a.servers, room / held)
        seconds = (2 * model.parameters + batch * held) / (a.bandwidth * ways * a.decode_share)
        tokens = batch / seconds * a.servers / ways
        decoding = a.rollouts * a.agent_tokens / tokens
        sampling = decoding + a.calls * a.call_seconds
        # 6 FLOPs per parameter and token, 2 more for the recomputed forward pass, 2 for the reference model.
        training = (
            a.rollouts * a.context / 2 * 10 * model.parameters / (a.gpus * a.flops * a.train_share)
        )
        # With a lead of 1 the two overlap, and two steps are in flight at once.
        ahead = max(decoding, training, (sampling + training) / 2)
        rows.append(
            [
                model.name,
                f"{batch:.0f}",
                f"{tokens:,.0f}",
                f"{sampling:.0f}",
                f"{training:.0f}",
                f"{a.rollouts * a.calls / sampling:.0f}",
                f"{1000 * (sampling + training) / 3600:.0f}",
                f"{1000 * ahead / 3600:.0f}",
            ]
        )
    return rows


def dollars_per_call(a: Assumptions) -> float:
    return (a.call_input * a.input_price + a.call_output * a.output_price) / 1e6


def crowd_rows(a: Assumptions) -> list[list[str]]:
    """The memory and load of many rollouts at once in each part, for a 4B policy."""
    model = MODELS[0]
    rows = []
    for crowd in (100, 1_000, 10_000):
        kv = crowd * model.kv_bytes * a.context / 2
        rows.append(
            [
                f"{crowd:,}",
                f"{kv / 1e9:,.0f} GB",
                f"{kv / a.kv_memory:.1f}",
                f"{crowd * a.calls / (a.calls * a.call_seconds):,.0f}",
                f"{crowd * a.call_output / a.call_seconds:,.0f}",
                f"{crowd * a.context / 2 * a.python_bytes / 1e9:,.1f} GB",
            ]
        )
    return rows


def report(a: Assumptions = Assumptions()) -> str:
    per_step = a.rollouts * a.calls
    money = per_step * dollars_per_call(a)
    return "\n\n".join(
        [
            markdown(
                [
                    "model",
                    "rollouts at once per copy",
                    "tokens/s, all copies",
                    "sampling, s",
                    "training, s",
                    "calls/s",
                    "1,000 steps, h",
                    "the same with `async_lead: 1`, h",
                ],
                speed_rows(a),
            ),
            f"Calls: {per_step:,.0f} a step at ${1000 * dollars_per_call(a):.3f} per thousand: ${money:.2f} a step, "
            f"${1000 * money:,.0f} per 1,000 steps.",
            markdown(
                [
                    "rollouts at once",
                    "keys and values",
                    "80 GB GPUs for them",
                    "calls/s",
                    "large LLM, tokens/s",
                    "this library, memory",
                ],
                crowd_rows(a),
            ),
        ]
    )


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
        return print(report())
    found = []
    for plan in plans(Assumptions()):
        found.append(plan)
        print(f"{plan['model']}, {plan['trained']}: {plan['moments']}", flush=True)
        if options.record:
            Records(RECORDS / "scale.jsonl.gz").add(plan)
    print(memory(found))


if __name__ == "__main__":
    main()
