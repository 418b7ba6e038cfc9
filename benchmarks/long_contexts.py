"""Memory of a training step at long contexts, ours against plain TRL on the same tokens, on fake tensors.

    OMP_NUM_THREADS=1 python benchmarks/long_contexts.py --json     # about two minutes on two free cores

One row of 2,048 to 32,768 tokens, of which the agent wrote 30 % and 70 % are observations; the width and vocabulary
of Qwen3-0.6B with four layers, bf16, gradient checkpointing, a GPU's paths. TRL scores every token of the completion,
so its figures are those of the same step with nothing observed. Counted is what is live beside weights and optimizer.
Time is not measured: fake tensors take none.

The last line of `--json`: `rows` (by context MiB of `ours` and `trl`), `memory_growth` (bytes per token at the longest
context against 8,192) and `over_trl` (the largest share of TRL's memory that ours takes).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / "src")]
CONTEXTS = 2048, 4096, 8192, 16384, 32768
OBSERVED = 0.7
MIB = 2**20


def live(context: int, scored: float) -> float:
    """MiB of a step beside weights and optimizer, at its peak."""
    from transformers import Qwen3Config

    from agentic_prompting.planning.step import PASSES, Job, measure

    shape = Qwen3Config(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151_936, max_position_embeddings=40_960, tie_word_embeddings=True,
    )  # fmt: skip
    args = {"bf16": True, "gradient_checkpointing": True, "beta": 0.0}
    of = measure(Job(args, shape, "bfloat16", 1, context, scored=scored))["moments"][PASSES]
    return sum(size for part, size in of.items() if part not in ("weights", "optimizer")) / MIB


def compared(contexts: tuple[int, ...] = CONTEXTS) -> dict[str, Any]:
    """Every context, ours and TRL's."""
    rows: dict[int, dict[str, float]] = {}
    for context in contexts:
        rows[context] = {"ours": round(live(context, 1 - OBSERVED), 1), "trl": round(live(context, 1.0), 1)}
        print(f"{context} tokens: {rows[context]['ours']} MiB, TRL {rows[context]['trl']}", flush=True)
    first, last = (8192 if 8192 in contexts else contexts[0]), contexts[-1]
    growth = rows[last]["ours"] / last / (rows[first]["ours"] / first)
    over = max(row["ours"] / row["trl"] for row in rows.values())
    return {"rows": rows, "memory_growth": round(growth, 3), "over_trl": round(over, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    options = parser.parse_args()
    found = compared()
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
