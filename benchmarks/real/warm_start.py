"""A warm start for the tag form: a small model that cannot write Prompt-R1's tags learns to, in
minutes on a CPU.

    python -m benchmarks.real.warm_start --output-dir runs/warm                # SmolLM2, about ten minutes on two cores
    python -m benchmarks.real.warm_start --output-dir runs/warm --record       # and append to records/forms.jsonl.gz

An untrained model of 135 million parameters writes hardly one turn in the tags (`forms.py`), so
that GRPO has nothing to start from. The recipe:

1. A short prompt. The tags' description in the paper's prompt is several hundred tokens long, all
   of them paid at each step; after a warm start the model knows the form without it.
2. Conversations that show the form, one for each training question: ask it in the tags, read the
   library's sentence, answer in the tags. Any source of right requests will do; here the question
   itself is the request.
3. `warm_start` on them, with a LoRA adapter, until the turns are well formed: the model learns the
   form, not the facts.

Trained on countries, tested on invented towns that share no subject and no fact with them. The
folder is what a trainer takes: `PromptR1Trainer(model="runs/warm", ...)` goes on with its adapter.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentic_prompting import PromptAgent, warm_start
from agentic_prompting.rollout import (
    AgentSpec,
    ChatFormat,
    Limits,
    Rollout,
    TagGrammar,
    rollout_from_trace,
)
from agentic_prompting.sandbox.library import (
    Fact,
    Library,
    country_facts,
    split_by_subject,
    town_facts,
)
from benchmarks.lab import RECORDS, Records, log, model_folder, quiet
from benchmarks.real.form_tables import FORMS_RECORD, table
from benchmarks.real.forms import count_turns

TEMPLATE = "Ask the library, then answer in as few words as possible.\nQuestion: {question}"
SPEC = AgentSpec(
    TEMPLATE,
    grammar=TagGrammar(),
    limits=Limits(max_turns=3, max_turn_tokens=64, max_tokens=300),
    sampling={"temperature": 0.7},
)
LORA = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


class TagLibrary(Library):
    """The library in Prompt-R1's tags."""

    grammar = TagGrammar()  # type: ignore[assignment]
    prompt_template = TEMPLATE


def show_form(fact: Fact) -> dict[str, Any]:
    """A conversation in the tags about one fact, as [`rollout_from_trace`] takes it."""
    ask = f"<interaction_prompt>{fact.question}</interaction_prompt>"
    answer = f"<answer>{fact.value}</answer>"
    return {
        "question": fact.question,
        "turns": [
            f"<think>I have to look this up.</think>{ask}",
            f"<think>The library says it.</think>{answer}",
        ],
        "observations": [fact.document],
    }


def play(model: Any, tokenizer: Any, facts: Sequence[Fact], rows: int) -> list[Rollout]:
    """The model's rollouts of held-out questions, sampled as in training."""
    agent = PromptAgent(model, tokenizer, TagLibrary(facts), SPEC, max_batch_size=32)
    questions = [fact.as_row() for fact in facts[:rows]]
    return agent.answer_all(questions, progress=False)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="smollm2, a folder, or a name")
    parser.add_argument("--output-dir", type=Path, required=True, help="a new folder")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=8, help="conversations a step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--rows", type=int, default=96, help="held-out questions")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", action="store_true", help="append to records/forms.jsonl.gz")
    arguments = parser.parse_args()
    quiet()
    folder = model_folder(arguments.model)
    torch.manual_seed(arguments.seed)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    # Held-out towns: their facts occur in no training conversation.
    _, test = split_by_subject(town_facts(), held_out=32)

    counts = [
        {"form": "before", **count_turns(play(model, tokenizer, test, arguments.rows))},
    ]
    log(json.dumps(counts[-1]))

    chat_format = SPEC.create_format(tokenizer)
    assert isinstance(chat_format, ChatFormat)
    demonstrations = [
        rollout_from_trace(show_form(fact), SPEC, chat_format) for fact in country_facts()
    ]
    model = get_peft_model(model, LORA)
    started = time.perf_counter()
    warm_start(
        model,
        tokenizer,
        demonstrations,
        arguments.output_dir / "sft",
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=2,
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        seed=arguments.seed,
    )
    seconds = time.perf_counter() - started
    model.save_pretrained(arguments.output_dir)
    tokenizer.save_pretrained(arguments.output_dir)
    SPEC.save(arguments.output_dir)

    counts.append({"form": "after", **count_turns(play(model, tokenizer, test, arguments.rows))})
    log(json.dumps(counts[-1]))
    print(f"{arguments.steps} steps of {arguments.batch} conversations, {seconds:.0f} s\n")
    print(table(counts))
    if arguments.record:
        entry = {
            "kind": "warm start",
            "model": arguments.model,
            "steps": arguments.steps,
            "batch": arguments.batch,
            "learning_rate": arguments.learning_rate,
            "seed": arguments.seed,
            "seconds": round(seconds),
            "counts": counts,
        }
        Records(RECORDS / FORMS_RECORD).add(entry)


if __name__ == "__main__":
    main()
