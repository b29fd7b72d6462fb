"""Scores of models that FSDP2 shards over one and two ranks (gloo, one process each)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MODELS = [f"{name}{suffix}" for name in ("qwen3-tied", "qwen3-untied-biased") for suffix in ("", ", checkpointed")]


@pytest.fixture(scope="module", params=[1, 2], ids=["1 rank", "2 ranks"])
def found(request, tmp_path_factory):
    """What every rank found."""
    folder, ranks = tmp_path_factory.mktemp("sharded"), request.param
    command = [sys.executable, "-W", "ignore", "-m", "tests.scores.sharded", str(folder)]
    processes = [
        subprocess.Popen([*command, str(rank), str(ranks)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=300)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(printed)
    return [json.loads((folder / f"{ranks}_{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("model", MODELS)
def test_norms_inner_products_and_sketches_are_those_of_the_whole_model(found, model):
    for rank in found:
        errors = rank["models"][model]
        for key in ("auto", "streamed", "auto gram", "streamed gram"):
            assert errors[key] <= 1e-8, key
        for key in ("auto sketch", "streamed sketch"):
            assert errors[key] <= 1e-8, key


@pytest.mark.parametrize("model", MODELS)
def test_the_training_step_beside_it_is_left_alone(found, model):
    for rank in found:
        assert rank["models"][model]["untouched"]
        assert rank["models"][model]["gradient"] <= 1e-12
        assert rank["models"][model]["squared_norm"] <= 1e-12


def test_no_gradient_is_put_into_sharded_parameters(found):
    for rank in found:
        assert "sharded" in rank["models"][MODELS[0]]["accumulate"]


def test_a_gathered_weight_used_around_its_module_is_refused(found):
    for rank in found:
        assert "head.weight is used other than by calling its module" in rank["refusal"]


def test_adapters_of_experts_are_exact(found):
    for rank in found:
        assert rank["adapters of experts"] <= 1e-8
