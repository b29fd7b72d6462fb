"""Weights for another engine: by a checkpoint's names, adapters merged as PEFT does, the policy untouched."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from oblrpo.errors import InputError
from oblrpo.policy.adapters import merge
from oblrpo.rollout.weights import check_weights, checkpoint_weights, is_tied
from tests.scores.zoo import build_family

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT calls what transformers has deprecated


def adapted(policy, **settings):
    model = get_peft_model(policy.model, LoraConfig(r=3, lora_alpha=5, **settings))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn_like(p))
    return model.eval()


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": "all-linear", "use_rslora": True},
        {"target_modules": ["v_proj"], "modules_to_save": ["norm"]},
    ],
)
def test_merged_weights_are_those_of_merge_and_unload(tiny_policy, settings):
    model = adapted(tiny_policy, **settings)
    if "modules_to_save" in settings:
        with torch.no_grad():
            next(p for n, p in model.named_parameters() if "norm.modules_to_save" in n).mul_(2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    ours = {name: value.clone() for name, value in checkpoint_weights(model)}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    merged = copy.deepcopy(model).merge_and_unload()
    expected = dict(merged.named_parameters())
    assert set(ours) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("end", ["embed_tokens", "lm_head"])
def test_an_adapter_on_one_use_of_a_tied_weight_unties_it(tiny_policy, end):
    model = adapted(tiny_policy, target_modules=[end])
    assert not is_tied(model)
    check_weights(model)
    ours = {name: value.clone() for name, value in checkpoint_weights(model)}
    assert (ours["lm_head.weight"] - ours["model.embed_tokens.weight"]).norm() > 0.1
    expected = dict(merge(model).named_parameters(remove_duplicate=False))
    for name, value in expected.items():
        torch.testing.assert_close(ours[name], value.detach())


def test_a_tied_weight_is_one_whatever_the_config_says(tiny_policy):
    model = tiny_policy.model
    assert "lm_head.weight" not in dict(checkpoint_weights(model))
    model.lm_head.weight = torch.nn.Parameter(2 * model.lm_head.weight.detach())
    assert model.config.tie_word_embeddings
    assert not is_tied(model)
    assert torch.equal(dict(checkpoint_weights(model))["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize("family", ["qwen3-tied", "gpt2-untied", "qwen3-moe-normalised", "mixtral-untied"])
def test_weights_are_those_of_a_checkpoint(family, tmp_path):
    """transformers keeps experts joined in memory, and apart on the disk."""
    model = build_family(family)
    model.save_pretrained(tmp_path)
    saved, ours = load_file(tmp_path / "model.safetensors"), dict(checkpoint_weights(model))
    assert ours.keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in ours.items())


def test_buffers_that_a_checkpoint_holds_go_along_under_their_own_names(tiny_policy):
    """As a router's correction; under PEFT a trained copy of its module has another name, and the first is not used."""
    norm = tiny_policy.model.model.norm
    norm.register_buffer("correction", torch.ones(2))
    norm.register_buffer("passing", torch.ones(2), persistent=False)
    assert set(dict(checkpoint_weights(tiny_policy.model))) >= {"model.norm.correction"}
    ours = dict(checkpoint_weights(adapted(tiny_policy, target_modules=["v_proj"], modules_to_save=["norm"])))
    assert [name for name in ours if "norm." in name and ".layers." not in name] == [
        "model.norm.weight",
        "model.norm.correction",
    ]


def test_weights_that_cannot_be_taken_over_are_refused(tiny_policy):
    check_weights(tiny_policy.model)
    model = adapted(tiny_policy, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(InputError, match=r"use_dora\) cannot be merged"):
        check_weights(model)
    model.get_base_model().is_quantized = True
    with pytest.raises(InputError, match=r"quantised.*load_in_4bit"):
        check_weights(model)


def test_an_adapter_that_is_switched_off_or_merged_already_adds_nothing(tiny_policy):
    model = adapted(tiny_policy, target_modules=["q_proj"])
    name = "model.layers.0.self_attn.q_proj.weight"
    adapted_weight = dict(checkpoint_weights(model))[name].clone()
    with model.disable_adapter():
        off = dict(checkpoint_weights(model))[name].clone()
    assert float((adapted_weight - off).norm()) > 0.1
    model.merge_adapter()
    torch.testing.assert_close(dict(checkpoint_weights(model))[name], adapted_weight)
