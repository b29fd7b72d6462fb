"""The signal-to-noise ratio over steps: one batch alone says little, and the policy that it was measured on moves."""

import math
from itertools import accumulate
from statistics import median
from typing import Any, NamedTuple

import torch

from oblrpo.estimators.moments import Moments

SHORTER = (0.5, 0.75, 0.9)
"""Decays of the averages beside the longest one, which take its place while the ratio moves."""
APART = 2.0
"""How many standard errors a shorter average must lie from a longer one for the ratio to have moved in between."""
FORGOTTEN = 0.01  # the weight in the longest average below which a batch is dropped
BEYOND = 5.0
"""How many times as large as the largest noise that was seen what lies beyond it is in the mean: alpha / (alpha - 1)
times where a squared norm exceeds x with a chance as x^-alpha; alpha is 1.25 for Student's t of 2.5 degrees."""


class Interval(NamedTuple):
    """The bounds of an interval for a signal-to-noise ratio."""

    low: float
    high: float


class _Average(NamedTuple):
    """The average that is taken of S and T, and of what is spared, in units of the last batch's size."""

    signal2: float
    trace_cov: float
    spared: float
    error: float = math.nan
    """Standard error of the ratio R = S / T: the root of sum a^2 (S - R T)^2, over sum a T; NaN where it has none."""
    batches: float = math.nan
    """How many equal batches would be as sure: (sum a T)^2 / sum a^2 T^2 of the weights a."""
    drift: float = math.nan
    """By how much the ratio has moved while its batches were made, as the next shorter average says."""
    rare: float = math.nan
    """By what part T would grow if one batch in n had noise beyond all of the n that were seen."""


class MomentAverage:
    """SNR = sum a S / c over sum a T / c, with exponential weights a and c the scale of each batch's squared gradient.

    Divided by their scale, batches weigh alike whether gradients shrink or grow. c is what the two batches on each side
    say: weights that know nothing of what they weigh leave a ratio of means what it is, however heavy the tails. But no
    batch counts for more than all around it together, so that an accident is outlived. A ratio of means is biased by
    the order of one batch's noise over their number, a mean of ratios by that noise itself.

    The longest average is taken whose ratio R leaves S - R T at 0 in the mean of every shorter one, within `APART`
    errors (Lepski's rule): all of memory while the ratio stands, the last two or three batches after it has moved. A
    shorter average's own ratio would say too much, and so would its own noise of T, for which the longer one's stands:
    the last batches may lack the rare ones to which T owes its mean. A batch without a gradient changes nothing.

    `decay` of the longest average is kept from one batch to the next, in [0, 1); 0 uses each batch alone.
    """

    def __init__(self, decay: float) -> None:
        self.decays = (*(each for each in SHORTER if each < decay), decay)
        self._memory = 1 + math.ceil(math.log(FORGOTTEN) / math.log(decay)) if decay else 1
        self._batches: list[tuple[float, float, float]] = []
        self._n = 0
        self._average: _Average | None = None

    @property
    def scale(self) -> float:
        """The size |S| + |T| of the last batch's squared gradient; 0 before it."""
        return abs(self._batches[-1][0]) + abs(self._batches[-1][1]) if self._batches else 0.0

    def scale_of(self, norm2: float) -> float:
        """The size |S| + |T| of a batch with only || g ||^2 known, whose mean is S + T/N; 0 before the first."""
        if not self._batches:
            return 0.0
        moments = self.moments
        mean = max(moments.signal2, 0.0) + moments.trace_cov / moments.n
        share = norm2 / mean if mean > 0 else 0.0
        return share * (abs(moments.signal2) + abs(moments.trace_cov)) or self.scale

    def add(self, batch: Moments) -> None:
        """Take in one batch."""
        self._n = batch.n
        if batch.has_gradient:
            added = (batch.signal2, batch.trace_cov, batch.spared)
            self._batches, self._average = [*self._batches, added][-self._memory :], None

    @property
    def _taken(self) -> _Average:
        """The average that is taken; worked out once a batch."""
        if self._average is None:
            with torch.device("cpu"):
                self._average = self._take()
        return self._average

    def _take(self) -> _Average:
        moments_B3 = torch.tensor(self._batches, dtype=torch.float64) / self.scale
        weights = _weights(moments_B3[:, :2].abs().sum(1).tolist(), self.decays[-1])
        moments_B3 *= torch.tensor([each / weights[-1] for each in weights], dtype=torch.float64)[:, None]
        decays_A = torch.tensor(self.decays, dtype=torch.float64)
        a_AB = decays_A[:, None] ** torch.arange(len(weights) - 1, -1, -1)
        a_AB /= a_AB.sum(1, keepdim=True)
        means_A3, last = a_AB @ moments_B3, len(a_AB) - 1
        if len(weights) < 3 or not bool((means_A3[:, 1] > 0).all()):
            return _Average(*means_A3[last].tolist())
        # Half the mean squared difference of neighbours is the variance: a ratio that moves hardly widens it.
        variance_A2 = a_AB[:, 1:] @ moments_B3[:, :2].diff(dim=0).square() / 2 / a_AB[:, 1:].sum(1, keepdim=True)
        for taken in range(last, -1, -1):
            a_B, (signal2, trace_cov, spared) = a_AB[taken], means_A3[taken].tolist()
            ratio = signal2 / trace_cov
            rest_B = moments_B3[:, 0] - ratio * moments_B3[:, 1]
            rest_A, variance_A = a_AB @ rest_B, variance_A2[:, 0] + ratio**2 * variance_A2[taken, 1]
            if bool((rest_A.square() <= APART**2 * variance_A * (a_AB - a_B).square().sum(1))[:taken].all()):
                break
        noise_B, drift, excess = moments_B3[:, 1] / trace_cov, 0.0, 0.0
        batches = 1 / float((a_B * noise_B).square().sum())
        spread = float((a_B * rest_B).square().sum()) * batches / (batches - 1) if batches > 1 + 1e-9 else math.inf
        if last:
            other, ages = taken - 1 if taken else 1, [decay / (1 - decay) for decay in self.decays]
            drift = float(rest_A[other]) / trace_cov / (ages[taken] - ages[other]) * ages[taken]
        if bool((noise_B != 1).any()):  # that of the largest: each excess is weighed by its square
            excess = max(0.0, float(a_B @ (noise_B - 1) ** 3 / (a_B @ (noise_B - 1) ** 2)))
        rare = BEYOND * excess * float(a_B.square().sum())
        return _Average(signal2, trace_cov, spared, math.sqrt(spread) / trace_cov, batches, drift, rare)

    @property
    def moments(self) -> Moments:
        """Signal and noise in the scale of the last batch that had a gradient, with the N of the last; 0 before it.

        Raises:
            ValueError: there was no batch yet.
        """
        if not self._n:
            raise ValueError("no step has been taken yet.")
        if not self._batches:
            return Moments(0.0, 0.0, self._n)
        signal2, trace_cov, spared, *_ = self._taken
        return Moments(signal2 * self.scale, trace_cov * self.scale, self._n, spared * self.scale)

    def signal_share(self, debiased: bool = True) -> float:
        """The part S / (S + T/N) of the batch gradient's squared norm that is signal: the factor of theorem 4.

        S is unbiased, cut at 0; if not `debiased`, S + T/N, the expectation of ||g||^2, stands in its place.
        """
        moments = self.moments
        noise = moments.trace_cov / moments.n
        signal2 = max(moments.signal2 if debiased else moments.signal2 + noise, 0.0)
        return signal2 / (signal2 + max(noise, 0.0)) if signal2 > 0 else 0.0  # 1 where noise is negative by chance

    def snr_interval(self, z: float) -> Interval:
        """The interval that `SNRSchedule.snr_interval` describes, with a lower bound for heavy tails.

        A T whose mean is owed to rare batches is too low more often than too high. Where n batches were seen, those
        that are larger than all of them are rarer than -log(p) / n but for a probability p (the rule of three: 3 / n at
        95 %), and exceed T by `BEYOND` times as much as the largest that were seen. The lower bound is of such a T.
        """
        average = self._taken if self._batches else None
        if average is None or math.isnan(average.error):
            return Interval(math.nan, math.nan)
        ratio, drift = average.signal2 / average.trace_cov, average.drift * z / 1.96
        margin = _student(z, max(average.batches - 1, 1e-9)) * average.error
        low, high = ratio - margin + min(drift, 0.0), ratio + margin + max(drift, 0.0)
        unseen = -math.log(math.erfc(z / math.sqrt(2)))
        return Interval(max(low, 0.0) / (1 + unseen * average.rare), max(high, 0.0))

    def state_dict(self) -> dict[str, Any]:
        """The batches that are remembered as plain numbers."""
        return {"n": self._n, "batches": [list(batch) for batch in self._batches]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self._n, self._batches, self._average = state["n"], [tuple(batch) for batch in state["batches"]], None


def _weights(sizes: list[float], decay: float) -> list[float]:
    """1 / c of batches of these sizes; less where that would let one count for more than all around it together.

    Fewer than five say nothing of a scale: they weigh the same.
    """
    if len(sizes) < 5:
        return [1.0] * len(sizes)
    logs = [math.log(size) for size in sizes]
    c = [math.exp(_level(logs, t)) for t in range(len(logs))]
    counts = [size / each for size, each in zip(sizes, c, strict=True)]

    def before(counts: list[float]) -> list[float]:
        return [0.0, *accumulate(counts[:-1], lambda total, count: decay * total + count)]

    around = map(sum, zip(before(counts), reversed(before(counts[::-1])), strict=True))
    return [min(1.0, most / count) / each for most, count, each in zip(around, counts, c, strict=True)]


def _level(logs: list[float], t: int) -> float:
    """What the batches around the t-th say of its logarithm: the median of two on each side, or of one.

    For the first and the last it is the median of the nearest four, carried on along the line through them by as much
    of its slope as lies beyond `APART` of its errors: gradients that shrink or grow from step to step are foreseen.
    """
    if side := min(t, len(logs) - 1 - t, 2):
        return median([*logs[t - side : t], *logs[t + 1 : t + 1 + side]])
    a, b, c, d = logs[1:5] if t == 0 else logs[-2:-6:-1]
    slope = (3 * (a - d) + b - c) / 10
    rest = (a - b - c + d) ** 2 / 4 + (a - 3 * b + 3 * c - d) ** 2 / 20  # what squares the line leaves
    known = max(0.0, 1 - APART**2 * rest / 10 / slope**2) if slope else 0.0
    return median([a, b, c, d]) + 2.5 * known * slope


def _student(z: float, df: float) -> float:
    """Student's t that is as rare as z standard errors of a normal variable; expanded in 1 / df (A & S 26.7.5)."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / df**power for power, term in enumerate(terms, start=1))
