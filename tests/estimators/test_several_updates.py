"""Steps of several updates, and steps of outputs whose length changes: how far the policy goes in all."""

import math

import pytest
import torch

from oblrpo.estimators import Moments, SNRSchedule
from oblrpo.estimators.measured_rate import TOO_FAR, UPDATE

BATCH = Moments(signal2=2.0, trace_cov=8.0, n=4)
SLOPE = torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
MEANT = 0.005
HALF_SD = torch.tensor([[1, 1, 1], [1, 1, -1], [1, -1, 1], [1, -1, -1]], dtype=torch.float64)
SCORES_SD = torch.cat([HALF_SD, -HALF_SD])
"""Of eight tokens, one for each sign of a change: their KL is ||change||^2 / 2 but for a twelfth of its square."""


class Steps:
    """J = slope . theta; every step has K updates, and outputs of some tokens, all alike."""

    def __init__(self, K=1, lr=0.3, meant=math.inf, make=torch.optim.SGD, **settings):
        self.theta = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
        self.optimizer, self.K, self.meant = make([self.theta], lr=lr), K, meant
        self.schedule = SNRSchedule(self.optimizer, "auto", updates=K, **settings)

    @property
    def rule(self):
        return self.schedule.rule

    def step(self, slopes=None, tokens=1):
        """The exact KL of the whole step, and what was reported of each update."""
        start, taken = self.theta.detach().clone(), []
        for number in range(self.K):
            taken.append(self.update(SLOPE if slopes is None else slopes[number], tokens, fresh=number == 0))
        return self.kl(start, tokens), taken

    def update(self, slope, tokens, fresh):
        self.theta.grad = -slope.clone()
        self.schedule.step(BATCH, mean_length=float(tokens), fresh=fresh, headroom=self.meant)
        before = self.theta.detach().clone()
        self.optimizer.step()
        return self.schedule.limit_step(
            lambda: (SCORES_SD @ (self.theta.detach() - before))[:, None].expand(-1, tokens)
        )

    def kl(self, start, tokens=1):
        change_S = SCORES_SD @ (self.theta.detach() - start)
        return tokens * float((change_S.expm1() - change_S).mean())


@pytest.mark.parametrize("K", [1, 2, 4, 8])
@pytest.mark.parametrize("lr", [1e-3, 1e3])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_is_as_long_as_it_is_meant_whatever_its_updates(K, lr, make):
    """Updates that go one way. From any first rate, the first step ever is not longer than it is meant."""
    run = Steps(K, lr, meant=MEANT, make=make)
    for number in range(12):
        kl, taken = run.step()
        assert kl <= MEANT * 1.5
        assert taken[-1].kl == pytest.approx(kl, rel=1e-6)
        assert [each.kl for each in taken] == sorted(each.kl for each in taken)
        if number >= 4:
            assert kl >= 0.5 * MEANT
    assert kl == pytest.approx(MEANT, rel=0.1)


@pytest.mark.parametrize("K", [2, 4, 8])
def test_no_step_takes_more_than_the_limit_with_all_its_updates(K):
    """Gradients change as they like: by 30 times between updates, and turn round."""
    random = torch.Generator().manual_seed(0)
    for meant in (MEANT, 0.02):
        run = Steps(K, 10.0, meant=meant, kl=0.02)
        for _ in range(40):
            size_K1 = 30 ** torch.rand(K, 1, generator=random, dtype=torch.float64)
            kl, taken = run.step(size_K1 * (SLOPE + 0.5 * torch.randn(K, 3, generator=random, dtype=torch.float64)))
            assert kl <= min(0.02, TOO_FAR * meant) * (1 + 1e-6)
            assert max(each.kl for each in taken) <= min(0.02, TOO_FAR * meant) * (1 + 1e-6)
            assert taken[-1].kl == pytest.approx(kl, rel=1e-6)


@pytest.mark.parametrize("K", [1, 3])
def test_the_update_that_is_kept_is_that_of_the_whole_step(K):
    """The next gradient says what it would have gained: by the sum of its updates, and by that alone."""
    run, seen = Steps(K, meant=MEANT), []
    run.rule.slope.observe = lambda *given: seen.append(given)
    run.step()
    for _ in range(2):
        start = run.theta.detach().clone()
        run.step()
        whole = run.theta.detach() - start
        kept = run.optimizer.state[run.theta][UPDATE]
        torch.testing.assert_close(kept.double(), whole, rtol=K * 2**-8, atol=0)
    seen.clear()
    run.step()
    (slope, length, P) = seen[0]
    assert len(seen) == 1
    assert BATCH.n == P
    assert length == pytest.approx(float(whole.norm()) / math.sqrt(2), rel=1e-2)
    per_scale = float(SLOPE @ whole) / length / math.sqrt(run.schedule.average.scale)
    assert slope == pytest.approx(per_scale, rel=1e-2)


def test_a_later_update_that_finds_no_room_is_taken_back():
    """The first of two goes nearly all the way that is allowed, unasked; the second would be half as long again."""
    run = Steps(2, kl=MEANT)
    for _ in range(8):
        run.step()
    rate, jump = run.rule.state.rate, 1.95
    before = run.theta.detach().clone()
    first = run.update(jump * SLOPE, 1, fresh=True)
    assert first.share == 1
    assert 0.9 * MEANT < first.kl <= MEANT
    between = run.theta.detach().clone()
    second = run.update(jump * SLOPE, 1, fresh=False)
    assert second == (pytest.approx(first.kl), 0.0)
    assert torch.equal(run.theta.detach(), between)
    assert not torch.equal(between, before)
    assert run.rule.state.rate > rate / 8
    kl, taken = run.step()  # and the next step has all of its room
    assert 0.3 * MEANT < kl <= MEANT * (1 + 1e-6)
    assert all(each.share > 0 for each in taken)


@pytest.mark.parametrize("longest", [16, 64, 1024])
def test_outputs_that_grow_from_one_step_to_the_next_overshoot_nothing(longest):
    """A rate that is right for outputs of 4 tokens moves one of 64 sixteen times as far: that is predicted."""
    for meant, limit in ((MEANT, 0.5), (math.inf, 0.5)):
        run = Steps(meant=meant, kl=limit)
        for _ in range(8):
            run.step(tokens=4)
        aim = min(meant, longest * run.rule.slope.length**2, limit)
        kl, (taken,) = run.step(tokens=longest)
        assert kl <= limit * (1 + 1e-6)
        assert kl == pytest.approx(aim, rel=0.12)
        assert taken.share > 0.9
        kl, _ = run.step(tokens=4)
        assert kl <= min(limit, TOO_FAR * run.schedule.target_kl)


@pytest.mark.parametrize("rate", ["of the schedule", "of its own"])
def test_an_update_without_a_gradient_is_measured_by_itself(rate):
    """Its outputs are not those of the step before, and may have another number of tokens."""
    run = Steps(meant=MEANT)
    run.step(tokens=4)
    run.theta.grad = torch.zeros(3, dtype=torch.float64)
    run.schedule.step(Moments(0.0, 0.0, 4), mean_length=7.0)
    if rate == "of its own":
        run.schedule.restore()
    run.optimizer.step()
    kl, share = run.schedule.limit_step(lambda: torch.full((8, 7), 0.1, dtype=torch.float64))
    assert (kl, share) == (pytest.approx(7 * (math.exp(0.1) - 1.1)), 1.0)
    kl, _ = run.step(tokens=4)
    assert kl == pytest.approx(MEANT, rel=0.11)


def test_nothing_need_ever_be_measured_of_signal_and_noise():
    """As where norms are taken of few batches, and no reward of the first of them differs."""
    run = Steps(meant=MEANT)
    for _ in range(6):
        run.theta.grad = -SLOPE.clone()
        run.schedule.step(None, mean_length=1.0, headroom=run.meant)
        before = run.theta.detach().clone()
        run.optimizer.step()
        run.schedule.limit_step(lambda: (SCORES_SD @ (run.theta.detach() - before))[:, None])  # noqa: B023
    assert run.kl(before) == pytest.approx(MEANT, rel=0.11)


def test_a_resumed_run_between_steps_of_several_updates_goes_on_identically():
    first, second = Steps(3, meant=MEANT), Steps(3, meant=MEANT)
    for _ in range(3):
        first.step()
    second.schedule.load_state_dict(first.schedule.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    second.theta.data.copy_(first.theta.data)
    assert first.step() == second.step()
    assert torch.equal(first.theta, second.theta)


SIGNAL, NOTHING = Moments(signal2=20.0, trace_cov=8.0, n=4), Moments(signal2=0.0, trace_cov=8.0, n=4)


@pytest.mark.parametrize("gone", [True, False])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_no_rate_grows_where_the_signal_has_gone(gone, ema):
    """A policy that is ever surer of itself, which a unit of rate moves half as far in every step."""
    run, rates = Steps(meant=MEANT, ema=ema), []
    noise = torch.Generator().manual_seed(0)

    def step(batch, size):
        signal2 = batch.signal2 + 0.2 * float(torch.randn((), generator=noise))
        run.theta.grad = -size * SLOPE.clone()
        run.schedule.step(Moments(signal2, batch.trace_cov, batch.n), mean_length=1.0, headroom=run.meant)
        rates.append(run.rule.state.rate)
        before = run.theta.detach().clone()
        run.optimizer.step()
        run.schedule.limit_step(lambda: (SCORES_SD @ (run.theta.detach() - before))[:, None])

    for _ in range(20):
        step(SIGNAL, 1.0)
    last = NOTHING if gone else SIGNAL
    for _ in range(40):  # until it is known to have gone
        step(last, 1.0)
    before = run.rule.state.rate
    for number in range(12):
        step(last, 2.0 ** -(number + 1))
    if gone:
        assert run.rule.state.rate <= max(rates[:60]) * 1.01
    else:
        assert run.rule.state.rate > 100 * before


def test_a_rate_may_grow_where_no_signal_was_ever_seen():
    """A task that is too hard at first: nothing has gone, and steps are as long as they are meant."""
    run = Steps(meant=MEANT)
    run.schedule.average.add(NOTHING)
    for number in range(12):
        run.theta.grad = -(2.0**-number) * SLOPE
        run.schedule.step(NOTHING, mean_length=1.0, headroom=run.meant)
        before = run.theta.detach().clone()
        run.optimizer.step()
        run.schedule.limit_step(lambda: (SCORES_SD @ (run.theta.detach() - before))[:, None])  # noqa: B023
    assert run.kl(before) > 0.2 * MEANT
