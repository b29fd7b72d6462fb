"""LoRA through PEFT: the norms are those of the trainable part alone, as by loop autograd."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from oblrpo.scores import ScoreTape, UnsupportedModelError
from tests.scores.models import batch, compare, logps
from tests.scores.zoo import build_family

pytestmark = [
    pytest.mark.usefixtures("stay_double"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),  # PEFT asks transformers for it
    pytest.mark.filterwarnings("ignore:.lora_bias=True. was passed"),  # about merging
]

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
SETTINGS = {
    "plain": {},
    "rslora": {"use_rslora": True},
    "biases": {"lora_bias": True, "bias": "lora_only"},
    "head saved": {"modules_to_save": ["lm_head"]},
    "tied head saved": {"modules_to_save": ["lm_head"], "ensure_weight_tying": True},  # the embedding with it
}
CASES = {
    "qwen3-tied": ("plain", "rslora", "tied head saved"),
    "qwen3-untied-biased": ("plain", "rslora", "biases", "head saved"),
    "gpt2-tied": ("plain", "biases", "tied head saved"),
    "gpt2-untied": ("rslora", "head saved"),
}


def lora(name, **changes):
    layout = {"fan_in_fan_out": True} if name.startswith("gpt2") else {}
    settings = {"r": 3, "lora_alpha": 5, "lora_dropout": 0.0, "target_modules": "all-linear"}
    return LoraConfig(task_type="CAUSAL_LM", **settings | layout | changes)


def adapt(name, **changes):
    """A tiny model with an adapter that is no longer zero."""
    torch.manual_seed(0)
    model = get_peft_model(build_family(name), lora(name, **changes))
    return randomise(model.eval())


def randomise(model):
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.3)
    return model


def trainable(model):
    return [key for key, parameter in model.named_parameters() if parameter.requires_grad]


def assert_exact(model):
    assert max(compare(model, batch(), torch.randn(6, dtype=torch.float64), group_size=3)) <= 1e-10


def refusal(model):
    with pytest.raises(UnsupportedModelError) as refused, ScoreTape(model) as tape:
        tape.record(logps(model, *batch()))
    return str(refused.value)


@pytest.mark.parametrize(("name", "setting"), [(name, each) for name in CASES for each in CASES[name]])
def test_adapters_alone_are_exact(name, setting):
    model = adapt(name, **SETTINGS[setting])
    assert all(any(part in key for part in ("lora_", "bias", "modules_to_save")) for key in trainable(model))
    assert_exact(model)


@pytest.mark.parametrize("active", [["second"], ["default", "second"]])
@pytest.mark.parametrize("name", ["qwen3-tied", "gpt2-tied"])
def test_of_two_adapters_the_active_ones_count(name, active):
    model = adapt(name)
    model.add_adapter("second", lora(name, r=2))
    model.base_model.set_adapter(active)
    keys = trainable(randomise(model))
    assert {key.split(".")[-2] for key in keys} == set(active)
    assert_exact(model)


def test_a_frozen_reference_adapter_adds_nothing():
    model = adapt("qwen3-tied")
    model.add_adapter("reference", lora("qwen3-tied"))
    model.base_model.set_adapter(["default", "reference"])
    for key, parameter in randomise(model).named_parameters():
        parameter.requires_grad_("lora_" in key and "reference" not in key)
    assert_exact(model)


@pytest.mark.parametrize("name", ["qwen3-moe-normalised", "mixtral-untied", "olmoe-untied"])
def test_attention_and_router_of_a_mixture_of_experts(name):
    """The experts stay frozen, but what they pass on to the layers below is not."""
    model = adapt(name, target_modules=ATTENTION, modules_to_save=["gate"])
    assert any("gate.modules_to_save" in key for key in trainable(model))
    assert_exact(model)


def test_dora_is_refused_by_name():
    message = refusal(adapt("qwen3-untied-biased", use_dora=True))
    assert "DoRA" in message
    assert "self_attn.q_proj" in message


@pytest.mark.parametrize("parameter", ["mlp.experts.gate_up_proj", "mlp.gate.weight"])
def test_lora_on_a_bare_parameter_is_refused(parameter):
    """PEFT multiplies A and B out and adds them to the weight; neither is called."""
    model = adapt("qwen3-moe-normalised", target_modules=ATTENTION, target_parameters=[parameter])
    assert "lora_A" in refusal(model)


def test_lora_on_an_embedding_is_refused():
    assert "lora_embedding" in refusal(adapt("qwen3-untied-biased", target_modules=["embed_tokens"]))


def test_trainable_tokens_are_refused():
    model = adapt("qwen3-untied-biased", target_modules=ATTENTION, trainable_token_indices=[3, 5])
    assert "trainable_tokens" in refusal(model)
