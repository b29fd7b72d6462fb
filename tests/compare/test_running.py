"""Comparisons as a user runs them: real trainings of very small policies, each in a process of its own."""

import csv
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lab.tasks import INSTRUCTIONS
from oblrpo.compare.training import first_mistake
from oblrpo.policy import make_policy
from oblrpo.settings import PolicyConfig, flatten, read_yaml, yaml_text
from tests.cli.conftest import complained, metrics_of
from tests.compare.conftest import launch, plan_of

pytestmark = pytest.mark.usefixtures("dense_trainings", "dense_reward")

VARIANTS = {"rloo": {"algorithm": "rloo"}, "ours": {"algorithm": "oblrpo_shrunk", "learning_rate": 1e-3}}
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}="
KEYS = {"variants": VARIANTS, "learning_rates": [1e-3, 1e-2], "seeds": 3, "search_seeds": 2, "processes": 2}


def all_metrics(folder):
    return {str(path.parent.relative_to(folder)): metrics_of(path.parent) for path in folder.rglob("metrics.jsonl")}


@pytest.mark.slow
def test_a_comparison_its_repetition_and_one_of_its_runs_alone(write_spec, oblrpo, tmp_path):
    """One command leaves all runs; they are those of `oblrpo train`; the same command finds nothing more to do."""
    spec, out = write_spec(**KEYS), tmp_path / "out"
    code, printed, err = oblrpo("compare", spec, "--output", out)
    assert code == 0, err + printed
    found = all_metrics(out)
    assert len(found) == 5 + 3 + 3
    assert all(rows[-1]["step"] == 4 for name, rows in found.items() if name.startswith("runs"))
    plan = plan_of(spec, out)
    rows = list(csv.DictReader((out / "compare.csv").read_text().splitlines()))
    assert [row["state"] for row in rows] == ["finished"] * 8
    for row in rows:
        assert float(row["accuracy_after"]) == pytest.approx(
            found[row["folder"][len(str(out)) + 1 :]][-1]["eval/accuracy"]
        )
    assert "8 of 8 runs finished" in (out / "compare.html").read_text()
    assert "rloo" in printed

    # warm start and all, in one process and in another: same metrics but for the time
    run = plan.run(plan.spec.variants[1], 1e-3, 2)
    alone = plan.spec.config(plan.spec.variants[1], 1e-3, 2, str(tmp_path / "alone"))
    recipe = tmp_path / "alone.yaml"
    recipe.write_text(yaml_text(flatten(alone) | {"recipe": ""}))
    assert oblrpo("train", recipe)[0] == 0
    first, *others = metrics_of(tmp_path / "alone")
    del first["warm_start_loss"]  # shared starts were trained once, before
    assert [first, *others] == metrics_of(run.folder.path)
    assert len({row["eval/accuracy"] for row in metrics_of(run.folder.path) if "eval/accuracy" in row}) > 1

    before = {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")}
    code, printed, err = oblrpo("compare", spec, "--output", out)
    assert code == 0, err
    assert "8 of 8 runs are already done" in printed
    assert {path: path.stat().st_mtime_ns for path in out.rglob("metrics.jsonl")} == before

    # an interrupted run resumes where it stopped; a missing one is made again; the folder may have been moved
    shutil.move(out, tmp_path / "moved")
    plan = plan_of(spec, tmp_path / "moved")
    half, lost = plan.run(plan.spec.variants[0], 1e-2, 0).folder, run_folder(plan, "ours", 1e-3, 1)
    shutil.rmtree(half.checkpoint(4))
    shutil.rmtree(half.checkpoint(3))
    half.drop_metrics_after(3)  # written after the last checkpoint
    shutil.rmtree(lost.path)
    code, printed, err = oblrpo("compare", spec, "--output", tmp_path / "moved")
    assert code == 0, err
    assert "5 of 8 runs are already done" in printed  # and the one that follows from the search
    assert "[8/8]" in printed
    assert all_metrics(tmp_path / "moved") == found
    assert "resuming after step 2" in half.path.with_name("seed_0.log").read_text()


def run_folder(plan, name, rate, seed):
    variant = next(variant for variant in plan.spec.variants if variant.name == name)
    return plan.run(variant, rate, seed).folder


@pytest.mark.slow
def test_failures_are_named_and_the_other_runs_finish(write_spec, oblrpo, tmp_path):
    """One run cannot read its checkpoint, another variant diverges: exit code 2, all others finished."""
    variants = {"good": {}, "wild": {"optimizer": "SGD", "schedule": "off", "learning_rate": 1e30}}
    spec, out = write_spec(variants=variants, seeds=2, processes=1, base={"warm_start_steps": 0}), tmp_path / "out"
    plan = plan_of(spec, out)
    broken = plan.run(plan.spec.variants[0], 1e-2, 0)
    broken.folder.create(broken.config)
    broken.folder.checkpoint(2).mkdir()
    result = oblrpo("compare", spec, "--output", out)
    complained(result, "1 of 4 runs failed", "good, rate 0.01, seed 0", "step_2")
    assert "wild, rate 1e+30, seed 1: diverged" in result[1]
    states = {
        row["variant"] + row["seed"]: row["state"]
        for row in csv.DictReader((out / "compare.csv").read_text().splitlines())
    }
    assert states == {"good0": "failed", "good1": "finished", "wild0": "diverged", "wild1": "diverged"}
    page = (out / "compare.html").read_text()
    assert "lower learning_rate" in page
    assert "step_2" in broken.log.read_text().splitlines()[-1]
    shutil.rmtree(broken.folder.checkpoint(2))  # what the sentence says helps
    code, printed, err = oblrpo("compare", spec, "--output", out)
    assert code == 0, err
    assert "3 of 4 runs are already done" in printed  # the diverged are not tried again
    assert broken.finished()
    assert broken.failure() is None


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ({"optimizer_args": {"momentumm": 1}}, "AdamW rejects its settings"),
        ({"model": "/no/such/model"}, "cannot load the model '/no/such/model'"),
        ({"algorithm": "oblrpo", "num_generations": 1}, "the baseline 'oblr' compares a prompt"),
        ({"data": "/no/such.jsonl", "warm_start_steps": 0}, "/no/such.jsonl"),
        ({"max_completion_length": 2047}, "does not fit the model's 2048"),
        ({}, ""),
    ],
)
def test_what_is_checked_before_anything_starts(write_spec, tmp_path, variant, words):
    plan = plan_of(write_spec(variants={"b": variant}, share_warm_start=False), tmp_path / "out")
    run = plan.all_known()[0]
    printed = first_mistake([run], [run])
    assert words in printed
    assert printed.startswith("b, rate 0.01, seed 0: ") == bool(words)


@pytest.mark.parametrize(
    ("template", "settings", "words"),
    [
        (TEMPLATE, {}, ""),
        (None, {}, "the model's tokenizer has no chat template"),
        (
            "{% for m in messages %}{{ m.content }}{% endfor %}=",
            {"tokens_per_micro_batch": 100},
            "but the longest prompt",
        ),
        (TEMPLATE, {"max_completion_length": 900}, "the model's 1000"),
    ],
)
def test_prompts_are_checked_as_a_named_model_reads_them(write_spec, tmp_path, template, settings, words):
    """Its tokenizer and its longest sequence count; its weights are not loaded."""
    policy = make_policy(
        PolicyConfig(model_args={"hidden_size": 16, "num_attention_heads": 2, "max_position_embeddings": 1000})
    )
    policy.tokenizer.chat_template = template
    policy.save(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    variant = {"model": str(tmp_path / "model"), "task": INSTRUCTIONS, "warm_start_steps": 0} | settings
    run = plan_of(write_spec(variants={"b": variant}, share_warm_start=False), tmp_path / "out").all_known()[0]
    printed = first_mistake([run], [run])
    assert words in printed
    assert bool(printed) == bool(words)


@pytest.mark.slow
def test_every_variant_is_checked_before_anything_starts(write_spec, oblrpo, tmp_path):
    spec = write_spec(variants={"a": {}, "b": {"optimizer_args": {"momentumm": 1}}}, seeds=2)
    result = oblrpo("compare", spec, "--output", tmp_path / "out")
    complained(result, "b, rate 0.01, seed 0: AdamW rejects its settings")
    assert not (tmp_path / "out").exists()


def test_dry_run_lists_and_writes_nothing(write_spec, oblrpo, tmp_path):
    code, printed, err = oblrpo("compare", write_spec(**KEYS), "--output", tmp_path / "out", "--dry-run")
    assert code == 0, err
    assert not (tmp_path / "out").exists()
    resolved = read_yaml(printed.split("\n\n")[0], "printed")
    assert resolved["variants"]["ours"] == {"algorithm": "oblrpo_shrunk", "learning_rates": [1e-3]}
    assert "8 runs, 2 at a time" in printed
    assert printed.count("rloo, rate ") == 4
    assert "rloo, the best of these rates, 1 further seed" in printed


@pytest.mark.slow
def test_what_trainings_are_forked_from_has_not_touched_cuda():
    """CUDA cannot be used in a fork of a process that has so much as counted the GPUs."""
    names = ("is_available", "device_count", "init", "_lazy_init", "get_device_properties", "get_device_capability")
    code = (
        "import sys, torch\n"
        "def touched(*_, **__): sys.exit('CUDA was touched')\n"
        f"for name in {names}: setattr(torch.cuda, name, touched)\n"
        "import oblrpo.compare.loaded\n"
        "assert 'oblrpo.trainer.loop' in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def trainings(pid):
    """Forks of the fork server that a comparison has started."""
    servers = [child for child in children(pid) if "forkserver" in Path(f"/proc/{child}/cmdline").read_text()]
    return [training for server in servers for training in children(server)]


def wait_for(there, seconds=180):
    deadline = time.monotonic() + seconds
    while not there() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert there()


TWO_RUNS = {"variants": {"a": {}, "b": {"algorithm": "rloo"}}, "seeds": 1, "processes": 2}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds trainings in /proc")
def test_ctrl_c_saves_and_the_same_command_resumes(write_spec, oblrpo, tmp_path):
    out = tmp_path / "out"
    spec = write_spec(**TWO_RUNS, base={"steps": 3000, "save_steps": 0, "eval_steps": 0, "warm_start_steps": 0})
    process = launch(spec, out)
    folders = [run.folder for run in plan_of(spec, out).all_known()]
    wait_for(lambda: all((folder.completions / "step_2.jsonl").exists() for folder in folders))
    found = trainings(process.pid)
    assert len(found) == 2
    process.send_signal(signal.SIGINT)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 130, printed
    assert "stopped with 0 of 2 runs finished; run the same command to continue" in printed
    assert not any(Path(f"/proc/{training}").exists() for training in found)
    for folder in folders:
        last = metrics_of(folder.path)[-1]["step"]
        assert folder.newest_whole()[0].name == f"step_{last}"
        assert 2 <= last < 3000


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds trainings in /proc")
def test_a_process_that_is_killed_takes_one_run_with_it(write_spec, tmp_path):
    out = tmp_path / "out"
    spec = write_spec(**TWO_RUNS | {"processes": 1}, base={"steps": 40, "save_steps": 1, "warm_start_steps": 0})
    process = launch(spec, out)
    first, second = plan_of(spec, out).all_known()
    wait_for(lambda: (first.folder.completions / "step_2.jsonl").exists())
    os.kill(trainings(process.pid)[0], signal.SIGKILL)
    printed, _ = process.communicate(timeout=300)
    assert process.returncode == 2, printed
    assert "a, rate 0.01, seed 0: failed: its process was ended by SIGKILL (out of memory?)" in printed
    assert second.finished()
    assert not first.finished()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds trainings in /proc")
def test_trainings_end_with_the_process_that_started_them(write_spec, tmp_path):
    spec, out = write_spec(**TWO_RUNS, base={"steps": 3000, "save_steps": 0, "warm_start_steps": 0}), tmp_path / "out"
    process = launch(spec, out)
    folders = [run.folder for run in plan_of(spec, out).all_known()]
    wait_for(lambda: all((folder.completions / "step_2.jsonl").exists() for folder in folders))
    found = trainings(process.pid)
    assert len(found) == 2
    process.kill()
    process.communicate()
    wait_for(lambda: not any(map(alive, found)))
    assert all(folder.checkpoint_steps()[-1] >= 2 for folder in folders)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_checkpoints_of_finished_runs_need_not_be_kept(write_spec, oblrpo, tmp_path):
    spec = write_spec(variants={"a": {}}, seeds=1, keep_checkpoints=False)
    assert oblrpo("compare", spec, "--output", tmp_path / "out")[0] == 0
    assert not list((tmp_path / "out" / "runs").rglob("*.safetensors"))
    code, printed, _ = oblrpo("compare", spec, "--output", tmp_path / "out")
    assert code == 0
    assert "1 of 1 runs are already done" in printed
