"""Signal and noise averaged over steps: the signal that is to be expected."""

import pytest
import torch

from oblrpo.estimators import Moments
from oblrpo.estimators.averages import MomentAverage


def averaged(signals, noise=4.0, ema=0.97):
    average = MomentAverage(ema)
    for signal2 in signals:
        average.add(Moments(signal2, noise, 4))
    return average


@pytest.mark.parametrize("signals", [[3.0, -1.0, 2.0, 0.5], [-3.0, 1.0, -2.0, -0.5], [-2.0, -2.001, -2.002, -1.999]])
def test_the_expected_signal_is_the_mean_of_the_posterior(signals):
    """Against the integral over S >= 0 of a normal density with the average's mean and error."""
    average = averaged(signals)
    mean, error = average.moments.signal2, average.signal2_error
    S = torch.linspace(0, max(mean, 0) + 12 * error, 2_000_001, dtype=torch.float64)
    if mean < -8 * error:  # almost all of the posterior lies within error^2 / mean
        S = torch.linspace(0, 40 * error**2 / -mean, 2_000_001, dtype=torch.float64)
    log_density = -((S - mean) ** 2) / (2 * error**2)
    density = (log_density - log_density.max()).exp()
    expected = float((S * density).sum() / density.sum())
    assert average.expected_share == pytest.approx(expected / (expected + 1.0), rel=1e-3)


def test_a_signal_that_is_certain_is_taken_as_it_is():
    assert averaged([2.0] * 5).expected_share == pytest.approx(2 / 3)
    assert averaged([-2.0] * 5).expected_share == pytest.approx(0.0, abs=1e-6)
    assert averaged([2.0, 1.0]).expected_share == averaged([2.0, 1.0]).signal_share()  # its error is not known yet
    assert averaged([2.0, 1.0, 4.0], ema=0.0).expected_share == pytest.approx(4 / 5)


def test_missing_evidence_is_not_evidence_of_nothing():
    """An average below 0 leaves some signal to be expected, and less the surer it is."""
    shares = [averaged([-1.0 - spread, -1.0 + spread, -1.0]).expected_share for spread in (0.1, 1.0, 10.0)]
    assert 0 < shares[0] < shares[1] < shares[2]
    assert averaged([-1.0, 1.0, -1.0]).signal_share() == 0.0
