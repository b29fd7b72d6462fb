"""LoRA on bare parameters (experts, routers), DoRA, LoRA on embeddings, trainable tokens: exact or refused by path."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from lab.benchmarks.families import EXACT, batches, build, compare, logps
from oblrpo.scores import ScoreTape, Sketch, UnsupportedModelError, by_operations, oracle, tapped_operations
from tests.scores.models import relative

pytestmark = [
    pytest.mark.usefixtures("stay_double"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),  # PEFT asks transformers for it
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys"),  # of targets that PEFT converts itself
]

EXPERTS = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
ONE = {"target_modules": [], "target_parameters": ["experts.down_proj"]}
ROUTER = {"target_modules": [], "target_parameters": ["gate.weight", "router.weight"]}
ATTENTION = ["o_proj"]
FAMILIES = ("qwen3_next", "deepseek_v3", "glm4_moe", "qwen3_moe", "gpt_oss", "llama4_text")


def lora(**changes):
    return LoraConfig(task_type="CAUSAL_LM", **{"r": 3, "lora_alpha": 5, "lora_dropout": 0.0} | changes)


def randomise(model):
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def adapt(family, **changes):
    """A tiny model with adapters that are no longer zero."""
    return randomise(get_peft_model(build(family, "sdpa"), lora(**changes)).double().eval())


def trainable(model):
    return [key for key, parameter in model.named_parameters() if parameter.requires_grad]


def assert_exact(model):
    """Padded, as many rows as tokens, one row."""
    for name, batch in batches().items():
        assert compare(model, batch) <= EXACT, name
        model.zero_grad()


def refusal(model):
    with pytest.raises(UnsupportedModelError) as refused, ScoreTape(model) as tape:
        tape.record(logps(model, *batches()["padded"]))
    return str(refused.value)


@pytest.mark.parametrize("settings", [EXPERTS, ROUTER], ids=["experts", "router"])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_of_bare_parameters_are_exact(family, settings):
    model = adapt(family, **settings)
    assert trainable(model)
    assert all("lora_" in key for key in trainable(model))
    assert bool(by_operations(model)) is (settings is ROUTER)
    assert_exact(model)


@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next"])
def test_adapters_of_all_that_is_linear_are_exact(family):
    """PEFT's "all-linear" reaches experts, and with them routers, as bare parameters."""
    model = adapt(family, target_modules="all-linear")
    adapted = {key.split(".mlp.")[1].split(".lora_")[0] for key in trainable(model) if ".mlp." in key}
    assert {"experts", "experts.base_layer", "gate"} <= adapted
    assert_exact(model)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_rslora": True},
        {"target_modules": ATTENTION, "modules_to_save": ["lm_head"]},
        {"target_modules": ["gate_proj", "up_proj", "down_proj"], "target_parameters": None},
        {"target_parameters": ["experts.down_proj"]},
        {"target_parameters": ["experts.gate_up_proj", "experts.down_proj", "gate.weight"]},
    ],
    ids=["rslora", "beside others", "converted by PEFT", "one of two", "with the router"],
)
def test_settings_of_adapters_of_experts_are_exact(changes):
    assert_exact(adapt("qwen3_next", **EXPERTS | changes))


def test_biases_of_experts_may_be_trained_beside_adapters_of_their_weights():
    model = adapt("gpt_oss", **EXPERTS)
    for key, parameter in model.named_parameters():
        if key.endswith(("gate_up_proj_bias", "down_proj_bias")):
            parameter.requires_grad_()
    assert any("_proj_bias" in key for key in trainable(model))
    assert_exact(model)


@pytest.mark.parametrize("part", ["lora_A", "lora_B"])
def test_one_matrix_of_an_adapter_may_be_frozen(part):
    model = adapt("qwen3_moe", **EXPERTS)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(part in key)
    assert_exact(model)


@pytest.mark.parametrize("active", [["second"], ["default", "second"]])
def test_of_two_adapters_the_active_ones_count(active):
    model = adapt("qwen3_moe", **EXPERTS)
    model.add_adapter("second", lora(**EXPERTS | {"r": 2}))
    model.base_model.set_adapter(active)
    randomise(model.double())
    assert {key.split(".")[-2] for key in trainable(model)} == set(active)
    assert_exact(model)


@pytest.mark.parametrize("family", ["deepseek_v3", "gpt_oss"])
@pytest.mark.parametrize("method", ["gram", "instantiate", "streamed"])
def test_every_method_gives_the_same(method, family):
    model, batch = adapt(family, **EXPERTS), batches()["padded"]
    coef_S = torch.full((4,), 0.7, dtype=torch.float64)
    results = []
    for each in ("auto", method):
        with ScoreTape(model, each) as tape:
            tape.record(logps(model, *batch), gram=4, sketches=[Sketch(3)])
        results.append([tape.norm2(), tape.gram(), tape.sketch(3)])
        if method != "streamed":
            results[-1] += [tape.accumulate(coef_S, 2), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
    assert max(relative(a, b) for a, b in zip(*results, strict=True)) <= EXACT


def test_checkpointed_experts_with_adapters_are_exact():
    model = adapt("qwen3_moe", **EXPERTS)
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    model.train()
    assert_exact(model)


def test_a_reference_without_adapters_is_not_recorded():
    model, batch = adapt("qwen3_moe", **EXPERTS), batches()["padded"]
    with ScoreTape(model) as tape:
        with torch.no_grad(), model.disable_adapter():
            reference_S = logps(model, *batch)
        tape.record(logps(model, *batch) - reference_S)
    torch.testing.assert_close(tape.norm2(), oracle.norm2(model, logps(model, *batch)))
    assert not any("forward" in vars(module) for module in model.modules())
    assert trainable(model)


def test_merged_adapters_are_refused():
    model = adapt("qwen3_moe", **EXPERTS)
    model.merge_adapter()
    message = refusal(model)
    assert message.startswith("base_model.model.model.layers.0.mlp.experts")
    assert "is merged into" in message
    model.unmerge_adapter()
    assert_exact(model)


def test_a_weight_that_is_trained_beside_its_adapter_is_refused():
    model = adapt("qwen3_moe", **EXPERTS)
    for key, parameter in model.named_parameters():
        if key.endswith("down_proj"):
            parameter.requires_grad_()
    assert "down_proj of Qwen3MoeExperts is trained itself beside LoRA on it" in refusal(model)


def test_experts_of_an_unknown_form_are_refused():
    model = adapt("jetmoe", target_modules=[], target_parameters=["input_linear.weight"])
    message = refusal(model)
    assert "input_linear: LoRA on the bare parameter weight of" in message
    assert "whose forward is not known" in message


def test_biases_of_experts_as_targets_are_refused_by_path():
    model = adapt("gpt_oss", target_modules=[], target_parameters=["experts.down_proj_bias"])
    assert "experts.lora_" in refusal(model)


def test_dropout_is_refused_by_peft():
    """If PEFT learns to drop entries of bare parameters, the rule must learn it, too."""
    with pytest.raises(ValueError, match="does not work with lora_dropout"):
        adapt("qwen3_moe", **EXPERTS | {"lora_dropout": 0.1})


def test_a_large_weight_as_a_bare_parameter_is_refused(monkeypatch):
    model = adapt("qwen3_moe", target_modules=[], target_parameters=["q_proj.weight"])
    assert_exact(model)
    monkeypatch.setattr(tapped_operations, "SMALL_NUMBERS", 200)
    monkeypatch.setattr(tapped_operations, "SMALL_SHARE", 0.0)
    assert "what is made of it has 1024 numbers" in refusal(model)


OTHERS = {
    "dora": {"use_dora": True, "target_modules": ["o_proj", "lm_head"]},
    "embedding": {"target_modules": ["embed_tokens", "o_proj"]},
    "dora on the embedding": {"use_dora": True, "target_modules": ["embed_tokens", "o_proj"]},
    "trainable tokens": {"target_modules": ATTENTION, "trainable_token_indices": [3, 5]},
    "trainable tokens alone": {"target_modules": ["o_proj"], "trainable_token_indices": {"embed_tokens": [3]}},
}


@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("family", ["qwen3", "qwen3_next", "deepseek_v3"])
def test_dora_embeddings_and_tokens_are_exact(family, changes):
    assert_exact(adapt(family, **changes))
