"""Adapters of all that is linear in a mixture of experts: PEFT adapts experts and routers as bare parameters."""

from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from oblrpo import estimators
from oblrpo.errors import InputError
from oblrpo.scores import tapped_operations
from tests.trl.support import flat, ours, tiny_policy
from tests.trl.test_gradient import assert_close, expected, run

EVERYTHING = {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}


def experts_policy():
    """The toy policy's tokenizer with a tiny Qwen3-MoE in float64."""
    torch.manual_seed(0)
    tokenizer = tiny_policy().tokenizer
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, moe_intermediate_size=12, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=5, num_experts_per_tok=2,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, experts_implementation="eager",
    )  # fmt: skip
    return SimpleNamespace(model=Qwen3MoeForCausalLM(config), tokenizer=tokenizer)


def test_adapters_of_experts_and_routers_are_exact(tmp_path):
    trainer, updates = run(tmp_path, steps=2, policy=experts_policy(), peft_config=LoraConfig(**EVERYTHING))
    adapted = {name.split(".mlp.")[1].split(".lora")[0] for name in updates[0]["grads"] if ".mlp." in name}
    assert adapted == {"experts", "experts.base_layer", "gate"}
    prior = estimators.Prior()
    for update in updates:
        assert_close(-flat(update["grads"]), expected(trainer, update, "oblr_shrunk", prior).mean(0))
        prior.next_step()


def test_adapters_that_cannot_be_taken_are_refused_in_the_constructor(tmp_path, monkeypatch):
    monkeypatch.setattr(tapped_operations, "SMALL_NUMBERS", 10)
    monkeypatch.setattr(tapped_operations, "SMALL_SHARE", 0.0)
    with pytest.raises(InputError, match=r'gate\.lora_A.* give LoraConfig target_modules=\["q_proj", "k_proj"'):
        ours(tmp_path, experts_policy(), peft_config=LoraConfig(**EVERYTHING))
    ours(tmp_path, experts_policy(), peft_config=LoraConfig(**EVERYTHING | {"target_modules": ["q_proj", "v_proj"]}))
