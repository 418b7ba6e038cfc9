"""Tiny models and data under the names that TRL's tests load, as folders relative to the working
directory.

A test that asks for `trl-internal-testing/tiny-Qwen2ForCausalLM-2.5` finds such a folder and
downloads nothing. Models are made from their configuration classes with random weights, tokenizers
from a vocabulary of our own: the 256 bytes and short words. The Qwen3 models have Qwen's token ids,
because tests write completions as such ids; the others have a small vocabulary, because a test's
time is that of its vocabulary. Chat templates are the installed TRL's.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
import transformers
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

OWNER = "trl-internal-testing"
END = 151645
PAD = 151643
START = 151644
_TAGS = {151657: "<tool_call>", 151658: "</tool_call>", 151667: "<think>", 151668: "</think>"}
SIZE = 151672
SMALL_SIZE = 1024
# Of Qwen's vocabulary, the words that fixed completions of the tests are made of.
_WORDS = {
    293: " b",
    314: " {",
    330: ' "',
    397: ">\n",
    411: "out",
    450: "de",
    497: '",',
    522: "</",
    606: "name",
    788: '":',
    894: " any",
    927: "sh",
    944: "'t",
    1318: "text",
    1414: " know",
    1513: " don",
    2765: " won",
    4913: '{"',
    5212: ' {"',
    5392: " tool",
    6023: "hi",
    6659: "call",
    7692: "async",
    9520: "step",
    11248: "}}\n",
    13477: "crement",
    14172: "tool",
    16252: " increment",
    16370: "arguments",
    17453: "Done",
    22785: "_tool",
    35744: "increment",
    64648: "multiply",
    93054: "_multiply",
    95642: '"}}\n',
}

_SMALL = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_DENSE = {**_SMALL, "intermediate_size": 32}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "output_router_logits": True,
}
# Folder, configuration, its arguments, chat template, text of the end of a turn.
_QWEN2 = ("qwen2_5", "<|im_end|>")
_QWEN3 = ("qwen3", "<|im_end|>")
_LLAMA = ("llama3", "<|eot_id|>")
_MODELS: list[tuple[str, str, dict[str, Any], tuple[str | None, str]]] = [
    ("tiny-Qwen2ForCausalLM-2.5", "Qwen2Config", _DENSE, _QWEN2),
    ("tiny-Qwen2ForSequenceClassification-2.5", "Qwen2Config", _DENSE, _QWEN2),
    ("tiny-Qwen3ForCausalLM", "Qwen3Config", {**_DENSE, "head_dim": 4}, _QWEN3),
    ("tiny-Qwen3ForSequenceClassification", "Qwen3Config", {**_DENSE, "head_dim": 4}, _QWEN3),
    ("tiny-Qwen3MoeForCausalLM", "Qwen3MoeConfig", {**_DENSE, **_EXPERTS, "head_dim": 4}, _QWEN3),
    ("tiny-LlamaForCausalLM-3.2", "LlamaConfig", _DENSE, _LLAMA),
    ("tiny-LlamaForSequenceClassification-3.2", "LlamaConfig", _DENSE, _LLAMA),
    ("tiny-MistralForCausalLM-0.2", "MistralConfig", _DENSE, (None, "</s>")),
    (
        "tiny-Gemma2ForCausalLM",
        "Gemma2Config",
        {**_DENSE, "head_dim": 4},
        ("gemma", "<end_of_turn>"),
    ),
    ("tiny-Cohere2ForCausalLM", "Cohere2Config", _DENSE, ("cohere2", "<|END_OF_TURN_TOKEN|>")),
    (
        "tiny-GptOssForCausalLM",
        "GptOssConfig",
        {
            **_DENSE,
            "head_dim": 4,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "output_router_logits": True,
        },
        ("gptoss", "<|return|>"),
    ),
    (
        "tiny-Glm4MoeForCausalLM",
        "Glm4MoeConfig",
        {
            **_DENSE,
            "head_dim": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
        },
        ("glm4moe", "<|user|>"),
    ),
]
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}{{ "
    "eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Beginnings of the Zen of Python (`import this`), in its order, which one of TRL's tests counts on.
# The real data has 17 rows for training; five are enough for the same tests, which train three
# epochs each.
_LINES = [
    "Beautiful is better than",
    "Explicit is",
    "Simple is better",
    "Complex",
    "Flat is better than",
    "Sparse is better",
    "Readability",
]
_TESTS = 2  # rows of the split `test`


def make_all(folder: Path, tests: str) -> list[str]:
    """Make the data set and the models in `folder`.

    Args:
        folder (`Path`): Gets a folder for each, under its name on the hub.
        tests (`str`): The text of the tests. Only models whose names are in it are made.

    Returns:
        `list[str]`: The names of what could not be made with this transformers.
    """
    _make_zen(folder / OWNER / "zen")
    missing = []
    for name, config_class, arguments, (template, end) in _MODELS:
        if name not in tests:
            continue
        try:
            size = SIZE if "Qwen3" in name else SMALL_SIZE
            fast = tokenizer(template, end, size)
            _make_model(folder / OWNER / name, config_class, arguments, fast)
        except Exception as error:  # one architecture less is not a reason to run none
            missing.append(f"{name}: {type(error).__name__}: {error}")
    return missing


@cache
def tokenizer(template: str | None, end: str, size: int = SIZE) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with Qwen's ids for bytes and, if it is as large, words of `_WORDS`,
    tags and the two tokens that end a text.

    Args:
        template (`str`, *optional*): Name of one of TRL's chat templates. Defaults to ChatML.
        end (`str`): The text of the token that ends a turn.
        size (`int`, *optional*, defaults to `SIZE`): How many tokens. In a smaller one all added
            tokens move down.
    """
    shift = SIZE - size

    # The vocabulary: bytes, Qwen's words, and words of letters for all other ids below the added
    # tokens'.
    symbols = _byte_symbols()
    vocabulary = {symbols[byte]: number for number, byte in enumerate(_byte_order())}
    if size == SIZE:
        for number, word in _WORDS.items():
            vocabulary["".join(symbols[byte] for byte in word.encode())] = number
    free_ids = set(range(PAD - shift)) - set(vocabulary.values())
    vocabulary |= dict(zip(_unused_words(set(vocabulary)), sorted(free_ids), strict=False))

    base = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    base.decoder = decoders.ByteLevel()

    # Added tokens get the next free id.
    added = {PAD: "<|endoftext|>", START: "<|im_start|>", END: end, **_TAGS}
    for number in range(PAD, SIZE):
        text = added.get(number, f"<|extra_{number}|>")
        base.add_tokens([AddedToken(text, special=number not in _TAGS, normalized=False)])

    fast = PreTrainedTokenizerFast(tokenizer_object=base, eos_token=end, pad_token=added[PAD])
    fast.chat_template = _CHATML
    path = Path(trl.__file__).parent / "chat_templates" / f"{template}.jinja"
    if template and path.exists():
        fast.chat_template = path.read_text(encoding="utf-8")
    return fast


def _make_model(
    folder: Path, config_class: str, arguments: dict[str, Any], fast: PreTrainedTokenizerFast
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(
        **arguments,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        bos_token_id=None,
        vocab_size=len(fast),
    )
    model_class = transformers.AutoModelForCausalLM
    if "SequenceClassification" in folder.name:
        model_class = transformers.AutoModelForSequenceClassification
        config.num_labels = 1
    model_class.from_config(config).save_pretrained(folder)
    fast.save_pretrained(folder)


def _make_zen(folder: Path) -> None:
    """Two forms of the same prompts, as `load_dataset(folder, form, split=...)` reads them."""
    conversations = [[{"role": "user", "content": f"{line} what?"}] for line in _LINES]
    forms = {"standard_prompt_only": _LINES, "conversational_prompt_only": conversations}
    card = ["---", "configs:"]
    for form, prompts in forms.items():
        (folder / form).mkdir(parents=True)
        card += [f"- config_name: {form}", "  data_files:"]
        for split, rows in {"train": prompts[:-_TESTS], "test": prompts[-_TESTS:]}.items():
            card += [f"  - split: {split}", f"    path: {form}/{split}.jsonl"]
            lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in rows)
            (folder / form / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "README.md").write_text("\n".join([*card, "---", ""]), encoding="utf-8")


def _byte_order() -> list[int]:
    """The bytes in the order of their ids: those that print first, as GPT-2 has them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return printable + [byte for byte in range(256) if byte not in printable]


def _byte_symbols() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    symbols = {}
    for number, byte in enumerate(_byte_order()):
        is_printable = number < 188
        symbols[byte] = chr(byte) if is_printable else chr(256 + number - 188)
    return symbols


def _unused_words(vocabulary: set[str]) -> Iterator[str]:
    """Short words that are not in a vocabulary yet."""
    for length in range(2, 5):
        for letters in product(ascii_lowercase, repeat=length):
            word = "".join(letters)
            if word not in vocabulary:
                yield word
