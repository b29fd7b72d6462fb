"""Algorithm 1 of OBLR-PO: score norms, baseline, advantages, gradient, signal-to-noise ratio, learning rate, update.

Sampling comes before (`rollout`); evaluation and checkpoints lie around it (`loop`). The algorithm is four names in a
table; nothing here asks which one runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oblrpo import estimators
from oblrpo.algorithms import Algorithm
from oblrpo.config import AlgorithmConfig, OptimConfig, RolloutConfig, ScoresConfig
from oblrpo.errors import InputError
from oblrpo.policy import Policy, Sequences
from oblrpo.rollout import Rollouts
from oblrpo.scores import ScoreTape, UnsupportedModelError
from oblrpo.trainer.weights import Weights, join


@dataclass(frozen=True)
class Estimate:
    """The gradient of one batch (left in `.grad`, as that of the loss -J) and all that was learned on the way."""

    norm2_PG: Tensor | None
    """Squared score norms, where they were taken."""
    baseline_PG: Tensor
    advantages_PG: Tensor
    logps_PG: Tensor
    moments: estimators.Moments
    grad_norm2: float
    entropy: float
    agreement: dict[str, float]
    """How well proxies agree with the exact norms, where both were taken."""


@dataclass(frozen=True)
class Update:
    """What one update did."""

    estimate: Estimate
    factor: float
    learning_rate: float
    smoothed: estimators.Moments


class Learner:
    """Turns completions and rewards into updates of the policy."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        optimizer: Optimizer,
        scheduler: Any,
        rollout: RolloutConfig,
        config: AlgorithmConfig,
        optim: OptimConfig,
        scores: ScoresConfig | None = None,
    ) -> None:
        self.policy, self.algorithm, self.optimizer, self.scheduler = policy, algorithm, optimizer, scheduler
        self.rollout, self.config, self.optim = rollout, config, optim
        scores = scores or ScoresConfig()
        self.weights = Weights(scores)
        # Made once: it refuses a model with a layer that has no rule before anything is sampled.
        self.tape = ScoreTape(policy.model, scores.score_method, memory_budget=scores.score_memory_mb * 10**6)
        self.schedule = estimators.SNRSchedule(
            optimizer,
            algorithm.schedule,  # type: ignore[arg-type]
            ema=optim.schedule_ema,
            floor=optim.schedule_floor,
            ceiling=optim.schedule_ceiling,
            warmup=optim.warmup_steps * config.num_iterations,  # the schedule counts updates
        )

    def learn(self, rollouts: Rollouts, rewards_PG: Tensor, step: int = 0) -> list[Update]:
        """`num_iterations` updates on one batch of completions; its own log-probabilities before the first are old.

        Raises:
            InputError: the gradient or the updated weights are NaN or infinite, or the model cannot be recorded.
        """
        updates: list[Update] = []
        for _ in range(self.config.num_iterations):
            old_logps_PG = updates[0].estimate.logps_PG if updates else None
            try:
                estimate = self.gradient(rollouts.sequences, rewards_PG, old_logps_PG, step)
            except (ValueError, UnsupportedModelError) as error:
                raise InputError(
                    f"the gradient cannot be used: {error} Where it is NaN, lower learning_rate."
                ) from None
            updates.append(self.update(estimate))
        if not torch.stack([p.detach().sum() for p in self.policy.parameters]).isfinite().all():
            raise InputError("the update made the weights NaN or infinite; lower learning_rate or set max_grad_norm.")
        return updates

    def gradient(
        self, sequences: Sequences, rewards_PG: Tensor, old_logps_PG: Tensor | None = None, step: int = 0
    ) -> Estimate:
        """G = (1/P) sum_i g_i, g_i = (1/G) sum_j rho_ij A_ij grad log pi(o_ij|q_i), streamed over whole groups.

        rho is pi / pi_old of the whole completion, 1 on-policy; the baseline is weighted by ||rho grad log pi||^2.

        Raises:
            ValueError: a score norm or a gradient is NaN or infinite.
        """
        P, G = rewards_PG.shape
        length_weights_PG = self._length_weights(sequences.lengths_S.view(P, G).to(rewards_PG))
        per_block = self.rollout.prompts_per_micro_batch or P
        tape, weights = self.tape, self.weights
        norms, known, blocks = [], [], []
        entropy_sum = 0.0
        self.optimizer.zero_grad(set_to_none=True)
        for start in range(0, P, per_block):
            prompts = slice(start, min(start + per_block, P))
            batch = sequences.rows(prompts.start * G, prompts.stop * G)
            rewards = rewards_PG[prompts]
            with tape:
                logps_S, entropy_SC, features = self.policy.logps(
                    batch, self.rollout.temperature, weights.needs_features(step)
                )
                logps_PG = logps_S.detach().view(-1, G).to(rewards)
                rho_PG = torch.ones_like(logps_PG) if old_logps_PG is None else (logps_PG - old_logps_PG[prompts]).exp()
                scale_PG = -rho_PG * length_weights_PG[prompts] / (P * G)  # minus: optimizers descend
                tape.record(logps_S, **self._fold_basis(rewards, scale_PG))
            norm2_S = tape.norm2() if weights.needs_norms(step) else None
            weights_PG = weights.of(features, norm2_S).view(-1, G).to(rewards)
            baseline_PG = estimators.baseline(self.algorithm.baseline, rewards, norm2_PG=weights_PG * rho_PG**2)
            advantages_PG = self._normalise(rewards - baseline_PG, rewards)
            group_norm2_P = tape.accumulate((scale_PG * advantages_PG).flatten(), group_size=G) * P**2
            entropy_sum += float((entropy_SC * batch.completion_mask_SC).sum())
            blocks.append((baseline_PG, advantages_PG, logps_PG, group_norm2_P))
            norms += [] if norm2_S is None else [norm2_S]
            known += [] if features is None else [features]
        baseline_PG, advantages_PG, logps_PG, group_norm2_P = map(torch.cat, zip(*blocks, strict=True))
        norm2_PG = torch.cat(norms).view(P, G).to(rewards_PG) if norms else None
        compares = norm2_PG is not None and bool(known) and old_logps_PG is None and G > 1
        agreement = weights.observe(join(known), torch.cat(norms), G) if compares else {}
        grad_norm2 = estimators.squared_norm(self.policy.parameters)
        moments = estimators.moments(group_norm2_P, grad_norm2)
        entropy = entropy_sum / float(sequences.completion_mask_SC.sum())
        return Estimate(norm2_PG, baseline_PG, advantages_PG, logps_PG, moments, grad_norm2, entropy, agreement)

    def _fold_basis(self, rewards_PG: Tensor, scale_PG: Tensor) -> dict[str, Any]:
        """What `record` needs to know beforehand if it is to keep a few sums a prompt only."""
        if self.tape.method != "folds":
            return {}
        basis_PGK = estimators.fold_basis(rewards_PG) * scale_PG[..., None]
        return {"basis_SK": basis_PGK.flatten(0, 1), "group_size": rewards_PG.shape[1]}

    def update(self, estimate: Estimate) -> Update:
        """Set the rate that the gradient's signal-to-noise ratio supports, clip if asked to, and step."""
        factor = self.schedule.step(estimate.moments)
        learning_rate = self.schedule.learning_rates[0]
        if self.optim.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.policy.parameters, self.optim.max_grad_norm)
        self.optimizer.step()
        self.scheduler.step()
        return Update(estimate, factor, learning_rate, self.schedule.smoothed)

    def _normalise(self, advantages_PG: Tensor, rewards_PG: Tensor) -> Tensor:
        return estimators.NORMALISATIONS[self.algorithm.normalisation](advantages_PG, rewards_PG)

    def _length_weights(self, lengths_PG: Tensor) -> Tensor:
        return estimators.WEIGHTINGS[self.algorithm.weighting](lengths_PG, self.rollout.max_completion_length)
