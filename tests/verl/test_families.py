"""verl's engine with our part on experts, hybrids and adapters, on one and two ranks, against loop autograd."""

import pytest

from tests.verl.support.family_scenarios import HYBRIDS, save
from tests.verl.support.ranks import run_on_ranks

EXACT = {"qwen3_moe": 1e-5, "qwen3_moe, packed": 1e-5, "qwen3_next": 1e-3, "falcon_h1": 1e-5, "lfm2": 1e-5,
         "adapters": 1e-5}  # fmt: skip
"""Of float32; Qwen3-Next's own backward is off by as much."""


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def ranks(request, tmp_path_factory):
    """What every rank found."""
    folder = save(tmp_path_factory.mktemp("families"))
    found = run_on_ranks("tests.verl.support.family_scenarios", folder, request.param)
    print("", *(f"{name}: {found[0][name]}" for name in found[0]), sep="\n")
    return found


def are_exact(ranks, scenario, most):
    found = {key: max(rank[scenario][key] for rank in ranks) for key in ranks[0][scenario]}
    assert found["norm2"] <= most
    assert found["logps"] <= 1e-4
    assert found["group_norm2"] <= 10 * most  # advantages of both signs cancel
    assert found["grad_norm"] <= most
    assert found["lr_used"] <= most


@pytest.mark.parametrize("scenario", EXACT)
def test_scores_and_the_update_are_those_of_loop_autograd(ranks, scenario):
    are_exact(ranks, scenario, EXACT[scenario])


def test_noise_in_training_mode_is_refused_by_the_config_s_name_with_the_cure(ranks):
    for rank in ranks:
        assert "no noise in forwards (attention_dropout; the same tokens differ by" in rank["attention"]
        assert rank["attention"].endswith("set it to 0 in actor_rollout_ref.model.override_config.")


@pytest.mark.parametrize("scenario", ["lengths", "lengths, packed"])
def test_frequencies_that_follow_the_longest_row_are_refused_where_the_rollout_allows_it(ranks, scenario):
    """Its max_model_len is not set, and so it is the model's context, 64."""
    for rank in ranks:
        assert rank[scenario].startswith("rows may have 64 tokens, but if one has more than 32, ")
        assert "in verl rollout.max_model_len" in rank[scenario]


@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_rows_of_a_hybrid_are_refused_before_sampling_with_the_cure(ranks, family):
    for rank in ranks:
        said = rank[f"{family}, packed"]
        assert "model.layers." in said
        assert said.endswith("set actor_rollout_ref.model.use_remove_padding=False.")


def test_packed_rows_that_mix_in_a_frozen_layer_are_refused(ranks):
    """The adapters' scores would be exact, of a policy that is not the one which sampled."""
    for rank in ranks:
        said = rank["adapters of a hybrid, packed"]
        assert "is a convolution over tokens" in said
        assert said.endswith("set actor_rollout_ref.model.use_remove_padding=False.")


def test_adapters_of_experts_are_exact_or_refused_before_sampling_with_the_cure(ranks):
    found = ranks[0]["adapters of experts"]
    if isinstance(found, str):
        assert "experts" in found
        assert found.endswith("set actor_rollout_ref.model.target_modules=[q_proj,k_proj,v_proj,o_proj].")
    else:
        are_exact(ranks, "adapters of experts", 1e-5)
