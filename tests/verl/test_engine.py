"""verl's FSDP2 engine with our part on one and two ranks: scores, moments and rate against loop autograd."""

import pytest

from tests.verl.support.ranks import run_on_ranks

EXACT = ["padded", "debiased", "packed", "packed, filled up", "checkpointed", "two prompts a pass"]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def errors(request, model_folder):
    """By scenario, the largest errors of any rank; rows are shuffled, one prompt lacks an output, one row pads."""
    ranks = run_on_ranks("tests.verl.support.engine_scenarios", model_folder, request.param)
    return {name: {key: max(rank[name][key] for rank in ranks) for key in ranks[0][name]} for name in ranks[0]}


@pytest.mark.parametrize("scenario", EXACT)
def test_score_norms_are_those_of_loop_autograd(errors, scenario):
    assert errors[scenario]["norm2"] <= 1e-5


@pytest.mark.parametrize("scenario", EXACT)
def test_log_probabilities_and_entropy_come_with_them(errors, scenario):
    assert errors[scenario]["logps"] <= 1e-5
    assert errors[scenario]["entropy"] <= 1e-4  # of nats up to 30


@pytest.mark.parametrize("scenario", EXACT)
def test_prompts_gradient_norms_are_those_of_loop_autograd(errors, scenario):
    assert errors[scenario]["group_norm2"] <= 1e-4  # advantages of both signs cancel


@pytest.mark.parametrize("scenario", EXACT)
def test_prompts_own_gradients_are_those_of_loop_autograd(errors, scenario):
    """What the correction of a task whose prompts can be counted takes: `own2`."""
    assert errors[scenario]["own2"] <= 1e-4


@pytest.mark.parametrize("scenario", ["left out", "left out, debiased", "left out, off"])
def test_where_no_reward_differs_nothing_changes_on_any_rank(errors, scenario):
    """Though advantages are not 0, as under a baseline that remembers other rewards; and what follows goes on."""
    found = errors[scenario]
    assert found["changed"] == 0
    assert (found["lr_used"], found["skipped"]) == (0, 1)
    assert found["goes on"] == 1


@pytest.mark.parametrize("scenario", EXACT)
def test_the_update_makes_the_gradient_that_was_measured(errors, scenario):
    """verl's own loss and reduction, against the sum of A grad log pi over outputs."""
    assert errors[scenario]["grad_norm"] <= 1e-5


@pytest.mark.parametrize("scenario", EXACT)
def test_moments_and_rate_are_those_of_our_own_functions(errors, scenario):
    found = errors[scenario]
    assert found["trace_cov"] <= 1e-5
    assert found["signal2"] <= 1e-5
    assert found["lr_used"] <= 1e-5
    assert found["moved"] <= 1e-3  # the optimizer has used that rate: AdamW's first step moves by it
    assert found["lr_after"] == pytest.approx(1e-3)  # and eta_0 is back


def test_the_debiased_factor_is_not_that_of_the_plug_in(errors):
    """Or the two modes would not be told apart above."""
    assert errors["debiased"]["factor"] < errors["padded"]["factor"] - 0.05


def test_sketched_inner_products_leave_norms_and_gradient_exact(errors):
    assert errors["sketched"]["norm2"] <= 1e-5
    assert errors["sketched"]["grad_norm"] <= 1e-5
    assert 1e-5 < errors["sketched"]["trace_cov"] < 1  # an estimate, and one


def test_bfloat16_is_as_good_as_bfloat16(errors):
    assert errors["bfloat16"]["grad_norm"] <= 0.05
    assert errors["bfloat16"]["trace_cov"] <= 0.1


@pytest.mark.parametrize("scenario", ["auto", "auto, confined"])
def test_updates_are_measured_as_the_plain_model_measures_them(errors, scenario):
    """The KL of three updates, on the outputs of all ranks, from the weights that the engine is left with."""
    assert errors[scenario]["step_kl"] <= 1e-2  # of nats as few as 1e-6, from float32


def test_the_rate_is_that_of_our_own_rule_and_the_same_on_every_rank(errors):
    assert errors["auto"]["ranks agree"] == 1
    assert errors["auto"]["last"] == pytest.approx(1, rel=1e-5)
    assert errors["auto"]["most"] == pytest.approx(1, rel=1e-5)
    assert errors["auto"]["least"] < 0.5  # the first rate is the optimizer's own, and was too high


def test_clipping_sees_gradients_as_they_are_and_the_optimizer_in_units_of_their_scale(errors):
    assert errors["auto"]["grad_norm"] <= 1e-5
    assert errors["auto"]["scale"] < 0.5
    assert errors["auto"]["momentum"] <= 1e-4


def test_an_update_that_goes_too_far_is_shortened_on_every_rank(errors):
    assert errors["auto, confined"]["least"] < 0.5
    assert errors["auto, confined"]["ranks agree"] == 1


@pytest.mark.parametrize("scenario", ["auto", "auto, not felt"])
def test_the_first_update_is_as_long_as_it_was_meant_whatever_the_optimizers_rate(errors, scenario):
    assert 0.25 <= errors[scenario]["first"] <= 1


def test_an_update_too_short_to_be_felt_is_lengthened_on_every_rank(errors):
    assert errors["auto, not felt"]["ranks agree"] == 1


@pytest.mark.parametrize("scenario", ["calibrated", "calibrated, packed, sketched"])
def test_features_are_of_every_row_and_norms_of_the_prompts_that_were_asked_for(errors, scenario):
    found = errors[scenario]
    assert found["features"] <= 1e-5
    assert found["norm2"] <= 1e-5
    assert found["others"] == 0
    assert found["chosen"] == 3
    assert found["begins"] <= 1e-6
    assert found["taught"] == 0
    assert found["learned"] > 0


def test_a_step_without_norms_has_a_rate_and_says_nothing_of_its_noise(errors):
    found = errors["calibrated"]
    assert found["measured"] == 0
    assert found["in both"] == found["in the first"] == found["averages stay"] == 1
