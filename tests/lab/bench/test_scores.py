"""The bench itself: every row of a tiny table is what it says."""

import json
from dataclasses import replace

import pytest
import torch

from lab.bench import real, scores, tables
from lab.bench.config import BenchConfig
from lab.bench.tables import print_tables
from lab.bench.workload import SHAPES, build
from oblrpo.errors import InputError

pytestmark = pytest.mark.usefixtures("frozen")

TINY = replace(
    SHAPES["short"], name="tiny", sequences=4, tokens=6, group_size=2, hidden=16, intermediate=24, layers=1,
    heads=2, kv_heads=1, head_dim=8, vocabulary=19,
)  # fmt: skip


def test_every_row_is_measured_and_right():
    names = [name for name in scores.METHODS if not name.startswith("Opacus")]  # hooks and warnings: test_rivals
    seconds, peak, rows = scores.measure(build(TINY), names, 2)
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
        if row.method == "calibrated proxy, no norms":
            assert row.norm_error is None
        else:
            assert row.norm_error < 1e-5, row.method
    by_name = {row.method: row for row in rows}
    assert by_name["loop"].flops > 2 > by_name["exact (auto)"].flops


def table(**changes):
    print_tables(BenchConfig(**{"shape": ("short",), "methods": ("exact (auto)",), "rounds": 1} | changes))


def test_tables_can_be_pasted(capsys, monkeypatch):
    monkeypatch.setitem(SHAPES, "short", TINY)
    monkeypatch.setattr("lab.bench.tables.keep_freed", lambda: None)
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
        ({"model": "x"}, "--model needs --data: a model is measured on texts"),
        ({"data": ("x.jsonl",)}, "--data needs --model"),
        ({"all": True}, "--all measures every method; leave out --methods"),
        ({"device": "abacus"}, "device 'abacus' cannot be used"),
    ],
)
def test_bad_input(changes, match):
    with pytest.raises(InputError, match=match):
        table(**changes)


@pytest.fixture
def folder(tmp_path, tiny_policy):
    tiny_policy.save(tmp_path / "tiny")
    return str(tmp_path / "tiny")


def texts(path, rows, column="text"):
    path.write_text("".join(json.dumps({column: row}) + "\n" for row in rows))
    return (str(path),)


def test_a_model_of_ones_own_on_text(folder, tmp_path, capsys):
    """Rows are the text's tokens, end tokens between; every row of the table is right, and what goes on is told."""
    data = texts(tmp_path / "a.jsonl", ["abcdefg", "xyz" * 20], "prompt")
    workload = real.load(folder, data, 4, 9, "cpu", torch.float32)
    assert bytes((workload.ids_ST.flatten()[:7] - workload.ids_ST[0, 0] + ord("a")).tolist()) == b"abcdefg"
    assert workload.ids_ST[0, 7] == workload.model.generation_config.eos_token_id
    assert workload.group_size == 4
    names = ("exact (auto)", "exact, Gram")
    print_tables(BenchConfig(model=folder, data=data, sequences=4, tokens=9, rounds=1, methods=names))
    told = capsys.readouterr()
    lines = [line.split(" | ") for line in told.out.splitlines() if line.startswith("| ")][1:]
    assert [line[0].strip("| ") for line in lines] == ["plain", *names]
    assert float(lines[1][5]) < 1e-5
    assert max(float(line[6].strip("| ")) for line in lines) < 1e-5
    assert "tiny: 4 sequences x 9 tokens in groups of 4" in told.out
    assert "tiny: the reference for errors: 4 backwards, in float64" in told.err
    assert "tiny: round 1 of 1: exact (auto) took" in told.err


def test_a_model_and_texts_that_cannot_be_measured(folder, tmp_path):
    data = texts(tmp_path / "a.jsonl", ["abcdefg"])

    def load(name=folder, data=data, tokens=9):
        return real.load(name, data, 4, tokens, "cpu", torch.float32)

    with pytest.raises(InputError, match=r"holds 8 tokens in 1 texts, but 4 sequences of 9 need 36; give more text"):
        load()
    with pytest.raises(InputError, match=r"--tokens is 2049, but .* reads 2048"):
        load(tokens=2049)
    with pytest.raises(InputError, match="cannot load the model '/nowhere/at/all'"):
        load("/nowhere/at/all")
    with pytest.raises(InputError, match="Cannot read the data file"):
        load(data=("/nowhere.jsonl",))
    with pytest.raises(
        InputError, match=r"b.jsonl line 1 has no column of text; name one of its columns: text, prompt"
    ):
        load(data=texts(tmp_path / "b.jsonl", ["a"], "story"))
    with pytest.raises(InputError, match="leave it out beside --model"):
        print_tables(BenchConfig(model=folder, data=data, shape=("short",)))


def test_the_slow_come_last_and_if_asked_for(monkeypatch):
    assert list(scores.METHODS)[-2:] == ["one trajectory per backward", "loop"]
    told = []

    def measured(workload, names, *arguments):
        told.append(list(names))

    monkeypatch.setattr(tables, "measure", measured)
    monkeypatch.setitem(SHAPES, "short", TINY)
    table(methods=())
    table(methods=(), all=True)
    assert told[0] == [name for name in scores.METHODS if name not in scores.HEAVY]
    assert told[0][:2] == ["plain", "exact (auto)"]
    assert told[1] == list(scores.METHODS)
