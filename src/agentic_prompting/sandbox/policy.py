"""The sandbox's tiny policy: a real Qwen3-architecture model of under a million parameters with a word-level tokenizer.

Everything a full-size policy goes through happens to it too, in seconds: chat template, generation, loss, saving.
"""

from __future__ import annotations

import ctypes
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from ..rollout import AgentSpec, Limits, Rollout, TagGrammar
from .traces import vocabulary
from .world import World, load_world

# The question alone: the tiny policy learns what to do from traces and reward, not from instructions.
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
    "initializer_range": 0.06,  # at the usual 0.02 a model this small takes twice as long to tell its words apart
}

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h

_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def sandbox_spec(max_turns: int = 5) -> AgentSpec:
    """How the sandbox's agent is asked."""
    return AgentSpec(
        SANDBOX_TEMPLATE, limits=Limits(max_turns=max_turns, max_turn_tokens=48, max_tokens=320)
    )


def build_tokenizer(
    words: Sequence[str], names: Sequence[str] = (), grammar: TagGrammar = TagGrammar()
) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per word, and one per name of several words, as large vocabularies have for frequent
    names. Unknown words become `[UNK]`. ChatML template."""
    reserved = ["[UNK]", "<pad>", "<|im_start|>", "<|im_end|>"]
    tags = [f"<{slash}{tag}>" for tag in asdict(grammar).values() for slash in ("", "/")]
    phrases = sorted({name for name in names if " " in name}, key=lambda name: (-len(name), name))
    ordinary = sorted({*words, "user", "assistant", "system", "question", ":"} - {*tags, *reserved})
    vocabulary = {
        word: number for number, word in enumerate([*reserved, *tags, *phrases, *ordinary])
    }
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join([*(rf"\b{re.escape(phrase)}\b" for phrase in phrases), r"\S+"])),
        "removed",
        invert=True,
    )
    # Tags are added tokens, as `<think>` is in Qwen3: found also where no space stands around them.
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
    """The tokenizer of the sandbox's world: every word that occurs in it, every name."""
    world = world or load_world()
    names = [name for values in world.values.values() for name in values]
    return build_tokenizer(vocabulary(world, grammar), names, grammar)


def build_policy(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> Qwen3ForCausalLM:
    """A randomly initialised policy for `tokenizer`: 2 layers of width 128, tied embeddings."""
    keep_freed_memory()
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        **ARCHITECTURE,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def copying_exercises(
    tokenizer: PreTrainedTokenizerFast, n: int, rng: random.Random
) -> list[Rollout]:
    """Sequences of 4 to 12 random words, to be repeated.

    Learning to repeat them teaches the attention to copy a name from where it was read to where it is asked about.
    Conversations alone teach that slowly: 300 steps on them left a loss of 0.20 nats a token, 150 steps of these
    exercises and then 150 on conversations leave 0.10.
    """
    first = len(tokenizer.all_special_ids)  # special tokens come first in the vocabulary
    sequences = [
        [rng.randrange(first, len(tokenizer)) for _ in range(rng.randint(4, 12))] for _ in range(n)
    ]
    return [
        Rollout(prompt_ids=words, ids=list(words), mask=[1] * len(words)) for words in sequences
    ]


def nonsense(
    conversations: Sequence[Rollout],
    tokenizer: PreTrainedTokenizerFast,
    world: World,
    rng: random.Random,
) -> list[Rollout]:
    """Conversations with random words in the place of their names and nouns: exercises in copying, as well.

    They state nothing, so that only copying predicts their tokens. The policy learns to copy any word in the place of a
    name, not only the names of its conversations.

    Args:
        conversations (`Sequence[Rollout]`): The conversations to change; within one of them a
            word is always replaced by the same word.
        tokenizer (`PreTrainedTokenizerFast`): The tokenizer of the world.
        world ([`World`]): Whose names and relations are replaced.
        rng (`random.Random`): Draws the words; of a question's own nouns none, so that none is a question.
    """
    nouns = {"airport", "capital", "country", *world.last_relations}
    names = {name for values in world.values.values() for name in values}
    moved = tokenizer.convert_tokens_to_ids(sorted(names | nouns))
    kept = nouns | set(tokenizer.get_added_vocab())
    words = [number for word, number in sorted(tokenizer.get_vocab().items()) if word not in kept]
    exercises = []
    for rollout in conversations:
        new = dict(zip(moved, rng.choices(words, k=len(moved)), strict=True))
        prompt, ids = (
            [new.get(token, token) for token in tokens]
            for tokens in (rollout.prompt_ids, rollout.ids)
        )
        exercises.append(Rollout(prompt_ids=prompt, ids=ids, mask=list(rollout.mask)))
    return exercises


def save_policy(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, spec: AgentSpec, folder: str | Path
) -> None:
    """Save so that a trainer, or [`PromptAgent.from_pretrained`], can load it by path."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    spec.save(folder)


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, for the tensors of the next step.

    glibc asks the system anew for every large block and returns it at once. PyTorch on a CPU does that some thousand
    times in a step of the sandbox's policy, and each time the system clears the pages: a third of `make demo`, and
    more on a virtual machine. A process of the sandbox keeps a few hundred MB.

    Returns:
        `bool`: Whether the C library took it; others than glibc do not know these settings.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (
        OSError,
        AttributeError,
        TypeError,
    ):  # macOS, musl; Windows has no library without a name
        return False
    # Returns 1 where it worked. Thresholds are C's int: 2 GB is the most there is.
    return bool(
        mallopt(_M_MMAP_MAX, 0)
        and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        and mallopt(_M_TOP_PAD, 64 * 2**20)
    )
