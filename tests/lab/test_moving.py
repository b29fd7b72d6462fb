"""The table of what moves: a situation at tiny size through the command, and the measures that it rests on."""

import csv
import json
import math
import sys

import pytest
import torch

from lab.moving import __main__ as moving
from lab.moving import outage, place
from lab.moving.place import Place, drift, first_step, geometric_mean, load, step_kl, whole_steps
from oblrpo.step import Learner

TINY = place.EXAMPLE | {
    "model_args": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, "prompts_per_step": 4,
    "max_completion_length": 4, "eval_prompts": 4, "eval_samples": 1,
}  # fmt: skip


@pytest.fixture
def tiny(monkeypatch):
    """A smaller policy and batch, and one kind of outage."""
    monkeypatch.setattr(place, "EXAMPLE", TINY)
    monkeypatch.setattr(place, "FRESH", 16)
    monkeypatch.setattr(outage, "CONSTANTS", (0.37,))


def test_the_command_measures_an_outage_and_prints_the_table(tiny, tmp_path, monkeypatch, capsys):
    file = tmp_path / "new" / "moving.csv"
    moving.write(file, {("M1", "7", "old"): "1", ("M3", "7", "old"): "1"})
    words = ["--only", "M3", "--seeds", "3", "--output", str(tmp_path / "runs"), "--csv", str(file)]
    monkeypatch.setattr(sys, "argv", ["moving", *words])
    moving.main()
    with file.open(newline="") as lines:
        found = {(row["situation"], row["seed"], row["figure"]): float(row["value"]) for row in csv.DictReader(lines)}
    assert found.pop(("M1", "7", "old")) == 1  # measured earlier, of a situation that was not asked for
    assert {key[:2] for key in found} == {("M3", "3")}

    metrics = tmp_path / "runs" / "M3" / "seed_3" / "0.37" / "metrics.jsonl"
    rewards = {row["step"]: row.get("reward") for row in map(json.loads, metrics.read_text().splitlines())}
    assert [step for step, reward in rewards.items() if reward == pytest.approx(0.37)] == list(outage.DOWN)
    assert found["M3", "3", "0.37: updates"] == 0
    assert found["M3", "3", "0.37: nats a token"] == 0

    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("| M3 | ")
    assert ".37: updates **0**" in last
    assert "reward)" not in last  # a name in parentheses is for the CSV alone


def test_what_moves_a_policy_is_seen(tiny, tmp_path):
    """By the KL of its steps, which is that of the policies before and after, and by its drift."""
    torch.set_num_threads(1)
    learn = Learner.learn
    with whole_steps(4) as kls:
        run = Place(tmp_path, 0).train("run", steps=2, save_steps=1, schedule="off", learning_rate=0.1)
    assert Learner.learn is learn
    assert len(kls) == 2
    before, after = load(run.checkpoint(0)), load(run.checkpoint(1))
    drawn = place.fresh(before, 1, 4)
    assert kls[0] == pytest.approx(step_kl(place.logps(before, drawn), place.logps(after, drawn)), rel=1e-4)
    assert kls[0] > 0.01
    assert drift(before, after, 0, 4) > 0.001
    assert drift(before, before, 0, 4) == 0


def test_means_leave_out_what_is_no_number():
    assert geometric_mean([1.0, 100.0, math.nan, 0.0]) == pytest.approx(10.0)
    assert math.isnan(geometric_mean([]))
    assert first_step([0.0, 1.0, 0.0, 1.0, 1.0], 1.0, window=2) == 5
    assert first_step([0.0, 1.0], 1.0) == 2
    assert first_step([0.0], 1.0) == math.inf


@pytest.mark.parametrize(
    ("value", "shown"),
    [("0.0125", ".0125"), ("-0.07", "-.07"), ("1234.5", "1234"), ("0", "0"), ("nan", "none"), ("inf", "never")],
)
def test_a_number_as_the_table_has_it(value, shown):
    assert moving.number(value) == shown
