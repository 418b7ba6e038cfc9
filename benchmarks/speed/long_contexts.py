"""Memory and time of long contexts: a training step of ours against one of plain TRL on the same
tokens, and the engine's turns.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.long_contexts --json  # memory: about two minutes on two free cores
    OMP_NUM_THREADS=1 python -m benchmarks.speed.long_contexts --json --time  # seconds, on a quiet machine alone
    python -m benchmarks.speed.long_contexts --record  # with --time or without: for the page

One row of 2,048 to 32,768 tokens, of which the agent wrote 30 % and 70 % are observations; the
width and vocabulary of Qwen3-0.6B with four layers, bf16, gradient checkpointing, a GPU's paths.
TRL scores every token of the completion, so its figures are those of the same step with nothing
observed. Counted on fake tensors is what is live beside weights and optimizer. The last line of
`--json`: `rows` (by context MiB of `ours` and `trl`), `memory_growth` (bytes per token at the
longest context against 8,192) and `over_trl` (the largest share of TRL's memory that ours takes).

`--time` runs real steps of two rollouts of a small model (two layers of width 256, 8,192 tokens of
vocabulary, float32) in our trainer and in TRL's, in turns: the second step of each counts. The
fused head takes the branch of a GPU, which skips unlabelled positions; with `--own-branch` that of
a CPU, which skips none. A context that would take more than two minutes, by the one before, is left
out. Then one conversation of 20 turns in the engine, which writes 30 % of it. The last line:
`steps` (by context seconds of `ours` and `trl`), `time_over_trl` (the largest ratio), `left_out`,
`turns` (seconds for each new token of a turn), `turn_growth` (that of the last three turns against
turns 2 to 4; attention over what is kept may grow) and `read_again` (tokens that were read twice).
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
from typing import TYPE_CHECKING, Any

from benchmarks.lab import RECORDS, Records, markdown

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from trl import GRPOTrainer

    from agentic_prompting.planning.measured_step import TrainingJob

sys.path[:0] = [str(Path(__file__).parents[2] / "src")]
CONTEXTS = 2048, 4096, 8192, 16384, 32768
OBSERVED = 0.7
MIB = 2**20
# Contexts whose steps are timed, and the seconds that one may take.
TIMED = (2048, 8192, 16384, 32768)
PATIENCE = 120.0
# Turns of the engine's conversation.
TURNS = 20


def measure_live(context: int, scored: float) -> float:
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
    job = TrainingJob(args, shape, "bfloat16", 1, context, scored=scored)
    parts = measure_training(job).moments[PASSES]
    live = sum(size for part, size in parts.items() if part not in ("weights", "optimizer"))
    return live / MIB


def compare_memory(contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
    """Every context, ours and TRL's."""
    rows: dict[int, dict[str, float]] = {}
    for context in contexts:
        row = {
            "ours": round(measure_live(context, 1 - OBSERVED), 1),
            "trl": round(measure_live(context, 1.0), 1),
        }
        rows[context] = row
        print(f"{context} tokens: {row['ours']} MiB, TRL {row['trl']}", flush=True)
    return {"rows": rows, **compute_ratios(rows)}


def compute_ratios(rows: Mapping[Any, Mapping[str, float]]) -> dict[str, float]:
    """The growth of a token's memory with the context, and the largest share of TRL's memory."""
    per_token = {int(context): row["ours"] / int(context) for context, row in rows.items()}
    base = 8192 if 8192 in per_token else min(per_token)
    growth = per_token[max(per_token)] / per_token[base]
    over = max(row["ours"] / row["trl"] for row in rows.values())
    return {"memory_growth": round(growth, 3), "over_trl": round(over, 3)}


# --- time -----------------------------------------------------------------------------------------


def small_job(context: int) -> TrainingJob:
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


def initialise(model: PreTrainedModel) -> None:
    """Set values: a model that is made without its weights has what the memory held, which may be
    slow to compute.
    """
    import torch

    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=0.02)


def make_trainers(job: TrainingJob, folder: str) -> dict[str, GRPOTrainer]:
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
    initialise(ours.model)

    rows: list[dict[str, Any]] = [{"prompt": "a"} for _ in range(2)]
    batch = FullLengthRollouts(job).next_batch(rows, None)
    tokens = batch.to_trl(ours.eos_token_ids, with_logprobs=False)
    del tokens["rollout"]
    plain_model = build_model(job)
    initialise(plain_model)
    plain = GRPOTrainer(
        model=plain_model,
        args=args,
        processing_class=tokenizer,
        reward_funcs=lambda completions, **columns: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 64),
        rollout_func=lambda prompts, trainer: dict(tokens),
    )
    return {"ours": ours, "trl": plain}


def time_second_step(trainer: GRPOTrainer) -> float:
    """Seconds of a trainer's second step; the first one allocates."""
    from benchmarks.speed.training_step import StepTimes

    times = StepTimes()
    trainer.add_callback(times)
    # Without the logs of the steps.
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
        trainer.train()
    return times.seconds[-1]


def time_steps(contexts: Sequence[int] = TIMED, own_branch: bool = False) -> dict[str, Any]:
    """Every context, ours and TRL's, the other one first each time."""
    from benchmarks.speed.training_step import skip_unlabelled

    rows: dict[int, dict[str, float]] = {}
    left_out: list[int] = []
    skip_unlabelled(not own_branch)
    for number, context in enumerate(contexts):
        # Leave out what would take too long, as attention grows with the square of the context.
        if number > 0:
            previous = contexts[number - 1]
            expected = max(rows[previous].values()) * (context / previous) ** 2
            if expected > PATIENCE:
                left_out += contexts[number:]
                break

        row: dict[str, float] = {}
        with tempfile.TemporaryDirectory() as folder:
            trainers = make_trainers(small_job(context), folder)
            for name in ("ours", "trl") if number % 2 else ("trl", "ours"):
                row[name] = round(time_second_step(trainers.pop(name)), 3)
        rows[context] = row
        print(f"{context} tokens: {row['ours']} s, TRL {row['trl']}", flush=True)
    over = max(row["ours"] / row["trl"] for row in rows.values())
    return {"steps": rows, "time_over_trl": round(over, 3), "left_out": left_out}


def time_turns(longest: int = CONTEXTS[-1]) -> dict[str, Any]:
    """A conversation in the engine that fills `longest` tokens in its turns."""
    import random
    from types import SimpleNamespace

    from agentic_prompting.local import TransformersEngine
    from agentic_prompting.planning.measured_step import build_model
    from agentic_prompting.rollout import SampleRequest, run_with_engine

    model = build_model(small_job(longest))
    initialise(model)
    rng = random.Random(0)
    tokenizer = SimpleNamespace(pad_token_id=0, bos_token_id=None)
    engine = TransformersEngine(
        model.eval(), tokenizer, end_of_turn_ids=[10**9], on_callers_thread=True
    )

    sampled_count = int(longest / TURNS * (1 - OBSERVED))
    observed_count = longest // TURNS - sampled_count
    context: list[int] = []
    seconds_per_token = []
    new_tokens = 0
    for turn in range(TURNS):
        context += [rng.randrange(8192) for _ in range(observed_count)]
        request = SampleRequest(context, sampled_count, turn, conversation=0)
        started = time.perf_counter()
        sample = run_with_engine(engine, engine(request))
        seconds = time.perf_counter() - started
        seconds_per_token.append(seconds / (sampled_count + observed_count))
        context += sample.ids
        new_tokens += observed_count
        if turn > 0:
            new_tokens += 1  # the last token of a turn is read with the next one
    growth = statistics.mean(seconds_per_token[-3:]) / statistics.mean(seconds_per_token[1:4])
    return {
        "turns": [round(seconds, 6) for seconds in seconds_per_token],
        "turn_growth": round(growth, 3),
        "read_again": engine.stats["read"] - new_tokens,
    }


# --- the page -------------------------------------------------------------------------------------


def memory(records: Sequence[Mapping[str, Any]]) -> str:
    """The latest figures of memory."""
    run = [record for record in records if "rows" in record][-1]
    ratios = compute_ratios(run["rows"])
    cells = []
    for context, row in run["rows"].items():
        cells.append([f"{int(context):,}", f"{row['ours']:,.0f}", f"{row['trl']:,.0f}"])
    return (
        f"{markdown(('tokens', 'ours', 'plain TRL'), cells)}\n\nFor a token the longest context "
        f"takes {ratios['memory_growth']:.2f} times what 8,192 tokens take; ours takes at most "
        f"{ratios['over_trl']:.2f} times TRL's. Counted on {run['date']}."
    )


def times(records: Sequence[Mapping[str, Any]]) -> str:
    """The latest figures of time."""
    run = [record for record in records if "steps" in record][-1]
    cells = []
    for context, row in run["steps"].items():
        ratio = row["ours"] / row["trl"]
        cells.append(
            [f"{int(context):,}", f"{row['ours']:.1f}", f"{row['trl']:.1f}", f"{ratio:.2f}"]
        )
    titles = ("tokens", "ours, seconds", "plain TRL, seconds", "ratio")
    sentences = []
    if run["left_out"]:
        contexts = ", ".join(f"{context:,}" for context in run["left_out"])
        sentences.append(f"Left out, as a step takes more than two minutes: {contexts} tokens.")
    sentences += [
        f"In the engine's conversation {run['read_again']} tokens are read twice, and a new token "
        f"of the last three turns takes {run['turn_growth']:.1f} times as long as one of turns 2 "
        "to 4.",
        f"Measured on {run['date']}, {run['machine']}.",
    ]
    return f"{markdown(titles, cells)}\n\n{' '.join(sentences)}"


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
        figures = time_steps(contexts, options.own_branch) | time_turns(max(contexts))
    else:
        figures = compare_memory(options.contexts or CONTEXTS)
    if options.record:
        Records(RECORDS / "long_contexts.jsonl.gz").add(figures)
    if options.json:
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
