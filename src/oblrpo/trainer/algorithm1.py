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
from oblrpo.config import AlgorithmConfig, OptimConfig, RolloutConfig
from oblrpo.errors import InputError
from oblrpo.policy import Policy, Sequences
from oblrpo.rollout import Rollouts
from oblrpo.scores import ScoreTape, UnsupportedModelError


@dataclass(frozen=True)
class Estimate:
    """The gradient of one batch (left in `.grad`, as that of the loss -J) and all that was learned on the way."""

    norm2_PG: Tensor
    baseline_PG: Tensor
    advantages_PG: Tensor
    logps_PG: Tensor
    moments: estimators.Moments
    grad_norm2: float
    entropy: float


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
    ) -> None:
        self.policy, self.algorithm, self.optimizer, self.scheduler = policy, algorithm, optimizer, scheduler
        self.rollout, self.config, self.optim = rollout, config, optim
        ScoreTape(policy.model)  # refuses a model with a layer that has no rule, before anything is sampled
        self.schedule = estimators.SNRSchedule(
            optimizer,
            algorithm.schedule,  # type: ignore[arg-type]
            ema=optim.schedule_ema,
            floor=optim.schedule_floor,
            ceiling=optim.schedule_ceiling,
            warmup=optim.warmup_steps * config.num_iterations,  # the schedule counts updates
        )

    def learn(self, rollouts: Rollouts, rewards_PG: Tensor) -> list[Update]:
        """`num_iterations` updates on one batch of completions; its own log-probabilities before the first are old.

        Raises:
            InputError: the gradient or the updated weights are NaN or infinite, or the model cannot be recorded.
        """
        updates: list[Update] = []
        for _ in range(self.config.num_iterations):
            old_logps_PG = updates[0].estimate.logps_PG if updates else None
            try:
                estimate = self.gradient(rollouts.sequences, rewards_PG, old_logps_PG)
            except (ValueError, UnsupportedModelError) as error:
                raise InputError(
                    f"the gradient cannot be used: {error} Where it is NaN, lower learning_rate."
                ) from None
            updates.append(self.update(estimate))
        if not torch.stack([p.detach().sum() for p in self.policy.parameters]).isfinite().all():
            raise InputError("the update made the weights NaN or infinite; lower learning_rate or set max_grad_norm.")
        return updates

    def gradient(self, sequences: Sequences, rewards_PG: Tensor, old_logps_PG: Tensor | None = None) -> Estimate:
        """G = (1/P) sum_i g_i, g_i = (1/G) sum_j rho_ij A_ij grad log pi(o_ij|q_i), streamed over whole groups.

        rho is pi / pi_old of the whole completion, 1 on-policy; the baseline is weighted by ||rho grad log pi||^2.

        Raises:
            ValueError: a score norm or a gradient is NaN or infinite.
        """
        P, G = rewards_PG.shape
        weights_PG = self._weights(sequences.lengths_S.view(P, G).to(rewards_PG))
        per_block = self.rollout.prompts_per_micro_batch or P
        blocks: list[tuple[Tensor, ...]] = []
        entropy_sum = 0.0
        tape = ScoreTape(self.policy.model)
        self.optimizer.zero_grad(set_to_none=True)
        for start in range(0, P, per_block):
            prompts = slice(start, min(start + per_block, P))
            batch = sequences.rows(prompts.start * G, prompts.stop * G)
            with tape:
                logps_S, entropy_SC = self.policy.logps(batch, self.rollout.temperature)
                tape.record(logps_S)
            logps_PG = logps_S.detach().view(-1, G).to(rewards_PG)
            rho_PG = torch.ones_like(logps_PG) if old_logps_PG is None else (logps_PG - old_logps_PG[prompts]).exp()
            norm2_PG = tape.norm2().view(-1, G).to(rewards_PG)
            baseline_PG = estimators.baseline(
                self.algorithm.baseline, rewards_PG[prompts], norm2_PG=norm2_PG * rho_PG**2
            )
            advantages_PG = self._normalise(rewards_PG[prompts] - baseline_PG, rewards_PG[prompts])
            coef_PG = -rho_PG * advantages_PG * weights_PG[prompts] / (P * G)  # minus: optimizers descend
            group_norm2_P = tape.accumulate(coef_PG.flatten(), group_size=G) * P**2
            entropy_sum += float((entropy_SC * batch.completion_mask_SC).sum())
            blocks.append((norm2_PG, baseline_PG, advantages_PG, logps_PG, group_norm2_P))
        norm2_PG, baseline_PG, advantages_PG, logps_PG, group_norm2_P = map(torch.cat, zip(*blocks, strict=True))
        grad_norm2 = estimators.squared_norm(self.policy.parameters)
        moments = estimators.moments(group_norm2_P, grad_norm2)
        entropy = entropy_sum / float(sequences.completion_mask_SC.sum())
        return Estimate(norm2_PG, baseline_PG, advantages_PG, logps_PG, moments, grad_norm2, entropy)

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

    def _weights(self, lengths_PG: Tensor) -> Tensor:
        return estimators.WEIGHTINGS[self.algorithm.weighting](lengths_PG, self.rollout.max_completion_length)
