"""The brake on steps that overshoot, on objectives whose slope is known."""

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
    [("SGD", {"momentum": 0.9}), ("Adam", {}), ("AdamW", {"weight_decay": 0.0}), ("Adam", {"betas": (0.5, 0.9)})],
)
def test_the_slope_is_that_along_the_last_update(name, settings):
    """<update, -gradient of the loss>, up to one positive scale for all gradients."""
    torch.manual_seed(0)
    optimizer, update = updated(
        lambda p: getattr(torch.optim, name)(p, lr=0.01, **settings), torch.randn(7, 5, dtype=torch.float64)
    )
    scales = []
    for gradient in torch.randn(4, 5, dtype=torch.float64):
        scales.append(with_gradient(optimizer, gradient) / -float(update @ gradient))
    assert scales == pytest.approx([scales[0]] * 4, rel=1e-6)
    assert scales[0] > 0


@pytest.mark.parametrize("name", ["SGD", "RMSprop", "Adagrad"])
def test_optimizers_that_keep_no_average_tell_nothing(name):
    make = lambda p: getattr(torch.optim, name)(p, lr=0.01)  # noqa: E731
    assert slope_left(updated(make, torch.ones(2, 5, dtype=torch.float64))[0]) is None


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
