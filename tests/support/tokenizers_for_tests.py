"""Byte-level tokenizers with chat templates in the style of four model families, written for these tests."""

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Like Qwen3's: thoughts of earlier turns are dropped when history is rendered, and a switch writes an empty thought.
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

# name -> (template, special tokens with the end of a turn first, added tokens that are not special)
FAMILIES = {
    "chatml": (CHATML, ["<|im_end|>", "<|im_start|>", "<|endoftext|>"], []),
    "llama3": (LLAMA3, ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"], []),
    "qwen3": (QWEN3, ["<|im_end|>", "<|im_start|>", "<|endoftext|>"], ["<think>", "</think>", "<tool_call>"]),
    "qwen3_thinking": (QWEN3_THINKING, ["<|im_end|>", "<|im_start|>"], ["<think>", "</think>"]),
    "gemma": (GEMMA, ["<end_of_turn>", "<bos>", "<start_of_turn>"], []),
}

_CORPUS = [
    "The capital of Kenya is Nairobi and the shilling is used there.",
    "<think> What should I ask? </think>\n<interaction_prompt> Which country? </interaction_prompt>\n",
    "<interaction_response>\nIt is Kenya.\n</interaction_response>\n<answer> shilling </answer>\n\n",
] * 20


@cache
def tokenizer_for(family: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a few hundred merges, so that mistakes at the seams of turns show."""
    template, special, ordinary = FAMILIES[family]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=480, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in [*special, "<pad>"]])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in ordinary])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], pad_token="<pad>", clean_up_tokenization_spaces=False
    )
    fast.chat_template = template
    return fast
