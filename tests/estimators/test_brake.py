"""The brake on objectives whose best rate theorem 4 knows."""

import math

import pytest
import torch

from oblrpo.estimators import Moments, SNRSchedule
from oblrpo.estimators.brake import Brake
from oblrpo.estimators.moments import inner


def test_it_lets_go_of_steps_that_agree_and_stops_those_that_turn_back():
    brake = Brake()
    for _ in range(50):
        brake.observe(1.0, 16)
        assert brake.share == 1.0
    for _ in range(50):
        brake.observe(-1.0, 16)
    low = brake.share
    assert low < 0.01
    for _ in range(100):
        brake.observe(1.0, 16)
    assert brake.share > 10 * low


def test_it_counts_prompts():
    """Gains of single prompts, taken in one by one or as means of four, brake alike."""
    gains = -1 + 10 * torch.randn(4000, generator=torch.Generator().manual_seed(0))
    logs = []
    for P in (1, 4):
        brake = Brake()
        for gain in gains.view(-1, P).mean(1).tolist():
            brake.observe(gain, P)
        logs.append(math.log(brake.share))
    assert logs[0] < -3
    assert logs[1] == pytest.approx(logs[0], rel=0.3)


def test_noise_alone_leaves_most_of_the_step():
    """Gains of mean 0: the share wanders, and its median stays far above what it brakes to."""
    random = torch.Generator().manual_seed(0)
    ends = []
    for _ in range(40):
        brake = Brake()
        for gain in torch.randn(240, generator=random).tolist():
            brake.observe(gain, 16)
        ends.append(brake.share)
    assert sorted(ends)[20] > 0.1


def test_noise_alone_does_not_wear_it_down_in_a_long_run():
    """Without a way back the share wanders down without an end, and the run stops."""
    random = torch.Generator().manual_seed(0)
    for _ in range(4):
        brake, shares = Brake(), []
        for gain in torch.randn(12_000, generator=random).tolist():
            brake.observe(gain, 16)
            shares.append(brake.share)
        assert min(shares) > 1e-4
        assert sorted(shares)[6000] > 0.3


@pytest.mark.parametrize("curvature", [1.0, 100.0])
@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_gains_are_zero_at_theorem_4s_rate(curvature, noise):
    """A quadratic J of curvature c: E[g'd] = eta (S - eta c (S + T/N)), measured over many pairs of batches."""
    random = torch.Generator().manual_seed(0)
    gradient, D, M = torch.tensor([1.0, -0.5, 0.0]).double(), 3, 200_000
    S, T_over_N = float(gradient @ gradient), D * noise**2
    best = S / (S + T_over_N) / curvature
    for eta, sign in ((best / 2, 1), (best, 0), (2 * best, -1)):
        first, second = (gradient + noise * torch.randn(M, D, generator=random).double() for _ in range(2))
        update = eta * first
        gains = ((second - curvature * update) * update).sum(1)
        expected = eta * (S - eta * curvature * (S + T_over_N))
        assert float(gains.mean()) == pytest.approx(expected, abs=5 * float(gains.std()) / M**0.5 + 1e-12)
        assert (expected > 1e-12) - (expected < -1e-12) == sign


class Quadratic:
    """J = -c |theta - 1|^2 / 2 whose KL is so small that nothing but the brake can stop a step."""

    def __init__(self, curvature, noise, delta, seed=0):
        self.theta = torch.nn.Parameter(torch.zeros(8, dtype=torch.float64))
        self.curvature, self.noise, self.random = curvature, noise, torch.Generator().manual_seed(seed)
        self.schedule = SNRSchedule(torch.optim.SGD([self.theta], lr=1e-3), "auto", kl=delta)

    def step(self, P=16):
        noise = self.noise * torch.randn(8, generator=self.random, dtype=torch.float64)
        self.theta.grad = self.curvature * (self.theta.detach() - 1) + noise
        self.schedule.step(Moments(1.0, 1.0, P))
        before = self.theta.detach().clone()
        self.schedule.optimizer.step()
        self.schedule.confine(lambda: 1e-2 * (self.theta.detach() - before).expand(4, 8))

    @property
    def loss(self):
        return self.curvature * float((self.theta.detach() - 1).square().sum()) / 2


def test_a_delta_far_too_large_is_survived():
    """Steps of many times the best length turn back; without the brake the loss never falls below where it began."""
    losses = {}
    for braked in (True, False):
        run = Quadratic(curvature=1.0, noise=0.5, delta=100.0)
        if not braked:
            run.schedule.rule.brake.observe = lambda gain, P: None
        begin, later = run.loss, []
        for t in range(400):
            run.step()
            if t >= 300:
                later.append(run.loss)
        losses[braked] = sum(later) / len(later) / begin
    assert losses[True] < 0.3
    assert losses[True] < losses[False] / 3


def test_inner_products_are_summed_in_float64():
    x, y = torch.randn(3, 5).bfloat16(), torch.randn(3, 5)
    assert inner([(x, y), (y, y)]) == pytest.approx(float((x.double() * y.double()).sum() + (y.double() ** 2).sum()))
    assert inner([]) == 0.0
