"""Every rival against loop autograd: what is compared in the table is the same computation."""

import dataclasses

import pytest
import torch

from lab.bench import opacus_ghost, rivals
from lab.bench.rivals import RIVALS
from lab.bench.workload import SHAPES, Shape, build
from oblrpo.scores import oracle

TINY = {
    tied: Shape(
        "tiny", sequences=6, tokens=7, group_size=2, hidden=16, intermediate=20, layers=2, heads=4, kv_heads=2,
        head_dim=6, vocabulary=23, tied=tied,
    )
    for tied in (True, False)
}  # fmt: skip


def run(name, workload):
    reason = RIVALS[name].missing()
    if reason:
        pytest.skip(reason)
    workload.model.zero_grad()
    norm2_S = RIVALS[name](workload)
    gradients = [p.grad for p in workload.parameters]
    workload.model.zero_grad()
    return norm2_S, gradients


def expected(workload):
    workload.model.zero_grad()
    norm2_S = oracle.norm2(workload.model, workload.logps())
    oracle.accumulate(workload.model, workload.logps(), workload.coef_S)
    gradients = [p.grad for p in workload.parameters]
    workload.model.zero_grad()
    return norm2_S, gradients


def assert_agrees(got, exact, rtol):
    norm2_S, gradients = got
    if norm2_S is not None:
        torch.testing.assert_close(norm2_S, exact[0], rtol=rtol, atol=0)
    for ours, theirs in zip(gradients, exact[1], strict=True):
        assert (ours - theirs).norm() <= rtol * theirs.norm()


# Qwen3's RMSNorm computes in float32 whatever the type of the model.
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-5), (torch.float32, 1e-4)])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("name", RIVALS)
def test_norms_and_gradient_agree_with_loop_autograd(name, tied, dtype, rtol):
    workload = build(TINY[tied], dtype=dtype, seed=1)
    got = run(name, workload)
    assert (got[0] is None) == (name == "plain")
    assert_agrees(got, expected(workload), rtol)


@pytest.mark.parametrize("name", RIVALS)
def test_a_rival_leaves_the_model_as_it_was(name):
    """Hooks, attention, mode, classes, attributes: what comes next in the round must not pay for it."""
    workload = build(TINY[True], seed=2)
    model = workload.model

    def state():
        return {
            "mode": [module.training for module in model.modules()],
            "classes": [type(module) for module in model.modules()],
            "attention": model.config._attn_implementation,
            "hooks": [
                len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._backward_hooks)
                for module in model.modules()
            ],
            "attributes": [sorted(vars(module)) for module in model.modules()],
            "parameters": [sorted(vars(p)) for p in model.parameters()],
            "requires_grad": [p.requires_grad for p in model.parameters()],
        }

    before = state()
    weights = [p.detach().clone() for p in model.parameters()]
    run(name, workload)
    assert state() == before
    for p, weight in zip(model.parameters(), weights, strict=True):
        assert torch.equal(p, weight)


def test_running_out_of_a_rival_undoes_its_setup():
    pytest.importorskip("opacus")
    workload = build(TINY[True], seed=2)
    with pytest.raises(KeyError), RIVALS["Opacus ghost norms"].prepared(workload):
        raise KeyError
    assert not workload.model.training
    assert type(workload.model.lm_head) is torch.nn.Linear


def test_vmap_in_blocks_of_groups(monkeypatch):
    workload = build(TINY[True], seed=3)
    exact = expected(workload)
    size = sum(p.numel() for p in workload.parameters)
    for elements in (1, 2 * workload.group_size * size):  # a group at a time; two of the three, then the third
        monkeypatch.setattr(rivals, "VMAP_ELEMENTS", elements)
        assert_agrees(run("torch.func vmap", workload), exact, 1e-4)


@pytest.mark.parametrize("name", RIVALS)
def test_bfloat16_norms_are_not_rounded_to_it(name):
    workload = build(TINY[False], dtype=torch.bfloat16, seed=4)
    norm2_S, gradients = run(name, workload)
    assert all(g.dtype == torch.bfloat16 for g in gradients)
    if norm2_S is not None and not name.startswith("Opacus"):  # Opacus takes norms in the type of the gradients
        assert norm2_S.dtype == torch.float32
        assert (norm2_S != norm2_S.bfloat16()).any()


def test_opacus_itself_refuses_a_tied_head():
    """Why `opacus_ghost.hooked` keeps the tied weight out of its ghost rules."""
    grad_sample = pytest.importorskip("opacus.grad_sample")
    workload = build(TINY[True], seed=5)
    hooks = grad_sample.GradSampleModuleFastGradientClipping(workload.model, loss_reduction="sum")
    workload.model.train()
    with pytest.raises(NotImplementedError, match="Parameter tying is not supported"):
        workload.logps()
    hooks.to_standard_module()


def test_without_opacus_its_rows_say_so(monkeypatch):
    monkeypatch.setattr(opacus_ghost.importlib.util, "find_spec", lambda name: None)
    assert [name for name, rival in RIVALS.items() if rival.missing()] == [
        "Opacus ghost norms",
        "Opacus fast gradient clipping",
    ]
    assert "not installed" in RIVALS["Opacus ghost norms"].missing()


def test_the_workload_is_drawn_from_its_seed():
    first, again, other = (build(TINY[True], seed=seed) for seed in (6, 6, 7))
    assert torch.equal(first.ids_ST, again.ids_ST)
    assert torch.equal(first.coef_S, again.coef_S)
    assert torch.equal(first.model.lm_head.weight, again.model.lm_head.weight)
    assert not torch.equal(first.ids_ST, other.ids_ST)


def test_slices_and_coefficients_of_the_workload():
    workload = build(TINY[True], dtype=torch.float64, seed=8)
    assert workload.ids_ST.shape == (6, 7)
    torch.testing.assert_close(workload.logps_of(slice(2, 5)), workload.logps()[2:5])
    torch.testing.assert_close(workload.coef_S.view(3, 2) + workload.baseline_P[:, None], workload.rewards_S.view(3, 2))
    with pytest.raises(ValueError, match="no whole groups"):
        build(dataclasses.replace(TINY[True], group_size=4))


def test_a_log_probability_by_hand():
    workload = build(TINY[False], dtype=torch.float64, seed=9)
    logp_TV = workload.model(workload.ids_ST[:1]).logits[0].log_softmax(-1)
    by_hand = sum(logp_TV[t - 1, workload.ids_ST[0, t]] for t in range(1, 7))
    torch.testing.assert_close(workload.logps()[0], by_hand)


@pytest.mark.parametrize(("name", "millions"), [("short", 0.31), ("medium", 19.7), ("long", 22.8)])
def test_sizes_of_the_shapes(name, millions):
    with torch.device("meta"):
        workload = build(SHAPES[name], device="meta")
    assert sum(p.numel() for p in workload.parameters) / 1e6 == pytest.approx(millions, abs=0.05)
