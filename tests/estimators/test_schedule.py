import pytest
import torch

from oblrpo.estimators import Moments, SNRSchedule

BATCH = Moments(signal2=2.0, trace_cov=8.0, n=4)  # N SNR = 1


def optimizer_of(kind=torch.optim.SGD, lr=0.1, **args):
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return kind([parameter], lr=lr, **args)


def step(optimizer):
    optimizer.param_groups[0]["params"][0].grad = torch.ones(3)
    optimizer.step()


@pytest.mark.parametrize(
    ("mode", "factor"),
    [("debiased", 2 / (2 + 2)), ("plugin", 4 / (4 + 2)), ("off", 1.0)],
)
def test_factor_of_one_batch(mode, factor):
    """debiased 1 - T/(N ||g||^2); plugin x/(1 + x) with x = N ||g||^2 / T; here ||g||^2 = 4, T/N = 2."""
    optimizer = optimizer_of()
    assert SNRSchedule(optimizer, mode=mode).step(BATCH) == pytest.approx(factor)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * factor)


def test_debiased_brakes_where_the_plugin_cannot():
    noise = Moments(signal2=-0.5, trace_cov=8.0, n=4)  # ||g||^2 = 1.5 < T/N = 2: less than noise alone would give
    assert SNRSchedule(optimizer_of(), mode="debiased").step(noise) == 0.0
    assert SNRSchedule(optimizer_of(), mode="plugin").step(noise) == pytest.approx(1.5 / 3.5)


def test_averages_are_kept_apart_and_bias_corrected():
    schedule = SNRSchedule(optimizer_of(), ema=0.9)
    schedule.step(Moments(1.0, 4.0, 2))
    assert (schedule.smoothed.signal2, schedule.smoothed.trace_cov) == pytest.approx((1.0, 4.0))
    factor = schedule.step(Moments(3.0, 2.0, 2))
    signal2, trace_cov = (0.9 * 0.1 * 1 + 0.1 * 3) / 0.19, (0.9 * 0.1 * 4 + 0.1 * 2) / 0.19
    assert schedule.smoothed.signal2 == pytest.approx(signal2)
    assert factor == pytest.approx(signal2 / (signal2 + trace_cov / 2))


def test_floor_ceiling_and_warmup():
    noise = Moments(-1.0, 4.0, 2)
    assert SNRSchedule(optimizer_of(), floor=0.05).step(noise) == 0.05
    assert SNRSchedule(optimizer_of(), ceiling=0.3).step(BATCH) == 0.3
    warm = SNRSchedule(optimizer_of(), warmup=4, ema=0)
    assert [warm.step(BATCH) for _ in range(5)] == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5])
    plain = SNRSchedule(optimizer_of(), "off", warmup=2)
    assert [plain.step(BATCH) for _ in range(3)] == [0.5, 1.0, 1.0]


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


def test_state_survives():
    first, second = SNRSchedule(optimizer_of()), SNRSchedule(optimizer_of())
    for batch in (BATCH, Moments(1.0, 3.0, 5)):
        first.step(batch)
    second.load_state_dict(first.state_dict())
    assert second.smoothed == first.smoothed
    assert second.step(BATCH) == first.step(BATCH)


def test_no_gradient_at_all():
    nothing = Moments(0.0, 0.0, 4)
    assert SNRSchedule(optimizer_of()).step(nothing) == 0.0
    assert SNRSchedule(optimizer_of(), "plugin").step(nothing) == 0.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"mode": "fast"}, "debiased, plugin, off"), ({"ema": 1.0}, "ema"), ({"floor": 2.0}, "floor"),
     ({"floor": -1.0}, "floor"), ({"warmup": -1}, "warmup")],
)  # fmt: skip
def test_bad_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        SNRSchedule(optimizer_of(), **settings)


def test_smoothed_needs_a_step():
    with pytest.raises(ValueError, match="no step"):
        _ = SNRSchedule(optimizer_of()).smoothed
