"""Baselines: what is subtracted from each output's reward.

A baseline that does not depend on the output it is subtracted from leaves the gradient unbiased (assumption 1) and
changes its variance only. In-sample baselines do depend on it: they are biased, in direction as well as scale, by about
-E[w (F - b*) s] / (G E w).

P prompts, G outputs a prompt, T tokens. Every function takes rewards_PG and valid_PG (1 for outputs that count, 0 for
masked ones and for the padding of smaller groups) and returns (P, G); `otb` returns (P, G, T). Whether each is biased,
what it needs and where it is from is in `oblrpo.tables.baselines`.
"""

import inspect
import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from oblrpo.estimators.advantages import advantages
from oblrpo.tables.baselines import BASELINES, Baseline

STRENGTHS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 1e6)
"""The strengths that an automatic choice is made from, in outputs of average weight."""
SAMPLING, TRAINING = 1.0, 3.0  # what sampling a token and training on it cost, in forwards of a token
TIES = ((True, True), (True, False), (False, True), (False, False))
"""The forms of a shrunk baseline: whether the reward that all siblings of an output earned is its b, where it is low
(at most what other prompts' outputs earn, `of_others`), and where it is high."""


class Prior:
    """Mean weight w_bar and weighted baseline b_bar of prompts other than the one in question, for `oblr_shrunk`.

    They are w_bar = mean w and b_bar = sum w F / sum w over the outputs of the other prompts of this batch and of
    earlier steps, which count `memory` times less a step. Nothing of a prompt's own outputs enters, so that the
    gradient stays unbiased.

    The strength c is the number of outputs of average weight that the prior counts for. `strength=None` takes the c in
    `STRENGTHS` with the least sum_j w_j (F_j - b_j(c))^2 over the prompts of *earlier* steps, discounted alike. That
    is the estimated variance as far as it depends on c, but for covariances between outputs of a group. Until there are
    earlier steps, c is `FIRST`.

    Use: `baseline("oblr_shrunk", rewards_PG, norm2_PG=w, prior=prior)` for each micro-batch, `prior.observe(...)` after
    it, and `prior.next_step()` once the whole batch is done with.

    Args:
        strength: the strength c, at least 0; None chooses it.
        past_only: whether other prompts of this batch are left out, and only earlier steps count.
        memory: the share of a step's weight that is left one step later, in [0, 1); 0 relies on this batch alone and
            cannot choose a strength.
        lazy: the form of `TIES`; None chooses it.

    Raises:
        ValueError: a setting out of range.
    """

    FIRST = 8.0

    def __init__(
        self,
        strength: float | None = None,
        memory: float = 0.8,
        past_only: bool = False,
        lazy: tuple[bool, bool] | None = None,
    ) -> None:
        if strength is not None and not 0 <= strength < float("inf"):
            raise ValueError(f"the prior's strength must be a number of outputs, at least 0, got {strength}.")
        if not 0 <= memory < 1:
            raise ValueError(f"the prior's memory must lie in [0, 1), got {memory}.")
        self.strength, self.memory, self.past_only, self.lazy = strength, memory, past_only, lazy
        self._sums = torch.zeros(3, dtype=torch.float64, device="cpu")  # of 1, w, w F over outputs, discounted
        self._new_sums = torch.zeros_like(self._sums)  # of this step's, while they do not count
        self._risk_C = torch.zeros(len(STRENGTHS), dtype=torch.float64, device="cpu")  # of earlier steps
        self._new_risk_C = torch.zeros_like(self._risk_C)  # of this step's
        # Of the forms: mean squared norms over their sum, and shares trained; discounted by look.
        self._ties_2K = torch.zeros(2, len(TIES), dtype=torch.float64, device="cpu")

    @property
    def current_strength(self) -> float:
        """The number c of outputs that the prior counts for: fixed, or of least discounted risk on earlier steps."""
        if self.strength is not None:
            return self.strength
        return STRENGTHS[int(self._risk_C.argmin())] if bool(self._risk_C.any()) else self.FIRST

    def of_others(self, rewards_PG: Tensor, valid_PG: Tensor, norm2_PG: Tensor) -> tuple[Tensor, Tensor]:
        """The prior's w_bar and b_bar for every prompt, both (P, 1); 0 where there is no other output."""
        norm2_PG = norm2_PG * valid_PG
        own_P3 = torch.stack([valid_PG, norm2_PG, norm2_PG * rewards_PG], -1).sum(1)
        others_P3 = torch.zeros_like(own_P3) if self.past_only else sum_of_others(own_P3.T).T
        count_P, weight_P, weighted_P = (others_P3 + self._sums.to(own_P3)).unbind(-1)
        mean_weight_P = torch.where(count_P > 0, weight_P / count_P, 0)
        return mean_weight_P[:, None], torch.where(weight_P > 0, weighted_P / weight_P, 0)[:, None]

    def observe(self, rewards_PG: Tensor, norm2_PG: Tensor, valid_PG: Tensor | None = None) -> None:
        """Take in a micro-batch whose baselines have been computed; off-policy its norm2_PG is rho^2 w."""
        valid_PG = torch.ones_like(rewards_PG, dtype=torch.float64) if valid_PG is None else valid_PG.double()
        rewards_PG = torch.where(valid_PG > 0, rewards_PG.detach().double(), 0)
        norm2_PG = torch.where(valid_PG > 0, norm2_PG.detach().double(), 0)
        for index, strength in enumerate(STRENGTHS):
            baseline_PG = shrunk(
                rewards_PG, valid_PG, norm2_PG, *self.of_others(rewards_PG, valid_PG, norm2_PG), strength
            )
            risk = (valid_PG * norm2_PG * advantages(rewards_PG, baseline_PG).square()).sum()
            self._new_risk_C[index] += risk.cpu()
        weight_PG = norm2_PG * valid_PG
        new = self._new_sums if self.past_only else self._sums
        new += torch.stack([valid_PG.sum(), weight_PG.sum(), (weight_PG * rewards_PG).sum()]).cpu()

    @property
    def current_lazy(self) -> tuple[bool, bool]:
        """The form of `TIES` that `oblr_thrifty` takes: fixed, or the one that is cheapest by earlier looks.

        Steps to a given noise go as m = E||g_i||^2, and a step costs `SAMPLING` + `TRAINING` times the share of outputs
        that it trains on: the form of least m x cost is taken. Until there was a look, it is the one that trains least.
        """
        if self.lazy is not None:
            return self.lazy
        norm2_K, share_K = self._ties_2K
        looks = float(norm2_K.sum())  # each is 1 in all
        return TIES[int((norm2_K * (SAMPLING * looks + TRAINING * share_K)).argmin())]

    def observe_ties(self, norm2_K: Tensor, share_K: Tensor) -> None:
        """Take in what a look found of a step that is done with: m and the share of outputs trained on, by form.

        m is the mean squared norm of prompts' gradients, what prompts differ by included. A look at prompts without any
        gradient changes nothing.
        """
        if total := float(norm2_K.sum()):
            seen_2K = torch.stack([norm2_K.double().cpu() / total, share_K.double().cpu()])
            self._ties_2K = self.memory * self._ties_2K + seen_2K

    def next_step(self) -> None:
        """The batch is complete: count it among earlier steps."""
        self._sums = self.memory * (self._sums + self._new_sums)
        self._new_sums = torch.zeros_like(self._sums)
        self._risk_C = self.memory * (self._risk_C + self._new_risk_C)
        self._new_risk_C = torch.zeros_like(self._risk_C)

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs, between steps. The settings are the caller's to give again."""
        return {
            "sums": self._sums.clone(),
            "risk": self._risk_C.clone(),
            "new_risk": self._new_risk_C.clone(),
            "ties": self._ties_2K.clone(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off.

        Raises:
            ValueError: it was saved with other strengths to choose from.
        """
        if state["risk"].shape != self._risk_C.shape:
            raise ValueError(f"the prior was saved with {state['risk'].numel()} strengths, here are {len(STRENGTHS)}.")
        self._sums, self._risk_C = state["sums"].double().clone(), state["risk"].double().clone()
        self._new_risk_C, self._ties_2K = state["new_risk"].double().clone(), state["ties"].double().clone()


def shrunk(
    rewards_PG: Tensor, valid_PG: Tensor, norm2_PG: Tensor, weight_P1: Tensor, baseline_P1: Tensor, strength: float
) -> Tensor:
    """Return (sum_{i != j} w_i F_i + c w_bar b_bar) / (sum_{i != j} w_i + c w_bar); equal weights where all are 0."""
    weights_PG = norm2_PG * valid_PG
    others_PG = sum_of_others(weights_PG) + strength * weight_P1
    weighted_PG = sum_of_others(weights_PG * rewards_PG) + strength * weight_P1 * baseline_P1
    return torch.where(others_PG > 0, weighted_PG / others_PG, mean_of_others(rewards_PG, valid_PG, baseline_P1))


def mean_of_others(rewards_PG: Tensor, valid_PG: Tensor, otherwise: Tensor | float = 0.0) -> Tensor:
    """The mean reward of the other valid outputs of the group, or `otherwise` where there is none."""
    count_PG = sum_of_others(valid_PG)
    mean_PG: Tensor = sum_of_others(valid_PG * rewards_PG) / count_PG.clamp(min=1)
    return torch.where(count_PG > 0, mean_PG, otherwise)


def sum_of_others(values_PG: Tensor) -> Tensor:
    """The sum of v_i over i != j, as what comes before and what comes after j: nothing is subtracted, in O(G)."""
    zero_P1 = torch.zeros_like(values_PG[:, :1])
    before_PG = torch.cat([zero_P1, values_PG.cumsum(1)[:, :-1]], 1)
    after_PG = torch.cat([values_PG.flip(1).cumsum(1).flip(1)[:, 1:], zero_P1], 1)
    return before_PG + after_PG


def least_and_most_of_others(values_PG: Tensor, valid_PG: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest v_i over valid i != j, bit by bit; inf and -inf where there is none."""

    def least(values_PG: Tensor) -> Tensor:
        values_PG = torch.where(valid_PG > 0, values_PG, math.inf)
        none_P1 = torch.full_like(values_PG[:, :1], math.inf)
        before_PG = torch.cat([none_P1, values_PG.cummin(1).values[:, :-1]], 1)
        after_PG = torch.cat([values_PG.flip(1).cummin(1).values.flip(1)[:, 1:], none_P1], 1)
        return torch.minimum(before_PG, after_PG)

    return least(values_PG), -least(-values_PG)


def none(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """No baseline: b_j = 0."""
    return torch.zeros_like(rewards_PG)


def mean(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """b_j = mean_i F_i, the output itself included: the gradient is (G - 1) / G times that of RLOO."""
    return weighted_mean(rewards_PG, valid_PG)


def batch_mean(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """The mean of all rewards of the batch."""
    return (rewards_PG * valid_PG).sum() / valid_PG.sum().clamp(min=1) * torch.ones_like(rewards_PG)


def rloo(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """b_j = mean_{i != j} F_i, and 0 for a lone output."""
    return mean_of_others(rewards_PG, valid_PG)


def js(rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """b_j = (1 - l) mean_{i != j} F_i + l mean of the other prompts, with l = (n - 1) / n v / (v + s) for n prompts.

    Here v is the mean of the variances of the other prompts' leave-one-out means, and s is the variance of the
    other prompts' means less what their own noise explains (not below 0). With fewer than two other prompts l = 0; an
    output that is alone in its group has l = 1.
    """
    count_P1 = valid_PG.sum(1, keepdim=True)
    mean_P1 = (rewards_PG * valid_PG).sum(1, keepdim=True) / count_P1.clamp(min=1)
    squares_P1 = ((rewards_PG - mean_P1).square() * valid_PG).sum(1, keepdim=True)
    variance_P1 = squares_P1 / (count_P1 - 1).clamp(min=1)
    known_P1, spread_P1 = (count_P1 > 0).to(rewards_PG), (count_P1 > 1).to(rewards_PG)
    n = known_P1.sum()

    def others(values_P1: Tensor, counted_P1: Tensor) -> Tensor:  # means over the other prompts
        return sum_of_others((values_P1 * counted_P1).T).T / sum_of_others(counted_P1.T).T.clamp(min=1)

    noise_P1 = others(variance_P1 / (count_P1 - 1).clamp(min=1), spread_P1)
    others_mean_P1 = others(mean_P1, known_P1)
    spread_of_means_P1 = (others(mean_P1.square(), known_P1) - others_mean_P1.square()) * (n - 1) / (n - 2).clamp(min=1)
    between_P1 = (spread_of_means_P1 - others(variance_P1 / count_P1.clamp(min=1), spread_P1)).clamp(min=0)
    total_P1 = noise_P1 + between_P1
    share_P1 = torch.where((n > 2) & (total_P1 > 0), (n - 1) / n * noise_P1 / total_P1, 0)
    own_PG, lone_PG = mean_of_others(rewards_PG, valid_PG), sum_of_others(valid_PG) == 0
    share_PG = torch.where(lone_PG, (n > 1).to(rewards_PG), share_P1.expand_as(rewards_PG))
    return (1 - share_PG) * own_PG + share_PG * others_mean_P1


def oblr(rewards_PG: Tensor, valid_PG: Tensor, norm2_PG: Tensor) -> Tensor:
    """The variance-optimal baseline, leave-one-out: b_j = sum_{i != j} w_i F_i / sum_{i != j} w_i.

    It estimates b* = E[w F] / E[w], which minimises the trace of the gradient's covariance (OBLR-PO, theorem 7), from
    the outputs other than j; w are squared score norms || grad log pi(o|q) ||^2. In leverage form,
    F_j - b_j = (F_j - b) / (1 - h_j) with b = sum w F / sum w and h_j = w_j / sum w; here 1 - h_j is summed from the
    others, so that a dominant w_j loses no digits. Where all other outputs have w = 0 they cannot be
    told apart, and the baseline is RLOO's.
    """
    nothing_P1 = torch.zeros_like(rewards_PG[:, :1])
    return shrunk(rewards_PG, valid_PG, norm2_PG, nothing_P1, nothing_P1, 0.0)


def oblr_shrunk(rewards_PG: Tensor, valid_PG: Tensor, norm2_PG: Tensor, prior: Prior) -> Tensor:
    """b_j = (sum_{i != j} w_i F_i + c w_bar b_bar) / (sum_{i != j} w_i + c w_bar), with what `Prior` says.

    A lone output gets b_bar. It helps where the leave-one-out sums are noisy (few outputs a prompt, weights of wide
    spread). It couples the prompts of a batch, and `moments` finds the signal too high in the first steps of few.
    """
    return shrunk(
        rewards_PG, valid_PG, norm2_PG, *prior.of_others(rewards_PG, valid_PG, norm2_PG), prior.current_strength
    )


def oblr_lazy(rewards_PG: Tensor, valid_PG: Tensor, norm2_PG: Tensor, prior: Prior) -> Tensor:
    """b_j = F where all other outputs of the group earned the same F; elsewhere that of `oblr_shrunk`.

    An output that earned F too has the advantage 0 then, and need not be trained on.
    """
    return _shrunk_but_ties(rewards_PG, valid_PG, norm2_PG, prior, (True, True))


def oblr_thrifty(rewards_PG: Tensor, valid_PG: Tensor, norm2_PG: Tensor, prior: Prior) -> Tensor:
    """`oblr_lazy` as far as earlier looks say that less training is worth more noise (`Prior.current_lazy`)."""
    return _shrunk_but_ties(rewards_PG, valid_PG, norm2_PG, prior, prior.current_lazy)


def _shrunk_but_ties(
    rewards_PG: Tensor, valid_PG: Tensor, norm2_PG: Tensor, prior: Prior, lazy: tuple[bool, bool]
) -> Tensor:
    weight_P1, mean_P1 = prior.of_others(rewards_PG, valid_PG, norm2_PG)
    shrunk_PG = shrunk(rewards_PG, valid_PG, norm2_PG, weight_P1, mean_P1, prior.current_strength)
    low_PG, high_PG = least_and_most_of_others(rewards_PG, valid_PG)
    is_low_PG = low_PG <= mean_P1
    is_tied_PG = (low_PG == high_PG) & ((is_low_PG & lazy[0]) | (~is_low_PG & lazy[1]))
    return torch.where(is_tied_PG, low_PG, shrunk_PG)


def opo(rewards_PG: Tensor, valid_PG: Tensor, length_PG: Tensor) -> Tensor:
    """b_j = sum T F / sum T, weighted by lengths T."""
    return weighted_mean(rewards_PG, valid_PG, length_PG)


def otb(rewards_PG: Tensor, valid_PG: Tensor, logit_norm2_PGT: Tensor, token_mask_PGT: Tensor) -> Tensor:
    """One baseline a token, (P, G, T): b_t = sum_i W_it F_i / sum_i W_it with W_it = sum_{u<=t} l_iu.

    The sums run over the outputs that have a token t; l_iu = 1 - 2 pi(o_u) + sum_v pi_v^2 is the squared norm of the
    score of token u for its logits (`scores.logit_norm2`). The baseline is in-sample: where one output alone is
    that long, its advantage is 0. It is `optimal_token_baseline` in verl.
    """
    running_PGT = token_mask_PGT * valid_PG[..., None]
    weights_PGT = (logit_norm2_PGT * running_PGT).cumsum(2) * running_PGT
    rewards_PTG = rewards_PG[:, None].expand(-1, weights_PGT.shape[2], -1)
    baseline_PTG = weighted_mean(
        *(values_PTG.flatten(0, 1) for values_PTG in (rewards_PTG, running_PGT.mT, weights_PGT.mT))
    )
    return baseline_PTG.view_as(rewards_PTG).mT


def weighted_mean(rewards_PG: Tensor, valid_PG: Tensor, norm2_PG: Tensor | None = None) -> Tensor:
    """b_j = sum w F / sum w over a group, the output itself included; the plain mean without weights, or if all are 0.

    `eob` is the "exact optimal baseline" of a fork of verl. `vcpo` takes rho^2 w for w off-policy, and comes with the
    rate eta_0 sqrt(ESS / B) of `SNRSchedule(mode="ess")`.
    """
    mean_P1 = (rewards_PG * valid_PG).sum(1, keepdim=True) / valid_PG.sum(1, keepdim=True).clamp(min=1)
    if norm2_PG is None:
        return mean_P1.expand_as(rewards_PG)
    weights_PG = norm2_PG * valid_PG
    total_P1 = weights_PG.sum(1, keepdim=True)
    weighted_P1 = (weights_PG * rewards_PG).sum(1, keepdim=True) / total_P1
    return torch.where(total_P1 > 0, weighted_P1, mean_P1).expand_as(rewards_PG)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {name: globals()[row.function or name] for name, row in BASELINES.items()}
"""The function of every row of `BASELINES`, of rewards_PG, valid_PG and what the row needs."""

INPUTS = frozenset(need for row in BASELINES.values() for need in row.needs) - {"prior"}


def baseline(
    name: str,
    rewards_PG: Tensor,
    *,
    valid_PG: Tensor | None = None,
    rho_PG: Tensor | None = None,
    prior: Prior | None = None,
    **inputs: Tensor,
) -> Tensor:
    """The named baseline of every output, (P, G) or (P, G, T), computed in float64, returned in the rewards' dtype.

    Args:
        name: a key of `BASELINES`.
        rewards_PG: (P, G) finite rewards F; with a KL penalty in the reward those of `kl_in_reward`.
        valid_PG: outputs that count (all if None). The numbers of others, NaN too, are ignored; their baseline is their
            own reward, for an advantage of 0 (of NaN where that is their reward: mask it).
        rho_PG: importance weights pi / pi_old of whole outputs (1 if None): weights become rho^2 w, where the baseline
            has an off-policy form.
        prior: for `oblr_shrunk` and its like; if None, the other prompts of this batch and `Prior`'s default strength.
        **inputs: what the baseline needs: norm2_PG, length_PG, logit_norm2_PGT and token_mask_PGT; inputs that only
            others need may be there.

    Raises:
        ValueError: an unknown name, a missing, unknown, misshapen, non-finite or negative input, or too few outputs a
            prompt.

    Examples:
        >>> rewards_PG = torch.tensor([[1.0, 0.0, 0.0]])
        >>> baseline("rloo", rewards_PG)
        tensor([[0.0000, 0.5000, 0.5000]])
        >>> baseline("oblr", rewards_PG, norm2_PG=torch.tensor([[1.0, 4.0, 4.0]]))  # the success has a short score
        tensor([[0.0000, 0.2000, 0.2000]])
    """
    row, valid_PG = _row(name, rewards_PG, valid_PG, inputs)
    given: dict[str, Any] = {"rewards_PG": _checked("rewards_PG", rewards_PG, rewards_PG, valid_PG)}
    for need in row.needs:
        given[need] = prior or Prior() if need == "prior" else _checked(need, inputs[need], rewards_PG, valid_PG)
    if rho_PG is not None:
        rho_PG = _checked("rho_PG", rho_PG, rewards_PG, valid_PG)
        if row.off_policy:
            given["norm2_PG"] = given["norm2_PG"] * rho_PG.square()
    result, own, valid = FUNCTIONS[name](valid_PG=valid_PG.double(), **given), rewards_PG.double(), valid_PG
    if row.by_token:
        own, valid = own[..., None], valid[..., None]
    dtype = rewards_PG.dtype if rewards_PG.is_floating_point() else torch.get_default_dtype()
    return torch.where(valid, result, own).to(dtype)


def _row(name: str, rewards_PG: Tensor, valid_PG: Tensor | None, inputs: dict[str, Tensor]) -> tuple[Baseline, Tensor]:
    """The row of a baseline that these inputs suffice for, and which outputs count."""
    if name not in BASELINES:
        raise ValueError(f"unknown baseline {name!r}; choose one of: {', '.join(BASELINES)}.")
    row = BASELINES[name]
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards_PG must have shape (prompts, outputs per prompt), got {tuple(rewards_PG.shape)}.")
    if rewards_PG.shape[1] < row.smallest_group:
        raise ValueError(
            f"baseline {name!r} needs at least {row.smallest_group} outputs per prompt, got {rewards_PG.shape[1]}."
        )
    if missing := sorted({*row.needs} - {*inputs, "prior"}):
        raise ValueError(f"baseline {name!r} needs {', '.join(missing)}.")
    if unknown := sorted({*inputs} - INPUTS):
        raise ValueError(f"no baseline takes {', '.join(unknown)}; inputs are: {', '.join(sorted(INPUTS))}.")
    valid_PG = torch.ones_like(rewards_PG, dtype=torch.bool) if valid_PG is None else valid_PG.bool()
    if valid_PG.shape != rewards_PG.shape:
        raise ValueError(f"valid_PG has shape {tuple(valid_PG.shape)}, rewards_PG {tuple(rewards_PG.shape)}.")
    return row, valid_PG


def _checked(key: str, value: Tensor, rewards_PG: Tensor, valid_PG: Tensor) -> Tensor:
    """Return the input in float64, with 0 where an output does not count."""
    if value.shape[:2] != rewards_PG.shape or value.ndim != (3 if key.endswith("_PGT") else 2):
        raise ValueError(f"{key} has shape {tuple(value.shape)}, rewards_PG {tuple(rewards_PG.shape)}.")
    valid = valid_PG[..., None] if value.ndim == 3 else valid_PG
    value = torch.where(valid, value.double(), 0)
    if not value.isfinite().all():
        raise ValueError(f"{key} holds NaN or infinity.")
    if key != "rewards_PG" and (value < 0).any():
        raise ValueError(f"{key} holds a negative {'squared norm' if 'norm2' in key else 'number'}.")
    return value


def baseline_inputs(
    token_mask_PGT: Tensor, norm2_PG: Tensor | None = None, logit_norm2_PGT: Tensor | None = None
) -> dict[str, Tensor]:
    """All inputs of `baseline` that follow from what was measured of P prompts with G outputs of T tokens each.

    A new input is one more line here: the trainer, the ledger, the adapters, the theory and the check of assumption 1
    all call this function.

    Args:
        token_mask_PGT: 1 for the policy's own tokens.
        norm2_PG: squared score norms, or a proxy of them; None if they were not measured.
        logit_norm2_PGT: `scores.logit_norm2` of every token; None if they were not measured.
    """
    inputs = {"length_PG": token_mask_PGT.sum(2), "token_mask_PGT": token_mask_PGT}
    measured = {"norm2_PG": norm2_PG, "logit_norm2_PGT": logit_norm2_PGT}
    return inputs | {key: value for key, value in measured.items() if value is not None}


def kl_in_reward(rewards_PG: Tensor, logps_PG: Tensor, ref_logps_PG: Tensor, beta: float) -> Tensor:
    """The reward F~ = F - beta log(pi / pi_ref), taken as a constant: its policy gradient is that of J - beta KL.

    Every baseline is formed from F~ as it would be from F. A loop that differentiates the log-ratio, too, adds -beta s
    to each score's coefficient, and subtracts b - beta instead of b. Log-ratios are unbounded, and with them
    assumption 4; clip them if they grow. They are in nats, and beta is the reward that one nat costs.

    Examples:
        >>> kl_in_reward(torch.tensor([[1.0, 0.0]]), torch.tensor([[-2.0, -3.0]]), torch.tensor([[-4.0, -3.0]]), 0.1)
        tensor([[0.8000, 0.0000]])
    """
    return rewards_PG - beta * (logps_PG.detach() - ref_logps_PG.detach())


YOUR_OWN = "your own"


def depends_on_own_output(name: str) -> bool:
    """Whether an output's own reward, norm or length moves its own baseline, tried on 3 random groups of 4.

    Two outputs with the same other outputs in their group (and in the batch) must get the same baseline. A baseline
    that says it is `unbiased` and fails this is not.
    """
    generator = torch.Generator("cpu").manual_seed(0)

    def inputs() -> dict[str, Any]:
        rewards_PG = torch.rand(3, 4, generator=generator, dtype=torch.float64, device="cpu")
        return {"rewards_PG": rewards_PG} | random_inputs(3, 4, 5, generator)

    given, others = inputs(), inputs()
    before = baseline(name, **given)
    for p, j in itertools.product(range(3), range(4)):
        changed = {key: value.clone() for key, value in given.items()}
        for key, value in changed.items():
            value[p, j] = others[key][p, j]
        if not torch.allclose(baseline(name, **changed)[p, j], before[p, j], rtol=1e-9, atol=1e-12):  # rounding is less
            return True
    return False


def register_baseline(name: str, function: Callable[..., Tensor]) -> None:
    """Add a baseline of your own to `BASELINES`; whether it is unbiased is tried (`depends_on_own_output`).

    Args:
        name: what `baseline` shall know it by.
        function: of rewards_PG, valid_PG and, where it needs them, norm2_PG and length_PG, by these names, all (P, G)
            in float64, to b, (P, G).

    Raises:
        ValueError: a baseline of ours has the name, the function has other parameters, or it fails on random rewards.
    """
    if name in BASELINES and BASELINES[name].meaning != YOUR_OWN:
        raise ValueError(f"there is a baseline {name!r} already; choose another name.")
    takes = tuple(inspect.signature(function).parameters)
    if takes[:2] != ("rewards_PG", "valid_PG") or not {"norm2_PG", "length_PG"}.issuperset(takes[2:]):
        raise ValueError(
            f"baseline {name!r} takes ({', '.join(takes)}); its parameters must be rewards_PG, valid_PG and, where it "
            "needs them, norm2_PG and length_PG."
        )

    def checked(**given: Tensor) -> Tensor:
        b, shape = function(**given), given["rewards_PG"].shape
        if not isinstance(b, Tensor) or b.shape != shape or not b.isfinite().all():
            raise ValueError(f"baseline {name!r} must return finite numbers, a tensor of shape {tuple(shape)}.")
        return b

    FUNCTIONS[name], BASELINES[name] = checked, Baseline(YOUR_OWN, unbiased=False, needs=takes[2:])
    try:
        unbiased = not depends_on_own_output(name)
        ties_PG = torch.tensor([[1.0] * 3, [0.0] * 3], dtype=torch.float64, device="cpu")
        inputs: dict[str, Any] = {**random_inputs(2, 3, 4, torch.Generator("cpu"))}
        learns_from_ties = not torch.allclose(baseline(name, ties_PG, **inputs), ties_PG)
        BASELINES[name] = replace(BASELINES[name], unbiased=unbiased, learns_from_ties=learns_from_ties)
    except Exception as error:
        del FUNCTIONS[name], BASELINES[name]
        raise ValueError(f"baseline {name!r} fails on random rewards: {type(error).__name__}: {error}") from error


def random_inputs(prompts: int, outputs: int, tokens: int, generator: torch.Generator) -> dict[str, Tensor]:
    """All inputs of every baseline, drawn at random on the CPU in float64, with outputs of 1 to `tokens` tokens."""
    shape = (prompts, outputs)

    def rand(*size: int) -> Tensor:
        return torch.rand(*size, generator=generator, dtype=torch.float64, device="cpu")

    lengths_PG = torch.randint(1, tokens + 1, shape, generator=generator, device="cpu")
    norm2_PG, logit_norm2_PGT = rand(*shape), rand(*shape, tokens)
    mask_PGT = (torch.arange(tokens, device="cpu") < lengths_PG[..., None]).double()
    return baseline_inputs(mask_PGT, norm2_PG, logit_norm2_PGT)
