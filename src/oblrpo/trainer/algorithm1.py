"""Algorithm 1 of OBLR-PO: sample, score, baseline, advantages, gradient, signal-to-noise ratio, learning rate, update.

`Learner.step` is one step of it, in the paper's order. Which algorithm runs is in the parts that the learner is made
of (`setup.make_learner`), and nothing here asks. The gradient is streamed over micro-batches of whole groups.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oblrpo import estimators
from oblrpo.algorithms import Algorithm
from oblrpo.errors import DivergedError, InputError, check_finite
from oblrpo.memory import give_back
from oblrpo.policy import Policy
from oblrpo.policy.micro_batches import MicroBatches
from oblrpo.rewards import Rewards
from oblrpo.rollout import Rollouts, Sampler
from oblrpo.scores import ScoreTape, UnsupportedModelError
from oblrpo.settings import RolloutConfig
from oblrpo.tasks import Problem
from oblrpo.trainer.baseline import StepBaseline
from oblrpo.trainer.batch import Batch, mismatch_metrics
from oblrpo.trainer.movement import Movement
from oblrpo.trainer.optimizers import averaged, training
from oblrpo.trainer.reference import Reference
from oblrpo.trainer.results import Gradient, Part, Sampled, Step, Update, by_prompt, clip_metrics
from oblrpo.trainer.sampler_mismatch import clip_max_of
from oblrpo.trainer.selection import Selection
from oblrpo.trainer.variance_ledger import VarianceLedger


@dataclass
class Learner:
    """Turns prompts and rewards into updates of the policy. Its parts are made by `setup.make_learner`."""

    policy: Policy
    sampler: Sampler
    rewards: Rewards
    rollout: RolloutConfig
    micro_batches: MicroBatches
    algorithm: Algorithm
    ratio: estimators.Ratio
    tape: ScoreTape
    baseline: StepBaseline
    ledger: VarianceLedger
    schedule: estimators.SNRSchedule
    movement: Movement
    optimizer: Optimizer
    scheduler: Any
    num_iterations: int
    max_grad_norm: float
    selection: Selection
    reference: Reference | None = None
    skipped: str = ""
    """Why the last `learn` left an update out; empty if it left none out."""

    def step(self, problems: list[Problem], number: int) -> Step:
        """Sample G outputs o of each of the P prompts q, reward them, and learn from them.

        Args:
            problems: the prompts, and what verifies their outputs.
            number: the number of the step, from 1.

        Raises:
            InputError: as `learn` raises, or a reward fails.
        """
        return self.learn_from(self.sample(problems), number)

    def sample(self, problems: list[Problem]) -> Sampled:
        """Sample G outputs o of each prompt q, and reward them.

        Raises:
            InputError: a prompt does not fit, or a reward fails.
        """
        rollout = self.rollout
        rollouts = self.sampler.sample(
            [problem.prompt for problem in problems],
            rollout.num_generations,
            rollout.max_completion_length,
            rollout.temperature,
        )
        rewards_PG, valid_PG = (
            torch.tensor(each, device=self.policy.device) for each in self.rewards(problems, rollouts.completions)
        )
        return Sampled(rollouts, rewards_PG, valid_PG)

    def learn_from(self, sampled: Sampled, number: int) -> Step:
        """Learn from what was sampled, and let the sampler take over the new weights; arguments as in `step`.

        Raises:
            InputError: as `learn` raises.
        """
        rollouts, rewards_PG, valid_PG = sampled.rollouts, sampled.rewards_PG, sampled.valid_PG
        learned_PG, kl_PG = rewards_PG, None
        if self.reference is not None:
            learned_PG, kl_PG = self.reference.penalised(rollouts.sequences, rewards_PG)
        updates = self.learn(rollouts, learned_PG, valid_PG, number)
        self.sampler.sync(self.policy)
        return Step(rollouts, rewards_PG, valid_PG, updates, skipped=self.skipped, kl_PG=kl_PG)

    def learn(
        self,
        rollouts: Rollouts,
        rewards_PG: Tensor,
        valid_PG: Tensor | None = None,
        step: int = 0,
    ) -> list[Update]:
        """Make `num_iterations` updates on one batch of completions; the policy before the first is the old one.

        No update is made, and nothing changes, where fewer than two prompts have as many valid outputs as the baseline
        needs. An update whose gradient is not finite is left out with those that would follow it, and changes nothing
        either; `skipped` says why.

        Args:
            rollouts: P x G completions.
            rewards_PG: the rewards F.
            valid_PG: outputs that have a reward (all if None); what stands in the place of the others is ignored.
            step: the number of the step in the run, from 1; 0 takes no ledger.

        Raises:
            InputError: the model cannot be recorded, or the gradient cannot be used.
            DivergedError: the updated weights, or log-probabilities, are NaN or infinite.
        """
        self.skipped = ""
        batch = self.batch(rollouts, rewards_PG, valid_PG)
        if batch.prompts_in_mean < 2:
            return []
        updates: list[Update] = []
        clipped: list[dict[str, float]] = []
        try:
            further: dict[str, float] = {}
            for _ in range(self.num_iterations):
                try:
                    if not updates:
                        further |= self.ledger.metrics(batch, self.baseline.prior, step)
                    gradient, parts = self.gradient(batch, step)
                except DivergedError as error:
                    if error.what == "log-probability":  # the policy itself is broken, not this batch's gradient
                        raise
                    self._skip(error)
                    break
                if not updates:
                    further |= self.baseline.learn(parts) | mismatch_metrics([part.batch for part in parts])
                    further |= self.ledger.of_draw(gradient.batch)
                    batch = gradient.batch.aged(gradient.logp_SC, gradient.baseline_PG)
                clipped.append(clip_metrics(parts))
                updates.append(self.update(gradient))
        except DivergedError:
            raise
        except (ValueError, UnsupportedModelError) as error:
            raise InputError(f"the gradient cannot be used: {error}") from None
        if not updates:
            return []
        self.baseline.next_step()
        further |= {name: sum(each.get(name, 0.0) for each in clipped) / len(clipped) for name in clipped[-1]}
        return [replace(updates[0], further=further), *updates[1:]]

    def _skip(self, error: DivergedError) -> None:
        """Forget a gradient that is not finite, and what was left of it on the way."""
        self.skipped = error.what
        self.tape.forget()
        self.optimizer.zero_grad(set_to_none=True)

    def batch(
        self,
        rollouts: Rollouts,
        rewards_PG: Tensor,
        valid_PG: Tensor | None = None,
    ) -> Batch:
        """The completions with their rewards, and with what this algorithm makes of them in the mean."""
        return Batch.of(
            rollouts.sequences,
            rewards_PG,
            valid_PG,
            self.algorithm,
            longest=self.rollout.max_completion_length,
            sampler_logps_SC=rollouts.sampler_logps_SC,
            clip_max=clip_max_of(self.rollout),
            features=rollouts.features,
            ratio=self.ratio,
        )

    def gradient(self, batch: Batch, step: int = 0) -> tuple[Gradient, list[Part]]:
        """Take g = (1/P) sum_i g_i with g_i = (1/G) sum_j rho_ij A_ij grad log pi(o_ij|q_i); `.grad` is that of -J.

        Raises:
            DivergedError: a log-probability, a score norm or a gradient is NaN or infinite.
            ValueError: what the sampler reports is no log-probability; fewer than two prompts take part.
        """
        self.optimizer.zero_grad(set_to_none=True)
        self.baseline.begin(batch.old_baseline_PG if batch.ratio.by_sign else None)
        batch = self.selection.choose(batch, self.baseline, step)
        parts = [self._part(part, step) for part in batch.parts(self.micro_batches)]
        # Signal and noise, from the prompts' gradients and their mean: SNR = ||grad J||^2 / tr H.
        nothing_P = torch.zeros_like(batch.part_P)
        group_norm2_P = by_prompt(parts, [part.group_norm2_P for part in parts], nothing_P)[batch.part_P]
        norm2 = estimators.squared_norm(self.policy.parameters)
        check_finite(
            "gradient", torch.tensor(norm2, dtype=torch.float32, device="cpu")
        )  # optimizers square it in float32, and keep the squares
        nothing = 0.0 if batch.draw is None else batch.draw.nothing
        moments = estimators.moments(group_norm2_P, norm2, nothing=nothing)
        known_PG = self.baseline.known(batch) if self.baseline.fixed_PG is None else self.baseline.fixed_PG
        return Gradient.of(batch, parts, moments, norm2, group_norm2_P, known_PG, self._entropy(batch)), parts

    @torch.no_grad()
    def _entropy(self, batch: Batch) -> float:
        """The sum of the entropies of tokens that were left out: as they were drawn, or by a forward."""
        left_out_PG = ~batch.kept_PG
        if batch.features is not None:
            return float(batch.features.entropy_S[left_out_PG.flatten()].sum())
        total = 0.0
        for part in batch.parts(self.micro_batches, left_out_PG):
            logps = self.policy.logps(part.sequences, self.rollout.temperature)
            total += float((logps.entropy_SC * part.sequences.own_SC).sum())
        return total

    def _part(self, part: Batch, step: int) -> Part:
        """Add the share of one micro-batch to the gradient: one forward, and one backward for activations."""
        # Score: the gradient s of each output's log pi(o|q), left on the tape.
        with self.tape as tape:
            logps = self.policy.logps(part.sequences, self.rollout.temperature, self.baseline.needs_features(step))
            check_finite("log-probability", logps.logps_S.detach())
            part = part.weighed(logps)
            self.baseline.record(tape, part, logps)
        # Baseline: b = sum w F / sum w over the other outputs, weighted by w = ||s||^2 (theorem 7), or the named one.
        norm2_S = self.baseline.norms(tape, step)
        baseline_PG = self.baseline.of(part, logps, norm2_S)
        # Advantages A = F - b, and the gradient: sum of A s, each with its importance weight and share of the mean.
        coefs_PG = part.share_of_mean() * (part.rewards_PG - baseline_PG)
        group_norm2_P = tape.accumulate(coefs_PG.flatten(), part.groups) * part.prompts_in_mean**2
        check_finite("gradient of a prompt", group_norm2_P)
        tape.forget()
        entropy = float((logps.entropy_SC * part.sequences.own_SC).sum())
        return Part(part, norm2_S, baseline_PG, group_norm2_P, logps.detached(), entropy)

    def update(self, gradient: Gradient) -> Update:
        """Set the rate eta_0 N SNR / (1 + N SNR) (theorem 4), or the schedule's own, and step.

        No signal, no step: where the gradient is exactly 0, weights and optimizer stay as they are.

        Raises:
            ValueError: the update cannot be measured.
            DivergedError: it made the weights NaN or infinite.
        """
        ess_ratio = gradient.batch.ess_ratio
        factor = self.schedule.step(gradient.moments, ess_ratio, gradient.batch.mean_length)
        kl, rate = None, self.schedule.learning_rates[0]
        if gradient.norm2 == 0:
            self.schedule.restore()
            factor = rate = 0.0
        else:
            if self.max_grad_norm:
                torch.nn.utils.clip_grad_norm_(self.policy.parameters, self.max_grad_norm)
            give_back()  # the tape's room, before room is taken for the optimizer and a copy of the weights
            change = self.movement.watch(gradient) if self.schedule.rule.measures_updates else None
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)  # the gradient's room, for what measures the update
            if change is not None:  # how far the policy moved; what went too far is shortened
                kl, left = self.schedule.confine(change)
                factor, rate = factor * left, rate * left
            check_finite("weight", torch.stack([p.detach().sum() for p in self.policy.parameters]))
        self.optimizer.zero_grad(set_to_none=True)
        give_back()  # the gradient's room, which would lie between what the next forward keeps
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch wants an optimizer step first, and there may be none yet
            self.scheduler.step()
        return Update(gradient, factor, rate, self.schedule.smoothed, self.schedule.snr_interval(), kl)

    @contextmanager
    def handing_out(self) -> Iterator[None]:
        """The policy as it is evaluated: that of a schedule-free optimizer is the average of its iterates."""
        with averaged(self.optimizer) as other:
            if other:
                self.sampler.sync(self.policy)
            yield
        if other:
            self.sampler.sync(self.policy)

    _PARTS = ("optimizer", "schedule", "scheduler", "baseline", "reference")

    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy that the next step depends on."""
        return {part: each.state_dict() for part in self._PARTS if (each := getattr(self, part)) is not None}

    def load_state_dict(self, state: dict[str, Any], run: str) -> None:
        """Take up where `state_dict` left off.

        Raises:
            InputError: it is the state of another version; the message names `run`.
        """
        try:
            for part in self._PARTS:
                if (each := getattr(self, part)) is not None:
                    each.load_state_dict(state[part])
            training(self.optimizer)
        except (KeyError, ValueError) as error:
            raise InputError(
                f"{run} was written by another version ({error}); resume it with that one, or start anew from its "
                "checkpoint with --model."
            ) from None
