"""Modules without a rule: their parameters' gradients operation by operation, exact or refused by name."""

import pytest
import torch
from torch import nn
from torch.nn.functional import batch_norm

from lab.benchmarks.families import EXACT, batches, build, compare
from oblrpo.scores import ScoreTape, UnsupportedModelError, by_operations, oracle, tapped_operations
from tests.scores.models import relative

POPULAR = (
    "deepseek_v3", "gemma", "gemma4_text", "gpt_oss", "qwen3_next", "lfm2", "nemotron_h", "mamba",
    "llama4_text", "cohere", "opt",
)  # fmt: skip


@pytest.mark.parametrize("family", POPULAR)
@pytest.mark.usefixtures("stay_double")
def test_popular_families_are_exact(family):
    model = build(family, "eager")
    assert compare(model, batches()["padded"]) <= EXACT


@pytest.mark.parametrize("method", ["gram", "instantiate", "streamed"])
@pytest.mark.usefixtures("stay_double")
def test_every_method_gives_the_same(method):
    model, (ids_ST, _) = build("nemotron_h", "sdpa"), batches()["padded"]
    coef_S = torch.full((4,), 0.7, dtype=torch.float64)
    results = []
    for each in ("auto", method):
        with ScoreTape(model, each) as tape:
            tape.record(model(ids_ST, use_cache=False).logits.log_softmax(-1)[..., 0].sum(1))
        results.append([tape.norm2()])
        if method != "streamed":
            results[-1] += [tape.accumulate(coef_S, 2), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    assert max(relative(a, b) for a, b in zip(*results, strict=True)) <= EXACT


@pytest.mark.usefixtures("stay_double")
def test_checkpointed_hybrids_are_exact():
    model = build("qwen3_next", "sdpa")
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    assert compare(model, batches()["padded"]) <= EXACT


class Own(torch.autograd.Function):
    """A kernel of another library."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, (grad * x).sum((0, 1))


class Scaled(nn.Module):
    """Scales its input by a parameter of its own, in one way or another."""

    def __init__(self, way):
        super().__init__()
        self.way, self.scale = way, nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.3]))

    def forward(self, x):
        return getattr(self, self.way)(x)

    def times(self, x):
        return x * self.scale

    def written(self, x):
        table = torch.zeros(2, 4)
        table[1] = self.scale.exp()
        return x * table.sum(0) + x.new_ones(len(x), 1, 4) * self.scale

    def expanded(self, x):
        return torch.cat([x, self.scale.expand(len(x), 1, -1)], 1)

    def heads(self, x):
        return (x.reshape(-1, 2) * self.scale[:2]).view_as(x)

    def twice(self, x):
        return torch.addcmul(x, x, self.scale) * (self.scale * self.scale)

    def in_place(self, x):
        x = x * 1.0
        first = x[:, :2]
        first *= self.scale
        return (x + 1).add_(self.scale)

    def assigned(self, x):
        x = x * 1.0
        x[:, 0] = self.scale
        return x

    def mixed(self, x):
        return batch_norm(x.flatten(0, 1), None, None, self.scale, training=True).view_as(x)

    def random(self, x):
        return torch.nn.functional.rrelu(x, 0.1, 0.9, training=True) * self.scale

    def picked(self, x):
        out = torch.zeros_like(x).flatten(0, 1)
        chosen = torch.tensor([0, 1, 4])  # as many tokens as rows
        return out.index_copy(0, chosen, x.flatten(0, 1)[chosen] * self.scale).view_as(x)

    def time_first(self, x):
        return (x.transpose(0, 1) * self.scale).transpose(0, 1)

    def changed_after(self, x):
        made = self.scale.exp()
        y = x + made
        made += 1
        return y

    def kernel(self, x):
        return Own.apply(x, self.scale)

    def dropped(self, x):
        keys = self.scale.expand(len(x), 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(x, keys, keys, dropout_p=0.5)

    def view_changed(self, x):
        made = self.scale.clone()
        made.view(2, 2)[0].mul_(2)
        return x * made

    def weight_view_changed(self, x):
        made = self.scale.expand(4, 4).clone()
        made.diagonal().zero_()
        return x @ made

    def reversed(self, x):
        return (x.flip(0) * self.scale).flip(0)

    def rolled(self, x):
        return (x.roll(2, 0) * self.scale).roll(-2, 0)

    def first_tokens(self, x):
        tokens = x.flatten(0, 1)
        return torch.cat([tokens[: len(x)] * self.scale, tokens[len(x) :]]).view_as(x)

    def narrowed(self, x):
        tokens = x.flatten(0, 1)
        return torch.cat([tokens.narrow(0, 0, len(x)) * self.scale, tokens[len(x) :]]).view_as(x)

    def gathered(self, x):
        tokens, chosen = x.flatten(0, 1), torch.arange(len(x))
        picked = torch.gather(tokens, 0, chosen[:, None].expand(-1, 4)) * self.scale
        return tokens.index_add(0, chosen, picked).view_as(x)

    def table(self, x):
        places = torch.arange(1.0, 17.0, dtype=x.dtype).view(4, 4)
        return torch.einsum("std,td,d->std", x, places, self.scale)

    def complex(self, x):
        return torch.complex(x, self.scale.expand(x.shape)).abs()


def toy(way):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), Scaled(way), nn.Linear(4, 3))


@pytest.mark.parametrize("rows", [1, 3, 4, 6])
@pytest.mark.parametrize("way", ["times", "written", "expanded", "heads", "twice", "in_place"])
def test_what_is_made_of_a_parameter_is_followed(way, rows):
    model, ids_ST = toy(way).double(), torch.randint(5, (rows, 4))
    assert by_operations(model) == {"1": "Scaled"}
    with ScoreTape(model) as tape:
        tape.record(model(ids_ST).tanh().sum((1, 2)))
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, model(ids_ST).tanh().sum((1, 2))))


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("assigned", "1.scale: it is used in __setitem__"),
        ("mixed", "1.scale: batch_norm gives a row of the batch something else"),
        ("picked", "1: entries of logps_S depend on other rows of this layer"),
        ("time_first", r"1.scale: it meets an activation of shape \(4, 3, 4\)"),
        ("changed_after", "1.scale: what was made of it was changed in place"),
        ("kernel", "1.scale is used other than by calling its module"),
        ("complex", "1.scale: it is used in complex"),
    ],
)
def test_what_would_be_wrong_is_refused_by_path(way, message):
    model, ids_ST = toy(way), torch.randint(5, (3, 4))
    with pytest.raises(UnsupportedModelError, match=message), ScoreTape(model) as tape:
        tape.record(model(ids_ST).tanh().sum((1, 2)))


@pytest.mark.parametrize("rows", [1, 3])
def test_a_random_operation_is_refused(rows):
    model, ids_ST = toy("dropped"), torch.randint(5, (rows, 4))
    with (
        pytest.raises(UnsupportedModelError, match=r"1\.scale: scaled_dot_product_attention is random"),
        ScoreTape(model),
    ):
        model(ids_ST)


@pytest.mark.parametrize("way", ["view_changed", "weight_view_changed"])
def test_a_change_through_a_view_is_refused(way):
    model, ids_ST = toy(way), torch.randint(5, (3, 4))
    with pytest.raises(UnsupportedModelError, match=r"1\.scale: what was made of it was changed"), ScoreTape(model):
        model(ids_ST)


@pytest.mark.parametrize("rows", [2, 3, 4, 5])
@pytest.mark.parametrize("way", ["reversed", "rolled", "first_tokens", "narrowed", "gathered"])
def test_rows_in_another_order_are_refused_whatever_their_number(way, rows):
    model, ids_ST = toy(way).double(), torch.randint(5, (rows, 4))
    try:
        with ScoreTape(model) as tape:
            tape.record(model(ids_ST).tanh().sum((1, 2)))
    except UnsupportedModelError:
        return
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, model(ids_ST).tanh().sum((1, 2))))


def test_a_table_with_as_many_places_as_rows_is_refused():
    model, ids_ST = toy("table").double(), torch.tensor([[1, 2, 3, 4], [2, 3, 4, 1], [3, 4, 1, 2], [0, 0, 0, 1]])
    model[0].weight.data[0] = 0.0  # padding: the last row alone tells nothing of the other places
    with pytest.raises(UnsupportedModelError, match="einsum takes a constant"), ScoreTape(model):
        model(ids_ST)


def test_time_first_with_as_many_rows_as_tokens_is_refused():
    model, ids_ST = toy("time_first"), torch.randint(5, (4, 4))
    with pytest.raises(UnsupportedModelError, match="other rows of this layer"), ScoreTape(model) as tape:
        tape.record(model(ids_ST).tanh().sum((1, 2)))


def test_a_large_parameter_without_a_rule_is_refused(monkeypatch):
    monkeypatch.setattr(tapped_operations, "SMALL_NUMBERS", 3)
    model, ids_ST = toy("times"), torch.randint(5, (3, 4))
    message = r"1\.scale: no score-norm rule for Scaled, and with 4 numbers"
    with pytest.raises(UnsupportedModelError, match=message), ScoreTape(model):
        model(ids_ST)


def test_packed_rows_through_a_module_without_a_rule_are_refused():
    model, ids_BL = toy("times"), torch.randint(5, (2, 6))
    sequence_ids = torch.tensor([[0, 0, 0, 1, 1, 1], [2, 2, 2, 2, 3, 3]])
    with ScoreTape(model) as tape:
        per_token = model(ids_BL).tanh().sum(2).flatten()
        logps_S = torch.zeros(4).index_add(0, sequence_ids.flatten(), per_token)
        with pytest.raises(UnsupportedModelError, match=r"1: got .* for packed rows"):
            tape.record(logps_S, sequence_ids=sequence_ids)


@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm])
def test_a_parametrised_weight_is_exact(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), wrap(nn.Linear(4, 2))).double().eval()
    ids_ST = torch.randint(5, (3, 4))
    with ScoreTape(model) as tape:
        tape.record(model(ids_ST).tanh().sum((1, 2)))
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, model(ids_ST).tanh().sum((1, 2))))


@pytest.mark.parametrize("autocast", [True, False])
def test_bfloat16_is_summed_in_float32(autocast):
    model = toy("times") if autocast else toy("times").bfloat16()
    exact, ids_ST = toy("times"), torch.randint(5, (3, 40))
    exact.load_state_dict(model.state_dict())
    with ScoreTape(model) as tape, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        tape.record(model(ids_ST).float().tanh().sum((1, 2)))
    torch.testing.assert_close(tape.norm2(), oracle.norm2(exact, exact(ids_ST).tanh().sum((1, 2))), rtol=0.03, atol=0)
