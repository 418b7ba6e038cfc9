"""Tiny models of random weights, one of each family that docs/families.md names."""

from functools import cache

import torch
import transformers

VOCABULARY = 128
END = 2
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": 0,
}
HEAD = {"head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "output_router_logits": True}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SHARED = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
# Without router logits: TRL 1.16 looks for their number of experts under a name that Granite's
# configuration lacks.
MAMBA = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 16,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
# Family: its class without `ForCausalLM`, its configuration, and what the engine's refusal says of
# it (None: it runs).
FAMILIES = {
    "Qwen3": ("Qwen3", HEAD, None),
    "Qwen3-MoE": (
        "Qwen3Moe",
        {**HEAD, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 16},
        None,
    ),
    "Mixtral": ("Mixtral", {**HEAD, **EXPERTS, "num_local_experts": 4}, None),
    "Llama": ("Llama", HEAD, None),
    "Gemma 3": ("Gemma3", {**HEAD, **WINDOW}, None),
    "Mistral": ("Mistral", {**HEAD, "sliding_window": 8}, None),
    "Phi3": ("Phi3", {"sliding_window": 8}, None),
    "OLMo2": ("Olmo2", {}, None),
    "gpt-oss": ("GptOss", {**HEAD, **WINDOW, **EXPERTS, "num_local_experts": 4}, None),
    "Qwen3-Next": ("Qwen3Next", {**HEAD, **LINEAR, **EXPERTS, **SHARED}, "linear_attention layers"),
    "Granite hybrid": ("GraniteMoeHybrid", MAMBA, "linear_attention layers"),
    "Mamba": ("Mamba", {"state_size": 4}, "linear_attention layers"),
}

# The template of each family (TRL's copy where it has one), how it takes a system message and how
# it has thoughts.
INTO_USER = "in the user's"
TEMPLATES = {
    "Qwen3": ("trl/qwen3", "yes", "kept"),
    "Qwen3-MoE": ("trl/qwen3_instruct_2507", "yes", "plain text"),
    "Mixtral": ("mistral", INTO_USER, "plain text"),
    "Llama": ("trl/llama3_1", "yes", "plain text"),
    "Gemma 3": ("trl/gemma3", INTO_USER, "plain text"),
    "Mistral": ("mistral", INTO_USER, "plain text"),
    "Phi3": ("trl/phi3", "yes", "plain text"),
    "OLMo2": ("olmo2", "yes", "plain text"),
    "gpt-oss": ("trl/gptoss", "yes", "kept, a channel"),
    "Qwen3-Next": ("qwen3_thinking", "yes", "opened, kept"),
    "Granite hybrid": ("granite", "yes", "plain text"),
    "Mamba": (None, "no template", "plain text"),
}


@cache
def model_of(family, vocabulary=VOCABULARY):
    """A family's model in float32."""
    name, changes, _ = FAMILIES[family]
    shape = {"vocab_size": vocabulary, **SHAPE, **changes}
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(
        **shape
    )
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
