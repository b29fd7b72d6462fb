"""A GGUF file as the model of a run: trained, resumed, evaluated, under adapters; and complaints."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.cli.conftest import complained, metrics_of
from tests.policy.tiny_gguf import write_gguf

pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytestmark = [
    pytest.mark.usefixtures("dense_reward"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated"),  # PEFT asks transformers for it
]


@pytest.fixture
def tiny(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", quantised=True)
    return tmp_path / "tiny.gguf"


@pytest.mark.parametrize("adapters", [{}, {"lora": {"r": 2}}], ids=["whole", "adapters"])
def test_a_run_is_trained_resumed_and_evaluated(tiny, adapters, small_run, oblrpo, tmp_path):
    if adapters:
        pytest.importorskip("peft")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    code, _, err = small_run(model=tiny, steps=3, output=whole, **adapters)
    assert code == 0, err
    assert "Converting" not in err
    assert all(row["grad_norm"] > 0 for row in metrics_of(whole)[1:])
    assert small_run(model=tiny, steps=2, output=parts, **adapters)[0] == 0
    code, _, err = oblrpo("train", "--resume", "--output", parts, "--steps", 3)
    assert code == 0, err
    assert metrics_of(whole)[3]["reward"] == metrics_of(parts)[3]["reward"]
    checkpoint = whole / "checkpoints" / "step_3"
    if adapters:
        assert json.loads((checkpoint / "adapter_config.json").read_text())["base_model_name_or_path"] == str(tiny)
    else:
        plain = AutoModelForCausalLM.from_pretrained(checkpoint)
        assert not torch.equal(plain.lm_head.weight, write_gguf(tmp_path / "again.gguf").lm_head.weight)
    code, _, err = oblrpo("evaluate", checkpoint, "--limit", 3, "--device", "cpu", "--output", tmp_path / "evaluation")
    assert code == 0, err


def test_a_file_that_was_cut(tiny, small_run, tmp_path):
    tiny.write_bytes(tiny.read_bytes()[:-2000])
    complained(small_run(model=tiny), f"cannot load the model '{tiny}'", "is the file complete")
    assert not (tmp_path / "run").exists()
