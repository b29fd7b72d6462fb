"""Logs of other trainers: TRL's state, what verl prints and writes, JSON Lines, CSV."""

import csv
import io
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from oblrpo.diagnosis import diagnose
from oblrpo.errors import InputError
from oblrpo.runs.logs import read_log

STATE = Path(__file__).parents[1] / "report" / "trl_run" / "checkpoint-12" / "trainer_state.json"

CONSOLE = """\
\x1b[36m(TaskRunner pid=71)\x1b[0m step:{step} - global_seqlen/mean:812.5 - actor/entropy:np.float64(0.4) - \
actor/kl_loss:0.02 - actor/grad_norm:0.5 - actor/lr:1e-06 - actor/pg_clipfrac:0.01 - critic/score/mean:{reward} - \
critic/rewards/mean:-0.1 - response_length/mean:210.0 - response_length/clip_ratio:0.02 - \
val-core/openai/gsm8k/acc/mean@8:0.5 - val-core/math/acc/mean@8:0.3
"""


def test_a_folder_of_trl_and_its_state():
    for path in (STATE.parents[1], STATE):
        log = read_log(path)
        assert log.rows[-1]["step"] == 12
        assert log.steps == 12
        assert any(row.get("eval/accuracy") for row in log.rows)
    assert diagnose(STATE).steps == 12


def test_what_verl_prints(tmp_path):
    noise = "INFO 10-03 step: nothing\nTraining Progress:  10%|#  | 3/30\n"
    file = tmp_path / "verl.log"
    rewards = [(0.5 if n < 40 else 0.1) + n % 2 / 1000 for n in range(80)]
    file.write_text(noise + "".join(CONSOLE.format(step=n, reward=rewards[n]) for n in range(1, 80)))
    log = read_log(file)
    assert log.rows[0] | {
        "step": 1, "reward": 0.501, "entropy": 0.4, "kl": 0.02, "grad_norm": 0.5, "learning_rate": 1e-6,
        "clip_ratio/region_mean": 0.01, "completions/mean_length": 210.0, "completions/clipped_ratio": 0.02,
        "eval/accuracy": 0.4,
    } == log.rows[0]  # fmt: skip
    (finding,) = diagnose(file).findings
    assert (finding.name, 40 <= finding.found <= 46) == ("reward fell", True)


def test_what_verl_writes(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": n, "data": {"critic/score/mean": n / 10}}) + "\n" for n in range(5)))
    assert [row["reward"] for row in read_log(file).rows] == [0.0, 0.1, 0.2, 0.3, 0.4]


def test_json_lines_and_csv_with_the_names_of_trl_give_the_same(tmp_path):
    rows = [{"step": n, "reward": 0.1 * n, "entropy": 1.0, "completion_length": 50.0 + n} for n in range(1, 6)]
    lines, listed, table = tmp_path / "log.jsonl", tmp_path / "log.json", tmp_path / "log.csv"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    listed.write_text(json.dumps(rows))
    heads = "train/global_step,train/reward,train/entropy,train/completion_length,note\n"
    table.write_text(heads + "".join(",".join(map(str, row.values())) + ",x\n" for row in rows))
    for file in (lines, listed, table):
        found = read_log(file).rows
        assert [row["reward"] for row in found] == [row["reward"] for row in rows], file
        assert found[2]["completions/mean_length"] == 53.0
        assert [row["step"] for row in found] == [1, 2, 3, 4, 5]


def test_entries_of_one_step_are_joined_and_rows_without_a_step_are_counted(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text('{"step": 1, "reward": 0.2}\n{"step": 1, "eval_reward": 0.3}\n{"step": 2, "reward": 0.4}\n')
    joined = {"step": 1, "reward": 0.2, "skipped": 0.0, "eval_reward": 0.3, "eval/accuracy": 0.3}
    assert read_log(file).rows[0] == joined
    file.write_text('{"reward": 0.2}\n{"reward": 0.4}\n')
    assert [row["step"] for row in read_log(file).rows] == [1, 2]


def test_what_is_not_finite_is_found(tmp_path):
    file = tmp_path / "log.jsonl"
    rows = [{"step": n, "reward": 0.5, "grad_norm": math.nan if n == 7 else 1.0} for n in range(1, 10)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (finding,) = diagnose(file).findings
    assert (finding.name, finding.found) == ("not finite", 7)


def test_our_trainer_inside_trl_is_known_by_what_it_logs(tmp_path):
    rows = [
        {"step": n, "reward": 0.5, "step_kl": 0.1, "frac_reward_zero_std": 0.9, "learning_rate": 10.0**-n}
        for n in range(1, 90)
    ]
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert not {"silent groups", "rate collapsed"} & {finding.name for finding in diagnose(file).findings}


def as_json(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def as_csv(rows):
    table = io.StringIO()
    writer = csv.DictWriter(table, rows[0].keys())
    writer.writeheader()
    writer.writerows(rows)
    return table.getvalue()


NAMED = {
    "ours": ("step", "reward", "grad_norm", "step_kl"),
    "TRL": ("step", "reward", "grad_norm", "kl"),
    "W&B": ("_step", "train/reward", "train/grad_norm", "train/kl"),
    "verl": ("step", "critic/score/mean", "actor/grad_norm", "actor/kl_loss"),
}


@pytest.mark.parametrize("names", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("constant", [0, -1, 0.5, 1.0, None])
def test_one_reader_for_python_and_files(tmp_path, names, constant):
    """The same rows say the same wherever they come from and in which order; a constant is told within 20 rows."""
    rewards = [(0.5 if n < 40 else 0.1) + n % 2 / 1000 if constant is None else constant for n in range(60)]
    rows = [dict(zip(names, (n, rewards[n - 1], 0.005, 0.01), strict=True)) for n in range(1, 61)]
    (tmp_path / "log.jsonl").write_text(as_json(rows))
    (tmp_path / "bom.jsonl").write_text(as_json(rows), "utf-8-sig")
    (tmp_path / "wide.jsonl").write_text(as_json(rows), "utf-16")
    (tmp_path / "log.csv").write_text(as_csv(rows), "utf-8-sig")
    (tmp_path / "back.csv").write_text(as_csv(rows[::-1]))
    sizes = [
        {key: np.float32(value) if key != names[0] else np.int64(value) for key, value in row.items()} for row in rows
    ]
    inside = [{"step": row[names[0]], "data": row} for row in rows]  # as verl writes
    found = [diagnose(given) for given in (rows, rows[::-1], iter(rows), sizes, inside, *tmp_path.iterdir())]
    told = {(f.name, f.found, f.until) for each in found for f in each.findings}
    assert [len(each.findings) for each in found] == [1] * 10
    assert len(told) == 1
    ((name, step, last),) = told
    assert (name, last) == ("reward fell" if constant is None else "same reward", 60)
    assert step <= (46 if constant is None else 20)


def test_a_mean_that_was_rounded_to_nothing_is_told_within_20_rows():
    """Some completion earns 1, by verl's own word, and the mean is 0.000."""
    ends = {"critic/score/max": 1.0, "critic/score/min": 0.0}
    rows = [{"step": n, "critic/score/mean": 0.0, "actor/grad_norm": 0.005} | ends for n in range(1, 301)]
    assert [(finding.name, finding.found) for finding in diagnose(rows).findings] == [("no progress", 20)]


def test_a_file_of_several_formats_is_read_whole(tmp_path):
    rows = [{"step": n, "reward": 0.5 if n < 31 else 0.0, "grad_norm": 0.1 + n % 3} for n in range(1, 61)]
    early, late, file = rows[:30], rows[30:], tmp_path / "log.txt"
    for text, source in (
        (as_json(early) + as_csv(late), "JSON Lines and CSV"),
        (as_csv(early) + as_json(late), "CSV and JSON Lines"),
        (as_csv(early) + as_csv([{"grad_norm": row["grad_norm"], **row} for row in late]), "CSV"),
        (as_csv(early) + '"a warning, half quoted\n' + as_csv(late), "CSV (lines not read: 1)"),
        (as_csv(rows) + 'cut,off,"\n', "CSV (lines not read: 1)"),
        ("a warning, or two\n" + as_json(rows) + '{"step": 61, "rew', "JSON Lines (lines not read: 2)"),
    ):
        file.write_text(text)
        log = read_log(file)
        assert [(row["step"], row["reward"], row["grad_norm"]) for row in log.rows] == [tuple(r.values()) for r in rows]
        assert log.source == source


def test_text_in_a_log_ends_no_line(tmp_path):
    """Line ends of Unicode in JSON, of Python in a field of a CSV; and what looks like a step of verl's."""
    rows = [{"step": n, "reward": n / 9, "note": "a\u2028b\x85c step:7 - reward:3"} for n in range(1, 5)]
    file = tmp_path / "log"
    for text in (
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        as_csv([row | {"note": 'say "no",\n\n1,2,3\n'} for row in rows]),
    ):
        file.write_text(text, "utf-8")
        assert [row["reward"] for row in read_log(file).rows] == [row["reward"] for row in rows]


def test_the_newest_state_that_can_be_read_is_taken_and_that_is_said(tmp_path):
    for step in (5, 10, 12):
        shutil.copytree(STATE.parent, tmp_path / f"checkpoint-{step}")
        file = tmp_path / f"checkpoint-{step}" / STATE.name
        state = json.loads(file.read_text())
        state["log_history"] = [entry for entry in state["log_history"] if entry["step"] <= step]
        file.write_text(json.dumps(state)[: None if step == 5 else 100])
    cut = json.dumps(state)
    (tmp_path / "checkpoint-11").mkdir()  # less of it can be read than of one before
    (tmp_path / "checkpoint-11" / STATE.name).write_text(cut[: cut.index('"step": 2') + 10])
    found = diagnose(tmp_path)
    assert found.steps == 5
    newest, next_ = (f"{tmp_path}/checkpoint-{step}/{STATE.name} cannot be read as a log" for step in (12, 10))
    assert f"TRL, checkpoint-5/{STATE.name}; {newest} of TRL's" in found.source
    assert f"; {next_}" in str(found)
    for step in (5, 11):
        (tmp_path / f"checkpoint-{step}" / STATE.name).write_text("")
    with pytest.raises(InputError, match=rf"checkpoint-12/{STATE.name} cannot be read as a log of TRL's"):
        diagnose(tmp_path)


def test_what_was_not_finite_is_named_and_what_a_row_does_not_have_is_nothing():
    """Tables of pandas have NaN where an evaluation has no reward."""
    nan = math.nan
    rows = [
        {"step": n, "reward": 0.01 * n, "loss": nan if n == 7 else 0.1, "learning_rate": 1e-6} for n in range(1, 20)
    ]
    (finding,) = diagnose(rows).findings
    assert finding.sentence == "NaN or infinite in step 7: loss."
    whole = [row | {"loss": 0.1, "eval_reward": nan} for row in rows]
    evaluations = [dict.fromkeys(whole[0], nan) | {"step": n, "eval_reward": 0.5} for n in (5, 10, 21)]
    found = diagnose(whole + evaluations)
    assert (found.findings, found.steps) == ([], 19)
    assert "reward without accuracy" not in found.unchecked
    skipped = [row | {"skipped": float(row["step"] == 7), "loss": 0.1} for row in rows]
    assert [finding.found for finding in diagnose(skipped).findings] == [7]


@pytest.mark.parametrize(
    "given", [[], 3, 0.5, [3], [None], {"reward": 0.5}, [{"colour": 3}], [{3: 4}], np.ones(()), b"x"]
)
def test_what_are_no_rows_is_refused_in_a_sentence(given):
    with pytest.raises(InputError, match=r"^run .*\.$"):
        diagnose(given)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no known metric"),
        ("hello\nworld\n", "holds no known metric"),
        ('{"colour": 3}\n', "holds no known metric"),
        ('{"log_history": 3}', "holds no known metric"),
        ("\x00\xff\x00", "holds no known metric"),
    ],
)
def test_what_is_no_log_is_refused_in_a_sentence(tmp_path, content, words):
    file = tmp_path / "log.txt"
    file.write_text(content, "latin-1")
    with pytest.raises(InputError, match=words):
        diagnose(file)


def test_what_is_not_there_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        diagnose(tmp_path / "nothing")
    with pytest.raises(InputError, match="holds no config"):
        diagnose(tmp_path)


def test_our_metrics_inside_verl_are_under_our_names(tmp_path):
    file = tmp_path / "verl.log"
    file.write_text(
        "step:1 - actor/signal2:0.5 - actor/trace_cov:2.0 - actor/step_kl:0.01 - critic/baseline/spread:0.1\n"
    )
    found = {"signal2": 0.5, "trace_cov": 2.0, "step_kl": 0.01, "baseline/spread": 0.1}
    assert read_log(file).rows[0].items() >= found.items()
