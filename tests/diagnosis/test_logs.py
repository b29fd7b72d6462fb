"""Logs of other trainers: TRL's state, what verl prints and writes, JSON Lines, CSV."""

import json
import math
from pathlib import Path

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
    assert not {"silent groups", "rate lost"} & {finding.name for finding in diagnose(file).findings}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "holds no metric that is known"),
        ("hello\nworld\n", "holds no metric that is known"),
        ('{"colour": 3}\n', "holds no metric that is known"),
        ('{"log_history": 3}', "cannot be read as a log of TRL's"),
        ("\x00\xff\x00", "holds no metric that is known"),
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
