"""The weights of a policy reach a real vLLM engine, whole and at every sync, and the check after it sees where not."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.rollout import VLLMSampler, vllm
from oblrpo.settings import VLLM
from tests.vllm.support import FAMILIES, apart, policy_of, tiny_policy, update

PROMPTS = ["a", "bcdef", "gh and so on and on"]
ROUNDED = {"float32": 1e-5, "bfloat16": 0.15}
"""Nats by which log-probabilities of an engine with the right weights may be apart in the mean."""


def off(policy, sampler, temperature=1.0):
    torch.manual_seed(3)
    return float(apart(policy, sampler.sample(PROMPTS, 4, 24, temperature), temperature).mean())


def assert_follows(policy, sampler, updates=1, most=ROUNDED["float32"]):
    """The engine has the policy's weights, after every update that it was told of and not before."""
    assert off(policy, sampler) < most
    for _ in range(updates):
        update(policy)
        assert off(policy, sampler) > max(1e-3, 1.1 * most if most > 1e-3 else 0)
        sampler.sync(policy)
        assert off(policy, sampler) < most


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_follows_its_updates(family):
    policy = policy_of(family)
    assert_follows(policy, VLLMSampler(policy, VLLM(max_model_len=64)), updates=3 if family == "qwen3" else 1)


@pytest.mark.parametrize("family", ["qwen3", "gemma2-window-caps", "qwen3-moe"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_in_bfloat16_is_a_roundings_width_off(family, dtype):
    policy = policy_of(family, dtype=getattr(torch, dtype))
    sampler = VLLMSampler(policy, VLLM(max_model_len=64, dtype="bfloat16" if dtype == "float32" else "auto"))
    assert sampler.dtype == "bfloat16"
    sampler.sync(policy)
    assert 1e-3 < off(policy, sampler) < ROUNDED["bfloat16"]


def test_a_policy_that_computes_in_bfloat16_has_such_an_engine():
    policy = tiny_policy(bf16=True)
    sampler = VLLMSampler(policy, VLLM())
    assert sampler.dtype == "bfloat16"
    assert off(policy, sampler) < ROUNDED["bfloat16"]


def test_a_head_that_was_untied_is_taken_over_too():
    policy = policy_of("qwen3")
    head = policy.model.lm_head
    head.weight = torch.nn.Parameter(head.weight.detach() + 0.1 * torch.randn_like(head.weight))
    assert policy.model.config.tie_word_embeddings
    assert_follows(policy, VLLMSampler(policy, VLLM(max_model_len=64)))


def adapted(policy, **settings):
    """The policy with LoRA adapters that change it, and its frozen weights as they are."""
    model = get_peft_model(policy.model, LoraConfig(r=3, lora_alpha=5, **settings)).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(0.2 * torch.randn_like(p))
    return Policy(model, policy.tokenizer)


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {"target_modules": "all-linear"}),
        ("qwen3", {"target_modules": ["q_proj", "down_proj"], "use_rslora": True}),
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
    with policy.model.disable_adapter():
        sampler.sync(policy)
        assert off(policy, sampler) < ROUNDED["float32"]
    assert off(policy, sampler) > 1e-3


def test_adapters_beside_weights_in_bfloat16():
    policy = adapted(policy_of("qwen3", dtype=torch.bfloat16), target_modules="all-linear")
    sampler = VLLMSampler(policy, VLLM(max_model_len=64))
    assert sampler.dtype == "bfloat16"
    assert off(policy, sampler) < ROUNDED["bfloat16"]


@pytest.mark.parametrize(
    "changed",
    [
        lambda name, weight: None if ".layers.1." in name else weight,
        lambda name, weight: None if "embed_tokens" in name else weight,
        lambda name, weight: None if name == "lm_head.weight" else weight,
        lambda name, weight: 0 * weight,
        lambda name, weight: None,
        lambda name, weight: 1.1 * weight if "mlp" in name else weight,
    ],
    ids=["a layer left out", "no embedding", "no head", "zeros", "nothing", "10 percent off"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_with_other_weights_is_refused(monkeypatch, changed, dtype):
    policy = policy_of("qwen3-untied")
    sampler = VLLMSampler(policy, VLLM(max_model_len=64, dtype=dtype))
    update(policy, 0.5)
    given = vllm.checkpoint_weights

    def other(model):
        for name, weight in given(model):
            if (other := changed(name, weight)) is not None:
                yield name, other

    monkeypatch.setattr(vllm, "checkpoint_weights", other)
    with pytest.raises(InputError, match="vLLM samples from another distribution than the policy's"):
        sampler.sync(policy)


def test_an_engine_that_samples_at_another_temperature_is_refused(monkeypatch):
    policy = policy_of("qwen3")
    sampler = VLLMSampler(policy, VLLM(max_model_len=64))
    draw = sampler._draw
    monkeypatch.setattr(sampler, "_draw", lambda *given, **settings: draw(*given, **settings | {"temperature": 0.9}))
    with pytest.raises(InputError, match="another distribution"):
        sampler.sync(policy)


def test_a_cache_that_cannot_be_emptied_is_refused(monkeypatch):
    policy = tiny_policy()
    sampler = VLLMSampler(policy, VLLM())
    monkeypatch.setattr(sampler.engine, "reset_prefix_cache", lambda: False)
    with pytest.raises(RuntimeError, match="could not empty its prefix cache"):
        sampler.sync(policy)


def test_an_update_reaches_prompts_that_the_engine_has_read_before():
    """The keys and values of a prompt's blocks are kept for the next one that begins alike, and forgotten by a sync."""
    policy = policy_of("qwen3", max_position_embeddings=256)
    sampler = VLLMSampler(policy, VLLM())
    for _ in range(2):
        drawn = sampler.sample(["x" * 200], 4, 8, 1.0)
        assert apart(policy, drawn).max() < 1e-4
        update(policy)
        sampler.sync(policy)
