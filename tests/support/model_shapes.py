"""Shapes of tiny models."""

GROUPED_QUERY_SHAPE = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
"""Grouped-query attention, and an initialisation so wide that outputs differ between contexts."""
