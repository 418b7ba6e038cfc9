"""E-SPL with a real model of 135 million parameters: prompts and weights, weights alone, prompts
alone.

    python -m benchmarks.real.espl_trainer --reflector-url http://localhost:8080/v1 --json
    python -m benchmarks.real.espl_trainer --reflector-url ... --json --tuning  # not reported
    python -m benchmarks.real.espl_trainer  # the table, from the records

Appends a record for each seed and mode to `--records`; what is recorded is not run again.

Protocol, written before any run of the reported seeds.

1. Task. `queues` of `benchmarks/real/evolve_prompts.py`: a note to a town's office belongs into one
   of four queues, by its topic; which topic belongs into which queue is drawn by the seed. 256
   questions of which training has none.
2. Headroom, measured before: under the first prompt SmolLM2 as published is right in 0 of 64
   questions of the tuning seed, and in 0 under prompts that state the whole rule. So a prompt alone
   can gain nothing with the published model. It is therefore trained first to answer in form: it
   imitates 64 demonstrations (8 steps of 8) that name a queue at random, under the first prompt.
3. Policy and reflector. SmolLM2-135M-Instruct after these steps, with a LoRA adapter, and
   Qwen2.5-Coder-1.5B-Instruct (Q4_K_M, llama.cpp, one thread) with `reflection="rewrite"` and
   `reflect_on="imperfect"`.
4. Modes, each with 16 steps of 32 rollouts of 4 questions. *joint*: 2 prompts of 4 rollouts each;
   *prompts alone*: the same without an update of the weights; *weights alone*: 8 rollouts under the
   first prompt, which is plain GRPO.
5. Reported: the share of held-out answers that are right to the letter, sampled at temperature .7
   with one seed for all, under the best prompt by rating; the same after the warm start; how many
   children there were.
6. Seeds 1001, 1002 and 1003; tuning seed 1.
7. Expected on every seed: weights alone and joint gain over the warm start with an interval above
   0; prompts alone gain nothing. Whether joint is above or below weights alone is open. The figures
   are printed whatever they are.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentic_prompting import OpenAIChat, PromptAgent
from agentic_prompting.rollout import AgentSpec, FreeText, Limits
from benchmarks.lab import RECORDS, Records, log, markdown, quiet
from benchmarks.real.evolve_prompts import (
    FIRST_PROMPTS,
    HELD_OUT,
    QUEUES,
    TRAIN_ROWS,
    draw_rows,
    same_text,
    same_text_reward,
)
from benchmarks.real.small_agent import connect, imitate, load_published, score_cells, train_adapter

SEEDS = (1001, 1002, 1003)
TUNING_SEEDS = (1,)
TUNING_QUESTIONS = 64
FIRST_PROMPT = FIRST_PROMPTS["queues"]
DEMONSTRATIONS = 64
WARM_START_STEPS = 8
STEPS = 16
EVOLUTION = {
    "prompts_per_step": 2,
    "num_generations": 4,
    "reflection": "rewrite",
    "reflect_on": "imperfect",
    "reference_sampling": {"temperature": 0.7, "max_tokens": 400},
}
MODES: Mapping[str, Mapping[str, Any]] = {
    "weights alone": {"mode": "rl", "prompts_per_step": 1, "num_generations": 8},
    "joint": {"mode": "joint", **EVOLUTION},
    "prompts alone": {"mode": "evolution", **EVOLUTION},
}


def make_spec(system_prompt: str) -> AgentSpec:
    """The form of an answer: a single turn, which is the answer."""
    return AgentSpec(
        "{question}",
        limits=Limits(max_turns=1, max_turn_tokens=16, max_tokens=16),
        grammar=FreeText(),
        sampling={"temperature": 0.7},
        system_prompt=system_prompt,
    )


def warm_start(rows: Sequence[Mapping[str, Any]], folder: Path, seed: int) -> Path:
    """SmolLM2 after imitating answers that name a queue at random; the folder that it is in."""
    generator = random.Random(seed)
    traces = []
    for number in range(DEMONSTRATIONS):
        row = rows[number % len(rows)]
        traces.append({**row, "turns": [generator.choice(QUEUES)], "observations": []})
    spec = make_spec(FIRST_PROMPT)
    return imitate(*load_published(), spec, traces, folder, seed, max_steps=WARM_START_STEPS)


def train(
    mode: str,
    model: Path,
    reflector: OpenAIChat,
    rows: Sequence[Mapping[str, Any]],
    folder: Path,
    seed: int,
) -> dict[str, Any]:
    """Train in a mode; the result of [`train_adapter`], the best prompt and the number of prompts."""
    from agentic_prompting import ESPLConfig, ESPLTrainer

    trainers = []

    def make_trainer(**arguments: Any) -> ESPLTrainer:
        needs_reflector = MODES[mode]["mode"] != "rl"
        # The prompt of a spec is the trainer's first prompt.
        trainer = ESPLTrainer(
            initial_prompt=FIRST_PROMPT,
            reference=reflector if needs_reflector else None,
            **arguments,
        )
        trainers.append(trainer)
        return trainer

    trained = train_adapter(
        make_trainer,
        ESPLConfig,
        model,
        None,
        same_text_reward,
        rows,
        make_spec(FIRST_PROMPT),
        folder,
        seed,
        STEPS,
        **MODES[mode],
    )
    (trainer,) = trainers
    return {
        **trained,
        "prompt": trainer.final_prompt().text,
        "children": len(trainer.population.members) - 1,
    }


def ask(model: Path, prompt: str, rows: Sequence[Mapping[str, Any]], seed: int) -> str:
    """A character for each question: whether the answer under the prompt is right."""
    import torch

    agent = PromptAgent.from_pretrained(
        model, None, make_spec(prompt), max_batch_size=32, dtype=torch.float32
    )
    right = ""
    for row, rollout in zip(
        rows, agent.answer_all(list(rows), seed=seed, progress=False), strict=True
    ):
        right += str(int(same_text(rollout.answer or "", row["answers"])))
    return right


def measure(
    mode: str, seed: int, reflector: OpenAIChat, folder: Path, questions: int
) -> dict[str, Any]:
    """The record of a seed and a mode."""
    rows = draw_rows("queues", TRAIN_ROWS + HELD_OUT, seed)
    train_rows, test_rows = rows[:TRAIN_ROWS], rows[TRAIN_ROWS : TRAIN_ROWS + questions]
    warm = folder / "warm_start"
    if not warm.exists():
        warm_start(train_rows, folder, seed)

    started = time.monotonic()
    before = ask(warm, FIRST_PROMPT, test_rows, seed)
    output = folder / mode.replace(" ", "-")
    trained = train(mode, warm, reflector, train_rows, output, seed)
    after = ask(output / "trained", trained["prompt"], test_rows, seed)
    log(f"seed {seed}, {mode}: {before.count('1')} -> {after.count('1')} of {len(test_rows)}")
    return {
        "seed": seed,
        "mode": mode,
        "reflector": reflector.model,
        "seconds": round(time.monotonic() - started),
        "before": before,
        "after": after,
        **trained,
    }


# --- figures --------------------------------------------------------------------------------------


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """A row for each seed and mode: right answers before and after, and what was gained."""
    if not records:
        return "No run of it has been recorded yet."
    rows = []
    for record in sorted(
        records, key=lambda record: (record["seed"], list(MODES).index(record["mode"]))
    ):
        before_score, gained = score_cells(record["before"], record["after"])
        after_score, _ = score_cells(record["after"])
        figures = (before_score, after_score, gained, record["children"], record["failed"])
        rows.append((record["seed"], record["mode"], *figures))
    titles = ("seed", "mode", "after the warm start", "trained", "gained", "children", "failed")
    return markdown(titles, rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--reflector-url", help="the address of the model that reflects")
    parser.add_argument("--reflector", default="qwen2.5-coder-1.5b", help="its name")
    parser.add_argument("--json", action="store_true", help="run what has no record")
    parser.add_argument("--tuning", action="store_true", help="the seed that is not reported")
    parser.add_argument("--folder", type=Path, default=Path("runs/espl-trainer"))
    parser.add_argument("--records", type=Path, help="default: records/real_espl.jsonl.gz")
    options = parser.parse_args()
    default = (options.folder if options.tuning else RECORDS) / "real_espl.jsonl.gz"
    records = Records(options.records or default)
    if options.json:
        if not options.reflector_url:
            parser.error("--json needs --reflector-url")
        quiet()
        options.folder.mkdir(parents=True, exist_ok=True)
        seeds = TUNING_SEEDS if options.tuning else SEEDS
        questions = TUNING_QUESTIONS if options.tuning else HELD_OUT
        runs = [(mode, seed) for seed in seeds for mode in MODES]
        with connect(options.reflector_url, options.reflector, options.folder) as reflector:
            for mode, seed in records.missing(("mode", "seed"), runs):
                folder = options.folder / str(seed)
                records.add(measure(mode, seed, reflector, folder, questions))
        print(json.dumps(records.read()))
    print(table(records.read()))


if __name__ == "__main__":
    main()
