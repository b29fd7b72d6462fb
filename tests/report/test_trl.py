"""The page of a run of TRL: `trl_run` is what GRPOTrainer with a VarianceLedgerCallback left after twelve steps."""

import html
import json
import re
import shutil
from pathlib import Path

import pytest

from oblrpo import cli
from oblrpo.errors import InputError
from oblrpo.report.page import write_report
from oblrpo.report.record import read_trl

STATE = Path(__file__).parent / "trl_run" / "checkpoint-12" / "trainer_state.json"


@pytest.fixture
def run(tmp_path):
    return Path(shutil.copytree(STATE.parents[1], tmp_path / "run"))


def state_of(run, step, change, name=None):
    """Write a state with some of the log changed."""
    state = json.loads(STATE.read_text())
    state["log_history"] = change([entry for entry in state["log_history"] if entry["step"] <= step])
    folder = run / (f"checkpoint-{step}" if name is None else name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "trainer_state.json").write_text(json.dumps(state))


def titles(page):
    return re.findall(r"<figcaption><b>(.*?)</b>", page)


def missing(page):
    return re.findall(r"<tr><td>(.*?)<td>", page)


def test_the_page_shows_what_the_log_holds_and_says_what_it_does_not(run):
    page = write_report(run).read_text()
    assert titles(page) == [
        "Reward and held-out accuracy", "Silent groups", "Signal to noise of the batch gradient",
        "Learning rate", "Critical batch size, and the batch used", "Gradient variance under each baseline",
        "Variance of unbiased baselines over the run", "Completion length", "Truncated completions", "Entropy",
        "Gradient norm", "Time",
    ]  # fmt: skip
    assert "no values" not in page
    assert "0.684 → 0.680" in page  # eval_reward, of which TRL knows no error
    assert "± 0.000" not in page
    assert "batch used: 4" in page
    assert "schedule of TRL" in page
    assert missing(page) == [
        "Score norms", "Samples, and score norms by completion", "Bands around the reward", "Settings",
    ]  # fmt: skip


def test_without_the_callback_and_without_evaluation_both_are_said_to_be_missing(run):
    def plain(log):
        ours = ("snr", "n_snr", "critical", "signal2", "variance", "effective", "trace_cov")
        kept = [{key: value for key, value in entry.items() if not key.startswith(ours)} for entry in log]
        return [entry for entry in kept if "eval_reward" not in entry]

    state_of(run, 8, plain)
    shutil.rmtree(run / "checkpoint-12")
    page = write_report(run).read_text()
    assert titles(page)[:3] == ["Reward and held-out accuracy", "Silent groups", "Learning rate"]
    assert missing(page)[:3] == [
        "Held-out reward",
        "Signal, noise and the critical batch",
        "Variance under each baseline",
    ]
    assert "the log ends with step 8 of 12" in page
    assert "no values" not in page


def test_the_state_with_most_steps_counts(run):
    state_of(run, 4, list)
    state_of(run, 8, list)
    state_of(run, 5, list, "checkpoint-final")
    assert read_trl(run).done == 12
    shutil.rmtree(run / "checkpoint-12")
    assert read_trl(run).done == 8
    state_of(run, 10, list, ".")
    assert read_trl(run).done == 10
    assert read_trl(run / "checkpoint-4").done == 4  # a checkpoint's folder will do


def test_the_newest_state_that_can_be_read_is_shown_and_that_is_said(run):
    state_of(run, 8, list)
    (run / "checkpoint-12" / "trainer_state.json").write_text("{")
    assert read_trl(run).done == 8
    page = html.unescape(write_report(run).read_text())
    assert "<small>TRL, checkpoint-8/trainer_state.json · step 8 of 12" in page
    assert missing(page)[0] == "Newest state"
    assert f"{run}/checkpoint-12/trainer_state.json cannot be read as a log of TRL's" in page


def test_what_is_not_finite_is_left_out(run):
    state_of(run, 12, lambda log: [entry | {"grad_norm": float("nan"), "step_time": float("inf")} for entry in log])
    assert all(row.get("grad_norm") is None for row in read_trl(run).rows)
    write_report(run)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2]", "{}", '{"log_history": 3, "max_steps": 1}', '{"log_history": [{}], "max_steps": 1}',
     '{"log_history": [{"step": "1"}], "max_steps": 1}', '{"log_history": [7], "max_steps": 1}',
     '{"log_history": [{"step": 1}], "max_steps": null}', "[" * 100_000, b"\xff\xfe".decode("latin1")],
)  # fmt: skip
def test_a_damaged_state_is_named(run, text):
    (run / "checkpoint-12" / "trainer_state.json").write_text(text)
    with pytest.raises(InputError, match=r"trainer_state.json cannot be read as a log of TRL's"):
        write_report(run)
    assert not (run / "report.html").exists()


def test_a_state_without_a_step_is_no_run(run):
    state_of(run, 12, lambda log: [])
    with pytest.raises(InputError, match=r"nor a trainer_state\.json of TRL"):
        write_report(run)


def test_it_is_not_followed(run, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["oblrpo", "report", str(run), "--follow"])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2
    assert "leave out --follow" in capsys.readouterr().err
