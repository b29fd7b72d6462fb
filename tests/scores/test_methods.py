"""Every way of holding gradients, against loop autograd; packed rows, checkpointing and chunked heads under each."""

import pytest
import torch

from oblrpo.scores import ScoreTape, UnsupportedModelError, chunked_logps, oracle
from oblrpo.scores import contributions as contributions_module
from tests.scores.models import VOCABULARY, gradients, logps, relative

EXACT = {
    "auto": {},
    "gram": {"method": "gram"},
    "instantiate": {"method": "instantiate"},
}
G = 3


def errors(model, forward, keywords, sequences=6):
    """Relative errors of norms, group norms and gradients of one method."""
    coef_S = torch.randn(sequences, dtype=torch.float64)
    with ScoreTape(model, **keywords) as tape:
        tape.record(forward())
    norm2_S = tape.norm2()
    assert all(p.grad is None for p in model.parameters())
    group_norm2 = tape.accumulate(coef_S, group_size=G)
    ours = gradients(model)
    model.zero_grad()
    expected_norm2 = oracle.norm2(model, forward())
    expected_group = oracle.accumulate(model, forward(), coef_S, G)
    expected = gradients(model)
    model.zero_grad()
    assert set(ours) == set(expected)
    return (
        relative(norm2_S, expected_norm2),
        relative(group_norm2, expected_group),
        *(relative(ours[name], expected[name]) for name in ours),
    )


@pytest.mark.parametrize("chunk", [50, 1 << 22])
@pytest.mark.parametrize("tokens", [(3, 2), (6, 40)])
@pytest.mark.parametrize("name", EXACT)
def test_every_exact_method_is_exact(case, name, tokens, chunk, monkeypatch):
    monkeypatch.setattr(contributions_module, "CHUNK_ELEMENTS", chunk)
    model, data = case("qwen3-tied", 6, *tokens)
    assert max(errors(model, lambda: logps(model, *data), EXACT[name])) <= 1e-10


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("family", ["qwen3-moe-normalised", "gpt2-untied"])
def test_every_exact_method_is_exact_for_experts_and_transposed_weights(case, name, family):
    model, data = case(family)
    assert max(errors(model, lambda: logps(model, *data), EXACT[name])) <= 1e-10


@pytest.mark.parametrize("name", EXACT)
def test_every_exact_method_under_activation_checkpointing(case, name):
    for family in ("qwen3-untied-biased", "qwen3-moe-normalised"):
        model, data = case(family)
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only; no dropout here
        assert max(errors(model, lambda model=model, data=data: logps(model, *data), EXACT[name])) <= 1e-10


def test_reentrant_checkpointing_is_refused(case):
    model, data = case("qwen2-tied")
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.train()
    with pytest.raises(UnsupportedModelError, match="reentrant"):  # noqa: SIM117
        with ScoreTape(model) as tape:
            tape.record(logps(model, *data))


def packed(sequences=6):
    """Sequences of various lengths in two rows, with their own positions; ids -1 fill the rows."""
    lengths_S = [5, 9, 3, 7, 4, 6]
    L = 20
    ids_BL = torch.randint(VOCABULARY, (2, L))
    sequence_BL, position_BL = torch.full((2, L), -1), torch.zeros(2, L, dtype=torch.long)
    for row, members in enumerate([(0, 1, 2), (3, 4, 5)]):
        start = 0
        for s in members:
            sequence_BL[row, start : start + lengths_S[s]] = s
            position_BL[row, start : start + lengths_S[s]] = torch.arange(lengths_S[s])
            start += lengths_S[s]
    # attention: causal, within a sequence; a filler sees itself only
    same_BLL = (sequence_BL[:, :, None] == sequence_BL[:, None, :]) & (sequence_BL >= 0)[:, :, None]
    allowed = (same_BLL & torch.ones(L, L, dtype=torch.bool).tril()) | torch.eye(L, dtype=torch.bool)
    bias_B1LL = torch.zeros(2, 1, L, L, dtype=torch.float64).masked_fill(~allowed[:, None], -1e30)

    def forward(model):
        logits = model(input_ids=ids_BL, attention_mask=bias_B1LL, position_ids=position_BL, use_cache=False).logits
        logp = logits[:, :-1].log_softmax(-1).gather(2, ids_BL[:, 1:, None])[..., 0]
        inside = (sequence_BL[:, 1:] == sequence_BL[:, :-1]) & (sequence_BL[:, 1:] >= 0)
        owner = sequence_BL[:, 1:].clamp(min=0)
        return logp.new_zeros(sequences).index_add(0, owner.flatten(), (logp * inside).flatten())

    return sequence_BL, forward


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("family", ["qwen3-untied-biased", "qwen3-moe-normalised"])
def test_packed_rows(case, name, family):
    model, _ = case(family)
    sequence_BL, forward = packed()
    coef_S = torch.randn(6, dtype=torch.float64)
    with ScoreTape(model, **EXACT[name]) as tape:
        tape.record(forward(model), sequence_ids=sequence_BL)
    norm2_S, group_norm2 = tape.norm2(), tape.accumulate(coef_S, G)
    ours = gradients(model)
    model.zero_grad()
    assert relative(norm2_S, oracle.norm2(model, forward(model))) <= 1e-10
    assert relative(group_norm2, oracle.accumulate(model, forward(model), coef_S, G)) <= 1e-10
    expected = gradients(model)
    assert max(relative(ours[key], expected[key]) for key in expected) <= 1e-10


def test_packed_rows_that_do_not_fit_are_refused(case):
    model, _ = case("qwen2-tied")
    sequence_BL, forward = packed()
    for ids, match in ((sequence_BL[:, :-1], "packed rows of shape"), (sequence_BL + 3, "sequence ids up to 8")):
        with pytest.raises((UnsupportedModelError, ValueError), match=match):  # noqa: SIM117
            with ScoreTape(model) as tape:
                tape.record(forward(model), sequence_ids=ids)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("configuration", ["qwen3-tied", "llama-untied"])
def test_a_head_called_on_chunks_of_tokens(case, name, configuration):
    model, (ids_ST, mask_ST, prompt, _) = case(configuration)

    def forward():
        hidden = model.model(input_ids=ids_ST, attention_mask=mask_ST, use_cache=False).last_hidden_state
        pieces = [model.lm_head(piece) for piece in hidden[:, prompt - 1 : -1].split(3, 1)]
        logp_ST = torch.cat(pieces, 1).log_softmax(-1).gather(2, ids_ST[:, prompt:, None])[..., 0]
        return (logp_ST * mask_ST[:, prompt:]).sum(1)

    assert max(errors(model, forward, EXACT[name])) <= 1e-10


@pytest.mark.parametrize("chunk", [1, 500, 1 << 22])
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("configuration", ["qwen3-tied", "llama-tied-biased", "llama-untied"])
def test_chunked_logps(case, name, configuration, chunk, monkeypatch):
    monkeypatch.setattr(contributions_module, "CHUNK_ELEMENTS", chunk)
    model, (ids_ST, mask_ST, prompt, _) = case(configuration)
    if configuration == "llama-untied":
        model.lm_head = torch.nn.Linear(16, VOCABULARY, bias=True, dtype=torch.float64)

    def hidden():
        return model.model(input_ids=ids_ST, attention_mask=mask_ST, use_cache=False).last_hidden_state

    def forward():
        logp_ST = chunked_logps(model.lm_head, hidden()[:, prompt - 1 : -1], ids_ST[:, prompt:], temperature=0.7)
        return (logp_ST * mask_ST[:, prompt:]).sum(1)

    logits = model.lm_head(hidden()[:, prompt - 1 : -1]) / 0.7
    reference_ST = logits.log_softmax(-1).gather(2, ids_ST[:, prompt:, None])[..., 0]
    plain = (reference_ST * mask_ST[:, prompt:]).sum(1)
    torch.testing.assert_close(forward(), plain, rtol=1e-12, atol=0)
    forward().sum().backward()
    without_tape = gradients(model)
    model.zero_grad()
    plain.sum().backward()
    expected = gradients(model)
    model.zero_grad()
    assert max(relative(without_tape[key], expected[key]) for key in expected) <= 1e-10
    assert max(errors(model, forward, EXACT[name])) <= 1e-10


def test_chunked_logps_wants_a_linear_head():
    with pytest.raises(TypeError, match="Conv1d"):
        chunked_logps(torch.nn.Conv1d(1, 1, 1), torch.ones(1, 1, 1), torch.zeros(1, 1, dtype=torch.long))


def test_an_unknown_method_is_refused(case):
    model, _ = case("qwen2-tied")
    with pytest.raises(ValueError, match="no method 'exact'; there are auto"):
        ScoreTape(model, "exact")


def test_a_forward_that_somebody_replaced_is_refused_and_left(case):
    model, _ = case("qwen3-moe-normalised")
    experts = model.model.layers[1].mlp.experts
    own = experts.forward
    experts.forward = lambda *args: own(*args)
    with (
        pytest.raises(UnsupportedModelError, match=r"layers.1.mlp.experts: its forward was replaced"),
        ScoreTape(model),
    ):
        pass
    assert "forward" in vars(experts)
    assert not any(vars(module).get("forward") for module in model.modules() if module is not experts)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
