"""One process or two: the same completions make the same updates, rates and ledger."""

import json
import os
import subprocess
import sys

import pytest
import torch

from tests.trl.ranks import RUNS, left_by_runs


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """What one process has left, and what each of two."""
    folder = tmp_path_factory.mktemp("processes")
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    environment |= {"MASTER_PORT": str(20000 + os.getpid() % 20000), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "tests.trl.ranks", str(folder)]
    ranks = [
        subprocess.Popen(
            words, env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    alone = left_by_runs(folder)
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    return alone, *(torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(2))


@pytest.mark.parametrize("run", RUNS)
def test_two_processes_make_the_updates_of_one(left, run):
    """Gradient, signal, rate, movement and prior are those of the whole batch, and the same on both."""
    alone, first, second = (each[run] for each in left)
    assert json.dumps(first["state"]) == json.dumps(second["state"])
    assert torch.equal(first["weights"], second["weights"])
    torch.testing.assert_close(first["gradients"], alone["gradients"], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(first["weights"], alone["weights"], rtol=0, atol=1e-12)
    for mine, whole in zip(first["log"][:3], alone["log"][:3], strict=True):
        assert whole["learning_rate"] > 0
        keys = {"learning_rate", "step_kl", "step_kl_target", "trace_cov", "signal2", "baseline/mean"}
        if RUNS[run].get("schedule") == "off":
            keys = {"learning_rate", "baseline/mean"}
        for key in sorted(keys):
            assert whole[key] != 0
            assert mine[key] == pytest.approx(whole[key], rel=1e-9), key


def test_the_ledger_is_that_of_the_whole_batch(left):
    """With the variances of all baselines, also those that look at other prompts and earlier steps."""
    alone, first, _ = (each["ledger"] for each in left)
    for mine, whole in zip(first[:2], alone[:2], strict=True):
        wanted = {name: whole[name] for name in whole if name.startswith(("variance", "signal2", "snr", "n_snr"))}
        assert {"variance/oblr_shrunk", "variance/reinforce_pp", "signal2/oblr"} <= set(wanted)
        assert {name: mine[name] for name in wanted} == pytest.approx(wanted, rel=1e-4)
