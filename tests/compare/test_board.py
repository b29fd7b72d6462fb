"""What a person sees while a comparison runs."""

import io

import pytest
from rich.console import Console

from oblrpo.compare import board as boards
from oblrpo.compare.board import Board
from tests.compare.conftest import plan_of, pretend


@pytest.fixture
def shown(write_spec, tmp_path, monkeypatch):
    """Two variants at two rates: one rloo run has ended and one is in progress, after 100 s."""
    now = [0.0]
    monkeypatch.setattr(boards.time, "monotonic", lambda: now[0])
    variants = {"rloo": {"algorithm": "rloo"}, "ours": {"algorithm": "oblrpo"}}
    spec = write_spec(variants=variants, learning_rates=[1e-3, 1e-2], seeds=1, base={"warm_start_steps": 0})
    plan = plan_of(spec, tmp_path / "out")
    board = Board(plan, Console(file=io.StringIO()))
    first, second = plan.search(plan.spec.variants[0])
    pretend(first, [0.2, 0.3, 0.3, 0.3, 0.4])
    board.started(first)
    board.ended(first, seconds=50.0)
    board.started(second)
    pretend(second, [0.2] * 5, reward=lambda step: 0.3)
    second.folder.drop_metrics_after(1)
    now[0] = 100.0
    console = Console(file=io.StringIO(), width=100)
    console.print(board._render())
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_the_table_of_a_comparison_in_progress(shown):
    assert shown == [
        "variant runs best rate so far accuracy there",
        "rloo 1/2 0.001 0.400",
        "ours 0/2",
        "rloo, rate 0.01, seed 0: step 1/4, reward 0.300",
        "1/4 runs, 2 min, about 4 min left",  # 1.25 runs in 100 s, 2.75 to do
    ]
