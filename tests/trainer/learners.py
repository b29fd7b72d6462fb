"""Learners of any algorithm on a policy, and everything that one pass over a batch says."""

from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import torch

from oblrpo.rollout import Rollouts
from oblrpo.settings import AlgorithmConfig, OptimConfig, RolloutConfig, ScoresConfig, TrainConfig
from oblrpo.step import Sampled
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.trainer.setup import make_learner


def learner_of(
    policy, algorithm, *, optimizer=torch.optim.SGD, lr=0.1, scores=None, rewards=None, prior_strength=None,
    schedule_floor=0.0, measured_one_in=None, exact_ledger=False, **settings,
):  # fmt: skip
    """A learner with settings by name, whatever section of the config they are in, and what no setting says."""
    row = asdict(ALGORITHMS[algorithm] if isinstance(algorithm, str) else algorithm)
    settings |= row | {"optimizer": optimizer.__name__, "learning_rate": lr}
    sections = {"rollout": RolloutConfig, "algorithm": AlgorithmConfig, "optim": OptimConfig}
    made = {
        name: kind(**{field.name: settings.pop(field.name) for field in fields(kind) if field.name in settings})
        for name, kind in sections.items()
    }
    assert not settings, settings
    config = TrainConfig(**made, scores=scores or ScoresConfig())
    learner = make_learner(policy, rewards, config)
    learner.baseline.prior.strength = prior_strength
    learner.schedule.rule.settings = replace(learner.schedule.rule.settings, floor=schedule_floor)
    learner.ledger.exact = exact_ledger
    learner.movement.every = measured_one_in or learner.movement.every
    return learner


def one_pass(learner, sequences, rewards_PG, old_logp_SC=None, step=0, valid_PG=None, sampler_logps_SC=None):
    """The gradient of a batch with what was learned on the way; nothing is updated."""
    batch = learner.batch(sampled(Rollouts(sequences, [], None, sampler_logps_SC), rewards_PG, valid_PG))
    if old_logp_SC is not None:
        batch = batch.aged(old_logp_SC, torch.zeros_like(rewards_PG))
    further = {} if old_logp_SC is not None else learner.ledger.metrics(batch, learner.baseline.prior, step)
    gradient = learner.gradient(batch, step)
    further |= learner.of_first(gradient)
    names = ("batch", "moments", "norm2", "group_norm2_P", "norm2_PG", "baseline_PG", "logps_PG", "logp_SC", "entropy",
             "advantages_PG", "rho_PG")  # fmt: skip
    return SimpleNamespace(**{name: getattr(gradient, name) for name in names}, further=further)


def sampled(rollouts, rewards_PG, valid_PG=None):
    """Completions with their rewards; all of them count if nothing else is said."""
    return Sampled(rollouts, rewards_PG, torch.ones_like(rewards_PG).bool() if valid_PG is None else valid_PG)
