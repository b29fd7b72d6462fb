"""The tiny hybrids of `lab.benchmarks.families` hold every kind of layer, and are exact with all of them."""

import pytest
from transformers import AutoConfig

from lab.benchmarks.families import EXACT, batches, build, compare, judge
from lab.benchmarks.tiny import KINDS, config_for, kinds_of, names

HYBRIDS = {
    "bamba": "BambaMixer BambaAttention",
    "falcon_h1": "FalconH1Mixer FalconH1Attention",
    "granitemoehybrid": "GraniteMoeHybridMambaLayer GraniteMoeHybridAttention GraniteMoeHybridExperts",
    "jamba": "JambaMambaMixer JambaAttention JambaExperts JambaMLP",
    "kimi_linear": "KimiLinearDeltaAttention KimiLinearAttention KimiLinearExperts KimiLinearMLP",
    "lfm2": "Lfm2ShortConv Lfm2Attention",
    "lfm2_moe": "Lfm2MoeShortConv Lfm2MoeAttention Lfm2MoeExperts Lfm2MoeMLP",
    "nemotron_h": "NemotronHMamba2Mixer NemotronHAttention NemotronHExperts NemotronHMLP",
    "olmo_hybrid": "OlmoHybridGatedDeltaNet OlmoHybridAttention",
    "qwen3_5_moe_text": "Qwen3_5MoeGatedDeltaNet Qwen3_5MoeAttention Qwen3_5MoeExperts",
    "qwen3_next": "Qwen3NextGatedDeltaNet Qwen3NextAttention Qwen3NextExperts",
}


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.usefixtures("stay_double")
def test_hybrids_are_exact_with_every_kind_of_layer(family):
    model = build(family, "eager")
    assert set(HYBRIDS[family].split()) <= {type(module).__name__ for module in model.modules()}
    assert compare(model, batches()["padded"]) <= EXACT


def test_families_are_judged_with_positions_where_they_take_them():
    assert judge("qwen3", "sdpa", position_ids=True).verdict == "exact"
    assert judge("bloom", "sdpa", position_ids=True).verdict == "takes no position_ids"


def test_tiny_configurations_list_every_kind_of_layer_that_the_default_does():
    compared = 0
    for family in names():
        try:
            tiny = config_for(family)
        except Exception:  # "not built" in the table
            continue
        default = AutoConfig.for_model(family)
        pairs = [(default, tiny), (getattr(default, "text_config", None), getattr(tiny, "text_config", None))]
        for ours, theirs in pairs:
            for name in KINDS if ours is not None else ():
                kinds = set(kinds_of(ours, name))
                compared += len(kinds) > 1
                assert kinds <= set(kinds_of(theirs, name)), family
    assert compared > 30
