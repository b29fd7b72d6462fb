"""A model's own generation config says what ends a completion, and nothing else about how it is drawn."""

import json

import pytest
import torch

from oblrpo.policy import make_policy
from oblrpo.rollout import sample
from oblrpo.rollout import transformers as sampling
from oblrpo.settings import PolicyConfig

OWN = {
    "do_sample": True, "temperature": 3.0, "top_k": 2, "top_p": 0.1, "min_p": 0.5, "typical_p": 0.2, "top_h": 0.3,
    "epsilon_cutoff": 0.3, "eta_cutoff": 0.3, "repetition_penalty": 5.0, "no_repeat_ngram_size": 1, "min_length": 9,
    "min_new_tokens": 9, "bad_words_ids": [[65]], "suppress_tokens": list(range(60, 90)), "num_beams": 2,
    "begin_suppress_tokens": list(range(97, 150)), "forced_eos_token_id": 50, "sequence_bias": [[[65], 9.0]],
    "guidance_scale": 3.0, "exponential_decay_length_penalty": [1, 3.0], "max_length": 3, "num_return_sequences": 2,
    "watermarking_config": {"bias": 9.0}, "stop_strings": ["a"], "max_time": 1e-9, "cache_implementation": "quantized",
}  # fmt: skip


@pytest.mark.parametrize("by_generate", [False, True])
def test_a_folder_s_sampling_defaults_change_no_draw(tmp_path, tiny_policy, by_generate, monkeypatch):
    """The same random numbers give the same tokens as without them, in both loops."""
    torch.set_num_threads(1)
    if by_generate:
        monkeypatch.setattr(sampling, "applies", lambda *_: False)
    tiny_policy.model.save_pretrained(tmp_path)
    tiny_policy.tokenizer.save_pretrained(tmp_path)
    file = tmp_path / "generation_config.json"
    plain, drawn = json.loads(file.read_text()), []
    for own in ({}, OWN):
        file.write_text(json.dumps(plain | own))
        policy = make_policy(PolicyConfig(model=str(tmp_path), device="cpu"))
        assert all(getattr(policy.model.generation_config, name) for name in own)
        torch.manual_seed(0)
        drawn.append(sample(policy, ["abc", "d"], 16, 12, temperature=0.7).sequences.ids_ST)
    assert torch.equal(*drawn)
