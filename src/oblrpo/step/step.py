"""A step, top to bottom: sample, look, weigh, baseline, advantages, gradient, signal and noise, rate, update.

It is Algorithm 1 of OBLR-PO with exact score norms seldom: P prompts q have G outputs o each, with rewards F. A *look*
takes the exact scores of some prompts' outputs, in the first steps and then one step in `look_steps`. Rewards are
weighed by these norms, and elsewhere by a proxy that earlier looks have taught. Every gradient is a plain forward and
backward of -sum coef log pi, over the outputs whose advantage is not 0. With a look at all prompts in every step it is
the paper's algorithm. Which baseline, which rate and which ratio are taken is decided by the parts; no algorithm is
named here. What earlier steps say is in `baseline`, `schedule` and `looks`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from oblrpo import estimators
from oblrpo.clock import Clock
from oblrpo.errors import DivergedError, InputError, check_finite
from oblrpo.estimators import ONE_IN
from oblrpo.estimators.advantages import ROUNDING
from oblrpo.estimators.moments import inner
from oblrpo.estimators.schedule import set_rate
from oblrpo.memory import give_back
from oblrpo.policy import Policy, Sequences
from oblrpo.policy.sequences import MicroBatches, of_like_length
from oblrpo.rollout import Sampler, sample_problems
from oblrpo.scores import UnsupportedModelError
from oblrpo.settings import RolloutConfig
from oblrpo.step.baseline import StepBaseline
from oblrpo.step.flow import (
    Batch,
    Gradient,
    ImportanceWeights,
    Samples,
    StepResult,
    Update,
    Weighed,
    clip_metrics,
    sampler_metrics,
)
from oblrpo.step.look import LookAtBatch, Looks
from oblrpo.step.reference import Reference
from oblrpo.tables.algorithms import Algorithm, Ratio
from oblrpo.tasks import Problem


@dataclass
class Learner:
    """Turns prompts and rewards into updates of the policy. `trainer.setup.make_learner` makes its parts."""

    policy: Policy
    sampler: Sampler
    rewards: Callable[..., tuple[list[list[float]], list[list[bool]]]]
    """The rewards F, and which are valid; `rewards.Rewards`."""
    rollout: RolloutConfig
    """How many outputs a prompt, how long, at which temperature."""
    micro_batches: MicroBatches
    """Rows that go through the model together."""
    algorithm: Algorithm
    """What F - b is divided and weighted by."""
    ratio: Ratio
    """What weighs scores in later updates on a batch."""
    baseline: StepBaseline
    looks: Looks
    schedule: estimators.SNRSchedule
    movement: Movement
    """For schedules that measure how far an update moves the policy."""
    optimizer: Optimizer
    scheduler: LambdaLR | None = None
    """The course of the rate eta_0; None where it is constant."""
    num_iterations: int = 1
    clip_max: float | None = None
    """The C of the weights min(C, pi / sampler); None where the sampler is taken for the policy."""
    reward_clip: float = 0.0
    """The largest size of a reward that is learned from; 0: no limit."""
    reference: Reference | None = None
    rows: int | None = None
    """How many prompts there are to train on, where batches hold a good part of them (`counted`)."""
    clock: Clock = field(default_factory=Clock)

    @cached_property
    def size(self) -> int:
        """The bytes of the policy's weights, by which room that is free is worth giving back."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.policy.model.parameters())

    def step(self, problems: list[Problem], number: int) -> StepResult:
        """Sample, reward, learn, and let the sampler take over the new weights; `number` counts steps from 1."""
        return self.learn_from(self.sample(problems), number)

    def sample(self, problems: list[Problem]) -> Samples:
        """Sample G outputs o of each of the P prompts q, and reward them."""
        with self.clock.part("sampling"):
            rollouts = sample_problems(
                self.sampler,
                problems,
                self.rollout.num_generations,
                self.rollout.max_completion_length,
                self.rollout.temperature,
            )
            give_back(self.size)  # the room of keys and values, which no forward of training fits into
            rewarded = self.rewards(problems, rollouts.said, rollouts.ids)
        rewards_PG, valid_PG = (torch.tensor(values, device=self.policy.device) for values in rewarded)
        return Samples(rollouts, rewards_PG, valid_PG)

    def charged(self, samples: Samples) -> tuple[Samples, Tensor | None]:
        """The samples with the rewards that are learned from, clipped and less the KL penalty; and its log-ratios."""
        if self.reward_clip:
            samples = replace(samples, rewards_PG=samples.rewards_PG.clamp(-self.reward_clip, self.reward_clip))
        if self.reference is None:
            return samples, None
        charged_PG, kl_PG = self.reference.penalised(samples.rollouts.sequences, samples.rewards_PG)
        return replace(samples, rewards_PG=charged_PG), kl_PG

    def learn_from(self, samples: Samples, number: int) -> StepResult:
        """Learn from what was sampled in step `number`, and let the sampler take over the new weights."""
        charged, kl_PG = self.charged(samples)
        with self.clock.part("training"):
            result = self.learn(charged, number)
        with self.clock.part("sampling"):
            self.sampler.sync(self.policy)
        return replace(result, samples=samples, kl_PG=kl_PG)

    def batch(self, samples: Samples) -> Batch:
        """The outputs with their rewards, and the factors with which they enter the mean."""
        sequences, longest = samples.rollouts.sequences, self.rollout.max_completion_length
        return Batch.of(sequences, samples.rewards_PG, samples.valid_PG, self.algorithm, longest=longest)

    def weights(self, samples: Samples) -> ImportanceWeights:
        """What multiplies the scores of the first update on these outputs."""
        return ImportanceWeights(self.ratio, self.clip_max, samples.rollouts.sampler_logps_SC)

    def learn(self, samples: Samples, number: int = 0) -> StepResult:
        """Make `num_iterations` updates on one batch of completions; the policy before the first is the old one.

        No update is made, and nothing changes, where fewer than two prompts have as many valid outputs as the baseline
        needs, or where no reward differs from another. An update whose gradient is not finite is left out with those
        that would follow it, and changes nothing either. The scheduler of the rate advances all the same, so that it
        comes to its end with the run. Step 0 takes no look.

        Raises:
            DivergedError: the updated weights, or log-probabilities, are NaN or infinite.
        """
        batch = self.batch(samples)
        without_signal = batch.prompts >= 2 and not estimators.differ(batch.rewards_PG, batch.valid_PG)
        if batch.prompts < 2 or without_signal:
            for _ in range(self.num_iterations):
                self._end_update()
            return StepResult(samples, without_signal=without_signal)
        past, features, weights = self.baseline, samples.features, self.weights(samples)
        begun, updates, result = past.begin(), list[Update](), StepResult(samples)
        further, clipped = dict[str, float](), list[dict[str, float]]()
        try:
            # Look: the exact scores of some prompts' outputs, in steps that take one.
            with self.clock.part("looks"):
                look = self.looks.take(batch, number)
                give_back(self.size)
            # Weights of rewards: exact squared norms where they were taken, else a proxy that earlier looks have
            # taught. A weight may depend on its own output and on the past, so that the gradient is unbiased.
            proxy_PG = past.by_proxy(features).view_as(batch.rewards_PG)
            looked = None if look is None else look.grams
            weight_PG = past.weights(proxy_PG, looked, batch.prompts)
            # Baseline: b = sum w F / sum w over the other outputs, weighted by w (theorem 7), or the named one.
            scaled = (look is not None and len(look.prompts_P) == batch.prompts) or past.scaled
            baseline_PG = begun.of(batch.rewards_PG, batch.valid_PG, batch.own_PGT, weight_PG, remember=scaled)
            for fresh in [True] + [False] * (self.num_iterations - 1):
                gradient = self.gradient(batch, baseline_PG, weights)
                if not fresh:
                    clipped.append(clip_metrics(gradient, self.ratio))
                else:
                    further |= sampler_metrics(gradient.weighed, self.clip_max)
                if fresh and look is not None and looked is not None:
                    with self.clock.part("looks"):
                        further |= self.looks.metrics(look, batch, past.prior, weights)
                    rewards_PG, scale_PG = batch.rewards_PG, batch.weight_PG / batch.divisor_PG
                    further |= begun.learn(looked, features, rewards_PG, batch.valid_PG, weight_PG, scale_PG)
                # Signal and noise; then rate and update.
                moments = self.moments(gradient, look if fresh else None, weights)
                updates.append(self.update(gradient, moments, fresh))
                weights = replace(weights, old_token_logps_SC=updates[0].gradient.token_logps_SC)
        except DivergedError as error:
            if error.what in {"log-probability", "weight"}:  # the policy itself is broken, not this batch's gradient
                raise
            self.optimizer.zero_grad(set_to_none=True)
            result = replace(result, skipped=error.what)
        except InputError:
            raise
        except (ValueError, UnsupportedModelError) as error:
            raise InputError(f"the gradient cannot be used: {error}") from None
        if updates:
            past.end_step(begun)
            tokens_S, trained_S = batch.sequences.mask_ST.sum(1), updates[0].gradient.trained_S
            self.looks.save_up(int(tokens_S.sum()), int(tokens_S[trained_S].sum()), look is not None)
            for name in clipped[-1] if clipped else ():
                further[name] = sum(shares.get(name, 0.0) for shares in clipped) / len(updates)
            norm2_PG = None if look is None else look.norm2_of(batch)
            result = replace(result, updates=updates, baseline_PG=baseline_PG, norm2_PG=norm2_PG, further=further)
        for _ in range(self.num_iterations - len(updates)):
            self._end_update()
        return result

    def gradient(self, batch: Batch, baseline_PG: Tensor, weights: ImportanceWeights) -> Gradient:
        """Take g = (1/P) sum_i g_i with g_i = (1/G) sum_j rho_ij A_ij grad log pi(o_ij|q_i); `.grad` is that of -J.

        Args:
            batch: the outputs and their rewards.
            baseline_PG: the baseline b.
            weights: gives rho, by which scores of outputs are weighed that the policy has not sampled as it is.

        Raises:
            DivergedError: a log-probability or the gradient is NaN or infinite.
        """
        policy, temperature, sequences = self.policy, self.rollout.temperature, batch.sequences
        # Advantages: A = F - b. An output of advantage 0, up to what float32 leaves of it, adds nothing, and neither
        # does one without a token of its own, whose score is 0.
        advantages_PG = estimators.advantages(batch.rewards_PG, baseline_PG, batch.valid_PG)
        nothing_PG = advantages_PG.abs() <= ROUNDING * batch.rewards_PG.abs().max()
        nothing_PG |= (sequences.lengths_S == 0).view_as(nothing_PG)
        advantages_PG = torch.where(nothing_PG, 0, advantages_PG)
        scale_PG = batch.weight_PG / batch.divisor_PG / (batch.count_P.clamp(min=1)[:, None] * batch.prompts)
        advantages_S, coef_S = advantages_PG.flatten(), (-scale_PG * advantages_PG).flatten()
        # Gradient: a plain forward and backward of sum coef rho log pi, in micro-batches of rows of like length. The
        # prompts' two halves go one after the other: the sum of the first is kept, and tells signal from noise.
        self.optimizer.zero_grad(set_to_none=True)
        part_P, lengths_S = batch.count_P > 0, sequences.mask_ST.sum(1)
        first_P = (part_P.cumsum(0) % 2 == 1) & part_P
        blocks, outputs, taken = list[Tensor](), list[Tensor](), list[Weighed]()
        held, inner2 = list[tuple[Any, Tensor]](), 0.0
        for half_P in (first_P, part_P & ~first_P):
            rows_S = ((coef_S != 0) & half_P.repeat_interleave(len(coef_S) // len(half_P))).nonzero().flatten()
            for most in self.micro_batches.of(sequences.at(rows_S), 1) if len(rows_S) else ():
                for part in of_like_length(lengths_S[rows_S[most]], policy.tokens_of_a_forward):
                    block = rows_S[most[part]]
                    logps = policy.logps(sequences.at(block), temperature)
                    check_finite("log-probability", logps.logps_S.detach())
                    token_logps_SC, scored_S = logps.token_logps_SC.detach(), logps.logps_S
                    weighed = weights(block, token_logps_SC, logps.own_SC, advantages_S[block])
                    if weighed.token_weight_SC is not None:
                        scored_S = (logps.token_logps_SC * weighed.token_weight_SC * logps.own_SC).sum(1)
                    (coef_S[block] * weighed.rho_S * scored_S).sum().backward()
                    blocks, outputs, taken = [*blocks, block], [*outputs, token_logps_SC], [*taken, weighed]
            if half_P is first_P:
                held = [(p, p.grad.to(torch.bfloat16, copy=True)) for p in policy.parameters if p.grad is not None]
            inner2 = inner((p.grad, sum_of_first) for p, sum_of_first in held) - inner2
        del held
        norm2 = estimators.squared_norm(policy.parameters)
        # In float32, because optimizers square the gradient there, and keep the squares.
        check_finite("gradient", torch.tensor(norm2, dtype=torch.float32, device="cpu"))
        token_logps_SC = sequences.by_token(blocks, outputs)
        halves = int(first_P.sum()), int((part_P & ~first_P).sum())
        weighed = Weighed.of(blocks, taken, batch)
        return Gradient(batch, norm2, inner2, halves, advantages_PG, token_logps_SC, weighed)

    def moments(self, gradient: Gradient, look: LookAtBatch | None, weights: ImportanceWeights) -> estimators.Moments:
        """Signal and noise from the gradient's two halves; from all prompts' own norms, where all were looked at.

        g_i = (1/G_i) sum_j a_ij s_ij, so that ||g_i||^2 = a_i' K_i a_i / G_i^2 with the inner products K_i of a look.
        """
        batch, rho_PG = gradient.batch, gradient.weighed.rho_S.view_as(gradient.advantages_PG)
        found, own2 = estimators.moments_of_halves(gradient.inner2, gradient.norm2, gradient.halves), math.nan
        if look is not None:
            L, gram_PGG = look.prompts_P, look.look.gram_PGG
            a_LG = rho_PG[L] * gradient.advantages_PG[L] * batch.weight_PG[L] / batch.divisor_PG[L]
            norm2_L = estimators.group_norm2(gram_PGG, a_LG) / batch.count_P[L].square()
            if len(L) == batch.prompts:
                found = estimators.moments(norm2_L, gradient.norm2)
            if self.rows is not None:  # rho is in the scores here
                rho_LG = look.rho_PG(weights)  # of outputs that were not trained on, too
                gram_PGG = gram_PGG * rho_LG[:, :, None] * rho_LG[:, None]
                own2 = estimators.own_norm2(gram_PGG, batch.rewards_PG[L], batch.valid_PG[L])
                self.looks.observe_own(own2, float(norm2_L.mean()))
        whole = look is not None and len(look.prompts_P) == batch.prompts
        return self.looks.of_rows(found, own2 if whole else math.nan, self.rows)

    def update(self, gradient: Gradient, moments: estimators.Moments, fresh: bool = True) -> Update:
        """Set the schedule's rate and step; under `debiased` it is eta_0 N SNR / (1 + N SNR) (theorem 4).

        No signal, no step: where the gradient is exactly 0, weights, optimizer and schedule stay as they are. `fresh`
        says whether no update was made on these outputs before: then their gradient is independent of all updates.
        """
        schedule, parameters, batch, kl = self.schedule, self.policy.parameters, gradient.batch, None
        give_back(self.size)  # the forwards' room, before room is taken for the optimizer and a copy of the weights
        if gradient.norm2 == 0:
            self.optimizer.zero_grad(set_to_none=True)
            self._end_update()
            return Update(gradient, moments, 0.0, 0.0, moments, (math.nan, math.nan), None)
        headroom = estimators.headroom(batch.rewards_PG, batch.valid_PG)
        factor = schedule.step(moments, gradient.ess_ratio, batch.mean_length, fresh, headroom)
        rate = schedule.learning_rates[0]
        change = self.movement.watch(gradient) if schedule.measures_updates else None
        self.optimizer.step()  # hooks of the schedule: gradients in units of their scale before, eta_0 back after
        self.optimizer.zero_grad(set_to_none=True)  # its room is needed by what measures the update
        try:
            if change is not None:  # how far the policy moved; an update that went too far is shortened
                kl, left = schedule.limit_step(change)
                factor, rate = factor * left, rate * left
        finally:  # a schedule cannot measure an update that broke the policy
            check_finite("weight", torch.stack([parameter.detach().sum() for parameter in parameters]))
        give_back(self.size)  # the gradient's room, which would lie between what the next forward keeps
        self._end_update()
        smoothed, interval = schedule.smoothed, schedule.snr_interval()
        return Update(gradient, moments, factor, rate, smoothed, interval, kl, schedule.target_kl)

    def _end_update(self) -> None:
        """Advance the scheduler of the rate, which counts updates, those that were left out too."""
        if self.scheduler is not None:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch wants an optimizer step first, and there may be none yet
                self.scheduler.step()

    @property
    def _parts(self) -> dict[str, Any]:
        parts = {"optimizer": self.optimizer, "schedule": self.schedule, "baseline": self.baseline}
        parts |= {"looks": self.looks, "scheduler": self.scheduler, "reference": self.reference}
        return {name: part for name, part in parts.items() if part is not None}

    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy that the next step depends on."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: dict[str, Any], run: str) -> None:
        """Take up where `state_dict` left off."""
        try:
            for name, part in self._parts.items():
                part.load_state_dict(state[name])
            if (course := self.scheduler) is not None:  # perhaps over more updates than the one that was saved
                [group], [rate], [at] = self.optimizer.param_groups, course.base_lrs, course.lr_lambdas
                set_rate(group, rate * at(course.last_epoch))
            if back := getattr(self.optimizer, "train", None):
                back()  # schedule-free ones have a mode for training
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"the state of {run} does not fit these settings or this version ({error}); start a new run from its "
                "checkpoint with --model."
            ) from None
        self.sampler.sync(self.policy)  # a schedule-free optimizer has just changed its weights


class Movement:
    """Scores a subsample of a batch once more after the update, every output a group of its own."""

    def __init__(self, policy: Policy, temperature: float, micro_batches: MicroBatches) -> None:
        self.policy, self.temperature, self.micro_batches, self.every = policy, temperature, micro_batches, ONE_IN

    def watch(self, gradient: Gradient) -> Callable[[], Tensor]:
        """Return a function that gives, after the update, the change of the tokens' log pi, (some S, C).

        Where the policy rounds it gives log pi itself.
        """
        rows = gradient.batch.valid_PG.flatten().nonzero().flatten()[:: self.every]
        return self.of(gradient.batch.sequences.at(rows), gradient.token_logps_SC[rows])

    def of(self, chosen: Sequences, token_logps_SC: Tensor) -> Callable[[], Tensor]:
        """The same of these rows, with their log pi before, NaN where nothing has taken it."""
        if self.policy.low_precision:  # then the schedule compares forwards of these rows alone (`SNRSchedule`)
            return lambda: self._token_logps_SC(chosen)
        before_SC = token_logps_SC[:, : chosen.own_SC.shape[1]]
        known_S = before_SC.isfinite().all(1)
        known, unknown = known_S.nonzero().flatten(), (~known_S).nonzero().flatten()
        if len(unknown):  # they did not go through the model
            blocks = before_SC[known], self._token_logps_SC(chosen.at(unknown))
            before_SC = chosen.by_token((known, unknown), blocks)
        return lambda: self._token_logps_SC(chosen) - before_SC

    @torch.no_grad()
    def _token_logps_SC(self, chosen: Sequences) -> Tensor:
        blocks = self.micro_batches.of(chosen, 1)
        outputs = [self.policy.logps(chosen.at(rows_S), self.temperature).token_logps_SC for rows_S in blocks]
        return chosen.by_token(blocks, outputs)
