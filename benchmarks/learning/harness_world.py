"""A policy learns inside the real programs of two harnesses, by the protocol in docs/evidence.md.

    OMP_NUM_THREADS=1 python -m benchmarks.learning.harness_world --json  # three reported seeds, two harnesses: hours
    OMP_NUM_THREADS=1 python -m benchmarks.learning.harness_world --json --quick  # a tuning seed: minutes

Needs `make foreign`. Appends a record for each run to `--records`; what is recorded is not run again. The figures are
those of policies of less than a million parameters and a task of one word; they say nothing about real models. The
last line of `--json` holds `rows`: exact match before and after, by harness.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

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

HARNESSES = {"pi": "messages", "codex": "responses"}
PIECES = {"pi": 2000, "codex": 9000}  # of the tokenizer; codex's first prompt has 38,000 characters
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
ASKED = 4
SHELLS = ("bash", "exec_command")

Entries = Sequence[Mapping[str, Any]]
Parts = list[tuple[str, bool]]  # texts of a rollout, and whether the policy wrote them


# --- the world --------------------------------------------------------------------------------------------------------


def draw_world(seed: int) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Rows to train on and rows that are held out: every thing once, in a wording that it has nowhere else."""
    draw = random.Random(f"world {seed}")
    words = dict(zip(THINGS, draw.sample(WORDS, len(WORDS)), strict=True))
    held_out = {thing: draw.choice(WORDINGS) for thing in THINGS}
    rows = [(thing, wording) for thing in THINGS for wording in WORDINGS]
    draw.shuffle(rows)
    made = [(held_out[t] == w, {"question": w.format(t), "answer": words[t]}) for t, w in rows]
    return [row for out, row in made if not out], [row for out, row in made if out]


def right_word(rollout: Rollout, folder: Path) -> float:
    """1 if the file holds the word of the row and nothing else."""
    file = folder / "answer.txt"
    return float(
        file.is_file() and file.read_text(errors="replace").strip() == rollout.row["answer"]
    )


class Writer(ScriptedAgent):
    """Writes a word into the file, and says done."""

    def turn(self, text: str) -> str:
        tools = {tool["name"]: tool for tool in find_tools(text)}
        if len(self.samples):
            return "done"
        name = next(name for name in SHELLS if name in tools)
        return format_call(
            name, json.dumps(fill_arguments(tools[name], f"echo {WORDS[0]} > answer.txt"))
        )


def record(program: CommandProgram, question: str) -> Parts:
    """The parts of a rollout in the harness: prompt, calls and results."""
    writer = Writer(byte_format())
    rollout, _ = play_scripted(program, writer, row={"question": question, "answer": WORDS[0]})
    assert rollout.returned and rollout.returned["reward"] == 1.0, (rollout.status, rollout.error)
    (sequence,) = rollout.sequences
    decode = writer.chat_format.tokenizer.decode
    parts = [(writer.chat_format.tokenizer.decode(sequence.prompt_ids), False)]
    at = 0
    for is_sampled, run in groupby(sequence.mask):
        end = at + len(list(run))
        parts.append((decode(sequence.ids[at:end]), bool(is_sampled)))
        at = end
    return parts


# --- the policy -------------------------------------------------------------------------------------------------------


def make_policy(seed: int, parts: Parts, pieces: int) -> tuple[Any, Any]:
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
    model: Any, tokenizer: Any, parts: Parts, question: str, rows: Entries, seed: int, steps: int
) -> float:
    """Imitate the recorded rollout, with questions of the world: the loss.

    In the first half of the steps without the harness's own prompt, with which all rows' conversations begin, and with
    the right words: behind the whole prompt no policy of this size finds the thing in so few steps. Then with that
    prompt, and with words that are right as often as the protocol says.
    """
    import torch

    draw = random.Random(f"warm {seed}")
    loss = torch.zeros(())
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_RATE, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    known = {
        (row["question"], word): _imitated(tokenizer, parts, question, row, word)
        for row in rows
        for word in WORDS
    }
    shared = os.path.commonprefix([ids for ids, _ in known.values()])  # noqa: RUF071 - of ids
    for step in range(steps):
        first = step < steps // 2
        batch = []
        for _ in range(WARM_BATCH):
            row = draw.choice(rows)
            word = row["answer"] if first or draw.random() < RIGHT else draw.choice(WORDS)
            batch.append(tuple(ids[len(shared) :] for ids in known[row["question"], word]))
        longest = max(len(ids) for ids, _ in batch)
        ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in batch])
        labels = torch.tensor([labels + [-100] * (longest - len(labels)) for _, labels in batch])
        past = model(
            torch.tensor([shared[-1:] if first else shared]), use_cache=True, logits_to_keep=1
        ).past_key_values
        past.batch_repeat_interleave(WARM_BATCH)
        loss = model(ids, labels=labels, past_key_values=past).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return float(loss)


def _imitated(
    tokenizer: Any, parts: Parts, question: str, row: Mapping[str, Any], word: str
) -> tuple[list[int], list[int]]:
    """Ids and labels of the recorded rollout with another question and word."""
    ids = list[int]()
    labels = list[int]()
    for text, is_sampled in parts:
        new = (
            text.replace(WORDS[0], word) if is_sampled else text.replace(question, row["question"])
        )
        piece = tokenizer(new, add_special_tokens=False)["input_ids"]
        ids += piece
        labels += piece if is_sampled else [-100] * len(piece)
    return ids, labels


# --- a run ------------------------------------------------------------------------------------------------------------


class Counted(CommandProgram):
    """Counts what became of its rollouts."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self.failed = list[str]()
        self.differences = 0

    async def play_episode(self, rollout: Rollout, *rest: Any) -> Rollout:
        played = await super().play_episode(rollout, *rest)
        self.failed += [str(played.error)] if played.error else []
        self.differences += int(played.counts.get("program/witness_differences", 0))
        return played


def measure(name: str, seed: int, folder: Path, steps: int, warm_steps: int) -> dict[str, Any]:
    """A record: one harness, one seed."""
    from agentic_prompting import MultiTurnGRPOConfig, MultiTurnGRPOTrainer

    started = time.monotonic()
    rows, held_out = draw_world(seed)
    program = Counted(get_harness(name, HARNESSES[name]), reward=right_word, timeout=300)
    program.check()
    question = rows[0]["question"]
    parts = record(program, question)
    model, tokenizer = make_policy(seed, parts, PIECES[name])
    loss = warm_start(model, tokenizer, parts, question, rows, seed, warm_steps)
    log(f"{name}, seed {seed}: warm start, loss {loss:.3f}, {time.monotonic() - started:.0f} s")
    args = MultiTurnGRPOConfig(
        str(folder),
        seed=seed,
        num_generations=GROUP,
        per_device_train_batch_size=GROUP * TASKS,
        max_steps=steps,
        num_generations_eval=ASKED,
        per_device_eval_batch_size=ASKED * len(held_out),
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
    rewards = [
        round(entry["reward"], 3) for entry in trainer.state.log_history if "reward" in entry
    ]
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
        "failed": len(program.failed),
        "errors": program.failed[:3],
        "witness_differences": program.differences,
        "seconds": round(time.monotonic() - started),
    }


def table(records: Iterable[Mapping[str, Any]]) -> str:
    """A row for each harness."""
    rows = []
    for name, summary in summarise(records).items():
        figures = (shown(summary["before"]), shown(summary["after"]), shown(summary["gain"], "+"))
        rows.append(
            (
                f"{name}, by {HARNESSES[name]}",
                *figures,
                summary["failed"],
                summary["differences"],
                summary["seeds"],
            )
        )
    return markdown(("harness", "before", "after", "gain", "failed", "differences", "seeds"), rows)


def summarise(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """By harness: means with intervals over the seeds."""
    rows = {}
    for name in HARNESSES:
        if runs := [record for record in records if record["harness"] == name]:
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
        default = Path(folder if options.quick else RECORDS, "harness_world.jsonl.gz")
        records = Records(options.records or default)
        names = options.only or (["pi"] if options.quick else [*HARNESSES])
        seeds = options.seeds or ((TUNING_SEED,) if options.quick else SEEDS)
        for name, seed in records.missing(
            ("harness", "seed"), [(name, seed) for name in names for seed in seeds]
        ):
            steps = options.steps or (2 if options.quick else STEPS)
            record = measure(name, seed, Path(folder, f"{name}-{seed}"), steps, options.warm_steps)
            records.add(record)
            log(json.dumps(record))
        print(table(records.read()))
        if options.json:
            print(json.dumps({"quick": options.quick, "rows": summarise(records.read())}))


if __name__ == "__main__":
    main()
