"""Real command-line agents (`make foreign`) in tests: where they are, and tiny policies that can
read their prompts.
"""

import os
import shutil
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentic_prompting.harnesses import HARNESSES
from support.programs import byte_tokenizer

FOREIGN = Path(os.environ.get("FOREIGN", Path(__file__).parents[2] / ".venv-foreign"))


def needs(name, monkeypatch):
    """Put a harness into `PATH`; skip the test where it is not installed."""
    folders = [FOREIGN / name / "node_modules" / ".bin", FOREIGN / name / "bin"]
    if not shutil.which(HARNESSES[name].command[0], path=os.pathsep.join(map(str, folders))):
        pytest.skip(f"needs {name}: make foreign")
    for folder in folders:
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


def policy_for(texts, positions=2**15):
    """A tiny random model, and a tokenizer that has learned a harness's prompts: a third or fourth
    of their bytes.
    """
    tokenizer = byte_tokenizer()
    template = tokenizer.chat_template
    tokenizer = tokenizer.train_new_from_iterator(texts, 2000)
    tokenizer.chat_template = template
    torch.manual_seed(0)
    # vLLM's attention on a CPU has no heads below 32.
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config), tokenizer
