"""A policy learns inside the real programs of two harnesses, by the protocol in docs/evidence.md.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.harness_world --json  # three reported seeds, two harnesses: hours
    OMP_NUM_THREADS=1 python -m benchmarks.learning.harness_world --json --quick  # a tuning seed: minutes

Needs `make foreign`. Appends a record for each run to `--records`; what is recorded is not run
again. The figures are those of policies of less than a million parameters and a task of one word;
they say nothing about real models. The last line of `--json` holds `rows`: exact match before and
after, by harness.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentic_prompting.harnesses import CommandProgram, get_harness
from agentic_prompting.harnesses.check_harness import (
    ScriptedAgent,
    byte_format,
    fill_arguments,
    find_tools,
    format_call,
    play_scripted,
)
from agentic_prompting.rollout import Rollout
from benchmarks.lab import RECORDS, Records, interval, log, markdown, quiet, shown
from benchmarks.reliability.harnesses import put_in_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

HARNESSES = {"pi": "messages", "codex": "responses"}
# Pieces of the tokenizer; codex's first prompt has 38,000 characters.
PIECES = {"pi": 2000, "codex": 9000}
SEEDS = (1001, 1002, 1003)
TUNING_SEED = 1
THINGS = ("lantern", "kettle", "ladder", "mirror", "basket", "whistle", "compass", "blanket")
WORDS = ("amber", "cobalt", "saffron", "indigo", "russet", "jade", "ochre", "violet")
WORDINGS = (
    "Write the word of the {} into answer.txt, then say done.",
    "There is a word for the {}: put it into answer.txt, then say done.",
    "The file answer.txt should hold the word that belongs to the {}. Say done when it does.",
    "Find the word of the {} and save it as answer.txt; say done at the end.",
)
RIGHT = 0.4
WARM_STEPS = 1000
WARM_BATCH = 16
WARM_RATE = 5e-3
STEPS = 24
GROUP = 8
TASKS = 2
RATE = 1.25e-3
ROLLOUTS_PER_QUESTION = 4
SHELLS = ("bash", "exec_command")

Entries = Sequence[Mapping[str, Any]]
# Texts of a rollout, and whether the policy wrote them.
Parts = list[tuple[str, bool]]


# --- the world ------------------------------------------------------------------------------------


def draw_world(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows to train on and rows that are held out: every thing once, in a wording that it has
    nowhere else.
    """
    draw = random.Random(f"world {seed}")
    words = dict(zip(THINGS, draw.sample(WORDS, len(WORDS)), strict=True))
    held_out = {thing: draw.choice(WORDINGS) for thing in THINGS}
    pairs = list(product(THINGS, WORDINGS))
    draw.shuffle(pairs)
    train_rows = []
    held_out_rows = []
    for thing, wording in pairs:
        row = {"question": wording.format(thing), "answer": words[thing]}
        if held_out[thing] == wording:
            held_out_rows.append(row)
        else:
            train_rows.append(row)
    return train_rows, held_out_rows


def right_word(rollout: Rollout, folder: Path) -> float:
    """1 if the file holds the word of the row and nothing else."""
    file = folder / "answer.txt"
    if not file.is_file():
        return 0.0
    return float(file.read_text(errors="replace").strip() == rollout.row["answer"])


class Writer(ScriptedAgent):
    """Writes a word into the file, and says done."""

    def turn(self, text: str) -> str:
        tools = {tool["name"]: tool for tool in find_tools(text)}
        if len(self.samples):
            return "done"
        shell = next(name for name in SHELLS if name in tools)
        arguments = fill_arguments(tools[shell], f"echo {WORDS[0]} > answer.txt")
        return format_call(shell, json.dumps(arguments))


def record(program: CommandProgram, question: str) -> Parts:
    """The parts of a rollout in the harness: prompt, calls and results."""
    writer = Writer(byte_format())
    rollout, _ = play_scripted(program, writer, row={"question": question, "answer": WORDS[0]})
    assert rollout.returned and rollout.returned["reward"] == 1.0, (rollout.status, rollout.error)
    (sequence,) = rollout.sequences
    decode = writer.chat_format.tokenizer.decode
    parts = [(decode(sequence.prompt_ids), False)]
    start = 0
    for is_sampled, run in groupby(sequence.mask):
        end = start + len(list(run))
        parts.append((decode(sequence.ids[start:end]), bool(is_sampled)))
        start = end
    return parts


# --- the policy -----------------------------------------------------------------------------------


def make_policy(
    seed: int, parts: Parts, pieces: int
) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """A random model of 32k positions, and a tokenizer that has learned the harness's prompt."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    base = byte_format().tokenizer
    tokenizer = base.train_new_from_iterator([text for text, _ in parts], pieces)
    tokenizer.chat_template = base.chat_template
    tokenizer.add_tokens([*THINGS, *WORDS])
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2**15,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config), tokenizer


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    parts: Parts,
    question: str,
    rows: Entries,
    seed: int,
    steps: int,
) -> float:
    """Imitate the recorded rollout, with questions of the world: the loss.

    In the first half of the steps without the harness's own prompt, with which all rows'
    conversations begin, and with the right words: behind the whole prompt no policy of this size
    finds the thing in so few steps. Then with that prompt, and with words that are right as often
    as the protocol says.
    """
    import torch

    draw = random.Random(f"warm {seed}")
    loss = torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    # Ids and labels of the rollout for every question and word, and the ids with which all of them
    # begin.
    examples: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
    for row, word in product(rows, WORDS):
        examples[row["question"], word] = _imitated(tokenizer, parts, question, row, word)
    shared = os.path.commonprefix([ids for ids, _ in examples.values()])  # noqa: RUF071 - of ids

    for step in range(steps):
        is_first_half = step < steps // 2
        batch = []
        for _ in range(WARM_BATCH):
            row = draw.choice(rows)
            if is_first_half or draw.random() < RIGHT:
                word = row["answer"]
            else:
                word = draw.choice(WORDS)
            ids, labels = examples[row["question"], word]
            batch.append((ids[len(shared) :], labels[len(shared) :]))

        # Pad on the right.
        longest = max(len(ids) for ids, _ in batch)
        input_ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        targets = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in batch])

        # The shared beginning is read once for the whole batch.
        prefix = torch.tensor([shared[-1:] if is_first_half else shared])
        past = model(prefix, use_cache=True, logits_to_keep=1).past_key_values
        past.batch_repeat_interleave(WARM_BATCH)
        loss = model(input_ids, labels=targets, past_key_values=past).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return float(loss)


def _imitated(
    tokenizer: PreTrainedTokenizerFast,
    parts: Parts,
    question: str,
    row: Mapping[str, Any],
    word: str,
) -> tuple[list[int], list[int]]:
    """Ids and labels of the recorded rollout with another question and word."""
    ids = list[int]()
    labels = list[int]()
    for text, is_sampled in parts:
        if is_sampled:
            replaced = text.replace(WORDS[0], word)
        else:
            replaced = text.replace(question, row["question"])
        piece = tokenizer(replaced, add_special_tokens=False)["input_ids"]
        ids += piece
        labels += piece if is_sampled else [-100] * len(piece)
    return ids, labels


# --- a run ----------------------------------------------------------------------------------------


class CountingProgram(CommandProgram):
    """Counts the failures of its rollouts, and the differences that its witness saw."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.errors = list[str]()
        self.differences = 0

    async def play_episode(self, rollout: Rollout, *rest: Any) -> Rollout:
        played = await super().play_episode(rollout, *rest)
        if played.error:
            self.errors.append(str(played.error))
        self.differences += int(played.counts.get("program/witness_differences", 0))
        return played


def measure(name: str, seed: int, folder: Path, steps: int, warm_steps: int) -> dict[str, Any]:
    """A record: one harness, one seed."""
    from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

    # The harness, and a policy that imitates a rollout in it.
    started = time.monotonic()
    rows, held_out = draw_world(seed)
    program = CountingProgram(get_harness(name, HARNESSES[name]), reward=right_word, timeout=300)
    program.check()
    question = rows[0]["question"]
    parts = record(program, question)
    model, tokenizer = make_policy(seed, parts, PIECES[name])
    loss = warm_start(model, tokenizer, parts, question, rows, seed, warm_steps)
    log(f"{name}, seed {seed}: warm start, loss {loss:.3f}, {time.monotonic() - started:.0f} s")

    # Train it, and evaluate it before and after.
    args = MultiTurnGRPOConfig(
        str(folder),
        seed=seed,
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * TASKS,
        max_steps=steps,
        num_generations_eval=ROLLOUTS_PER_QUESTION,
        per_device_eval_batch_size=ROLLOUTS_PER_QUESTION * len(held_out),
        learning_rate=RATE,
        lr_scheduler_type="constant",
        temperature=1.0,
        max_turn_tokens=160,
        max_completion_length=1000,
        max_context=2**15,
        max_turns=8,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=1,
        rollouts_max_mb=0,
    )
    trainer = MultiTurnGRPOTrainer(
        model, None, args, rows, held_out, processing_class=tokenizer, environment=program
    )
    before = trainer.evaluate()["eval_reward"]
    log(f"{name}, seed {seed}: {before:.3f} before, {time.monotonic() - started:.0f} s")
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    program.close()

    history = trainer.state.log_history
    rewards = [round(entry["reward"], 3) for entry in history if "reward" in entry]
    return {
        "harness": name,
        "dialect": HARNESSES[name],
        "seed": seed,
        "steps": steps,
        "warm_steps": warm_steps,
        "warm_loss": round(loss, 4),
        "before": round(before, 4),
        "after": round(after, 4),
        "rewards": rewards,
        "failed": len(program.errors),
        "errors": program.errors[:3],
        "witness_differences": program.differences,
        "seconds": round(time.monotonic() - started),
    }


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """A row for each harness."""
    rows = []
    for name, summary in summarise(records).items():
        scores = [shown(summary["before"]), shown(summary["after"]), shown(summary["gain"], "+")]
        counts = [summary["failed"], summary["differences"], summary["seeds"]]
        rows.append([f"{name}, by {HARNESSES[name]}", *scores, *counts])
    return markdown(("harness", "before", "after", "gain", "failed", "differences", "seeds"), rows)


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """By harness: means with intervals over the seeds."""
    rows = {}
    for name in HARNESSES:
        runs = [record for record in records if record["harness"] == name]
        if runs:
            rows[name] = {
                "before": interval([run["before"] for run in runs]),
                "after": interval([run["after"] for run in runs]),
                "gain": interval([run["after"] - run["before"] for run in runs]),
                "seeds": len(runs),
                "failed": sum(run["failed"] for run in runs),
                "differences": sum(run["witness_differences"] for run in runs),
            }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object as the last line"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two steps of a seed that is not reported, in pi"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", help=f"default: {SEEDS}; with --quick {TUNING_SEED}"
    )
    parser.add_argument(
        "--only", action="append", choices=[*HARNESSES], help="these harnesses only"
    )
    parser.add_argument("--steps", type=int, help=f"default: {STEPS}; with --quick 2")
    parser.add_argument("--warm-steps", type=int, default=WARM_STEPS)
    parser.add_argument(
        "--records",
        type=Path,
        help="default: records/harness_world.jsonl.gz; not kept with --quick",
    )
    options = parser.parse_args()
    quiet()
    put_in_path()
    with tempfile.TemporaryDirectory() as folder:
        if options.quick:
            records_folder = Path(folder)
            names = options.only or ["pi"]
            seeds = options.seeds or (TUNING_SEED,)
            steps = options.steps or 2
        else:
            records_folder = RECORDS
            names = options.only or list(HARNESSES)
            seeds = options.seeds or SEEDS
            steps = options.steps or STEPS
        records = Records(options.records or records_folder / "harness_world.jsonl.gz")
        for name, seed in records.missing(("harness", "seed"), product(names, seeds)):
            record = measure(name, seed, Path(folder, f"{name}-{seed}"), steps, options.warm_steps)
            records.add(record)
            log(json.dumps(record))
        print(table(records.read()))
        if options.json:
            print(json.dumps({"quick": options.quick, "rows": summarise(records.read())}))


if __name__ == "__main__":
    main()
