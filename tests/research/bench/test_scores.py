"""The bench itself: every row of a tiny table is what it says."""

from dataclasses import replace

import pytest
import torch

from oblrpo.errors import InputError
from oblrpo.research.bench import scores
from oblrpo.research.bench.config import BenchConfig
from oblrpo.research.bench.tables import _parameters, print_tables
from oblrpo.research.bench.workload import SHAPES, build

TINY = replace(
    SHAPES["short"], name="tiny", sequences=4, tokens=6, group_size=2, hidden=16, intermediate=24, layers=1,
    heads=2, kv_heads=1, head_dim=8, vocabulary=19,
)  # fmt: skip


@pytest.mark.slow
def test_every_row_is_measured_and_right():
    names = [name for name in scores.METHODS if not name.startswith("Opacus")]  # hooks and warnings: test_rivals
    seconds, peak, rows = scores.measure(TINY, names, 2, "cpu", torch.float32)
    assert seconds > 0
    assert peak > 0
    assert [row.method for row in rows] == names
    plain = rows[0]
    assert (plain.time, plain.flops, plain.memory, plain.norm_error) == (1, 1, 1, None)
    for row in rows[1:]:
        assert 0 < row.low <= row.time <= row.high
        assert row.flops > 0.9
        assert row.memory > 0
        assert row.gradient_error < 1e-5
        if row.method == "projected":
            assert 0.01 < row.norm_error < 1.5
        elif row.method == "calibrated proxy, no norms":
            assert row.norm_error is None
        else:
            assert row.norm_error < 1e-5, row.method
    by_name = {row.method: row for row in rows}
    assert by_name["loop"].flops > 2 > by_name["exact (auto)"].flops


@pytest.mark.parametrize("shape", [TINY, SHAPES["short"], replace(TINY, tied=False)])
def test_the_parameter_count_is_the_models(shape):
    assert _parameters(shape) == sum(p.numel() for p in build(shape).parameters)


def table(**changes):
    print_tables(BenchConfig(**{"shape": ("short",), "methods": ("exact (auto)",), "rounds": 1} | changes))


@pytest.mark.slow
def test_tables_can_be_pasted(capsys, monkeypatch):
    monkeypatch.setitem(SHAPES, "short", TINY)
    monkeypatch.setattr(scores, "keep_freed_memory", lambda: None)
    monkeypatch.setitem(scores.SCALING, "S", [TINY])
    monkeypatch.setitem(scores.SCALING, "T", [])
    monkeypatch.setitem(scores.SCALING, "parameters", [])
    table(tokens=5, sequences=1)
    assert "1 sequences x 5 tokens in groups of 1" in capsys.readouterr().out
    table(tokens=5)
    printed = capsys.readouterr().out
    assert "4 sequences x 5 tokens in groups of 2" in printed
    assert "| exact (auto) |" in printed
    assert "| plain | 1.00 | 1.00 - 1.00 | 1.00 | 1.00 |" in printed
    print_tables(BenchConfig(scaling=True, rounds=1))
    assert "| 4 x 6, 16 |" in capsys.readouterr().out


def test_what_is_missing_says_so(capsys, monkeypatch):
    monkeypatch.setitem(SHAPES, "short", TINY)
    absent = replace(scores.METHODS["Opacus ghost norms"], missing=lambda: "opacus is not installed")
    monkeypatch.setattr(scores, "METHODS", {**scores.METHODS, "Opacus ghost norms": absent})
    table(methods=("Opacus ghost norms",))
    assert "| Opacus ghost norms | opacus is not installed |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"shape": ("shrot",)}, "unknown 'shrot'; choose from: short.*Did you mean 'short'"),
        ({"methods": ("magic",)}, "unknown 'magic'"),
        ({"rounds": 0}, "at least 1"),
        ({"tokens": 1}, "at least 2"),
        ({"tokens": -3}, "--tokens must be at least 2, or 0 for the shape's own, not -3"),
        ({"scaling": True}, "leave out --shape and --methods"),
        ({"device": "meta"}, "device 'meta' cannot be used"),
        ({"sequences": 12}, "no whole groups of 8"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
    ],
)
def test_bad_input(changes, match):
    with pytest.raises(InputError, match=match):
        table(**changes)
