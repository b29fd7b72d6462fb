"""Files of other formats than JSON Lines."""

import csv

import pytest

from oblrpo.errors import InputError
from oblrpo.tasks.data import problems_of
from oblrpo.tasks.sources import is_hub_name, read_source

ROWS = [{"q": '1 + 1, "quoted"\nnext line', "a": "2"}, {"q": "2 + 2", "a": "4"}]


@pytest.mark.parametrize("ending", ["csv", "CSV"])
def test_csv_with_quotes_commas_and_lines(tmp_path, ending):
    path = tmp_path / f"rows.{ending}"
    path.write_text('\ufeffq,a\n"1 + 1, ""quoted""\nnext line",2\n2 + 2,4\n')
    places, rows = zip(*read_source([str(path)], "train"), strict=True)
    assert list(rows) == ROWS
    assert places[1] == f"{path} line 4"


def test_a_csv_field_may_be_as_large_as_its_file(tmp_path):
    path, limit = tmp_path / "rows.csv", csv.field_size_limit()
    path.write_text(f'q,a\n"{"x" * 300_000}",2\n')
    [(_, row)] = read_source([str(path)], "train")
    assert row == {"q": "x" * 300_000, "a": "2"}
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("q,a\n1\n", "line 2 has more or fewer fields"),
        ("q,a\n1,2,3\n", "line 2 has more or fewer fields"),
        ("q,a\n", "holds no rows"),
        ("", "holds no rows"),
        ("q;a\n1,5;2\n", "the separator seems to be ';'; save the file with commas"),
        ("q\ta\n1\t2\n", r"the separator seems to be '\\t'"),
        ('q,a\n"1,2', "Cannot read the data file"),
    ],
)
def test_bad_csv(tmp_path, text, words):
    (tmp_path / "bad.csv").write_text(text)
    with pytest.raises(InputError, match=words):
        list(read_source([str(tmp_path / "bad.csv")], "train"))


def test_tabs_and_csv_of_another_encoding(tmp_path):
    path = tmp_path / "rows.tsv"
    path.write_text("q\ta\n1, 2\t3\n")
    assert [row for _, row in read_source([str(path)])] == [{"q": "1, 2", "a": "3"}]
    path.write_bytes("q\ta\nschön\t3\n".encode("latin-1"))
    with pytest.raises(InputError, match=r"rows\.tsv is not UTF-8 text; save the file as UTF-8\.$"):
        list(read_source([str(path)]))


def test_arrow_as_datasets_writes_it(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    path, table = tmp_path / "data-00000-of-00001.arrow", pyarrow.Table.from_pylist(ROWS)
    with path.open("wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    assert [row for _, row in read_source([str(path)])] == ROWS
    path.write_bytes(b"no arrow")
    with pytest.raises(InputError, match="Cannot read the data file"):
        list(read_source([str(path)]))


def test_parquet(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    assert [row for _, row in read_source([str(path)], "train")] == ROWS
    path.write_bytes(b"no parquet")
    with pytest.raises(InputError, match="Cannot read the data file"):
        list(read_source([str(path)], "train"))


def test_a_table_of_several_parts_and_types(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"prompt": [{"role": "user", "content": f"{n}?"}], "answer": n, "none": None, "when": None} for n in range(200)
    ]
    messages = pyarrow.list_(pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.large_string())]))
    types = [("prompt", messages), ("answer", pyarrow.int64()), ("none", pyarrow.null()), ("when", pyarrow.date32())]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(rows, pyarrow.schema(types)), path, row_group_size=70)
    found = read_source([str(path)])
    assert list(found) == [(f"{path} row {n}", row) for n, row in enumerate(rows)]
    assert found[130] == (f"{path} row 130", rows[130])
    assert found[-1] == found[199:][0] == (f"{path} row 199", rows[199])
    assert len(read_source([str(path)] * 2)) == 400
    assert read_source([str(path)] * 2)[330] == found[130]
    twice = pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"])
    parquet.write_table(twice, path)
    with pytest.raises(InputError, match=r"rows.parquet has two columns 'prompt'; rename one."):
        read_source([str(path)])
    parquet.write_table(twice.slice(0, 0), path)
    with pytest.raises(InputError, match=r"rows.parquet holds no rows"):
        read_source([str(path)])


def test_parquet_without_pyarrow(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pyarrow is needed to read x.parquet; .*oblrpo\[data\]"):
        list(read_source(["x.parquet"], "train"))


def test_several_files_are_read_in_turn(tmp_path):
    for name in ("one", "two"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"q": "{name}"}}\n')
    rows = read_source([str(tmp_path / "one.jsonl"), str(tmp_path / "two.jsonl")], "train")
    assert [row["q"] for _, row in rows] == ["one", "two"]


def test_what_is_a_name_of_the_hub(tmp_path, monkeypatch):
    assert is_hub_name("openai/gsm8k")
    assert is_hub_name("openai/gsm8k:main")
    assert is_hub_name("openai/gsm8k:main[test]")
    assert is_hub_name("a/b[train[:10%]]")
    for name in ("rows.jsonl", "data/rows.csv", "./a/b", "/a/b", "~/a", "plain", "a/b/c"):
        assert not is_hub_name(name)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my").mkdir()
    (tmp_path / "my" / "file").write_text("{}")
    assert not is_hub_name("my/file")


def test_prompts_of_messages_and_the_columns_that_rewards_see():
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2"}]
    rows = [("here", {"prompt": messages, "gold": 4.0, "level": 3})]
    (problem,) = problems_of(rows, "prompt", "gold", "Solve {prompt}")
    assert problem.prompt == messages
    assert problem.text == "Be brief.\n2 + 2"
    assert problem.answer == "4.0"
    assert problem.columns == {"gold": 4.0, "level": 3, "answer": "4.0"}
    (problem,) = problems_of([("here", {"prompt": "p", "answer": [1], "x": None})], "prompt", "", "{prompt}")
    assert (problem.answer, problem.columns) == ("", {"answer": [1], "x": None})


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "user"}], "messages with a role"),
        ([{"role": "robot", "content": "x"}], "messages with a role"),
        ([{"role": "user", "content": [{"type": "image"}]}], "messages with a role"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}], "ends with an assistant message"),
    ],
)
def test_bad_messages(messages, words):
    with pytest.raises(InputError, match=f"^here: column 'prompt' .*{words}"):
        problems_of([("here", {"prompt": messages, "answer": "1"})], "prompt", "answer", "{prompt}")


def test_rows_that_are_given_stand_for_their_name(tmp_path):
    given = {"python:1 rows": [("data row 0", {"prompt": "p"})]}
    assert read_source(["python:1 rows"], "train", given) == given["python:1 rows"]
    with pytest.raises(InputError, match="python:2 rows"):
        list(read_source(["python:2 rows"], "train", given))
