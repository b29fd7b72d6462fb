"""Tiny policies of many families, with heads that vLLM takes on a CPU."""

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from oblrpo.policy import Policy, byte_tokenizer, make_policy
from oblrpo.settings import PolicyConfig

TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
WINDOW = {"sliding_window": 8}
GEMMA = WINDOW | {"query_pre_attn_scalar": 32}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.7, "attention_multiplier": 0.1}
FAMILIES = {
    "qwen3": (Qwen3Config, TIED),
    "qwen3-untied": (Qwen3Config, UNTIED),
    "qwen2-biased": (Qwen2Config, TIED),
    "llama": (LlamaConfig, UNTIED),
    "llama-tied-biased": (LlamaConfig, TIED | {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": (MistralConfig, UNTIED | WINDOW),
    "gemma2-window-caps": (
        Gemma2Config,
        TIED | GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    ),
    "gemma3-window": (Gemma3TextConfig, TIED | GEMMA),
    "qwen3-moe": (Qwen3MoeConfig, UNTIED | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    "mixtral": (MixtralConfig, UNTIED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "phi3": (Phi3Config, UNTIED),
    "olmo2": (Olmo2Config, UNTIED),
    "granite": (GraniteConfig, TIED | GRANITE),
    "gpt2": (GPT2Config, {"n_positions": 128}),
}


def tiny_policy(**settings):
    """A policy as `oblrpo train` builds it, with heads of 32."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    return make_policy(PolicyConfig(model_args=sizes | settings.pop("model_args", {}), device="cpu", **settings))


def policy_of(family, dtype=torch.float32, **changes):
    """A policy of a family, with no gain or bias at its default."""
    kind, extra = FAMILIES[family]
    tokenizer = byte_tokenizer()
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 128,
        "initializer_range": 0.2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
    }  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(kind(**settings | extra | changes), attn_implementation="eager")
    model = model.to(dtype).eval()
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.2 * torch.randn_like(parameter)
    return Policy(model, tokenizer)


@torch.no_grad()
def update(policy, size=0.05):
    """Change every trained weight by a few percent."""
    for parameter in policy.parameters:
        parameter.mul_(1 + size * torch.randn_like(parameter))


@torch.no_grad()
def apart(policy, drawn, temperature=1.0):
    """Differences of the log-probabilities of policy and engine, of each token of the policy's own."""
    off_SC = policy.logps(drawn.sequences, temperature).token_logps_SC - drawn.sampler_logps_SC
    return off_SC[drawn.sequences.own_SC.bool()].abs()
