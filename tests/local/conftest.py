"""Fixtures of the tests of models in this process: a small model that prefers some tokens, and its
tokenizer.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def policy(tiny_policy):
    model = AutoModelForCausalLM.from_pretrained(tiny_policy, dtype=torch.float32).eval()
    model.model.norm.weight.data *= 3  # a model that prefers some tokens, as a trained one does
    return model


@pytest.fixture(scope="module")
def tokenizer(tiny_policy):
    return AutoTokenizer.from_pretrained(tiny_policy)
