"""The measured rate on objectives whose gradient, curvature and KL are known exactly."""

import copy
import json
import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import SCHEDULES, Moments, SNRSchedule
from oblrpo.estimators.measured_rate import BEGIN, FIRST, NEW, TOO_FAR, TREND, UPDATE
from oblrpo.estimators.measuring import mean_kl
from tests.estimators.nats import quadratic

BATCH = Moments(signal2=2.0, trace_cov=8.0, n=4)
SLOPE = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
SIGNS_SD = torch.tensor([[1, 1, 1], [1, 1, -1], [1, -1, 1], [1, -1, -1]], dtype=torch.float64)
MEANT = 0.005
"""The nats of a step, as its limit (`kl`) or as the headroom of its rewards (`meant`), far from the limit; less than
`Slope` begins with, and without noise it only wants more."""


def adamw(lr):
    return lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0)


def sgd(lr, **settings):
    return lambda parameters: torch.optim.SGD(parameters, lr=lr, **settings)


def smoothed(roots):
    """Holt's double exponential smoothing of the logarithms, by hand: the level, and the logarithm of the trend."""
    level, trend = roots[0], 0.0
    for root in roots[1:]:
        before, predicted = level, level * math.exp(trend)
        level = predicted ** (1 - NEW) * root**NEW
        trend = (1 - TREND) * trend + TREND * math.log(level / before)
    return level, trend


class Straight:
    """J = slope . theta in two parameters; output s is moved by (scores_s . change of theta)^2 / 2 nats, exactly.

    The scores average to Fisher's information 1, so that KL = ||change of theta||^2 / 2.
    """

    def __init__(self, make_optimizer, scores_SD=SIGNS_SD, meant=math.inf, **settings):
        self.meant = meant
        self.parameters = [torch.nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in (2, 1)]
        self.optimizer, self.scores_SD = make_optimizer(self.parameters), scores_SD
        self.schedule = SNRSchedule(self.optimizer, "auto", **settings)
        self.rates, self.changes, self.taken, self.measured_times = [], [], [], 0

    @property
    def theta(self):
        return torch.cat([p.detach() for p in self.parameters]).clone()

    @property
    def kls(self):
        return [float(change @ change) / 2 for change in self.changes]

    def step(self, slope=SLOPE, batch=BATCH, skip=False, **more):
        for p, g in zip(self.parameters, (-slope).split([2, 1]), strict=True):
            p.grad = g.clone()
        self.schedule.step(batch, headroom=self.meant, **more)
        self.rates.append(self.schedule.learning_rates[0])
        if skip:
            self.schedule.restore()
            return
        before = self.theta
        self.optimizer.step()
        self.taken.append(self.schedule.limit_step(lambda: self.change_S(before)))
        self.changes.append(self.theta - before)

    def change_S(self, before):
        self.measured_times += 1
        return quadratic(self.scores_SD @ (self.theta - before))

    @property
    def rule(self):
        return self.schedule.rule


@pytest.mark.parametrize("length", [None, 25.0])
def test_the_length_of_outputs_counts(length):
    """A step of a given length a token takes as many nats as there are tokens, up to what the user allows."""
    for kl, expected in ((1.0, (length or 1.0) * FIRST**2), (MEANT, MEANT)):
        run = Straight(sgd(0.01), kl=kl)
        run.step(mean_length=length)
        assert run.schedule.target_kl == pytest.approx(expected)


# Changes of log pi are within three times their root mean square: nothing is clipped.


@pytest.mark.parametrize(
    "make", [sgd(0.01), adamw(0.01), sgd(0.01, momentum=0.9), sgd(0.01, nesterov=True, momentum=0.5)]
)
def test_kl_and_kappa_are_those_of_the_update_that_was_made(make):
    run, roots = Straight(make, growth=1.5), []
    for t in range(4):
        run.step(SLOPE * (1 + 0.3 * t))
        kl, share = run.taken[-1]
        assert kl == pytest.approx(run.kls[-1], rel=1e-9)
        assert t == 0 or share == 1
        roots.append(math.sqrt(kl) / (run.rates[-1] * share))
        assert run.rule.state.root_kappa**2 == pytest.approx(smoothed(roots)[0] ** 2, rel=1e-9)
    assert run.measured_times == 5  # the first update was made as long as it was meant


@pytest.mark.parametrize("make", [sgd(0.01), adamw(0.01)])
def test_kappa_is_by_token(make):
    """Outputs of 25 tokens, and of 100 in the next step: the rate is for as many as the batch at hand has."""
    run = Straight(make, meant=MEANT, growth=10.0)
    run.step(mean_length=25.0)
    per_token = run.kls[0] / 25 / (run.rates[0] * run.taken[0].share) ** 2
    assert run.rule.state.root_kappa**2 == pytest.approx(per_token)
    run.step(mean_length=100.0)
    assert run.rates[1] == pytest.approx(math.sqrt(MEANT / 100 / per_token))


def test_the_trend_of_kappa_is_followed_ahead():
    """Its root shrinks 1.25 times an update, of which an average alone would know nothing until it is over."""
    run = Straight(sgd(0.3), meant=MEANT)
    roots = [0.8**t * float(SLOPE.norm()) / math.sqrt(2) for t in range(25)]
    for t in range(25):
        run.step(0.8**t * SLOPE)
        if t:
            level, trend = smoothed(roots[:t])
            assert run.kls[t] == pytest.approx(MEANT * (roots[t] / (level * math.exp(trend))) ** 2)
    assert run.kls[1] == pytest.approx(0.64 * MEANT)
    assert run.kls[-1] == pytest.approx(MEANT, rel=0.02)


@pytest.mark.parametrize("batch", [Moments(-1.0, 8.0, 4), BATCH, Moments(1.0, 0.0, 4)])
@pytest.mark.parametrize("start", [1e-9, 0.04, 1e4])
@pytest.mark.parametrize("make", [sgd, adamw])
def test_it_settles_where_the_policy_moves_by_what_is_meant(make, start, batch):
    """Whatever the signal, and whether the limit or the rewards' headroom says so."""
    run, limited = Straight(make(start), meant=MEANT), Straight(make(start), kl=MEANT)
    for _ in range(40):
        run.step(batch=batch)
        limited.step(batch=batch)
    assert run.kls[-3:] == pytest.approx([MEANT] * 3, rel=1e-5)
    assert all(kl <= TOO_FAR * MEANT * (1 + 2e-6) for kl in run.kls)
    assert limited.kls[-3:] == pytest.approx([MEANT] * 3, rel=0.11)
    assert all(kl <= MEANT * (1 + 2e-6) for kl in limited.kls)


@pytest.mark.parametrize("name", ["Adam", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("start", [1e-7, 1e3])
def test_other_optimizers_settle_there_too(name, start):
    """Adagrad's update shrinks all the while, RAdam's grows: the trend foretells it."""
    run = Straight(lambda parameters: getattr(torch.optim, name)(parameters, lr=start), meant=MEANT)
    for _ in range(100):
        run.step()
    assert run.kls[-1] == pytest.approx(MEANT, rel=0.02)
    assert all(kl <= TOO_FAR * MEANT * (1 + 2e-6) for kl in run.kls)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch < 2.9 has no Muon")
def test_muon_settles_there_too():
    parameter = torch.nn.Parameter(torch.zeros(3, 1, dtype=torch.float64))
    schedule, kls = SNRSchedule(torch.optim.Muon([parameter], lr=1e-6, weight_decay=0.0), "auto"), []
    for _ in range(40):
        parameter.grad = -SLOPE[:, None].clone()
        schedule.step(BATCH, headroom=MEANT)
        before = parameter.detach().clone()
        schedule.optimizer.step()
        taken = schedule.limit_step(lambda before=before: quadratic(SIGNS_SD @ (parameter.detach() - before))[:, 0])
        kls.append(taken.kl)
    assert sum(kls[-10:]) / 10 == pytest.approx(MEANT, rel=0.1)  # its directions are of bfloat16


def test_signal_and_noise_are_averaged_beside_it():
    run = Straight(sgd(0.1), kl=MEANT, ema=0.5)
    run.step(batch=Moments(1.0, 4.0, 4))
    run.step(batch=Moments(4.0, 7.0, 4))
    assert run.schedule.smoothed == Moments(pytest.approx(3.0), pytest.approx(6.0), 4)
    assert Straight(sgd(0.5)).schedule.average.decays[-1] == 0.97
    assert SNRSchedule(Straight(sgd(0.5)).optimizer).average.decays[-1] == 0.9


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("start", [1e-12, 1e-9, 1.0, 1e6])
def test_a_run_begins_with_a_thousandth_of_a_nat_a_token_whatever_its_rate(make, start):
    run = Straight(make(start))
    run.step(mean_length=9.0)
    assert 0.25 * BEGIN * 9 <= run.kls[0] <= BEGIN * 9 * (1 + 1e-6)
    assert run.taken[0].kl == pytest.approx(run.kls[0])
    run = Straight(make(start), meant=MEANT / 9)  # less than that, where it is meant
    run.step(mean_length=9.0)
    assert 0.25 * MEANT / 9 <= run.kls[0] <= MEANT / 9 * (1 + 1e-6)


def test_growth_and_shrinkage_are_bounded_step_by_step():
    run = Straight(sgd(1e-9), growth=1.3, kl=MEANT)
    for _ in range(4):
        run.step()
    first = math.sqrt(2 * run.kls[0] / float(SLOPE @ SLOPE))
    assert run.rates[1:] == pytest.approx([first * 1.3, first * 1.69, first * 1.3**3])
    run = Straight(sgd(0.25), shrinkage=1.1, meant=BEGIN)
    for ess_ratio in (1.0, 0.25, 0.25):  # less than 4 times the KL that is then meant, which is not cut
        run.step(ess_ratio=ess_ratio)
    first = 0.25 * run.taken[0].share
    assert run.rates[1:] == pytest.approx([first / 1.1**n for n in (1, 2)])
    run = Straight(sgd(0.25), shrinkage=1.1, meant=BEGIN)
    for mean_length in (1.0, 16.0):  # outputs that are 16 times as long take the same nats at a quarter of the rate
        run.step(mean_length=mean_length)
    wanted = 0.25 * run.taken[0].share * math.sqrt(BEGIN / run.kls[0]) / 4
    assert wanted < 0.25 * run.taken[0].share / 1.1
    assert run.rates[1] == pytest.approx(wanted)


@pytest.mark.parametrize("most", [1.0, 2.5 * MEANT, MEANT])
def test_later_updates_may_take_four_times_what_was_meant_and_never_more_than_the_limit(most):
    allowed = min(TOO_FAR * MEANT, most)
    for longer in (1.9, 2.9):
        run = Straight(sgd(0.01), meant=MEANT, kl=most)
        for slope in (1.0, 1.0, 1.0, 1.0, longer):
            run.step(slope * SLOPE)
        assert run.kls[3] == pytest.approx(MEANT, rel=0.11)
        if longer**2 * MEANT < allowed:
            assert run.taken[4] == (pytest.approx(longer**2 * MEANT), 1.0)
        else:
            assert run.taken[4].share < 1
            assert 0.5 * allowed < run.kls[4] <= allowed * (1 + 2e-6)


@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("too_much", [3.0, 1e3, 1e12])
def test_an_update_that_goes_too_far_is_shortened(make, too_much):
    """Its direction and the optimizer's state are kept, and the rate goes on from what was left."""
    run, free = (Straight(make(rate), kl=BEGIN, shrinkage=1e9) for rate in (too_much, 1e-2))
    for each in (run, free):
        each.step()
    kl, share = run.taken[0]
    assert 0.5 * BEGIN < kl <= BEGIN * (1 + 1e-6)
    assert kl == pytest.approx(run.kls[0])
    assert share * too_much == pytest.approx(run.changes[0][0] / free.changes[0][0] * 1e-2 * free.taken[0].share)
    torch.testing.assert_close(run.changes[0] / run.changes[0].norm(), free.changes[0] / free.changes[0].norm())
    for each in (run, free):
        kept = torch.cat([each.optimizer.state[p].pop(UPDATE) for p in each.parameters])
        torch.testing.assert_close(kept, each.changes[0].bfloat16())
    torch.testing.assert_close(run.optimizer.state_dict()["state"], free.optimizer.state_dict()["state"])
    assert run.rule.state.rate == pytest.approx(share * too_much)
    run.step()
    assert run.kls[1] == pytest.approx(BEGIN, rel=0.11)  # of what the limit is, nine tenths or all


def test_a_step_that_breaks_the_policy_is_taken_back_until_it_does_not():
    """Log-probabilities are NaN beyond a change of 1e-3; within it, they are what they are."""
    run = Straight(sgd(10.0), kl=1e6)
    exact = run.change_S
    run.change_S = lambda before: exact(before) * (1.0 if (run.theta - before).norm() < 1e-3 else math.nan)
    run.step()
    assert 1e-4 < float(run.changes[0].norm()) < 1e-3
    assert run.taken[0].kl == pytest.approx(run.kls[0])


@pytest.mark.parametrize("mode", ["auto", "off"])
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_policy_that_was_broken_before_is_refused(mode, broken):
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.ones(1)
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    schedule = SNRSchedule(optimizer, mode)
    schedule.step(BATCH)
    optimizer.step()
    with pytest.raises(ValueError, match="NaN or infinite after the update"):
        schedule.limit_step(lambda: torch.tensor([0.1, broken]))


def test_the_update_must_be_confined():
    run = Straight(sgd(0.1))
    run.schedule.step(BATCH)
    run.parameters[0].grad = torch.ones(2, dtype=torch.float64)
    run.optimizer.step()
    with pytest.raises(ValueError, match="call `limit_step` after every"):
        run.schedule.step(BATCH)


def test_a_skipped_step_leaves_the_measurements_alone():
    """A gradient scaler left the update out: there is nothing to limit_step."""
    run, other = Straight(adamw(0.01)), Straight(adamw(0.01))
    for _ in range(2):
        run.step()
        other.step()
    run.step(skip=True)
    run.step()
    other.step()
    assert run.rule.state.root_kappa**2 == pytest.approx(other.rule.state.root_kappa**2, rel=1e-6)
    assert run.optimizer.param_groups[0]["lr"] == 0.01


def test_an_update_without_the_schedule_is_measured_but_not_taken_for_its_own():
    """optimizer.step() after restore(): made at eta_0, whatever it does."""
    run = Straight(sgd(0.01))
    run.step()
    run.step(skip=True)
    run.optimizer.param_groups[0]["lr"], before, kappa = 100.0, run.theta, run.rule.state.root_kappa**2
    run.optimizer.step()
    kl, share = run.schedule.limit_step(lambda: run.change_S(before))
    assert kl == pytest.approx(100**2 * float(SLOPE @ SLOPE) / 2)
    assert (share, run.rule.state.root_kappa**2) == (1.0, kappa)


def test_a_scheduler_scales_the_rate_and_the_measurements_know():
    """Half of eta_0: half of the measured rate, a quarter of the KL, the same kappa."""
    run = Straight(sgd(0.3), kl=MEANT)
    for _ in range(20):
        run.step()
    kappa = run.rule.state.root_kappa**2
    run.optimizer.param_groups[0]["lr"] = 0.15
    run.step()
    run.step()
    assert run.kls[-1] == pytest.approx(MEANT / 4)
    assert run.rule.state.root_kappa**2 == pytest.approx(kappa)


def test_warmup_scales_the_rate_and_the_measurements_know():
    run = Straight(sgd(0.3), kl=MEANT, warmup=8)
    for _ in range(8):
        run.step()
    assert run.kls[4:] == pytest.approx([MEANT * (n / 8) ** 2 for n in (5, 6, 7, 8)])


def test_effective_sample_size_brakes():
    run = Straight(sgd(0.1), kl=MEANT, shrinkage=1e9)
    run.step()
    run.step(ess_ratio=0.25)
    assert run.kls[1] == pytest.approx(MEANT * 0.25)


def test_a_scheduler_may_start_at_zero():
    """The usual linear warm-up: its first rate is 0."""
    run = Straight(sgd(0.1), kl=MEANT)
    scheduler = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda t: min(1.0, t / 4))
    for _ in range(8):
        run.step()
        scheduler.step()
    assert run.rates[0] == 0.0
    assert run.kls[-1] == pytest.approx(MEANT)


def test_a_rate_of_zero_is_no_start():
    with pytest.raises(ValueError, match="above 0 to start from"):
        Straight(sgd(0.0)).step()


def test_a_first_group_without_a_rate_does_not_stop_the_others():
    a, b = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 0.0}, {"params": [b], "lr": 1e3}])
    schedule = SNRSchedule(optimizer, "auto", kl=MEANT)
    for _ in range(3):
        a.grad, b.grad, old = torch.full((1,), -0.1).double(), torch.full((1,), -0.1).double(), b.item()
        schedule.step(BATCH)
        optimizer.step()
        kl = schedule.limit_step(lambda: quadratic(b.detach() - old)).kl  # noqa: B023
        assert kl <= TOO_FAR * MEANT
    assert kl == pytest.approx(MEANT)


def test_every_group_keeps_its_ratio_to_the_first():
    a, b = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    optimizer = torch.optim.SGD([{"params": [a], "lr": 10.0}, {"params": [b], "lr": 30.0}])
    schedule = SNRSchedule(optimizer, "auto", kl=MEANT)
    for _ in range(3):
        a.grad, b.grad, old = torch.full((1,), -0.1).double(), torch.full((1,), -0.1).double(), (a.item(), b.item())
        schedule.step(BATCH)
        first, second = schedule.learning_rates
        assert second == pytest.approx(3 * first)
        optimizer.step()
        schedule.limit_step(lambda: torch.stack([a.detach(), b.detach()]) - torch.tensor(old)[:, None])  # noqa: B023
        assert b.item() - old[1] == pytest.approx(3 * (a.item() - old[0]))


def test_parameters_without_a_gradient_do_not_matter():
    run = Straight(sgd(5.0))
    idle = torch.nn.Parameter(torch.ones(5))
    run.optimizer.add_param_group({"params": [idle]})
    run.step()
    assert run.taken[0].share < 1
    assert torch.equal(idle, torch.ones(5))


def test_the_kl_is_without_bias_and_by_token_steadier():
    """By listing every answer of two tokens, each weighed by its chance before: the exact KL, whatever the update."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in (1, 3))
    moved = [logits + torch.randn(logits.shape, generator=generator, dtype=torch.float64) for logits in (first, second)]
    (a_1V, b_VV), (c_1V, d_VV) = ([x.log_softmax(-1) for x in both] for both in ((first, second), moved))
    chance_S = (a_1V.T + b_VV).exp().flatten()
    change_ST = torch.stack([(c_1V - a_1V).T.expand(3, 3).flatten(), (d_VV - b_VV).flatten()], 1)
    exact = float((chance_S * -change_ST.sum(1)).sum())
    by_token, by_output = ([mean_kl(row[None]) for row in change] for change in (change_ST, change_ST.sum(1)))
    felt = [torch.tensor(kls, dtype=torch.float64) for kls in (by_token, by_output)]
    assert [float(chance_S @ kl_S) for kl_S in felt] == pytest.approx([exact, exact])
    spread = [float(chance_S @ (kl_S - exact).square()) for kl_S in felt]
    assert spread[0] < spread[1]


def test_a_token_that_became_impossible_counts_as_its_log_probability_says():
    change_ST = torch.zeros(100, 3)
    change_ST[7, 1] = -50.0
    assert mean_kl(change_ST) == pytest.approx((50 - 1) / 100)
    assert mean_kl(torch.full((2, 2), 1e-9)) == pytest.approx(1e-18)


def test_an_update_that_does_nothing_leaves_kappa_alone():
    """Gradients of 0 with moments of others': what was known of the rate stays."""
    run = Straight(sgd(0.3), kl=MEANT)
    for _ in range(20):
        run.step()
    kappa = run.rule.state.root_kappa**2
    for _ in range(40):
        run.step(0 * SLOPE)
    assert run.rule.state.root_kappa**2 == kappa
    run.step()
    assert run.kls[-1] == pytest.approx(MEANT)


def test_two_updates_in_a_step_are_refused():
    run = Straight(sgd(0.1))
    run.schedule.step(BATCH)
    for p in run.parameters:
        p.grad = torch.ones_like(p)
    run.optimizer.step()
    with pytest.raises(ValueError, match="two updates in one step"):
        run.optimizer.step()


def test_changes_that_are_not_of_the_weights_are_refused_and_the_update_taken_back():
    """Dropout, say: however short the update, log-probabilities change."""
    run, generator = Straight(sgd(0.1), kl=MEANT), torch.Generator().manual_seed(0)
    exact = run.change_S
    run.change_S = lambda before: exact(before) + 3 * torch.randn(4, generator=generator, dtype=torch.float64)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"nats even without an update.*without dropout"):
            run.step()
        assert not run.theta.any()
    assert run.rule.state.rate == 0.1
    assert run.rule.state.root_kappa == 0


def test_a_rate_in_a_tensor():
    """As capturable and compiled optimizers hold it."""
    run = Straight(lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(10.0), weight_decay=0.0), kl=MEANT)
    held = run.optimizer.param_groups[0]["lr"]
    for _ in range(20):
        run.step()
    assert run.kls[-1] == pytest.approx(MEANT, rel=1e-4)
    assert run.optimizer.param_groups[0]["lr"] is held


def test_a_policy_that_cannot_be_moved_leaves_the_rate_where_it_is():
    """No update, however long, changes a log-probability: nothing is known of the rate, and it does not grow."""
    run = Straight(sgd(1e-3), scores_SD=torch.zeros(4, 3, dtype=torch.float64), growth=1.5)
    for _ in range(40):
        run.step()
    assert run.rates == pytest.approx([1e-3] * 40)
    assert run.rule.state.root_kappa == 0


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_first_update_too_short_to_be_felt_is_lengthened(make):
    """Log-probabilities that know five digits: 1e-9 moves none of them, and yet the first step is as long as meant."""
    run, exact = Straight(make(1e-9), kl=MEANT), Straight(make(1e-3), kl=MEANT)
    felt = run.change_S
    run.change_S = lambda before: (felt(before) * 1e5).round() / 1e5
    run.step()
    exact.step()
    assert 0.2 * BEGIN < run.kls[0] < 5 * BEGIN
    torch.testing.assert_close(run.changes[0] / run.changes[0].norm(), exact.changes[0] / exact.changes[0].norm())
    assert run.rule.state.root_kappa**2 == pytest.approx(exact.rule.state.root_kappa**2, rel=0.1)


def test_a_scheduler_that_begins_low_shortens_the_first_step():
    """A tenth of eta_0, as in a warm-up: a hundredth of the KL."""
    run = Straight(sgd(1e-6), warmup=10)
    run.step()
    assert 0.0025 * BEGIN <= run.kls[0] <= 0.011 * BEGIN


def test_a_step_at_a_rate_of_zero_has_nothing_to_shorten():
    """Without a gradient, or where a scheduler ends: whatever changes then is not of the update."""
    run = Straight(sgd(0.1), kl=MEANT)
    run.step()
    kappa, before = run.rule.state.root_kappa**2, run.theta
    for p in run.parameters:
        p.grad = torch.zeros_like(p)
    run.schedule.step(Moments(0.0, 0.0, 4))
    run.optimizer.step()
    assert run.schedule.limit_step(lambda: torch.ones(4)) == (pytest.approx(math.e - 2), 1.0)
    assert torch.equal(run.theta, before)
    run.step()
    assert run.rule.state.root_kappa**2 == pytest.approx(kappa)


def test_an_update_that_rounding_swallows_leaves_the_rate_where_it_is():
    """At 1e-30 float64 keeps no update of a weight of 1; there is nothing to lengthen."""
    run = Straight(sgd(1e-30))
    for p in run.parameters:
        p.data += 1
    for _ in range(5):
        run.step()
    assert run.rates == pytest.approx([1e-30] * 5)


@pytest.mark.parametrize("mode", SCHEDULES)
@pytest.mark.parametrize("floor", [0.0, 0.5])
def test_no_signal_no_step(mode, floor):
    """Without a gradient the rate is 0 in every mode, at any floor, and the next gradient finds what was there."""
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.zeros(3)
    optimizer = torch.optim.AdamW([parameter], lr=0.1, weight_decay=0.1)
    schedule = SNRSchedule(optimizer, mode, floor=floor)
    for _ in range(200):
        assert schedule.step(Moments(0.0, 0.0, 4), mean_length=9.0) == 0.0
        optimizer.step()
        schedule.limit_step(lambda: torch.zeros(4))
    assert torch.equal(parameter.detach(), torch.ones(3))
    fresh = SNRSchedule(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))], lr=0.1), mode, floor=floor, ema=0)
    assert schedule.step(BATCH, mean_length=9.0) == pytest.approx(fresh.step(BATCH, mean_length=9.0))


def test_the_state_is_plain_numbers_and_resumes_identically():
    first, second = Straight(adamw(0.01)), Straight(adamw(0.01))
    for t in range(4):
        first.step(SLOPE * (1 + t))
    second.schedule.load_state_dict(json.loads(json.dumps(first.schedule.state_dict())))
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    for mine, theirs in zip(second.parameters, first.parameters, strict=True):
        mine.data.copy_(theirs.data)
    for run in (first, second):
        run.rates = []
        for t in range(4):
            run.step(SLOPE * (2 - t), batch=Moments(t, 4.0, 4))
    assert first.rates == second.rates
    assert torch.equal(first.theta, second.theta)
    assert first.schedule.state_dict() == second.schedule.state_dict()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kl": 0.0}, "kl > 0"),
        ({"kl": float("nan")}, "kl > 0"),
        ({"kl": math.inf}, "kl > 0"),
        ({"growth": 1.0}, "growth > 1"),
        ({"shrinkage": 0.5}, "shrinkage > 1, .* 0.5"),
        ({"ema": 1.0}, r"ema must lie in \[0, 1\), got 1.0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        Straight(sgd(0.1), **settings)


ACTIONS, PROMPTS, OUTPUTS = 8, 16, 4


def bandit_run(make, seed, steps=120):
    """Eight actions that succeed with probability 0.2 to 0.8, leave-one-out baseline. Rates, KLs, and the last J."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.nn.Parameter(torch.zeros(ACTIONS, dtype=torch.float64))
    success_A = torch.linspace(0.2, 0.8, ACTIONS, dtype=torch.float64)
    optimizer = make([logits])
    schedule = SNRSchedule(optimizer, "auto", kl=0.05)
    rates, kls = [], []
    for _ in range(steps):
        probability = logits.detach().softmax(0)
        index_PG = torch.multinomial(probability, PROMPTS * OUTPUTS, True, generator=generator).view(PROMPTS, OUTPUTS)
        chance_PG = torch.rand(PROMPTS, OUTPUTS, generator=generator, dtype=torch.float64)
        rewards_PG = (chance_PG < success_A[index_PG]).double()
        baseline_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (OUTPUTS - 1)
        scores = torch.eye(ACTIONS, dtype=torch.float64)[index_PG] - probability
        gradient_PD = ((rewards_PG - baseline_PG)[..., None] * scores).mean(1)
        gradient = gradient_PD.mean(0)
        schedule.step(estimators.moments(gradient_PD.square().sum(1), gradient.square().sum()))
        rates.append(schedule.learning_rates[0])
        logits.grad = -gradient
        optimizer.step()
        log_ratio = lambda old, index: (logits.detach().log_softmax(0) - old.log())[index]  # noqa: E731
        kls.append(schedule.limit_step(partial(log_ratio, probability, index_PG.flatten())).kl)
    return rates, max(kls), float(logits.detach().softmax(0) @ success_A)


@pytest.mark.parametrize("make", [sgd, adamw])
def test_from_far_too_little_and_from_far_too_much_it_reaches_the_same_rate(make):
    """Geometric means over steps 10 to 20 of six runs; a first SGD step at 1e3 would be a KL of hundreds."""
    means = {}
    for start in (1e-7, 1e-1, 1e3):
        rates, kls, last = zip(*(bandit_run(make(start), seed) for seed in range(6)), strict=True)
        means[start] = torch.tensor(rates, dtype=torch.float64)[:, 10:20].log().mean().exp().item()
        assert min(last) > 0.7  # learned, from 0.5
        assert max(kls) <= TOO_FAR * 0.05
    assert max(means.values()) < 2 * min(means.values())


@pytest.mark.parametrize("make", [sgd, adamw, lambda lr: sgd(lr, momentum=0.9)])
def test_the_rate_does_not_swing_by_ten_within_five_steps(make):
    """From step 5 on, on a task that is never learned to its end; the noise of a gradient is half of its signal."""
    for seed in range(6):
        run, noise = Straight(make(1e-6)), torch.Generator().manual_seed(seed)
        for _ in range(60):
            signs = torch.randn(3, generator=noise, dtype=torch.float64)
            run.step(SLOPE + float(SLOPE.norm()) / math.sqrt(12) * signs, batch=Moments(0.14, 0.14, 4))
        swings = [max(part) / min(part) for part in (run.rates[t : t + 6] for t in range(5, 55))]
        assert max(swings) < 10


def scaled(batch, size):
    """The moments of gradients so many times as large."""
    return Moments(size**2 * batch.signal2, size**2 * batch.trace_cov, batch.n)


@pytest.mark.parametrize("make", [sgd, adamw, lambda lr: sgd(lr, momentum=0.9)])
@pytest.mark.parametrize("size", [0.5, 1.7])
def test_steps_are_as_long_as_they_are_meant_while_gradients_shrink_or_grow(make, size):
    """By 1e-9 and 1e7 in thirty steps; the rate stands, because it is of their units."""
    moving, standing = Straight(make(1e-6), meant=MEANT), Straight(make(1e-6), meant=MEANT)
    for t in range(30):
        moving.step(size**t * SLOPE, batch=scaled(BATCH, size**t))
        standing.step()
    assert moving.kls[20:] == pytest.approx([MEANT] * 10, rel=0.05)
    assert all(0.5 < kl / MEANT < 1.5 for kl in moving.kls[3:])
    assert max(moving.rates[10:]) < 1.5 * min(moving.rates[10:])


@pytest.mark.parametrize("make", [sgd, adamw, lambda lr: sgd(lr, momentum=0.9)])
@pytest.mark.parametrize("size", [1e2, 1e3, 1e6])
def test_after_one_absurd_reward_steps_are_soon_as_long_as_before(make, size):
    """A reward of 1,000 froze a run for good: its update was cut, the next ones were not felt, and the rate stayed."""
    run = Straight(make(1e-6), meant=MEANT)
    for t in range(30):
        run.step(SLOPE if t != 10 else size * SLOPE.flip(0), batch=BATCH if t != 10 else scaled(BATCH, size))
        assert run.kls[-1] <= TOO_FAR * MEANT * (1 + 1e-6)
    assert sum(kl > 0.3 * MEANT for kl in run.kls[11:15]) >= 2
    assert run.kls[-1] == pytest.approx(MEANT, rel=0.1)


def test_a_rate_that_had_to_be_cut_grows_again():
    """One direction in which the policy is ten thousand times as sensitive: the next steps are short, not unfelt."""
    run = Straight(sgd(1e-6), meant=MEANT)
    exact = run.change_S
    for t in range(30):
        run.change_S = (lambda before: 1e4 * exact(before)) if t == 10 else exact
        run.step()
    assert run.kls[11] < 1e-4 * MEANT
    assert run.kls[-1] == pytest.approx(MEANT, rel=0.01)


def test_momentum_weighs_gradients_by_the_inverse_of_their_noise():
    """SGD at momentum 0.9, by hand: g / c with weights 0.9^k while c falls; where it grows, g / sqrt(c)."""
    run = Straight(sgd(1e-6, momentum=0.9))
    slopes = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    held, before = 0.0, None
    for size, slope in zip((1.0, 1.0, 0.7, 0.7, 0.5, 0.6), slopes, strict=True):
        run.step(size * slope, batch=scaled(BATCH, size))
        scale = run.rule.state.unit
        older = min(1.0, math.sqrt(scale / before)) if before else 1.0
        held, before = 0.9 * older * held + size * slope / math.sqrt(scale), scale
        change = run.changes[-1]
        torch.testing.assert_close(change / change.norm(), held / held.norm())


@pytest.mark.parametrize("make", [sgd, adamw])
def test_a_policy_that_nothing_moves_any_more_is_left_where_it_is(make):
    """It is sure of all: a step is not felt, and gradients fall by 10 in every one. Weights would move for nothing."""
    run = Straight(make(1e-6), meant=MEANT)
    exact, seen = run.change_S, []
    for t in range(60):
        run.change_S = (lambda before: 1e-6 * exact(before)) if t >= 10 else exact
        run.step(SLOPE * 0.1 ** max(0, t - 10), batch=scaled(BATCH, 0.1 ** max(0, t - 10)))
        seen.append(float(run.changes[-1].norm()))
    assert all(math.isfinite(length) for length in seen)
    assert sum(seen[50:]) < max(seen[:10])  # of AdamW the momentum fades first


def changed_task(make, seed):
    """Steps until the second task of eight actions earns .5: the first is at .9, and its action has to be left."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.nn.Parameter(torch.zeros(ACTIONS, dtype=torch.float64))
    schedule = SNRSchedule(make([logits]), "auto")
    right, since = 0, 0
    for _ in range(300):
        probability = logits.detach().softmax(0)
        if right == 0 and float(probability[0]) > 0.9:
            right = 7
        elif right == 7:
            since += 1
            if float(probability[7]) > 0.5:
                return since
        index_PG = torch.multinomial(probability, PROMPTS * OUTPUTS, True, generator=generator).view(PROMPTS, OUTPUTS)
        rewards_PG = (index_PG == right).double()
        valid_PG = torch.ones_like(rewards_PG, dtype=torch.bool)
        if not estimators.differ(rewards_PG, valid_PG):
            continue
        baseline_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (OUTPUTS - 1)
        scores = torch.eye(ACTIONS, dtype=torch.float64)[index_PG] - probability
        gradient_PD = ((rewards_PG - baseline_PG)[..., None] * scores).mean(1)
        gradient = gradient_PD.mean(0)
        if not gradient.any():
            continue
        batch = estimators.moments(gradient_PD.square().sum(1), gradient.square().sum())
        schedule.step(batch, mean_length=1.0, headroom=estimators.headroom(rewards_PG, valid_PG))
        logits.grad = -gradient
        schedule.optimizer.step()
        log_ratio = lambda old, index: (logits.detach().log_softmax(0) - old.log())[index]  # noqa: E731
        schedule.limit_step(partial(log_ratio, probability, index_PG.flatten()))
    return math.inf


def test_a_task_that_changes_is_learned():
    """Momentum and AdamW's kept the direction of the first task, the rate grew for it, and no run found the second."""
    for make in (sgd, adamw):
        assert sorted(changed_task(make(1e-6), seed) for seed in range(6))[3] < 40


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("measured", [True, False])
def test_the_scale_of_a_batch_whose_noise_is_not_measured_comes_from_its_own_gradient(size, measured):
    """As in a loop that takes score norms in one step of ten: the optimizer gets it as it would if it were measured."""
    parameter = torch.nn.Parameter(torch.zeros(2))
    optimizer, got = torch.optim.SGD([parameter], lr=1e-3), []
    schedule = SNRSchedule(optimizer, "auto")
    optimizer.register_step_pre_hook(lambda *_: got.append(float(parameter.grad.norm())))
    for scale, known in ((1.0, True), (1.0, True), (size, measured)):
        before = parameter.detach().clone()
        parameter.grad = torch.tensor([0.6, -0.8]) * scale
        schedule.step(Moments(0.5 * scale**2, 4 * scale**2, 8) if known else None, mean_length=4.0)
        optimizer.step()
        schedule.limit_step(lambda before=before: (parameter.detach() - before)[None].double())
    assert got[:2] == pytest.approx([1.0, 1.0])
    assert got[2] == pytest.approx(min(max(size, 3**-0.5), 3**0.5), rel=1e-5)


@pytest.mark.parametrize(("high", "over"), [(0.013, False), (0.012, True)])
def test_a_signal_is_over_where_that_of_the_batch_is_surely_below_a_tenth(high, over):
    """N SNR, of 8 prompts, and not the SNR of one."""
    run = Straight(sgd(0.1))
    run.rule.state.signal_seen = True
    average = SimpleNamespace(snr_interval=lambda z: (0.0, high), moments=SimpleNamespace(n=8))
    assert run.rule._is_over(average) == over


def test_the_smallest_scale_of_a_step_that_was_felt_is_remembered():
    run, units = Straight(sgd(0.1), meant=MEANT), []
    for size in (1.0, 0.5, 2.0, 2.0):  # the scale is what the batches before it predict
        run.step(math.sqrt(size) * SLOPE, batch=Moments(2 * size, 8 * size, 4))
        units.append(run.rule.state.unit)
    assert run.rule.state.felt_unit == min(units) == units[2] < units[0] < units[3]
