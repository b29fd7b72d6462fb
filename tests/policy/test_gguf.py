"""Policies of GGUF files: the same function as the model that was written, and as good as any folder from then on."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oblrpo.errors import InputError
from oblrpo.policy import load_policy, make_policy
from oblrpo.rollout import sample
from oblrpo.settings import PolicyConfig
from tests.policy.tiny_gguf import write_gguf

pytest.importorskip("gguf")
pytest.importorskip("accelerate")

IDS = torch.tensor([[5, 6, 70, 8, 9]])


def logits_of(model):
    with torch.no_grad():
        return model.eval()(IDS).logits


def policy_of(path, **settings):
    return make_policy(PolicyConfig(model=str(path), device="cpu", **settings))


@pytest.mark.parametrize(("quantised", "tolerance"), [(False, 1e-6), (True, 1e-2)])
def test_it_is_the_model_that_was_written(tmp_path, capsys, quantised, tolerance):
    written = write_gguf(tmp_path / "tiny.gguf", quantised=quantised)
    policy = policy_of(tmp_path / "tiny.gguf")
    torch.testing.assert_close(logits_of(policy.model), logits_of(written), rtol=0, atol=tolerance)
    assert all(weight.dtype == torch.float32 and weight.requires_grad for weight in policy.parameters)
    assert policy.tokenizer("ab+c").input_ids == policy.tokenizer.convert_tokens_to_ids(["a", "b", "+", "c"])
    assert policy.tokenizer("quu").input_ids == policy.tokenizer.convert_tokens_to_ids(["qu", "u"])
    assert list(policy.end_tokens) == [1]
    assert policy.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi="
    assert capsys.readouterr().err == ""


def test_what_is_saved_is_a_folder_like_any(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", quantised=True)
    policy = policy_of(tmp_path / "tiny.gguf")
    policy.save(tmp_path / "saved")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(logits_of(plain), logits_of(policy.model))
    again = load_policy(str(tmp_path / "saved"), PolicyConfig(device="cpu"))
    assert again.end_tokens == policy.end_tokens
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == policy.tokenizer.chat_template
    drawn = [sample(each, ["ab"], 3, 5, 1.0) for each in (policy, again) if torch.manual_seed(0)]
    assert drawn[0].completions == drawn[1].completions


def test_adapters_find_their_file_again(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.chdir(tmp_path)
    policy = policy_of("tiny.gguf", lora={"r": 2})
    with torch.no_grad():
        for weight in policy.parameters:
            weight.add_(0.1)
    policy.save(tmp_path / "adapters")
    monkeypatch.chdir("/")
    again = policy_of(tmp_path / "adapters")
    assert torch.equal(logits_of(again.model), logits_of(policy.model))
    again.save_merged(tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(merged), logits_of(policy.model), rtol=1e-4, atol=1e-4)


def test_the_precision_is_the_one_that_was_asked_for(tmp_path):
    write_gguf(tmp_path / "tiny.gguf")
    config = PolicyConfig(model="x", device="cpu", dtype="bfloat16", attn_implementation="eager")
    policy = load_policy(str(tmp_path / "tiny.gguf"), config, train=False)
    assert {weight.dtype for weight in policy.model.parameters()} == {torch.bfloat16}
    assert policy.model.config._attn_implementation == "eager"


def test_files_that_cannot_be_read(tmp_path, monkeypatch):
    whole = tmp_path / "whole.gguf"
    write_gguf(whole)
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    for share in (0.001, 0.05, 0.5, 0.999):
        cut.write_bytes(content[: int(len(content) * share)])
        with pytest.raises(InputError, match=r"^cannot load the model '.*cut.gguf': .*is the file complete"):
            policy_of(cut)
    (tmp_path / "text.gguf").write_text("not at all")
    with pytest.raises(InputError, match=r"text.gguf': .*is the file complete"):
        policy_of(tmp_path / "text.gguf")
    write_gguf(tmp_path / "other.gguf", architecture="mamba-of-mine")
    with pytest.raises(InputError, match=r"mamba-of-mine.*its architecture one that transformers reads"):
        policy_of(tmp_path / "other.gguf")
    write_gguf(tmp_path / "partly.gguf", without=("blk.1.attn_q", "blk.1.ffn_up"))
    with pytest.raises(InputError, match=r"files lack 2 weights, as model.layers.1"):
        policy_of(tmp_path / "partly.gguf")
    with pytest.raises(InputError, match=r"cannot load the model '.*none.gguf': there is no such file"):
        policy_of(tmp_path / "none.gguf")
    with pytest.raises(InputError, match="load_in_4bit cannot quantise a GGUF file"):
        policy_of(whole, load_in_4bit=True, lora={"r": 2})
    found = importlib.util.find_spec
    for package in ("gguf", "accelerate"):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_, p=package: None if name == p else found(name))
        with pytest.raises(InputError, match=rf"needs {package}; install it with: .* pip install 'oblrpo\[gguf\]'"):
            policy_of(whole)


@pytest.mark.parametrize(
    "name", ["models/smollm2-135m-instruct", "runs/old/checkpoints/step_9", "./here", "tests/x.gguf"]
)
def test_a_local_model_that_is_not_there_is_not_looked_for_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match=f"^cannot load the model '{name}': there is no such file or folder; check the path"
    ) as said:
        policy_of(name)
    assert ("A recipe's first lines" in str(said.value)) == name.startswith("models/")
