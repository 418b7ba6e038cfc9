"""A tiny Llama as a GGUF file, with or without a second copy of its embeddings as the head."""

import numpy as np

WIDTH = 32
HEADS = 4
HIDDEN = 64
LAYERS = 2
WORDS = ["<unk>", "<s>", "</s>", *map(chr, range(33, 127)), "Ġ", "Ċ", "ab", "cd"]
CHAT_TEMPLATE = "{% for m in messages %}{{ m.content }}</s>{% endfor %}"


def write_gguf(file, head=None):
    """Write the file.

    Args:
        file: Where to.
        head: `None`, tied as the file has no head; `"copy"`, the embeddings with the errors of
            another quantisation; `"other"`, a head that was trained apart from the embeddings.
    """
    import gguf

    rng = np.random.default_rng(0)

    def matrix(*shape):
        return rng.normal(0, 0.2, shape).astype(np.float32)

    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(WORDS)
    writer.add_token_types(
        [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(WORDS) - 3)
    )
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    embeddings = matrix(len(WORDS), WIDTH)
    writer.add_tensor("token_embd.weight", embeddings)
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    if head == "copy":
        writer.add_tensor(
            "output.weight", embeddings + rng.normal(0, 0.01, embeddings.shape).astype(np.float32)
        )
    elif head == "other":
        writer.add_tensor("output.weight", matrix(len(WORDS), WIDTH))
    for layer in range(LAYERS):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", matrix(WIDTH, WIDTH))
        writer.add_tensor(f"blk.{layer}.ffn_gate.weight", matrix(HIDDEN, WIDTH))
        writer.add_tensor(f"blk.{layer}.ffn_up.weight", matrix(HIDDEN, WIDTH))
        writer.add_tensor(f"blk.{layer}.ffn_down.weight", matrix(WIDTH, HIDDEN))
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file
