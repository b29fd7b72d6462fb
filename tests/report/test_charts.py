"""What charts do with few values, with open intervals, and with values that are nearly equal."""

import re

import pytest

from oblrpo.report import charts
from oblrpo.report.charts import Line, chart
from oblrpo.report.curves import line_of
from oblrpo.report.record import read_run
from tests.report.conftest import row


@pytest.fixture
def axes(monkeypatch):
    """The axes of every chart that is drawn."""
    drawn, savefig = [], charts.Figure.savefig

    def note(figure, *args, **kwargs):
        drawn.append(figure.axes[0])
        return savefig(figure, *args, **kwargs)

    monkeypatch.setattr(charts.Figure, "savefig", note)
    return drawn


def test_a_single_value_is_written_and_not_drawn(axes):
    lines = [Line("reward", [1], [0.25], [0.125], [0.375]), Line("accuracy", [0, 1], [None, 0.5]), Line("none", [], [])]
    figure = chart("Reward", lines, note="how to read it")
    assert not axes
    assert "<b>Reward</b> <small>how to read it</small>" in figure
    assert "reward <b>0.25</b> <small>at step 1, its only value, 95 % interval 0.125 to 0.375</small>" in figure
    assert "accuracy <b>0.5</b> <small>at step 1, its only value</small>" in figure
    assert "none" not in figure
    assert "No step has a value." in chart("Reward", [Line("reward", [1, 2], [None, None])])
    assert "<svg" in chart("Reward", [Line("reward", [1], [0.25], [0.1], [0.4]), Line("accuracy", [0, 1], [0.5, 0.6])])
    segments = [part.get_segments() for part in axes[0].collections if hasattr(part, "get_segments")]
    assert [[end.tolist() for end in segment] for segment in segments] == [[[[1, 0.1], [1, 0.4]]]]


def test_an_interval_without_an_upper_end_fills_nothing(axes):
    chart("Batch", [Line("batch", [1, 2, 3], [20.0, 20.0, 20.0], [10.0, 11.0, 12.0], [None, None, None])])
    (band,) = axes[0].collections
    assert not any(len(path.vertices) for path in band.get_paths())
    assert [list(line.get_ydata()) for line in axes[0].lines] == [[20.0] * 3, [10.0, 11.0, 12.0]]
    assert axes[0].get_ylim()[1] < 30


def test_values_that_are_nearly_equal_look_alike(axes):
    chart("Entropy", [Line("entropy", [1, 2, 3], [5.4678, 5.469, 5.468])])
    low, high = axes[0].get_ylim()
    assert high - low == pytest.approx(0.02 * 5.469, rel=0.01)
    chart("Rate", [Line("rate", [1, 2], [1e-6, 1e-6])])
    low, high = axes[1].get_ylim()
    assert 0.9e-6 < low < 1e-6 < high < 1.1e-6


def test_steps_are_whole_numbers(axes):
    figure = chart("Reward", [Line("reward", [0, 1, 2], [0.1, 0.2, 0.3])])
    assert re.findall(r">(\d[\d.]*)</text>", figure)[:3] == ["0", "1", "2"]


def test_a_step_without_an_update_has_no_rate(write_run):
    rows = [row(1, learning_rate=0.0, grad_norm=0.0), row(2, learning_rate=1e-6)]
    assert line_of(read_run(write_run(rows)), "learning_rate").y == [None, 1e-6]
