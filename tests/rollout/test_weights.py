"""Adapters merged for another engine: PEFT's own merge, without touching the policy."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from oblrpo.errors import InputError
from oblrpo.rollout.vllm import checkpoint_weights

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


def test_an_adapter_on_one_use_of_a_tied_weight_is_refused(tiny_policy):
    model = adapted(tiny_policy, target_modules=["embed_tokens"])
    with pytest.raises(InputError, match=r"model.embed_tokens changes one use of a tied weight"):
        list(checkpoint_weights(model))


def test_dora_is_refused(tiny_policy):
    model = adapted(tiny_policy, target_modules=["q_proj"], use_dora=True)
    with pytest.raises(InputError, match=r"use_dora\) cannot be merged"):
        list(checkpoint_weights(model))


def test_an_adapter_that_is_switched_off_or_merged_already_adds_nothing(tiny_policy):
    model = adapted(tiny_policy, target_modules=["q_proj"])
    name = "model.layers.0.self_attn.q_proj.weight"
    adapted_weight = dict(checkpoint_weights(model))[name].clone()
    with model.disable_adapter():
        off = dict(checkpoint_weights(model))[name].clone()
    assert float((adapted_weight - off).norm()) > 0.1
    model.merge_adapter()
    torch.testing.assert_close(dict(checkpoint_weights(model))[name], adapted_weight)
