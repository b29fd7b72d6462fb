"""A whole run while torch's default device is another than the model's: whatever forgot its `device=` lands there."""

import functools

import pytest
import torch
from rich.console import Console

from oblrpo.estimators import depends_on_own_output
from oblrpo.report.console import Progress
from oblrpo.settings import (
    AlgorithmConfig,
    OptimConfig,
    PolicyConfig,
    RolloutConfig,
    RunConfig,
    ScoresConfig,
    TaskConfig,
    TrainConfig,
    WarmStartConfig,
)
from oblrpo.trainer.loop import Trainer


def config(output, baseline="", rollout=None, **scores):
    settings = {"prompts_per_step": 4, "num_generations": 4, "max_completion_length": 8}
    return TrainConfig(
        policy=PolicyConfig(
            model_args={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, device="cpu"
        ),
        task=TaskConfig(task="arithmetic", rewards=("length",)),  # of random completions, too, one that varies
        rollout=RolloutConfig(**settings | (rollout or {})),
        algorithm=AlgorithmConfig(baseline=baseline),
        scores=ScoresConfig(**scores),
        warm_start=WarmStartConfig(),
        # torch's own Adam keeps its step count on the default device
        optim=OptimConfig(optimizer="SGD", learning_rate=0.1, optimizer_args={"momentum": 0.9}),
        run=RunConfig(output=str(output), steps=2, eval_prompts=4, eval_samples=2),
    )


def metrics(trainer, device):
    """Of a run; what is transformers' own, the forward and the sampling, computes where the model is."""
    for name in ("forward", "generate"):
        own = getattr(trainer.policy.model, name)

        @functools.wraps(own)
        def at_home(*args, own=own, **kwargs):
            with torch.device("cpu"):
                return own(*args, **kwargs)

        setattr(trainer.policy.model, name, at_home)
    with torch.device(device):
        trainer.run(Progress(Console(quiet=True)))
    return [{key: value for key, value in row.items() if "time" not in key} for row in trainer.folder.read_metrics()]


@pytest.mark.parametrize(
    ("baseline", "settings"),
    [
        ("oblr_shrunk", {"ledger_steps": 1, "look_steps": 1}),  # sketches; every baseline
        ("oblr", {"ledger_steps": 1, "look_steps": 2}),
        ("rloo", {"ledger_steps": 0, "rollout": {"prompts_per_micro_batch": 2}}),
        ("oblr", {"score_norms": "length", "rollout": {"sampler_correction": "truncated"}}),
        ("opo", {"look_steps": 0}),
    ],
)
def test_a_run_does_not_care_for_the_default_device(tmp_path, baseline, settings):
    expected = metrics(Trainer(config(tmp_path / "cpu", baseline, **settings)), "cpu")
    found = metrics(Trainer(config(tmp_path / "meta", baseline, **settings)), "meta")
    assert len(found) == 3
    assert found[1]["grad_norm"] > 0
    assert found == expected


def test_the_claim_of_a_baseline_is_checked_wherever_tensors_are_made():
    with torch.device("meta"):
        assert depends_on_own_output("mean")
        assert not depends_on_own_output("oblr")
