"""N SNR over steps, on sequences whose N SNR is known: while it stands, while gradients shrink, and while it moves."""

import json
import math

import pytest
import torch

from oblrpo.estimators import Moments, SNRSchedule
from oblrpo.estimators.averages import APART, BEYOND, MomentAverage, _level, _student, _weights

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


def normal(shape, generator):
    """Of noise whose squared length hardly differs from prompt to prompt."""
    return torch.ones(shape, dtype=torch.float64)


def rare(shape, generator):
    """One prompt in 50 has 30 times the noise."""
    return torch.where(torch.rand(shape, generator=generator) < 0.02, 30.0, 1.0).double() / math.sqrt(0.98 + 0.02 * 900)


def student(df):
    """Noise of Student's t."""

    def lengths(shape, generator):
        chi2 = 2 * torch._standard_gamma(torch.full(shape, df / 2, dtype=torch.float64), generator)
        return torch.sqrt((df - 2) / chi2)

    return lengths


def lognormal(shape, generator):
    """Of noise whose length has a standard deviation of 1 in logarithms."""
    return torch.randn(shape, generator=generator, dtype=torch.float64).exp() / math.e


def by_prompt(g_RND):
    """S and T of batches, (R, 2), from the norms of all their prompts' gradients."""
    N, norm2_R, mean_R = g_RND.shape[1], g_RND.square().sum(-1).mean(1), g_RND.mean(1).square().sum(-1)
    return torch.stack([(N * mean_R - norm2_R) / (N - 1), N / (N - 1) * (norm2_R - mean_R)], -1)


def by_halves(g_RND):
    """The same from the sums over every second prompt and over the others."""
    N, mean_R = g_RND.shape[1], g_RND.mean(1).square().sum(-1)
    signal2_R = 4 * (g_RND[:, ::2].sum(1) * g_RND[:, 1::2].sum(1)).sum(-1) / N**2
    return torch.stack([signal2_R, N * (mean_R - signal2_R)], -1)


def batches(N, scale_T, n_snr_T, seeds=SEEDS, lengths=normal, seed=1, moments=by_prompt):
    """The moments of every seed and step: of N prompts in D dimensions, with tr H = scale^2; noise is normal x length.

    The lengths' squares have the mean 1.
    """
    generator, found = torch.Generator().manual_seed(seed), []
    for scale, n_snr in zip(scale_T, n_snr_T, strict=True):
        g_RND = torch.randn(seeds, N, D, generator=generator, dtype=torch.float64) / math.sqrt(D)
        g_RND *= lengths((seeds, N), generator)[..., None]
        g_RND[..., 0] += math.sqrt(n_snr / N)
        found.append(moments(scale * g_RND))
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


@pytest.mark.parametrize(
    ("N", "moments"), [(2, by_prompt), (8, by_prompt), (32, by_prompt), (8, by_halves), (32, by_halves)]
)
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_the_mean_is_the_truth_and_the_interval_covers_it(sequence, N, moments):
    """At the end and ten steps after the move, when 0.4 % of what moved may be left; in nine of ten (seed, step)."""
    scale_T, n_snr_T = SEQUENCES[sequence]
    found_TR, covered = [[] for _ in range(STEPS)], []
    for run in batches(N, scale_T, n_snr_T, moments=moments):
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


HEAVY = {
    "one prompt in 50 has 30 times the noise": (rare, 8, 0.1),
    "t(2.5)": (student(2.5), 8, 1.0),
    "t(2.5), 64 prompts": (student(2.5), 64, 1.0),
    "t(3), 2 prompts": (student(3.0), 2, 0.5),
    "lognormal": (lognormal, 8, 5.0),
}


@pytest.mark.parametrize("tails", HEAVY)
def test_rare_large_noise_counts_for_what_it_is(tails):
    """From half of the memory on: the interval covers in nine of ten, and the ratio is that of plain averages."""
    lengths, N, n_snr = HEAVY[tails]
    covered, shown, plain = [], [], []
    for run in batches(N, STAYS, course(n_snr, n_snr), lengths=lengths, seed=2):
        average = MomentAverage(0.97)
        for step, batch in enumerate(run):
            average.add(batch)
            low, high = average.snr_interval(1.96)
            if step >= STEPS // 2:
                covered.append(low * N <= n_snr <= high * N)
        shown.append(N * average.moments.signal2 / average.moments.trace_cov)
        a = [0.97 ** (STEPS - step) for step in range(STEPS)]
        signal2, trace_cov = (sum(map(math.prod, zip(a, each, strict=True))) for each in
                              ([batch.signal2 for batch in run], [batch.trace_cov for batch in run]))  # fmt: skip
        plain.append(N * signal2 / trace_cov)
    assert sum(covered) / len(covered) >= 0.9
    assert sum(shown) == pytest.approx(sum(plain), rel=0.12)


def test_a_batch_is_weighed_by_those_around_it():
    """Sizes that double, but for one; by hand. One of ten times its scale counts as all around it do."""
    sizes = [5.0, 10.0, 20.0, 400.0, 80.0, 160.0]
    middle = math.sqrt(20 * 80)  # of the four beside the ends, through which no line runs
    c = [middle, 10, math.sqrt(10 * 80), 40, math.sqrt(400 * 160), middle]
    assert [math.exp(_level([math.log(size) for size in sizes], t)) for t in range(6)] == pytest.approx(c)
    counts = [size / each for size, each in zip(sizes, c, strict=True)]
    counts[3] = counts[2] + 0.5 * counts[1] + 0.25 * counts[0] + counts[4] + 0.5 * counts[5]
    assert counts[3] < 400 / 40
    assert _weights(sizes, 0.5) == pytest.approx([count / size for count, size in zip(counts, sizes, strict=True)])


def test_a_trend_is_carried_on_by_what_lies_beyond_its_error():
    """Of the line by least squares: its slope, with a variance from what it leaves; both ends alike."""
    logs = torch.tensor([0.3, 1.0, 1.8, 3.2], dtype=torch.float64)
    t = torch.arange(4, dtype=torch.float64) - 1.5
    slope = float(t @ logs) / 5
    error2 = float((logs - logs.mean() - slope * t).square().sum()) / 2 / 5
    known = 1 - APART**2 * error2 / slope**2
    assert 0.3 < known < 0.95
    level = pytest.approx((1.0 + 1.8) / 2 + 2.5 * slope * known)
    assert _level([*logs.tolist(), 7.0], 4) == level
    assert _level([-7.0, *reversed(logs.tolist())], 0) == level
    assert _level([1.0, 1.0, 1.0, 1.0, 7.0], 4) == 1


def test_no_batch_is_weighed_by_a_look_at_itself():
    """Unless it counts for more than all others; whatever its place."""
    sizes = [1.0, 3.0, 2.0, 5.0, 4.0, 2.0, 3.0]
    for place in range(7):
        other = [size * (1.5 if t == place else 1) for t, size in enumerate(sizes)]
        assert _weights(other, 0.97)[place] == pytest.approx(_weights(sizes, 0.97)[place])


def test_scales_that_change_by_the_same_factor_are_foreseen():
    """All batches weigh alike, the newest too; fewer than five say nothing of a scale."""
    for factor in (0.25, 4.0):
        sizes = [factor**t for t in range(9)]
        for count in (5, 9):
            weights = _weights(sizes[:count], 0.9)
            assert [size * weight for size, weight in zip(sizes, weights, strict=False)] == pytest.approx([1] * count)
    assert _weights([1.0, 4.0, 16.0, 64.0], 0.9) == [1.0] * 4


def test_the_interval_by_hand():
    """One average of weights a: the error of a ratio R = sum a S / sum a T, Student's t, and noise not seen yet."""
    average, moments = MomentAverage(0.5), [(1.0, 9.0), (4.0, 10.0), (2.0, 15.0), (3.0, 10.0)]
    assert all(math.isnan(bound) for bound in average.snr_interval(1.5))
    for count, (signal2, trace_cov) in enumerate(moments, 1):
        average.add(Moments(signal2, trace_cov, 4))
        assert math.isnan(average.snr_interval(1.5).low) == (count < 3)
    a = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64) / 15
    S, T = torch.tensor(moments, dtype=torch.float64).T
    ratio, over = float(a @ S / (a @ T)), T / (a @ T) - 1
    n = float((a @ T) ** 2 / (a * T).square().sum())
    error = float((a * (S - ratio * T)).norm() / (a @ T)) * math.sqrt(n / (n - 1))
    margin = _student(1.5, n - 1) * error
    excess = float(a @ over**3 / (a @ over**2))
    assert excess > 0
    unseen = -math.log(math.erfc(1.5 / math.sqrt(2)))
    low = max(ratio - margin, 0) / (1 + unseen * BEYOND * excess * float(a @ a))
    assert average.snr_interval(1.5) == pytest.approx((low, ratio + margin))
    assert -math.log(math.erfc(1.959964 / math.sqrt(2))) == pytest.approx(3, rel=0.002)  # the rule of three


def test_batches_are_remembered_until_a_hundredth_is_left_of_them():
    """.97^152 is the first power below .01; plain numbers."""
    average = MomentAverage(0.97)
    for step in range(200):
        average.add(Moments(1.0, 10.0 + step, 4))
    state = json.loads(json.dumps(average.state_dict()))
    assert [0.97**152 < 0.01 < 0.97**151, len(state["batches"])] == [True, 153]
    assert state["batches"][0] == [1.0, 57.0, 0.0]


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


def test_an_outlier_is_outlived():
    """Its N SNR is 5, theirs .5: two thirds of the ratio at first, a quarter 60 steps later; the interval tells."""
    (outlier,) = batches(8, [1e6], [5.0], seeds=1)
    for run in batches(8, course(1.0, 1.0) * 2, [0.5] * 120, seeds=5):
        average = MomentAverage(0.97)
        for step, batch in enumerate([*run[:30], *outlier, *run[31:95]]):
            average.add(batch)
            low, high = average.snr_interval(1.96)
            if step >= 30:
                assert low * 8 <= 0.5 <= high * 8
        assert 8 * average.moments.signal2 / average.moments.trace_cov < 0.5 + 0.25 * (8 * outlier[0].snr - 0.5)


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


@pytest.mark.parametrize("rise", [0.2, -0.2])
@pytest.mark.parametrize(("decay", "shorter"), [(0.6, 0.5), (0.9, 0.75)])
def test_the_interval_reaches_as_far_as_the_ratio_has_moved(decay, shorter, rise):
    """A ratio that moves: what S lies above R T in the next shorter average, it may again in as many steps.

    On the side that it moves to, and at as many of its errors as of the margin's.
    """
    average, signals = MomentAverage(decay), [20 + rise * step + 2 * (-1, 1, 1, -1)[step % 4] for step in range(10)]
    for signal2 in signals:
        average.add(Moments(signal2, 40.0, 4))
    weights = torch.tensor(_weights([signal2 + 40 for signal2 in signals], decay), dtype=torch.float64)
    S, T = torch.tensor(signals, dtype=torch.float64) * weights, 40 * weights

    def mean(values, decay):
        a = decay ** torch.arange(9, -1, -1, dtype=torch.float64)
        return float(a @ values / a.sum())

    ratio = mean(S, decay) / mean(T, decay)
    assert average.moments.snr == pytest.approx(ratio)
    younger = decay / (1 - decay) - shorter / (1 - shorter)
    drift = mean(S - ratio * T, shorter) / mean(T, decay) / younger * decay / (1 - decay)
    assert (drift < 0) == (rise < 0 and decay == 0.9)  # the last four steps of the shorter memory rise in any case
    n, error = average._taken.batches, average._taken.error
    for z in (1.96, 0.5):
        low, high = average.snr_interval(z)
        low *= 1 - math.log(math.erfc(z / math.sqrt(2))) * average._taken.rare
        margin, moved = _student(z, n - 1) * error, drift * z / 1.96
        assert (low, high) == pytest.approx((ratio - margin + min(moved, 0), ratio + margin + max(moved, 0)))
        assert low > 0


@pytest.mark.parametrize(
    ("z", "df", "t"),
    [(1.0, 4, 1.141627), (1.0, 5, 1.110507), (1.0, 10, 1.052562), (1.959964, 30, 2.042272)],
)
def test_student_s_t_is_that_of_the_tables(z, df, t):
    """What the expansion leaves is below 0.03 / df^4 at one error, and 1.7 / df^4 at two."""
    assert _student(z, df) == pytest.approx(t, abs=(0.03 if z == 1 else 1.7) / df**4 + 1e-6)


def test_the_scale_of_a_batch_of_which_the_norm_alone_is_known():
    """||g||^2 is S + T / N in the mean: a batch of three times that has three times the scale."""
    average = MomentAverage(0.9)
    assert average.scale_of(1.0) == 0
    for signal2, trace_cov in ((1.0, 8.0), (3.0, 24.0)):
        average.add(Moments(signal2, trace_cov, 4))
    moments = average.moments
    assert average.scale == 27
    mean = moments.signal2 + moments.trace_cov / 4
    assert average.scale_of(3 * mean) == pytest.approx(3 * (moments.signal2 + moments.trace_cov))
    assert average.scale_of(0.0) == 27  # nothing is known of it
