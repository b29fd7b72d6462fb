"""Tiny models of the families that are covered, with random shapes, and their sequence log-probabilities."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from oblrpo.scores import ScoreTape, oracle

VOCABULARY = 23
PAD = 2

# family, tied head, extra config: bias or not, grouped-query attention or not
CONFIGURATIONS = {
    "qwen3-tied-gqa": (Qwen3Config, True, {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6}),
    "qwen3-untied-bias": (Qwen3Config, False, {"attention_bias": True, "num_key_value_heads": 4}),
    "qwen2-tied": (Qwen2Config, True, {"num_key_value_heads": 1}),
    "llama-untied-gqa": (LlamaConfig, False, {"num_key_value_heads": 2}),
    "llama-tied-bias": (LlamaConfig, True, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
}
MODELS = {Qwen3Config: Qwen3ForCausalLM, Qwen2Config: Qwen2ForCausalLM, LlamaConfig: LlamaForCausalLM}


def build(name: str, dtype: torch.dtype = torch.float64, attention: str = "sdpa") -> torch.nn.Module:
    kind, tied, extra = CONFIGURATIONS[name]
    settings = {
        "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
        "num_attention_heads": 4, "tie_word_embeddings": tied, "pad_token_id": PAD,
    } | extra  # fmt: skip
    model = MODELS[kind](kind(**settings, attn_implementation=attention)).to(dtype).eval()
    with torch.no_grad():  # gains other than 1 and biases other than 0, or their rules would hardly be tested
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def batch(sequences: int = 6, prompt: int = 4, completion: int = 7):
    """Left-padded prompts, completions of random length; the padding id also occurs as a sampled token."""
    ids_ST = torch.randint(VOCABULARY, (sequences, prompt + completion))
    ids_ST[:, prompt + 1] = PAD
    mask_ST = torch.ones_like(ids_ST)
    length_S = torch.randint(2, completion + 1, (sequences,))
    for s in range(sequences):
        mask_ST[s, : s % prompt] = 0
        mask_ST[s, prompt + int(length_S[s]) :] = 0
    return ids_ST, mask_ST, prompt


def logps(model, ids_ST, mask_ST, prompt, positions=True):
    """Log-probability of each completion, (S,); without `positions` the model counts them itself, padding included."""
    position_ids = (mask_ST.cumsum(1) - 1).clamp(min=0) if positions else None
    logits = model(input_ids=ids_ST, attention_mask=mask_ST, position_ids=position_ids, use_cache=False).logits
    logp_ST = logits[:, prompt - 1 : -1].log_softmax(-1).gather(2, ids_ST[:, prompt:, None])[..., 0]
    return (logp_ST * mask_ST[:, prompt:]).sum(1)


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def relative(got, expected):
    return ((got - expected).norm() / expected.norm()).item()


def compare(model, data, coef_S, group_size):
    """Largest relative errors of norms, group norms and gradients against loop autograd."""
    with ScoreTape(model) as tape:
        tape.record(logps(model, *data))
    norm2_S = tape.norm2()
    group_norm2 = tape.accumulate(coef_S, group_size=group_size)
    ours = gradients(model)
    model.zero_grad()
    expected_norm2 = oracle.norm2(model, logps(model, *data))
    expected_group = oracle.accumulate(model, logps(model, *data), coef_S, group_size)
    expected = gradients(model)
    model.zero_grad()
    assert set(ours) == set(expected) == {name for name, p in model.named_parameters() if p.requires_grad}
    return (
        ((norm2_S - expected_norm2).abs() / expected_norm2).max().item(),
        ((group_norm2 - expected_group).abs() / expected_group).max().item(),
        max(relative(ours[name], expected[name]) for name in ours),
    )
