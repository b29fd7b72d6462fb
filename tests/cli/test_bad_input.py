"""Every mistake gets one clear sentence and exit code 2, and nothing is overwritten."""

import json
import shutil
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from oblrpo import cli
from oblrpo.checksums import write_sums
from oblrpo.commands import check_files
from oblrpo.settings import RECIPES, TrainConfig, load_recipe, recipe_settings, refuse_no_effect
from oblrpo.tasks import PathTask
from tests.cli.conftest import complained, metrics_of


def test_sizes_of_a_recipe_give_way_to_a_model_and_recipes_say_nothing_in_vain(oblrpo):
    complained(oblrpo("train", "demo", "--model", "/no/such", "--output", "no"), "cannot load the model '/no/such'")
    for entry in RECIPES.iterdir():
        if entry.name.endswith(".yaml"):
            name = entry.name.removesuffix(".yaml")
            refuse_no_effect({key: key for key in recipe_settings(name)}, load_recipe(name, TrainConfig()))


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_an_existing_folder_is_left_alone(small_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("the only copy")
    before = snapshot(tmp_path / "run")
    complained(small_run(), "already exists; give another --output (output='runs/NAME' in Python).")
    assert snapshot(tmp_path / "run") == before


def test_resume_needs_the_same_settings(run, oblrpo):
    before = snapshot(run)
    complained(
        oblrpo("train", "--resume", "--output", run, "--learning-rate", 0.5, "--seed", 3),
        "started with other settings", "learning_rate (was", "seed (was 0, now 3)",
    )  # fmt: skip
    assert snapshot(run) == before


STATE = ["model.safetensors", "oblrpo_state.tensors", "oblrpo_state.json"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [*product([*STATE, "config.json"], ["truncated", "garbage"]), ("config.json", "missing")],
)
def test_a_broken_checkpoint(run, oblrpo, file, damage):
    """Its checksums are those of the broken files, as if it had been written so (missing ones: `test_damage.py`)."""
    victim = run / "checkpoints" / "step_4" / file
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"\x00garbage" * 40)
    write_sums(victim.parent)
    before = snapshot(run)
    result = oblrpo("train", "--resume", "--output", run)
    complained(result, "step_4", "emove that folder to resume from the")
    assert snapshot(run) == before
    shutil.rmtree(run / "checkpoints" / "step_4")  # what the sentence says helps
    code, out, _ = oblrpo("train", "--resume", "--output", run)
    assert code == 0
    assert "resuming after step 3" in out


@pytest.mark.usefixtures("dense_reward")
@pytest.mark.parametrize("algorithm", ["oblrpo", "reinforce"])
def test_a_run_that_diverges(small_run, tmp_path, algorithm):
    """One sentence, and the checkpoints from before it are whole."""
    result = small_run(algorithm=algorithm, optimizer="SGD", learning_rate=1e30, schedule="off")
    complained(result, "lower learning_rate")
    last = max((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert all(t.isfinite().all() for t in load_file(last / "model.safetensors").values())


@pytest.mark.usefixtures("dense_reward")
@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_more_steps_lay_out_the_course_of_the_rate_anew(small_run, oblrpo, tmp_path, kind):
    """As in the trainer of transformers, but for its first step, which that makes at the old course's rate, 0."""
    settings = {"lr_scheduler_type": kind, "schedule": "off", "optimizer": "SGD"}
    assert small_run(**settings, steps=2)[0] == 0
    code, said, _ = oblrpo("train", "--resume", "--output", tmp_path / "run", "--steps", 6)
    assert code == 0
    assert "from here on the rate follows its schedule over all steps: steps (was 2, now 6)" in " ".join(said.split())
    rates = [row["learning_rate"] for row in metrics_of(tmp_path / "run")[3:]]
    assert small_run(**settings, steps=6, output=tmp_path / "whole")[0] == 0
    assert rates == [row["learning_rate"] for row in metrics_of(tmp_path / "whole")[3:]]


def test_one_of_several_processes_is_refused(small_run, monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    complained(small_run(), "runs in one process, and this is one of 2 (WORLD_SIZE", "OBLRPOTrainer")
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert small_run(steps=0)[0] == 0


def test_every_prompt_of_a_file_is_measured_before_the_run(small_run, tmp_path):
    rows = [{"prompt": f"{n} " + "x" * (5000 if n == 77 else 5), "answer": n} for n in range(100)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    complained(small_run(data=tmp_path / "data.jsonl"), "77 xxx", "does not fit")
    complained(small_run(data=tmp_path / "data.jsonl", eval_prompts=98), "eval_prompts", "100 rows")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rewards_that_are_not_finite(small_run, monkeypatch, value, tmp_path):
    calls = iter([0.0] * 30 + [value] + [0.0] * 1000)
    monkeypatch.setattr(PathTask, "reward", lambda self, problem, completion: next(calls))
    complained(small_run(eval_samples=1, steps=20, task="path"), "reward 'task'", "rewards must be finite")


def test_data_rows_are_named(small_run, tmp_path):
    data = tmp_path / "data.jsonl"
    good = json.dumps({"prompt": "1+1=", "answer": "2"})
    for bad, words in (("{", ["line 2"]), (json.dumps({"prompt": "x"}), ["answer"]), ('"text"', ["line 2"])):
        data.write_text(good + "\n" + bad + "\n")
        complained(small_run(data=data), "data.jsonl", *words)


@pytest.mark.page
def test_files_that_are_no_text_or_no_rows(run, oblrpo, tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"steps: \xff\xfe")
    complained(oblrpo("train", tmp_path / "mine.yaml"), "mine.yaml cannot be read as text")
    metrics = run / "metrics.jsonl"
    kept = metrics.read_text()
    metrics.write_text("garbage\n" + kept)
    complained(oblrpo("report", run), "metrics.jsonl line 1 is damaged")
    metrics.write_text(kept)
    complained(oblrpo("train", "--resume", "--output", run, "--steps", 1), "is at step 4; --steps must be at")
    assert "steps: 4\n" in (run / "config.yaml").read_text()
    (run / "checkpoints" / "step_4" / "oblrpo_state.json").write_text("[]")
    write_sums(run / "checkpoints" / "step_4")
    complained(oblrpo("train", "--resume", "--output", run), "step_4", "cannot be read")
    (run / "config.yaml").unlink()
    complained(oblrpo("report", run), "holds no config.yaml")


def test_a_file_of_data_is_missed_before_libraries_load(oblrpo, tmp_path, monkeypatch):
    (tmp_path / "mine.csv").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oblrpo.cli.train.gc", None)  # which is needed where they load
    monkeypatch.setattr("oblrpo.cli.evaluate._load", None)
    for words in (["train", "--data"], ["train", "--eval-data"], ["train", "--sft-data"], ["evaluate", "m", "--data"]):
        complained(oblrpo(*words, "mien.csv"), "Cannot read the data file mien.csv")
    check_files(["python:3 rows, sha256 0123abcd"], ["owner/name[test]"], ["mine.csv"])


def test_names_are_not_taken_for_markup(small_run, tmp_path):
    code, out, err = small_run(output=tmp_path / "run[/x][a]", steps=1)
    assert code == 0, err
    assert "run[/x][a]" in out


def test_out_of_memory(small_run):
    complained(
        small_run(model_args={"hidden_size": 2**30, "num_attention_heads": 2}),
        "out of memory",
        "max_num_seqs",
    )


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried 1 bytes"),
            True,
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("an illegal memory access was encountered"), False),
        (RuntimeError("Pin memory thread exited unexpectedly"), False),
    ],
)
def test_only_an_allocation_that_failed_is_out_of_memory(monkeypatch, capsys, error, told):
    def fail(argv):
        raise error

    monkeypatch.setattr(cli, "dispatch", fail)
    with pytest.raises(SystemExit if told else type(error)) as caught:
        cli.main()
    assert ("out of memory" in capsys.readouterr().err) == told
    assert caught.value is error or caught.value.code == 2
