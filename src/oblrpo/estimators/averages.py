"""Signal and noise averaged over steps: one batch alone says little about either."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from oblrpo.estimators.moments import Moments


class Interval(NamedTuple):
    """The bounds of an interval for a signal-to-noise ratio."""

    low: float
    high: float


class MomentAverage:
    """Exponential averages of the signal S and the noise T, apart and bias-corrected; their ratio is taken last.

    Args:
        decay: how much of an average is kept from one batch to the next, in [0, 1); 0 uses each batch alone.
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self._count = self._n = 0
        self._signal2 = self._signal4 = self._trace_cov = self._weight2 = 0.0

    _STATE = ("count", "signal2", "signal4", "trace_cov", "weight2", "n")

    def add(self, batch: Moments) -> None:
        """Take in one batch."""
        keep, new = self.decay, 1 - self.decay
        self._count += 1
        self._signal2 = keep * self._signal2 + new * batch.signal2
        self._signal4 = keep * self._signal4 + new * batch.signal2**2
        self._trace_cov = keep * self._trace_cov + new * batch.trace_cov
        self._weight2 = keep**2 * self._weight2 + new**2
        self._n = batch.n

    @property
    def moments(self) -> Moments:
        """The averages, with the N of the latest batch; an error before the first."""
        if not self._count:
            raise ValueError("no step has been taken yet.")
        correction = 1 - self.decay**self._count
        return Moments(self._signal2 / correction, self._trace_cov / correction, self._n)

    def signal_share(self, debiased: bool = True) -> float:
        """The part S / (S + T/N) of the batch gradient's squared norm that is signal: the factor of theorem 4.

        Args:
            debiased: take the unbiased S, cut at 0; else S + T/N, the expectation of ||g||^2, in its place.
        """
        moments = self.moments
        noise = moments.trace_cov / moments.n
        signal2 = max(moments.signal2 if debiased else moments.signal2 + noise, 0.0)
        return signal2 / (signal2 + max(noise, 0.0)) if signal2 > 0 else 0.0  # 1 where noise is negative by chance

    @property
    def signal2_error(self) -> float:
        """Standard error of the averaged signal, from its spread over steps; NaN before the third, and for decay 0."""
        if self._count < 3 or not self.decay:
            return math.nan
        correction = 1 - self.decay**self._count
        weight2 = self._weight2 / correction**2
        spread = max(self._signal4 / correction - self.moments.signal2**2, 0.0)
        return math.sqrt(spread * weight2 / (1 - weight2))

    def snr_interval(self, z: float) -> Interval:
        """The interval that `SNRSchedule.snr_interval` describes."""
        if not self._count:
            return Interval(math.nan, math.nan)
        moments = self.moments
        bounds = (moments.signal2 + sign * z * self.signal2_error for sign in (-1, 1))
        return Interval(*(Moments(bound, moments.trace_cov, moments.n).snr for bound in bounds))

    def state_dict(self) -> dict[str, Any]:
        """The averages as plain numbers."""
        return {key: getattr(self, f"_{key}") for key in self._STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        for key in self._STATE:
            setattr(self, f"_{key}", state[key])
