"""The same held-out prompts before and after."""

import pytest
from rich.cells import cell_len

from oblrpo.diagnosis import Facts
from oblrpo.errors import InputError
from oblrpo.report.console import in_columns, summary
from oblrpo.report.record import before_and_after
from oblrpo.runs import HELD_OUT, RunFolder


def test_prompts_stand_beside_what_was_said_at_first_and_at_last(tmp_path):
    folder, measured = RunFolder(tmp_path), [{"step": step} for step in (0, 3, 6)]
    folder.completions.mkdir()
    assert before_and_after(folder, measured) == []
    for step in (0, 3, 6):
        rows = [
            {"prompt": f"prompt {p}", "answer": f"{p}", "completion": f"{step} {p} {g}", "reward": step * p + g}
            for p in range(3)
            for g in range(2)
        ]
        folder.write_completions(step, rows, HELD_OUT)
    assert before_and_after(folder, measured[:1]) == []
    assert before_and_after(folder, measured, most=2) == [
        {
            "prompt": f"prompt {p}",
            "answer": f"{p}",
            "before": {"completion": f"0 {p} 0", "reward": 0},
            "after": {"completion": f"6 {p} 0", "reward": 6 * p},
        }
        for p in range(2)
    ]


@pytest.mark.parametrize("harm", [{"reward": ...}, {"prompt": ["a"]}, {"completion": 3}])
def test_a_line_that_lacks_something_is_named(tmp_path, harm):
    folder, whole = RunFolder(tmp_path), {"prompt": "a", "answer": "", "completion": "b", "reward": 1.0}
    folder.completions.mkdir()
    folder.write_completions(0, [whole], HELD_OUT)
    harmed = {key: value for key, value in (whole | harm).items() if value is not ...}
    folder.write_completions(1, [whole, harmed], HELD_OUT)
    with pytest.raises(InputError, match=rf"heldout_step_1.jsonl line 2 has no {min(harm)}; remove that line.$"):
        before_and_after(folder, [{"step": 0}, {"step": 1}])


def pair(prompt, before, after):
    return {"prompt": prompt, "answer": "", "before": dict(zip(("reward", "completion"), before, strict=True)),
            "after": dict(zip(("reward", "completion"), after, strict=True))}  # fmt: skip


def test_the_console_shows_them_in_columns():
    pairs = [pair("2+2=", (0.0, "5"), (1.0, "4\n4")), pair("a longer one", (None, " \n"), (1 / 3, "\x1b[31mred"))]
    assert in_columns(pairs, 80) == [
        "held-out prompt          before          after",
        "2+2=             0       5        1      4 4",
        "a longer one     masked  (empty)  0.333  \\u001b[31mred",
    ]
    assert in_columns([], 80) == []
    assert summary([{"step": 0}], "runs/x", Facts(), pairs=pairs, width=80).splitlines()[:3] == in_columns(pairs, 80)


@pytest.mark.parametrize("width", [40, 60, 80, 133])
@pytest.mark.parametrize("letters", ["x" * 500, "short", "\u4e2d\u6587" * 60, "two words " * 60])
def test_columns_fit_the_console_and_show_both_ends(width, letters):
    pairs = [pair("Q" + letters + "?", (0.25, "B" + letters + "b"), (-0.123456, "A" + letters + "a"))]
    head, line = in_columns(pairs, width)
    assert max(map(cell_len, (head, line))) <= width
    assert max(cell_len(head), cell_len(line)) > width - 8 or letters == "short"
    assert all(end in line for end in "Q?BbAa")
    assert ("…" in line) == (letters != "short")
