"""The weights of a policy reach a real vLLM engine, whole and at every sync, and the check after it sees where not."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.rollout import VLLMSampler, vllm
from oblrpo.rollout.weights import checkpoint_weights
from oblrpo.settings import VLLM
from tests.vllm.support import FAMILIES, apart, policy_of, tiny_policy, update

PROMPTS = ["a", "bcdef", "gh and so on and on"]
ROUNDED = {"float32": 1e-5, "bfloat16": 0.15}
"""Nats by which log-probabilities of an engine with the right weights may be apart in the mean."""


def off(policy, sampler, temperature=1.0):
    torch.manual_seed(3)
    return float(apart(policy, sampler.sample(PROMPTS, 4, 24, temperature), temperature).mean())


def adapted(policy, **settings):
    """The policy with LoRA adapters that change it, and its frozen weights as they are."""
    model = get_peft_model(policy.model, LoraConfig(r=3, lora_alpha=5, **settings)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.2 * torch.randn_like(p))
    return Policy(model, policy.tokenizer)


def assert_follows(policy, sampler, updates=1):
    """The engine has the policy's weights after every sync, and not before."""
    assert off(policy, sampler) < ROUNDED["float32"]
    for _ in range(updates):
        update(policy)
        assert off(policy, sampler) > 1e-3
        sampler.sync(policy)
        assert off(policy, sampler) < ROUNDED["float32"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_follows_its_updates(family):
    policy = policy_of(family)
    assert_follows(policy, VLLMSampler(policy, VLLM(max_model_len=64)), updates=3 if family == "qwen3" else 1)


@pytest.mark.parametrize(
    ("built", "dtype"),
    [
        (lambda: policy_of("gemma2-window-caps"), "bfloat16"),
        (lambda: policy_of("qwen3-moe", dtype=torch.bfloat16), "auto"),
        (lambda: tiny_policy(bf16=True), "auto"),
        (lambda: adapted(policy_of("qwen3", dtype=torch.bfloat16), target_modules="all-linear"), "auto"),
    ],
    ids=["the engine's", "the weights'", "the policy's", "the weights' beside adapters"],
)
def test_bfloat16_is_a_roundings_width_off(built, dtype):
    policy = built()
    sampler = VLLMSampler(policy, VLLM(max_model_len=64, dtype=dtype))
    assert sampler.dtype == "bfloat16"
    update(policy)
    sampler.sync(policy)
    assert 1e-4 < off(policy, sampler) < ROUNDED["bfloat16"]


def test_a_head_that_was_untied_is_taken_over_too():
    policy = policy_of("qwen3")
    head = policy.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach() + 0.1 * torch.randn_like(head.weight))
    assert policy.model.config.tie_word_embeddings
    assert_follows(policy, VLLMSampler(policy, VLLM(max_model_len=64)))


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"target_modules": "all-linear", "use_rslora": True}),
        ("qwen3", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("qwen3", {"target_modules": ["q_proj", "lm_head"]}),
        ("qwen3-untied", {"target_modules": ["v_proj", "lm_head"], "modules_to_save": ["norm"]}),
        ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]}),
    ],
)
def test_adapters_are_merged_aside(family, settings):
    policy = adapted(policy_of(family), **settings)
    frozen = {name: p.detach().clone() for name, p in policy.model.named_parameters() if not p.requires_grad}
    sampler = VLLMSampler(policy, VLLM(max_model_len=64))
    assert_follows(policy, sampler, updates=2)
    assert all(torch.equal(p, frozen[name]) for name, p in policy.model.named_parameters() if name in frozen)
    if "modules_to_save" not in settings:
        with policy.model.disable_adapter():
            sampler.sync(policy)
            assert off(policy, sampler) < ROUNDED["float32"]
        assert off(policy, sampler) > 1e-3


WRONG = {
    "a layer left out": lambda name, weight: None if ".layers.1." in name else weight,
    "no embedding": lambda name, weight: None if "embed_tokens" in name else weight,
    "no head": lambda name, weight: None if name == "lm_head.weight" else weight,
    "zeros": lambda name, weight: 0 * weight,
    "nothing": lambda name, weight: None,
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_that_samples_from_another_distribution_is_refused(monkeypatch, dtype):
    policy = policy_of("qwen3-untied")
    sampler = VLLMSampler(policy, VLLM(max_model_len=64, dtype=dtype))
    draw = sampler._tokens

    def refused(name, value, of=vllm):
        with monkeypatch.context() as patch:
            patch.setattr(of, name, value)
            with pytest.raises(InputError, match="does not sample from the policy's distribution"):
                sampler.sync(policy)

    for changed in WRONG.values():
        update(policy, 0.5)

        def weights(model, changed=changed):
            given = ((name, changed(name, weight)) for name, weight in checkpoint_weights(model))
            return ((name, weight) for name, weight in given if weight is not None)

        refused("checkpoint_weights", weights)
        sampler.sync(policy)
    for temperature in (0.5, 2.0) if dtype == "bfloat16" else (0.98, 1.02):
        refused("_tokens", lambda *given, other=temperature: draw(*given[:4], other, 1.0), sampler)
    sampler.sync(policy)


def test_prompts_that_were_read_before_an_update_are_read_again(monkeypatch):
    """The keys and values of a prompt's blocks are kept for the next one that begins alike, and forgotten by a sync."""
    policy = policy_of("qwen3", max_position_embeddings=256)
    sampler = VLLMSampler(policy, VLLM())
    for _ in range(2):
        drawn = sampler.sample(["x" * 200], 4, 8, 1.0)
        assert apart(policy, drawn).max() < 1e-4
        update(policy)
        sampler.sync(policy)
    monkeypatch.setattr(sampler.engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="could not empty its prefix cache"):
        sampler.sync(policy)
