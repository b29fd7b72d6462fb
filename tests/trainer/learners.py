"""Learners of any algorithm on a policy, and everything that one pass over a batch says."""

from dataclasses import asdict, fields, replace
from types import SimpleNamespace

import torch

from oblrpo.settings import AlgorithmConfig, OptimConfig, RolloutConfig, ScoresConfig, TrainConfig
from oblrpo.step import Samples
from oblrpo.step.flow import sampler_metrics
from oblrpo.tables.algorithms import ALGORITHMS
from oblrpo.trainer.setup import make_learner


def learner_of(
    policy, algorithm, *, optimizer=torch.optim.SGD, lr=0.1, scores=None, rewards=None, prior_strength=None,
    schedule_floor=0.0, measured_one_in=None, **settings,
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
    config = TrainConfig(**made, scores=scores or ScoresConfig(look_steps=1, ledger_steps=0))
    learner = make_learner(policy, rewards, config)
    learner.baseline.prior.strength = prior_strength
    learner.schedule.settings = replace(learner.schedule.settings, floor=schedule_floor)
    learner.movement.every = measured_one_in or learner.movement.every
    return learner


def samples_of(rollouts, rewards_PG, valid_PG=None):
    """Completions with their rewards; all of them count if nothing else is said."""
    return Samples(rollouts, rewards_PG, torch.ones_like(rewards_PG).bool() if valid_PG is None else valid_PG)


def drawn(learner, samples):
    """The samples with the features of their draws, which a forward takes where the sampler has not."""
    rollouts = samples.rollouts
    if rollouts.features is None:
        with torch.no_grad():
            features = learner.policy.logps(rollouts.sequences, learner.rollout.temperature).features
        rollouts = replace(rollouts, features=features)
    return replace(samples, rollouts=rollouts)


def learn(learner, samples, number=1):
    """The updates of a step on these samples, which become the past; step 0 takes no look."""
    return learner.learn(drawn(learner, samples), number)


class LooksAt:
    """Looks in every step at the same prompts."""

    every = 1

    def __init__(self, looks, prompts):
        self.looks, self.prompts = looks, prompts

    def take(self, batch, number):
        if not number or not self.prompts:
            return None
        return self.looks.at(batch, torch.tensor(self.prompts))

    def of_rows(self, *found):
        return self.looks.of_rows(*found)

    def metrics(self, *_):
        return {}

    def save_up(self, *_):
        pass

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass


def looking_at(learner, prompts):
    """The learner, which looks at these prompts alone from here on."""
    learner.looks = LooksAt(learner.looks, prompts)
    return learner


def one_pass(learner, samples, step=1, old_token_logps_SC=None, baseline_PG=None):
    """The first gradient of a step, and as `further` its metrics; no update is made, and no baseline learns of it.

    Weights are those of a later update where the log-probabilities before the first are given. Step 0 takes no look.
    A baseline that is given is that of an earlier update on the batch.
    """
    samples = drawn(learner, samples)
    features = samples.rollouts.features
    batch, weights, past = learner.batch(samples), learner.weights(samples), learner.baseline
    weights = replace(weights, old_token_logps_SC=old_token_logps_SC)
    look, begun = learner.looks.take(batch, step), past.begin()
    weight_PG = past.weights(
        past.by_proxy(features).view_as(batch.rewards_PG), None if look is None else look.grams, batch.prompts
    )
    if baseline_PG is None:
        baseline_PG = begun.of(batch.rewards_PG, batch.valid_PG, batch.own_PGT, weight_PG)
    gradient = learner.gradient(batch, baseline_PG, weights)
    further = {} if look is None else learner.looks.metrics(look, batch, past.prior, weights)
    further |= sampler_metrics(gradient.weighed, learner.clip_max)
    names = ("batch", "norm2", "token_logps_SC", "advantages_PG", "trained_S", "weighed")
    return SimpleNamespace(
        **{name: getattr(gradient, name) for name in names},
        moments=learner.moments(gradient, look, weights),
        weight_PG=weight_PG,
        baseline_PG=baseline_PG,
        norm2_PG=None if look is None else look.norm2_of(batch),
        logps_PG=gradient.token_logps_SC.sum(1).view_as(baseline_PG),
        rho_PG=gradient.weighed.rho_S.view_as(baseline_PG),
        further=further,
        begun=begun,
        gradient=gradient,
    )
