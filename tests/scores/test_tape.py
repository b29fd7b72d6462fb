import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call, vmap
from torch.func import grad as gradient_of

from oblrpo.scores import Outer, ScoreTape, UnsupportedModelError, oracle, register_rule
from oblrpo.scores import contributions as contributions_module
from tests.scores.models import compare, gradients, logps


@pytest.mark.parametrize("chunk", [1, 400, 1 << 22])
@pytest.mark.parametrize("tokens", [(3, 2), (6, 40)])
def test_every_way_of_multiplying_out_agrees(case, chunk, tokens, monkeypatch):
    """Gram and instantiated norms (long and short sequences), one group at a time or many."""
    monkeypatch.setattr(contributions_module, "CHUNK_ELEMENTS", chunk)
    model, data = case("qwen3-tied", 6, *tokens)
    assert max(compare(model, data, torch.randn(6, dtype=torch.float64), group_size=2)) <= 1e-10


def test_gradients_by_torch_func_agree_with_the_loop(case):
    for name in ("qwen3-tied", "llama-untied"):
        model, (ids_ST, _, prompt, _) = case(name, attention="eager")
        mask_ST = torch.ones_like(ids_ST)

        def logp(parameters, ids_T, model=model, prompt=prompt):
            given = {"input_ids": ids_T[None], "use_cache": False}
            logits = functional_call(model, parameters, (), given).logits[0]
            return logits[prompt - 1 : -1].log_softmax(-1).gather(1, ids_T[prompt:, None]).sum()

        by_loop = oracle.norm2(model, logps(model, ids_ST, mask_ST, prompt))
        parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        gradients_S = vmap(gradient_of(logp), in_dims=(None, 0))(parameters, ids_ST)
        by_vmap = sum(gradient_S.flatten(1).square().sum(1) for gradient_S in gradients_S.values())
        torch.testing.assert_close(by_vmap, by_loop, rtol=1e-10, atol=0)


def test_the_padding_row_gets_no_gradient(case):
    """An all-zero padding row through RMSNorm has derivative 1/sqrt(eps); the norm would be off by powers of ten."""
    model, data = case("llama-untied")
    with torch.no_grad():
        model.model.embed_tokens.weight[model.model.embed_tokens.padding_idx] = 0
    assert max(compare(model, data, torch.ones(6, dtype=torch.float64), 1)) <= 1e-10


def test_a_zero_gain_is_normalised_again(case):
    model, data = case("qwen3-tied", dtype=torch.float32)
    with torch.no_grad():
        model.model.norm.weight[3] = 0
        model.model.layers[0].self_attn.q_norm.weight[1] = 1e-30
    assert max(compare(model, data, torch.randn(6), 3)) <= 1e-5


def test_frozen_parameters_do_not_count(case):
    model, data = case("qwen3-untied-biased")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    with ScoreTape(model) as tape:
        tape.record(logps(model, *data))
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, logps(model, *data)), rtol=1e-10, atol=0)
    tape.accumulate(torch.ones(6, dtype=torch.float64), 6)
    assert all((p.grad is None) != p.requires_grad for p in model.parameters())


def test_gradients_add_up_over_micro_batches_and_to_what_was_there(case):
    model, (ids_ST, mask_ST, prompt, _) = case("qwen2-tied", 8)
    coef_S = torch.randn(8, dtype=torch.float64)
    tape = ScoreTape(model)
    results = []
    for size in (8, 2):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        norms, groups = [], []
        for start in range(0, 8, size):
            rows = slice(start, start + size)
            with tape:
                tape.record(logps(model, ids_ST[rows], mask_ST[rows], prompt))
            norms.append(tape.norm2())
            groups.append(tape.accumulate(coef_S[rows], group_size=2))
        results.append((torch.cat(norms), torch.cat(groups), *gradients(model).values()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-6, atol=1e-9)
    (logps(model, ids_ST, mask_ST, prompt) * coef_S).sum().backward()
    for parameter, grad in zip(model.parameters(), results[0][2:], strict=True):
        torch.testing.assert_close(parameter.grad - grad, grad - 0.5, rtol=1e-5, atol=1e-7)


def test_the_model_is_restored_exactly(case):
    model, data = case("qwen3-untied-biased", dtype=torch.float32)
    frozen = model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    before = {name: (id(p), p.requires_grad, p.clone()) for name, p in model.named_parameters()}
    with ScoreTape(model) as tape:
        tape.record(logps(model, *data))
        assert all(p.grad is None for p in model.parameters())
    assert {name: (id(p), p.requires_grad) for name, p in model.named_parameters()} == {
        name: entry[:2] for name, entry in before.items()
    }
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name][2], rtol=0, atol=0)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not frozen.requires_grad
    logps(model, *data).sum().backward()  # and it trains as usual
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_an_error_inside_the_with_restores_too(case):
    model, _ = case("qwen2-tied")
    with pytest.raises(IndexError), ScoreTape(model):
        model(input_ids=torch.tensor([[10**6]]))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(
        isinstance(p, nn.Parameter) for module in model.modules() for p in module._parameters.values() if p is not None
    )


def test_generation_without_gradients_inside_the_with_is_not_recorded(case):
    model, data = case("qwen2-tied")
    with ScoreTape(model) as tape:
        with torch.no_grad():
            model(input_ids=data[0][:2])
        tape.record(logps(model, *data))
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, logps(model, *data)), rtol=1e-5, atol=0)


class Toy(nn.Module):
    """(S, T) ids -> (S,), with one way of going wrong at a time."""

    def __init__(self, fault=""):
        super().__init__()
        self.embed, self.head, self.fault = nn.Embedding(5, 4), nn.Linear(4, 3), fault

    def forward(self, ids_ST):
        x = self.embed(ids_ST)
        if self.fault == "in place":
            x = x * 1.0
            y = self.head(x)
            x.mul_(2)
            return y.sum((1, 2)) + x.sum((1, 2))
        if self.fault == "around its module":
            return torch.nn.functional.linear(x, self.head.weight).sum((1, 2)) + self.head(x).sum((1, 2))
        if self.fault == "rows mixed":
            return self.head(x.transpose(0, 1)).sum((0, 2))
        return self.head(x).tanh().sum((1, 2))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("around its module", "head.weight is used other than by calling its module"),
        ("rows mixed", "head: got"),
        ("in place", "head: its input or output was changed in place"),
    ],
)
def test_what_cannot_be_exact_is_refused_by_name(fault, message):
    model = Toy(fault)
    with pytest.raises(UnsupportedModelError, match=message):  # noqa: SIM117
        with ScoreTape(model) as tape:
            tape.record(model(torch.randint(5, (3, 4))))


def test_a_parameter_used_twice_brings_its_cross_term():
    torch.manual_seed(10)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix = nn.Embedding(5, 4), nn.Linear(4, 4)

        def forward(self, ids_ST):
            return self.mix(self.mix(self.embed(ids_ST)).tanh()).tanh().sum((1, 2))

    model = Twice().double()
    ids_ST = torch.randint(5, (4, 3))
    with ScoreTape(model) as tape:
        tape.record(model(ids_ST))
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, model(ids_ST)), rtol=1e-12, atol=0)


def test_a_rule_of_the_users_own():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(4, 3, dtype=torch.float64))

        def forward(self, x):
            return x @ self.matrix

    @register_rule(Scale)
    def scale(call, grad):
        return {"matrix": Outer(call.input, grad, rows=4)}

    model = nn.Sequential(nn.Embedding(5, 4).double(), Scale())
    ids_ST = torch.randint(5, (4, 6))

    def forward():
        return model(ids_ST).tanh().sum((1, 2))

    with ScoreTape(model) as tape:
        tape.record(forward())
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, forward()), rtol=1e-12, atol=0)


def test_misuse_is_explained():
    model = Toy()
    tape = ScoreTape(model)
    ids_ST = torch.randint(5, (3, 4))
    with pytest.raises(ValueError, match="call record"):
        tape.norm2()
    with tape:
        with pytest.raises(ValueError, match="shape"):
            tape.record(model(ids_ST).sum())
        with pytest.raises(ValueError, match="differentiable"):
            tape.record(torch.zeros(3))
    with tape, pytest.raises(ValueError, match="nothing to record"):
        tape.record(torch.zeros(3, requires_grad=True))
    with tape:
        tape.record(model(ids_ST))
    for coef_S, group_size in ((torch.ones(2), 1), (torch.ones(3), 2), (torch.ones(3), 0), (torch.ones(3), -1)):
        with pytest.raises(ValueError, match="do not fit"):
            tape.accumulate(coef_S, group_size)
    frozen = Toy().requires_grad_(False)
    with pytest.raises(UnsupportedModelError, match="no trainable parameter"):
        ScoreTape(frozen)
    limited = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0))
    with pytest.raises(UnsupportedModelError, match="max_norm"), ScoreTape(limited) as tape:
        tape.record(limited(ids_ST).sum((1, 2)))


def test_one_record_in_each_with_and_one_with_at_a_time():
    model = Toy()
    ids_ST = torch.randint(5, (3, 4))
    tape = ScoreTape(model)
    with tape:
        tape.record(model(ids_ST))
        again = model(ids_ST)
        with pytest.raises(ValueError, match="record once"):
            tape.record(again)
        with pytest.raises(RuntimeError, match="already recording"), tape:
            pass
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, model(ids_ST)))


def test_an_interrupt_inside_a_forward_restores_too():
    class Interrupted(nn.Linear):
        def forward(self, x):
            raise KeyboardInterrupt

    @register_rule(Interrupted)
    def rule(call, grad):
        return {}

    model = nn.Sequential(nn.Linear(3, 3), Interrupted(3, 3))
    with pytest.raises(KeyboardInterrupt), ScoreTape(model):
        model(torch.ones(2, 3))
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for m in model for p in m._parameters.values())


@pytest.mark.parametrize("way", ["bfloat16 weights", "autocast"])
def test_short_types_are_summed_in_float32(case, way):
    """As close to the float32 gradient of the same weights as autograd itself is."""
    exact, data = case("qwen3-tied", dtype=torch.float32, initializer_range=0.02)
    model, _ = case("qwen3-tied", dtype=torch.float32, initializer_range=0.02)
    rounded = {name: p.to(torch.bfloat16).float() for name, p in exact.state_dict().items()}
    for each in (exact, model):
        each.load_state_dict(rounded)
    if way == "bfloat16 weights":
        model.bfloat16()

    def forward():
        with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
            return logps(model, *data).float()

    with ScoreTape(model) as tape:
        tape.record(forward())
    norm2_S = tape.norm2()
    tape.accumulate(torch.ones(6), 2)
    ours = gradients(model)
    model.zero_grad()
    forward().sum().backward()
    by_autograd = gradients(model)
    exact_norm2 = oracle.norm2(exact, logps(exact, *data))
    logps(exact, *data).sum().backward()
    for name, reference in gradients(exact).items():
        error = (ours[name].float() - reference).norm() / reference.norm()
        theirs = (by_autograd[name].float() - reference).norm() / reference.norm()
        assert error < 1.2 * theirs + 4e-3, name
    assert norm2_S.dtype == torch.float32
    torch.testing.assert_close(norm2_S, exact_norm2, rtol=0.05, atol=0)


@pytest.mark.parametrize("method", ["auto", "streamed"])
def test_a_dropped_tape_frees_its_activations_at_once(case, method):
    """A cycle through autograd's graph would keep them until the garbage collector runs, and memory would pile up."""
    model, data = case("qwen3-tied", dtype=torch.float32)
    gc.collect()
    gc.disable()
    try:
        with ScoreTape(model, method) as tape:
            logps_S = logps(model, *data)
            tape.record(logps_S)
        graph, itself = weakref.ref(logps_S), weakref.ref(tape)
        stores = [weakref.ref(store) for store in tape._stores.values()]
        assert bool(stores) == (method == "auto")
        tape.norm2()
        if method != "streamed":
            tape.accumulate(torch.ones(6))
        del tape, logps_S
        assert graph() is None
        assert itself() is None
        assert not any(store() for store in stores)
    finally:
        gc.enable()


def test_one_row_of_positions_for_all_is_understood_or_refused():
    class Positions(nn.Module):
        def __init__(self, shape):
            super().__init__()
            self.embed, self.place, self.head = nn.Embedding(5, 4), nn.Embedding(6, 4), nn.Linear(4, 3)
            self.shape = shape

        def forward(self, ids_ST):
            return self.head(self.embed(ids_ST) + self.place(torch.arange(3).view(self.shape))).tanh().sum((1, 2))

    ids_ST = torch.randint(5, (3, 3))  # as many rows as tokens: the shape alone does not tell
    model = Positions((1, 3)).double()
    with ScoreTape(model) as tape:
        tape.record(model(ids_ST))
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, model(ids_ST)), rtol=1e-12, atol=0)
    model = Positions((3,))
    with pytest.raises(UnsupportedModelError, match="place: ids of shape"), ScoreTape(model):
        model(ids_ST)


def test_a_backward_of_somebody_else_is_refused():
    model = Toy()
    ids_ST = torch.randint(5, (3, 4))
    with ScoreTape(model) as tape:
        tape.record(model(ids_ST))
        other = model(ids_ST).sum()
        with pytest.raises(UnsupportedModelError, match="a backward other than"):
            other.backward()
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, model(ids_ST)))
