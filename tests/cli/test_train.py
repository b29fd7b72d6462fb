import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest

from lab.tasks import ADDITION
from oblrpo.cli.flags import documented
from oblrpo.estimators import BASELINES
from oblrpo.policy import Policy, checks
from oblrpo.report.html import markup, with_code
from oblrpo.settings import TrainConfig, flatten, read_yaml, read_yaml_file, yaml_text
from oblrpo.tasks.path import PathTask
from tests.cli.conftest import SMALL, complained, metrics_of, start, weights_of
from tests.cli.test_families import folder_of

KEYS = {
    "step", "reward", "reward_min", "reward_max", "reward_iqr", "reward_stderr", "reward_std",
    "rewards/task/mean", "rewards/task/std",
    "frac_reward_zero_std", "completions/mean_length", "completions/clipped_ratio", "completions/masked_ratio",
    "completions/distinct_ratio", "completions/commonest_ratio", "completions/commonest_token_ratio",
    "completions/same_ratio", "completions/trained_ratio", "frac_prompts_masked",
    "entropy", "grad_norm", "learning_rate", "lr_factor", "snr", "n_snr", "critical_batch_size", "signal2",
    "trace_cov", "score_norm2/mean", "score_norm2/kappa",
    "score_norm2/agreement_length", "score_norm2/agreement_logit", "score_norm2/agreement_calibrated",
    "baseline/mean", "baseline/spread", "num_tokens",
    "snr_low", "snr_high", "step_time", "step_kl", "step_kl_target", "skipped",
    "time/sampling", "time/rewards", "time/training", "time/looks", "time/files",
}  # fmt: skip
LEDGER = {f"{kind}/{name}" for kind in ("variance", "signal2") for name in BASELINES}
LEDGER |= {"variance_between_prompts"}


@pytest.mark.page
@pytest.mark.usefixtures("dense_reward")
def test_what_a_run_leaves_behind(small_run, tmp_path):
    code, out, err = small_run(warm_start_steps=3, warm_start_args={"batch": 8}, save_total_limit=2)
    assert code == 0, err
    run = tmp_path / "run"
    assert {p.name for p in run.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "completions",
        "checkpoints",
        "report.html",
        ".lock",
    }
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 2, 4]
    assert set(rows[1]) == KEYS | LEDGER
    evaluated = {f"eval/{key}{of}" for key in ("accuracy", "swap_loss") for of in ("", "_stderr")} | {"time/evaluation"}
    assert [set(row) - KEYS for row in rows[2:]] == [evaluated, set(), evaluated]
    assert all(set(row) >= KEYS for row in rows[2:])
    assert 0 < rows[3]["time/training"] < rows[3]["step_time"]
    assert rows[-1]["num_tokens"] > rows[1]["num_tokens"] > 0
    best = max(rows[::2], key=lambda row: row["eval/accuracy"])["step"]
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step_3", "step_4", f"step_{best}"}
    kept = {f"step_{n}.jsonl" for n in range(1, 5)} | {f"heldout_step_{n}.jsonl" for n in (0, 2, 4)}
    assert {p.name for p in (run / "completions").iterdir()} == kept
    for row in rows[::2]:
        text = (run / f"completions/heldout_step_{row['step']}.jsonl").read_text()
        heldout = [json.loads(line) for line in text.splitlines()]
        assert sum(each["reward"] for each in heldout) / len(heldout) == pytest.approx(row["eval/accuracy"])
    completions = [json.loads(line) for line in (run / "completions" / "step_2.jsonl").read_text().splitlines()]
    assert len(completions) == 12
    for row in completions:
        assert row["advantage"] == pytest.approx(row["reward"] - row["baseline"])
    config = read_yaml_file(run / "config.yaml")
    assert set(config) == set(flatten(TrainConfig())) | {"identity"}
    assert config["model_args"]["hidden_size"] == 16
    assert f"\nabout      {PathTask.about}\n" in out
    assert config["identity"]["about"] == PathTask.about
    assert "held-out accuracy" in out
    assert "4 prompts x 3 completions = 12 completions" in out
    heads, *lines = out.splitlines()[-5:-1]
    assert re.fullmatch("held-out prompt +before +after", heads)
    page = (run / "report.html").read_text()
    assert f"<p>{with_code(PathTask.about)}<br>" in page
    assert "none twice: <code>ab,bc,cd,ad:a&gt;c=</code> asks for <code>abc</code> or <code>adc</code>.<br>" in page
    heldout = [(run / f"completions/heldout_step_{step}.jsonl").read_text().splitlines() for step in (0, 4)]
    for line, *ends in zip(lines, *(rows[:: SMALL["--eval-samples"]] for rows in heldout), strict=False):
        before, after = map(json.loads, ends)
        assert line.startswith(before["prompt"])
        kind = {1: "up", -1: "down", 0: ""}[(after["reward"] > before["reward"]) - (after["reward"] < before["reward"])]
        for end, moved in ((before, ""), (after, kind)):
            said = markup("{}", end["completion"])
            assert f'<span class="{moved}">{end["reward"]:g}</span></small><br><code>{said}' in page
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    drawn = re.findall(r"<figcaption><b>(.*?)</b>", page)
    assert {"Reward and held-out accuracy", "Learning rate", "Squared score norm", "Entropy"} <= set(drawn)
    assert len(set(drawn)) == len(drawn)


@pytest.mark.usefixtures("dense_reward")
def test_one_seed_one_result(small_run, tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert small_run(output=tmp_path / name, seed=seed, warm_start_steps=2, warm_start_args={"batch": 4})[0] == 0
    assert metrics_of(tmp_path / "a") == metrics_of(tmp_path / "b")
    assert weights_of(tmp_path / "a", 4) == weights_of(tmp_path / "b", 4)
    assert weights_of(tmp_path / "a", 4) != weights_of(tmp_path / "a", 0)
    assert metrics_of(tmp_path / "a") != metrics_of(tmp_path / "c")


def test_a_longer_resumed_run_equals_an_uninterrupted_one(small_run, oblrpo, tmp_path, dense_reward):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert small_run(output=parts, steps=3, eval_steps=0)[0] == 0
    assert oblrpo("train", "--resume", "--output", parts, "--steps", 6)[0] == 0
    assert small_run(output=whole, steps=6, eval_steps=0)[0] == 0
    rows, expected = metrics_of(parts), metrics_of(whole)
    assert rows[3].pop("eval/accuracy") > 0  # the shorter run measured accuracy at what was then its end
    assert rows[3].pop("eval/accuracy_stderr") > 0
    assert {rows[3].pop("eval/swap_loss"), rows[3].pop("eval/swap_loss_stderr")}
    assert rows == expected
    assert weights_of(parts, 6) == weights_of(whole, 6) != weights_of(parts, 0)
    assert len({row["lr_factor"] for row in rows[1:]}) > 1
    assert read_yaml_file(parts / "config.yaml")["steps"] == 6


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer": "SGD", "algorithm": "grpo", "lr_scheduler_type": "linear", "num_iterations": 2},
        {"schedule": "auto", "baseline": "oblr_shrunk", "ledger_steps": 2, "learning_rate": 1e-4},
        {
            "algorithm": "oblrpo_shrunk",
            "num_iterations": 2,
            "prompts_per_micro_batch": 3,
        },
        {"algorithm": "vcpo", "num_iterations": 2, "ledger_steps": 2},
        {"algorithm": "opo", "schedule": "plugin"},
        {"schedule": "kl", "optimizer": "SGD", "learning_rate": 1e-4},
        {"algorithm": "oblrpo_shrunk", "look_steps": 2},
        {"algorithm": "oblrpo_shrunk", "look_steps": 1, "score_norms": "logit"},
        {"look_steps": 0},
        {"algorithm": "rloo", "num_iterations": 2},
        {"beta": 0.1, "warm_start_steps": 2},
        {"beta": 0.1, "ratio": "gspo", "num_iterations": 2, "epsilon": 1e-3},
        {"ratio": "cispo", "num_iterations": 3, "epsilon_high": 1.1},
        {"algorithm": "rloo", "dynamic_sampling": 3},
        {"schedule": "off", "optimizer": "Prodigy", "learning_rate": 1.0},
        {"schedule": "off", "optimizer": "AdamWScheduleFree", "learning_rate": 1e-3},
    ],
)
def test_resuming_forgets_the_step_no_checkpoint_holds(small_run, oblrpo, tmp_path, settings, dense_reward):
    """As if killed after writing the metrics of step 4 and half a line more, while writing its checkpoint."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert small_run(output=whole, **settings)[0] == 0
    shutil.copytree(whole, parts)
    metrics = parts / "metrics.jsonl"
    metrics.write_text(metrics.read_text() + '{"step": 5, "rew')
    os.rename(parts / "checkpoints" / "step_4", parts / "checkpoints" / ".step_4.partial")
    code, out, err = oblrpo("train", "--resume", "--output", parts)
    assert code == 0, err
    assert "resuming after step 3" in out
    assert metrics_of(parts) == metrics_of(whole)
    assert weights_of(parts, 4) == weights_of(whole, 4) != weights_of(whole, 0)
    assert not list((parts / "checkpoints").glob(".*"))


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_run(small_run, oblrpo, tmp_path, dense_reward):
    """SIGKILL at an arbitrary moment; nothing but the step in progress is lost."""
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    process = start(killed, **{"--steps": 12, "--eval-steps": 0})
    deadline = time.monotonic() + 120
    while not (killed / "checkpoints" / "step_3").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    reached = (killed / "metrics.jsonl").read_text().count("\n") - 1
    code, out, _ = oblrpo("train", "--resume", "--output", killed)
    assert code == 0
    resumed = int(out.split("resuming after step ")[1].split()[0])
    assert reached - 1 <= resumed <= reached
    assert small_run(output=whole, steps=12, eval_steps=0)[0] == 0
    assert metrics_of(killed) == metrics_of(whole)
    assert weights_of(killed, 12) == weights_of(whole, 12) != weights_of(whole, 0)


def test_ctrl_c_finishes_the_step_and_saves(tmp_path):
    run = tmp_path / "run"
    process = start(run, **{"--steps": 2000, "--save-steps": 0})
    deadline = time.monotonic() + 120
    while not (run / "completions" / "step_2.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    last = metrics_of(run)[-1]["step"]
    assert f"stopped after step {last}; continue with: oblrpo train --resume --output {run} (" in err
    assert (run / "checkpoints" / f"step_{last}").is_dir()


@pytest.mark.page
@pytest.mark.usefixtures("dense_reward")
def test_what_ended_a_run_is_on_its_page_until_it_resumes(run, small_run, oblrpo, tmp_path):
    code, _, err = small_run(output=tmp_path / "wild", schedule="off", optimizer="SGD", learning_rate=1e30)
    assert code == 2
    assert "steps were skipped" in err
    assert "steps were skipped" in (tmp_path / "wild" / "report.html").read_text()
    (run / "failure.txt").write_text("training has diverged: not really.\n")
    (run / "report.html").write_text("of before")
    assert small_run(steps=2)[0] == 2  # a new run is refused there, and leaves all as it is
    assert (run / "report.html").read_text() == "of before"
    assert oblrpo("train", "--resume", "--output", run, "--steps", "5")[0] == 0
    assert not (run / "failure.txt").exists()
    assert "diverged" not in (run / "report.html").read_text()


@pytest.mark.page
@pytest.mark.usefixtures("dense_reward")
def test_a_fault_has_its_page_too(small_run, tmp_path, monkeypatch):
    def fail(*_):
        raise RuntimeError("the card is on fire")

    monkeypatch.setattr("oblrpo.step.step.Learner.update", fail)
    with pytest.raises(RuntimeError, match="on fire"):
        small_run()
    assert (tmp_path / "run" / "failure.txt").read_text() == "the card is on fire\n"
    assert ".</b> the card is on fire" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.usefixtures("dense_reward")
def test_micro_batches_train_alike(small_run, tmp_path):
    for name, size in (("whole", 0), ("split", 1)):
        assert small_run(output=tmp_path / name, prompts_per_micro_batch=size, optimizer="SGD")[0] == 0
    rows = metrics_of(tmp_path / "whole")
    for first, second in zip(rows, metrics_of(tmp_path / "split"), strict=True):
        for key in ("reward", "score_norm2/mean", "grad_norm", "trace_cov", "eval/accuracy"):
            assert (key in second) == (key in first)
            if key in first:
                assert second[key] == pytest.approx(first[key], rel=1e-3)
    assert min(row["grad_norm"] for row in rows[1:]) > 0


@pytest.mark.usefixtures("dense_reward")
@pytest.mark.parametrize(
    ("settings", "shares"),
    [
        ({"lr_scheduler_type": "linear"}, [0.875, 0.625, 0.375, 0.125]),
        ({}, [1, 1, 1, 1]),
        ({"warmup_steps": 4}, [0.25, 0.5, 0.75, 1]),
    ],
)
def test_the_rate_runs_its_course_once(small_run, tmp_path, settings, shares):
    """Also with two updates a step; the rate logged is that of the step's last update."""
    assert small_run(schedule="off", learning_rate=0.1, num_iterations=2, eval_steps=0, **settings)[0] == 0
    got = [row["learning_rate"] for row in metrics_of(tmp_path / "run")[1:]]
    assert got == pytest.approx([0.1 * share for share in shares])


@pytest.mark.parametrize("task", ["path", "arithmetic", ADDITION])
def test_every_built_in_task_warm_starts_and_trains(small_run, task, tmp_path):
    code, _, err = small_run(task=task, warm_start_steps=2, warm_start_args={"batch": 4}, steps=2)
    assert code == 0, err
    assert metrics_of(tmp_path / "run")[-1]["step"] == 2


def test_a_user_file_of_questions(small_run, tmp_path):
    data = tmp_path / "questions.jsonl"
    rows = [
        {"question": f"Ann has {n} apples and eats 2. How many?", "answer": f"...\n#### {n - 2:,}"}
        for n in range(3, 103)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, _, err = small_run(
        data=data, prompt_column="question", answer_column="answer", rewards="numeric", steps=2,
        prompt_template="Q: {prompt}\nA:", num_iterations=2,
    )  # fmt: skip
    assert code == 0, err
    completions = (tmp_path / "run" / "completions" / "step_1.jsonl").read_text()
    assert json.loads(completions.splitlines()[0])["prompt"].startswith("Q: Ann has")


def test_dry_run_prints_and_writes_nothing(small_run, oblrpo, tmp_path):
    code, out, _ = small_run("demo", "--dry-run", output=tmp_path / "none")
    assert code == 0
    assert not (tmp_path / "none").exists()
    assert "hidden_size: 16" in out
    assert "parameters" in out
    assert "4 prompts x 3 completions = 12 completions" in out
    assert re.search("^prompt     '.+'$", out, re.M)
    said = [line.split()[0] for line in out.partition("\n\n")[0].splitlines()]
    assert (said[0], said[-1]) == ("policy", "memory")  # before the settings


def test_a_dry_run_tries_a_model_last_and_does_not_save_it(small_run, tmp_path, monkeypatch):
    """What a model is refused for comes after the figures; its weights stay where they are."""
    model, saved = folder_of("qwen2-tied", tmp_path / "model"), []
    monkeypatch.setattr(Policy, "save", lambda self, folder: saved.append(folder))
    monkeypatch.setattr(checks, "noise", lambda policy: "a shuffle")
    result = small_run("--dry-run", output=tmp_path / "none", model=model)
    complained(result, "adds noise to its forwards even in eval mode (a shuffle)")
    assert "\nmemory     about" in result[1]
    assert "\nsteps: 4\n" in result[1]
    assert not saved


def test_no_steps_are_said_to_be_none(small_run):
    code, out, _ = small_run(steps=0)
    assert code == 0
    assert "0 steps, seed 0: no RL, only held-out accuracy and a checkpoint\n" in out
    assert "no RL" not in small_run("--dry-run")[1]


def test_a_recipe_file_and_flags_over_it(oblrpo, tmp_path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("learning_rate: 3e-4\nsteps: 7\noptimizer: SGD\noptimizer_args: {momentum: 0.9}\n")
    code, out, err = oblrpo("train", "--steps", 9, recipe, "--dry-run", "--device", "cpu")
    assert code == 0, err
    settings = read_yaml(out.split("\n\n")[-1], "out")
    assert (settings["learning_rate"], settings["steps"], settings["optimizer_args"]) == (3e-4, 9, {"momentum": 0.9})


@pytest.mark.usefixtures("dense_reward")
def test_looks_by_which_nothing_is_weighed_change_nothing(small_run, tmp_path):
    for name, every in (("never", 0), ("always", 1)):
        settings = {
            "algorithm": "rloo",
            "schedule": "off",
            "learning_rate": 0.1,
            "look_steps": every,
            "ledger_steps": 0,
        }
        assert small_run(output=tmp_path / name, **settings)[0] == 0
    never, always = metrics_of(tmp_path / "never"), metrics_of(tmp_path / "always")
    assert not any("score_norm2/mean" in row for row in never)
    assert all("score_norm2/mean" in row for row in always[1:])
    assert [row["reward"] for row in never[1:]] == [row["reward"] for row in always[1:]]
    assert [row["grad_norm"] for row in never[1:]] == [row["grad_norm"] for row in always[1:]]
    assert weights_of(tmp_path / "never", 4) == weights_of(tmp_path / "always", 4) != weights_of(tmp_path / "never", 0)


@pytest.mark.usefixtures("dense_reward")
@pytest.mark.parametrize("score_norms", ["length", "logit", "calibrated"])
def test_looks_come_seldom_once_the_proxy_has_learned(small_run, oblrpo, tmp_path, score_norms):
    """After the first steps every third one is looked at, once work has paid for it; a resumed run learned the same."""
    settings = {"score_norms": score_norms, "look_steps": 3, "steps": 13}
    assert small_run(output=tmp_path / "a", **settings)[0] == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    for step in (12, 13):
        shutil.rmtree(tmp_path / "b" / "checkpoints" / f"step_{step}")
    assert oblrpo("train", "--resume", "--output", tmp_path / "b")[0] == 0
    rows = metrics_of(tmp_path / "a")
    for name in ("score_norm2/mean", "score_norm2/agreement_calibrated"):
        looked = [row["step"] for row in rows if name in row]
        assert looked[0] == 1
        assert [step for step in looked if step > 5] == [12]
    assert metrics_of(tmp_path / "b")[-2:] == rows[-2:]
    assert weights_of(tmp_path / "a", 13) == weights_of(tmp_path / "b", 13)
    completions = (tmp_path / "a" / "completions").glob("step_*.jsonl")
    found = {path.stem for path in completions if "score_norm2" in path.read_text()}
    assert found == {f"step_{row['step']}" for row in rows if "score_norm2/mean" in row}


@pytest.mark.page
@pytest.mark.usefixtures("dense_reward")
def test_the_page_of_a_run_that_never_took_norms(small_run, tmp_path):
    code, _, err = small_run(score_norms="length", look_steps=0, ledger_steps=0, steps=1)
    assert code == 0, err
    assert "Squared score norm" not in (tmp_path / "run" / "report.html").read_text()
    assert "not taken" in (tmp_path / "run" / "report.html").read_text()


def test_help_is_one_screen_of_recipes_and_common_settings(oblrpo):
    code, out, _ = oblrpo("train", "--help")
    assert code == 0
    assert "smollm2-arithmetic" in out
    assert "--max-completion-length" in out
    assert "--model-args" not in out
    assert "A small Qwen3 policy learns to find routes in graphs" in " ".join(out.split())
    assert set(documented(TrainConfig())) >= set(flatten(TrainConfig()))
    assert len(out.splitlines()) < 70


def test_all_help_reads_like_documentation(oblrpo):
    code, out, _ = oblrpo("train", "--help-all")
    assert code == 0
    flat = flatten(TrainConfig())
    for key in flat:
        assert re.search(rf"^  --(\[no-\])?{key.replace('_', '-')} ", out, re.MULTILINE) or key == "recipe"
    for name in ("oblrpo", "rloo", "grpo", "debiased", "plugin", "arithmetic", "group_std", "token_mean"):
        assert name in out
    assert oblrpo("--help")[0] == 0
    assert oblrpo("--version")[1].strip()


def test_resuming_takes_the_output_of_a_recipe(oblrpo, tmp_path):
    flags = {key[2:].replace("-", "_"): value for key, value in SMALL.items()} | {"output": str(tmp_path / "run")}
    (tmp_path / "mine.yaml").write_text(yaml_text(flags | {"steps": 2}))
    assert oblrpo("train", tmp_path / "mine.yaml")[0] == 0
    for more in (["--dry-run"], []):
        code, out, err = oblrpo("train", tmp_path / "mine.yaml", "--resume", "--steps", 3, *more)
        assert code == 0, err
        assert f"output     {tmp_path / 'run'}, 3 steps, seed 0; resuming after step 2\n" in out


@pytest.mark.page
def test_report_is_written_anew(small_run, oblrpo, tmp_path):
    assert small_run(steps=2)[0] == 0
    page = tmp_path / "run" / "report.html"
    completions = tmp_path / "run" / "completions" / "step_2.jsonl"  # with characters that are line ends to some
    completions.write_text(completions.read_text().replace('"completion": "', '"completion": "\u0085\u2028'), "utf-8")
    assert oblrpo("report", tmp_path / "run")[0] == 0
    before = page.read_text()
    page.unlink()
    assert oblrpo("report", tmp_path / "run")[0] == 0
    assert page.read_text() == before


@pytest.mark.page
def test_reports_of_two_runs(small_run, oblrpo, tmp_path):
    for name in ("a", "b"):
        assert small_run(steps=1, output=tmp_path / name)[0] == 0
    code, out, _ = oblrpo("report", tmp_path / "a", tmp_path / "b")
    assert (code, out.strip()) == (0, str(tmp_path / "report.html"))
    assert "<h1>a beside b</h1>" in (tmp_path / "report.html").read_text()
    code, _, err = oblrpo("report", tmp_path / "a", tmp_path / "b", "--follow")
    assert (code, err) == (2, "oblrpo: --follow takes one run, not 2; leave it out, or name one.\n")
    code, _, err = oblrpo("report", tmp_path / "a", tmp_path / "c")
    assert code == 2
    assert f"{tmp_path / 'c'} is not there" in err


@pytest.mark.page
def test_report_goes_where_it_is_told(small_run, oblrpo, tmp_path):
    assert small_run(steps=1)[0] == 0
    code, out, _ = oblrpo("report", tmp_path / "run", "--output", tmp_path / "page.html")
    assert (code, out.strip()) == (0, str(tmp_path / "page.html"))
    assert (tmp_path / "page.html").read_text() == (tmp_path / "run" / "report.html").read_text()
    code, out, _ = oblrpo("report", tmp_path / "run", "--follow", "--output", tmp_path / "other.html")
    assert code == 0  # the run has ended: one page
    assert (tmp_path / "other.html").read_text() == (tmp_path / "page.html").read_text()


def test_report_to_tensorboard_and_resume(small_run, oblrpo, tmp_path):
    """A run that starts to report when it is resumed has sent everything, under the keys of metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert small_run(steps=2)[0] == 0
    code, _, err = oblrpo("train", "--resume", "--output", tmp_path / "run", "--steps", 3, "--report-to", "tensorboard")
    assert code == 0, err
    assert oblrpo("train", "--resume", "--output", tmp_path / "run", "--steps", 4)[0] == 0
    read = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for key in {key for row in rows for key, value in row.items() if isinstance(value, (int, float))} - {"step"}:
        known = [(row["step"], pytest.approx(row[key])) for row in rows if row.get(key) is not None]
        assert [(event.step, event.value) for event in read.Scalars(key)] == known, key


def test_the_package_runs_without_its_source_folder():
    import oblrpo

    assert (Path(oblrpo.__file__).parent / "recipes" / "demo.yaml").is_file()
