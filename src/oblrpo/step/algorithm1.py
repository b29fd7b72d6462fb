"""Algorithm 1 of OBLR-PO: sample, score, baseline, advantages, gradient, signal-to-noise ratio, learning rate, update.

P prompts q have G outputs o each, with rewards F. The gradient is streamed over micro-batches of whole groups. Which
baseline and which rate are taken is decided by the parts `baseline` and `schedule`; no algorithm is named here.
`step` is all of it. A run's `trainer.learner.Learner` calls the same parts, and adds what the paper does not
have: several updates a batch, a KL penalty, outputs left out, the ledger.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from oblrpo import estimators
from oblrpo.errors import check_finite
from oblrpo.estimators import ONE_IN
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.policy.micro_batches import MicroBatches, of_like_length
from oblrpo.rollout import Sampler
from oblrpo.scores import GroupTape, ScoreTape
from oblrpo.settings import RolloutConfig
from oblrpo.step.baseline import BaselinePass, StepBaseline
from oblrpo.step.flow import Batch, Gradient, Part, Samples, Update, Weigh, Weighed, on_policy
from oblrpo.tables.algorithms import Algorithm
from oblrpo.tasks import Problem

NO_SIGNAL = dict.fromkeys(("lr_factor", "snr", "n_snr", "signal2", "trace_cov"), 0.0)
"""The metrics of a step that has no signal, and so makes no update."""


@dataclass
class Algorithm1:
    """Turns prompts and rewards into updates of the policy."""

    policy: Policy
    sampler: Sampler
    rewards: Callable[..., tuple[list[list[float]], list[list[bool]]]]  # F, and which are valid; `rewards.Rewards`
    rollout: RolloutConfig  # settings: how many outputs a prompt, how long, at which temperature
    micro_batches: MicroBatches
    algorithm: Algorithm  # what F - b is divided and weighted by
    tape: ScoreTape
    baseline: StepBaseline
    schedule: estimators.SNRSchedule
    movement: Movement  # for schedules that measure how far an update moves the policy
    optimizer: Optimizer

    def step(self, problems: list[Problem], number: int) -> Update:
        """One step of the paper; a run's `Learner.step` makes the same where nothing is added (tested).

        Args:
            problems: the prompts, and what verifies their outputs.
            number: the number of the step, from 1, by which norms and proxies are compared.
        """
        batch = self.batch(self.sample(problems))
        baseline = self.baseline.begin(number, batch)
        gradient = self.gradient(batch, baseline)
        baseline.compare(gradient)  # of which a calibrated proxy learns
        update = self.update(gradient)
        self.baseline.end_step(baseline)
        self.sampler.sync(self.policy)
        return update

    def sample(self, problems: list[Problem]) -> Samples:
        """Sample G outputs o of each of the P prompts q, and reward them."""
        rollouts = self.sampler.sample(
            [problem.prompt for problem in problems],
            self.rollout.num_generations,
            self.rollout.max_completion_length,
            self.rollout.temperature,
        )
        rewarded = self.rewards(problems, rollouts.completions, rollouts.ids)
        rewards_PG, valid_PG = (torch.tensor(values, device=self.policy.device) for values in rewarded)
        return Samples(rollouts, rewards_PG, valid_PG)

    def batch(self, samples: Samples) -> Batch:
        """The outputs with their rewards, and the factors with which they enter the mean."""
        sequences, longest = samples.rollouts.sequences, self.rollout.max_completion_length
        return Batch.of(sequences, samples.rewards_PG, samples.valid_PG, self.algorithm, longest=longest)

    def gradient(self, batch: Batch, baseline: BaselinePass, weigh: Weigh = on_policy) -> Gradient:
        """Take g = (1/P) sum_i g_i with g_i = (1/G) sum_j A_ij grad log pi(o_ij|q_i); `.grad` is that of -J.

        Args:
            batch: the outputs and their rewards.
            baseline: this pass's baseline, begun on the batch.
            weigh: what scores are multiplied by, of outputs that the policy has not sampled as it is.

        Raises:
            DivergedError: a log-probability, a score norm or a gradient is NaN or infinite.
            ValueError: fewer than two prompts take part.
        """
        self.optimizer.zero_grad(set_to_none=True)
        parts = [
            add_to_gradient(part, self.policy, self.rollout.temperature, self.tape, baseline, weigh)
            for part in batch.parts(self.micro_batches)
        ]
        # Signal and noise, from the prompts' gradients and their mean: SNR = ||grad J||^2 / tr H. A prompt that takes
        # part and is in no micro-batch has the gradient 0.
        group_norm2_P = torch.zeros_like(batch.part_P, dtype=parts[0].group_norm2_P.dtype)
        group_norm2_P[torch.cat([part.batch.index_P for part in parts])] = torch.cat(
            [part.group_norm2_P for part in parts]
        )
        group_norm2_P = group_norm2_P[batch.part_P]
        norm2 = estimators.squared_norm(self.policy.parameters)
        # In float32, because optimizers square the gradient there, and keep the squares.
        check_finite("gradient", torch.tensor(norm2, dtype=torch.float32, device="cpu"))
        moments = estimators.moments(group_norm2_P, norm2)
        return Gradient.of(batch, parts, moments, norm2, group_norm2_P, baseline.known_PG)

    def update(self, gradient: Gradient) -> Update:
        """Set the rate eta_0 N SNR / (1 + N SNR) (theorem 4, the schedule `debiased`), or the schedule's own, and step.

        No signal, no step: where the gradient is exactly 0, weights, optimizer and schedule stay as they are.
        """
        schedule, change, kl = self.schedule, None, None
        if gradient.norm2 == 0:
            self.optimizer.zero_grad(set_to_none=True)
            return Update(gradient, 0.0, 0.0, gradient.moments, (math.nan, math.nan), None)
        batch = gradient.batch
        headroom = estimators.headroom(batch.rewards_PG, batch.valid_PG)
        factor = schedule.step(gradient.moments, gradient.ess_ratio, batch.mean_length, batch.fresh, headroom)
        rate = schedule.learning_rates[0]
        if schedule.measures_updates:
            change = self.movement.watch(gradient)
        self.optimizer.step()  # the schedule's hook then puts eta_0 back
        self.optimizer.zero_grad(set_to_none=True)  # its room is needed by what measures the update
        if change is not None:  # how far the policy moved; an update that went too far is shortened
            kl, left = schedule.confine(change)
            factor, rate = factor * left, rate * left
        return Update(gradient, factor, rate, schedule.smoothed, schedule.snr_interval(), kl, schedule.target_kl)


def add_to_gradient(
    part: Batch,
    policy: Policy,
    temperature: float,
    tape: ScoreTape | GroupTape,
    baseline: BaselinePass,
    weigh: Weigh = on_policy,
) -> Part:
    """Add the share of one micro-batch to `.grad`: one forward, and one backward for activations."""
    # Score: record the score factors of each output's log pi(o|q), of which s is the gradient, on the tape.
    logps, weighed = score(part, policy, temperature, tape, weigh)
    # Baseline: b = sum w F / sum w over the other outputs, weighted by w = ||s||^2 (theorem 7), or the named one.
    baseline_PG, norm2_S = baseline(part, logps, weighed.rho_PG, tape)
    # Advantages A = F - b, and the gradient: the sum of A s, each with its factor in the mean.
    advantages_PG = estimators.advantages(part.rewards_PG, baseline_PG, part.valid_PG)
    coef_PG = part.factor_PG(weighed.rho_PG) * advantages_PG
    # Each factor holds 1 / P', which the norm of a prompt's own gradient does not.
    group_norm2_P = tape.accumulate(coef_PG.flatten(), part.groups) * part.prompts_in_mean**2
    check_finite("gradient of a prompt", group_norm2_P)
    tape.forget()  # the scores' room, before the next micro-batch
    return Part(part, weighed, norm2_S, baseline_PG, group_norm2_P, logps.detached())


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
        if not before_SC.isfinite().all():  # some did not go through the model
            before_SC = self._token_logps_SC(chosen)
        return lambda: self._token_logps_SC(chosen) - before_SC

    @torch.no_grad()
    def _token_logps_SC(self, chosen: Sequences) -> Tensor:
        blocks = self.micro_batches.of(chosen, 1)
        outputs = [self.policy.logps(chosen.at(rows_S), self.temperature).token_logps_SC for rows_S in blocks]
        return chosen.by_token(blocks, outputs)


def score(
    part: Batch, policy: Policy, temperature: float, tape: ScoreTape | GroupTape, weigh: Weigh
) -> tuple[Logps, Weighed]:
    """Record grad log pi(o|q) of every output; return their log-probabilities, and what their scores are multiplied by.

    Outputs of like length share a forward, whichever prompt they answer, so that little is padded. A prompt's outputs
    are on one tape all the same.
    """
    if isinstance(tape, ScoreTape) and tape.takes_slices:
        slices = of_like_length(part.sequences.mask_ST.sum(1), policy.tokens_of_a_forward)
        if len(slices) > 1:
            # Groups of which a slice has as many outputs are neighbours in it, and multiplied out together.
            slices = [rows_S[by_count(part.owner_S[rows_S])] for rows_S in slices]
            logps = _in_slices(part, slices, policy, temperature, tape, weigh)
            return logps, weigh(part, logps.token_logps_SC.detach())
    with tape:
        logps = policy.logps(part.sequences, temperature)
        check_finite("log-probability", logps.logps_S.detach())
        weighed = weigh(part, logps.token_logps_SC.detach())
        tape.record(_scored(part, logps, weighed))
    return logps, weighed


def _scored(part: Batch, logps: Logps, weighed: Weighed) -> Tensor:
    """What the score of each output is the gradient of, (S,): log pi(o|q), or sum_t m_t log pi(o_t) of weights m_t."""
    if weighed.token_weight_SC is None:
        return logps.logps_S
    return (logps.token_logps_SC * weighed.token_weight_SC * part.sequences.own_SC).sum(1)


def _in_slices(
    part: Batch, slices: list[Tensor], policy: Policy, temperature: float, tape: ScoreTape, weigh: Weigh
) -> Logps:
    """Record slices of the outputs; what their forwards say of all, 0 where a token is not the policy's own."""
    outputs = []
    with tape:
        for rows_S in slices:
            some = part.at(rows_S)
            logps = policy.logps(some.sequences, temperature)
            check_finite("log-probability", logps.logps_S.detach())
            tape.record(_scored(some, logps, weigh(some, logps.token_logps_SC.detach())), rows_S=rows_S)
            outputs.append(logps.detached())
    token_logps_SC, entropy_SC, logit_norm2_SC = (
        part.sequences.by_token(slices, [getattr(each, name) for each in outputs])
        for name in ("token_logps_SC", "entropy_SC", "logit_norm2_SC")
    )
    return Logps(token_logps_SC.sum(1), token_logps_SC, entropy_SC, logit_norm2_SC, part.sequences.own_SC)


def by_count(owner_N: Tensor) -> Tensor:
    """The order of these rows by how many of them have the same owner."""
    place_N, count_P = owner_N.unique(return_inverse=True, return_counts=True)[1:]
    order_N: Tensor = count_P[place_N].argsort(stable=True)
    return order_N
