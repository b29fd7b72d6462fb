"""Stand-ins for squared score norms, from a forward alone: for comparison, and to have weights before any backward.

A leave-one-out baseline b_j = sum_{i != j} w_i F_i / sum_{i != j} w_i needs one thing of its weights: w_i must be a
function of (prompt, output i) and of earlier steps. Given the prompt and the past, the other outputs are independent of
output j, so E[b_j s_j] = E[b_j] E[s_j] = 0 and the gradient's mean is exactly grad J, however poor the weights; w_i may
even depend on output i's own reward. A bad proxy costs variance only. What breaks it is a w_i that looks at another
output of its group in more than a factor common to the group: a regression fitted to this very batch, say. So
`CalibratedProxy` predicts first and observes afterwards. In-sample baselines, with output j in the sums, are biased
whatever the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oblrpo.scores.contributions import chunks

LENGTH_EXPONENT = 1.6
"""The power of T that ||grad log pi||^2 grew with where it was measured."""

LOGIT_NORM2_FLOOR = 1e-12
"""The least logit norm that counts: below it 1 - pi is within float32's rounding of 0, and so are exact norms."""

NO_SPREAD = 1e-9
"""The root mean square below which log-weights are equal up to rounding."""

LARGEST_LOG_WEIGHT = math.log(1e30)
"""The bound of predicted log-weights, so that a wild extrapolation is no zero or infinity in float32."""


@torch.no_grad()
def logit_norm2(logits_STV: Tensor, ids_ST: Tensor, temperature: float = 1.0) -> Tensor:
    """Squared norm of d log pi(id_t) / d z_t, 1 - 2 pi(id_t) + sum_v pi_v^2, of every token, (S, T), as a constant.

    z = logits / temperature are the scaled logits, of which pi is the softmax; divided by temperature^2 it is the norm
    for the logits themselves. Summed as (sum of the others)^2 + sum of their squares, so that a token of probability
    near 1 keeps its digits. Li et al. 2026 (OTB), arXiv 2602.07078.

    Args:
        logits_STV: any float type; widened to float32 at least, a few tokens at a time.
        ids_ST: token ids, each within the vocabulary, that of padding too.
        temperature: of the softmax.

    Raises:
        ValueError: the shapes do not fit, or the temperature is not positive.
    """
    if logits_STV.ndim != 3 or ids_ST.shape != logits_STV.shape[:2]:
        raise ValueError(f"logits_STV {tuple(logits_STV.shape)} and ids_ST {tuple(ids_ST.shape)} do not fit.")
    if not 0 < temperature < math.inf:
        raise ValueError(f"the temperature must be positive, got {temperature}.")
    S, T, V = logits_STV.shape  # probabilities of a few tokens at a time
    wide = torch.promote_types(logits_STV.dtype, torch.float32)
    norm2_ST = torch.empty(S, T, dtype=wide, device=logits_STV.device)
    for tokens in chunks(T, V, logits_STV):
        for rows in chunks(S, V * (tokens.stop - tokens.start), logits_STV):
            part = rows, tokens
            others_STV = (logits_STV[part].to(wide) / temperature).softmax(-1)
            others_STV.scatter_(2, ids_ST[part][..., None], 0)
            norm2_ST[part] = others_STV.sum(-1).square() + others_STV.square_().sum(-1)
    return norm2_ST


@dataclass(frozen=True)
class Features:
    """What is known of S completions without a backward; each (S,), summed over the completion's own tokens.

    A completion without a token of its own has the score 0, and the weight 0 by every proxy.

    Raises:
        ValueError: not vectors of one length, NaN or infinity, a negative length or norm.
    """

    length_S: Tensor
    """The number of tokens."""
    logps_S: Tensor
    """The completion's log pi(o|q), in nats."""
    entropy_S: Tensor
    """Sum of the entropies of the distributions that the tokens were drawn from, in nats, or an unbiased estimate."""
    logit_norm2_S: Tensor
    """The sum of `logit_norm2` over the tokens; of (1 - pi)^2, the least that it can be, where only log pi is known."""

    def __post_init__(self) -> None:
        shapes = {name: tuple(values.shape) for name, values in vars(self).items()}
        if self.length_S.ndim != 1 or len(set(shapes.values())) > 1:
            raise ValueError(f"features must be vectors with one entry per completion, got {shapes}.")
        for name, values in vars(self).items():
            if not values.isfinite().all():
                raise ValueError(f"{name} holds NaN or infinity.")
        if (self.length_S < 0).any():
            raise ValueError("length_S holds a negative number of tokens.")
        if (self.logit_norm2_S < 0).any():
            raise ValueError("logit_norm2_S holds a negative squared norm.")

    @classmethod
    def join(cls, blocks: Sequence[Features]) -> Features:
        """The features of all completions of several blocks."""
        return cls(*(torch.cat(values) for values in zip(*(vars(block).values() for block in blocks), strict=True)))

    def at(self, index_S: Tensor) -> Features:
        """The features of the completions that an index names, in its order."""
        return Features(*(values[index_S] for values in vars(self).values()))

    @classmethod
    def from_tokens(
        cls, logit_norm2_SC: Tensor, token_logps_SC: Tensor, entropy_SC: Tensor, mask_SC: Tensor
    ) -> Features:
        """Sums over the tokens where mask_SC is not 0, taken as constants; what stands elsewhere, NaN too, is ignored.

        Raises:
            ValueError: the shapes differ, or as the class says.
        """
        tokens = {"logit_norm2_SC": logit_norm2_SC, "token_logps_SC": token_logps_SC, "entropy_SC": entropy_SC}
        for name, values in tokens.items():
            if mask_SC.ndim != 2 or values.shape != mask_SC.shape:
                raise ValueError(f"{name} {tuple(values.shape)} and mask_SC {tuple(mask_SC.shape)} do not fit.")
        outside_SC = mask_SC == 0
        sums = [values.detach().masked_fill(outside_SC, 0).sum(1) for values in tokens.values()]
        logit_norm2_S, logps_S, entropy_S = sums
        return cls((~outside_SC).sum(1).to(logps_S), logps_S, entropy_S, logit_norm2_S)

    @classmethod
    def of_logps(cls, token_logps_SC: Tensor, mask_SC: Tensor) -> Features:
        """What log-probabilities alone tell of draws, summed over the tokens where mask_SC is not 0.

        -log p of every token is an unbiased estimate of the entropy, and the least that its logit norm can be is
        (1 - p)^2, the half of what it can be at most. Without it the calibrated proxy hardly does better than equal
        weights: on the demo it is off by .87 nats within a group, equal weights by 1.02; with it by .40, and with all
        features by .39.
        """
        return cls.from_tokens(token_logps_SC.expm1().square(), token_logps_SC, -token_logps_SC, mask_SC)


PROXIES: dict[str, Callable[[Features], Tensor]] = {
    # As if tokens' scores were orthogonal and of one norm. Hao et al. 2025 (OPO), arXiv 2505.23585.
    "length": lambda features: features.length_S,
    # sum_t || d log pi(id_t) / d z_t ||^2 of a whole completion. Li et al. 2026 (OTB), arXiv 2602.07078.
    "logit": lambda features: features.logit_norm2_S,
}
"""The weights that have nothing to fit, by name; each takes features and returns (S,)."""


def agreement(proxy_S: Tensor, norm2_S: Tensor, group_size: int, valid_S: Tensor | None = None) -> float:
    """Pearson's correlation of log proxy and log norm2, each less its group's mean: a group's scale does not count.

    It lies in [-1, 1] and is blind to a wrong exponent of the proxy, which `log_error` sees. With group_size = S it is
    the plain correlation. NaN where either has no spread inside any group.
    Outputs of which either weight is 0 are left out.

    Args:
        proxy_S: weights that stand in.
        norm2_S: exact squared score norms.
        group_size: G; outputs [p G, (p + 1) G) are group p.
        valid_S: outputs that count; all if None.

    Raises:
        ValueError: the shapes or the group size do not fit; a weight is negative, NaN or infinite.
    """
    log_proxy_N, log_norm2_N = _log_weights(proxy_S, norm2_S, group_size, valid_S)
    least = NO_SPREAD * math.sqrt(len(log_norm2_N))
    if log_proxy_N.norm() <= least or log_norm2_N.norm() <= least:
        return math.nan
    return float(torch.dot(log_proxy_N, log_norm2_N) / (log_proxy_N.norm() * log_norm2_N.norm()))


def log_error(proxy_S: Tensor, norm2_S: Tensor, group_size: int, valid_S: Tensor | None = None) -> float:
    """Root mean square of log(proxy / norm2) less its group's mean: nats by which weights within a group are off.

    It is 0 for a proxy in proportion to the norms, and NaN where nothing is left. Arguments, errors and what is left
    out are those of `agreement`.
    """
    log_proxy_N, log_norm2_N = _log_weights(proxy_S, norm2_S, group_size, valid_S)
    return float((log_proxy_N - log_norm2_N).square().mean().sqrt())


class CalibratedProxy:
    """Weights from a regression log w ~ beta' x, fitted as training proceeds to the exact norms of earlier steps.

    x = (log T, log of the summed logit_norm2, mean log-prob a token, mean entropy a token), and a level common to all
    outputs that gives the norms' scale and cancels in a baseline. With x and y = log w less their group's mean, beta
    minimises sum_k forgetting^k sum_s (y_s - beta' x_s)^2 + ridge ||beta - beta_0||^2 over the batches of k steps ago:
    only weights relative to the group matter, and prompts differ in ways that outputs of one prompt do not.
    beta_0 = (1.6, 0, 0, 0): until something was observed the weights are T^1.6, and `observed`, the number of
    completions taken into the fit, says so by being 0. A feature that is not known is 0 for all, and left out thereby;
    the same ones are to be known whenever one proxy observes and predicts, or its level is off.

    `predict` a batch before it is observed: see the module. Sums are kept in float64 on the CPU.

    Args:
        forgetting: what a batch counts at the next that is observed, in (0, 1]. 0.8 remembers about five: with norms of
            10 prompts in one step of ten of three runs of the demo, weights within a group were off by .340 to .390
            nats, with .95 by .338 to .393, and their level lagged behind by 1.1 and 1.4.
        ridge: in observations of unit variance; keeps collinear features from blowing up.

    Raises:
        ValueError: a setting out of range.
    """

    FEATURES = ("log_length", "log_logit_norm2", "mean_logp", "mean_entropy")

    def __init__(self, forgetting: float = 0.8, ridge: float = 1.0) -> None:
        if not 0 < forgetting <= 1:
            raise ValueError(f"forgetting must lie in (0, 1], got {forgetting}.")
        if not 0 < ridge < math.inf:
            raise ValueError(f"ridge must be positive, got {ridge}.")
        self.forgetting, self.ridge = forgetting, ridge
        self.observed = 0
        K = len(self.FEATURES)
        # Discounted sums: of x x' and x y within groups; of x, y and 1.
        self._products = torch.zeros(K, K + 1, dtype=torch.float64, device="cpu")
        self._totals = torch.zeros(K + 2, dtype=torch.float64, device="cpu")

    @property
    def coefficients(self) -> dict[str, float]:
        """The coefficients beta by name; the first two are exponents."""
        return dict(zip(self.FEATURES, self._beta().tolist(), strict=True))

    def predict(self, features: Features) -> Tensor:
        """Weights (S,), finite and positive where there is a token, in float32 or wider, on the features' device."""
        beta, level = self._beta(), 0.0
        if self.observed:  # the mean of y - beta' x, in nats
            x_K, y, count = self._totals[:-2], self._totals[-2], self._totals[-1]
            level = float((y - x_K @ beta) / count)
        log_weight_S = _regressors(features) @ beta + level
        bounded_S = log_weight_S.clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
        like = features.logps_S
        weight_S = bounded_S.exp().to(like.device, torch.promote_types(like.dtype, torch.float32))
        return weight_S.where(features.length_S > 0, 0)  # in place of NaN

    def observe(self, features: Features, norm2_S: Tensor, group_size: int, valid_S: Tensor | None = None) -> float:
        """Take in a batch's exact norms; return the `agreement` of the weights as they were predicted before it.

        Outputs with no norm, or whose tokens are all certain up to rounding, are left out of the fit. A batch of
        nothing else changes nothing.

        Args:
            features: of S completions.
            norm2_S: their exact squared score norms.
            group_size: G; completions [p G, (p + 1) G) answer prompt p. Of lone ones the level alone is fitted.
            valid_S: completions that count; all if None.

        Raises:
            ValueError: the shapes or the group size do not fit; a norm is negative, NaN or infinite.
        """
        before = agreement(self.predict(features), norm2_S, group_size, valid_S)  # checks the arguments as well
        x_SK, norm2_S = _regressors(features), _cpu64(norm2_S)
        keep_S = (norm2_S > 0) & (_cpu64(features.logit_norm2_S) > LOGIT_NORM2_FLOOR)
        if valid_S is not None:
            keep_S &= valid_S.detach().cpu().bool()
        if not keep_S.any():
            return before
        count_S = keep_S.double()
        xy_SK = torch.cat([x_SK, norm2_S.log()[:, None]], 1)
        within_SK = _within_groups(xy_SK, count_S, group_size)
        totals = torch.cat([count_S[keep_S] @ xy_SK[keep_S], count_S.sum()[None]])
        self._products = self.forgetting * self._products + (within_SK[:, :-1] * count_S[:, None]).T @ within_SK
        self._totals = self.forgetting * self._totals + totals
        self.observed += int(keep_S.sum())
        return before

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs. The settings are the caller's to give again."""
        return {"observed": self.observed, "products": self._products.clone(), "totals": self._totals.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        for key, mine in (("products", self._products), ("totals", self._totals)):
            if state[key].shape != mine.shape:
                raise ValueError(f"{key} has shape {tuple(state[key].shape)}, not {tuple(mine.shape)}.")
        self.observed = int(state["observed"])
        self._products, self._totals = _cpu64(state["products"]).clone(), _cpu64(state["totals"]).clone()

    def _beta(self) -> Tensor:
        prior = torch.zeros(len(self.FEATURES), dtype=torch.float64, device="cpu")
        prior[0] = LENGTH_EXPONENT
        ridge = self.ridge * torch.eye(len(prior), dtype=torch.float64, device="cpu")
        beta: Tensor = torch.linalg.solve(self._products[:, :-1] + ridge, self._products[:, -1] + self.ridge * prior)
        return beta


def _regressors(features: Features) -> Tensor:
    length_S, logps_S, entropy_S, logit_norm2_S = map(_cpu64, vars(features).values())
    log_norm2_S = logit_norm2_S.clamp(min=LOGIT_NORM2_FLOOR).log()
    return torch.stack([length_S.log(), log_norm2_S, logps_S / length_S, entropy_S / length_S], 1)


def _within_groups(values_SK: Tensor, count_S: Tensor, group_size: int) -> Tensor:
    """Values less the mean of their group, in which each counts so many times; 0 where it does not count."""
    values_PGK = values_SK.where(count_S[:, None] > 0, 0).view(-1, group_size, values_SK.shape[1])
    count_PG1 = count_S.view(-1, group_size, 1).to(values_SK)
    total_P11 = count_PG1.sum(1, keepdim=True)
    mean_P1K = (values_PGK * count_PG1).sum(1, keepdim=True) / total_P11.where(total_P11 > 0, 1)
    within_PGK: Tensor = (values_PGK - mean_P1K).where(count_PG1 > 0, 0)
    return within_PGK.flatten(0, 1)


def _log_weights(proxy_S: Tensor, norm2_S: Tensor, group_size: int, valid_S: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logarithms of both weights, where both are positive and count, less their group's mean."""
    S = norm2_S.numel()
    if norm2_S.ndim != 1 or proxy_S.shape != norm2_S.shape:
        raise ValueError(f"proxy_S {tuple(proxy_S.shape)} and norm2_S {tuple(norm2_S.shape)} must be vectors alike.")
    if group_size < 1 or S % group_size:
        raise ValueError(f"group_size must be at least 1 and divide the {S} completions, got {group_size}.")
    for name, weights in (("proxy_S", proxy_S), ("norm2_S", norm2_S)):
        if not weights.isfinite().all() or (weights < 0).any():
            raise ValueError(f"{name} holds a weight that is negative, NaN or infinite.")
    weights_S2 = torch.stack([_cpu64(proxy_S), _cpu64(norm2_S)], 1)
    keep_S = (weights_S2 > 0).all(1)
    if valid_S is not None:
        keep_S &= valid_S.detach().cpu().bool()
    log_proxy_N, log_norm2_N = _within_groups(weights_S2.log(), keep_S, group_size)[keep_S].unbind(1)
    return log_proxy_N, log_norm2_N


def _cpu64(values: Tensor) -> Tensor:
    return values.detach().cpu().double()
