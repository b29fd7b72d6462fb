"""N SNR over steps, on sequences whose N SNR is known: while it stands, while gradients shrink, and while it moves."""

import math

import pytest
import torch

from oblrpo.estimators import Moments, SNRSchedule
from oblrpo.estimators.averages import MomentAverage

D, STEPS, SEEDS = 100, 60, 60
MOVE = 29
"""The last step before all that changes; it changes for ten steps."""


def course(first, last, power=1.0):
    """A value of every step: the first, the last, and in between ten equal parts (of logarithms with power None)."""
    parts = [min(max((step - MOVE) / 10, 0.0), 1.0) for step in range(STEPS)]
    return [first + (last - first) * part if power else first * (last / first) ** part for part in parts]


STAYS, FALLS, RISES = course(1.0, 1.0), course(1.0, 1e-3, None), course(1.0, 1e3, None)
SEQUENCES = {
    "0.5": (STAYS, course(0.5, 0.5)),
    "0": (STAYS, course(0.0, 0.0)),
    "5": (STAYS, course(5.0, 5.0)),
    "0.5, squared gradients fall by 1e6": (FALLS, course(0.5, 0.5)),
    "0.5, squared gradients rise by 1e6": (RISES, course(0.5, 0.5)),
    "5 to 0": (STAYS, course(5.0, 0.0)),
    "5 to 0, squared gradients fall by 1e6": (FALLS, course(5.0, 0.0)),
}


def batches(N, scale_T, n_snr_T, seeds=SEEDS):
    """The moments of every seed and step: gradients of N prompts are normal in D dimensions, with tr H = scale^2."""
    generator, found = torch.Generator().manual_seed(1), []
    for scale, n_snr in zip(scale_T, n_snr_T, strict=True):
        g_RND = torch.randn(seeds, N, D, generator=generator, dtype=torch.float64) / math.sqrt(D)
        g_RND[..., 0] += math.sqrt(n_snr / N)
        norm2_R, mean_R = (scale * g_RND).square().sum(-1).mean(1), (scale * g_RND).mean(1).square().sum(-1)
        found.append(torch.stack([(N * mean_R - norm2_R) / (N - 1), N / (N - 1) * (norm2_R - mean_R)], -1))
    return [[Moments(S, T, N) for S, T in run] for run in torch.stack(found, 1).tolist()]


def schedule_of(ema=0.97):
    return SNRSchedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), "off", ema=ema)


def n_snr_of(schedule):
    """Not cut at 0."""
    return schedule.smoothed.n * schedule.smoothed.signal2 / schedule.smoothed.trace_cov


def n_snr_after(run):
    schedule = schedule_of()
    for batch in run:
        schedule.step(batch)
    return n_snr_of(schedule)


@pytest.mark.parametrize("N", [2, 8, 32])
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_the_mean_is_the_truth_and_the_interval_covers_it(sequence, N):
    """At the end and ten steps after the move, when 0.4 % of what moved may be left; in nine of ten (seed, step)."""
    scale_T, n_snr_T = SEQUENCES[sequence]
    found_TR, covered = [[] for _ in range(STEPS)], []
    for run in batches(N, scale_T, n_snr_T):
        schedule = schedule_of()
        for step, batch in enumerate(run):
            schedule.step(batch)
            found_TR[step].append(n_snr_of(schedule))
            if step >= 2:
                low, high = schedule.snr_interval()
                covered.append(low * N <= n_snr_T[step] <= high * N)
    for step in (MOVE + 20, STEPS - 1):
        found_R = torch.tensor(found_TR[step])
        error = float(found_R.std()) / math.sqrt(SEEDS) * 3 + 0.004 * abs(n_snr_T[0] - n_snr_T[-1])
        assert float(found_R.mean()) == pytest.approx(n_snr_T[step], abs=error)
    assert sum(covered) / len(covered) >= 0.9


def test_the_unit_of_rewards_does_not_matter():
    """Nor does it what a seed's whole run is multiplied by; powers of 2 round nothing."""
    for run in batches(8, *SEQUENCES["5 to 0"], seeds=3):
        found = []
        for unit in (1.0, 2.0**-60, 1e-9, 1e12):
            schedule = schedule_of()
            for batch in run:
                schedule.step(Moments(unit * batch.signal2, unit * batch.trace_cov, batch.n))
            found.append((schedule.smoothed.n_snr, *schedule.snr_interval()))
        assert found[1] == found[0]
        for other in found[2:]:
            assert other == pytest.approx(found[0], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("grows", [0.5, 2.0])
def test_batches_of_another_scale_each_change_little(grows):
    """Each by twice the one before it, all by 1e9: less than the interval is wide."""
    for run in batches(8, STAYS, course(1.0, 1.0), seeds=10):
        scaled = [Moments(grows**t * b.signal2, grows**t * b.trace_cov, b.n) for t, b in enumerate(run[:30])]
        schedule = schedule_of()
        for batch in run[:30]:
            schedule.step(batch)
        low, high = schedule.snr_interval()
        assert abs(n_snr_after(scaled) - n_snr_of(schedule)) < 8 * (high - low)


def test_a_batch_without_a_gradient_says_nothing():
    """Thirty of them: a service that is down."""
    (run,) = batches(8, STAYS, course(0.5, 0.5), seeds=1)
    schedule = schedule_of()
    for batch in run:
        schedule.step(batch)
    before = schedule.average.state_dict(), schedule.smoothed, schedule.snr_interval()
    for _ in range(30):
        assert schedule.step(Moments(0.0, 0.0, 8)) == 0
    assert (schedule.average.state_dict(), schedule.smoothed, schedule.snr_interval()) == before


@pytest.mark.parametrize("size", [1e-6, 1e6])
@pytest.mark.parametrize("own", [0.0, 5.0])
def test_one_outlier_moves_it_by_less_than_its_interval(size, own):
    """A batch a million times larger, or smaller, with an N SNR of its own: than the wider before and after."""
    outliers = batches(8, [size], [own], seeds=20)
    for run, (outlier,) in zip(batches(8, STAYS, course(0.5, 0.5), seeds=20), outliers, strict=True):
        schedule = schedule_of()
        for batch in run[:30]:
            schedule.step(batch)
        (low, high), before = schedule.snr_interval(), n_snr_of(schedule)
        schedule.step(outlier)
        after = schedule.snr_interval()
        assert abs(n_snr_of(schedule) - before) < 8 * max(high - low, after.high - after.low)


@pytest.mark.parametrize("sequence", ["5 to 0", "5 to 0, squared gradients fall by 1e6"])
def test_what_a_signal_was_is_forgotten_once_it_has_gone(sequence):
    """Of one run, too: at its last step a tenth is left of 5, and five steps later less than a tenth of that."""
    runs = batches(32, *SEQUENCES[sequence], seeds=20)
    for steps, most in ((MOVE + 11, 1.0), (MOVE + 16, 0.5)):
        assert max(n_snr_after(run[:steps]) for run in runs) < most


def test_prompts_without_noise_have_no_interval():
    """Whose gradients are all alike: N SNR is infinite."""
    schedule = schedule_of()
    for _ in range(4):
        schedule.step(Moments(1.0, 0.0, 4))
    assert schedule.smoothed.n_snr == math.inf
    assert all(math.isnan(bound) for bound in schedule.snr_interval())


def test_where_it_left_off():
    (run,) = batches(8, *SEQUENCES["5 to 0"], seeds=1)
    first, second = schedule_of(), schedule_of()
    for batch in run[:40]:
        first.step(batch)
    second.load_state_dict(first.state_dict())
    for batch in run[40:]:
        first.step(batch)
        second.step(batch)
    assert first.state_dict() == second.state_dict()
    assert first.smoothed == second.smoothed


def test_before_the_first_gradient_there_is_neither_signal_nor_noise():
    """As in the callback for TRL's own trainers, whose first batch may be one in which all rewards agree."""
    average = MomentAverage(0.9)
    average.add(Moments(0.0, 0.0, 4))
    assert (average.moments.n_snr, average.moments.n, average.signal_share()) == (0.0, 4, 0.0)
    average.add(Moments(1.0, 2.0, 4))
    assert average.moments.n_snr == 2.0


def test_two_averages_are_enough_for_the_interval_to_reach_as_far_as_the_ratio_has_moved():
    """A rising ratio: the interval's upper side is longer by what the shorter average is ahead."""
    average = MomentAverage(0.6)
    assert len(average._averages) == 2
    for step in range(12):
        average.add(Moments(signal2=1.0 + 0.1 * step, trace_cov=50.0 + (-1) ** step, n=8))
    shorter, longer = average._averages
    taken = average._averages[average._taken]
    low, high = average.snr_interval(1.96)
    assert shorter.ratio > longer.ratio
    drift = (shorter.ratio - longer.ratio) / (longer.age - shorter.age) * taken.age
    assert high - taken.ratio == pytest.approx(taken.ratio - low + drift, rel=1e-9)
