"""Any optimizer, any torch scheduler, clipping, accumulation and skipped steps: eta_0 is scaled for the step only."""

import math

import pytest
import torch

from oblrpo import estimators
from oblrpo.estimators import Moments, SNRSchedule
from oblrpo.estimators.averages import MomentAverage
from tests.estimators.nats import quadratic

BATCH = Moments(signal2=2.0, trace_cov=8.0, n=4)  # N SNR = 1


def optimizer_of(kind=torch.optim.SGD, lr=0.1, **args):
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return kind([parameter], lr=lr, **args)


def step(optimizer):
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_the_rate_is_scaled_for_the_step_only(kind):
    optimizer = optimizer_of(kind)
    schedule = SNRSchedule(optimizer)
    for _ in range(3):
        schedule.step(BATCH)
        assert schedule.learning_rates == pytest.approx([0.05])
        step(optimizer)
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_step_taken_has_the_scaled_rate():
    optimizer = optimizer_of()
    SNRSchedule(optimizer).step(BATCH)
    step(optimizer)
    torch.testing.assert_close(optimizer.param_groups[0]["params"][0].detach(), torch.full((3,), 0.95))


@pytest.mark.parametrize(
    "scheduler_of",
    [
        lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda t: 1 / (t + 1)),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.4, total_steps=10),
    ],
)
def test_schedulers_never_see_the_scaled_rate(scheduler_of):
    """Also those that chain on the group's own rate."""
    alone, scheduled = optimizer_of(), optimizer_of()
    reference, scheduler = scheduler_of(alone), scheduler_of(scheduled)
    schedule = SNRSchedule(scheduled)
    for _ in range(6):
        eta_0 = alone.param_groups[0]["lr"]
        factor = schedule.step(BATCH)
        assert schedule.learning_rates[0] == pytest.approx(eta_0 * factor)
        for optimizer, each in ((alone, reference), (scheduled, scheduler)):
            step(optimizer)
            each.step()
    assert scheduled.param_groups[0]["lr"] == pytest.approx(alone.param_groups[0]["lr"])


def test_two_steps_without_an_update_do_not_compound():
    optimizer = optimizer_of()
    schedule = SNRSchedule(optimizer)
    schedule.step(BATCH)
    schedule.step(BATCH)
    assert schedule.learning_rates == pytest.approx([0.05])


def test_a_skipped_step_is_restored_by_hand():
    """A gradient scaler leaves out optimizer.step(); a scheduler that chains on the rate must not see it scaled."""
    alone, scheduled = optimizer_of(), optimizer_of()
    reference, scheduler = (torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (alone, scheduled))
    schedule = SNRSchedule(scheduled)
    alone.step()
    scheduled.step()
    for _ in range(4):
        schedule.step(BATCH)
        schedule.restore()
        reference.step()
        scheduler.step()
    assert schedule.learning_rates == pytest.approx([alone.param_groups[0]["lr"]])


def test_every_group_and_tensor_rates():
    a, b = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    a.grad, b.grad = torch.ones(1), torch.ones(1)
    optimizer = torch.optim.AdamW([{"params": [a], "lr": torch.tensor(0.2)}, {"params": [b], "lr": 0.4}])
    held = optimizer.param_groups[0]["lr"]
    schedule = SNRSchedule(optimizer)
    schedule.step(BATCH)
    assert schedule.learning_rates == pytest.approx([0.1, 0.2])
    optimizer.step()
    assert schedule.learning_rates == pytest.approx([0.2, 0.4])
    assert optimizer.param_groups[0]["lr"] is held


KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1),
    "muon": lambda p: torch.optim.Muon(p, lr=0.02),
}


def warm_up_and_cosine(t):
    """Of eta_0: linear over 3 steps, then down to 0 at step 12."""
    return (t + 1) / 3 if t < 2 else 0.5 * (1 + math.cos(math.pi * (t - 2) / 10))


def train(kind, by_hand):
    """Eight updates of a matrix: accumulated over four blocks, measured, scaled, clipped, stepped."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2, bias=False, dtype=torch.float64)
    optimizer = KINDS[kind](layer.parameters())
    eta_0 = optimizer.param_groups[0]["lr"]
    schedule = None if by_hand else SNRSchedule(optimizer, ema=0.9, warmup=4)
    scheduler = None if by_hand else torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up_and_cosine)
    average = MomentAverage(0.9)
    for t in range(8):
        optimizer.zero_grad()
        norms = []
        for _ in range(4):
            before = 0 if layer.weight.grad is None else layer.weight.grad.clone()
            x_NC = torch.randn(5, 3, dtype=torch.float64)
            ((layer(x_NC) - x_NC[:, :2] - 1).square().mean() / 4).backward()
            norms.append((4 * (layer.weight.grad - before)).square().sum())
        batch = estimators.moments(torch.stack(norms), estimators.squared_norm(list(layer.parameters())), 5)
        if schedule is None:
            average.add(batch)
            n_snr = average.moments.n_snr
            factor = n_snr / (1 + n_snr) * min(1, (t + 1) / 4)
            optimizer.param_groups[0]["lr"] = eta_0 * warm_up_and_cosine(t) * factor
        else:
            schedule.step(batch)
        torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.3)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return layer.weight.detach()


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_run_is_the_one_scaled_by_hand(kind):
    """Under warm-up and cosine, with clipping after `step` and gradients accumulated."""
    if kind == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch < 2.9 has no Muon")
    torch.testing.assert_close(train(kind, by_hand=False), train(kind, by_hand=True), rtol=1e-12, atol=1e-12)


def test_clipping_is_not_seen_by_the_moments_but_by_auto_it_is():
    """`auto` measures the update that was made, whatever was done to the gradient on the way."""
    optimizer = optimizer_of(lr=0.5)
    schedule = SNRSchedule(optimizer, "auto", kl=10.0)
    parameter = optimizer.param_groups[0]["params"][0]
    schedule.step(BATCH)
    parameter.grad *= 0.1
    optimizer.step()
    schedule.limit_step(lambda: quadratic(parameter.detach() - 1))
    schedule.step(BATCH)
    assert schedule.rule.state.root_kappa**2 == pytest.approx(0.1**2 / 2)


def test_a_rate_that_somebody_else_sets_in_between_stays():
    """Only what was set here is put back; the other group's rate was."""
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    schedule = SNRSchedule(optimizer)
    schedule.step(Moments(signal2=1.0, trace_cov=24.0, n=8))
    optimizer.param_groups[0]["lr"] = 0.5
    schedule.restore()
    assert schedule.learning_rates == [0.5, 0.1]
