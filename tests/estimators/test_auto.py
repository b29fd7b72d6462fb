"""The measured rate on objectives whose gradient, curvature and KL are known exactly."""

import math

import pytest
import torch

from oblrpo.estimators import Moments, SNRSchedule

BATCH = Moments(signal2=1.0, trace_cov=1.0, n=4)  # `auto` does not look at it
SLOPE = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
SIGNS_SD = torch.tensor([[1, 1, 1], [1, 1, -1], [1, -1, 1], [1, -1, -1]], dtype=torch.float64)
REWARDS = torch.tensor([0.0, 2.0])  # range 2


def adamw(lr):
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)


def sgd(lr, **settings):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **settings)


class Slope:
    """J = slope . theta in two parameters; log pi of output s changes by scores_s . change of theta, exactly.

    The scores average to Fisher's information 1, so that KL = ||change of theta||^2 / 2.
    """

    def __init__(self, make_optimizer, scores_SD=SIGNS_SD, **settings):
        self.parameters = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (2, 1)]
        self.optimizer, self.scores_SD = make_optimizer(self.parameters), scores_SD
        self.schedule = SNRSchedule(self.optimizer, "auto", **{"safety": 0.25, "memory": 0.9} | settings)
        self.rates, self.changes = [], []

    @property
    def theta(self):
        return torch.cat([p.detach() for p in self.parameters]).clone()

    def set_gradient(self, gradient):
        for p, g in zip(self.parameters, gradient.split([2, 1]), strict=True):
            p.grad = g.clone()

    def step(self, slope=SLOPE, skip=False):
        self.set_gradient(-slope)  # of the loss
        self.schedule.step(BATCH)
        self.rates.append(self.schedule.learning_rates[0])
        if skip:
            self.schedule.restore()
            return
        before = self.theta
        self.optimizer.step()
        self.changes.append(self.theta - before)
        self.schedule.observe(self.change_S(), REWARDS)

    def change_S(self):
        return self.scores_SD @ self.changes[-1]

    @property
    def measured(self):
        return self.schedule.measured


# Changes of log pi are within three times their root mean square: nothing is clipped.


@pytest.mark.parametrize(
    "make", [sgd(0.01), adamw(0.01), sgd(0.01, momentum=0.9), sgd(0.01, nesterov=True, momentum=0.5)]
)
def test_signal_and_kappa_are_those_of_the_update_that_was_made(make):
    """Signal = next gradient . update / rate, kappa = KL / rate^2; here without averaging."""
    run = Slope(make, memory=0.0)
    for t in range(4):
        slope = SLOPE * (1 + 0.3 * t)
        run.step(slope)
        if t:
            u = run.changes[-2] / run.rates[-2]
            assert run.measured.signal == pytest.approx(float(slope @ u), rel=1e-9)
            assert run.measured.kappa == pytest.approx(float(u @ u) / 2, rel=1e-9)
        assert run.measured.kl == pytest.approx(float(run.changes[-1].square().sum() / 2), rel=1e-9)


def test_averages_are_bias_corrected():
    run, signals, kappas = Slope(sgd(0.01), memory=0.8), [], []
    for t in range(4):
        run.step(SLOPE * (1 + t))
        kappas.append(float((run.changes[-1] / run.rates[-1]).square().sum()) / 2)
        if t:
            signals.append(float(SLOPE @ SLOPE) * t * (1 + t))
    weights = [0.8**age for age in (2, 1, 0)]
    assert run.measured.signal == pytest.approx(sum(map(float.__mul__, weights, signals)) / sum(weights))
    assert run.measured.kappa == pytest.approx(sum(map(float.__mul__, weights, kappas[:3])) / sum(weights))


@pytest.mark.parametrize("start", [1e-6, 0.04, 20.0])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_it_settles_at_the_rate_that_maximises_the_bound(make, start):
    """eta* = signal / (2 safety range kappa), and stays there; AdamW's update at rate 1 is the sign of the slope."""
    run = Slope(make(start), safety=0.5, free_kl=0.0)
    for _ in range(60):
        run.step()
    direction = SLOPE if make is sgd else SLOPE.sign()
    best = float(SLOPE @ direction) / (2 * 0.5 * 2 * float(direction.square().sum()) / 2)
    assert run.rates[-3:] == pytest.approx([best] * 3, rel=1e-5)


def test_growth_and_shrinkage_are_bounded_step_by_step():
    run = Slope(sgd(1e-3), growth=1.3, shrinkage=4.0, free_kl=0.0)
    for _ in range(6):
        run.step()
    assert run.rates == pytest.approx([1e-3 * 1.3**n for n in range(6)])
    run = Slope(sgd(1e3), growth=1.3, shrinkage=4.0, free_kl=0.0, safety=1.0)
    for _ in range(4):
        run.step()
    assert run.rates == pytest.approx([1e3 / 4**n for n in range(4)])


def test_a_signal_that_points_back_shrinks_the_rate():
    run = Slope(sgd(0.1), memory=0.0, shrinkage=2.0, free_kl=1.0)
    run.step()
    run.step(-SLOPE)
    assert run.measured.signal == pytest.approx(-float(SLOPE @ SLOPE))
    assert run.rates[1] == pytest.approx(0.05)


def test_growth_is_free_up_to_the_free_kl():
    """From 1e-9 in one step to the rate whose predicted KL is free_kl; eta* lies far above it."""
    run = Slope(sgd(1e-9), free_kl=1e-4, growth=1.5, safety=1e-3)
    for _ in range(3):
        run.step()
    free = math.sqrt(1e-4 / (float(SLOPE @ SLOPE) / 2))
    assert run.rates == pytest.approx([1e-9, free, 1.5 * free], rel=1e-6)


def test_where_free_growth_would_overshoot_the_best_rate_is_taken():
    run = Slope(sgd(1e-9), free_kl=10.0, safety=0.5)
    run.step()
    run.step()
    assert run.rates[1] == pytest.approx(1.0, rel=1e-6)  # signal / (2 * 0.5 * 2 * signal / 2)


@pytest.mark.parametrize("make", [sgd(0.01), adamw(0.01)])
def test_a_skipped_step_leaves_the_measurements_alone(make):
    """A gradient scaler left the update out: what it did not do is not measured; the next update is."""
    run = Slope(make, memory=0.5)
    for _ in range(3):
        run.step()
    run.step(skip=True)
    signal, kappa = run.measured.signal, run.measured._kappa_sum
    run.step(100 * SLOPE)  # no update lies between this gradient and the skipped one
    assert run.measured.signal == signal
    used = run.changes[-1] / run.rates[-1]
    assert run.measured._kappa_sum == pytest.approx(0.5 * kappa + 0.5 * float(used @ used) / 2)
    run.step()
    assert run.measured.signal != signal
    assert run.optimizer.param_groups[0]["lr"] == 0.01


def test_an_update_without_the_schedule_is_not_taken_for_its_own():
    """optimizer.step() after restore(): made at eta_0, not measured."""
    run = Slope(sgd(0.01), memory=0.0)
    run.step()
    run.step(skip=True)
    run.optimizer.step()
    signal = run.measured.signal
    run.step(5 * SLOPE)
    assert run.measured.signal == signal


def test_a_scheduler_scales_the_rate_and_the_measurements_know():
    """Half of eta_0: half of the measured rate is used, and signal and kappa are divided by what was used."""
    run = Slope(sgd(0.01), memory=0.0, free_kl=0.0)
    run.step()
    run.optimizer.param_groups[0]["lr"] = 0.005
    run.step()
    assert run.rates == pytest.approx([0.01, 0.0075])
    run.step()
    u = run.changes[-2] / run.rates[-2]
    assert run.measured.signal == pytest.approx(float(SLOPE @ u))
    assert run.measured.kappa == pytest.approx(float(u @ u) / 2)


def test_warmup_scales_the_rate_and_the_measurements_know():
    run = Slope(sgd(0.01), memory=0.0, warmup=4, free_kl=0.0)
    for _ in range(3):
        run.step()
    assert run.rates == pytest.approx([0.01 / 4, 0.015 * 2 / 4, 0.0225 * 3 / 4])
    assert run.measured.signal == pytest.approx(float(SLOPE @ SLOPE))
    assert run.measured.kappa == pytest.approx(float(SLOPE @ SLOPE) / 2)


def test_a_scheduler_may_start_at_zero():
    """The usual linear warm-up: its first rate is 0."""
    run = Slope(sgd(0.0))
    run.step()
    assert run.rates == [0.0]
    for t in range(1, 4):
        run.optimizer.param_groups[0]["lr"] = 0.01 * t
        run.step()
    assert all(0 < rate < 1 for rate in run.rates[1:])


def test_every_group_keeps_its_ratio_to_the_first():
    a, b = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.1}, {"params": [b], "lr": 0.3}])
    schedule = SNRSchedule(optimizer, "auto", free_kl=0.0)
    for _ in range(3):
        a.grad, b.grad = torch.full((1,), -0.1).double(), torch.full((1,), -0.1).double()
        schedule.step(BATCH)
        first, second = schedule.learning_rates
        assert second == pytest.approx(3 * first)
        optimizer.step()
        schedule.observe(torch.tensor([first * 0.1]), REWARDS)
    assert schedule.measured.signal == pytest.approx(0.01 + 0.03)


def test_parameters_without_a_gradient_do_not_matter():
    run = Slope(sgd(0.01), memory=0.0)
    idle = torch.nn.Parameter(torch.ones(5))
    run.optimizer.add_param_group({"params": [idle]})
    run.step()
    run.step()
    assert run.measured.signal == pytest.approx(float(SLOPE @ SLOPE))


def test_long_tails_are_clipped_at_three_times_the_root_mean_square():
    schedule = Slope(sgd(0.01)).schedule
    change_S = torch.zeros(100)
    change_S[7] = -5.0
    rms = 5 / 10
    assert schedule.observe(change_S, REWARDS) == pytest.approx((3 * rms) ** 2 / 100 / 2)


def test_the_range_is_that_of_all_rewards_seen():
    run = Slope(sgd(0.01))
    for rewards, widest in (([0.0, 0.5], 0.5), ([1.0, 1.0], 0.5), ([-1.0, 2.0], 3.0)):
        run.step()
        run.schedule.observe(run.change_S(), torch.tensor(rewards))
        assert run.measured._range == max(widest, 2.0)  # `step` has shown 2


def test_a_policy_that_does_not_move_lets_the_rate_grow():
    run = Slope(sgd(1e-3), scores_SD=torch.zeros(4, 3, dtype=torch.float64), growth=1.5)
    for _ in range(3):
        run.step()
    assert run.rates == pytest.approx([1e-3, 1.5e-3, 2.25e-3])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"safety": 0.0}, "safety > 0"),
        ({"safety": float("nan")}, "safety > 0"),
        ({"growth": 1.0}, "growth > 1"),
        ({"shrinkage": 0.5}, "shrinkage > 1 .* 0.5"),
        ({"free_kl": -1.0}, "free_kl >= 0"),
        ({"memory": 1.0}, r"memory must lie in \[0, 1\), got 1.0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Slope(sgd(0.1), **settings)


ACTIONS, PROMPTS, OUTPUTS = 8, 16, 4


def bandit_run(make, seed, steps=120):
    """Eight actions that succeed with probability 0.2 to 0.8, leave-one-out baseline. Rates, and the last J."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.nn.Parameter(torch.zeros(ACTIONS, dtype=torch.float64))
    success_A = torch.linspace(0.2, 0.8, ACTIONS, dtype=torch.float64)
    optimizer = make([logits])
    schedule = SNRSchedule(optimizer, "auto", safety=1.0, memory=0.9)
    rates = []
    for _ in range(steps):
        probability = logits.detach().softmax(0)
        index_PG = torch.multinomial(probability, PROMPTS * OUTPUTS, True, generator=generator).view(PROMPTS, OUTPUTS)
        chance_PG = torch.rand(PROMPTS, OUTPUTS, generator=generator, dtype=torch.float64)
        rewards_PG = (chance_PG < success_A[index_PG]).double()
        baseline_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (OUTPUTS - 1)
        scores = torch.eye(ACTIONS, dtype=torch.float64)[index_PG] - probability
        logits.grad = -((rewards_PG - baseline_PG)[..., None] * scores).mean((0, 1))
        schedule.step(BATCH)
        rates.append(schedule.learning_rates[0])
        optimizer.step()
        change_PG = (logits.detach().log_softmax(0) - probability.log())[index_PG]
        schedule.observe(change_PG.flatten(), rewards_PG)
    return rates, float(logits.detach().softmax(0) @ success_A)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_from_far_too_little_and_from_far_too_much_it_reaches_the_same_rate(make):
    """Geometric means over steps 10 to 20 of six runs; a first SGD step at 10 has a KL of about 1."""
    means = {}
    for start in (1e-7, 1e-1, 10.0) if make is sgd else (1e-7, 1e-1):
        rates, last = zip(*(bandit_run(make(start), seed) for seed in range(6)), strict=True)
        means[start] = torch.tensor(rates, dtype=torch.float64)[:, 10:20].log().mean().exp().item()
        assert min(last) > 0.7  # learned, from 0.5
    assert max(means.values()) < 2 * min(means.values())


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_policy_that_broke_is_refused(broken):
    schedule = SNRSchedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), "auto")
    with pytest.raises(ValueError, match="NaN or infinite after the update"):
        schedule.observe(torch.tensor([0.1, broken]), REWARDS)
