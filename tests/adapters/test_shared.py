"""What both adapters have, which needs neither TRL nor verl."""

import json
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from oblrpo.adapters.shared import (
    Rule,
    baseline_metrics,
    check,
    check_version,
    finite,
    key_of,
    load_schedule,
    measured,
    norm_metrics,
    of_all_ranks,
    off,
    rows_of_all_ranks,
    schedule_state,
    signal_metrics,
    with_tensors,
    without_tensors,
)
from oblrpo.errors import InputError
from oblrpo.estimators import Moments, SNRSchedule

LEAST, BELOW = (1, 16), (1, 17)


@pytest.mark.parametrize("version", ["1.16", "1.16.0", "1.16.0.dev3", "1.16.99", "1.16.2+cu128"])
def test_a_version_that_is_known_is_taken(version):
    check_version("trl", version, LEAST, BELOW)


@pytest.mark.parametrize("version", ["1.15.9", "0.17", "1.17", "1.17.0", "2.16.1"])
def test_another_version_is_refused_with_those_that_are_known(version):
    with pytest.raises(ImportError, match=rf"works with trl>=1.16,<1.17, and this is trl {version}; install"):
        check_version("trl", version, LEAST, BELOW)


RULES = (Rule("a", (1, 2), "why a"), Rule("b", off, "why b", "b=0"), Rule("c", lambda value: value > 0, "why c", "c=1"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"a": 3, "b": 0, "c": 1}, "Ours does not work with a=3: why a; set a=1."),
        ({"a": 2, "b": 1, "c": 1}, "Ours does not work with b=1: why b; set b=0."),
        ({"a": 2, "b": "", "c": 0}, "Ours does not work with c=0: why c; set c=1."),
        (
            {"a": 0, "b": None, "c": 0},
            "Ours does not work with 2 settings:\n- a=0: why a; set a=1.\n- c=0: why c; set c=1.",
        ),
    ],
)
def test_all_that_does_not_hold_is_said_at_once(values, said):
    with pytest.raises(InputError) as raised:
        check(RULES, "Ours", values.get)
    assert str(raised.value) == said
    check(RULES, "Ours", {"a": 1, "b": False, "c": 5}.get)


ROWS = [torch.tensor([[1.0, 2.0]]), torch.zeros(0, 1), torch.tensor([[3.0], [4.0]])]
"""Of three ranks, in number and width their own."""


def gather(rank, folder):
    store = torch.distributed.FileStore(str(folder / "store"), len(ROWS))
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=len(ROWS))
    torch.save((of_all_ranks({"rank": rank}), rows_of_all_ranks(ROWS[rank])), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_every_rank_gets_what_all_have(tmp_path):
    torch.multiprocessing.spawn(partial(gather, folder=tmp_path), nprocs=len(ROWS))
    for rank in range(len(ROWS)):
        values, rows_SC = torch.load(tmp_path / f"{rank}.pt")
        assert values == [{"rank": each} for each in range(len(ROWS))]
        assert rows_SC.tolist() == [[1, 2], [3, 0], [4, 0]]


def test_alone_one_has_one_s_own():
    rows_SC = torch.randn(3, 4, dtype=torch.float64)
    assert torch.equal(rows_of_all_ranks(rows_SC), rows_SC)
    assert of_all_ranks("mine") == ["mine"]


def test_one_row_in_four_is_measured_whichever_rank_has_it():
    """And every rank has as many passes to make."""
    ids = torch.randint(1000, (33, 5), generator=torch.Generator().manual_seed(0))
    keys = [key_of(row) for row in ids]
    assert len(set(keys)) == len(ids)
    least = {key for key in keys if sum(other < key for other in keys) < 9}  # of 33 rows
    for order in (torch.arange(33), torch.randperm(33, generator=torch.Generator().manual_seed(1))):
        rows = [keys[place] for place in order] + [None] * 3
        ranks = [rows[:12], rows[12:24], rows[24:]]
        found = [measured(ranks, rank) for rank in range(3)]
        assert {ranks[rank][place] for rank, (places, meant) in enumerate(found) for place in places[:meant]} == least
        assert sum(meant for _, meant in found) == 9
        assert {len(places) for places, _ in found} == {max(meant for _, meant in found)}
        assert all(len(set(places)) == len(places) for places, _ in found)


def test_baselines_and_norms_of_a_batch_with_gaps():
    """What stands where an output does not count, NaN too, enters nothing."""
    nan = math.nan
    rewards_PG = torch.tensor([[1.0, 0.0, 0.0], [1.0, nan, 9.0], [nan, nan, nan]])
    valid_PG = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])
    baseline_PG = torch.tensor([[0.5, 1.0, 1.5], [3.0, nan, 7.0], [nan, nan, nan]])
    norm2_PG = torch.tensor([[2.0, 4.0, 6.0], [18.0, nan, 99.0], [nan, nan, nan]])
    found = baseline_metrics(valid_PG, baseline_PG) | norm_metrics(rewards_PG, valid_PG, norm2_PG)
    assert found == pytest.approx(
        {"baseline/mean": 2.0, "baseline/spread": math.sqrt(2), "score_norm2/mean": 7.5, "score_norm2/kappa": 2.0}
    )
    alone = baseline_metrics(valid_PG[1:], baseline_PG[1:])
    assert alone["baseline/mean"] == 3.0
    assert math.isnan(alone["baseline/spread"])
    assert norm_metrics(rewards_PG[2:], valid_PG[2:], norm2_PG[2:]) == {}


@pytest.fixture
def schedule():
    """A schedule, by its mode."""
    return lambda mode: SNRSchedule(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), mode)


def test_signal_and_noise_are_averaged_beside_those_of_the_batch(schedule):
    snr, batch = schedule("debiased"), Moments(4.0, 8.0, 4)
    snr.step(Moments(0.0, 8.0, 4))
    snr.step(batch)
    found, smoothed = signal_metrics(snr, batch), snr.smoothed
    assert (found["signal2"], found["trace_cov"]) == (4.0, 8.0)
    assert (found["snr"], found["n_snr"]) == (smoothed.snr, 4 * smoothed.snr)
    assert 0 < found["snr"] < batch.snr
    assert found["critical_batch_size"] == pytest.approx(1 / found["snr"])
    assert set(signal_metrics(snr, None)) == {"snr", "n_snr", "critical_batch_size"}


def test_infinity_is_nan():
    assert [finite(value) for value in (0.0, -2.5)] == [0.0, -2.5]
    assert all(math.isnan(finite(value)) for value in (math.inf, -math.inf, math.nan))


def test_a_state_goes_through_json(schedule):
    state = {"sums": torch.tensor([1.0, 0.1], dtype=torch.float64), "deep": {"n": 3, "x": torch.zeros(2, 1)}}
    back = with_tensors(json.loads(json.dumps(without_tensors(state))))
    assert torch.equal(back["sums"], state["sums"])
    assert (back["deep"]["n"], back["deep"]["x"].shape) == (3, (2, 1))
    begun, other = schedule("debiased"), schedule("debiased")
    begun.step(Moments(1.0, 24.0, 8))
    load_schedule(other, json.loads(json.dumps(schedule_state(begun))), Path("state.json"), "schedule")
    assert other.smoothed == begun.smoothed


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"mode": "off"}, r"state.json was written with schedule='off'; set it again, or start a new run\."),
        ({}, r"state.json was written by another version of oblrpo \('mode' is missing\)\."),
        ({"mode": "debiased"}, r"state.json was written by another version of oblrpo \('average' is missing\)\."),
    ],
)
def test_a_state_that_is_not_of_this_schedule_is_refused(schedule, state, said):
    with pytest.raises(InputError, match=said):
        load_schedule(schedule("debiased"), state, Path("state.json"), "schedule")
