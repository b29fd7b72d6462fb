"""Every family of the zoo against loop autograd: norms, group norms, and gradients."""

import pytest
import torch

from oblrpo.scores import ScoreTape, UnsupportedModelError
from tests.scores.models import compare, logps
from tests.scores.zoo import EXPERTS, ways

EXPERTS_IMPLEMENTATIONS = ("eager", "batched_mm", "grouped_mm")


@pytest.mark.parametrize(("name", "attention", "experts"), ways("eager", "batched_mm"))  # grouped_mm: no float64
def test_float64_agrees_with_loop_autograd(case, name, attention, experts):
    model, data = case(name, attention=attention, experts=experts)
    assert max(compare(model, data, torch.randn(6, dtype=torch.float64), group_size=3)) <= 1e-10


@pytest.mark.parametrize(("name", "attention", "experts"), ways(*EXPERTS_IMPLEMENTATIONS))
def test_float32_agrees_with_loop_autograd(case, name, attention, experts):
    model, data = case(name, dtype=torch.float32, attention=attention, experts=experts)
    assert max(compare(model, data, torch.randn(6), group_size=2)) <= 1e-5


@pytest.mark.parametrize("shape", [(1, 3, 4), (7, 3, 4)], ids=["one row", "as many rows as tokens"])
@pytest.mark.parametrize("name", ["gpt2-tied", "qwen2-moe-shared", "mixtral-untied"])
def test_the_batch_axis_is_not_guessed_from_its_length(case, name, shape):
    """Positions come as (1, T) and tokens as (S T, d), whatever S and T are."""
    model, data = case(name, *shape)
    coef_S = torch.randn(shape[0], dtype=torch.float64)
    assert max(compare(model, data, coef_S, group_size=1)) <= 1e-10


@pytest.mark.parametrize("only", [True, False])
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("qwen3-moe-normalised", "mlp.gate.weight"),
        ("qwen3-moe-normalised", "experts.down_proj"),
        ("mixtral-untied", "experts.gate_up_proj"),
        ("qwen2-moe-shared", "shared_expert"),
        ("gpt2-tied", "wpe"),
        ("gpt2-untied", "bias"),
        ("gpt2-untied", "ln_1.weight"),
        ("phi-tied-qk-norm", "layernorm"),
        ("gemma3-tied", "embed_tokens"),
        ("gemma2-tied", "norm"),
    ],
)
def test_any_part_of_a_model_can_be_frozen(case, name, pattern, only):
    model, data = case(name, attention="eager")
    for key, parameter in model.named_parameters():
        parameter.requires_grad_((pattern in key) is only)
    assert max(compare(model, data, torch.randn(6, dtype=torch.float64), group_size=3)) <= 1e-10


@pytest.mark.parametrize("gain", [0.0, 1e-9])
@pytest.mark.parametrize("name", ["gemma2-tied", "gemma3-tied", "gpt2-tied", "olmo2-untied", "qwen3-moe-normalised"])
def test_a_gain_near_zero_loses_no_digits(case, name, gain):
    """The normalised input cannot be had as (y - b) / w then."""
    model, data = case(name, attention="eager")
    gains = [p for key, p in model.named_parameters() if key.endswith(("norm.weight", "ln_1.weight", "ln_f.weight"))]
    assert len(gains) > 2
    with torch.no_grad():
        for parameter in gains:
            parameter[::3] = gain - 1 if name.startswith("gemma") else gain
    assert max(compare(model, data, torch.randn(6, dtype=torch.float64), group_size=2)) <= 1e-10


@pytest.mark.parametrize(
    ("name", "experts"),
    [(name, each) for name in ("qwen3-moe-normalised", "mixtral-untied") for each in EXPERTS_IMPLEMENTATIONS]
    + [("gemma3-tied", "eager"), ("gpt2-tied", "eager")],
)
def test_bfloat16_agrees_as_far_as_it_goes(case, name, experts):
    """Loop autograd rounds every score to 8 bits, and every implementation of the experts rounds differently.

    All experts are chosen: where two are nearly tied, a batch and a loop may round to different ones (with AMX, say).
    """
    every = {"qwen3-moe-normalised": 5, "mixtral-untied": 4}
    changes = {"num_experts_per_tok": every[name]} if name in every else {}
    model, data = case(name, dtype=torch.bfloat16, experts=experts, **changes)
    assert max(compare(model, data, torch.ones(6, dtype=torch.bfloat16), group_size=3)) <= 0.1


@pytest.mark.parametrize("name", ["qwen3-moe-normalised", "gemma3-tied", "gpt2-tied"])
def test_non_reentrant_checkpointing_is_exact(case, name):
    model, data = case(name)
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()  # transformers checkpoints in training mode only; no dropout here
    assert max(compare(model, data, torch.randn(6, dtype=torch.float64), group_size=2)) <= 1e-10


def test_clipped_norms_are_refused(case):
    """OLMoE's `clip_qkv` clamps in place what a norm returned and its rule needs."""
    model, data = case("olmoe-untied", dtype=torch.float32, clip_qkv=0.5)
    with pytest.raises(UnsupportedModelError, match=r"_norm: .* changed in place"), ScoreTape(model) as tape:
        tape.record(logps(model, *data))


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
@pytest.mark.parametrize("name", EXPERTS)
def test_recorded_experts_compute_what_the_model_computes(case, name, experts):
    model, data = case(name, experts=experts)
    expected = logps(model, *data)
    with ScoreTape(model):
        torch.testing.assert_close(logps(model, *data), expected, rtol=1e-12, atol=0)
    assert not any("forward" in vars(module) for module in model.modules())
