"""LoRA through PEFT: the norms are those of the trainable part alone, as by loop autograd."""

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model

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


def randomise_all(model):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)


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


@pytest.mark.parametrize(
    "changes",
    [
        {"use_dora": True},
        {"target_modules": ["embed_tokens", "v_proj"]},
        {"target_modules": ATTENTION, "trainable_token_indices": [3, 5]},
    ],
    ids=["dora", "embedding", "trainable tokens"],
)
def test_adapters_that_act_operation_by_operation_are_exact(changes):
    model = adapt("qwen3-untied-biased", **changes)
    randomise_all(model)
    assert_exact(model)


PROMPTS = {
    "prompt tuning": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "p-tuning": PromptEncoderConfig(
        task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8, encoder_reparameterization_type="MLP"
    ),
    "prefix tuning": PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


class WithoutPrompt(torch.nn.Module):
    """Logits of the given tokens alone, not of the virtual ones before them."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, attention_mask, **_):
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        output.logits = output.logits[:, -input_ids.shape[1] :]
        return output


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")  # PEFT 0.21 with transformers 5.24
@pytest.mark.parametrize("name", PROMPTS)
def test_trained_prompts_are_exact(name):
    torch.manual_seed(0)
    model = WithoutPrompt(get_peft_model(build_family("qwen3-tied"), PROMPTS[name]).double().eval())
    assert all("prompt_encoder" in key for key in trainable(model))
    data = batch()
    with torch.no_grad():
        expected = logps(model, *data)
    with ScoreTape(model):
        torch.testing.assert_close(logps(model, *data).detach(), expected, rtol=1e-12, atol=0)
        with torch.no_grad():  # sampling in between, of a batch of another size
            torch.testing.assert_close(logps(model, data[0][:2], data[1][:2], data[2]), expected[:2])
    assert "get_prompt" not in vars(model.model)
    assert_exact(model)


def test_p_tuning_with_a_recurrent_encoder_is_refused():
    settings = {"num_virtual_tokens": 3, "encoder_hidden_size": 8, "encoder_reparameterization_type": "LSTM"}
    model = get_peft_model(build_family("qwen3-tied"), PromptEncoderConfig(task_type="CAUSAL_LM", **settings))
    assert "prompt_encoder.default.lstm_head" in refusal(WithoutPrompt(model.double().eval()))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpointing_under_adapters_is_named():
    model = adapt("qwen3-untied-biased")
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.train()  # transformers checkpoints in training mode only; no dropout here
    for inputs_require_grad in (False, True):
        if inputs_require_grad:
            model.enable_input_require_grads()
        with pytest.raises(ValueError, match="reentrant"), ScoreTape(model) as tape:
            tape.record(logps(model, *batch()))
