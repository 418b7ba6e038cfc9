"""The models and cases of `prorefine_drafting.py`: tiny transformers models, and prompts that
change by rule.

The gain of drafting depends on the share of the output that survives a change of the prompt, so the
model matters:

- *Random weights.* Any change of the prompt changes everything: hard cases for the equality, no
  measure of speed.
- *The reciter*, trained here in seconds. It recites a list from the word that the question names,
  in the style that the prompt names, and adds "carefully" after the words that the prompt warns of.
  So its output depends mostly on the question, and advice that comes or goes changes some places of
  the output: where the draft has `w7 ,` there is now `w7 carefully ,`. Advice should change a model
  in this way. How far real models do is not measured here, so the share of the output that stayed
  is given with each figure.

Prompt sequences: *unchanged*; *slight*: a sentence of advice comes or goes in each step; *half*: in
every second step; *strong*: a new style and new advice in each step, after which no two tokens in a
row stay.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from agentic_prompting.sandbox.policy import build_tokenizer

WORDS = [f"w{i}" for i in range(160)]
CLASSES = ["c0", "c1", "c2", "c3"]
STYLES = {"plainly": ",", "briefly": ";", "loudly": "!", "slowly": "-"}
_CLASS_OF = {word: random.Random(word).choice(CLASSES) for word in WORDS}

SCENARIOS = ("unchanged", "half", "slight", "strong")


@dataclass(frozen=True)
class Case:
    """A question, and the prompts that the scripted optimizer returns one after another."""

    question: str
    prompts: tuple[str, ...]


def prompt_text(style: str, minded: Sequence[str]) -> str:
    return f"recite {style} ." + "".join(f" mind {name} ." for name in minded)


_FIRST = ("plainly", ["c0", "c1"])
FIRST_PROMPT = prompt_text(*_FIRST)


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token for each word."""
    return build_tokenizer(
        [*WORDS, *CLASSES, *STYLES, *STYLES.values(), "recite", "from", "mind", ".", "carefully"]
    )


def recital(style: str, minded: Sequence[str], start: int, length: int) -> str:
    """The text that the reciter learns: `length` words from number `start` on."""
    parts = []
    for position in range(start, start + length):
        word = WORDS[position % len(WORDS)]
        parts.append(word)
        if _CLASS_OF[word] in minded:
            parts.append("carefully")
        parts.append(STYLES[style])
    return " ".join(parts)


def make_case(scenario: str, steps: int, rng: random.Random) -> Case:
    """A random question with a sequence of prompts to come after `FIRST_PROMPT`, one for each step."""
    style, minded = _FIRST
    prompts = []
    for step in range(steps):
        if scenario == "strong":
            style = rng.choice([other for other in STYLES if other != style])
            minded = rng.sample(CLASSES, rng.randint(1, 3))
        elif scenario == "slight" or (scenario == "half" and step % 2):
            # Advice comes or goes.
            toggled = rng.choice(CLASSES)
            if toggled in minded:
                minded = [name for name in minded if name != toggled]
            else:
                minded = [*minded, toggled]
        prompts.append(prompt_text(style, minded))
    return Case(f"from {rng.choice(WORDS)}", tuple(prompts))


def make_cases(scenario: str, n: int, steps: int, seed: int = 0) -> list[Case]:
    """`n` cases with different questions."""
    rng = random.Random(f"{scenario} {seed}")
    cases = dict[str, Case]()
    while len(cases) < n:
        case = make_case(scenario, steps, rng)
        cases.setdefault(case.question, case)
    return list(cases.values())


def mixed_cases(n: int, steps: int) -> list[Case]:
    """Cases of all scenarios in turn, with different questions."""
    cases = dict[str, Case]()
    rng = random.Random(n)
    while len(cases) < n:
        case = make_case(SCENARIOS[len(cases) % len(SCENARIOS)], steps, rng)
        cases.setdefault(case.question, case)
    return list(cases.values())


# --- models ---------------------------------------------------------------------------------------


def random_model(
    tokens: PreTrainedTokenizerFast, seed: int = 0, spread: float = 0.3
) -> Qwen3ForCausalLM:
    """A model of 105,000 random weights; a wide `spread` makes outputs differ between contexts."""
    config = Qwen3Config(
        vocab_size=len(tokens),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=spread,
        eos_token_id=tokens.eos_token_id,
        pad_token_id=tokens.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


def reciter(tokens: PreTrainedTokenizerFast, steps: int = 400, seed: int = 0) -> Qwen3ForCausalLM:
    """The same model, trained to recite in about ten seconds.

    Long recitals come last, because they cost most.
    """
    model = random_model(tokens, seed, spread=0.06).train()
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 10, (steps - step) / (0.3 * steps))
    )
    for step in range(steps):
        is_long = step > 0.6 * steps
        size, length = (4, 110) if is_long else (16, 24)
        loss = model(**_batch(tokens, rng, size, length)).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return model.eval()


def _batch(
    tokens: PreTrainedTokenizerFast, rng: random.Random, size: int, length: int
) -> dict[str, torch.Tensor]:
    examples: list[tuple[list[int], list[int]]] = []
    for _ in range(size):
        style = rng.choice(list(STYLES))
        minded = rng.sample(CLASSES, rng.randint(0, len(CLASSES)))
        start = rng.randrange(len(WORDS))
        context = context_ids(tokens, prompt_text(style, minded), f"from {WORDS[start]}")
        text = recital(style, minded, start, length)
        answer = tokens(text, add_special_tokens=False)["input_ids"]
        examples.append((context, answer))

    # Pad on the right; only the recital is learned.
    width = max(len(context) + len(answer) for context, answer in examples)
    input_ids = []
    labels = []
    for context, answer in examples:
        padding = width - len(context) - len(answer)
        input_ids.append(context + answer + [0] * padding)
        labels.append([-100] * len(context) + answer + [-100] * padding)
    return {"input_ids": torch.tensor(input_ids), "labels": torch.tensor(labels)}


def context_ids(tokens: PreTrainedTokenizerFast, prompt: str, question: str) -> list[int]:
    messages = [{"role": "system", "content": prompt}, {"role": "user", "content": question}]
    return list(
        tokens.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
    )
