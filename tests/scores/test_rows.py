"""Log-probabilities that depend on other rows than their own: seen by one more backward at a model's first record."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from oblrpo.memory import peak_bytes
from oblrpo.scores import ScoreTape, UnsupportedModelError, chunked_logps, oracle
from oblrpo.scores.rows import rows_to_check
from tests.scores.models import VOCABULARY, batch, gradients, logps
from tests.scores.test_methods import EXACT, G, packed


class TimeFirst(nn.Module):
    """Its middle layer runs on (T, S, d)."""

    def __init__(self):
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, ids_ST):
        x = self.middle(self.embed(ids_ST).transpose(0, 1)).tanh().transpose(0, 1)
        return self.head(x).tanh().sum((1, 2))


def test_a_layer_that_runs_time_first_is_refused_where_rows_are_as_many_as_tokens():
    torch.manual_seed(0)
    model = TimeFirst()
    with pytest.raises(UnsupportedModelError, match=r"^middle: .* time-first"), ScoreTape(model) as tape:
        tape.record(model(torch.randint(5, (4, 4))))
    with pytest.raises(ValueError, match="call record"):  # a refused record leaves nothing to read
        tape.norm2()


@pytest.mark.parametrize("sequences", [2, 4, 6, 8])
@pytest.mark.parametrize("order", ["reversed", "shifted", "output by output"])
def test_log_probabilities_in_another_order_are_refused(case, order, sequences):
    model, data = case("qwen2-tied", sequences, dtype=torch.float32)
    index_S = {
        "reversed": torch.arange(sequences).flip(0),
        "shifted": torch.arange(sequences).roll(1),
        "output by output": torch.arange(sequences).view(2, -1).T.flatten(),
    }[order]
    with ScoreTape(model) as tape:
        if torch.equal(index_S, torch.arange(sequences)):
            tape.record(logps(model, *data)[index_S])
        else:
            with pytest.raises(UnsupportedModelError, match="another order than the rows"):
                tape.record(logps(model, *data)[index_S])


@pytest.mark.parametrize("head", ["module", "chunked"])
def test_sequences_that_mix_are_refused_by_the_layer_below(head):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9))
    ids_ST = torch.randint(9, (4, 5))
    with ScoreTape(model) as tape:
        hidden = model[0](ids_ST)
        hidden = hidden - hidden.mean(0)  # as a batch norm does
        if head == "chunked":
            logp_ST = chunked_logps(model[1], hidden, ids_ST)
        else:
            logp_ST = model[1](hidden).log_softmax(-1).gather(2, ids_ST[..., None])[..., 0]
        with pytest.raises(UnsupportedModelError, match=r"^0: .* sequences mix"):
            tape.record(logp_ST.sum(1))


def test_attention_across_packed_sequences_is_refused(case):
    model, _ = case("qwen2-tied")
    ids_BL, sequence_BL = torch.randint(VOCABULARY, (2, 8)), torch.arange(4).repeat_interleave(4).view(2, 8)
    causal_B1LL = torch.full((8, 8), -1e30, dtype=torch.float64).triu(1).expand(2, 1, 8, 8)
    with ScoreTape(model) as tape:
        logits = model(input_ids=ids_BL, attention_mask=causal_B1LL, use_cache=False).logits
        logp_BL = logits[:, :-1].log_softmax(-1).gather(2, ids_BL[:, 1:, None])[..., 0]
        inside_BL = sequence_BL[:, 1:] == sequence_BL[:, :-1]
        logps_S = logp_BL.new_zeros(4).index_add(0, sequence_BL[:, 1:].flatten(), (logp_BL * inside_BL).flatten())
        with pytest.raises(UnsupportedModelError, match=r"[kv]_proj: .* sequences mix"):
            tape.record(logps_S, sequence_ids=sequence_BL)


class Backwards(TorchDispatchMode):
    """Counts the gradients of softmaxes: one a backward in a model without another."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._log_softmax_backward_data.default
        return func(*args, **(kwargs or {}))


def backwards(tape, logps_S):
    with Backwards() as mode:
        tape.record(logps_S)
    return mode.count


def test_the_check_is_made_once_a_model_and_where_there_is_something_to_check(case):
    model, data = case("qwen2-tied", dtype=torch.float32)
    counts = []
    for rows in (slice(0, 1), slice(0, 6), slice(0, 6)):
        with ScoreTape(model) as tape:
            counts.append(backwards(tape, logps(model, data[0][rows], data[1][rows], data[2])))
    assert counts == [1, 2, 1]
    with ScoreTape(copy.deepcopy(model), check_rows=False) as tape:
        assert backwards(tape, logps(tape.model, *data)) == 1


def test_a_refused_model_is_checked_again(case):
    model, data = case("qwen2-tied", dtype=torch.float32)
    for _ in range(2):
        with ScoreTape(model) as tape, pytest.raises(UnsupportedModelError, match="another order than the rows"):
            tape.record(logps(model, *data)[torch.arange(6).flip(0)])


def test_two_rows_do_not_tell_of_more(case):
    """A look at two short rows before a run leaves the look at its first batch to be made."""
    model, data = case("qwen2-tied", dtype=torch.float32)
    counts = []
    for rows in (slice(0, 2), slice(0, 6), slice(0, 6)):
        with ScoreTape(model) as tape:
            counts.append(backwards(tape, logps(model, data[0][rows], data[1][rows], data[2])))
    assert counts == [2, 2, 1]


CHANGES = {
    "another mode": lambda model: model.model.layers[0].train(),
    "another layer": lambda model: model.model.layers.__setitem__(0, copy.deepcopy(model.model.layers[0])),
    "a forward that was replaced": lambda model: setattr(
        model.model.layers[0].mlp.act_fn, "forward", model.model.layers[0].mlp.act_fn.forward
    ),
    "a frozen parameter": lambda model: model.lm_head.weight.requires_grad_(False),
    "another attention": lambda model: model.set_attn_implementation("eager"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_check_is_made_again_once_the_model_is_another(case, change):
    model, data = case("qwen3-untied-biased", dtype=torch.float32)
    counts = []
    for turn in range(4):
        if turn == 2:
            change(model)
        with ScoreTape(model) as tape:
            counts.append(backwards(tape, logps(model, *data)))
    assert counts == [2, 1, 2, 1]


def test_the_check_is_made_again_where_log_probabilities_come_about_in_another_way(case):
    """Other arguments, packed rows, as many rows as tokens, or other functions after the model's."""
    torch.manual_seed(4)
    model, data = case("qwen2-tied")
    square = batch(6, 3, 3)
    sequence_BL, packed_logps = packed()
    ways = [
        (lambda: logps(model, *data), {}),
        (lambda: logps(model, *data[:3], positions=False), {}),
        (lambda: logps(model, *square), {}),
        (lambda: logps(model, *data)[torch.arange(6)], {}),
        (lambda: packed_logps(model), {"sequence_ids": sequence_BL}),
    ]
    counts = []
    for way, settings in (*ways, *ways):
        with ScoreTape(model) as tape, Backwards() as mode:
            tape.record(way(), **settings)
        counts.append(mode.count)
    assert counts == [2] * len(ways) + [1] * len(ways)
    with ScoreTape(model) as tape, pytest.raises(UnsupportedModelError, match="another order than the rows"):
        tape.record(logps(model, *data).flip(0))


def test_the_check_takes_no_memory_under_activation_checkpointing(case):
    """What is made again for a tap is let go of in the check, which needs none of it."""
    ids_ST = torch.randint(VOCABULARY, (8, 64))
    peaks = []
    for check_rows in (True, False):
        model, _ = case("qwen3-untied-biased", dtype=torch.float32)
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()

        def step(model=model, check_rows=check_rows):
            with ScoreTape(model, "streamed", check_rows=check_rows) as tape:
                tape.record(logps(model, ids_ST, torch.ones_like(ids_ST), 4))

        peaks.append(peak_bytes(step, "cpu"))
    assert peaks[0] <= 1.02 * peaks[1]


class OnceOnly(torch.autograd.Function):
    """As fused losses do, it overwrites in its backward what it saved."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = torch.ones_like(x)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor.mul_(grad)


def test_what_may_not_stand_a_second_backward_is_not_given_one(case):
    model, data = case("qwen2-tied")
    expected = oracle.norm2(model, logps(model, *data))
    with ScoreTape(model) as tape:
        assert backwards(tape, OnceOnly.apply(logps(model, *data))) == 1
    torch.testing.assert_close(tape.norm2(), expected, rtol=1e-5, atol=0)
    saved = {}

    def unpack(key):
        return saved.pop(key)  # once only

    with ScoreTape(model) as tape:
        with saved_tensors_hooks(lambda x: saved.update({len(saved): x}) or len(saved) - 1, unpack):
            logps_S = logps(model, *data)
        assert backwards(tape, logps_S) == 1
    torch.testing.assert_close(tape.norm2(), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("family", ["dense", "experts", "packed", "checkpointed"])
def test_the_check_changes_no_number(case, name, family):
    model, data = case("qwen3-moe-normalised" if family == "experts" else "qwen3-untied-biased")
    record = {}
    if family == "checkpointed":
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()  # transformers checkpoints in training mode only; no dropout here
    forward = lambda: logps(model, *data)  # noqa: E731
    if family == "packed":
        record["sequence_ids"], of = packed()
        forward = lambda: of(model)  # noqa: E731
    coef_S = torch.randn(6, dtype=torch.float64)
    found = []
    for check_rows in (True, False):
        with ScoreTape(model, **EXACT[name], check_rows=check_rows) as tape:
            tape.record(forward(), **record)
        found.append((tape.norm2(), tape.accumulate(coef_S, G), *gradients(model).values()))
        model.zero_grad()
    assert all(torch.equal(checked, plain) for checked, plain in zip(*found, strict=True))


@pytest.mark.parametrize("sequences", range(2, 33))
def test_the_rows_that_are_checked_are_others_in_the_usual_wrong_orders(sequences):
    (rows_S,) = rows_to_check(sequences, torch.device("cpu"))
    index_S = torch.arange(sequences)
    orders = [index_S.roll(1)]
    if sequences not in {3, 5}:
        orders.append(index_S.flip(0))
    orders += [index_S.view(P, -1).T.flatten() for P in range(2, sequences) if sequences % P == 0]
    for order in orders:
        assert not torch.equal(rows_S[order], rows_S)
