"""Batches for the tiny models of `zoo`, their log-probabilities, and a comparison with loop autograd."""

import torch

from oblrpo.scores import ScoreTape, oracle

VOCABULARY = 23
PAD = 2


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
