"""A folder to share: what it holds loads, and its card says what the run did."""

import errno
import json
import os
import re
import shlex
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import oblrpo as package
from oblrpo.checksums import SUMS
from oblrpo.cli.train import _parse
from oblrpo.errors import InputError
from oblrpo.intervals import Z95
from oblrpo.report.export import LONGEST_CELL, _cell, export
from oblrpo.report.html import seen
from oblrpo.runs import RunFolder, sync_folder
from oblrpo.settings import TrainConfig, flatten, load_recipe, settings_in
from tests.cli.conftest import SMALL

FILES = {
    "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
    "tokenizer_config.json",
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def run(small_run, trained, tmp_path, dense_reward):
    """A run of this test's own: a copy of one that all share."""
    if not trained.exists():
        assert small_run("demo", steps=4, warm_start_steps=2, output=trained)[0] == 0
    return shutil.copytree(trained, tmp_path / "run")


def rows_of(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_the_folder_loads_and_holds_nothing_that_only_training_needs(run, oblrpo):
    code, out, err = oblrpo("export", run)
    assert code == 0, err
    folder = run / "export"
    assert out.splitlines()[0] == str(folder)
    assert {file.name for file in folder.iterdir()} == FILES
    ids = AutoTokenizer.from_pretrained(folder)("ab", return_tensors="pt").input_ids
    models = [AutoModelForCausalLM.from_pretrained(place) for place in (folder, run / "checkpoints" / "step_4")]
    with torch.no_grad():
        torch.testing.assert_close(models[0](ids).logits, models[1](ids).logits, rtol=0, atol=0)


def test_the_card_has_the_accuracies_of_its_step_and_the_command_that_makes_the_run(run, oblrpo, tmp_path):
    for step in (2, 4):
        assert oblrpo("export", run, "--step", step, "--output", tmp_path / f"{step}")[0] == 0
        card = (tmp_path / f"{step}" / "README.md").read_text()
        for row in (rows_of(run)[0], rows_of(run)[step]):
            figure, margin = row["eval/accuracy"], Z95 * row["eval/accuracy_stderr"]
            assert f"(step {row['step']}) | {figure:.3f} | ± {margin:.3f} |" in card
        assert f"after step {step} of 4" in card
        assert "- **Task**: Find a way from one letter to another" in card
        first, last = (
            json.loads((run / f"completions/heldout_step_{at}.jsonl").read_text().splitlines()[0]) for at in (0, step)
        )
        said = (f" {_cell(each['completion'])} | {each['reward']:g} |" for each in (first, last))
        assert seen(f"\n| `{first['prompt']}` |{''.join(said)}\n") in card
    words = shlex.split(re.search("```\noblrpo train (.*)\n```", card)[1])
    assert words[0] == "demo"
    again = flatten(_parse(words, load_recipe("demo", TrainConfig())).config)
    saved = settings_in(run / "config.yaml")
    assert {key for key in saved if again[key] != saved[key]} <= {"output", "threads"}
    assert "\nmodel_args:\n  hidden_size: 16\n" in card


def test_texts_in_a_table_of_the_card_end_no_cell():
    assert _cell("a | b\n`c`") == "`` a \\| b `c` ``"
    assert _cell("\n ") == "(empty)"
    assert _cell("x" * LONGEST_CELL) == f"`{'x' * LONGEST_CELL}`"
    assert _cell("begin" + "x" * LONGEST_CELL + "end") == f"`begin{'x' * 95} … {'x' * 97}end`"


def test_a_run_from_python_says_what_the_program_gave(tmp_path, dense_reward):
    def vowels(completions, **columns):
        return [sum(letter in "aeiou" for letter in text) / 8 for text in completions]

    settings = {key.strip("-").replace("-", "_"): value for key, value in SMALL.items()}
    rows = [{"prompt": f"{number}:"} for number in range(100)]
    run = package.train(data=rows, reward=vowels, output=tmp_path / "mine", progress=False, **settings)
    card = (run.export(tmp_path / "shared") / "README.md").read_text()
    assert re.search(r"\*\*Prompts\*\*: `100 rows, sha256 [0-9a-f]{8}`", card)
    assert "**Reward**: `vowels`" in card
    assert re.search(r"By `oblrpo.train\(...\)` in a Python program, which passed rewards and data as objects", card)
    assert "oblrpo train " not in card


@pytest.mark.parametrize(
    ("model", "data", "front"),
    [
        ("Qwen/Qwen3-0.6B", ["openai/gsm8k:main[train]"], "base_model: Qwen/Qwen3-0.6B\n.*datasets:\n- openai/gsm8k\n"),
        ("gpt2", ["owner/name.v1"], "base_model: gpt2\n.*datasets:\n- owner/name.v1\n"),
        ("models/mine", ["rows.jsonl", "./some/rows"], "^(?!.*(base_model|datasets):)"),
        ("folder/model.gguf", ["some/rows.jsonl"], "^(?!.*(base_model|datasets):)"),
    ],
)
def test_only_what_the_hub_has_is_named_to_it(run, tmp_path, model, data, front):
    config = run / "config.yaml"
    text = config.read_text().replace("model: ''\n", f"model: {model}\n")
    config.write_text(text.replace("data: []\neval_data", f"data: {json.dumps(data)}\neval_data"))
    card = (export(run, tmp_path / "shared") / "README.md").read_text()
    assert re.search(front, card.split("---")[1], re.DOTALL)
    assert "**Reward**: `numeric`" in card


def test_what_was_put_around_prompts_cannot_break_the_card(run, tmp_path):
    """Line breaks, headings and fences of somebody's system prompt stand in a block of the settings."""
    config = run / "config.yaml"
    said = json.dumps("Be brief.\n\n# No heading\n```\nnor a fence")
    config.write_text(config.read_text().replace("system_prompt: ''\n", f"system_prompt: {said}\n"))
    card = (export(run, tmp_path / "shared") / "README.md").read_text()
    outside = re.sub(r"^(`{3,})\w*\n.*?^\1$", "", card, flags=re.DOTALL | re.MULTILINE)
    assert "**Prompt format**: a system prompt, as in the settings below" in outside
    assert "No heading" in card
    assert "No heading" not in outside
    assert "```" not in outside


def test_a_disk_that_is_full_leaves_nothing(run, oblrpo, tmp_path, monkeypatch):
    def full(source, target):
        target.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(source), None, str(target))

    with monkeypatch.context() as patched:
        patched.setattr("oblrpo.report.export.shutil.copyfile", full)
        code, _, err = oblrpo("export", run, "--output", tmp_path / "shared")
    assert code == 2
    assert err == f"oblrpo: cannot export {run} to {tmp_path / 'shared'}: No space left on device.\n"
    assert list(tmp_path.iterdir()) == [run]


def test_two_at_once_write_one_folder_and_touch_nothing_else(run, tmp_path, monkeypatch):
    ours, theirs = tmp_path / "shared", {".shared.partial": "mine", ".shared.lock": "mine, too"}
    for name, text in theirs.items():
        (tmp_path / name).write_text(text)
    refused = []

    def meanwhile(folder):
        sync_folder(folder)
        with pytest.raises(InputError, match="another process is writing") as error:
            export(run, ours)
        refused.append(error)

    monkeypatch.setattr("oblrpo.report.export.sync_folder", meanwhile)
    assert (export(run, ours) / "model.safetensors").is_file()
    assert len(refused) == 1
    assert all((tmp_path / name).read_text() == text for name, text in theirs.items())
    assert {path.name for path in tmp_path.iterdir()} == {"run", "shared", *theirs}


def test_what_another_has_put_there_meanwhile_stays(run, tmp_path, monkeypatch):
    ours = tmp_path / "shared"

    def meanwhile(folder):
        ours.mkdir()
        (ours / "mine").touch()

    monkeypatch.setattr("oblrpo.report.export.sync_folder", meanwhile)
    with pytest.raises(InputError, match=r"cannot export .*shared: "):
        export(run, ours)
    assert [file.name for file in ours.iterdir()] == ["mine"]
    assert {path.name for path in tmp_path.iterdir()} == {"run", "shared"}


def goes_on(run):
    """Write the next checkpoint of a run that keeps one."""
    folder = RunFolder(run)
    last = folder.checkpoint_steps()[-1]

    def save(partial):
        shutil.copytree(folder.checkpoint(last), partial, ignore=shutil.ignore_patterns("oblrpo_state*", SUMS))

    folder.save_checkpoint(last + 1, save, {"run": folder.identity().run, "step": last + 1}, keep=1)


@pytest.mark.parametrize(
    ("step", "times", "ends"),
    [
        (None, 1, "after step 5 of 4"),
        (None, 100, "has removed 5 checkpoints while they were being copied; raise its save_total_limit"),
        (4, 1, "has no checkpoint of step 4; there are: 5"),
    ],
)
def test_a_run_that_removes_what_is_copied(run, tmp_path, monkeypatch, step, times, ends):
    """The next checkpoint is taken, whole, as often as that is worth it; one that was asked for is gone."""
    calls = iter(range(1000))

    def copyfile(source, target, **more):
        if source.name == "model.safetensors" and str(run) not in str(target) and next(calls) < times:
            goes_on(run)
        real(source, target, **more)

    real = shutil.copyfile
    monkeypatch.setattr("oblrpo.report.export.shutil.copyfile", copyfile)
    if ends.startswith("after"):
        folder = export(run, tmp_path / "shared", step)
        assert ends in (folder / "README.md").read_text()
        assert {file.name for file in folder.iterdir()} == FILES
    else:
        with pytest.raises(InputError, match=ends):
            export(run, tmp_path / "shared", step)
        assert list(tmp_path.iterdir()) == [run]


def test_a_copy_that_is_not_what_the_run_wrote(run, tmp_path, monkeypatch):
    """The checkpoint was whole when it was looked at."""

    def copyfile(source, target):
        target.write_bytes(source.read_bytes()[:-1] if source.name == "model.safetensors" else source.read_bytes())

    monkeypatch.setattr("oblrpo.report.export.shutil.copyfile", copyfile)
    with pytest.raises(InputError, match=r"model.safetensors is not what was written"):
        export(run, tmp_path / "shared")
    assert list(tmp_path.iterdir()) == [run]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--step", "9"], "has no checkpoint of step 9; there are: 0, 1, 2, 3, 4"),
        (["--merge"], "holds a whole model, and no adapters to merge"),
        (["--output", "there"], "there already exists"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(run, oblrpo, tmp_path, monkeypatch, flags, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    code, _, err = oblrpo("export", run, *flags)
    assert code == 2
    assert words in " ".join(err.split())
    assert not (run / "export").exists()


def test_a_damaged_checkpoint_is_refused(run, oblrpo):
    weights = run / "checkpoints" / "step_4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    code, _, err = oblrpo("export", run)
    assert code == 2
    assert "is damaged" in err
    assert oblrpo("export", run, "--step", 3)[0] == 0
