"""The same held-out prompts before and after."""

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
