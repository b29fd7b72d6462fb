"""`oblrpo diagnose`: exit codes, JSON, and the look."""

import json
import shutil

import pytest

from tests.cli.conftest import complained


def write(path, rewards):
    path.write_text("".join(json.dumps({"step": n, "reward": r}) + "\n" for n, r in enumerate(rewards, start=1)))
    return path


def test_the_exit_code_says_whether_something_is_wrong(oblrpo, tmp_path):
    code, out, err = oblrpo("diagnose", write(tmp_path / "well.jsonl", [0.01 * n for n in range(40)]))
    assert (code, err) == (0, "")
    assert "No problem found." in out
    code, out, err = oblrpo("diagnose", write(tmp_path / "ill.jsonl", [0.5, 0.51] * 15 + [0.0, 0.01] * 15))
    assert (code, err) == (1, "")
    assert "1. reward fell, since step 2" in out
    assert "What to do: Updates are too large" in out


def test_json_is_one_object(oblrpo, tmp_path):
    code, out, _ = oblrpo("diagnose", write(tmp_path / "ill.jsonl", [0.5, 0.51] * 15 + [0.0, 0.01] * 15), "--json")
    found = json.loads(out)
    assert code == 1
    assert found["steps"] == 60
    assert [finding["name"] for finding in found["findings"]] == ["reward fell"]
    assert found["findings"][0]["standard_errors"] > 4.5
    assert "entropy collapsed" in found["unchecked"]


@pytest.fixture(scope="module")
def made_once(tmp_path_factory):
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def trained(made_once, small_run, dense_reward, tmp_path):
    if not made_once.exists():
        assert small_run(steps=2, eval_steps=0, ledger_steps=0, output=made_once)[0] == 0
    return shutil.copytree(made_once, tmp_path / "run")


def test_a_look_measures_what_no_log_says_and_leaves_the_run_as_it_is(oblrpo, trained):
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    code, out, err = oblrpo("diagnose", trained, "--look", "--prompts", 8)
    assert code == 0, err
    assert "No problem found so far, in fewer than 20 steps.\n" in out
    assert "Not checked" not in out  # our own runs log all that they can
    assert "A look at step 2: 4 batches of 8 fresh prompts x 3 completions" in out
    for line in ("signal and noise  N SNR", "noise             "):
        assert line in out
    assert "rloo           1.00 (1.00 to 1.00)" in out
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    again = [json.loads(oblrpo("diagnose", trained, "--look", "--prompts", 8, "--json")[1])["look"] for _ in range(2)]
    assert again[0] == again[1]
    assert again[0]["variance"]["rloo"]["value"] == 1
    assert again[0]["prompts"] == 8


def test_a_look_that_cannot_be_had_says_why(oblrpo, trained, tmp_path):
    complained(oblrpo("diagnose", trained, "--look", "--prompts", 1), "at least 2 prompts")
    log = write(tmp_path / "well.jsonl", [0.5] * 5)
    for as_json in ((), ("--json",)):
        code, out, err = oblrpo("diagnose", log, "--look", *as_json)  # ends as the diagnosis does
        assert (code, "add a VarianceLedgerCallback" in out) == (0, True), err
    complained(oblrpo("diagnose", trained, "--look", "--prompts", 10**8), "takes at most 10,922")


def test_a_look_at_rewards_that_agree_says_so(small_run, oblrpo, tmp_path):
    """A policy that was never taught earns nothing."""
    assert small_run(steps=1, eval_steps=0, ledger_steps=0, warm_start_steps=0)[0] == 0
    code, out, err = oblrpo("diagnose", tmp_path / "run", "--look")
    assert code == 0, err
    assert "all rewards agree, so there is no gradient to compare" in out
    assert "N SNR 0 (0 to 0)" in out
    found = json.loads(oblrpo("diagnose", tmp_path / "run", "--look", "--json")[1], parse_constant=pytest.fail)
    assert found["look"]["critical_batch_size"] is None


def test_a_look_under_a_loss_that_weighs_lengths(small_run, dense_reward, oblrpo, tmp_path):
    """GRPO's: which part of the noise comes from prompts is then not known."""
    assert small_run(steps=1, eval_steps=0, ledger_steps=0, algorithm="grpo")[0] == 0
    code, out, err = oblrpo("diagnose", tmp_path / "run", "--look", "--prompts", 8)
    assert code == 0, err
    assert "its source is unknown with this loss weighting" in out
