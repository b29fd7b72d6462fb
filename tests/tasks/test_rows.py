"""Every way a data file can be wrong, by its message."""

import gzip
import json
import re

import pytest

from oblrpo.errors import InputError
from oblrpo.tasks.data import problems_of
from oblrpo.tasks.rows import read_objects, text_of
from tests.tasks.data import task_of_file

GOOD = b'{"prompt": "p", "answer": "a"}'

BAD_LINES = {
    "not_json": (b"{prompt: 1}", r"line 2 is not JSON \(Expecting property name.*\); write one JSON object per line"),
    "half": (b'{"prompt": "p"', r"line 2 is not JSON"),
    "array": (b'["p", "a"]', "line 2 is a JSON array, not an object"),
    "string": (b'"p"', "line 2 is a JSON string, not an object"),
    "number": (b"3", "line 2 is a JSON number, not an object"),
    "null": (b"null", "line 2 is a JSON null, not an object"),
    "deep": (b"[" * 100_000, r"line 2 is not JSON \(.*\)"),
    "latin1": ('{"prompt": "é", "answer": "a"}'.encode("latin-1"), "line 2 is not UTF-8 text; save the file as UTF-8"),
    "missing": (
        b'{"promt": "p", "answer": "a"}',
        r"line 2 has no column 'prompt'; its columns are: 'promt', 'answer'. Did you mean 'promt'\?",
    ),
    "missing_answer": (b'{"prompt": "p", "zz": 1}', "line 2 has no column 'answer'; its columns are: 'prompt', 'zz'."),
    "no_columns": (b"{}", "line 2 has no column 'answer'; its columns are: none"),
    "list_value": (
        b'{"prompt": ["p"], "answer": "a"}',
        "line 2: column 'prompt' holds a JSON array; it must be text or",
    ),
    "object_value": (b'{"prompt": {}, "answer": "a"}', "line 2: column 'prompt' holds a JSON object; it must be"),
    "null_value": (b'{"prompt": "p", "answer": null}', "line 2: column 'answer' holds a JSON null; it must be"),
    "bool_value": (b'{"prompt": "p", "answer": true}', "line 2: column 'answer' holds a JSON boolean; it must be"),
    "nan_value": (b'{"prompt": "p", "answer": NaN}', "line 2: column 'answer' holds a JSON number; it must be"),
    "infinite_value": (
        b'{"prompt": "p", "answer": 1e999}',
        "line 2: column 'answer' holds a JSON number; it must be",
    ),
    "empty_prompt": (b'{"prompt": " ", "answer": "a"}', "line 2: column 'prompt' is empty; fill it or remove the row"),
    "empty_answer": (b'{"prompt": "p", "answer": ""}', "line 2: column 'answer' is empty"),
    "surrogate": (b'{"prompt": "\\ud800", "answer": "a"}', "line 2: column 'prompt' holds half a surrogate pair"),
}


@pytest.fixture
def write(tmp_path):
    def write(content):
        path = tmp_path / "rows.jsonl"
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize(("line", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_bad_lines_are_named(write, line, message):
    path = write(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(InputError, match=f"^{path} {message}"):
        task_of_file(path)


def test_the_line_number_counts_blank_lines(write):
    with pytest.raises(InputError, match=r"rows.jsonl line 4 is not JSON"):
        task_of_file(write(GOOD + b"\n\n  \n{"))


@pytest.mark.parametrize("content", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_an_empty_file_is_refused(write, content):
    with pytest.raises(InputError, match=r"rows.jsonl holds no rows; give a JSON Lines file"):
        task_of_file(write(content))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(
        InputError, match=r"Cannot read the data file .*none.jsonl: No such file or directory; check the path"
    ):
        task_of_file(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match=r"Cannot read the data file .*: Is a directory; .* Give the files in it\.$"):
        task_of_file(tmp_path)
    (tmp_path / "some.jsonl").write_bytes(GOOD)
    with pytest.raises(InputError, match=r"check the path\. Did you mean 'some\.jsonl'\?$"):
        task_of_file(tmp_path / "soem.jsonl")
    with pytest.raises(InputError, match="Cannot read the data file"):
        task_of_file("null\x00byte")


def test_a_gold_without_a_number_is_refused_at_load_time(write):
    path = write(b'{"prompt": "p", "answer": "#### 3"}\n{"prompt": "p", "answer": "three"}\n')
    assert task_of_file(path).name == "rows"
    with pytest.raises(InputError, match=f"^{path} line 2: column 'answer' holds no number that the reward 'numeric'"):
        task_of_file(path, numbers=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (7, "7"),
        (-7, "-7"),
        (27.0, "27.0"),
        (1e22, "10000000000000000000000"),
        (1e-7, "0.0000001"),
        (" x ", " x "),
        ("é\u2028", "é\u2028"),
    ],
)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_numbers_and_text_arrive_as_text(write, value, text, ascii_only):
    path = write(json.dumps({"q": "p", "a": value}, ensure_ascii=ascii_only).encode())
    ((line, row),) = read_objects(path)
    assert (line, text_of(row, "q", ""), text_of(row, "a", "")) == (1, "p", text)


def test_line_ends_a_byte_order_mark_and_a_missing_last_newline_are_fine(write):
    marked = b"\xef\xbb\xbf" + GOOD
    assert [line for line, _ in read_objects(write(marked + b"\r\n" + GOOD))] == [1, 2]
    assert len(list(read_objects(write(marked + b"\n" + marked)))) == 2  # of two files, one behind the other


def test_a_file_packed_with_gzip_is_read(write):
    packed = gzip.compress(GOOD + b"\n" + GOOD)
    assert [line for line, _ in read_objects(write(packed))] == [1, 2]
    for damaged in (packed[:-9], packed[:12] + b"\xff" * 9 + packed[21:]):
        with pytest.raises(InputError, match=r"Cannot read the data file .*rows.jsonl: "):
            read_objects(write(damaged))


def test_lines_of_another_format_behind_json_are_refused(write):
    path = write(GOOD + b"\nprompt,answer\np,a\n")
    with pytest.raises(InputError, match=f"^{path} line 2 is not JSON"):
        task_of_file(path)


def test_a_huge_integer_is_refused_or_kept_but_never_a_traceback(write):
    path = write(b'{"prompt": "p", "answer": ' + b"9" * 5000 + b"}")
    with pytest.raises(InputError, match="line 1"):
        task_of_file(path, numbers=True)


@pytest.mark.parametrize(
    ("row", "way"),
    [
        ({"id": 1, "question": "q", "answer": "a"}, "--prompt-column question (prompt_column='question' in Python)."),
        ({"x": "q", "answer": "a"}, "--prompt-column NAME (prompt_column='NAME' in Python)."),
        (
            {"prompt": "q", "solution": "a"},
            "--answer-column solution (answer_column='solution' in Python), or choose rewards that need no answer.",
        ),
    ],
)
def test_a_column_of_another_name_has_a_way_out(row, way):
    with pytest.raises(InputError, match=re.escape(f"Name yours: {way}") + "$"):
        problems_of([("mine.csv line 2", row)], "prompt", "answer", "{prompt}")


def test_a_column_that_is_taken_is_no_guess_at_another():
    rows = [("line 1", {"question": "q", "answer": "a"})]
    with pytest.raises(InputError, match=r"are: 'question', 'answer'\. Name yours: --answer-column answer "):
        problems_of(rows, "question", "solution", "{prompt}")
    with pytest.raises(InputError, match="Did you mean 'question'"):
        problems_of(rows, "prompt", "questoin", "{prompt}")
