"""The brake on steps that overshoot, on objectives whose slope is known."""

import copy
import math

import pytest
import torch

from oblrpo.estimators import Moments, SNRSchedule
from oblrpo.estimators.overshoot import CLIP, GAIN, STRONGEST, Brake, slope_left


def updated(make, gradients):
    """An optimizer after so many updates of two parameters, and the last update."""
    parameters = [torch.nn.Parameter(torch.ones(n, dtype=torch.float64)) for n in (3, 2)]
    optimizer = make(parameters)
    for gradient in gradients:
        before = torch.cat([p.detach().clone() for p in parameters])
        for p, g in zip(parameters, gradient.split([3, 2]), strict=True):
            p.grad = g.clone()
        optimizer.step()
    return optimizer, torch.cat([p.detach() for p in parameters]) - before


def with_gradient(optimizer, gradient):
    for p, g in zip(optimizer.param_groups[0]["params"], gradient.split([3, 2]), strict=True):
        p.grad = g.clone()
    return slope_left(optimizer)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {"momentum": 0.9}),
        ("Adam", {}),
        ("AdamW", {"weight_decay": 0.0}),
        ("Adam", {"betas": (0.5, 0.9)}),
        ("Adam", {"amsgrad": True, "betas": (0.9, 0.5)}),
        ("AdamW", {"maximize": True, "weight_decay": 0.0}),
        ("SGD", {"momentum": 0.9, "maximize": True}),
    ],
)
def test_the_slope_is_that_along_the_last_update(name, settings):
    """<update, -gradient of the loss>, up to one positive scale for all gradients; what is maximised is no loss."""
    torch.manual_seed(0)
    optimizer, update = updated(
        lambda p: getattr(torch.optim, name)(p, lr=0.01, **settings), torch.randn(7, 5, dtype=torch.float64)
    )
    scales = []
    for gradient in torch.randn(4, 5, dtype=torch.float64):
        slope = float(update @ gradient) * (1 if settings.get("maximize") else -1)
        scales.append(with_gradient(optimizer, gradient) / slope)
    assert scales == pytest.approx([scales[0]] * 4, rel=1e-6)
    assert scales[0] > 0


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad"])
def test_optimizers_that_keep_no_average_tell_nothing(name):
    make = lambda p: getattr(torch.optim, name)(p, lr=0.01)  # noqa: E731
    assert slope_left(updated(make, torch.ones(2, 5, dtype=torch.float64))[0]) is None


def test_the_state_of_the_optimizer_is_left_alone():
    torch.manual_seed(0)
    for name, settings in (("SGD", {"momentum": 0.9, "maximize": True}), ("AdamW", {"amsgrad": True})):
        make = lambda p: getattr(torch.optim, name)(p, lr=0.01, **settings)  # noqa: B023, E731
        optimizer, _ = updated(make, torch.randn(3, 5, dtype=torch.float64))
        before = copy.deepcopy(optimizer.state_dict()["state"])
        assert slope_left(optimizer) is not None
        torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_the_slope_left_is_zero_in_the_mean_at_the_rate_of_theorem_4(share):
    """J = -c |theta|^2 / 2 and gradients whose noise takes each of four values equally often: all 16 pairs of steps."""
    c, theta = 3.0, torch.tensor([1.0, -2.0], dtype=torch.float64)
    size = math.sqrt(c**2 * 5 * (1 - share) / share / 2)  # E|noise|^2 = |grad J|^2 (1 - f) / f
    noises = [torch.tensor(pair, dtype=torch.float64) * size for pair in ((1, 1), (1, -1), (-1, 1), (-1, -1))]

    def slopes(rate):
        for first in noises:
            parameter = torch.nn.Parameter(theta.clone())
            optimizer = torch.optim.SGD([parameter], lr=rate, momentum=0.9)  # its first update is the gradient
            parameter.grad = c * theta + first
            optimizer.step()
            for second in noises:
                parameter.grad = c * parameter.detach() + second
                yield slope_left(optimizer)

    mean = lambda rate: sum(slopes(rate)) / 16  # noqa: E731
    assert mean(share / c) == pytest.approx(0.0, abs=1e-9)
    assert mean(0.9 * share / c) > 0.1 > -0.1 > mean(1.1 * share / c)


def test_before_the_first_update_there_is_no_slope():
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    assert slope_left(torch.optim.AdamW([parameter])) is None
    assert Brake().feel(None) == 1.0


def test_the_brake_falls_on_negative_slopes_alone_and_is_let_go_on_positive_ones():
    brake = Brake()
    assert [brake.feel(slope) for slope in (2.0, 5.0, 1e-3)] == [1.0] * 3
    brake = Brake()
    assert brake.feel(-7.0) == pytest.approx(math.exp(-GAIN))  # the first is its own root mean square
    assert brake.feel(-7.0) == pytest.approx(math.exp(-2 * GAIN))
    assert brake.feel(7.0) == pytest.approx(math.exp(-GAIN))
    held = brake.factor
    assert brake.feel(1e6) <= held * math.exp(CLIP * GAIN)
    assert brake.feel(math.nan) == brake.feel(None) == brake.factor


def test_the_brake_has_a_last_notch_and_no_slope_is_no_evidence():
    brake = Brake()
    for _ in range(200):
        brake.feel(-1.0)
    assert brake.factor == STRONGEST
    assert Brake().feel(0.0) == 1.0


def test_in_equilibrium_slopes_are_zero_in_the_mean():
    """A step of rate r leaves the slope 1 - r, with noise: the brake settles where r is 1."""
    generator, brake, rates = torch.Generator().manual_seed(0), Brake(), []
    for _ in range(4000):
        rates.append(4 * brake.factor)
        brake.feel(1 - rates[-1] + float(torch.randn((), generator=generator)))
    assert sum(rates[500:]) / 3500 == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("braked", [True, False])
def test_a_valley_that_the_policy_does_not_feel(braked, monkeypatch):
    """J = -x^2 - y^2 / 100 where log pi depends on y alone: the KL allows steps that jump from slope to slope in x."""
    if not braked:
        monkeypatch.setattr(Brake, "feel", lambda self, slope: 1.0)
    theta = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))
    optimizer = torch.optim.AdamW([theta], lr=1e-2, weight_decay=0.0)
    schedule, curvature = SNRSchedule(optimizer, "auto"), torch.tensor([1.0, 0.01], dtype=torch.float64)
    losses = []
    for _ in range(300):
        theta.grad = 2 * curvature * theta.detach()
        schedule.step(Moments(1.0, 1.0, 4))
        before = theta.detach().clone()
        optimizer.step()
        schedule.confine(lambda before=before: (theta.detach() - before)[1].expand(4))
        losses.append(float(curvature @ theta.detach().square()))
    assert (sum(losses[-50:]) / 50 < 1e-3) == braked
    assert (schedule.rule.metrics["lr_brake"] < 0.9) == braked
