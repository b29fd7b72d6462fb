"""Tiny random models of many families, from their transformers configs: what the score tape must be exact on."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OlmoConfig,
    OlmoeConfig,
    Phi3Config,
    PhiConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tests.scores.models import PAD, VOCABULARY

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
HALF, ONE = {"num_key_value_heads": 2}, {"num_key_value_heads": 1}  # grouped-query attention of 4 heads
BIASED = {"attention_bias": True}
GPT2 = {"n_positions": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GEMMA = {"head_dim": 6, "query_pre_attn_scalar": 6, "sliding_window": 4}
# grouped_mm wants rows of 16 bytes, in bfloat16 too
MOE = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DENSE_FIRST, DENSE_EVEN = {"mlp_only_layers": [0]}, {"decoder_sparse_step": 2}
SHARED = {"shared_expert_intermediate_size": 14}
PARTIAL_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}

DENSE = {
    "qwen2-tied": (Qwen2Config, TIED | ONE),
    "qwen2-untied-window": (
        Qwen2Config,
        UNTIED | HALF | {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3-tied": (Qwen3Config, TIED | HALF | {"head_dim": 6}),
    "qwen3-untied-biased": (Qwen3Config, UNTIED | BIASED),
    "llama-tied-biased": (LlamaConfig, TIED | BIASED | {"mlp_bias": True}),
    "llama-untied": (LlamaConfig, UNTIED | HALF),
    "mistral-untied-window": (MistralConfig, UNTIED | HALF | {"sliding_window": 4}),
    "gemma2-tied": (Gemma2Config, TIED | HALF | GEMMA),
    "gemma2-untied-biased": (Gemma2Config, UNTIED | BIASED | ONE | GEMMA),
    "gemma3-tied": (Gemma3TextConfig, TIED | ONE | GEMMA),
    "gemma3-untied": (Gemma3TextConfig, UNTIED | HALF | GEMMA | {"layer_types": ["full_attention"] * 2}),
    "gpt2-tied": (GPT2Config, TIED | GPT2),
    "gpt2-untied": (GPT2Config, UNTIED | GPT2 | {"n_inner": 20, "scale_attn_by_inverse_layer_idx": True}),
    "phi-untied": (PhiConfig, UNTIED | PARTIAL_ROTARY),
    "phi-tied-qk-norm": (PhiConfig, TIED | HALF | PARTIAL_ROTARY | {"qk_layernorm": True}),
    "phi3-untied": (Phi3Config, UNTIED | HALF),
    "olmo-tied-biased": (OlmoConfig, TIED | BIASED | HALF),
    "olmo-untied-clipped": (OlmoConfig, UNTIED | {"clip_qkv": 0.5}),  # in place, on what the projections return
    "olmo2-untied": (Olmo2Config, UNTIED | HALF),
}
EXPERTS = {
    "qwen3-moe-normalised": (Qwen3MoeConfig, UNTIED | HALF | MOE | {"norm_topk_prob": True}),
    "qwen3-moe-dense-first": (Qwen3MoeConfig, TIED | HALF | MOE | DENSE_FIRST | {"norm_topk_prob": False}),
    "qwen2-moe-shared": (Qwen2MoeConfig, UNTIED | HALF | MOE | SHARED | {"norm_topk_prob": False}),
    "qwen2-moe-dense-even": (Qwen2MoeConfig, TIED | MOE | SHARED | DENSE_EVEN | {"norm_topk_prob": True}),
    "mixtral-untied": (MixtralConfig, UNTIED | HALF | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmoe-untied": (OlmoeConfig, UNTIED | HALF | MOE | {"norm_topk_prob": False}),
}
FAMILIES = DENSE | EXPERTS

POSITIONS_BY_DEFAULT = ("gpt2-tied",)
"""Called without position ids: the learned positions are then looked up once, (1, T), for the whole batch."""


def ways(*experts):
    """(family, attention, experts' implementation): both attentions, and each of `experts` where there are any."""
    attentions = [(name, each) for name in FAMILIES for each in ("sdpa", "eager")]
    return [
        (name, attention, each)
        for name, attention in attentions
        if (name[:6], attention) != ("gemma2", "sdpa")  # transformers has none: no soft-capping there
        for each in (experts if name in EXPERTS and attention == "sdpa" else ("eager",))
    ]


def build_family(name, dtype=torch.float64, attention="sdpa", experts="eager", **changes):
    """A model with weights large enough that routing and attention are not flat, and no gain or bias at its default."""
    kind, extra = FAMILIES[name]
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.3,
        "pad_token_id": PAD, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip
    config = kind(**settings | extra | changes, attn_implementation=attention, experts_implementation=experts)
    model = AutoModelForCausalLM.from_config(config).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model
