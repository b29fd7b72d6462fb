"""Norms, inner products and sketches taken within the backward, which holds nothing afterwards."""

import pytest
import torch

from oblrpo.scores import ScoreTape, Sketch
from tests.scores.models import logps, relative
from tests.scores.test_gram import flat_scores
from tests.scores.test_methods import packed

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


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-untied-biased", "llama-tied-biased", "qwen3-moe-normalised"])
def test_dense_models(case, name):
    model, data = case(name)
    check(model, lambda: logps(model, *data))


def test_packed_rows(case):
    model, _ = case("qwen3-untied-biased")
    sequence_BL, forward = packed()
    check(model, lambda: forward(model), sequence_ids=sequence_BL)


@pytest.fixture
def recorded(case):
    model, data = case("qwen3-tied")
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


def test_other_methods_are_not_told_beforehand(case):
    model, data = case("qwen3-tied")
    with ScoreTape(model) as tape, pytest.raises(ValueError, match="streamed"):
        tape.record(logps(model, *data), gram=True)
