"""Functions that keep rows apart whatever the data, and rows that other data bring together in a later record."""

import pytest
import torch
import torch.nn.functional as fn
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lab.benchmarks.families import EXACT, batches, build, logps
from oblrpo.scores import ScoreTape, UnsupportedModelError, oracle
from oblrpo.scores.functions import flat, keeps_rows

ROWS = 3


def place_values(x):
    y = x.new_zeros(ROWS, 4, 6)
    y[:, 1:3] = x[:, :2]
    y[..., 0, 1:] = x[:, 0, 1:]
    y[x.detach() > 0] = 0.0
    return y


def in_place(x):
    y = x * 1
    y += x
    y.mul_(x).clamp_(min=-1)
    return y.copy_(x.sin())


KEEP = {
    "entries": lambda x, y, w: (2 + x * y - x / 3).exp().clamp(max=2).where(x.detach() > 0, fn.logsigmoid(-x)),
    "in place": lambda x, y, w: in_place(x),
    "broadcast over tokens": lambda x, y, w: x * y[:, :1],
    "linear": lambda x, y, w: fn.linear(fn.linear(x, w).flatten(0, 1), w),
    "product with a weight": lambda x, y, w: x.view(-1, 6) @ w,
    "weight on the left": lambda x, y, w: torch.ones(5, 4) @ x,
    "attention by hand": lambda x, y, w: (x @ y.transpose(1, 2)).softmax(-1) @ y.mT.mT,
    "attention": lambda x, y, w: fn.scaled_dot_product_attention(x[:, None], y[:, None], y[:, None]),
    "addmm": lambda x, y, w: torch.addmm(w[0], x.reshape(-1, 6), w),
    "baddbmm": lambda x, y, w: torch.baddbmm(x, x @ x.mT, y),
    "conv": lambda x, y, w: fn.conv1d(x, torch.ones(4, 4, 2)),
    "norms": lambda x, y, w: fn.layer_norm(fn.rms_norm(x, (6,)), (4, 6)),
    "reshapes": lambda x, y, w: x.view(ROWS, 2, 2, 6).flatten(1, 2).unflatten(2, (2, 3)).reshape(ROWS * 4, 6),
    "heads": lambda x, y, w: x.view(ROWS, 4, 2, 3).transpose(1, 2).reshape(ROWS * 2, 4, 3).permute(0, 2, 1),
    "sums": lambda x, y, w: x.cumsum(1).sum(-1, keepdim=True) + x.amax((1, 2), keepdim=True) + x.norm(2, -1)[..., None],
    "choice": lambda x, y, w: x.topk(2).values + x.sort(-1, descending=True)[0][..., :2] + x.max(-1)[0][..., None],
    "gather": lambda x, y, w: x.gather(1, torch.tensor([[3], [0], [2]])[..., None].expand(-1, 2, 6)),
    "scatter": lambda x, y, w: torch.zeros(ROWS, 9, 6).index_add(1, torch.tensor([8, 2, 2, 0]), x),
    "parts": lambda x, y, w: torch.cat([*x.chunk(2, -1), *y.split([1, 5], dim=2)], -1),
    "stack": lambda x, y, w: torch.stack([x, *y.unsqueeze(1).unbind(1)], -1),
    "cat of one": lambda x, y, w: torch.cat([x]),
    "expand": lambda x, y, w: x[:, :1].expand(-1, 7, -1).repeat(1, 2, 1).repeat_interleave(2, dim=1),
    "index": lambda x, y, w: x[:, None, 1:, [0, 5]] + x[..., 0, -1][:, None, None, None],
    "mask": lambda x, y, w: x[:, torch.tensor([True, False, True, True])].masked_fill(torch.eye(3, 6) > 0, 0),
    "writes": lambda x, y, w: place_values(x),
    "pad": lambda x, y, w: fn.pad(x, (1, 0, 0, 2, 0, 0)),
    "shift": lambda x, y, w: x.roll(1, 1).flip(2, 1),
    "einsum": lambda x, y, w: torch.einsum("std,sud,de->stue", x, y, w),
    "triangle": lambda x, y, w: (x @ x.mT).tril(-1),
}
MIX = {
    "picked rows": lambda x, y, w: x[torch.tensor([2, 0, 1])],
    "mask of rows": lambda x, y, w: torch.cat([x[torch.tensor([False, True, True])], x[:1]]),
    "slice of rows": lambda x, y, w: torch.cat([x[1:], x[:1]]),
    "two tables move the axis": lambda x, y, w: x[:, None].expand(ROWS, ROWS, 4, 6)[:, [0, 1, 2], :, [0, 0, 0]],
    "an ellipsis before the rows": lambda x, y, w: x.sum((1, 2))[..., [2, 0, 1]],
    "flip": lambda x, y, w: x.flip(0),
    "roll": lambda x, y, w: x.roll(1, 0),
    "roll all": lambda x, y, w: x.roll(6),
    "transposed": lambda x, y, w: x[:, :3].transpose(0, 1),
    "permuted": lambda x, y, w: x[:, :3].permute(1, 0, 2),
    "T": lambda x, y, w: x[:, :3, 0].T,
    "sum": lambda x, y, w: x - x.sum(0, keepdim=True).expand(ROWS, 4, 6),
    "whole sum": lambda x, y, w: x * x.sum(),
    "softmax": lambda x, y, w: x.softmax(0),
    "cumsum": lambda x, y, w: x.cumsum(-3),
    "sorted": lambda x, y, w: x.sort(0)[0],
    "maximum": lambda x, y, w: x.topk(1, dim=0).values.expand(ROWS, 4, 6),
    "gather": lambda x, y, w: x.gather(0, torch.full((ROWS, 4, 6), 1)),
    "index_add": lambda x, y, w: torch.zeros(ROWS, 4, 6).index_add(0, torch.tensor([1, 2, 0]), x),
    "index_select": lambda x, y, w: x.index_select(0, torch.tensor([1, 2, 0])),
    "cat": lambda x, y, w: torch.cat([x, y])[::2],
    "stack": lambda x, y, w: torch.stack([x, y, x]).flatten(0, 1)[::3],
    "stack from the end": lambda x, y, w: torch.stack([x, y, x], -4)[:, 0],
    "broadcast along the rows": lambda x, y, w: x[:, 0, 0] * x[:, :1, :1].expand(-1, 2, 3),
    "outer": lambda x, y, w: x[:, :, 0].view(ROWS, 1, 4) - x[:, :, 0].view(1, ROWS, 4),
    "product of all rows": lambda x, y, w: x[:, 0, :3] @ y[:, 0],
    "gram of all rows": lambda x, y, w: fn.linear(x[:, 0], y[:, 0]),
    "attention of rows": lambda x, y, w: fn.scaled_dot_product_attention(x[:, 0], y[:, 0], y[:, 0]),
    "unbatched conv": lambda x, y, w: fn.conv1d(x[:, 0], torch.ones(ROWS, ROWS, 1)),
    "norm over rows": lambda x, y, w: fn.layer_norm(x[:, 0], (ROWS, 6)),
    "batch norm": lambda x, y, w: fn.batch_norm(x, None, None, training=True),
    "padded rows": lambda x, y, w: fn.pad(x, (0, 0, 0, 0, 1, -1)),
    "einsum over rows": lambda x, y, w: torch.einsum("std,utd->su", x, y),
    "einsum moved": lambda x, y, w: torch.einsum("std->tsd", x[:, :3]),
    "written rows": lambda x, y, w: written_rows(x),
    "written across": lambda x, y, w: written_across(x),
    "added across": lambda x, y, w: torch.zeros(ROWS, ROWS, 6) + x[:, 0],
    "interleaved": lambda x, y, w: x.repeat_interleave(2, 0)[:ROWS],
    "repeated": lambda x, y, w: x.repeat(2, 1, 1)[1 : 1 + ROWS],
    "inverse": lambda x, y, w: torch.linalg.inv(x[:, 0, :3]),
}


def written_rows(x):
    y = torch.zeros(ROWS, 4, 6)
    y[1:] = x[:-1]
    return y


def written_across(x):
    y = torch.zeros(ROWS, ROWS, 6)
    y[:, :] = x[:, 0]
    return y


class Verdicts(TorchFunctionMode):
    """What `keeps_rows` says of every call."""

    def __init__(self):
        super().__init__()
        self.said = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [each for each in flat([*args, *kwargs.values()]) if isinstance(each, Tensor) and each.requires_grad]
        result = func(*args, **kwargs)
        self.said.append(keeps_rows(func, args, kwargs, args[0] if result is None else result, given, ROWS))
        return result


def said(function):
    """Whether all calls are said to keep rows, and whether they do: only row s of x and y may move block s."""
    torch.manual_seed(0)
    x, y, w = (torch.randn(*shape) for shape in ((ROWS, 4, 6), (ROWS, 4, 6), (6, 6)))
    with Verdicts() as verdicts:
        function(x.requires_grad_(), y.requires_grad_(), w)
    verdict = all(verdicts.said)
    result = function(x, y, w)
    if result.shape[0] % ROWS:
        return verdict, False
    blocks = result.unflatten(0, (ROWS, -1)).flatten(1)
    grads = [
        torch.autograd.grad(block.square().sum(), (x, y), retain_graph=True, allow_unused=True) for block in blocks
    ]
    others = [
        grad.index_fill(0, torch.tensor(s), 0) for s, each in enumerate(grads) for grad in each if grad is not None
    ]
    return verdict, not any(bool(each.any()) for each in others)


@pytest.mark.parametrize("name", KEEP)
def test_what_is_listed_keeps_rows(name):
    assert said(KEEP[name]) == (True, True)


@pytest.mark.parametrize("name", MIX)
def test_what_mixes_rows_is_not_listed(name):
    assert said(MIX[name]) == (False, False)


class Scale(nn.Module):
    """Scales its input by a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, -1.0, 2.0, 0.3]))

    def forward(self, x):
        return x * self.scale


class Sorted(Scale):
    """Brings the rows in the order of their first entry, which is their own as long as they come so."""

    def forward(self, x):
        order = x.detach()[:, 0, 0].argsort()
        return torch.gather(x * self.scale, 0, order[:, None, None].expand_as(x))


class Around(nn.Module):
    """The same in a module around, without a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.inner = Scale()

    def forward(self, x):
        return self.inner(x.index_select(0, x.detach()[:, 0, 0].argsort()))


class PickedExperts(Around):
    """The same in a module that goes by the name of experts, of which transformers' keep tokens apart."""

    has_gate = True


@pytest.mark.parametrize("make", [Sorted, Around, PickedExperts], ids=["in the module", "around it", "experts"])
def test_rows_that_only_later_data_mix_are_refused_in_that_record(make):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), make(), nn.Linear(4, 3)).double()
    model[0].weight.data[:, 0] = torch.arange(5)
    tape = ScoreTape(model)
    for ids_ST in (torch.tensor([[0, 1], [1, 4], [3, 2]]), torch.tensor([[1, 1], [2, 4], [4, 0]])):
        with tape:
            tape.record(model(ids_ST).tanh().sum((1, 2)))
        torch.testing.assert_close(tape.norm2(), oracle.norm2(model, model(ids_ST).tanh().sum((1, 2))))
    with pytest.raises(UnsupportedModelError, match="other rows of this layer"), tape:
        tape.record(model(torch.tensor([[3, 1], [2, 4], [0, 0]])).tanh().sum((1, 2)))


def test_what_cannot_be_looked_at_again_is_refused_by_function_and_path():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), Around(), nn.Linear(4, 3))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    message = "^index_select in 1 may bring rows of the batch together .* of other libraries are in the graph"
    with pytest.raises(UnsupportedModelError, match=message), ScoreTape(model) as tape, hooks:
        tape.record(model(torch.tensor([[0, 1], [1, 4]])).tanh().sum((1, 2)))


STEADY = (
    "deepseek_v3", "glm4_moe", "gpt_oss", "gemma4_text", "qwen3_next", "qwen3_5_text", "lfm2_moe", "nemotron_h",
    "mamba", "mamba2", "jamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "llama4_text", "cohere", "opt",
)  # fmt: skip


@pytest.mark.parametrize("family", STEADY)
@pytest.mark.usefixtures("stay_double")
def test_popular_families_need_no_second_look(family):
    """A later record of them costs no more backward than one."""
    model, backwards = build(family, "sdpa"), []
    tape, batch = ScoreTape(model), batches()["padded"]
    for _ in range(2):
        with tape:
            logps_S = logps(model, *batch)
            logps_S.register_hook(lambda _: backwards.append(1))
            before = len(backwards)
            tape.record(logps_S)
    assert len(backwards) - before == 1 < before
    assert float((tape.norm2() - oracle.norm2(model, logps(model, *batch))).abs().max()) <= EXACT * float(
        tape.norm2().max()
    )
