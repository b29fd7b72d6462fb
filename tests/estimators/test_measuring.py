"""Rules that measure updates, where log-probabilities are rounded to few digits."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor

from oblrpo.estimators import Moments, SNRSchedule
from oblrpo.estimators.measuring import AIM, EVERY, LINEAR, NEAR, GaugeState, _Lengths, mean_square

BATCH = Moments(signal2=0.0, trace_cov=8.0, n=4)
NOISE = 0.012
"""What rounding changes of a token, in nats: the root mean square of a difference."""
OUTPUTS, WEIGHTS = 4, 6


class Rounded:
    """Log-probabilities that are linear in the weights, but for rounding, which falls anew with every call."""

    def __init__(self, mode, start, length, noise=NOISE, low_precision=True, **settings):
        self.random = torch.Generator().manual_seed(0)
        self.weights = torch.nn.Parameter(1e-3 * (1 + torch.rand(WEIGHTS, generator=self.random)))
        self.scores_STW = 1e4 * torch.randn(OUTPUTS, length, WEIGHTS, generator=self.random, dtype=torch.float64)
        self.optimizer = torch.optim.Adam([self.weights], lr=start)
        self.schedule = SNRSchedule(self.optimizer, mode, low_precision=low_precision, **settings)
        self.length, self.noise, self.measured, self.headroom = length, noise, 0, math.inf
        self.noises = torch.Generator().manual_seed(1)

    def logp_ST(self):
        self.measured += 1
        noise_ST = torch.randn(self.scores_STW.shape[:2], generator=self.noises, dtype=torch.float64)
        return self.scores_STW @ self.weights.detach().double() + self.noise / math.sqrt(2) * noise_ST

    def step(self):
        """One update; its rate, and what was measured of it."""
        self.weights.grad = torch.randn(WEIGHTS, generator=self.random) + 2
        self.schedule.step(BATCH, mean_length=float(self.length), headroom=self.headroom)
        rate = self.schedule.learning_rates[0]
        before_ST, self.measured = 0 if self.schedule.rule.gauge.low_precision else self.logp_ST(), 0
        self.optimizer.step()
        taken = self.schedule.limit_step(lambda: self.logp_ST() - before_ST)
        return rate * taken.share, taken


def rates(*given, steps=200, **more):
    run = Rounded(*given, **more)
    return torch.tensor([run.step()[0] for _ in range(steps)], dtype=torch.float64)


class Exact(_Lengths):
    """An update that moves four tokens by k sqrt(a), up and down, and rounding across it of the mean square `floor`."""

    def __init__(self, a, floor, state):
        self.a, self.floor, self.gauge, self.taken = a, floor, SimpleNamespace(state=state), []

    def _at(self, length):
        self.taken.append(length)
        moved, rounded = torch.tensor([[1.0, -1, 1, -1], [1, 1, -1, -1]], dtype=torch.float64)
        return (length * math.sqrt(self.a) * moved + math.sqrt(self.floor) * rounded)[None]


@pytest.mark.parametrize(("k", "taken"), [(1.0, 10.0), (10.0, 10.0), (30.0, 30.0)])
def test_the_floor_is_what_two_lengths_leave(k, taken):
    """Of a mean square a k^2 + f at k and k / 10, once k stands out from its tenth: (100 tenth - size) / 99 is f."""
    a, floor = 1e-3, 4e-3
    lengths = Exact(a, floor, GaugeState())
    assert a + floor < AIM / NEAR < a * 900 + floor < LINEAR
    found, change, found_floor = lengths._with_floor(k, lengths._at(k))
    assert (found, mean_square(change)) == pytest.approx((taken, a * taken**2 + floor))
    assert found_floor == pytest.approx(floor, rel=1e-9)


@pytest.mark.parametrize("floor", [0.0, 1e-3, 4e-3, 2e-2])
def test_the_kl_is_that_of_the_update_without_rounding(floor):
    """Four tokens of a change c have the KL 4 c^2 / 2, at whatever rate, once reach and floor are known."""
    a, state = 1e-6, GaugeState(reach=1e-3, floor=floor, measured=1)
    for used in (1.0, 1.0, 2.0):
        assert Exact(a * used**2, floor, state).kl(used) == pytest.approx(2 * a * used**2, rel=1e-3)
        assert (state.reach, state.floor) == pytest.approx((math.sqrt(a), floor), rel=1e-6, abs=1e-9)


def test_a_second_length_is_taken_every_so_many_updates_and_where_rounding_is_most_of_what_is_seen():
    a, floor, state, counts = 1e-6, 2e-2, GaugeState(), []
    for _ in range(2 * EVERY + 1):
        lengths = Exact(a, floor, state)
        lengths.kl(1.0)
        counts.append(len(lengths.taken))
    assert [number for number, count in enumerate(counts) if count > 1] == [0, EVERY, 2 * EVERY]
    slower = Exact(a / 10_000, floor, state)  # it is far above AIM / NEAR, by rounding
    slower.kl(1.0)
    assert len(slower.taken) > 1
    assert state.reach == pytest.approx(math.sqrt(a) / 100, rel=1e-6)


@pytest.mark.parametrize("length", [100, 2000])
@pytest.mark.parametrize("start", [1e-9, 1e-6, 1e-3])
def test_auto_finds_the_rate_of_exact_log_probabilities(start, length):
    """Single updates are measured on few tokens; the mean of ten is within a fifth, from the twentieth on."""
    exact, found = (rates("auto", start, length, noise=noise) for noise in (0.0, NOISE))
    ratios = (found / exact).log()[20:].view(-1, 10).mean(1).exp()
    assert 0.8 < float(ratios.min()) <= float(ratios.max()) < 1.25
    assert float(found.max()) < 1.25 * max(float(exact.max()), start)


def test_rounding_taken_for_movement_is_what_it_is_told_for():
    """Not told that log-probabilities are rounded, it takes rounding for movement, and the rate falls without end."""
    exact, found = (rates("auto", 1e-6, 2000, noise=noise, low_precision=False, kl=0.2) for noise in (0.0, NOISE))
    assert float(found[-1]) < 0.7 * float(exact[-1])


@pytest.mark.parametrize("length", [100, 2000])
@pytest.mark.parametrize("start", [1e-9, 1e-6, 1e-3])
def test_kl_finds_the_rate_of_exact_log_probabilities(start, length):
    """It is one of 1.5^n times the start, and stays where the KL is within twice of the target."""
    exact, found = (rates("kl", start, length, noise=noise) for noise in (0.0, NOISE))
    assert float((found / exact).log().abs()[40:].max()) < math.log(1.6)
    told = rates("kl", start, length, low_precision=False)
    assert length == 100 or float(told[-1]) < 0.1 * float(exact[-1])


@pytest.mark.parametrize("mode", ["auto", "kl"])
def test_a_measurement_costs_two_forwards_and_a_third_in_every_tenth_update(mode):
    """Far from the limit of `auto`; near it an update that went too far is measured again, at its new length."""
    run = Rounded(mode, 1e-6, 500)
    run.headroom = 0.05
    counts = []
    for _ in range(60):
        run.step()
        counts.append(run.measured)
    first = counts.index(3, 20)  # where an update was shortened before, one was measured twice
    assert counts[20:] == [3 if number % 10 == first % 10 else 2 for number in range(20, 60)]


@pytest.mark.parametrize("mode", ["auto", "kl"])
def test_the_update_is_put_back_to_the_last_bit(mode):
    """And where nothing rounds nothing of it is done."""
    told, plain = (
        Rounded(mode, 1e-7, 100, noise=0.0, low_precision=low_precision, kl=1e9) for low_precision in (True, False)
    )
    if mode == "kl":  # the first update of `auto` is made as long as it was meant
        for run in (told, plain):
            run.step()
        assert torch.equal(told.weights, plain.weights)
        assert told.measured > plain.measured == 1
        assert plain.schedule.rule.gauge.state.reach == 0

    def fail():
        raise MemoryError

    told.weights.grad = torch.ones(WEIGHTS)
    told.schedule.step(BATCH, mean_length=100.0)
    told.optimizer.step()
    made = told.weights.detach().clone()
    with pytest.raises(MemoryError):
        told.schedule.limit_step(fail)
    assert torch.equal(told.weights, made)


def test_no_step_takes_more_than_four_times_what_was_meant():
    for start in (1e-6, 1e-4, 1.0):
        run = Rounded("auto", start, 2000)
        for _ in range(40):
            before = run.weights.detach().double()
            taken = run.step()[1]
            change_ST = run.scores_STW @ (run.weights.detach().double() - before)
            kl = float((change_ST.expm1() - change_ST).sum() / OUTPUTS)
            assert kl < 1.2 * 4 * run.schedule.target_kl, "measured with some error"
            assert taken.kl == pytest.approx(kl, rel=0.3)


@pytest.mark.parametrize("mode", ["auto", "kl"])
def test_weights_on_the_grid_of_bfloat16_are_measured_as_if_they_were_not(mode):
    """Those of most published models. Read in bfloat16, an update of 1e-5 moves none of them, and twice 1e-3 all."""
    random = torch.Generator().manual_seed(0)
    weights = torch.nn.Parameter((0.5 + torch.rand(20_000, generator=random)).bfloat16().float())
    scores_SW = torch.randn(64, 20_000, generator=random) + 1  # what Adam's update moves is their sum
    optimizer = torch.optim.Adam([weights], lr=1e-9)
    schedule = SNRSchedule(optimizer, mode, low_precision=True, kl=0.02)
    for _ in range(100):
        weights.grad, before = -torch.ones(20_000), weights.detach().clone()
        schedule.step(BATCH, mean_length=1.0)
        optimizer.step()
        taken = schedule.limit_step(lambda: scores_SW @ weights.detach().bfloat16().float())
        kl = float((scores_SW @ (weights.detach() - before)).square().mean() / 2)
    assert taken.kl == pytest.approx(kl, rel=0.4)


def test_weights_kept_in_bfloat16_are_measured_by_what_rounding_left_of_the_update():
    weights = torch.nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    schedule = SNRSchedule(optimizer, "auto", low_precision=True, kl=100.0)
    for gradient, expected in ((2.0**-12, 0.0), (2.0**-6, 64 * 2.0**-12 / 2)):  # lost; two numbers further
        weights.grad = torch.full((64,), gradient, dtype=torch.bfloat16)
        schedule.step(BATCH, mean_length=10.0)  # of which the first step may take what it does take
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.step()
        made = weights.detach().clone()
        assert schedule.limit_step(lambda: weights.detach().double()[None]).kl == pytest.approx(expected, rel=0.1)
        assert torch.equal(weights, made)


@pytest.mark.parametrize("mode", ["auto", "kl"])
def test_a_policy_that_nothing_moves_keeps_its_rate(mode):
    run = Rounded(mode, 1e-6, 50)
    run.scores_STW *= 0
    found = [run.step() for _ in range(3)]
    assert [rate for rate, _ in found] == pytest.approx([1e-6] * 3)
    assert all(taken.kl < 1e-12 for _, taken in found)


def test_an_update_at_a_rate_of_zero_moves_nothing():
    run = Rounded("kl", 1e-6, 50)
    run.optimizer.param_groups[0]["initial_lr"], run.optimizer.param_groups[0]["lr"] = 1e-6, 0.0
    assert run.step()[1] == (0.0, 1.0)
    assert run.measured == 0


@pytest.mark.parametrize("mode", ["auto", "kl"])
def test_a_resumed_rule_measures_as_if_it_had_gone_on(mode):
    first, second = Rounded(mode, 1e-6, 50), Rounded(mode, 1e-6, 50)
    for _ in range(13):
        first.step()
    second.schedule.load_state_dict(json.loads(json.dumps(first.schedule.state_dict())))
    second.optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    second.weights.data.copy_(first.weights.data)
    second.random.set_state(first.random.get_state())
    second.noises.set_state(first.noises.get_state())
    assert [first.step() for _ in range(12)] == [second.step() for _ in range(12)]


def test_the_mean_square_is_over_tokens():
    assert mean_square(torch.tensor([[3.0, 0.0], [1.0, 0.0]])) == 5.0
    assert mean_square(torch.zeros(2, 2)) == 0.0
    assert mean_square(torch.tensor([math.nan, 1.0])) == math.inf


@pytest.fixture
def mesh(tmp_path):
    """A group of one process, over which weights may be sharded."""
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    yield torch.distributed.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_shards_are_measured_as_whole_weights_are(mesh):
    """As FSDP2 has them."""
    found = []
    for place in (lambda tensor: tensor, lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])):
        run = Rounded("auto", 1e-6, 50)
        weights = torch.nn.Parameter(place(run.weights.detach().clone()))
        run.optimizer = torch.optim.Adam([weights], lr=1e-6)
        run.schedule = SNRSchedule(run.optimizer, "auto", low_precision=True)
        for _ in range(3):
            weights.grad = place(torch.ones(WEIGHTS))
            run.schedule.step(BATCH, mean_length=50.0)
            run.optimizer.step()

            def logp_ST(run=run, weights=weights):
                whole = weights.detach()
                run.weights.data.copy_(whole.full_tensor() if hasattr(whole, "full_tensor") else whole)
                return run.logp_ST()

            found.append(run.schedule.limit_step(logp_ST).kl)
    assert found[:3] == found[3:]


def test_a_rank_whose_shard_stayed_where_it_was_measures_with_the_others(mesh, monkeypatch):
    """Else the others wait for it in a forward for ever; another rank's word is pretended."""
    weights = torch.nn.Parameter(distribute_tensor(torch.ones(WEIGHTS), mesh, [Shard(0)]))
    weights.grad = distribute_tensor(torch.zeros(WEIGHTS), mesh, [Shard(0)])
    optimizer = torch.optim.SGD([weights], lr=1e-6)
    schedule = SNRSchedule(optimizer, "auto", low_precision=True)
    measured = []

    def kl():
        schedule.step(BATCH, mean_length=50.0)
        optimizer.step()
        return schedule.limit_step(lambda: measured.append(1) or torch.zeros(OUTPUTS, 50)).kl

    assert kl() == 0
    assert not measured
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flag, op: flag.fill_(1.0))
    kl()
    assert measured
