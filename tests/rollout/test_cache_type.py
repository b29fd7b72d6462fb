"""Keys and values are kept in the type that attention computes in, which changes no draw and no log-probability."""

from typing import ClassVar

import pytest
import torch
from transformers import DynamicCache, GenerationConfig

from oblrpo.rollout import decode as loop
from oblrpo.rollout import transformers as rollout
from oblrpo.rollout.decode import Draw, ShortCache
from tests.rollout.test_decode import OTHERS, build, padded_prompts
from tests.rollout.test_read_once import WITH_STATES, hybrid
from tests.scores.zoo import FAMILIES

G, LONGEST = 3, 6


class Seen(ShortCache):
    """Notes the types that it keeps."""

    kinds: ClassVar = set()

    def update(self, *given, **further):
        kept = super().update(*given, **further)
        self.kinds |= {each.dtype for each in kept}
        return kept


@pytest.fixture(autouse=True)
def noted(monkeypatch):
    for module in (loop, rollout):
        monkeypatch.setattr(module, "ShortCache", Seen)
    Seen.kinds = set()


def drawn(model, draw, monkeypatch=None):
    """What the loop draws under autocast; with `monkeypatch` from the cache of transformers."""
    if monkeypatch is not None:
        monkeypatch.setattr(loop, "ShortCache", DynamicCache)
    torch.manual_seed(0)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        return loop.decode(model, *padded_prompts(), G, LONGEST, {10**6}, 0, draw)


@pytest.mark.parametrize("family", [name for name in [*FAMILIES, *OTHERS] if name != "phi3-untied"])
def test_draws_and_their_figures_are_the_same_bit_by_bit(family, monkeypatch):
    model, draw = build(family), Draw(1.0, features=True)
    short = drawn(model, draw)
    assert Seen.kinds == {torch.bfloat16}
    wide = drawn(model, draw, monkeypatch)
    assert all(map(torch.equal, short, wide))


def test_without_autocast_the_type_is_the_models():
    model = build("qwen3-tied")
    with torch.no_grad():
        loop.decode(model, *padded_prompts(), G, LONGEST, {10**6}, 0, Draw(0.0))
    assert Seen.kinds == {torch.float32}


@pytest.mark.parametrize("family", ["phi3-untied", *WITH_STATES])
@pytest.mark.parametrize("copies", [1, G])
def test_generate_keeps_them_so_too(family, copies, monkeypatch):
    model = hybrid(family) if family in WITH_STATES else build(family)
    model.generation_config = GenerationConfig()

    def greedy(bf16):
        policy = FakePolicy(model, bf16)
        return rollout._by_generate(policy, *padded_prompts(), copies, LONGEST, Draw(0.0), None).next_token_S

    wide = greedy(None)
    assert not Seen.kinds
    short = greedy(True)
    assert Seen.kinds == {torch.bfloat16}
    assert torch.equal(wide, short)


class FakePolicy:
    """Autocast, with or without word of it."""

    end_tokens, pad_token = [10**6], 0

    def __init__(self, model, bf16):
        self.model, self.bf16 = model, bf16

    def arithmetic(self):
        return torch.autocast("cpu", torch.bfloat16)
