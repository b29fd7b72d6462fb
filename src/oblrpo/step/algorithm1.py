"""Algorithm 1 of OBLR-PO: sample, score, baseline, advantages, gradient, signal-to-noise ratio, learning rate, update.

P prompts q have G outputs o each, with rewards F. The gradient is streamed over micro-batches of whole groups. The
algorithm is made of parts that say which baseline and which rate are taken; nothing here asks for their names. What the
paper does not have (several updates a batch, a KL penalty, outputs left out, the ledger) wraps this class: see
`trainer.learner`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from oblrpo import estimators
from oblrpo.algorithms import Algorithm
from oblrpo.errors import check_finite
from oblrpo.policy import Policy
from oblrpo.policy.micro_batches import MicroBatches
from oblrpo.step.baseline import StepBaseline
from oblrpo.step.batch import Batch
from oblrpo.step.gradient import Gradient, Part, Update, by_prompt
from oblrpo.step.movement import Movement
from oblrpo.step.samples import Sampled


@dataclass
class Algorithm1:
    """Turns prompts and rewards into updates of the policy."""

    policy: Policy
    sampler: Any
    rewards: Any
    rollout: Any
    micro_batches: MicroBatches
    algorithm: Algorithm
    tape: Any
    baseline: StepBaseline
    schedule: estimators.SNRSchedule
    movement: Movement
    optimizer: Optimizer

    def step(self, problems: list[Any], number: int) -> Update:
        """One step: sample, take the gradient, update, and let the sampler take over the new weights.

        Args:
            problems: the prompts, and what verifies their outputs.
            number: the number of the step, from 1.
        """
        gradient = self.gradient(self.batch(self.sample(problems)), number)
        update = self.update(gradient)
        self.baseline.end_step()
        self.sampler.sync(self.policy)
        return update

    def sample(self, problems: list[Any]) -> Sampled:
        """Sample G outputs o of each of the P prompts q, and reward them.

        Raises:
            InputError: a prompt does not fit, or a reward fails.
        """
        asked = self.rollout
        rollouts = self.sampler.sample(
            [problem.prompt for problem in problems],
            asked.num_generations,
            asked.max_completion_length,
            asked.temperature,
        )
        rewarded = self.rewards(problems, rollouts.completions)
        rewards_PG, valid_PG = (torch.tensor(values, device=self.policy.device) for values in rewarded)
        return Sampled(rollouts, rewards_PG, valid_PG)

    def batch(self, sampled: Sampled) -> Batch:
        """The outputs with their rewards, and the factors with which they enter the mean."""
        longest = self.rollout.max_completion_length
        return Batch.of(
            sampled.rollouts.sequences, sampled.rewards_PG, sampled.valid_PG, self.algorithm, longest=longest
        )

    def gradient(self, batch: Batch, step: int | None = None) -> Gradient:
        """Take g = (1/P) sum_i g_i with g_i = (1/G) sum_j A_ij grad log pi(o_ij|q_i); `.grad` is that of -J.

        Args:
            batch: the outputs and their rewards.
            step: the number of the step, by which norms and their proxies are compared; None never compares them.

        Raises:
            DivergedError: a log-probability, a score norm or a gradient is NaN or infinite.
            ValueError: fewer than two prompts take part.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.baseline.begin(step, batch)
        parts = [
            add_to_gradient(part, self.policy, self.rollout.temperature, self.tape, self.baseline)
            for part in batch.parts(self.micro_batches)
        ]
        # Signal and noise, from the prompts' gradients and their mean: SNR = ||grad J||^2 / tr H.
        group_norm2_P = by_prompt(parts, batch.part_P)[batch.part_P]
        norm2 = estimators.squared_norm(self.policy.parameters)
        check_finite(  # in float32, because optimizers square it there, and keep the squares
            "gradient", torch.tensor(norm2, dtype=torch.float32, device="cpu")
        )
        moments = estimators.moments(group_norm2_P, norm2)
        return Gradient(batch, parts, moments, norm2, group_norm2_P, self.baseline.known_PG)

    def update(self, gradient: Gradient) -> Update:
        """Set the rate eta_0 N SNR / (1 + N SNR) (theorem 4), or the schedule's own, and step.

        No signal, no step: where the gradient is exactly 0, weights and optimizer stay as they are.

        Raises:
            ValueError: the update cannot be measured.
        """
        schedule, kl = self.schedule, None
        factor = schedule.step(gradient.moments, gradient.ess_ratio, gradient.batch.mean_length)
        rate = schedule.learning_rates[0]
        if gradient.norm2 == 0:
            schedule.restore()
            factor = rate = 0.0
        else:
            change = self.movement.watch(gradient) if schedule.rule.measures_updates else None
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)  # its room is needed by what measures the update
            if change is not None:  # how far the policy moved; an update that went too far is shortened
                kl, left = schedule.confine(change)
                factor, rate = factor * left, rate * left
        self.optimizer.zero_grad(set_to_none=True)
        return Update(gradient, factor, rate, schedule.smoothed, schedule.snr_interval(), kl)


def add_to_gradient(part: Batch, policy: Policy, temperature: float, tape: Any, baseline: StepBaseline) -> Part:
    """Add the share of one micro-batch to the gradient: one forward, and one backward for activations.

    Raises:
        DivergedError: a log-probability, a score norm or a gradient is NaN or infinite.
    """
    # Score: the gradient s of each output's log pi(o|q), left on the tape.
    with tape:
        logps = policy.logps(part.sequences, temperature)
        check_finite("log-probability", logps.logps_S.detach())
        part = part.under(logps)
        tape.record(part.scored(logps.logp_SC))
    # Baseline: b = sum w F / sum w over the other outputs, weighted by w = ||s||^2 (theorem 7), or the named one.
    baseline_PG, norm2_S = baseline(part, logps, tape)
    # Advantages A = F - b, and the gradient: the sum of A s, each with its share of the mean.
    coef_PG = part.share_of_mean * (part.rewards_PG - baseline_PG)
    group_norm2_P = tape.accumulate(coef_PG.flatten(), part.groups) * part.prompts**2
    check_finite("gradient of a prompt", group_norm2_P)
    tape.forget()
    return Part(part, norm2_S, baseline_PG, group_norm2_P, logps.detached())
