"""The head in chunks: its statistics, and its derivatives with probabilities kept and made again."""

import pytest
import torch

from oblrpo.memory import peak_bytes
from oblrpo.scores import ScoreTape, contributions, logit_norm2, token_logps
from oblrpo.scores import head as head_of_scores

V = 11


@pytest.mark.parametrize("width", [4, 16])  # 15 tokens: probabilities are made again, and kept, where chunks are small
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk", [1, 1 << 22])
def test_statistics_and_derivatives(width, temperature, chunk, monkeypatch):
    monkeypatch.setattr(contributions, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(head_of_scores, "LEAST_TOKENS", 4)  # or all of this would be one piece
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
    expected = torch.autograd.grad(logp_ST.square().sum(), leaves)
    torch.testing.assert_close(ours, expected)
    head.requires_grad_(False)
    frozen = token_logps(head, hidden, ids_ST, temperature).logp_ST
    torch.testing.assert_close(torch.autograd.grad(frozen.square().sum(), hidden)[0], expected[0])

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


TOKENS, WORDS, WIDTH = 1024, 4096, 16
AT_ONCE = 64 * WORDS * 4
"""Bytes of the logits of as many tokens as are together here."""


@pytest.fixture
def few_at_once(monkeypatch):
    monkeypatch.setattr(contributions, "CHUNK_ELEMENTS", 1)
    monkeypatch.setattr(head_of_scores, "LEAST_TOKENS", 64)


@pytest.mark.parametrize("trained", [True, False])
def test_logits_of_one_long_row_are_never_there_at_once(trained, few_at_once):
    head, hidden = torch.nn.Linear(WIDTH, WORDS), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    head.requires_grad_(trained)
    ids_ST = torch.randint(WORDS, (1, TOKENS))

    def step():
        token_logps(head, hidden, ids_ST).logp_ST.sum().backward()

    assert peak_bytes(step, "cpu") < 5 * AT_ONCE < TOKENS * WORDS * 4


def test_a_frozen_head_keeps_no_probabilities():
    head, hidden = torch.nn.Linear(64, WORDS).requires_grad_(False), torch.randn(4, 8, 64, requires_grad=True)
    saved = token_logps(head, hidden, torch.zeros(4, 8, dtype=torch.long)).logp_ST.grad_fn.saved_tensors
    assert not any(each is not None and each.shape == (4, 8, WORDS) for each in saved)


@pytest.mark.parametrize("method", ["auto", "instantiate", "streamed"])
def test_a_head_s_norms_take_no_gradient_a_row(method, few_at_once):
    """Two rows of 1,024 tokens, more than the width: the gradients are multiplied out, a few rows at a time."""
    head, hidden = torch.nn.Linear(256, WORDS, bias=False), torch.randn(2, TOKENS, 256)
    model, ids_ST = torch.nn.Sequential(head), torch.randint(WORDS, (2, TOKENS))
    tape = ScoreTape(model, method, check_rows=False)
    found = []

    def norms_of():
        with tape:
            tape.record(token_logps(head, hidden, ids_ST).logp_ST.sum(1))
        found.append(tape.norm2())
        tape.forget()

    assert peak_bytes(norms_of, "cpu") < 0.8 * head.weight.nbytes + 5 * AT_ONCE
    for row in range(2):
        logp_ST = token_logps(head, hidden[row : row + 1], ids_ST[row : row + 1]).logp_ST
        (grad,) = torch.autograd.grad(logp_ST.sum(), head.weight)
        torch.testing.assert_close(found[0][row], grad.square().sum(), rtol=1e-5, atol=0)


def test_autograd_adds_to_the_head_s_gradient_of_a_tied_weight():
    """The lookup's gradient is as large; a third that is their sum would be, too."""
    embedding = torch.nn.Embedding(WORDS, 256)
    head = torch.nn.Linear(256, WORDS, bias=False)
    head.weight = embedding.weight
    ids_ST = torch.randint(WORDS, (2, 4))
    embedding.weight.grad = torch.zeros_like(embedding.weight)

    def step():
        token_logps(head, embedding(ids_ST), ids_ST).logp_ST.sum().backward()

    assert peak_bytes(step, "cpu") < 2.5 * embedding.weight.nbytes
