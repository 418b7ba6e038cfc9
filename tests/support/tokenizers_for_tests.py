"""Byte-level tokenizers with chat templates in the style of model families, or those of TRL."""

import shutil
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Shows tools and writes calls as Qwen3's does.
CHATML_WITH_TOOLS = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role "
    "}}\n{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson "
    "}}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Like Qwen3's: thoughts of earlier turns are dropped when history is rendered, and a switch writes
# an empty thought.
QWEN3 = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' and '</think>' in text and loop.index0 < ns.last %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
# Like the Qwen3-Thinking models': the template opens the thought itself.
QWEN3_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)

# Like Mistral's: the system message stands in the user's.
MISTRAL = (
    "<s>{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}{% set "
    "said = messages[1:] %}{% else %}{% set first = '' %}{% set said = messages %}{% endif %}{% "
    "for m in said %}{% if m.role == 'user' %}[INST] {{ first if loop.first else '' }}{{ m.content "
    "}}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
OLMO2 = (
    "<|endoftext|>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}"
    "{% if m.role == 'assistant' %}<|endoftext|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
GRANITE = (
    "{% for m in messages %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content "
    "}}<|end_of_text|>\n{% endfor %}{% if add_generation_prompt "
    "%}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)

# name -> (template, special tokens with the end of a turn first, added tokens that are not special)
FAMILIES = {
    "chatml": (CHATML, ["<|im_end|>", "<|im_start|>", "<|endoftext|>"], []),
    "llama3": (
        LLAMA3,
        ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
        [],
    ),
    "qwen3": (
        QWEN3,
        ["<|im_end|>", "<|im_start|>", "<|endoftext|>"],
        ["<think>", "</think>", "<tool_call>"],
    ),
    "qwen3_thinking": (QWEN3_THINKING, ["<|im_end|>", "<|im_start|>"], ["<think>", "</think>"]),
    "gemma": (GEMMA, ["<end_of_turn>", "<bos>", "<start_of_turn>"], []),
}
# Those of families whose own template TRL ships (`None`), and others with something of their own,
# which not every test of the above can be asked for.
OTHERS = {
    "trl/qwen3": (None, *FAMILIES["qwen3"][1:]),
    "trl/qwen3_instruct_2507": (None, *FAMILIES["qwen3"][1:]),
    "trl/llama3_1": (None, FAMILIES["llama3"][1], []),
    "trl/gemma": (None, FAMILIES["gemma"][1], []),
    "trl/gemma3": (None, FAMILIES["gemma"][1], []),
    "trl/phi3": (None, ["<|end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>"], []),
    "trl/gptoss": (
        None,
        ["<|return|>", "<|call|>", "<|end|>", "<|start|>", "<|message|>", "<|channel|>"],
        [],
    ),
    "mistral": (MISTRAL, ["</s>", "<s>", "[INST]", "[/INST]"], []),
    "olmo2": (OLMO2, ["<|endoftext|>"], []),
    "granite": (GRANITE, ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>"], []),
}

_CORPUS = [
    "The capital of Kenya is Nairobi and the shilling is used there.",
    (
        "<think> What should I ask? </think>\n<interaction_prompt> Which country? "
        "</interaction_prompt>\n"
    ),
    (
        "<interaction_response>\nIt is Kenya.\n</interaction_response>\n<answer> shilling "
        "</answer>\n\n"
    ),
] * 20


def with_tools(policy: Path, folder: Path) -> Path:
    """A copy of a model in `folder` whose chat template shows tools."""
    shutil.copytree(policy, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = CHATML_WITH_TOOLS
    tokenizer.save_pretrained(folder)
    return folder


def template(name: str) -> str:
    """One of TRL's own."""
    (folder,) = find_spec("trl").submodule_search_locations
    return Path(folder, "chat_templates", f"{name}.jinja").read_text()


@cache
def tokenizer_for(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a few hundred merges, so that mistakes at the seams of turns
    show.
    """
    text, special, ordinary = {**FAMILIES, **OTHERS}[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in [*special, "<pad>"]]
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ordinary])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=special[0],
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = template(family.removeprefix("trl/")) if text is None else text
    return fast
