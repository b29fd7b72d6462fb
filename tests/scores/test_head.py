"""The head in chunks: its statistics, and its derivatives with probabilities kept and made again."""

import pytest
import torch

from oblrpo.scores import contributions, logit_norm2, token_logps

V = 11


@pytest.mark.parametrize("width", [4, 16])  # 15 tokens: probabilities are made again, and kept, where chunks are small
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_statistics_and_derivatives(width, temperature, chunk, monkeypatch):
    monkeypatch.setattr(contributions, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    head = torch.nn.Linear(width, V, dtype=torch.float64)
    hidden = torch.randn(3, 5, width, dtype=torch.float64, requires_grad=True)
    ids_ST = torch.randint(V, (3, 5))
    found = token_logps(head, hidden, ids_ST, temperature)
    logits = head(hidden) / temperature
    logp_STV = logits.log_softmax(-1)
    logp_ST = logp_STV.gather(2, ids_ST[..., None])[..., 0]
    torch.testing.assert_close(found.logp_ST, logp_ST)
    torch.testing.assert_close(found.entropy_ST, -(logp_STV.exp() * logp_STV).sum(-1))
    torch.testing.assert_close(found.logit_norm2_ST, logit_norm2(logits, ids_ST))
    assert not found.entropy_ST.requires_grad
    leaves = [hidden, *head.parameters()]
    ours = torch.autograd.grad(found.logp_ST.square().sum(), leaves)
    torch.testing.assert_close(ours, torch.autograd.grad(logp_ST.square().sum(), leaves))

    def of(hidden):
        return token_logps(head, hidden, ids_ST, temperature).logp_ST

    assert torch.autograd.gradgradcheck(of, (hidden,)), "the probe differentiates twice"


@pytest.mark.parametrize(("width", "temporary", "kept"), [(14, 15 * V - 1, False), (15, 1, True), (14, 15 * V, True)])
def test_probabilities_are_kept_while_weights_or_a_temporary_are_as_many(monkeypatch, width, temporary, kept):
    monkeypatch.setattr("oblrpo.scores.contributions.CHUNK_ELEMENTS", temporary)
    head = torch.nn.Linear(width, V)
    hidden = torch.randn(3, 5, width, requires_grad=True)
    saved = token_logps(head, hidden, torch.zeros(3, 5, dtype=torch.long)).logp_ST.grad_fn.saved_tensors
    assert any(each is not None and each.shape[-1] == V and each.ndim == 3 for each in saved) == kept
