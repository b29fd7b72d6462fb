"""The signal-to-noise ratio over steps: one batch alone says little, and the policy that it was measured on moves."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from oblrpo.estimators.moments import Moments

SHORTER = (0.5, 0.75, 0.9)
"""Decays of the averages beside the longest one, which take its place while the ratio moves."""
APART = 2.0
"""How many standard errors a shorter average must lie from a longer one for the ratio to have moved in between."""
STABLE = 3.0
"""How many times a batch's scale may differ from what earlier batches predicted; beyond it, it is the batch's own."""
SCALE_MEMORY = 0.7
"""Decay of the scale that earlier batches predict."""
CHOSEN = 1.1
"""How many times an interval is wider because the average under it was chosen among several; by simulation."""


class Interval(NamedTuple):
    """The bounds of an interval for a signal-to-noise ratio."""

    low: float
    high: float


class _Average:
    """One exponential average of S / c, T / c and F / c, with the squares from which its error comes."""

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.sums = [0.0] * 7  # of 1, S, T, F; and by squared weights of S^2, S T, T^2

    def add(self, signal2: float, trace_cov: float, spared: float) -> None:
        once = (1.0, signal2, trace_cov, spared)
        for place, new in enumerate((*once, signal2**2, signal2 * trace_cov, trace_cov**2)):
            self.sums[place] = (self.decay if place < len(once) else self.decay**2) * self.sums[place] + new

    @property
    def ratio(self) -> float:
        _, signal2, trace_cov, *_ = self.sums
        return signal2 / trace_cov

    @property
    def batches(self) -> float:
        """How many equal batches would be as sure: (sum a T)^2 / sum a^2 T^2 of the weights a."""
        return self.sums[2] ** 2 / self.sums[6]

    @property
    def error(self) -> float:
        """Standard error of the ratio R: the root of sum a^2 (S - R T)^2, over sum a T; infinite for one batch."""
        ratio, (_, _, trace_cov, _, squares, products, others) = self.ratio, self.sums
        spread = max(squares - 2 * ratio * products + ratio**2 * others, 0.0)
        n = self.batches
        return math.sqrt(spread * n / (n - 1)) / trace_cov if n > 1 + 1e-9 else math.inf

    @property
    def age(self) -> float:
        """How many steps ago its batches were made, in the mean of an endless run."""
        return self.decay / (1 - self.decay)


class MomentAverage:
    """SNR = sum a S / c over sum a T / c, with exponential weights a and c the scale of each batch's squared gradient.

    Divided by their scale, batches weigh alike whether gradients shrink or grow, and no outlier outweighs the others.
    c is what the batches before predicted, so that a batch is weighed without a look at itself, unless its own size
    |S| + T is more than `STABLE` times off: then it is that size over or times `STABLE`. A ratio of means is biased by
    the order of one batch's noise over their number, a mean of ratios by that noise itself.

    The longest average whose ratio lies within `APART` errors of all shorter ones is taken (Lepski's rule): all of
    memory while the ratio stands, the last two or three batches after it has moved. A batch without a gradient says
    nothing, and changes nothing.

    Args:
        decay: how much of the longest average is kept from one batch to the next, in [0, 1); 0 uses each batch alone.
    """

    def __init__(self, decay: float) -> None:
        self._averages = [_Average(each) for each in (*(each for each in SHORTER if each < decay), decay)]
        self._count = self._n = 0
        self._predicted = 0.0
        self.scale = 0.0
        """The scale c of the last batch's squared gradient."""

    def add(self, batch: Moments) -> None:
        """Take in one batch."""
        self._n = batch.n
        if not batch.has_gradient:
            return
        own = abs(batch.signal2) + abs(batch.trace_cov)
        self.scale = min(max(self._predicted, own / STABLE), own * STABLE) if self._count else own
        self._predicted = SCALE_MEMORY * self.scale + (1 - SCALE_MEMORY) * own
        self._count += 1
        for average in self._averages:
            average.add(batch.signal2 / self.scale, batch.trace_cov / self.scale, batch.spared / self.scale)

    @property
    def _taken(self) -> int:
        """The place of the average that is taken."""
        last = len(self._averages) - 1
        if self._count < 3 or not all(average.sums[2] > 0 for average in self._averages):
            return last
        ratios, errors = zip(*((average.ratio, average.error) for average in self._averages), strict=True)
        for longer in range(last, 0, -1):
            # The error of the difference: the longer average is that of all batches, the shorter of some of them.
            if all(
                abs(ratios[longer] - ratios[k]) <= APART * math.sqrt(max(errors[k] ** 2 - errors[longer] ** 2, 0.0))
                for k in range(longer)
            ):
                return longer
        return 0

    @property
    def moments(self) -> Moments:
        """Signal and noise in the scale of the last batch that had a gradient, with the N of the last; 0 before it.

        Raises:
            ValueError: there was no batch yet.
        """
        if not self._n:
            raise ValueError("no step has been taken yet.")
        if not self._count:
            return Moments(0.0, 0.0, self._n)
        weight, signal2, trace_cov, spared, *_ = self._averages[self._taken].sums
        unit = self.scale / weight
        return Moments(signal2 * unit, trace_cov * unit, self._n, spared * unit)

    def signal_share(self, debiased: bool = True) -> float:
        """The part S / (S + T/N) of the batch gradient's squared norm that is signal: the factor of theorem 4.

        Args:
            debiased: take the unbiased S, cut at 0; else S + T/N, the expectation of ||g||^2, in its place.
        """
        moments = self.moments
        noise = moments.trace_cov / moments.n
        signal2 = max(moments.signal2 if debiased else moments.signal2 + noise, 0.0)
        return signal2 / (signal2 + max(noise, 0.0)) if signal2 > 0 else 0.0  # 1 where noise is negative by chance

    def snr_interval(self, z: float) -> Interval:
        """The interval that `SNRSchedule.snr_interval` describes."""
        if self._count < 3 or not self._averages[-1].decay or not all(each.sums[2] > 0 for each in self._averages):
            return Interval(math.nan, math.nan)
        taken = self._taken
        average = self._averages[taken]
        margin = CHOSEN * _student(z, average.batches - 1) * average.error
        drift = 0.0
        if len(self._averages) > 1:
            other = self._averages[taken - 1 if taken else 1]
            drift = (other.ratio - average.ratio) / (average.age - other.age) * average.age * z / 1.96
        low, high = average.ratio - margin + min(drift, 0.0), average.ratio + margin + max(drift, 0.0)
        return Interval(max(low, 0.0), max(high, 0.0))

    def state_dict(self) -> dict[str, Any]:
        """The averages as plain numbers."""
        numbers = {"count": self._count, "n": self._n, "predicted": self._predicted, "scale": self.scale}
        return numbers | {"sums": [list(average.sums) for average in self._averages]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        if len(state["sums"]) != len(self._averages):
            raise KeyError("sums of as many averages")
        for average, sums in zip(self._averages, state["sums"], strict=True):
            average.sums = list(sums)
        self._count, self._n = state["count"], state["n"]
        self._predicted, self.scale = state["predicted"], state["scale"]


def _student(z: float, df: float) -> float:
    """Student's t that is as rare as z standard errors of a normal variable; expanded in 1 / df (A & S 26.7.5)."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / df**power for power, term in enumerate(terms, start=1))
