"""The gradient of a micro-batch from scores on a tape, and the look at a few prompts' own mean gradients.

One forward and one backward for activations leave the scores of all outputs on the tape. It gives the norms that weigh
rewards, and then the sum of advantages times scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.errors import check_finite
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.policy.sequences import MicroBatches, of_like_length, rows_of
from oblrpo.scores import GroupTape, ScoreTape
from oblrpo.step import StepBaseline

LOOKED_AT = 16
"""One prompt in so many is looked at, by one forward and backward more."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of a micro-batch and their rewards: whole groups, or a part of one."""

    sequences: Sequences
    rewards_PG: Tensor
    """The rewards F; 0 where an output does not count."""
    valid_PG: Tensor
    """Which outputs count."""
    fixed_PG: Tensor | None = None
    """The baseline, where an earlier pass has fixed it."""


@dataclass(frozen=True)
class Part:
    """The results of one micro-batch; its share of the gradient is in `.grad`."""

    outputs: Outputs
    norm2_S: Tensor | None
    """Squared score norms, where they were taken."""
    baseline_PG: Tensor
    group_norm2_P: Tensor
    """Squared norm of each group's share of the gradient."""
    logps: Logps
    """The results of the forward, without a graph."""

    @property
    def advantages_PG(self) -> Tensor:
        """The advantages F - b that the gradient was taken with; 0 where an output does not count."""
        return estimators.advantages(self.outputs.rewards_PG, self.baseline_PG, self.outputs.valid_PG)


class TapedPass:
    """One pass of a baseline over the micro-batches of an update, with the weights that each of them gives.

    Args:
        past: what earlier steps say; a pass only reads it.
        step: the number of the step, by which exact norms are taken beside proxies; None: they are not.
        every: steps between two that take both; 0: never.
    """

    def __init__(self, past: StepBaseline, step: int | None = None, every: int = 0) -> None:
        self.past, self.baseline = past, past.begin()
        self.compares = step is not None and every > 0 and step % every == 0

    def takes_norms(self, fixed_PG: Tensor | None = None) -> bool:
        """Whether score norms are taken: to compare proxies with, or to weigh rewards by where no baseline is fixed."""
        return self.compares or (self.past.exact and fixed_PG is None)

    def weights(self, logps: Logps, norm2_S: Tensor | None) -> Tensor:
        """The weights of rewards, (S,): exact squared norms, or the proxy of the settings."""
        if not self.past.exact:
            return self.past.by_proxy(logps.features)
        assert norm2_S is not None
        return norm2_S

    def of(self, outputs: Outputs, logps: Logps, tape: ScoreTape | GroupTape) -> tuple[Tensor, Tensor | None]:
        """The baseline b of every output, (P, G), and the score norms, (S,), where they were taken."""
        norm2_S = None
        if self.takes_norms(outputs.fixed_PG):
            assert isinstance(tape, ScoreTape)
            norm2_S = tape.norm2()
            check_finite("score norm", norm2_S)
        if outputs.fixed_PG is not None:
            return outputs.fixed_PG, norm2_S
        rewards_PG = outputs.rewards_PG
        own_PGT = outputs.sequences.own_SC.view(*rewards_PG.shape, -1)
        weight_PG = self.weights(logps, norm2_S).view_as(rewards_PG)
        return self.baseline.of(rewards_PG, outputs.valid_PG, own_PGT, weight_PG), norm2_S


def add_to_gradient(
    outputs: Outputs,
    count: int,
    policy: Policy,
    temperature: float,
    tape: ScoreTape | GroupTape,
    baseline: TapedPass,
) -> Part:
    """Add the share of one micro-batch to `.grad`, that of -(1/count) sum A log pi(o|q): one forward and backward."""
    G = outputs.rewards_PG.shape[1]
    logps = score(outputs.sequences, G, policy, temperature, tape)
    baseline_PG, norm2_S = baseline.of(outputs, logps, tape)
    advantages_PG = estimators.advantages(outputs.rewards_PG, baseline_PG, outputs.valid_PG)
    group_norm2_P = tape.accumulate(advantages_PG.flatten() / -count, G)
    check_finite("gradient of a prompt", group_norm2_P)
    tape.forget()  # the scores' room, before the next micro-batch
    return Part(outputs, norm2_S, baseline_PG, group_norm2_P, logps.detached())


def score(
    sequences: Sequences, group_size: int, policy: Policy, temperature: float, tape: ScoreTape | GroupTape
) -> Logps:
    """Record grad log pi(o|q) of every output, and return what the forward says.

    Outputs of like length share a forward, whichever prompt they answer, so that little is padded. A prompt's outputs
    are on one tape all the same.
    """
    if isinstance(tape, ScoreTape) and tape.takes_slices:
        slices = of_like_length(sequences.mask_ST.sum(1), policy.tokens_of_a_forward)
        if len(slices) > 1:
            # Groups of which a slice has as many outputs are neighbours in it, and multiplied out together.
            slices = [rows_S[by_count(rows_S // group_size)] for rows_S in slices]
            return _in_slices(sequences, slices, policy, temperature, tape)
    with tape:
        logps = policy.logps(sequences, temperature)
        check_finite("log-probability", logps.logps_S.detach())
        tape.record(logps.logps_S)
    return logps


def _in_slices(
    sequences: Sequences, slices: list[Tensor], policy: Policy, temperature: float, tape: ScoreTape
) -> Logps:
    found = []
    with tape:
        for rows_S in slices:
            logps = policy.logps(sequences.at(rows_S), temperature)
            check_finite("log-probability", logps.logps_S.detach())
            tape.record(logps.logps_S, rows_S=rows_S)
            found.append(logps.detached())
    token_logps_SC, entropy_SC, logit_norm2_SC = (
        sequences.by_token(slices, [getattr(each, name) for each in found])
        for name in ("token_logps_SC", "entropy_SC", "logit_norm2_SC")
    )
    return Logps(token_logps_SC.sum(1), token_logps_SC, entropy_SC, logit_norm2_SC, sequences.own_SC)


def by_count(owner_N: Tensor) -> Tensor:
    """The order of these rows by how many of them have the same owner."""
    place_N, count_P = owner_N.unique(return_inverse=True, return_counts=True)[1:]
    order_N: Tensor = count_P[place_N].argsort(stable=True)
    return order_N


def drawn(rewards_PG: Tensor, valid_PG: Tensor, seed: int) -> Tensor:
    """The weights of prompts in an estimate of mean_q ||mu_q||^2, (P,): 0 where no look is taken.

    Of n prompts with two outputs that count, k are drawn with replacement, with chances p in proportion to the variance
    of their rewards; one that is drawn m times weighs m / (k n p). Prompts whose rewards agree have the estimate 0.
    The weights are NaN where n is 0.
    """
    count_P, rewards_PG = valid_PG.sum(1).cpu(), torch.where(valid_PG, rewards_PG.double(), 0).cpu()
    mean_P1 = rewards_PG.sum(1, keepdim=True) / count_P.clamp(min=1)[:, None]
    p_P = torch.where(valid_PG.cpu(), rewards_PG - mean_P1, 0).square().sum(1)  # 0 of a single output
    weight_P = torch.zeros_like(p_P)
    if p_P.any():
        k, generator = math.ceil(len(p_P) / LOOKED_AT), torch.Generator("cpu").manual_seed(seed)
        times_P = torch.multinomial(p_P, k, True, generator=generator).bincount(minlength=len(p_P))
        weight_P = torch.where(times_P > 0, times_P / (k * p_P / p_P.sum()), 0)
    return (weight_P / (count_P > 1).sum()).to(valid_PG.device)


def own_norm2(
    outputs: Outputs, weight_P: Tensor, policy: Policy, temperature: float, micro_batches: MicroBatches
) -> float:
    """The sum over prompts of weight_P times `estimators.own_norm2`. No `.grad` changes."""
    G, chosen_P, total = outputs.rewards_PG.shape[1], (weight_P > 0).nonzero().flatten(), 0 * float(weight_P.sum())
    tape = ScoreTape(policy.model, "streamed")  # which holds nothing
    for block in micro_batches.of(outputs.sequences.at(rows_of(chosen_P, G)), G) if len(chosen_P) else ():
        p = chosen_P[block]
        with tape:
            logps_S = policy.logps(outputs.sequences.at(rows_of(p, G)), temperature).logps_S
            check_finite("log-probability", logps_S.detach())
            tape.record(logps_S, gram=G)
        check_finite("score norm", tape.norm2())
        weighted_PGG = tape.gram() * weight_P[p, None, None]
        total += len(p) * estimators.own_norm2(weighted_PGG, outputs.rewards_PG[p], outputs.valid_PG[p])
    return total
