import itertools
import math
import random
import statistics

import pytest

from oblrpo.compare.summary import Window, crossing, holm, paired, usable
from oblrpo.intervals import jackknife, mean, smooth, student_t, within

# 97.5 % points of Student's t as printed in tables (five figures; NIST/SEMATECH e-Handbook, 1.3.6.7.2)
TABLE = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 9: 2.262, 10: 2.228, 30: 2.042, 100: 1.984}


@pytest.mark.parametrize(("df", "t"), TABLE.items())
def test_quantiles_are_those_of_printed_tables(df, t):
    assert student_t(df) == pytest.approx(t, abs=5.1e-4)


def test_the_jackknife_of_a_mean_is_its_interval():
    values = [random.Random(7).gauss(3, 2) for _ in range(15)] + [random.Random(8).gauss(0, 1)]
    of_mean, found = mean(values), jackknife([[each] for each in values], statistics.fmean)
    assert (found.value, found.margin) == (pytest.approx(of_mean.value), pytest.approx(of_mean.margin))


def test_the_jackknife_covers_a_ratio_whatever_the_order_of_blocks():
    """Taken in turn, every group would have a block of either kind, and nothing would differ."""
    draw = random.Random(3)
    wide = []
    for _ in range(200):
        pairs = [[(draw.gauss(2, 1), draw.gauss(1, 0.2))] for _ in range(60)]
        found = jackknife(pairs, lambda part: sum(a for a, _ in part) / sum(b for _, b in part))
        wide.append(found.low <= 2 <= found.high)
    assert 0.9 <= statistics.fmean(wide) <= 0.99
    kinds = jackknife([[float(place >= 20)] for place in range(40)], statistics.fmean)
    assert kinds.margin > 0.1


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 8, 31, 200])
@pytest.mark.parametrize("t", [0.1, 1.0, 2.5, 12.0])
def test_probabilities_are_integrals_of_the_density(df, t):
    """Simpson's rule on Gamma((df + 1) / 2) / (sqrt(df pi) Gamma(df / 2)) (1 + t^2 / df)^(-(df + 1) / 2)."""
    scale = math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(df * math.pi)
    n = 20_000
    values = [scale * (1 + (t * i / n) ** 2 / df) ** (-(df + 1) / 2) for i in range(n + 1)]
    integral = (values[0] + values[-1] + 4 * sum(values[1::2]) + 2 * sum(values[2:-1:2])) * t / n / 3
    assert within(t, df) == pytest.approx(2 * integral, abs=1e-11)


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999, 1 - 1e-9])
@pytest.mark.parametrize("df", [1, 2, 7, 60])
def test_the_quantile_inverts_the_probability(df, share):
    assert within(student_t(df, share), df) == pytest.approx(share, abs=1e-12)


def test_no_seed_and_no_share_are_refused():
    with pytest.raises(ValueError, match="df is 0"):
        student_t(0)
    with pytest.raises(ValueError, match="share is 1"):
        student_t(3, 1)


def test_intervals_hold_the_mean_as_often_as_they_say():
    rng = random.Random(0)
    for n in (2, 3, 5):
        held = 0
        for _ in range(2000):
            found = mean([rng.gauss(0.3, 0.1) for _ in range(n)])
            held += abs(found.value - 0.3) <= found.margin
        assert 0.935 < held / 2000 < 0.965


def test_a_mean_of_one_seed_has_no_interval():
    assert mean([0.5]).margin is None
    assert mean([0.5, 0.5]).margin == 0


def test_the_paired_test_by_hand():
    """Differences 1, 2, 3: mean 2, s = 1, t = 2 sqrt(3); for two degrees of freedom p = 1 - t / sqrt(2 + t^2)."""
    found = paired({0: 2.0, 1: 4.0, 2: 6.0, 9: 100.0}, {2: 3.0, 0: 1.0, 1: 2.0, 7: -50.0})
    t = 2 * math.sqrt(3)
    assert found.difference.n == 3
    assert found.difference.value == 2
    assert found.difference.margin == pytest.approx(4.302653 / math.sqrt(3), abs=1e-5)
    assert found.p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert paired({0: 1.0}, {1: 1.0}) is None
    assert paired({0: 1.0}, {0: 0.5}).p is None
    assert paired({0: 1.0, 1: 2.0}, {0: 0.5, 1: 1.5}).p is None


def test_pairing_by_seed_sees_what_pooling_hides():
    better = {seed: seed + 0.1 + 0.001 * (seed % 3) for seed in range(5)}
    plain = {seed: float(seed) for seed in range(5)}
    assert paired(better, plain).p < 1e-6
    pooled = statistics.stdev(better.values()) / 5**0.5
    assert abs(paired(better, plain).difference.value) < pooled


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, None, 0.6]) == pytest.approx([1.0, None, 1.0])
    assert holm([]) == []


def test_smoothing_keeps_lines_and_ends():
    line = [2.0 * x + 1 for x in range(9)]
    for window in (1, 3, 5, 21):
        assert smooth(line, window) == pytest.approx(line)
    assert smooth([0.0, 3.0, 0.0, 0.0], 3) == pytest.approx([0, 1, 1, 0])


def test_crossing_is_the_first_and_between_points():
    assert crossing([0, 100, 200], [0.2, 0.4, 0.8], 0.6) == pytest.approx(150)
    assert crossing([0, 100, 200, 300], [0.0, 0.8, 0.0, 0.9], 0.4) == pytest.approx(50)
    assert crossing([0, 100], [0.5, 0.1], 0.5) == 0
    assert crossing([0, 100], [0.1, 0.2], 0.3) == math.inf


def test_the_window_of_usable_rates():
    """0.9 of 1.0; between 1 (0.8) and 10 (1.0) the level lies half way in the logarithm, above 100 (0.95) a tenth."""
    window = usable([1, 10, 100, 1000], [0.8, 1.0, 0.95, 0.45])
    assert window.low == pytest.approx(10**0.5)
    assert window.high == pytest.approx(10**2.1)
    assert (window.open_low, window.open_high) == (False, False)


def test_a_window_around_a_rate_that_is_not_the_highest():
    """As where the highest was reached by runs of which some diverged: 0.9 of 0.5 is crossed below, never above."""
    found = usable([1, 10, 100], [0.4, 0.5, 0.6], best=10)
    assert found.low == pytest.approx(10**0.5)
    assert (found.high, found.open_low, found.open_high) == (pytest.approx(100), False, True)


def test_a_window_ends_at_a_hole_and_says_where_the_grid_ends():
    assert usable([1, 10, 100, 1000], [0.95, 0.1, 1.0, 0.99]).low > 10
    found = usable([1, 10], [1.0, 0.99])
    assert found == Window(pytest.approx(1), pytest.approx(10), True, True)
    for finals in itertools.permutations([1.0, 0.5, 0.2]):
        found = usable([1, 10, 100], finals)
        best = [1, 10, 100][finals.index(1.0)]
        assert found.low <= best * (1 + 1e-12)
        assert found.high >= best * (1 - 1e-12)
        assert found.open_low == (best == 1)
        assert found.open_high == (best == 100)
