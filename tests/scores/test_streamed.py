"""Norms, inner products and sketches taken within the backward, which holds nothing afterwards."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from oblrpo.scores import ScoreTape, Sketch, chunked_logps, contributions, gram
from tests.scores.models import logps, relative
from tests.scores.test_gram import flat_scores
from tests.scores.test_methods import packed
from tests.scores.zoo import ways

SKETCHES = [Sketch(1, 8, 256), Sketch(2, 4, 128)]


def within(score_SN, G):
    """Inner products of each G neighbouring rows, (S / G, G, G)."""
    score_PGN = score_SN.unflatten(0, (-1, G))
    return score_PGN @ score_PGN.mT


def check(model, forward, group_size=3, **record):
    tape = ScoreTape(model, "streamed")
    with tape:
        tape.record(forward(), gram=group_size, sketches=SKETCHES, **record)
    score_SN = flat_scores(model, forward())
    assert relative(tape.norm2(), score_SN.square().sum(1)) <= 1e-10
    assert relative(tape.gram(), within(score_SN, group_size)) <= 1e-10
    with ScoreTape(model) as held:
        held.record(forward(), sketches=SKETCHES, **record)
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


@pytest.mark.parametrize("group_size", [1, 2, 6])
def test_groups_of_other_sizes(case, group_size):
    """Six: all pairs."""
    model, data = case("qwen3-tied")
    check(model, lambda: logps(model, *data), group_size)


@pytest.mark.parametrize(("name", "attention", "experts"), ways("eager", "batched_mm"))  # grouped_mm: no float64
def test_every_family(case, name, attention, experts):
    model, data = case(name, attention=attention, experts=experts)
    with ScoreTape(model, "streamed") as tape:
        tape.record(logps(model, *data), gram=2)
    assert relative(tape.gram(), within(flat_scores(model, logps(model, *data)), 2)) <= 1e-10


WAYS = {"multiplied out": -(10**6), "pairs of tokens": 10**6}


@pytest.mark.parametrize("chunk", [1, 500, 1 << 22])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3-tied", "llama-tied-biased"])
def test_both_ways_at_every_size_of_a_temporary(case, name, way, chunk, monkeypatch):
    """With a head that makes its left factor again; tied, its cross terms with the embedding count."""
    monkeypatch.setattr(contributions, "CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(gram, "CACHED_ELEMENTS", chunk)
    monkeypatch.setattr(gram, "MOVED", {"cpu": WAYS[way]})
    model, (ids_ST, mask_ST, prompt, _) = case(name)
    heads = {"model": lambda: logps(model, ids_ST, mask_ST, prompt), "chunked": lambda: chunked()}

    def chunked():
        hidden = model.model(input_ids=ids_ST, attention_mask=mask_ST, use_cache=False).last_hidden_state
        logp_ST = chunked_logps(model.lm_head, hidden[:, prompt - 1 : -1], ids_ST[:, prompt:], 0.7)
        return (logp_ST * mask_ST[:, prompt:]).sum(1)

    for forward in heads.values():
        with ScoreTape(model, "streamed") as tape:
            tape.record(forward(), gram=3)
        assert relative(tape.gram(), within(flat_scores(model, forward()), 3)) <= 1e-10


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # PEFT asks transformers for it
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # of targets that PEFT converts itself
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-moe-normalised"])
def test_adapters(case, name, way, monkeypatch):
    monkeypatch.setattr(gram, "MOVED", {"cpu": WAYS[way]})
    model, data = case(name)
    torch.manual_seed(3)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=3, target_modules="all-linear")).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    check(model, lambda: logps(model, *data))


def test_packed_rows(case):
    model, _ = case("qwen3-untied-biased")
    sequence_BL, forward = packed()
    check(model, lambda: forward(model), sequence_ids=sequence_BL)


def test_short_types_are_summed_in_float32(case):
    model, data = case("qwen3-tied", dtype=torch.bfloat16)
    with ScoreTape(model, "streamed") as tape:
        tape.record(logps(model, *data), gram=3)
    with ScoreTape(model) as held:
        held.record(logps(model, *data))
    assert tape.gram().dtype == torch.float32
    torch.testing.assert_close(tape.norm2(), held.norm2(), rtol=1e-3, atol=0)


def test_groups_that_are_not_whole_are_refused(case):
    model, data = case("qwen3-tied")
    with ScoreTape(model, "streamed") as tape, pytest.raises(ValueError, match="6 rows are no whole groups of 4"):
        tape.record(logps(model, *data), gram=4)


@pytest.fixture
def recorded(case):
    model, data = case("qwen3-tied")
    with ScoreTape(model, "streamed") as tape:
        tape.record(logps(model, *data))
    return tape


def test_what_was_not_asked_for_is_refused(recorded):
    with pytest.raises(ValueError, match="gram=G"):
        recorded.gram()
    with pytest.raises(ValueError, match="sketches="):
        recorded.sketch(1, 8, 256)


def test_it_gives_no_gradient(recorded):
    with pytest.raises(ValueError, match="no gradient can be had"):
        recorded.accumulate(torch.ones(6, dtype=torch.float64))
