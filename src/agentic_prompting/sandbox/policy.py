"""The sandbox's tiny policy: a real Qwen3-architecture model of under a million parameters with a
word-level tokenizer.

Everything a full-size policy goes through happens to it too, in seconds: chat template, generation,
loss, saving.
"""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ..rollout import AgentSpec, Limits, Rollout, TagGrammar
from .traces import vocabulary
from .world import World, load_world

# The question alone: the tiny policy learns what to do from traces and reward, not from
# instructions.
SANDBOX_TEMPLATE = "question : {question}"

ARCHITECTURE: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    # At the usual 0.02 a model this small takes twice as long to tell its words apart.
    "initializer_range": 0.06,
}

# Parameters of mallopt, from glibc's malloc.h.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4

# Turns are framed as in ChatML, which Qwen3 uses too.
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sandbox_spec(max_turns: int = 5) -> AgentSpec:
    """Return the template and the limits of the sandbox's agent."""
    limits = Limits(max_turns=max_turns, max_turn_tokens=48, max_tokens=320)
    return AgentSpec(SANDBOX_TEMPLATE, limits=limits)


def build_tokenizer(
    words: Sequence[str], names: Sequence[str] = (), grammar: TagGrammar = TagGrammar()
) -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per word, and one per name of several words, as large
    vocabularies have for frequent names.

    Unknown words become `[UNK]`. ChatML template.
    """
    # Special tokens, and the opening and closing tags of the grammar's parts.
    reserved = ["[UNK]", "<pad>", "<|im_start|>", "<|im_end|>"]
    tags: list[str] = []
    for tag in asdict(grammar).values():
        tags += [f"<{tag}>", f"</{tag}>"]

    # The longest phrases first, so that the split below prefers them; then all single words.
    phrases = sorted({name for name in names if " " in name}, key=lambda name: (-len(name), name))
    chat_words = {"user", "assistant", "system", "question", ":"}
    ordinary = sorted({*words, *chat_words} - {*tags, *reserved})
    tokens = [*reserved, *tags, *phrases, *ordinary]
    token_ids = {token: number for number, token in enumerate(tokens)}

    # Split into phrases, and into words at spaces.
    tokenizer = Tokenizer(models.WordLevel(token_ids, unk_token="[UNK]"))
    patterns = [rf"\b{re.escape(phrase)}\b" for phrase in phrases]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*patterns, r"\S+"])), "removed", invert=True
    )
    # Tags are added tokens, as `<think>` is in Qwen3: found even if no space stands around them.
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="[UNK]",
        pad_token="<pad>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = _CHATML
    return fast


def world_tokenizer(
    world: World | None = None, grammar: TagGrammar = TagGrammar()
) -> PreTrainedTokenizerFast:
    """Build the tokenizer of the sandbox's world: every word that occurs in it, every name."""
    world = world or load_world()
    names = list(chain.from_iterable(world.values.values()))
    return build_tokenizer(vocabulary(world, grammar), names, grammar)


def build_policy(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3ForCausalLM:
    """Build a randomly initialised policy for `tokenizer`: 2 layers of width 128, tied
    embeddings.
    """
    keep_freed_memory()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **ARCHITECTURE,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        # A mark in `config.json`, for the model card of whatever the policy is trained in.
        sandbox_policy=True,
    )
    # Draw the weights by the seed, and leave the run's own random state as it is.
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def copying_exercises(
    tokenizer: PreTrainedTokenizerFast, n: int, rng: random.Random
) -> list[Rollout]:
    """Sequences of 4 to 12 random words, to be repeated.

    Learning to repeat them teaches the attention to copy a name from where it was read to where it
    is asked about. Conversations alone teach that slowly: 300 steps on them left a loss of 0.20
    nats a token, 150 steps of these exercises and then 150 on conversations leave 0.10.
    """
    first_word = len(tokenizer.all_special_ids)  # special tokens come first in the vocabulary
    exercises = []
    for _ in range(n):
        length = rng.randint(4, 12)
        words = [rng.randrange(first_word, len(tokenizer)) for _ in range(length)]
        exercises.append(Rollout(prompt_ids=words, ids=list(words), mask=[1] * length))
    return exercises


def nonsense(
    conversations: Sequence[Rollout],
    tokenizer: PreTrainedTokenizerFast,
    world: World,
    rng: random.Random,
) -> list[Rollout]:
    """Replace the names and nouns of conversations by random words: more exercises in copying.

    The results state nothing, so only copying predicts their tokens. The policy learns to copy
    any word in the place of a name, not only the names of its conversations.

    Args:
        conversations (`Sequence[Rollout]`): The conversations to change; within one of them a
            word is always replaced by the same word.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the world.
        world ([`World`]): The world whose names and relations are replaced.
        rng (`random.Random`): Draws the words. It never draws the nouns of questions, so no
            result is a question.
    """
    # Names and nouns are replaced, by any words but nouns and tags.
    nouns = {"airport", "capital", "country", *world.last_relations}
    names = set(chain.from_iterable(world.values.values()))
    replaced_ids = tokenizer.convert_tokens_to_ids(sorted(names | nouns))
    excluded = nouns | set(tokenizer.get_added_vocab())
    replacement_ids = [
        token_id for word, token_id in sorted(tokenizer.get_vocab().items()) if word not in excluded
    ]

    exercises = []
    for rollout in conversations:
        drawn_ids = rng.choices(replacement_ids, k=len(replaced_ids))
        mapping = dict(zip(replaced_ids, drawn_ids, strict=True))
        exercises.append(
            Rollout(
                prompt_ids=[mapping.get(token, token) for token in rollout.prompt_ids],
                ids=[mapping.get(token, token) for token in rollout.ids],
                mask=list(rollout.mask),
            )
        )
    return exercises


def save_policy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, spec: AgentSpec, folder: str | Path
) -> None:
    """Save a policy so that a trainer, or [`PromptAgent.from_pretrained`], can load it by path."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    spec.save(folder)


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for the tensors of the next step.

    glibc asks the system anew for every large block and returns it at once. PyTorch on a CPU does
    that some thousand times in a step of the sandbox's policy, and each time the system clears the
    pages: a third of `make demo`, and more on a virtual machine. A process of the sandbox keeps a
    few hundred MB.

    Returns:
        `bool`: Whether the C library accepted the settings; only glibc knows them.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        # macOS and musl have no mallopt; Windows has no library without a name.
        return False

    # mallopt returns 1 on success. Its values are C ints: 2 GB is the largest threshold.
    settings = [(_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 * 2**20)]
    return all(mallopt(parameter, value) for parameter, value in settings)
