"""Rules of others: the KL-adaptive rate, and the decay when outputs grow."""

import pytest
import torch

from oblrpo.estimators import Moments, SNRSchedule
from oblrpo.tables.algorithms import refusal
from tests.estimators.nats import change_of

BATCH = Moments(signal2=1.0, trace_cov=1.0, n=4)


def schedule_of(mode, rate=1e-3, **settings):
    return SNRSchedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate), mode, **settings)


def update(schedule, kl=0.0):
    """One update that moved the policy so far; returns the rate it was made at."""
    schedule.step(BATCH, mean_length=10.0)
    (rate,) = schedule.learning_rates
    schedule.optimizer.step()
    schedule.limit_step(lambda: change_of(kl).expand(4))
    return rate


def test_the_rate_follows_the_kl():
    schedule = schedule_of("kl", kl=0.02)
    rates = [update(schedule, kl) for kl in (0.001, 0.009, 0.011, 0.039, 0.041, 5.0, 0.0, 0.02)]
    expected = [1, 1.5, 1.5**2, 1.5**2, 1.5**2, 1.5, 1, 1]  # the first rate, then what each KL made of it
    assert rates == pytest.approx([1e-3 * each for each in expected])


def test_the_rate_stays_within_bounds():
    low, high = schedule_of("kl", rate=1.2e-9, kl=0.02), schedule_of("kl", rate=0.9, kl=0.02)
    for _ in range(3):
        lowest, highest = update(low, 1.0), update(high, 1e-6)
    assert (lowest, highest) == pytest.approx((1e-9, 1.0))


@pytest.mark.parametrize("mode", ["kl", "auto"])
def test_a_rate_to_start_from_is_needed(mode):
    with pytest.raises(ValueError, match=f"schedule '{mode}' needs a learning_rate above 0"):
        schedule_of(mode, rate=0.0).step(BATCH)
    assert "but Prodigy chooses its own" in refusal(mode, "Prodigy", 1.0)
    assert not refusal(mode, "AdamW", 1e-6)
    assert not refusal("off", "Prodigy", 0.0)


def test_auto_refuses_long_momentum():
    """What noise has done goes on one way; 0.9 and 0.95 are in use."""
    p = torch.nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"momentum of 0\.99"):
        SNRSchedule(torch.optim.AdamW([p], lr=0.1, betas=(0.99, 0.999)), "auto")
    with pytest.raises(ValueError, match="momentum of 1"):
        SNRSchedule(torch.optim.SGD([p], lr=0.1, momentum=1.0), "auto")
    SNRSchedule(torch.optim.SGD([p], lr=0.1, momentum=0.95), "auto")
    SNRSchedule(torch.optim.AdamW([p], lr=0.1, betas=(0.99, 0.999)), "kl")
