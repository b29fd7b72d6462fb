"""A folder that lacks a part of its model or tokenizer is refused, and the part is named."""

import copy
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from oblrpo.errors import InputError
from oblrpo.policy import adopt_policy, load_policy, make_policy
from oblrpo.settings import PolicyConfig
from tests.scores.zoo import build_family

WEIGHT = "model.layers.1.mlp.up_proj.weight"
CPU = PolicyConfig(device="cpu")


@pytest.fixture
def folder(tiny_policy, tmp_path):
    tiny_policy.save(tmp_path / "model")
    return tmp_path / "model"


def change(file, **changed):
    """Write a file of weights again: None takes one out, a tensor puts one in."""
    weights = load_file(file) | changed
    save_file({name: value for name, value in weights.items() if value is not None}, file, metadata={"format": "pt"})


def refused(folder, config=CPU, train=True):
    with pytest.raises(InputError) as caught:
        load_policy(str(folder), config, train=train)
    return str(caught.value)


@pytest.mark.parametrize("name", [WEIGHT, "model.norm.weight"])
@pytest.mark.parametrize("train", [True, False])
def test_a_weight_that_is_not_there_is_named(folder, name, train):
    change(folder / "model.safetensors", **{name: None})
    assert re.search(rf"/model': its files lack 1 weight, as {name};", refused(folder, train=train))


def test_a_weight_of_another_shape_is_named(folder):
    change(folder / "model.safetensors", **{WEIGHT: torch.zeros(3, 3)})
    assert f"{WEIGHT} has the shape (3, 3), but its config needs (48, 16)" in refused(folder)


def test_a_tied_head_need_not_be_there_and_another_must(folder, tmp_path, tiny_policy):
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")  # it is tied, and loads in every other test
    build_family("llama-untied", torch.float32, vocab_size=258).save_pretrained(tmp_path / "own")
    tiny_policy.tokenizer.save_pretrained(tmp_path / "own")
    load_policy(str(tmp_path / "own"), CPU)
    change(tmp_path / "own" / "model.safetensors", **{"lm_head.weight": None})
    assert "lack 1 weight, as lm_head.weight" in refused(tmp_path / "own")


def test_the_checkpoint_of_a_model_that_was_given_is_whole_too(tiny_policy, folder):
    change(folder / "model.safetensors", **{WEIGHT: None})
    with pytest.raises(InputError, match=f"lack 1 weight, as {WEIGHT}"):
        adopt_policy(tiny_policy.model, tiny_policy.tokenizer, CPU, folder)


def test_adapters_are_whole_too(folder, tmp_path):
    pytest.importorskip("peft")
    adapted = make_policy(PolicyConfig(model=str(folder), lora={"r": 2}, device="cpu"))
    adapted.save(tmp_path / "adapters")
    load_policy(str(tmp_path / "adapters"), CPU)
    file = tmp_path / "adapters" / "adapter_model.safetensors"
    name = min(load_file(file))
    change(file, **{name: None})
    assert f"/adapters': its files lack 1 weight, as {name};" in refused(tmp_path / "adapters")
    with pytest.raises(InputError, match=f"lack 1 weight, as {re.escape(name)}"):
        adopt_policy(adapted.model, adapted.tokenizer, CPU, tmp_path / "adapters")


def test_a_folder_without_a_tokenizer_says_so(folder):
    config, words = folder / "tokenizer_config.json", folder / "tokenizer.json"
    kept = words.read_bytes()
    words.unlink()
    assert "/model': the folder holds no tokenizer (tokenizer.json)" in refused(folder)
    config.unlink()
    assert "/model': the folder holds no tokenizer (tokenizer.json)" in refused(folder)
    words.write_bytes(kept)
    assert "pads with '<|endoftext|>', token 258; is its tokenizer_config.json missing?" in refused(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named_before_any_training(folder, value):
    weight = load_file(folder / "model.safetensors")[WEIGHT]
    weight[3, 5] = value
    change(folder / "model.safetensors", **{WEIGHT: weight})
    said = f"has NaN or infinities in {WEIGHT} before any training; use another."
    assert said in refused(folder)
    assert said in refused(folder, train=False)


def test_a_model_without_values_is_refused(tiny_policy):
    model = copy.deepcopy(tiny_policy.model)
    model.model.layers[1].mlp.up_proj.to("meta")
    for train in (True, False):
        with pytest.raises(InputError, match=f"has no values: {WEIGHT} is on the device meta; load all of the model."):
            adopt_policy(model, tiny_policy.tokenizer, CPU, train=train)
