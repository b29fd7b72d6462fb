"""The gradient under known coefficients: the same as the ordinary tape's, and as autograd's, on every kind of model."""

import weakref

import pytest
import torch
from torch import nn

from oblrpo.scores import GroupTape, ScoreTape, UnsupportedModelError, chunked_logps, oracle
from oblrpo.scores import contributions as contributions_module
from tests.scores.models import VOCABULARY, gradients, logps, relative
from tests.scores.test_methods import G, packed
from tests.scores.zoo import FAMILIES


def worst(model, forward, groups=G, sequences=6, **ids):
    """Largest relative error of group norms and gradients, against the ordinary tape's."""
    coef_S = torch.randn(sequences, dtype=torch.float64)
    with ScoreTape(model) as tape:
        tape.record(forward(), **ids)
    expected_P = tape.accumulate(coef_S, groups)
    expected = gradients(model)
    model.zero_grad()
    with GroupTape(model) as tape:
        tape.record(forward(), **ids)
    found_P = tape.accumulate(coef_S, groups)
    found = gradients(model)
    model.zero_grad()
    assert found.keys() == expected.keys() != set()
    assert found_P.shape == expected_P.shape
    return max(relative(found_P, expected_P), *(relative(found[name], expected[name]) for name in expected))


@pytest.mark.parametrize("name", ["qwen3-tied", "llama-untied", "llama-tied-biased"])
def test_it_is_the_ordinary_tape_s_a_group_at_a_time(case, name, monkeypatch):
    monkeypatch.setattr(contributions_module, "CHUNK_ELEMENTS", 50)
    model, data = case(name)
    assert worst(model, lambda: logps(model, *data)) <= 1e-9


@pytest.mark.parametrize("name", FAMILIES)
def test_it_is_the_ordinary_tape_s_in_every_family(case, name):
    model, data = case(name, attention="eager")
    assert worst(model, lambda: logps(model, *data)) <= 1e-9


def test_it_is_loop_autograd_s(case):
    model, data = case("qwen3-tied")
    coef_S = torch.randn(6, dtype=torch.float64)
    with GroupTape(model) as tape:
        tape.record(logps(model, *data))
    found_P = tape.accumulate(coef_S, G)
    found = gradients(model)
    model.zero_grad()
    assert relative(found_P, oracle.accumulate(model, logps(model, *data), coef_S, G)) <= 1e-9
    assert max(relative(found[name], each) for name, each in gradients(model).items()) <= 1e-9


def test_in_float32_it_is_as_exact_as_float32(case):
    model, data = case("qwen3-tied", dtype=torch.float32)
    coef_S = torch.randn(6)
    with GroupTape(model) as tape:
        tape.record(logps(model, *data))
    found_P = tape.accumulate(coef_S, G)
    found = gradients(model)
    model.zero_grad()
    assert relative(found_P, oracle.accumulate(model, logps(model, *data), coef_S, G)) <= 1e-5
    assert max(relative(found[name], each) for name, each in gradients(model).items()) <= 1e-5


def test_groups_of_several_sizes(case):
    model, data = case("qwen3-tied", 7, 3, 6)
    assert worst(model, lambda: logps(model, *data), [3, 1, 1, 2], 7) <= 1e-9


@pytest.mark.parametrize("name", ["qwen3-untied-biased", "qwen3-moe-normalised"])
def test_activation_checkpointing(case, name):
    model, data = case(name)
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode only; no dropout here
    assert worst(model, lambda: logps(model, *data)) <= 1e-9


def test_packed_rows(case):
    model, _ = case("qwen3-untied-biased")
    sequence_BL, forward = packed()
    assert worst(model, lambda: forward(model), sequence_ids=sequence_BL) <= 1e-9


@pytest.mark.parametrize("configuration", ["qwen3-tied", "llama-untied"])
def test_a_head_in_chunks(case, configuration):
    model, (ids_ST, mask_ST, prompt, _) = case(configuration)

    def forward():
        hidden = model.model(input_ids=ids_ST, attention_mask=mask_ST, use_cache=False).last_hidden_state
        logp_ST = chunked_logps(model.lm_head, hidden[:, prompt - 1 : -1], ids_ST[:, prompt:], temperature=0.7)
        return (logp_ST * mask_ST[:, prompt:]).sum(1)

    assert worst(model, forward) <= 1e-9


def test_it_adds_up_over_micro_batches_and_to_what_was_there(case):
    model, (ids_ST, mask_ST, prompt, _) = case("qwen2-tied", 8)
    coef_S, tape = torch.randn(8, dtype=torch.float64), GroupTape(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    for start in range(0, 8, 4):
        rows = slice(start, start + 4)
        with tape:
            tape.record(logps(model, ids_ST[rows], mask_ST[rows], prompt))
            tape.accumulate(coef_S[rows], 2)  # inside, or after it
    found = gradients(model)
    model.zero_grad()
    (logps(model, ids_ST, mask_ST, prompt) * coef_S).sum().backward()
    for name, expected in gradients(model).items():
        torch.testing.assert_close(found[name] - 0.5, expected, rtol=1e-9, atol=1e-12)


def test_frozen_parameters_stay_without_a_gradient(case):
    model, data = case("qwen3-untied-biased")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    assert worst(model, lambda: logps(model, *data)) <= 1e-9
    with GroupTape(model) as tape:
        tape.record(logps(model, *data))
    tape.accumulate(torch.ones(6, dtype=torch.float64))
    assert all((p.grad is None) != p.requires_grad for p in model.parameters())


def test_what_is_refused(case):
    model, data = case("qwen2-tied")
    ones_S = torch.ones(6, dtype=torch.float64)
    tape = GroupTape(model)
    with pytest.raises(ValueError, match="record inside the `with`"):
        tape.record(logps(model, *data))
    with tape:
        logps_S = logps(model, *data)
        with pytest.raises(ValueError, match="shape"):
            tape.record(logps_S.sum())
        with pytest.raises(ValueError, match="differentiable"):
            tape.record(logps_S.detach())
        with pytest.raises(ValueError, match="call record"):
            tape.accumulate(ones_S)
        tape.record(logps_S)
        with pytest.raises(ValueError, match="record once in each `with`"):
            tape.record(logps(model, *data))
    for coef_S, groups in ((ones_S[:5], 1), (ones_S, 4), (ones_S, 0), (ones_S, [3, 2])):
        with pytest.raises(ValueError, match="do not fit 6 sequences"):
            tape.accumulate(coef_S, groups)
    assert all(p.grad is None for p in model.parameters())
    tape.accumulate(ones_S)
    with pytest.raises(ValueError, match="accumulate uses it up"):
        tape.accumulate(ones_S)
    with tape, pytest.raises(ValueError, match="nothing to record"):
        tape.record(torch.zeros(6, requires_grad=True))
    with tape:
        logps(model, *data)
        tape.record(torch.zeros(6, requires_grad=True))
    with pytest.raises(ValueError, match="nothing to accumulate"):
        tape.accumulate(torch.ones(6))


def test_what_is_recorded_is_let_go(case):
    model, data = case("qwen2-tied")
    ones_S = torch.ones(6, dtype=torch.float64)
    tape = GroupTape(model)
    for let_go in (tape.forget, lambda: tape.accumulate(ones_S), tape.__enter__):
        with tape:
            tape.record(logps_S := logps(model, *data))
        graph = weakref.ref(logps_S)
        del logps_S
        assert graph() is not None
        let_go()
        assert graph() is None
    tape.__exit__(None, None, None)


def test_what_hides_a_gradient_is_refused(case):
    model, data = case("qwen2-tied")
    with pytest.raises(UnsupportedModelError, match="another order than the rows"), GroupTape(model) as tape:
        tape.record(logps(model, *data).flip(0))

    class AroundTheModule(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return nn.functional.linear(self.one(x), self.two.weight).sum(1) + self.two(x).sum(1)

    around = AroundTheModule()
    with GroupTape(around, check_rows=False) as tape:
        tape.record(around(torch.randn(4, 3)))
    with pytest.raises(UnsupportedModelError, match=r"two\.weight is used other than by calling"):
        tape.accumulate(torch.ones(4))


def test_the_model_is_restored(case):
    model, data = case("qwen2-tied")
    before = {name: id(p) for name, p in model.named_parameters()}
    with GroupTape(model) as tape:
        tape.record(logps(model, *data))
    tape.accumulate(torch.ones(6, dtype=torch.float64))
    with pytest.raises(IndexError), GroupTape(model):
        logps(model, data[0] + VOCABULARY, *data[1:])
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
