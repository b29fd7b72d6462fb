"""What would give a wrong number without a word: each is computed rightly or refused by name."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode

from oblrpo.scores import ScoreTape, UnsupportedModelError, chunked_logps, oracle
from oblrpo.scores import contributions as contributions_module
from tests.scores.models import gradients, logps, relative
from tests.scores.test_methods import packed


class OddTopKRouter(nn.Module):
    """Uses its weight in one way or another."""

    def __init__(self, way):
        super().__init__()
        self.weight, self.way = nn.Parameter(torch.randn(4, 6, dtype=torch.float64)), way
        self.bias = nn.Parameter(torch.randn(4, dtype=torch.float64), requires_grad=False)

    def forward(self, x):
        assert self.weight.shape == (4, 6)
        assert self.weight.dtype == torch.float64
        if self.way == "chunks":
            return torch.cat([linear(x, piece) for piece in self.weight.chunk(2)], -1)
        if self.way == "a list":
            return linear(x, torch.cat([self.weight[:2] * 1, self.weight[2:]]))
        if self.way == "joined":
            return x @ torch.cat([self.weight, self.weight]).T[:, :4]
        return linear(x, self.weight, self.bias)  # a frozen bias does not count


@pytest.mark.parametrize("way", ["chunks", "a list", "joined", "with a frozen bias"])
def test_a_routers_weight_may_be_used_in_pieces(way):
    torch.manual_seed(40)
    model = nn.Sequential(nn.Embedding(5, 6).double(), OddTopKRouter(way))
    ids_ST = torch.randint(5, (3, 4))

    def forward():
        return model(ids_ST).tanh().sum((1, 2))

    with ScoreTape(model) as tape:
        tape.record(forward())
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, forward()), rtol=1e-12, atol=0)


@pytest.mark.parametrize("method", ["auto", "gram"])
def test_a_gradient_of_other_strides_is_added_to(case, method):
    model, data = case("qwen3-tied")
    logps(model, *data).sum().backward()
    expected = {name: 2 * grad for name, grad in gradients(model).items()}
    for p in model.parameters():
        if p.ndim == 2:
            p.grad = p.grad.T.contiguous().T
    with ScoreTape(model, method) as tape:
        tape.record(logps(model, *data))
    tape.accumulate(torch.ones(6, dtype=torch.float64), 2)
    assert max(relative(grad, expected[name]) for name, grad in gradients(model).items()) <= 1e-10


class Largest(TorchDispatchMode):
    """The most elements any tensor had."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("method", ["auto", "gram", "instantiate"])
def test_chunked_logps_never_holds_the_logits_of_a_group(method, monkeypatch):
    torch.manual_seed(42)
    G, T, V, C = 6, 40, 500, 4
    monkeypatch.setattr(contributions_module, "CHUNK_ELEMENTS", T * V + V * C)  # one sequence's
    monkeypatch.setattr("oblrpo.scores.head.LEAST_TOKENS", 1)
    monkeypatch.setattr("oblrpo.scores.gram.CACHED_ELEMENTS", T * V + V * C)
    model = nn.Sequential(nn.Embedding(V, C), nn.Linear(C, V, bias=False)).double()
    ids_ST = torch.randint(V, (G, T))
    most = Largest()
    with most:
        tape = ScoreTape(model, method)
        with tape:
            logp_ST = chunked_logps(model[1], model[0](ids_ST), ids_ST)
            tape.record(logp_ST.sum(1))
        norm2_S = tape.norm2()
        tape.accumulate(torch.ones(G, dtype=torch.float64), G)
    assert most.elements <= T * V + V * C
    ours = gradients(model)
    model.zero_grad()
    plain_S = model(ids_ST).log_softmax(-1).gather(2, ids_ST[..., None]).sum((1, 2))
    torch.testing.assert_close(norm2_S, oracle.norm2(model, plain_S), rtol=1e-10, atol=0)
    plain_S = model(ids_ST).log_softmax(-1).gather(2, ids_ST[..., None]).sum((1, 2))
    plain_S.sum().backward()
    assert max(relative(ours[name], grad) for name, grad in gradients(model).items()) <= 1e-10


def test_a_head_changed_before_its_logits_are_made_again_is_refused():
    torch.manual_seed(43)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    ids_ST = torch.randint(9, (3, 5))
    with ScoreTape(model, "gram") as tape:
        tape.record(chunked_logps(model[1], model[0](ids_ST), ids_ST).sum(1))
    with torch.no_grad():
        model[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="weight was changed"):
        tape.accumulate(torch.ones(3))


def test_chunked_logps_checks_shapes():
    head = nn.Linear(4, 9)
    for hidden, target in (((3, 4), (3,)), ((3, 5, 4), (3, 4)), ((3, 5, 3), (3, 5))):
        with pytest.raises(ValueError, match="do not fit"):
            chunked_logps(head, torch.zeros(hidden), torch.zeros(target, dtype=torch.long))


def test_autocast_around_the_tape_shortens_no_product(case):
    model, data = case("qwen3-tied", dtype=torch.float32)
    norms = []
    for enabled in (False, True):
        model.zero_grad()
        logps_S = None
        with ScoreTape(model, "gram") as tape:
            logps_S = logps(model, *data)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                tape.record(logps_S)
                norms.append(tape.norm2())
                group_norm2_P = tape.accumulate(torch.ones(6), 2)
        norms.append(torch.cat([group_norm2_P, *(grad.flatten() for grad in gradients(model).values())]))
    torch.testing.assert_close(norms[0], norms[2], rtol=0, atol=0)
    torch.testing.assert_close(norms[1], norms[3], rtol=0, atol=0)


def test_chunked_logps_multiplies_as_autocast_says():
    """The logits of the forward and those made again are the products that the head itself would take."""
    torch.manual_seed(45)
    head, ids_ST = nn.Linear(8, 11), torch.randint(11, (3, 5))
    for enabled, tolerance in ((False, 1e-6), (True, 2e-2)):
        results = []
        for plain in (False, True):
            leaf = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                logits = head(leaf)
                chosen_ST = logits.float().log_softmax(-1).gather(2, ids_ST[..., None])[..., 0]
                logp_ST = chosen_ST if plain else chunked_logps(head, leaf, ids_ST)
            logp_ST.sum().backward()
            results.append((logp_ST.detach(), leaf.grad))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(results[0][1], results[1][1], rtol=tolerance, atol=tolerance)


def test_packed_tokens_of_nobody_that_matter_are_refused(case):
    model, _ = case("qwen2-tied")
    sequence_BL, forward = packed()
    sequence_BL[0, 2] = -1  # a token that its neighbours attend to
    with pytest.raises(UnsupportedModelError, match="gives to no sequence"):  # noqa: SIM117
        with ScoreTape(model) as tape:
            tape.record(forward(model), sequence_ids=sequence_BL)


def test_batchnorm_is_refused_while_it_mixes_sequences():
    model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(3, affine=False), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModelError, match="1: a BatchNorm in training mode"):
        ScoreTape(model)
    model.eval()
    ids_ST = torch.randint(5, (2, 3))
    with ScoreTape(model) as tape:
        tape.record(model(ids_ST).tanh().sum((1, 2)))
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, model(ids_ST).tanh().sum((1, 2))))
    model.train()
    with pytest.raises(UnsupportedModelError, match="training mode"), tape:
        pass


@pytest.mark.parametrize("fault", ["no weight", "three axes", "another gain"])
def test_a_class_that_is_only_named_rmsnorm_is_exact(fault):
    class OddRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            setattr(self, "gain" if fault == "no weight" else "weight", nn.Parameter(torch.ones(4)))

        def forward(self, x):
            if fault == "another gain":
                return x * self.weight.square()
            if fault == "three axes":
                _, _, C = x.shape
                return x / x.square().mean(-1, keepdim=True).sqrt() * self.weight.view(1, 1, C)
            return x * self.gain

    model = nn.Sequential(nn.Embedding(5, 4), OddRMSNorm())
    ids_ST = torch.randint(5, (2, 3))
    with ScoreTape(model) as tape:
        tape.record(model(ids_ST).tanh().sum((1, 2)))
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, model(ids_ST).tanh().sum((1, 2))))


class Recomputing(torch.autograd.Function):
    """Activation checkpointing as some libraries write it: the forward again, in the backward."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return function(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = (each.detach().requires_grad_() for each in ctx.saved_tensors)
        with torch.enable_grad():
            torch.autograd.backward(ctx.function(x), grad)
        return None, x.grad


class Checkpointed(nn.Module):
    def __init__(self, twice=False):
        super().__init__()
        self.embed, self.body, self.head, self.twice = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 3), twice

    def forward(self, ids_ST):
        x = self.embed(ids_ST)
        x = Recomputing.apply(self.body, x if x.requires_grad else x.clone().requires_grad_())
        x = self.body(x) if self.twice else x  # once where the tape sees it
        return self.head(x).tanh().sum((1, 2))


@pytest.mark.parametrize("twice", [False, True])
def test_a_layer_run_again_by_an_autograd_function_is_refused_by_name(twice):
    model = Checkpointed(twice)
    with pytest.raises(UnsupportedModelError, match=r"^body: an autograd function"), ScoreTape(model) as tape:
        tape.record(model(torch.randint(5, (3, 4))))


def test_what_hides_every_layer_is_named():
    model = Checkpointed()
    for frozen in (model.embed, model.head):
        frozen.requires_grad_(False)
    ids_ST = torch.randint(5, (3, 4))
    with ScoreTape(model) as tape, pytest.raises(ValueError, match=r"an autograd function \(Recomputing\)"):
        tape.record(model(ids_ST))
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    with ScoreTape(model) as tape:
        with torch.no_grad():
            logps_S = model(ids_ST).sum((1, 2))
        with pytest.raises(ValueError, match="ran without gradients"):
            tape.record(logps_S)


@pytest.mark.parametrize("part", ["model", "in place", "layer"])
def test_a_compiled_model_is_refused_by_name(part):
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))
    if part == "in place":
        model.compile(backend="eager")
    elif part == "layer":
        model[1] = torch.compile(model[1], backend="eager")
    name = "1" if part == "layer" else "the model itself"
    with pytest.raises(UnsupportedModelError, match=f"^{name} is compiled"):
        ScoreTape(torch.compile(model, backend="eager") if part == "model" else model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda experts: setattr(experts, "has_bias", True),
            "gate_up_proj, not down_proj, down_proj_bias, gate_up_proj, gate_up_proj_bias.$",
        ),
        (
            lambda experts: setattr(experts, "has_post_expert_norm", True),
            "of a known form: has_post_expert_norm is True.$",
        ),
        (
            lambda experts: experts.register_parameter("scale", nn.Parameter(torch.ones(1))),
            "parameters are down_proj, gate_up_proj, scale, not down_proj, gate_up_proj",
        ),
        (lambda experts: setattr(experts, "__class__", type("OddExperts", (nn.Module,), {})), "no method _apply_gate"),
    ],
)
def test_experts_of_another_form_are_refused_by_path_and_cause(case, change, message):
    model, _ = case("qwen3-moe-normalised")
    change(model.model.layers[1].mlp.experts)
    with pytest.raises(UnsupportedModelError, match=rf"^model.layers.1.mlp.experts: .*{message}"):
        ScoreTape(model)


def test_one_parameter_as_vector_and_matrix_is_refused():
    from oblrpo.scores.contributions import Outer, Vector
    from oblrpo.scores.stores import PerSequence

    parts = [Vector(torch.ones(2, 12)), Outer(torch.ones(2, 3, 4), torch.ones(2, 3, 3), 4)]
    for order in (parts, parts[::-1]):
        with pytest.raises(TypeError, match="vector and matrix"):
            PerSequence(order)


def test_a_tape_entered_again_frees_the_stores_before(case):
    model, data = case("qwen3-tied", dtype=torch.float32)
    tape = ScoreTape(model)
    gc.disable()
    try:
        with tape:
            tape.record(logps(model, *data))
        stores = [weakref.ref(store) for store in tape._stores.values()]
        assert stores
        with tape:
            assert not any(store() for store in stores)
    finally:
        gc.enable()
