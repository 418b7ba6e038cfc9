"""What keeping keys and values between the turns of a conversation saves.

    OMP_NUM_THREADS=1 python benchmarks/prefix_cache.py --json            # about 3 minutes on a CPU
    OMP_NUM_THREADS=1 python benchmarks/prefix_cache.py --json --quick    # under 50 s

Conversations of five turns between a randomly initialised Qwen3-shaped model and an environment that replies with
random tokens: with and without the cache, the same sampler, in turns in one run. Greedy decoding, so that the outputs
can be compared. Prints wall times, tokens of context computed, and the largest size of the store. Also runs on a GPU.

The last line of `--json` holds `wall_ratio, read_ratio, identical, conversations, peak_mb, kb_per_token`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentic_prompting.local import Sampling, TransformersSampler
from agentic_prompting.rollout import SampleRequest
from agentic_prompting.sandbox.memory import keep_freed_memory

VOCABULARY = 4096


@dataclass(frozen=True)
class Shape:
    """A workload: conversations, turns, tokens of the question, of each reply, of each turn."""

    conversations: int
    turns: int
    question: int
    reply: int
    turn: int


def build_model(layers: int, width: int, device: str) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=4, head_dim=width // 8, max_position_embeddings=16384,
        tie_word_embeddings=True, eos_token_id=VOCABULARY - 1, pad_token_id=VOCABULARY - 2,
    )  # fmt: skip
    torch.manual_seed(0)
    return Qwen3ForCausalLM(config).to(device).eval()


def build_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=f"w{VOCABULARY - 1}", pad_token=f"w{VOCABULARY - 2}"
    )


def play(sampler: TransformersSampler, shape: Shape) -> tuple[float, list[list[int]], float]:
    """Seconds, the whole conversations, and the store's largest size in bytes."""
    rng = random.Random(0)

    def text(length: int) -> list[int]:  # of different lengths, as texts are
        return [rng.randrange(VOCABULARY - 2) for _ in range(rng.randint(length * 3 // 4, length * 5 // 4))]

    contexts = [text(shape.question) for _ in range(shape.conversations)]
    sampler.forget()
    largest, started = 0.0, time.perf_counter()
    for _ in range(shape.turns):
        requests = [SampleRequest(context, shape.turn, 0, conversation=i) for i, context in enumerate(contexts)]
        samples = sampler(requests)
        largest = max(largest, sampler.prefixes.bytes)
        for context, sample in zip(contexts, samples, strict=True):
            context += [*sample.ids, *text(shape.reply)]
    return time.perf_counter() - started, contexts, largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--quick", action="store_true", help="4 conversations, half the layers, one repeat")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    keep_freed_memory()
    # Prompt-R1's instructions and a question are about 500 tokens, and so are 2,048 characters of reply.
    shape = Shape(4 if arguments.quick else 16, turns=5, question=500, reply=500, turn=30 if arguments.quick else 60)
    layers = arguments.layers // 2 if arguments.quick else arguments.layers
    model, tokenizer = build_model(layers, arguments.width, arguments.device), build_tokenizer()

    def sampler(max_mb: float) -> TransformersSampler:
        return TransformersSampler(model, tokenizer, Sampling(temperature=0), prefix_cache_mb=max_mb)

    plain, caching = sampler(0.0), sampler(1e6)
    runs = [(play(plain, shape), play(caching, shape)) for _ in range(1 if arguments.quick else 3)]
    (_, wanted, _), (_, got, largest) = runs[0]
    plain_s, caching_s = (statistics.median(run[side][0] for run in runs) for side in (0, 1))
    read_plainly = caching.prefixes.read + caching.prefixes.reused
    tokens = sum(len(prefix.ids) for prefix in caching.prefixes._kept.values())
    result = {
        "parameters_m": round(sum(p.numel() for p in model.parameters()) / 1e6, 1),
        "plain_s": round(plain_s, 2),
        "caching_s": round(caching_s, 2),
        "wall_ratio": round(plain_s / caching_s, 2),
        "read_ratio": round(read_plainly / caching.prefixes.read, 2),
        "identical": sum(a == b for a, b in zip(wanted, got, strict=True)),
        "conversations": shape.conversations,
        "peak_mb": round(largest / 1e6, 1),
        "kb_per_token": round(caching.prefixes.bytes / tokens / 1e3, 1),
    }
    print("| " + " | ".join(result) + " |")
    print("|" + "---|" * len(result))
    print("| " + " | ".join(map(str, result.values())) + " |")
    if arguments.json:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
