"""Learners of any algorithm on a policy, and everything that one pass over a batch says."""

from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import torch

from oblrpo.settings import AlgorithmConfig, OptimConfig, RolloutConfig, ScoresConfig, TrainConfig
from oblrpo.step import Samples
from oblrpo.step.off_policy import sampler_metrics
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
    core = learner.core
    core.baseline.prior.strength = prior_strength
    core.schedule.settings = replace(core.schedule.settings, floor=schedule_floor)
    core.movement.every = measured_one_in or core.movement.every
    learner.ledger.exact = exact_ledger
    return learner


def samples_of(rollouts, rewards_PG, valid_PG=None):
    """Completions with their rewards; all of them count if nothing else is said."""
    return Samples(rollouts, rewards_PG, torch.ones_like(rewards_PG).bool() if valid_PG is None else valid_PG)


def gradient_of(learner, samples, step=None, old_token_logps_SC=None, baseline_PG=None):
    """The gradient of one pass over these samples, of which no update is made.

    It is that of a later update where the log-probabilities and the baseline of the first are given.
    """
    weights, batch = learner.weights(samples), learner.core.batch(samples)
    if old_token_logps_SC is not None:
        fixed_PG = baseline_PG if learner.ratio.by_sign else None
        weights, batch = (
            replace(weights, old_token_logps_SC=old_token_logps_SC),
            replace(batch, baseline_PG=fixed_PG, fresh=False),
        )
    baseline = learner.core.baseline.begin(step, batch)
    return learner.gradient(samples, learner.chosen(batch, baseline, weights), baseline, weights)


def one_pass(learner, samples, step=0):
    """The first gradient of a step, and as `further` its metrics; nothing is updated, and nothing becomes the past."""
    core, weights, batch = learner.core, learner.weights(samples), learner.core.batch(samples)
    baseline = core.baseline.begin(step, batch)
    further = learner.ledger.metrics(batch, core.baseline.prior, step, weights)
    gradient = learner.gradient(samples, learner.chosen(batch, baseline, weights), baseline, weights)
    further |= baseline.compare(gradient) | sampler_metrics(gradient.parts, learner.clip_max)
    names = ("batch", "moments", "norm2", "group_norm2_P", "norm2_PG", "baseline_PG", "logps_PG", "token_logps_SC",
             "entropy", "advantages_PG", "rho_PG")  # fmt: skip
    return SimpleNamespace(**{name: getattr(gradient, name) for name in names}, further=further, baseline=baseline)
