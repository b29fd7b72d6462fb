"""The arithmetic of scale on paper: sizes and operations against transformers' own model, and the page."""

from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from lab.benchmarks.scale import MODELS, Model, Step, report

PAGES = Path(__file__).parents[2] / "docs"


def built(model, device="meta"):
    config = Qwen3Config(
        vocab_size=model.vocabulary, hidden_size=model.hidden, intermediate_size=model.intermediate,
        num_hidden_layers=model.layers, num_attention_heads=model.heads, num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim, tie_word_embeddings=model.tied, attn_implementation="eager",
    )  # fmt: skip
    with torch.device(device):
        return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model(name):
    """All but the gains of norms."""
    known = sum(p.numel() for p in built(MODELS[name]).parameters() if p.ndim == 2)
    assert MODELS[name].parameters == known


@pytest.mark.parametrize("tied", [False, True])
def test_operations_are_those_that_torch_counts(tied):
    model = Model(32, 48, 2, 4, tied, kv_heads=2, head_dim=16, vocabulary=100)
    made = built(model, "cpu")
    with FlopCounterMode(display=False) as counted:
        made(input_ids=torch.zeros(1, 64, dtype=torch.long), use_cache=False)
    half = 4 * model.layers * model.heads * model.head_dim * 64 / 2  # torch counts all pairs, not the causal half
    assert counted.get_total_flops() / 64 == pytest.approx(model.forward(64) + half, rel=1e-3)


def test_more_gpus_take_less_time_and_less_memory_each():
    few, many = (Step(MODELS["8b"], n, 1024, 256, 3072) for n in (8, 64))
    assert many.sampling < few.sampling
    assert few.update == pytest.approx(8 * many.update)
    assert few.at_once < 128
    assert many.at_once == 16
    assert sum(many.memory(8).values()) < sum(few.memory(8).values()) < 80
    for step in (few, many):
        assert step.passes("none") < step.passes("calibrated") < step.passes("exact")
        assert step.gathered < step.update


def test_the_page_has_what_the_command_prints():
    page = (PAGES / "lab_book" / "scale.md").read_text()
    for table in report(MODELS["8b"], [1, 8, 64], 1024, 256, 3072).split("\n\n"):
        assert table in page
