"""LoRA and QLoRA: what is trained, how sampler and trainer agree, and that it saves, resumes and merges."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GenerationConfig

from oblrpo.errors import InputError
from oblrpo.policy import byte_tokenizer, load, load_policy, make_policy
from oblrpo.scores import tapped_operations
from oblrpo.settings import PolicyConfig
from tests.cli.conftest import complained, metrics_of
from tests.cli.test_families import folder_of
from tests.scores.zoo import build_family

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),  # PEFT asks transformers for it
]


@pytest.fixture
def base(tmp_path):
    return folder_of("qwen3-tied", tmp_path / "model")


def logits_of(model):
    with torch.no_grad():
        return model(torch.tensor([[5, 6, 7, 8]])).logits


@pytest.mark.usefixtures("dense_reward")
def test_a_run_saves_adapters_and_they_are_exported_as_they_are_or_merged(base, small_run, oblrpo, tmp_path):
    GenerationConfig(eos_token_id=[1, 7], pad_token_id=0).save_pretrained(base)
    code, out, err = small_run(model=base, lora={"r": 2}, steps=3, eval_steps=0)
    assert code == 0, err
    checkpoint = tmp_path / "run" / "checkpoints" / "step_3"
    assert (checkpoint / "adapter_model.safetensors").is_file()
    assert not (checkpoint / "model.safetensors").exists()
    total, trained = [int(word.replace(",", "")) for word in out.split() if word.replace(",", "").isdigit()][:2]
    assert 0 < trained < total / 3
    adapted = AutoModelForCausalLM.from_pretrained(checkpoint).eval()  # transformers finds the model beneath
    assert oblrpo("export", tmp_path / "run")[0] == 0
    shared = tmp_path / "run" / "export"
    assert "library_name: peft" in (shared / "README.md").read_text()
    assert "belong to a model in a local folder" in (shared / "README.md").read_text()
    torch.testing.assert_close(logits_of(AutoModelForCausalLM.from_pretrained(shared).eval()), logits_of(adapted))
    assert oblrpo("export", tmp_path / "run", "--merge", "--output", tmp_path / "merged")[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert not hasattr(merged, "peft_config")
    assert merged.generation_config.eos_token_id == [1, 7]  # or it would never end
    torch.testing.assert_close(logits_of(adapted), logits_of(merged), rtol=1e-4, atol=1e-4)
    plain = AutoModelForCausalLM.from_pretrained(base).eval()
    assert (logits_of(plain) - logits_of(merged)).abs().max() > 1e-3


def test_an_interrupted_run_of_adapters_goes_on_as_if_nothing_had_been(base, small_run, oblrpo, tmp_path, dense_reward):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert small_run(model=base, lora={"r": 2}, steps=4, beta=0.1, output=whole)[0] == 0
    assert small_run(model=base, lora={"r": 2}, steps=2, beta=0.1, output=parts)[0] == 0
    code, _, err = oblrpo("train", "--resume", "--output", parts, "--steps", 4)
    assert code == 0, err
    assert metrics_of(whole) == metrics_of(parts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_only_adapters_are_trained_and_in_float32(base, dtype):
    policy = load_policy(str(base), PolicyConfig(model=str(base), lora={"r": 2}, dtype=dtype, device="cpu"))
    names = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert names
    assert all("lora_" in name for name in names)
    assert all(p.dtype == torch.float32 for p in policy.parameters)
    others = [p for name, p in policy.model.named_parameters() if name not in names]
    assert all(p.dtype == getattr(torch, dtype) for p in others)
    assert not any(module.training for module in policy.model.modules())


@pytest.mark.usefixtures("dense_reward")
def test_bfloat16_under_adapters_trains(base, small_run, tmp_path):
    code, _, err = small_run(model=base, lora={"r": 2}, dtype="bfloat16", steps=2, eval_steps=0)
    assert code == 0, err
    assert all(row["grad_norm"] > 0 for row in metrics_of(tmp_path / "run")[1:])
    before, after = (
        load_file(tmp_path / "run" / "checkpoints" / f"step_{step}" / "adapter_model.safetensors") for step in (0, 2)
    )
    moved = [name for name, weight in after.items() if not torch.equal(weight, before[name])]
    assert any("lora_B" in name for name in moved)


@pytest.mark.usefixtures("dense_reward")
def test_four_bits_under_adapters(base, small_run, tmp_path):
    pytest.importorskip("bitsandbytes")
    code, out, err = small_run("--load-in-4bit", model=base, lora={"r": 2}, steps=2, eval_steps=0)
    assert code == 0, err
    assert "4-bit weights" in out


@pytest.mark.usefixtures("dense_reward")
@pytest.mark.filterwarnings("ignore:bitsandbytes..gemv_4bit. an autograd kernel")
@pytest.mark.parametrize("stored", [False, True])
def test_four_bits_are_trained_on_saved_and_merged(small_run, oblrpo, tmp_path, stored):
    """Quantised as it is loaded, and as a folder has it; merged it is a model in numbers that computes the same."""
    pytest.importorskip("bitsandbytes")
    base, tokenizer = tmp_path / "model", byte_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_key_value_heads": 4}
    build_family("qwen3-tied", torch.float32, vocab_size=258, **sizes).save_pretrained(base)
    if stored:
        config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(base, quantization_config=config)
        model.save_pretrained(base := tmp_path / "stored")
    tokenizer.save_pretrained(base)
    if stored:
        complained(small_run(model=base), "the model is quantised, so its weights cannot be trained; add adapters")
    flags = () if stored else ("--load-in-4bit",)
    code, _, err = small_run(*flags, model=base, lora={"r": 2}, steps=3, eval_steps=0)
    assert code == 0, err
    policy = load_policy(
        str(tmp_path / "run" / "checkpoints" / "step_3"), PolicyConfig(device="cpu", load_in_4bit=not stored), False
    )
    before = logits_of(policy.model).log_softmax(-1)
    policy.save(tmp_path / "again")
    assert torch.equal(logits_of(policy.model).log_softmax(-1), before)
    assert oblrpo("export", tmp_path / "run", "--merge")[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").eval()
    assert not hasattr(merged.config, "quantization_config")
    assert (before.exp() * (before - logits_of(merged).log_softmax(-1))).sum(-1).max() < 1e-2  # some CPUs take bfloat16


def test_layers_that_are_not_there(base):
    config = PolicyConfig(model=str(base), lora={"r": 2, "target_modules": ["nowhere"]}, device="cpu")
    with pytest.raises(InputError, match=r"PEFT refuses the adapter: .*nowhere"):
        make_policy(config)


def test_damaged_adapters_are_named(base, small_run, tmp_path):
    folder = tmp_path / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(InputError, match=r"adapter_config.json is damaged"):
        load_policy(str(folder), PolicyConfig(model=str(folder)))
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(InputError, match="does not say which model"):
        load_policy(str(folder), PolicyConfig(model=str(folder)))
    (folder / "adapter_config.json").write_text("[1]")
    with pytest.raises(InputError, match="is damaged"):
        load_policy(str(folder), PolicyConfig(model=str(folder)))


def test_adapters_of_the_hub_are_refused_and_new_ones_on_top_of_old_ones(base, tmp_path, monkeypatch):
    """transformers loads adapters by hub name with nothing to be trained; a folder is as near to that as one gets."""
    folder = tmp_path / "adapters"
    make_policy(PolicyConfig(model=str(base), lora={"r": 2}, device="cpu")).save(folder)
    with pytest.raises(InputError, match="holds adapters, which are trained on; leave out lora"):
        make_policy(PolicyConfig(model=str(folder), lora={"r": 2}, device="cpu"))
    monkeypatch.setattr(load, "base_of", lambda name: None)
    with pytest.raises(InputError, match="fetch them and give their folder"):
        make_policy(PolicyConfig(model=str(folder), device="cpu"))


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys")  # where transformers loads what was saved
@pytest.mark.usefixtures("dense_reward")
def test_adapters_of_all_that_is_linear_train_experts_and_routers(small_run, oblrpo, tmp_path):
    """PEFT adapts both as bare parameters (`target_parameters`)."""
    base = folder_of("qwen3-moe-normalised", tmp_path / "model")
    code, _, err = small_run(model=base, lora={"r": 2}, steps=2, eval_steps=0)
    assert code == 0, err
    before, after = (
        load_file(tmp_path / "run" / "checkpoints" / f"step_{step}" / "adapter_model.safetensors") for step in (0, 2)
    )
    moved = {name.split(".mlp.")[1] for name in after if "mlp" in name and not torch.equal(after[name], before[name])}
    assert {"experts.lora_B.weight", "experts.base_layer.lora_B.weight", "gate.lora_B.weight"} <= moved
    adapted = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step_2").eval()
    assert oblrpo("export", tmp_path / "run", "--merge")[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export").eval()
    torch.testing.assert_close(logits_of(adapted), logits_of(merged), rtol=1e-4, atol=1e-4)


def test_adapters_that_cannot_be_taken_are_refused_before_anything_is_sampled(small_run, tmp_path, monkeypatch):
    """What only the model's own run shows, such as the size of what is made of a router's adapter."""
    monkeypatch.setattr(tapped_operations, "SMALL_NUMBERS", 10)
    monkeypatch.setattr(tapped_operations, "SMALL_SHARE", 0.0)
    base = folder_of("qwen3-moe-normalised", tmp_path / "model")
    code, _, err = small_run(model=base, lora={"r": 2}, steps=1, eval_steps=0)
    assert code == 2
    told = " ".join(err.split())
    assert "mlp.gate.lora_A.default.weight" in told
    assert "set target_modules of lora to q_proj, k_proj, v_proj, o_proj" in told
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    code, _, err = small_run(model=base, lora={"r": 2, "target_modules": ["q_proj", "v_proj"]}, steps=1, eval_steps=0)
    assert code == 0, err
