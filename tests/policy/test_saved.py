"""What is saved is what was trained, in a layout that loads: adapters by any name, heads that were tied, configs."""

import json

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from oblrpo.errors import InputError
from oblrpo.policy import adopt_policy, byte_tokenizer, load_policy
from oblrpo.policy.checks import check_scores
from oblrpo.policy.saving import check_saved
from oblrpo.rollout import sample
from oblrpo.runs import RunFolder
from oblrpo.settings import PolicyConfig, TrainConfig
from tests.cli.test_families import folder_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),  # PEFT asks transformers for it
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers."),
    pytest.mark.filterwarnings("ignore:Model has .tie_word_embeddings=True."),
]
OBJECT, CPU = PolicyConfig(model="python:x"), PolicyConfig(device="cpu")
IDS = torch.tensor([[5, 6, 7, 3]])


def lora(**changes):
    settings = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
    return LoraConfig(task_type="CAUSAL_LM", **settings | changes)


@pytest.fixture
def adapted(tmp_path):
    """Returns a PEFT model of two adapters, of which the second is active; its folder's tokenizer."""

    def made(first="default", second=None, family="qwen3-tied", **changes):
        folder = folder_of(family, tmp_path / "model")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = get_peft_model(model, lora(**changes), adapter_name=first)
        if second:
            model.add_adapter(second, lora(**changes))
            model.set_adapter(second)
        return model, AutoTokenizer.from_pretrained(folder)

    return made


@torch.no_grad()
def logps(model):
    return model.eval()(IDS).logits.log_softmax(-1)


@pytest.mark.parametrize("names", [("default", "policy"), ("policy", None), ("policy", "default")])
def test_the_adapter_that_is_trained_is_saved_resumed_and_merged(adapted, tmp_path, names):
    policy = adopt_policy(*adapted(*names), OBJECT)
    policy.save(tmp_path / "saved")
    expected = logps(policy.model)
    loaded = load_policy(str(tmp_path / "saved"), CPU)
    assert torch.equal(logps(loaded.model), expected)
    assert torch.equal(logps(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")), expected)
    for parameter in policy.parameters:
        parameter.data.zero_()
    resumed = adopt_policy(policy.model, policy.tokenizer, OBJECT, tmp_path / "saved")
    assert torch.equal(logps(resumed.model), expected)
    loaded.save_merged(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logps(merged), expected, rtol=1e-4, atol=1e-4)


def test_trained_tokens_of_a_tied_head_are_refused_by_name(adapted):
    policy = adopt_policy(*adapted(trainable_token_indices=[3]), OBJECT)
    with pytest.raises(InputError, match=r"trainable_tokens_delta.* tied .* trainable_token_indices do not work"):
        check_scores(policy, "")


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen3-untied-biased"])
def test_lora_on_an_embedding_is_taken(adapted, family):
    policy = adopt_policy(*adapted(family=family, target_modules=["embed_tokens"]), OBJECT)
    check_scores(policy, "")
    assert len(sample(policy, ["ab"], 2, 3, 1.0).completions) == 2


def test_several_active_adapters_are_refused(adapted, tmp_path):
    model, tokenizer = adapted("one", "two")
    model.base_model.set_adapter(["one", "two"])
    policy = adopt_policy(model, tokenizer, OBJECT)
    with pytest.raises(InputError, match=r"2 active adapters \(one, two\), but a checkpoint holds one: activate"):
        check_saved(policy, OBJECT, True, tmp_path)


def test_what_is_trained_and_not_saved_is_refused(adapted, tmp_path):
    model, tokenizer = adapted()
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(InputError, match=r"model\.norm\.weight is trained, but PEFT does not save it"):
        check_saved(adopt_policy(model, tokenizer, OBJECT), OBJECT, True, tmp_path)


@pytest.mark.parametrize(
    "changes", [{"modules_to_save": ["lm_head"]}, {"use_dora": True}, {"bias": "all"}, {"trainable_token_indices": [3]}]
)
def test_all_that_lora_trains_is_saved(adapted, tmp_path, changes):
    policy = adopt_policy(*adapted(family="qwen3-untied-biased", **changes), OBJECT)
    with torch.no_grad():
        for parameter in policy.parameters:
            parameter += 0.1 * torch.randn_like(parameter)
    policy.save(tmp_path / "saved")
    assert torch.equal(logps(load_policy(str(tmp_path / "saved"), CPU).model), logps(policy.model))


@pytest.mark.parametrize("kind", [PromptTuningConfig, PrefixTuningConfig, PromptEncoderConfig])
def test_learned_prompts_are_evaluated_as_saved_and_trained_where_all_is_saved(tmp_path, kind):
    folder = folder_of("qwen3-untied-biased", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    model = get_peft_model(model, kind(task_type="CAUSAL_LM", num_virtual_tokens=3))
    policy = adopt_policy(model, byte_tokenizer(), OBJECT, train=False)
    policy.save(tmp_path / "saved")
    assert torch.equal(logps(load_policy(str(tmp_path / "saved"), CPU, train=False).model), logps(model))
    if kind is PromptEncoderConfig:
        with pytest.raises(InputError, match=r"prompt_encoder\.default\..* is trained, but PEFT does not save it"):
            check_saved(adopt_policy(model, policy.tokenizer, OBJECT), OBJECT, True, tmp_path)
    else:
        check_saved(adopt_policy(model, policy.tokenizer, OBJECT, tmp_path / "saved"), OBJECT, True, tmp_path)
        with pytest.raises(InputError, match="a learned prompt cannot be merged into weights"):
            policy.save_merged(tmp_path / "merged")


@pytest.mark.parametrize(
    "changes",
    [
        {"target_modules": ["lm_head", "q_proj"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["embed_tokens", "lm_head"]},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["embed_tokens"]},
        {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
)
def test_a_merged_adapter_of_one_use_of_a_tied_weight_leaves_the_other_alone(adapted, tmp_path, changes):
    policy = adopt_policy(*adapted(**changes), OBJECT)
    for trained in policy.parameters:
        trained.data += 0.1 * torch.randn_like(trained)
    expected = logps(policy.model)
    policy.save(tmp_path / "saved")
    loaded = load_policy(str(tmp_path / "saved"), CPU, train=False)
    assert torch.equal(logps(loaded.model), expected)
    loaded.save_merged(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    # For programs that go by it.
    assert merged.config.tie_word_embeddings is ("ensure_weight_tying" in changes)
    assert (expected.exp() * (expected - logps(merged))).sum(-1).abs().max() < 1e-6


def test_a_generation_config_is_saved_as_it_came(tiny_policy, tmp_path):
    """transformers itself writes no temperature without do_sample."""
    tiny_policy.model.generation_config = GenerationConfig(eos_token_id=1, temperature=0.6, top_p=0.9, do_sample=False)
    with pytest.raises(ValueError, match="temperature"):
        tiny_policy.model.generation_config.save_pretrained(tmp_path)
    tiny_policy.save(tmp_path / "saved")
    kept = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert (kept["temperature"], kept["top_p"], kept["eos_token_id"]) == (0.6, 0.9, 1)
    load_policy(str(tmp_path / "saved"), CPU).save(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "generation_config.json").read_text()) == kept


def test_a_tokenizer_is_saved_as_it_came(tiny_policy, tmp_path):
    """Padding on the left, and the end token where there is no other, are ours while we train."""
    tiny_policy.tokenizer.padding_side, tiny_policy.tokenizer.pad_token = "right", None
    tiny_policy.save(tmp_path / "came")
    policy = load_policy(str(tmp_path / "came"), CPU)
    assert policy.pad_token == policy.tokenizer.eos_token_id
    assert policy.sequences(["a", "bcd"], ["x", "y"]).ids_ST.tolist()[0][:2] == [1, 1]
    policy.save(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (saved.padding_side, saved.pad_token) == ("right", None)


def test_every_safetensors_of_a_checkpoint_is_the_models(tiny_policy, tmp_path):
    """vLLM loads all that a folder holds."""
    folder = RunFolder(tmp_path / "run")
    folder.create(TrainConfig())
    folder.save_checkpoint(0, tiny_policy.save, {"run": "", "step": 0, "optimizer": {0: torch.ones(2)}}, keep=1)
    files = list(folder.checkpoint(0).glob("*.safetensors"))
    assert {name for file in files for name in load_file(file)} <= tiny_policy.model.state_dict().keys()
    assert folder.wrong_with(0) in {"", "another run wrote it"}
