import json
import math
from dataclasses import replace

import pytest
import torch

from oblrpo.scores import contributions, oracle
from oblrpo.scores.proxies import PROXIES, CalibratedProxy, Features, agreement, log_error, logit_norm2
from tests.scores.models import VOCABULARY


def random_features(S, seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    length_S = torch.randint(1, 30, (S,)).to(dtype)
    return Features(
        length_S,
        -length_S * torch.rand(S, dtype=dtype),
        length_S * torch.rand(S, dtype=dtype),
        length_S * torch.rand(S, dtype=dtype).add(0.1),
    )


def power_law(features, exponents, scale=1.0):
    """Scale T^a (sum logit_norm2)^b exp(c log pi / T + d H / T)."""
    T, (a, b, c, d) = features.length_S, exponents
    linear = a * T.log() + b * features.logit_norm2_S.log() + (c * features.logps_S + d * features.entropy_S) / T
    return scale * linear.exp()


# ---- logit_norm2


@pytest.mark.parametrize("chunk", [1, 40, 1 << 22])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logit_norm2_agrees_with_autograd(chunk, temperature, monkeypatch):
    monkeypatch.setattr(contributions, "CHUNK_ELEMENTS", chunk)
    torch.manual_seed(0)
    logits_STV, ids_ST = 3 * torch.randn(3, 4, 7, dtype=torch.float64), torch.randint(7, (3, 4))
    scaled_STV = (logits_STV / temperature).requires_grad_()
    scaled_STV.log_softmax(-1).gather(2, ids_ST[..., None]).sum().backward()
    expected_ST = scaled_STV.grad.square().sum(-1)
    got_ST = logit_norm2(logits_STV.requires_grad_(), ids_ST, temperature)
    torch.testing.assert_close(got_ST, expected_ST, rtol=1e-12, atol=0)
    assert not got_ST.requires_grad
    pi = (logits_STV[1, 2] / temperature).softmax(0)
    assert got_ST[1, 2].item() == pytest.approx((1 - 2 * pi[ids_ST[1, 2]] + pi.square().sum()).item(), rel=1e-12)


def test_logit_norm2_reads_a_slice_and_widens_short_types():
    torch.manual_seed(1)
    logits_STV, ids_ST = torch.randn(2, 5, 9).bfloat16(), torch.randint(9, (2, 4))
    before = logits_STV.clone()
    got_ST = logit_norm2(logits_STV[:, :-1], ids_ST)
    assert got_ST.dtype == torch.float32
    torch.testing.assert_close(got_ST.double(), logit_norm2(logits_STV[:, :-1].double(), ids_ST), rtol=1e-5, atol=0)
    assert torch.equal(logits_STV, before)


def test_a_token_that_is_nearly_sure_keeps_its_digits():
    logits_STV = torch.tensor([[[30.0, 0.0, 0.0]]])
    expected = logit_norm2(logits_STV.double(), torch.tensor([[0]])).item()
    assert logit_norm2(logits_STV, torch.tensor([[0]])).item() == pytest.approx(expected, rel=1e-5)
    assert expected == pytest.approx(6 * math.exp(-60), rel=1e-10)


def test_logit_norm2_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="do not fit"):
        logit_norm2(torch.zeros(2, 3, 5), torch.zeros(2, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="temperature"):
        logit_norm2(torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long), 0.0)


# ---- features, fixed proxies, agreement


def test_features_sum_over_real_tokens_and_proxies_follow_their_formulas():
    mask_SC = torch.tensor([[1, 1, 0], [1, 1, 1]])
    nan = float("nan")
    features = Features.from_tokens(
        torch.tensor([[0.5, 0.25, nan], [1.0, 0.0, 2.0]]),
        torch.tensor([[-1.0, -2.0, -9.0], [0.0, -0.5, -0.5]], requires_grad=True),
        torch.tensor([[0.1, 0.2, 9.0], [1.0, 1.0, 1.0]]),
        mask_SC,
    )
    assert features.length_S.tolist() == [2.0, 3.0]
    assert features.logit_norm2_S.tolist() == [0.75, 3.0]
    assert features.logps_S.tolist() == [-3.0, -1.0]
    assert features.entropy_S.tolist() == pytest.approx([0.3, 3.0])
    assert not features.logps_S.requires_grad
    assert vars(features.at(torch.tensor([1]))) == {name: v[1:] for name, v in vars(features).items()}
    assert set(PROXIES) == {"length", "logit"}
    assert PROXIES["length"](features).tolist() == [2.0, 3.0]
    assert PROXIES["logit"](features).tolist() == [0.75, 3.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"length_S": torch.tensor([1.0, -2.0])}, "negative number of tokens"),
        ({"logps_S": torch.tensor([-1.0, float("nan")])}, "logps_S holds NaN"),
        ({"logit_norm2_S": torch.tensor([1.0, -1.0])}, "negative"),
        ({"entropy_S": torch.zeros(3)}, "one entry per completion"),
    ],
)
def test_features_that_cannot_be_are_refused(change, message):
    good = dict.fromkeys(("length_S", "logit_norm2_S", "logps_S", "entropy_S"), torch.ones(2))
    with pytest.raises(ValueError, match=message):
        Features(**good | change)
    with pytest.raises(ValueError, match="do not fit"):
        Features.from_tokens(*[torch.ones(2, 3)] * 3, torch.ones(2, 1))


def test_agreement_and_log_error_by_hand():
    """Logs less the group's mean: (1, -1, 2, -2) and (1, -1, -1, 1): r = (1 + 1 - 2 - 2) / sqrt(10 * 4)."""
    e = math.e
    proxy_S, norm2_S = torch.tensor([e**2, 1.0, e**4, 1.0]), torch.tensor([5 * e**2, 5.0, 7.0, 7 * e**2])
    assert agreement(proxy_S, norm2_S, 2) == pytest.approx(-2 / math.sqrt(40), rel=1e-6)
    assert log_error(proxy_S, norm2_S, 2) == pytest.approx(math.sqrt((0 + 0 + 9 + 9) / 4), rel=1e-6)
    logs = torch.stack([proxy_S, norm2_S]).double().log()  # one group of all: the plain correlation
    assert agreement(proxy_S, norm2_S, 4) == pytest.approx(torch.corrcoef(logs)[0, 1].item(), rel=1e-12)


def test_agreement_ignores_scales_of_groups_and_exponents_and_leaves_out_zeros():
    torch.manual_seed(2)
    norm2_S, scale_S = torch.rand(12).double() + 0.1, torch.rand(4).double().repeat_interleave(3) + 0.1
    assert agreement(norm2_S.sqrt() * scale_S, norm2_S, 3) == pytest.approx(1, abs=1e-12)
    assert log_error(norm2_S * scale_S, norm2_S, 3) == pytest.approx(0, abs=1e-12)
    assert log_error(norm2_S.sqrt(), norm2_S, 3) > 0.1
    proxy_S, zeroed_S = torch.rand(12) + 0.1, norm2_S.clone()
    zeroed_S[[2, 9, 10, 11]] = 0
    kept = torch.tensor([0, 1, 3, 4, 5, 6, 7, 8])
    parts = [(v[kept].log() - torch.stack([v[g].log().mean() for g in ([0, 1], [3, 4, 5], [6, 7, 8])])[
        torch.tensor([0, 0, 1, 1, 1, 2, 2, 2])]) for v in (proxy_S.double(), norm2_S)]  # fmt: skip
    expected = torch.cosine_similarity(*parts, dim=0).item()
    assert agreement(proxy_S, zeroed_S, 3) == pytest.approx(expected, rel=1e-12)


def test_agreement_without_spread_is_nan_and_misuse_is_named():
    norm2_S = torch.tensor([1.0, 2.0, 3.0, 5.0])
    assert math.isnan(agreement(torch.tensor([0.3, 0.3, 7.0, 7.0]), norm2_S, 2))
    assert math.isnan(agreement(norm2_S, torch.zeros(4), 2))
    assert math.isnan(log_error(norm2_S, torch.zeros(4), 2))
    for proxy_S, group_size, message in (
        (torch.ones(3), 2, "alike"),
        (norm2_S, 3, "divide"),
        (norm2_S, 0, "at least 1"),
        (norm2_S * float("inf"), 2, "proxy_S holds"),
        (-norm2_S, 2, "negative"),
    ):
        with pytest.raises(ValueError, match=message):
            agreement(proxy_S, norm2_S, group_size)


# ---- the regression


def test_a_planted_power_law_is_recovered():
    proxy, exponents = CalibratedProxy(ridge=1e-6), (0.4, 1.1, -0.7, 2.0)
    for step in range(5):
        features = random_features(64, step)
        per_prompt_S = torch.rand(16).double().repeat_interleave(4) + 0.5  # prompts may differ in any way
        proxy.observe(features, per_prompt_S * power_law(features, exponents, 300.0), 4)
    assert list(proxy.coefficients.values()) == pytest.approx(exponents, abs=1e-4)
    assert proxy.observed == 5 * 64
    features = random_features(32, 99)
    ratio_S = proxy.predict(features) / power_law(features, exponents, 300.0)
    assert log_error(proxy.predict(features), power_law(features, exponents), 4) < 1e-3
    assert 0.5 < ratio_S.min() <= ratio_S.max() < 1.5  # in units of the norms, not in proportion only


@pytest.mark.parametrize("ridge", [1e-6, 1.0])
def test_features_that_say_the_same_do_no_harm(ridge):
    """Log-probabilities stand for the entropy where a sampler reports them alone: each twin gets half of the slope."""
    proxy = CalibratedProxy(ridge=ridge)

    def reported(features):
        return replace(features, entropy_S=-features.logps_S)

    for step in range(5):
        features = random_features(64, step)
        proxy.observe(reported(features), power_law(features, (0.4, 0.0, -0.7, 0.0), 300.0), 4)
    found = proxy.coefficients
    assert found["mean_logp"] == pytest.approx(-found["mean_entropy"], rel=1e-6)
    assert 2 * found["mean_logp"] == pytest.approx(-0.7, abs=1e-4 if ridge < 1 else 0.1)
    other = random_features(32, 99)
    predicted_S, expected_S = proxy.predict(reported(other)), power_law(other, (0.4, 0.0, -0.7, 0.0), 300.0)
    torch.testing.assert_close(predicted_S, expected_S, rtol=1e-4 if ridge < 1 else 0.1, atol=0)


def test_a_lone_output_a_prompt_gives_the_level_alone():
    """Within groups of one nothing differs: weights are the length's, in units of the norms."""
    proxy, features = CalibratedProxy(), random_features(64)
    assert math.isnan(proxy.observe(features, 300 * features.length_S**1.6, 1))
    torch.testing.assert_close(proxy.predict(features), 300 * features.length_S**1.6, rtol=1e-4, atol=0)


def test_forgetting_tracks_a_drift():
    first, second = (1.0, 1.0, 0.0, 0.0), (2.0, 0.5, -1.0, 1.0)
    quick, never = CalibratedProxy(forgetting=0.7, ridge=0.01), CalibratedProxy(forgetting=1.0, ridge=0.01)
    for step in range(40):
        features = random_features(64, step)
        for proxy in (quick, never):
            proxy.observe(features, power_law(features, first if step < 20 else second), 4)
    assert list(quick.coefficients.values()) == pytest.approx(second, abs=0.05)
    assert max(abs(a - b) for a, b in zip(never.coefficients.values(), second, strict=True)) > 0.3


def test_before_anything_was_observed_it_is_a_power_of_length():
    proxy, features = CalibratedProxy(), random_features(8)
    assert proxy.observed == 0
    torch.testing.assert_close(proxy.predict(features), features.length_S**1.6, rtol=1e-12, atol=0)


def test_the_agreement_reported_is_of_the_prediction_before_the_fit():
    proxy, features = CalibratedProxy(), random_features(32)
    norm2_S = power_law(features, (0.0, 2.0, 1.0, 1.0))
    expected = agreement(PROXIES["length"](features), norm2_S, 4)
    assert proxy.observe(features, norm2_S, 4) == pytest.approx(expected, rel=1e-12)
    expected = agreement(proxy.predict(features), norm2_S, 4)
    assert proxy.observe(features, norm2_S, 4) == expected > 0.9


def test_the_order_of_outputs_and_the_scales_of_prompts_do_not_matter():
    features, other = random_features(12, 3), random_features(6, 4)
    norm2_S = power_law(features, (0.3, 1.0, 0.5, 1.0)) * torch.rand(12).double().add(0.5)
    order = torch.tensor([3, 5, 4, 0, 2, 1, 9, 10, 11, 8, 6, 7])  # groups of 3 and their outputs change places
    scale_S = torch.tensor([1e-3, 1.0, 20.0, 1e4], dtype=torch.float64).repeat_interleave(3)
    plain, changed = CalibratedProxy(), CalibratedProxy()
    plain.observe(features, norm2_S, 3)
    changed.observe(features.at(order), (norm2_S * scale_S)[order], 3)
    ratio_S = changed.predict(other) / plain.predict(other)
    torch.testing.assert_close(ratio_S, torch.full_like(ratio_S, scale_S.log().mean().exp().item()), rtol=1e-9, atol=0)
    one_by_one = torch.cat([plain.predict(other.at(torch.tensor([s]))) for s in range(6)])
    torch.testing.assert_close(one_by_one, plain.predict(other), rtol=1e-12, atol=0)  # no output sees another


def test_outputs_without_a_norm_are_left_out():
    features, kept = random_features(12, 5), torch.tensor([0, 1, 2, 6, 7, 8])
    norm2_S = power_law(features, (0.3, 1.0, 0.5, 1.0)) * torch.rand(12).double().add(0.5)
    full, part = CalibratedProxy(), CalibratedProxy()
    full.observe(features, norm2_S.where(torch.isin(torch.arange(12), kept), 0), 6)
    part.observe(features.at(kept), norm2_S[kept], 3)
    assert full.observed == part.observed == 6
    torch.testing.assert_close(full.predict(features), part.predict(features), rtol=1e-9, atol=0)
    state = full.state_dict()
    assert math.isnan(full.observe(features, torch.zeros(12), 3))  # nothing to learn, nothing forgotten
    assert all(torch.equal(state[key], full.state_dict()[key]) for key in ("products", "totals"))


def test_predictions_are_positive_and_finite_far_outside_of_what_was_seen():
    proxy = CalibratedProxy(ridge=1e-9)
    features = random_features(8, 6, torch.float32)
    proxy.observe(features, power_law(features, (0.0, 20.0, 0.0, 0.0)), 4)
    extreme = Features(torch.tensor([1.0, 1e6]), torch.tensor([-1e-9, -1e7]), torch.zeros(2), torch.tensor([0.0, 1e5]))
    weights_S = proxy.predict(extreme)
    assert weights_S.dtype == torch.float32
    assert (weights_S > 0).all()
    assert weights_S.isfinite().all()


def test_a_state_through_json_predicts_the_same():
    proxy, features = CalibratedProxy(), random_features(16, 7)
    proxy.observe(features, power_law(features, (0.3, 1.0, 0.5, 1.0)), 4)
    state = proxy.state_dict()
    text = json.dumps({key: each.tolist() if isinstance(each, torch.Tensor) else each for key, each in state.items()})
    plain = {
        key: torch.tensor(v, dtype=torch.float64) if key != "observed" else v for key, v in json.loads(text).items()
    }
    resumed = CalibratedProxy()
    resumed.load_state_dict(plain)
    for each in (proxy, resumed):  # and both go on alike, without touching the state that was taken
        each.observe(random_features(16, 8), power_law(random_features(16, 8), (1.0, 1.0, 0.0, 0.0)), 4)
    assert torch.equal(proxy.predict(features), resumed.predict(features))
    assert resumed.observed == proxy.observed == 32
    assert torch.equal(state["products"], plain["products"])
    with pytest.raises(ValueError, match="shape"):
        resumed.load_state_dict(state | {"products": torch.zeros(3, 4)})


def test_misuse_of_the_regression_is_named():
    features = random_features(4)
    for norm2_S, group_size, message in (
        (torch.ones(3), 2, "alike"),
        (torch.tensor([1.0, float("nan"), 1.0, 1.0]), 2, "norm2_S holds"),
        (torch.tensor([1.0, -1.0, 1.0, 1.0]), 2, "negative"),
        (torch.ones(4), 3, "divide"),
        (torch.ones(4), 0, "at least 1"),
    ):
        proxy = CalibratedProxy()
        with pytest.raises(ValueError, match=message):
            proxy.observe(features, norm2_S, group_size)
        assert proxy.observed == 0
    for settings in ({"forgetting": 0.0}, {"forgetting": 1.1}, {"ridge": 0.0}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            CalibratedProxy(**settings)


# ---- a language model


def sampled(model, S, longest):
    """Completions of the model's own, cut at random lengths; log-probabilities with gradient, and features."""
    ids_ST = torch.randint(VOCABULARY, (S, 1))
    with torch.no_grad():
        for _ in range(longest):
            pi_SV = model(input_ids=ids_ST, use_cache=False).logits[:, -1].softmax(-1)
            ids_ST = torch.cat([ids_ST, torch.multinomial(pi_SV, 1)], 1)
    mask_SC = (torch.arange(longest) < torch.randint(1, longest + 1, (S, 1))).long()
    logits_SCV = model(input_ids=ids_ST, use_cache=False).logits[:, :-1]
    logp_SCV = logits_SCV.log_softmax(-1)
    token_logps_SC = logp_SCV.gather(2, ids_ST[:, 1:, None])[..., 0]
    entropy_SC = -(logp_SCV.exp() * logp_SCV).sum(-1)
    features = Features.from_tokens(logit_norm2(logits_SCV, ids_ST[:, 1:]), token_logps_SC, entropy_SC, mask_SC)
    return (token_logps_SC * mask_SC).sum(1), features


def test_on_a_language_model_it_agrees_at_least_as_well_as_the_fixed_proxies(case):
    model, _ = case("qwen3-tied", dtype=torch.float32, initializer_range=0.02)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 12  # a policy that knows what it wants, as after any training
    proxy, held_out = CalibratedProxy(), []
    for step in range(8):
        logps_S, features = sampled(model, 32, 8)
        norm2_S = oracle.norm2(model, logps_S)
        if step < 5:
            proxy.observe(features, norm2_S, 4)
        else:
            held_out.append((features, norm2_S))
    features = Features.join([features for features, _ in held_out])
    norm2_S = torch.cat([norm2_S for _, norm2_S in held_out])
    mine = proxy.predict(features)
    for name, function in PROXIES.items():
        assert agreement(mine, norm2_S, 4) >= agreement(function(features), norm2_S, 4), name
        assert log_error(mine, norm2_S, 4) <= log_error(function(features), norm2_S, 4), name
