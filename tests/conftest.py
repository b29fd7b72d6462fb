"""Shared by all tests: one torch thread (two spin against each other on small tensors), and a tiny policy."""

import importlib.util
import signal

import pytest
import torch

from oblrpo.policy import Policy, make_policy
from oblrpo.settings import PolicyConfig

torch.set_num_threads(1)

# Started in the background by a shell they would ignore Ctrl-C, and so would whatever they start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_report_header():
    """Say what is not run here."""
    missing = [name for name in ("trl", "verl", "vllm", "verifiers") if importlib.util.find_spec(name) is None]
    where = "tests/{0} is NOT run here, for want of {0}: `make test-{0}` runs it in .venv-{0}"
    return [where.format(name) for name in missing]


@pytest.fixture
def tiny_policy() -> Policy:
    """A fresh 2-layer policy with random weights."""
    torch.manual_seed(0)
    return make_policy(
        PolicyConfig(model_args={"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}, device="cpu")
    )
