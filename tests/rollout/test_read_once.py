"""Prompts that are read once for all their outputs give what `generate` gives by itself."""

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from lab.benchmarks.tiny import config_for
from oblrpo.rollout.transformers import CACHE, _read_once
from tests.scores.zoo import FAMILIES, build_family

G, Q, LONGEST = 3, 6, 4
WITH_STATES = ("qwen3_next", "qwen3_5_text", "falcon_h1", "granitemoehybrid", "lfm2", "olmo_hybrid", "gemma4_text")


def hybrid(family):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_for(family)).eval()
    model.config.use_cache, model.generation_config = True, GenerationConfig()
    return model


def padded(*paddings):
    torch.manual_seed(0)
    prompt_PQ = torch.randint(3, 10, (4, Q))
    mask_PQ = torch.ones_like(prompt_PQ)
    for row, padding in enumerate(paddings):
        mask_PQ[row, :padding] = 0
    return prompt_PQ, mask_PQ


def outputs(model, cache):
    """What `generate` draws greedily of padded prompts, with prompts read beforehand or by itself."""
    settings = GenerationConfig(max_new_tokens=LONGEST, min_new_tokens=LONGEST, pad_token_id=0, eos_token_id=1,
                                output_logits=True, return_dict_in_generate=True)  # fmt: skip
    prompt_SQ, mask_SQ = (rows_PQ.repeat_interleave(G, 0) for rows_PQ in padded(0, 2, 4))
    read = {} if cache is None else {CACHE: cache}
    return model.generate(input_ids=prompt_SQ, attention_mask=mask_SQ, generation_config=settings, **read)


def assert_same_outputs(model, cache):
    plain, shared = outputs(model, None), outputs(model, cache)
    assert torch.equal(plain.sequences, shared.sequences)
    torch.testing.assert_close(torch.stack(plain.logits), torch.stack(shared.logits), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_STATES])
@torch.no_grad()
def test_greedy_outputs_of_padded_prompts(family):
    attention = "eager" if family.startswith("gemma2") else "sdpa"
    model = hybrid(family) if family in WITH_STATES else build_family(family, torch.float32, attention).eval()
    cache = _read_once(model, *padded(0, 2, 4), G, 0)
    assert cache is not None
    assert_same_outputs(model, cache)


@pytest.mark.parametrize("family", ["recurrent_gemma", "mamba"])
@torch.no_grad()
def test_what_a_model_keeps_in_its_own_way_is_read_by_generate(family):
    """From transformers 5.24 on Mamba's states are in transformers' own cache, which cannot tell how much was read."""
    assert _read_once(hybrid(family), *padded(0, 2, 4), G, 0) is None


@torch.no_grad()
def test_a_prompt_of_one_token_has_nothing_to_read_before():
    model = build_family("llama-untied", torch.float32, "sdpa").eval()
    assert _read_once(model, *padded(0, Q - 1), G, 0) is None
    assert _read_once(model, *padded(0, Q - 2), G, 0) is not None
