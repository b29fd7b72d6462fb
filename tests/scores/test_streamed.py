"""Norms, inner products and sketches taken within the backward, which holds nothing afterwards."""

import pytest
import torch

from oblrpo.scores import ScoreTape, Sketch
from tests.scores.models import CONFIGURATIONS, batch, build, logps, relative
from tests.scores.test_gram import flat_scores
from tests.scores.test_methods import moe, packed

pytestmark = pytest.mark.usefixtures("stay_double")
SKETCHES = [Sketch(1, 8, 256), Sketch(2, 4, 128)]


def check(model, forward, **record):
    tape = ScoreTape(model, "streamed")
    with tape:
        tape.record(forward(), gram=True, sketches=SKETCHES, **record)
    score_SN = flat_scores(model, forward())
    assert relative(tape.norm2(), score_SN.square().sum(1)) <= 1e-10
    assert relative(tape.gram(), score_SN @ score_SN.T) <= 1e-10
    with ScoreTape(model) as held:
        held.record(forward(), **record)
    for sketch in SKETCHES:
        assert relative(tape.sketch(*sketch), held.sketch(*sketch)) <= 1e-10
    assert all(p.grad is None for p in model.parameters())
    with tape:
        tape.record(forward(), **record)  # norms alone, by whichever way costs less
    assert relative(tape.norm2(), score_SN.square().sum(1)) <= 1e-10


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_dense_models(name):
    torch.manual_seed(0)
    model, data = build(name), batch()
    check(model, lambda: logps(model, *data))


def test_experts():
    model = moe()
    torch.manual_seed(1)
    data = batch()
    check(model, lambda: logps(model, *data))


def test_packed_rows():
    torch.manual_seed(2)
    model = build("qwen3-untied-bias")
    sequence_BL, forward = packed()
    check(model, lambda: forward(model), sequence_ids=sequence_BL)


@pytest.fixture
def recorded():
    torch.manual_seed(0)
    model = build("qwen3-tied-gqa")
    data = batch()
    with ScoreTape(model, "streamed") as tape:
        tape.record(logps(model, *data))
    return tape


def test_what_was_not_asked_for_is_refused(recorded):
    with pytest.raises(ValueError, match="gram=True"):
        recorded.gram()
    with pytest.raises(ValueError, match="sketches="):
        recorded.sketch(1, 8, 256)


def test_it_gives_no_gradient(recorded):
    with pytest.raises(ValueError, match="no gradient can be had"):
        recorded.accumulate(torch.ones(6, dtype=torch.float64))


def test_other_methods_are_not_told_beforehand():
    model, data = build("qwen3-tied-gqa"), batch()
    with ScoreTape(model) as tape, pytest.raises(ValueError, match="streamed"):
        tape.record(logps(model, *data), gram=True)
