"""Memory and time of long contexts: a training step of ours against one of plain TRL on the same tokens, and the
engine's turns.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.long_contexts --json  # memory: about two minutes on two free cores
    OMP_NUM_THREADS=1 python -m benchmarks.speed.long_contexts --json --time  # seconds, on a quiet machine alone
    python -m benchmarks.speed.long_contexts --record  # with --time or without: for the page

One row of 2,048 to 32,768 tokens, of which the agent wrote 30 % and 70 % are observations; the width and vocabulary
of Qwen3-0.6B with four layers, bf16, gradient checkpointing, a GPU's paths. TRL scores every token of the completion,
so its figures are those of the same step with nothing observed. Counted on fake tensors is what is live beside weights
and optimizer. The last line of `--json`: `rows` (by context MiB of `ours` and `trl`), `memory_growth` (bytes per token
at the longest context against 8,192) and `over_trl` (the largest share of TRL's memory that ours takes).

`--time` runs real steps of two rollouts of a small model (two layers of width 256, 8,192 tokens of vocabulary, float32)
in our trainer and in TRL's, in turns: the second step of each counts. The fused head takes the branch of a GPU, which
skips unlabelled positions; with `--own-branch` that of a CPU, which skips none. A context that would take more than two
minutes, by the one before, is left out. Then one conversation of 20 turns in the engine, which writes 30 % of it. The
last line: `steps` (by context seconds of `ours` and `trl`), `time_over_trl` (the largest ratio), `left_out`, `turns`
(seconds for each new token of a turn), `turn_growth` (that of the last three turns against turns 2 to 4; attention over
what is kept may grow) and `read_again` (tokens that were read twice).
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from benchmarks.lab import RECORDS, Records, markdown

sys.path[:0] = [str(Path(__file__).parents[2] / "src")]
CONTEXTS = 2048, 4096, 8192, 16384, 32768
OBSERVED = 0.7
MIB = 2**20
# seconds of a step
TIMED = (2048, 8192, 16384, 32768)
PATIENCE = 120.0
TURNS = 20


def live(context: int, scored: float) -> float:
    """MiB of a step beside weights and optimizer, at its peak."""
    from transformers import Qwen3Config

    from agentic_prompting.planning.measured_step import PASSES, TrainingJob, measure_training

    shape = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    args = {"bf16": True, "gradient_checkpointing": True, "beta": 0.0}
    of = measure_training(TrainingJob(args, shape, "bfloat16", 1, context, scored=scored)).moments[
        PASSES
    ]
    return sum(size for part, size in of.items() if part not in ("weights", "optimizer")) / MIB


def compared(contexts: tuple[int, ...] = CONTEXTS) -> dict[str, Any]:
    """Every context, ours and TRL's."""
    rows: dict[int, dict[str, float]] = {}
    for context in contexts:
        rows[context] = {
            "ours": round(live(context, 1 - OBSERVED), 1),
            "trl": round(live(context, 1.0), 1),
        }
        print(
            f"{context} tokens: {rows[context]['ours']} MiB, TRL {rows[context]['trl']}", flush=True
        )
    return {"rows": rows, **ratios(rows)}


def ratios(rows: Mapping[Any, Mapping[str, float]]) -> dict[str, float]:
    """The growth of a token's memory with the context, and the largest share of TRL's memory."""
    ours = {int(context): row["ours"] / int(context) for context, row in rows.items()}
    growth = ours[max(ours)] / ours[8192 if 8192 in ours else min(ours)]
    over = max(row["ours"] / row["trl"] for row in rows.values())
    return {"memory_growth": round(growth, 3), "over_trl": round(over, 3)}


# --- time ------------------------------------------------------------------------------------------------------------


def small(context: int) -> Any:
    """A step of two micro-batches of one rollout, with all weights trained."""
    from transformers import Qwen3Config

    from agentic_prompting.planning.measured_step import TrainingJob

    shape = Qwen3Config(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=8192,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    args = {
        "bf16": False,
        "gradient_checkpointing": False,
        "beta": 0.0,
        "gradient_accumulation_steps": 2,
    }
    return TrainingJob(args, shape, rows=1, context=context, scored=1 - OBSERVED, gpu=False)


def initialised(model: Any) -> Any:
    """With values: a model that is made without its weights has what the memory held, which may be slow to compute."""
    import torch

    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.ones_(parameter) if parameter.dim() == 1 else torch.nn.init.normal_(
            parameter, std=0.02
        )
    return model


def trainers(job: Any, folder: str) -> dict[str, Any]:
    """Ours, and TRL's own with the tokens of our rollouts."""
    from datasets import Dataset
    from trl import GRPOTrainer

    from agentic_prompting.planning.measured_step import (
        FullLengthRollouts,
        build_model,
        build_trainer,
    )
    from agentic_prompting.planning.memory_counter import MemoryCounter
    from agentic_prompting.sandbox.policy import world_tokenizer

    args = job.training_args(folder, steps=2)
    tokenizer = world_tokenizer()
    ours = build_trainer(job, args, tokenizer)
    ours.memory = MemoryCounter()  # counts nothing: it is not entered
    initialised(ours.model)
    rows: list[dict[str, Any]] = [{"prompt": "a"} for _ in range(2)]
    tokens = (
        FullLengthRollouts(job)
        .next_batch(rows, None)
        .to_trl(ours.eos_token_ids, with_logprobs=False)
    )
    del tokens["rollout"]
    plain = GRPOTrainer(
        model=initialised(build_model(job)),
        args=args,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 64),
        rollout_func=lambda prompts, trainer: dict(tokens),
    )
    return {"ours": ours, "trl": plain}


def second_step(trainer: Any) -> float:
    """Seconds of a trainer's second step; the first one allocates."""
    from benchmarks.speed.training_step import StepTimes

    times = StepTimes()
    trainer.add_callback(times)
    trainer.train()
    return times.seconds[-1]


def timed_steps(contexts: Sequence[int] = TIMED, own_branch: bool = False) -> dict[str, Any]:
    """Every context, ours and TRL's, the other one first each time."""
    from benchmarks.speed.training_step import skip_unlabelled

    rows: dict[int, dict[str, float]] = {}
    left_out = []
    skip_unlabelled(not own_branch)
    for number, context in enumerate(contexts):
        before = contexts[number - 1]
        if rows and max(rows[before].values()) * (context / before) ** 2 > PATIENCE:
            left_out += contexts[number:]
            break
        with tempfile.TemporaryDirectory() as folder:
            both = trainers(small(context), folder)
            for name in ("ours", "trl") if number % 2 else ("trl", "ours"):
                with (
                    redirect_stdout(io.StringIO()),
                    redirect_stderr(io.StringIO()),
                ):  # the logs of four steps
                    seconds = second_step(both.pop(name))
                rows.setdefault(context, {})[name] = round(seconds, 3)
        print(
            f"{context} tokens: {rows[context]['ours']} s, TRL {rows[context]['trl']}", flush=True
        )
    over = max(row["ours"] / row["trl"] for row in rows.values())
    return {"steps": rows, "time_over_trl": round(over, 3), "left_out": left_out}


def timed_turns(longest: int = CONTEXTS[-1]) -> dict[str, Any]:
    """A conversation in the engine that fills `longest` tokens in its turns."""
    import random
    from types import SimpleNamespace

    from agentic_prompting.local import TransformersEngine
    from agentic_prompting.planning.measured_step import build_model
    from agentic_prompting.rollout import SampleRequest, run_with_engine

    model = initialised(build_model(small(longest))).eval()
    rng = random.Random(0)
    tokenizer = SimpleNamespace(pad_token_id=0, bos_token_id=None)
    engine = TransformersEngine(model, tokenizer, end_of_turn_ids=[10**9], on_callers_thread=True)
    own = int(longest / TURNS * (1 - OBSERVED))
    observed = longest // TURNS - own
    context: list[int] = []
    seconds = []
    new = 0
    for turn in range(TURNS):
        context += [rng.randrange(8192) for _ in range(observed)]
        started = time.perf_counter()
        sampled = run_with_engine(engine, engine(SampleRequest(context, own, turn, conversation=0)))
        seconds.append((time.perf_counter() - started) / (own + observed))
        context += sampled.ids
        new += observed + (turn > 0)  # the last token of a turn is read with the next one
    growth = statistics.mean(seconds[-3:]) / statistics.mean(seconds[1:4])
    return {
        "turns": [round(one, 6) for one in seconds],
        "turn_growth": round(growth, 3),
        "read_again": engine.stats["read"] - new,
    }


# --- the page --------------------------------------------------------------------------------------------------------


def memory(records: Sequence[Mapping[str, Any]]) -> str:
    """The latest figures of memory."""
    run = [record for record in records if "rows" in record][-1]
    found = ratios(run["rows"])
    cells = [
        [f"{int(name):,}", f"{row['ours']:,.0f}", f"{row['trl']:,.0f}"]
        for name, row in run["rows"].items()
    ]
    return (
        f"{markdown(('tokens', 'ours', 'plain TRL'), cells)}\n\nFor a token the longest context takes "
        f"{found['memory_growth']:.2f} times what 8,192 tokens take; ours takes at most {found['over_trl']:.2f} times "
        f"TRL's. Counted on {run['date']}."
    )


def times(records: Sequence[Mapping[str, Any]]) -> str:
    """The latest figures of time."""
    run = [record for record in records if "steps" in record][-1]
    cells = [
        [
            f"{int(name):,}",
            f"{row['ours']:.1f}",
            f"{row['trl']:.1f}",
            f"{row['ours'] / row['trl']:.2f}",
        ]
        for name, row in run["steps"].items()
    ]
    left_out = ", ".join(f"{one:,}" for one in run["left_out"])
    return (
        f"{markdown(('tokens', 'ours, seconds', 'plain TRL, seconds', 'ratio'), cells)}\n\n"
        + (
            f"Left out, as a step takes more than two minutes: {left_out} tokens. "
            if left_out
            else ""
        )
        + f"In the engine's conversation {run['read_again']} tokens are read twice, and a new token of the last three "
        f"turns takes {run['turn_growth']:.1f} times as long as one of turns 2 to 4. Measured on {run['date']}, "
        f"{run['machine']}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    parser.add_argument(
        "--time", action="store_true", help="seconds of real steps and turns, instead of memory"
    )
    parser.add_argument(
        "--own-branch", action="store_true", help="with --time: the head's branch for a CPU"
    )
    parser.add_argument(
        "--record", action="store_true", help="append to records/long_contexts.jsonl.gz"
    )
    parser.add_argument(
        "--contexts", type=lambda text: tuple(map(int, text.split(","))), help="others: 512,1024"
    )
    options = parser.parse_args()
    if options.time:
        contexts = options.contexts or TIMED
        figures = timed_steps(contexts, options.own_branch) | timed_turns(max(contexts))
    else:
        figures = compared(options.contexts or CONTEXTS)
    if options.record:
        Records(RECORDS / "long_contexts.jsonl.gz").add(figures)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
