"""A Llama of a few thousand parameters as a GGUF file, written with llama.cpp's own package."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from oblrpo.policy import byte_tokenizer

HEADS, KEY_HEADS = 4, 2
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}="
BLOCK = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def tiny_llama():
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 1, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=64, tie_word_embeddings=True,
        rms_norm_eps=1e-5, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval(), tokenizer


def interleaved(weight, heads):
    """llama.cpp rotates neighbours, transformers halves: rows of queries and keys lie in another order."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, architecture="llama", quantised=False, without=()):
    """Write the tiny Llama, and return it."""
    import gguf

    model, tokenizer = tiny_llama()
    config = model.config
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEY_HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    tokens = [*tokenizer.convert_ids_to_tokens(range(len(tokenizer))), "qu"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 2 else 1 for index in range(len(tokens))])
    writer.add_token_merges(["q u"])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    writer.add_chat_template(TEMPLATE)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{ours}": f"blk.{layer}.{theirs}" for ours, theirs in BLOCK.items()}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" or (theirs := names[name.removesuffix(".weight")]) in without:
            continue
        heads = HEADS if theirs.endswith("attn_q") else KEY_HEADS if theirs.endswith("attn_k") else 0
        values = (interleaved(weight, heads) if heads else weight).contiguous().numpy()
        kind = gguf.GGMLQuantizationType.Q8_0 if quantised and values.ndim == 2 else None
        if kind is None:
            writer.add_tensor(f"{theirs}.weight", values)
        else:
            writer.add_tensor(f"{theirs}.weight", gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
