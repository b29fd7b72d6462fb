"""Inner products of scores, exact and sketched, against loop autograd."""

import math

import pytest
import torch

from oblrpo.scores import ScoreTape, Vector, chunked_logps, oracle
from oblrpo.scores import contributions as contributions_module
from oblrpo.scores.gram import Sketch, Sketcher, generator_for
from tests.scores.models import gradients, logps, relative
from tests.scores.test_methods import G, packed

HOLDING = {
    "auto": {},
    "gram": {"method": "gram"},
    "instantiate": {"method": "instantiate"},
}
LENGTHS_AND_CHUNKS = [((3, 2), 1 << 22), ((6, 40), 50), ((6, 40), 1 << 22)]


def flat_scores(model, logps_S):
    """Loop autograd, (S, N)."""
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in oracle.scores(model, logps_S)])


def true_gram(model, logps_S):
    score_SN = flat_scores(model, logps_S)
    return score_SN @ score_SN.T


def recorded(model, logps_of, keywords=None, **record):
    with ScoreTape(model, **(keywords or {})) as tape:
        tape.record(logps_of(), **record)
    return tape


def gram_error(model, logps_of, keywords, **record):
    tape = recorded(model, logps_of, keywords, gram=len(logps_of()), **record)
    got = tape.gram().squeeze(0)
    expected = true_gram(model, logps_of())
    assert got.shape == expected.shape
    assert relative(got, got.T) < 1e-14
    assert all(p.grad is None for p in model.parameters())
    return ((got - expected).abs() / (expected.diagonal().outer(expected.diagonal())).sqrt()).max().item()


@pytest.mark.parametrize(
    ("configuration", "tokens", "chunk"),
    [*(("qwen3-tied", *each) for each in LENGTHS_AND_CHUNKS), ("llama-untied", (6, 40), 50)],
)
@pytest.mark.parametrize("name", HOLDING)
def test_gram_is_exact(case, name, configuration, tokens, chunk, monkeypatch):
    """Tied: the embedding's and the head's cross terms count. 46 tokens: factors are smaller; 5: products are."""
    monkeypatch.setattr(contributions_module, "CHUNK_ELEMENTS", chunk)
    model, data = case(configuration, 5, *tokens)
    assert gram_error(model, lambda: logps(model, *data), HOLDING[name]) <= 1e-10


@pytest.mark.parametrize(("name", "chunk"), [(name, 1 << 22) for name in HOLDING] + [("auto", 50), ("gram", 50)])
def test_gram_is_exact_for_experts(case, name, chunk, monkeypatch):
    monkeypatch.setattr(contributions_module, "CHUNK_ELEMENTS", chunk)
    model, data = case("qwen3-moe-normalised")
    assert gram_error(model, lambda: logps(model, *data), HOLDING[name]) <= 1e-10


@pytest.mark.parametrize("name", ["auto", "gram"])
@pytest.mark.parametrize("family", ["qwen3-untied-biased", "qwen3-moe-normalised"])
def test_gram_is_exact_for_packed_rows(case, name, family):
    model, _ = case(family)
    sequence_BL, forward = packed()
    assert gram_error(model, lambda: forward(model), HOLDING[name], sequence_ids=sequence_BL) <= 1e-10


@pytest.mark.parametrize("name", ["auto", "gram"])
@pytest.mark.parametrize(
    ("configuration", "chunk"), [("qwen3-tied", 1), ("qwen3-tied", 500), ("llama-untied", 1 << 22)]
)
def test_gram_is_exact_for_a_chunked_head(case, name, configuration, chunk, monkeypatch):
    monkeypatch.setattr(contributions_module, "CHUNK_ELEMENTS", chunk)
    model, (ids_ST, mask_ST, prompt, _) = case(configuration)

    def forward():
        hidden = model.model(input_ids=ids_ST, attention_mask=mask_ST, use_cache=False).last_hidden_state
        logp_ST = chunked_logps(model.lm_head, hidden[:, prompt - 1 : -1], ids_ST[:, prompt:])
        return (logp_ST * mask_ST[:, prompt:]).sum(1)

    assert gram_error(model, forward, HOLDING[name]) <= 1e-10


@pytest.mark.parametrize("name", HOLDING)
def test_gram_is_exact_for_transposed_weights_and_learned_positions(case, name):
    model, data = case("gpt2-tied")
    assert gram_error(model, lambda: logps(model, *data), HOLDING[name]) <= 1e-10


def test_the_diagonal_of_gram_is_norm2_and_frozen_parameters_do_not_count(case):
    model, data = case("llama-untied")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "embed" in name or "norm" in name)
    tape = recorded(model, lambda: logps(model, *data), gram=6)
    torch.testing.assert_close(tape.gram()[0].diagonal(), tape.norm2(), rtol=1e-12, atol=0)
    assert gram_error(model, lambda: logps(model, *data), {}) <= 1e-10


def test_gram_leaves_the_norms_and_the_gradient_as_they_are(case):
    model, data = case("qwen3-tied")
    coef_S = torch.randn(6, dtype=torch.float64)
    found = []
    for asked in ({}, {"gram": 6, "sketches": [Sketch(0)]}):
        tape = recorded(model, lambda: logps(model, *data), **asked)
        found.append((tape.norm2(), tape.accumulate(coef_S, G), *gradients(model).values()))
        model.zero_grad()
    assert all(torch.equal(plain, asked) for plain, asked in zip(*found, strict=True))


def test_short_types_are_summed_in_float32(case):
    model, data = case("qwen3-tied", dtype=torch.bfloat16)
    tape = recorded(model, lambda: logps(model, *data), gram=6, sketches=[Sketch(0)])
    (gram_SS,), sketch_SL = tape.gram(), tape.sketch(0)
    assert gram_SS.dtype == sketch_SL.dtype == torch.float32
    torch.testing.assert_close(gram_SS.diagonal(), tape.norm2(), rtol=1e-3, atol=0)


SEEDS = 200


def tied_and_first_layer(case):
    """Few parameters of every kind: many seeds take long."""
    model, data = case("qwen3-tied", 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".layers.1." not in name)
    return model, data


def sketched(model, data, expected, seeds=SEEDS, keywords=None, **settings):
    """Inner products over many seeds: their z-scores against the exact ones, and root mean square relative error."""
    scale = expected.diagonal().outer(expected.diagonal()).sqrt()
    specs = [Sketch(seed, **settings) for seed in range(seeds)]
    tape = recorded(model, lambda: logps(model, *data), keywords, sketches=specs)
    found = torch.stack([(sketch_SL := tape.sketch(*spec)) @ sketch_SL.T for spec in specs])
    z = (found.mean(0) - expected) / (found.std(0) / math.sqrt(seeds))
    return z, float(((found - expected) / scale).square().mean().sqrt())


@pytest.mark.parametrize("name", ["auto", "gram"])
def test_sketches_are_unbiased(case, name):
    """Tied head and embedding; 200 seeds."""
    model, data = tied_and_first_layer(case)
    expected = true_gram(model, logps(model, *data))
    z, error = sketched(model, data, expected, keywords=HOLDING[name], directions=4, dimensions=256)
    assert z.abs().max() < 4.5
    assert 0.01 < error < 0.5


def test_sketches_are_unbiased_for_experts(case):
    """Alone, or the terms between two experts' slices, which must vanish, would be small beside the rest."""
    model, data = case("qwen3-moe-normalised", 4)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".1.mlp.experts" in name)
    z, _ = sketched(model, data, true_gram(model, logps(model, *data)), 300, directions=16, dimensions=1024)
    assert z.abs().max() < 4.5


def test_the_error_of_a_sketch_falls_with_directions_and_with_dimensions(case):
    """As 1 / sqrt(K) and 1 / sqrt(L), each while the other is large; 60 seeds, 16 inner products."""
    model, data = tied_and_first_layer(case)
    expected = true_gram(model, logps(model, *data))
    errors = {
        (K, L): sketched(model, data, expected, 60, directions=K, dimensions=L)[1]
        for K, L in ((32, 8), (32, 32), (2, 4096), (8, 4096))
    }
    assert errors[32, 32] / errors[32, 8] == pytest.approx(0.5, rel=0.25)
    assert errors[8, 4096] / errors[2, 4096] == pytest.approx(0.5, rel=0.25)


@pytest.mark.parametrize("keywords", [{}, {"method": "gram"}])
@pytest.mark.parametrize("family", ["qwen3-untied-biased", "qwen3-moe-normalised"])
def test_sketches_of_micro_batches_fit_together(case, family, keywords):
    """The same seed, in one batch or in three."""
    model, (ids_ST, mask_ST, prompt, _) = case(family, 6, 6, 30)
    ask = {"sketches": [Sketch(3, 4, 512), Sketch(4, 4, 512)]}
    whole = recorded(model, lambda: logps(model, ids_ST, mask_ST, prompt), **ask).sketch(3, 4, 512)
    parts = []
    for rows in (slice(0, 1), slice(1, 4), slice(4, 6)):
        tape = recorded(model, lambda rows=rows: logps(model, ids_ST[rows], mask_ST[rows], prompt), keywords, **ask)
        parts.append(tape.sketch(3, 4, 512))
    assert relative(torch.cat(parts), whole) <= 1e-12
    assert relative(tape.sketch(4, 4, 512), whole[4:]) > 0.5


def test_a_micro_batch_cut_to_its_own_length_fits_too(case):
    model, (ids_ST, mask_ST, prompt, _) = case("qwen3-tied", 4, 3, 40)
    mask_ST[:2, prompt + 2 :] = 0
    ask = {"sketches": [Sketch(1)]}
    whole = recorded(model, lambda: logps(model, ids_ST, mask_ST, prompt), **ask)
    short = recorded(model, lambda: logps(model, ids_ST[:2, :5], mask_ST[:2, :5], prompt), **ask)
    assert relative(short.sketch(1), whole.sketch(1)[:2]) <= 1e-10


def test_a_sketch_can_be_repeated(case):
    model, data = case("llama-untied")
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(recorded(model, lambda: logps(model, *data), sketches=[Sketch(5)]).sketch(5))
    assert torch.equal(*found)
    assert found[0].shape == (6, 4096)


def test_a_count_sketch_has_the_variance_it_says():
    """(||x||^2 ||y||^2 + <x, y>^2) / L at most, from 2,000 seeds; another key gives other buckets."""
    torch.manual_seed(52)
    rows_SN, L = torch.randn(2, 40, dtype=torch.float64), 32
    found = []
    for seed in range(2000):
        sketcher = Sketcher(Sketch(seed, dimensions=L), 2, torch.device("cpu"))
        sketcher.add(1, 2, [Vector(rows_SN)])
        found.append(float(sketcher.sketch_SL[0] @ sketcher.sketch_SL[1]))
    found = torch.tensor(found, dtype=torch.float64)
    inner = float(rows_SN[0] @ rows_SN[1])
    bound = float(rows_SN[0].square().sum() * rows_SN[1].square().sum() + inner**2) / L
    assert abs(float(found.mean()) - inner) < 4.5 * float(found.std()) / math.sqrt(2000)
    assert 0.7 * bound < float(found.var()) < 1.1 * bound
    keys = [(1, 2), (2, 1), (1, -1), (0, 2), (12, -1)]
    assert len({tuple(torch.rand(3, generator=generator_for(7, *key)).tolist()) for key in keys}) == 5


def test_nothing_recorded_nothing_to_multiply(case):
    model, _ = case("qwen2-tied")
    for ask in (ScoreTape(model).gram, lambda: ScoreTape(model).sketch(0)):
        with pytest.raises(ValueError, match="call record"):
            ask()
