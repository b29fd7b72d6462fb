"""A policy that its checkpoint would not bring back is refused before anything is sampled; others are as they were."""

import re
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from oblrpo.errors import InputError
from oblrpo.policy import adopt_policy, byte_tokenizer, load_policy, make_policy, saving
from oblrpo.policy.saving import check_saved
from oblrpo.settings import PolicyConfig
from tests.cli.test_families import folder_of
from tests.scores.zoo import EXPERTS, FAMILIES, build_family

pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),  # PEFT asks transformers for it
    pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers."),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys"),
    pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False"),  # PEFT says it of GPT-2
]
OBJECT = PolicyConfig(model="python:x", device="cpu")


@pytest.fixture
def base(tmp_path):
    return folder_of("qwen3-untied-biased", tmp_path / "model")


def of_folder(base):
    return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)


def lora(**changes):
    return LoraConfig(**{"r": 2, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"} | changes)


def trained(model):
    with torch.no_grad():
        for weight in model.parameters():
            weight += 1e-5  # far less than a log-probability shows
    return model


def doubled(model):
    class Doubled(torch.nn.Linear):
        def forward(self, hidden):
            return 2 * super().forward(hidden)

    head = Doubled(*reversed(model.lm_head.weight.shape), bias=False)
    head.weight, model.lm_head = model.lm_head.weight, head


def cut(model):
    model.model.layers = model.model.layers[:1]


def share(model):
    model.model.layers[1].mlp = model.model.layers[0].mlp


def tie(model):
    model.lm_head.weight = model.model.embed_tokens.weight


def widen(model):
    model.model.layers[0].mlp.gate_proj = torch.nn.Linear(16, 30, bias=False)


def add_bias(model):
    model.lm_head.bias = torch.nn.Parameter(torch.ones(258))


def slow_down(model):
    model.model.rotary_emb.inv_freq *= 0.1


def refused(model, tokenizer, place, config=OBJECT):
    policy = adopt_policy(model, tokenizer, config)
    before = {name: weight.clone() for name, weight in policy.model.state_dict().items()}
    files, state = sorted(place.rglob("*")), torch.get_rng_state()
    try:
        check_saved(policy, config, True, place)
    except InputError as error:
        return str(error)
    finally:
        assert sorted(place.rglob("*")) == files
        assert torch.equal(torch.get_rng_state(), state)
        assert all(torch.equal(weight, before[name]) for name, weight in policy.model.state_dict().items())
    return ""


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (cut, r"1\d of its weights would be made up, as model.layers.1.input_layernorm.weight"),
        (share, "model.layers.1.mlp.down_proj.weight is a weight that has another name, too"),
        (tie, "lm_head.weight is a weight that has another name, too"),
        (widen, r"model.layers.0.mlp.gate_proj.weight would have the shape \(24, 16\) and not \(30, 16\)"),
        (add_bias, "1 of its weights would be lost, as lm_head.bias"),
        (doubled, r"log-probabilities of tokens differ by up to \d"),
        (slow_down, "log-probabilities of tokens differ by up to"),
    ],
)
def test_a_whole_model_that_its_config_does_not_make(base, tmp_path, monkeypatch, change, words, beyond):
    model = of_folder(base)
    change(model)
    if beyond:
        monkeypatch.setattr(saving, "AFFORDABLE", 0)
    said = refused(model, byte_tokenizer(), tmp_path)
    if beyond and "log-prob" in words:  # which is not tried
        assert not said
    else:
        assert re.search(f"would not restore this policy: {words}.*; make config and class say what was changed", said)


@pytest.mark.parametrize("beyond", [False, True])
@pytest.mark.parametrize("by", ["lora", "peft", "prompt"])
def test_adapters_of_a_model_that_was_trained_before(base, tmp_path, monkeypatch, by, beyond):
    if beyond:
        monkeypatch.setattr(saving, "AFFORDABLE", 0)
    prompt = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    for change, words in ((lambda model: model, ""), (trained, "would have other values")):
        model = change(of_folder(base))
        if by != "lora":
            model = get_peft_model(model, lora() if by == "peft" else prompt)
        config = replace(OBJECT, lora={"r": 2} if by == "lora" else {})
        said = refused(model, byte_tokenizer(), tmp_path, config)
        assert (words in said and "save the model beneath the adapters" in said) if words else not said


@pytest.mark.parametrize(
    ("kind", "taken"),
    [*((kind, True) for kind in (True, False, "gaussian", "orthogonal", "olora", "pissa")), ("pissa_niter_4", False)],
)
def test_an_initialisation_that_changes_the_model_at_random(base, tmp_path, kind, taken):
    said = refused(get_peft_model(of_folder(base), lora(init_lora_weights=kind)), byte_tokenizer(), tmp_path)
    assert bool(said) is not taken
    assert taken or "q_proj.base_layer.weight would have other values" in said


@pytest.mark.parametrize("changes", [{}, {"use_dora": True}, {"use_rslora": True}, {"bias": "all"}])
def test_adapters_by_any_name_that_are_saved_are_taken(base, tmp_path, changes):
    model = get_peft_model(of_folder(base), lora(**changes), adapter_name="first")
    if changes.get("bias") is None:
        model.add_adapter("second", lora())
        model.set_adapter("second")
    assert not refused(model, byte_tokenizer(), tmp_path)


def test_what_becomes_of_adapters_shows_where_new_ones_add_nothing(base, tmp_path, monkeypatch):
    """As if their scale were lost on the way."""
    config = lora(lora_alpha=64)

    def forget(folder, **more):
        config.lora_alpha = 2
        kept(folder, **more)
        config.lora_alpha = 64

    model = get_peft_model(of_folder(base), config)
    kept = model.peft_config["default"].save_pretrained
    monkeypatch.setattr(model.peft_config["default"], "save_pretrained", forget)
    assert "log-probabilities of tokens differ" in refused(model, byte_tokenizer(), tmp_path)


@pytest.mark.parametrize("adapter", [{}, {"modules_to_save": ["embed_tokens", "lm_head"]}])
def test_tokens_that_were_added(base, tmp_path, adapter):
    model, tokenizer = of_folder(base), byte_tokenizer()
    tokenizer.add_tokens(["<a>", "<b>"])
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(tmp_path / "grown")
    tokenizer.save_pretrained(tmp_path / "grown")
    said = refused(get_peft_model(model, lora(**adapter)), tokenizer, tmp_path)
    assert "size mismatch for base_model.model.model.embed_tokens" in said
    assert not refused(get_peft_model(of_folder(tmp_path / "grown"), lora(**adapter)), tokenizer, tmp_path)


def test_a_model_of_no_folder(tmp_path):
    model = build_family("qwen3-tied", torch.float32, vocab_size=258)
    assert not refused(model, byte_tokenizer(), tmp_path)
    said = refused(model, byte_tokenizer(), tmp_path, replace(OBJECT, lora={"r": 2}))
    assert "a checkpoint/adapter_config.json does not say which model the adapters belong to" in said
    assert "save the model beneath the adapters" in said


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_taken(tmp_path, name):
    folder, place = folder_of(name, tmp_path / "model"), tmp_path
    config = PolicyConfig(model=str(folder), device="cpu")
    check_saved(make_policy(config), config, False, place)
    config = replace(config, lora={"r": 2}, dtype="bfloat16")
    check_saved(make_policy(config), config, False, place)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if name not in EXPERTS:
        assert not refused(of_folder(folder).double(), tokenizer, place)
    assert not refused(of_folder(folder).bfloat16(), tokenizer, place, replace(OBJECT, lora={"r": 2}, dtype="bfloat16"))


def test_a_folder_that_cannot_be_written(base, tmp_path):
    with pytest.raises(InputError, match=r"cannot test saving the model in .*nowhere: No such file"):
        check_saved(load_policy(str(base), OBJECT), OBJECT, False, tmp_path / "nowhere")


def test_a_tied_head_may_be_registered_first(tmp_path):
    class First(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            model = self.model
            del self.model
            self.model = model

    sizes = {"vocab_size": 258, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0)
    policy = adopt_policy(First(config), byte_tokenizer(), OBJECT)
    check_saved(policy, OBJECT, given=True, place=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_model_that_was_loaded_by_name_is_not_loaded_again_beneath_its_adapters(base, tmp_path, monkeypatch):
    policy = make_policy(config := PolicyConfig(model=str(base), device="cpu", lora={"r": 2}))
    loaded = []
    monkeypatch.setattr("oblrpo.policy.load.load_policy", lambda *_, **__: loaded.append(1) or policy)
    for given in (False, True):
        check_saved(policy, config, given, tmp_path)
        assert len(loaded) == given  # a second copy would be the most memory that such a run ever has
