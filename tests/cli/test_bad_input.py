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
from oblrpo.settings import RECIPES, TrainConfig, load_recipe, recipe_settings, refuse_idle
from oblrpo.tasks import PathTask
from tests.cli.conftest import complained


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch"], ["no recipe or file 'nosuch'", "demo"]),
        (["--task", "adition"], ["Unknown task 'adition'", "addition"]),
        (["--algorithm", "grppo"], ["unknown algorithm 'grppo'", "grpo"]),
        (["--baseline", "best"], ["unknown baseline 'best'", "oblr"]),
        (
            ["--baseline", "otb"],
            ["'otb' is measured in the variance ledger only; train with one of: none, "],
        ),
        (["--normalisation", "z"], ["unknown normalisation 'z'", "group_std"]),
        (["--weighting", "z"], ["unknown weighting 'z'", "token_mean"]),
        (["--schedule", "fast"], ["unknown schedule 'fast'", "debiased"]),
        (["--train-on", "some"], ["train_on must be all, exact or compute-optimal", "'some'"]),
        (["--optimizer", "Adamm"], ["no optimizer 'Adamm' in torch.optim"]),
        (["--learning-rate", "-1"], ["learning_rate is -1.0; it must be a finite number of at least 0"]),
        (["--no-such-flag", "1"], ["unknown argument '--no-such-flag'"]),
        (["--learning-rte", "1"], ["unknown argument '--learning-rte'", "Did you mean '--learning-rate'?"]),
        (["--learning-rte=1"], ["unknown argument '--learning-rte=1'", "Did you mean '--learning-rate'?"]),
        (["--output-dir", "x"], ["unknown argument '--output-dir'", "It is --output here."]),
        (["--top-p", "0.9"], ["There is none here: the policy is sampled as it is"]),
        (["--split", "test"], ["It is --data here, such as owner/name[validation]."]),
        (["--sampler-correction", "none"], ["unknown sampler_correction 'none'; choose one of: auto, truncated"]),
        (["--steps", "many"], ["--steps is 'many', but it must be a whole number"]),
        (
            ["--algorithm", "oblrpo", "--num-generations", "1"],
            ["'oblr' compares a prompt's completions", "at least 2, not 1"],
        ),
        (["--baseline", "rloo", "--num-generations", "1"], ["'rloo' compares a prompt's completions"]),
        (
            ["--algorithm", "grpo", "--num-generations", "1"],
            ["'grpo' compares a prompt's completions", "at least 2, not 1"],
        ),
        (
            ["--normalisation", "group_std", "--baseline", "js", "--num-generations", "1"],
            ["group_std", "at least 2, not 1"],
        ),
        (["--schedule", "auto", "--schedule-kl", "0"], ["need kl > 0"]),
        (["--schedule", "auto", "--learning-rate", "0"], ["above 0 to start from"]),
        (["--schedule", "auto", "--optimizer", "Rprop"], ["'auto'", "Rprop", "AdamW"]),
        (["--schedule", "auto", "--optimizer-args", "{betas: [0.99, 0.999]}"], ["momentum of 0.99", "'auto'"]),
        (
            ["--schedule", "auto", "--optimizer", "SGD", "--optimizer-args", "{momentum: 0.96}"],
            ["momentum of 0.96", "the first of betas, to 0.9"],
        ),
        (["--prompts-per-step", "1"], ["prompts_per_step is 1; it must be a finite number of at least 2"]),
        (["--temperature", "0"], ["temperature is 0.0; it must be a finite number of at least 0.001"]),
        (["--temperature", "inf"], ["temperature is inf"]),
        (["--learning-rate", "nan"], ["learning_rate is nan"]),
        (["--max-grad-norm", "-1"], ["max_grad_norm is -1.0; it must be a finite number of at least 0"]),
        (
            ["--warm-start-steps", "1", "--warm-start-args", "{noise: 2}"],
            ["warm_start_args.noise is 2.0; it must be a finite number of at least 0 and at most 1"],
        ),
        (["--threads", "-1"], ["threads is -1"]),
        (["--model-args", "{num_attention_heads: 0}"], ["num_attention_heads must be even"]),
        (["--model-args", "{num_hidden_layers: 0}"], ["model_args.num_hidden_layers is 0"]),
        (["--model-args", "{hiden_size: 8}"], ["model_args has no 'hiden_size'", "Did you mean 'hidden_size'?"]),
        (["--model-args", "{hidden_size: wide}"], ["model_args: hidden_size is 'wide', but it must be a whole number"]),
        (["--lora", "{alpha: 8}"], ["give the adapters' rank r, at least 1, such as '{r: 16}'"]),
        (["--optimizer", "LBFGS"], ["LBFGS needs a closure"]),
        (["--optimizer-args", "{betas: 3}"], ["AdamW rejects its settings"]),
        (["--optimizer-args", "{maximize: true}"], ["must not set maximize"]),
        (["--task-args", "{1: 2}"], ["the key 1 in line 1 is not text"]),
        (["--task-args", "{seed: 2}"], ["no parameter 'seed'"]),
        (["--seed", "99999999999999999999"], ["seed is 99999999999999999999"]),
        (["--score-method", "guess"], ["unknown score_method 'guess'; choose one of: auto, gram"]),
        (["--score-norms", "guess"], ["unknown score_norms 'guess'; choose one of: exact, length"]),
        (["--score-norms", "calibrated", "--calibration-steps", "0"], ["needs calibration_steps of at least 1"]),
        (["--model", "/no/such/model"], ["cannot load the model '/no/such/model'"]),
        (["--device", "cuda:9"], ["device 'cuda:9' cannot be used"]),
        (["--data", "/no/such.jsonl"], ["/no/such.jsonl"]),
        (["--max-completion-length", "2047"], ["does not fit the model's 2048"]),
    ],
)
def test_settings(small_run, tmp_path, arguments, words):
    if len(arguments) == 1:
        result = small_run(*arguments)
    else:
        flags = zip(arguments[::2], arguments[1::2], strict=True)
        result = small_run(**{key[2:].replace("-", "_"): value for key, value in flags})
    complained(result, *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("learning_rte: 1.0", ["unknown setting 'learning_rte'", "Did you mean 'learning_rate'?"]),
        ("reward_funcs: [task]", ["unknown setting 'reward_funcs'", "It is rewards here, such as my.py:function."]),
        ("xyzzy: 1", ["unknown setting 'xyzzy'", "--help"]),
        ("steps: soon", ["steps is 'soon', but it must be a whole number"]),
        ("steps: 1.5", ["steps is 1.5, but it must be a whole number"]),
        ("rewards: 3", ["rewards is 3, but it must be text, or a list of texts"]),
        ("trust_remote_code: 3", ["must be true or false"]),
        ("- a\n- b", ["key: value"]),
        ("a: [", ["not valid YAML"]),
        ("task_args: {colour: 3}", ["no parameter 'colour'"]),
        ("optimizer_args: {momentumm: 1}", ["AdamW rejects its settings"]),
    ],
)
def test_recipe_files(oblrpo, tmp_path, text, words):
    (tmp_path / "mine.yaml").write_text(text)
    complained(oblrpo("train", tmp_path / "mine.yaml", "--output", tmp_path / "run", "--device", "cpu"), *words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "x", "--model-args", "{hidden_size: 8}"], "--model-args would change nothing, for a model"),
        (["--attn_implementation", "eager"], "--attn_implementation would change nothing, for no model is loaded"),
        (["--warm-start-args", "{batch: 8}"], "for warm_start_steps is 0"),
        (["--data", "q.jsonl", "--task", "addition"], "--task would change nothing, for the problems come from data"),
        (["--task", "gsm8k", "--answer-column", "a"], "gsm8k names its columns itself"),
        (["--heldout-fraction", "0.2"], "the task 'path' generates its problems"),
        (["--data", "q.jsonl", "--eval-data", "r.jsonl", "--heldout-fraction", "0.2"], "a source of their own"),
        (["--vllm-args", "{dtype: float32}"], "the sampler is transformers"),
        (["--project", "mine", "--report-to", "tensorboard"], "--project would change nothing"),
        (["recipe.yaml"], "recipe.yaml: model_args would change nothing"),
    ],
)
def test_settings_that_would_change_nothing(oblrpo, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: x\nmodel_args: {hidden_size: 8}\n")
    for name in ("q.jsonl", "r.jsonl"):
        (tmp_path / name).touch()
    complained(oblrpo("train", *arguments, "--output", tmp_path / "run"), words)


def test_sizes_of_a_recipe_give_way_to_a_model_and_recipes_say_nothing_in_vain(oblrpo):
    complained(oblrpo("train", "demo", "--model", "/no/such", "--output", "no"), "cannot load the model '/no/such'")
    for entry in RECIPES.iterdir():
        if entry.name.endswith(".yaml"):
            name = entry.name.removesuffix(".yaml")
            refuse_idle({key: key for key in recipe_settings(name)}, load_recipe(name, TrainConfig()))


@pytest.mark.page
def test_unknown_command(oblrpo, tmp_path):
    complained(oblrpo("trian"), "unknown command 'trian'", "train")
    complained(oblrpo("report", "/no/such/run"), "/no/such/run is not there; give the folder of a run.")
    complained(oblrpo("report", "/no/such/run", "--follow"), "is not there")
    (tmp_path / "demo").mkdir()
    complained(oblrpo("report", tmp_path / "dmo"), "is not there", "Did you mean 'demo'?")
    complained(oblrpo("report", tmp_path, "--seconds", 0), "seconds is 0")
    complained(oblrpo("report", tmp_path, "--output", tmp_path / "no" / "page.html"), "cannot write to")


def snapshot(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_an_existing_folder_is_left_alone(small_run, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("the only copy")
    before = snapshot(tmp_path / "run")
    complained(small_run(), "already exists; give another --output (output='runs/NAME' in Python).")
    assert snapshot(tmp_path / "run") == before


def test_resume_needs_a_run_and_the_same_settings(small_run, oblrpo, tmp_path):
    complained(oblrpo("train", "--resume", "--output", tmp_path / "none"), "holds no run to resume")
    assert not (tmp_path / "none").exists()
    assert small_run(steps=1)[0] == 0
    before = snapshot(tmp_path / "run")
    complained(
        oblrpo("train", "--resume", "--output", tmp_path / "run", "--learning-rate", 0.5, "--seed", 3),
        "started with other settings", "learning_rate (was", "seed (was 0, now 3)",
    )  # fmt: skip
    assert snapshot(tmp_path / "run") == before


STATE = ["model.safetensors", "oblrpo_state.tensors", "oblrpo_state.json"]


@pytest.mark.parametrize(
    ("file", "damage"),
    [*product([*STATE, "config.json"], ["truncated", "garbage"]), ("config.json", "missing")],
)
def test_a_broken_checkpoint(small_run, oblrpo, tmp_path, file, damage):
    """Its checksums are those of the broken files, as if it had been written so (missing ones: `test_damage.py`)."""
    assert small_run(steps=2)[0] == 0
    victim = tmp_path / "run" / "checkpoints" / "step_2" / file
    content = victim.read_bytes()
    if damage == "missing":
        victim.unlink()
    else:
        victim.write_bytes(content[: len(content) // 2] if damage == "truncated" else b"\x00garbage" * 40)
    write_sums(victim.parent)
    before = snapshot(tmp_path / "run")
    result = oblrpo("train", "--resume", "--output", tmp_path / "run", "--steps", 3)
    complained(result, "step_2", "emove that folder to resume from the")
    assert snapshot(tmp_path / "run") == before
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_2")  # what the sentence says helps
    code, out, _ = oblrpo("train", "--resume", "--output", tmp_path / "run", "--steps", 3)
    assert code == 0
    assert "resuming after step 1" in out


@pytest.mark.usefixtures("dense_reward")
@pytest.mark.parametrize("algorithm", ["oblrpo", "reinforce"])
def test_a_run_that_diverges(small_run, tmp_path, algorithm):
    """One sentence, and the checkpoints from before it are whole."""
    result = small_run(algorithm=algorithm, optimizer="SGD", learning_rate=1e30, schedule="off")
    complained(result, "lower learning_rate")
    last = max((tmp_path / "run" / "checkpoints").glob("step_*"))
    assert all(t.isfinite().all() for t in load_file(last / "model.safetensors").values())


@pytest.mark.usefixtures("dense_reward")
def test_steps_of_a_falling_rate_cannot_change(small_run, oblrpo, tmp_path):
    assert small_run(lr_scheduler_type="cosine", steps=2)[0] == 0
    complained(oblrpo("train", "--resume", "--output", tmp_path / "run", "--steps", 5), "steps (was 2, now 5)")


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
    complained(small_run(eval_samples=1, steps=20, task="path"), "reward 'task' returned", "rewards must be finite")


def test_data_rows_are_named(small_run, tmp_path):
    data = tmp_path / "data.jsonl"
    good = json.dumps({"prompt": "1+1=", "answer": "2"})
    for bad, words in (("{", ["line 2"]), (json.dumps({"prompt": "x"}), ["answer"]), ('"text"', ["line 2"])):
        data.write_text(good + "\n" + bad + "\n")
        complained(small_run(data=data), "data.jsonl", *words)
    data.write_text(good + "\n")
    complained(small_run(data=data, warm_start_steps=3), "warm_start_steps needs sft_data, or a built-in task")


@pytest.mark.page
def test_files_that_are_no_text_or_no_rows(small_run, oblrpo, tmp_path):
    (tmp_path / "mine.yaml").write_bytes(b"steps: \xff\xfe")
    complained(oblrpo("train", tmp_path / "mine.yaml"), "mine.yaml cannot be read as text")
    (tmp_path / "mine.yaml").write_text("output: 2024-99-99")
    complained(oblrpo("train", tmp_path / "mine.yaml"), "mine.yaml is not valid YAML")
    assert small_run(steps=2)[0] == 0
    run = tmp_path / "run"
    metrics = run / "metrics.jsonl"
    kept = metrics.read_text()
    metrics.write_text("garbage\n" + kept)
    complained(oblrpo("report", run), "metrics.jsonl line 1 is damaged")
    metrics.write_text(kept)
    complained(oblrpo("train", "--resume", "--output", run, "--steps", 1), "is at step 2 already")
    assert "steps: 2\n" in (run / "config.yaml").read_text()
    (run / "checkpoints" / "step_2" / "oblrpo_state.json").write_text("[]")
    write_sums(run / "checkpoints" / "step_2")
    complained(oblrpo("train", "--resume", "--output", run), "step_2", "cannot be read")
    (run / "config.yaml").unlink()
    complained(oblrpo("report", run), "holds no config.yaml")


def test_a_file_of_data_is_missed_before_libraries_load(oblrpo, tmp_path, monkeypatch):
    (tmp_path / "mine.csv").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("oblrpo.cli.train.loading", None)
    monkeypatch.setattr("oblrpo.cli.evaluate._load", None)
    said = "Cannot read the data file mien.csv: No such file or directory; check the path. Did you mean 'mine.csv'?"
    for flag in ("--data", "--eval-data", "--sft-data"):
        complained(oblrpo("train", flag, "mien.csv"), said)
    complained(oblrpo("evaluate", "model", "--data", "mien.csv"), said)
    check_files(["python:3 rows, sha256 0123abcd"], ["owner/name[test]"], ["oblrpo:sums.jsonl", "mine.csv"])


def test_names_are_not_taken_for_markup(small_run, tmp_path):
    code, out, err = small_run(output=tmp_path / "run[/x][a]", steps=1)
    assert code == 0, err
    assert "run[/x][a]" in out


def test_out_of_memory(small_run):
    complained(
        small_run(model_args={"hidden_size": 2**30, "num_attention_heads": 2}),
        "out of memory",
        "prompts_per_micro_batch",
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
