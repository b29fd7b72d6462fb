"""Models that also see: loaded and exported whole, with what they are used with, and sampled as they are trained."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from oblrpo.policy import adopt_policy, byte_tokenizer, load_policy, make_policy
from oblrpo.policy.checks import check_scores
from oblrpo.policy.saving import OF_IMAGES, check_saved
from oblrpo.rollout import sample
from oblrpo.settings import PolicyConfig

TEXT = {
    "vocab_size": 258, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
    "max_position_embeddings": 64,
}  # fmt: skip
SIGHT = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 16, "patch_size": 4}
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8,
    "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
}  # fmt: skip
LINEAR = {
    "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}  # fmt: skip
PLACES = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}


def axes(*section):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*section]}}


SEEING = {
    "qwen3.5": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=TEXT | LINEAR, vision_config=SIGHT | {"num_position_embeddings": 16}, **PLACES)
    ),
    "qwen2.5-vl": lambda: Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config=TEXT | axes(1, 1, 2), vision_config=SIGHT | {"fullatt_block_indexes": [0]}, **PLACES
        )
    ),
    "qwen3-vl": lambda: Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=TEXT | axes(2, 1, 1),
            vision_config=SIGHT | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
            **PLACES,
        )
    ),
    "mistral3": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=TEXT | {"model_type": "mistral"}, vision_config=PIXTRAL, image_token_index=250)
    ),
}


@pytest.fixture(params=SEEING)
def folder(request, tmp_path):
    torch.manual_seed(0)
    SEEING[request.param]().float().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    for name in OF_IMAGES[:2]:
        (tmp_path / "model" / name).write_text(json.dumps({"of": name}))
    return tmp_path / "model"


def names_in(folder):
    return {name for file in folder.glob("*.safetensors") for name in load_file(file)}


@pytest.mark.parametrize("lora", [{}, {"r": 2}])
@pytest.mark.parametrize("given", [False, True])
def test_all_of_it_is_trained_saved_and_exported(folder, tmp_path, lora, given):
    config = PolicyConfig(model="python:x" if given else str(folder), device="cpu", lora=lora)
    policy = make_policy(PolicyConfig(model=str(folder), device="cpu"))
    policy = adopt_policy(policy.model, policy.tokenizer, config) if given else make_policy(config)
    check_saved(policy, config, given, tmp_path)
    check_scores(policy, "")
    for parameter in policy.parameters:
        parameter.data += 0.01 * torch.randn_like(parameter)
    torch.manual_seed(0)
    drawn = sample(policy, ["abc", "abcdefg"], 3, 6, 1.0, logps=True)
    with torch.no_grad():
        logps = policy.logps(drawn.sequences)
    apart = (logps.token_logps_SC - drawn.sampler_logps_SC) * drawn.sequences.own_SC
    assert apart.abs().max() < 1e-5
    policy.save(tmp_path / "saved")
    whole = tmp_path / "saved"
    if lora:
        whole = tmp_path / "merged"
        load_policy(str(tmp_path / "saved"), PolicyConfig(device="cpu"), train=False).save_merged(whole)
    assert names_in(whole) == names_in(folder)
    assert json.loads((whole / OF_IMAGES[1]).read_text()) == {"of": OF_IMAGES[1]}
    assert not (whole / OF_IMAGES[2]).exists()
    again = load_policy(str(whole), PolicyConfig(device="cpu"))
    with torch.no_grad():
        torch.testing.assert_close(again.logps(drawn.sequences).logps_S, logps.logps_S, rtol=0, atol=1e-4)


def test_weights_without_a_use_are_named(tiny_policy, tmp_path):
    tiny_policy.save(tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    save_file(load_file(file) | {"v_head.weight": torch.zeros(2)}, file, metadata={"format": "pt"})
    assert load_policy(str(tmp_path / "model"), PolicyConfig(device="cpu")).model.left_out == {"v_head.weight"}
