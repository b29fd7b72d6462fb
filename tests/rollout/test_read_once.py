"""Prompts that are read once for all their outputs give what `generate` gives by itself."""

import pytest
import torch
from transformers import GenerationConfig

from oblrpo.rollout.transformers import CACHE, _read_once
from tests.scores.zoo import FAMILIES, build_family

G, Q, LONGEST = 3, 6, 4


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_greedy_outputs_of_padded_prompts(family):
    torch.manual_seed(0)
    model = build_family(family, torch.float32, "eager" if family.startswith("gemma2") else "sdpa").eval()
    prompt_PQ = torch.randint(2, 10, (4, Q))
    mask_PQ = torch.ones_like(prompt_PQ)
    for row, padding in enumerate((0, 2, 4)):
        mask_PQ[row, :padding] = 0
    settings = GenerationConfig(max_new_tokens=LONGEST, min_new_tokens=LONGEST, pad_token_id=0, eos_token_id=1,
                                output_logits=True, return_dict_in_generate=True)  # fmt: skip
    inputs = {"input_ids": prompt_PQ.repeat_interleave(G, 0), "attention_mask": mask_PQ.repeat_interleave(G, 0)}
    cache = _read_once(model, prompt_PQ, mask_PQ, G, 0)
    assert cache is not None or "window" in family or family.startswith("gemma")  # those have sliding windows
    if cache is not None:
        plain = model.generate(**inputs, generation_config=settings)
        shared = model.generate(**inputs, generation_config=settings, **{CACHE: cache})
        assert torch.equal(plain.sequences, shared.sequences)
        torch.testing.assert_close(torch.stack(plain.logits), torch.stack(shared.logits), rtol=1e-4, atol=1e-5)
