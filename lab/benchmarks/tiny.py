"""Tiny configs of transformers' causal-LM families: their defaults, with every size that is known by name small."""

from __future__ import annotations

import copy
import inspect
from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY, PAD = 29, 2

SIZES: dict[str, Any] = {
    # the whole
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "pad_token_id": PAD, "bos_token_id": 0,
    "eos_token_id": 1, "max_position_embeddings": 64, "n_positions": 64, "n_ctx": 64, "max_seq_len": 64,
    "initializer_range": 0.3, "is_decoder": True, "use_cache": False, "max_sequence_length": 64, "sliding_window": 5,
    "embedding_size": 16, "context_length": 64, "max_source_positions": 64, "max_target_positions": 64,
    "type_vocab_size": 2, "attention_window_size": 5, "sliding_window_size": 5, "attention_chunk_size": 8,
    # widths
    "hidden_size": 32, "d_model": 32, "n_embd": 32, "emb_dim": 32, "dim": 32, "width": 32, "head_dim": 8, "d_head": 8,
    "d_kv": 8, "global_head_dim": 8, "intermediate_size": 24, "d_ff": 24, "ffn_dim": 24, "d_inner": 24, "n_inner": 24,
    "ffn_hidden_size": 24, "intermediate_size_mlp": 24, "decoder_ffn_dim": 24, "encoder_ffn_dim": 24, "lru_width": 32,
    "shared_intermediate_size": 12, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 12, "hidden_size_per_layer_input": 8, "expert_ffn_hidden_size": 12,
    "moe_ffn_hidden_size": 12, "q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
    "v_head_dim": 8, "qk_head_dim": 16, "query_pre_attn_scalar": 8, "dim_model_base": 16, "dim_ff": 24, "dim_head": 8,
    "laurel_rank": 4, "attention_hidden_size": 32, "kv_channels": 8, "hidden_dim": 32, "o_lora_rank": 8,
    "time_step_rank": 4, "state_size": 4, "ssm_state_size": 4, "mamba_d_state": 4, "mamba_d_conv": 4, "conv_kernel": 4,
    "mamba_expand": 2, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_head_dim": 16,
    "mamba_num_heads": 4, "mamba_n_groups": 1, "n_groups": 1, "n_mamba_heads": 2, "mamba_dt_rank": 4,
    "mamba_ngroups": 1, "mamba_headdim": 16, "mamba_chunk_size": 4, "chunk_size": 4, "adapter_rank": 4,
    "block_dim": 32, "block_ff_dim": 24, "block_multiple_of": 4, "conv_L_cache": 3,
    "num_mem_blocks": 1, "conv_dim": 32, "conv_dim_out": 32,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_conv_kernel_dim": 3, "linear_head_dim": 8, "linear_num_heads": 4, "index_head_dim": 8, "index_n_heads": 2,
    "index_topk": 64, "hc_mult": 2, "compress_ratio": 2,
    # counts
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4, "num_key_value_heads": 2,
    "num_global_key_value_heads": 2, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    "swa_v_head_dim": 8, "num_blocks": 2, "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "num_experts_per_token": 2, "moe_k": 2, "moe_topk": 2, "top_k_experts": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "moe_num_shared_experts": 1, "num_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_start_index": 1, "num_dense_layers": 1, "zero_expert_num": 1, "full_attention_interval": 2,
    "router_hidden_size": 8, "moe_latent_size": 16, "num_expert_group": 1, "topk_groups": 1, "num_zero_experts": 1,
}  # fmt: skip
"""Settings that many configs have, and their tiny values."""

OFF = ("dropout", "layerdrop", "pdrop", "_drop", "jitter")
"""What settings of randomness have in their names: they are set to 0."""

MLA = {"num_key_value_heads": 4}
FOUR = {"num_hidden_layers": 4}
GEMMA4 = FOUR | {
    "global_head_dim": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 1,
}
HEAD = {"head_dim": 8}
QWEN4 = HEAD | {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 64,
                "indexer_compress_ratio": 2}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "axk1": MLA, "axk2": MLA, "deepseek_v2": MLA, "deepseek_v3": MLA, "deepseek_v32": MLA, "glm4_moe_lite": MLA,
    "glm_moe_dsa": MLA, "longcat_flash": MLA, "minicpm3": MLA, "youtu": MLA, "kimi_linear": MLA, "bailing_hybrid": MLA,
    "codegen": {"rotary_dim": 4}, "gptj": {"rotary_dim": 4},
    "hunyuan_v1_dense": HEAD, "hunyuan_v1_moe": HEAD, "ministral": HEAD, "qwen4_exp_text": QWEN4,
    "qwen4_exp": {"text_config": QWEN4},
    "gemma4_text": GEMMA4, "gemma4_unified_text": GEMMA4,
    "gemma4": {"text_config": GEMMA4}, "gemma4_unified": {"text_config": GEMMA4},
    "gemma3n_text": FOUR | {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
                     "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "attention_dropout": 0.0},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": FOUR | {"layer_types": ["conv", "full_attention"] * 2},
    "jamba": FOUR | {"attn_layer_period": 2, "attn_layer_offset": 1,  # all four pairs of mixer and feed-forward
                     "expert_layer_period": 3, "expert_layer_offset": 0},
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "zaya": {"num_experts_per_tok": 1},
    "mpt": {"attn_config": {"attn_pdrop": 0}},
    "reformer": {"axial_pos_embds": False, "lsh_attn_chunk_length": 4, "local_attn_chunk_length": 4,
                 "axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16], "num_buckets": 2},
    "gemma3n": {"text_config": {"num_kv_shared_layers": 0}},
    "cohere_compass_text": {"rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "attn_layer_offset": 1, "attn_layer_period": 2, "attention_head_dim": 16},
    "zamba2": {"num_hidden_layers": 6, "layers_block_type": ["mamba", "mamba", "hybrid", "mamba", "hybrid", "mamba"],
               "n_mamba_heads": 4},
}  # fmt: skip
"""What single families need beside."""


def names() -> dict[str, str]:
    """Every causal-LM family of the installed transformers, and its class."""
    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_for(family: str) -> PretrainedConfig:
    """A tiny config of the family."""
    kind = type(AutoConfig.for_model(family))
    return shrunk(kind, copy.deepcopy(FAMILIES.get(family, {})))


KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
"""Lists of what kind each layer is."""


def shrunk(kind: type[PretrainedConfig], further: dict[str, Any]) -> PretrainedConfig:
    """The class' default config with the sizes of `SIZES`, and every kind of layer; its parts' configs too."""
    default, settings = kind(), dict[str, Any]()
    known = set(inspect.signature(kind.__init__).parameters) | set(default.to_dict()) | set(kind.attribute_map)
    for name in known:
        try:
            value = getattr(default, name, None)
        except Exception:  # differs by layer, or leads to an attribute that is not there
            value = None
        if isinstance(value, PretrainedConfig):
            settings[name] = shrunk(type(value), further.pop(name, {}))
        elif name in SIZES and not (value is None and name in {"q_lora_rank", "sliding_window", "head_dim"}):
            settings[name] = SIZES[name]
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and any(off in name for off in OFF):
            settings[name] = type(value)(0)
    settings = {name: value for name, value in settings.items() if name not in kind.attribute_map} | further
    tiny = kind(**settings)
    lists = {name: kinds_of(default, name) for name in KINDS if name in inspect.signature(kind.__init__).parameters}
    if all(set(kinds) <= set(kinds_of(tiny, name)) for name, kinds in lists.items()):
        return tiny
    layers = max(2, *map(len, lists.values()))
    every = {name: [kinds[i % len(kinds)] for i in range(layers)] for name, kinds in lists.items() if kinds}
    return kind(**settings | {"num_hidden_layers": layers} | every | further)


def kinds_of(config: PretrainedConfig, name: str) -> list[str]:
    """The kinds of layers that a config lists under a name, each once."""
    return list(dict.fromkeys(getattr(config, name, None) or []))
