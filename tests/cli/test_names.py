"""Names cannot leave their folder, and what the environment keeps secret is never written."""

import shutil
from importlib.util import find_spec

import pytest

from oblrpo.checksums import SUMS, damage
from oblrpo.compare.spec import read_spec
from oblrpo.errors import InputError
from oblrpo.report.html import seen
from oblrpo.runs import RunFolder
from tests.cli.conftest import complained

pytestmark = pytest.mark.usefixtures("dense_reward")

WANDERING = ["../x", "..", ".", "/etc/x", "a/b", "a\\b", "a\0b", "~x", "a\nb", "", " ", "-x", "x" * 300, "é" * 100]


@pytest.mark.parametrize("name", WANDERING)
def test_variants_stay_in_their_folder(tmp_path, name):
    (tmp_path / "spec.yaml").write_text("variants: {a: {}}")
    with pytest.raises(InputError, match="cannot name a variant"):
        read_spec(str(tmp_path / "spec.yaml"), {"variants": {name: {}}}, {})


@pytest.mark.parametrize(
    "name", ["step_../../x", "step_-1", "step_1e3", "step_٣", "step_ 1", "step_01", "step_" + "9" * 30, "step_1\n"]
)
def test_what_looks_like_a_checkpoint_is_left_alone(tmp_path, name):
    run = RunFolder(tmp_path / "run")
    run.make()
    (run.checkpoints / name).mkdir(parents=True)
    assert run.checkpoint_steps() == []
    run.clean_up()
    assert (run.checkpoints / name).is_dir()


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/../../other", "..", "."])
def test_checksums_name_files_of_their_own_folder_alone(tmp_path, name):
    (tmp_path / "other").write_text("x")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / SUMS).write_text(f"2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881  {name}\n")
    assert damage(folder)


def test_a_checkpoint_that_is_a_link_is_removed_and_not_what_it_leads_to(run, oblrpo, tmp_path):
    """Somebody has moved one to another disk; it is not the best, and there are newer ones."""
    moved = tmp_path / "elsewhere"
    shutil.move(run / "checkpoints" / "step_1", moved)
    (run / "checkpoints" / "step_1").symlink_to(moved)
    code, _, err = oblrpo("train", "--resume", "--output", run, "--steps", 5, "--save-total-limit", 1)
    assert code == 0, err
    assert not (run / "checkpoints" / "step_1").is_symlink()
    assert (moved / "model.safetensors").is_file()


WILD = "a<b>\x1b[31m\u202e\r[x](y)`*"


def test_nothing_unseen_is_printed(small_run, oblrpo, tmp_path, monkeypatch):
    """Not by what tells of a folder whose name turns the direction of writing, or does something to a terminal."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "spec.yaml").write_text("base: demo\nvariants: {a: {}, b: {baseline: rloo}}\n")
    told = [small_run(*flags, output=WILD, steps=1, eval_steps=0) for flags in (["--dry-run"], [], [])]
    told.append(oblrpo("compare", "spec.yaml", "--output", f"{WILD} too", "--only-report"))
    moved = f"{WILD}\udcff"  # a byte that is not UTF-8
    shutil.move(WILD, moved)
    told += [oblrpo(command, moved) for command in ("report", "diagnose", "export", "export", "evaluate")]
    assert [code for code, *_ in told] == [0, 0, 2, 2, 0, 0, 0, 2, 2]
    card = (tmp_path / moved / "export" / "README.md").read_text()
    assert "\n# a&lt;b&gt;\\u001b\\[31m\\u202e \\[x\\](y)\\`\\*\\udcff\n" in card
    shown = ["".join(words) for _, *words in told]
    assert not [ascii(text) for text in shown if seen(text) != text]


@pytest.mark.parametrize("name", ["a\0b", "a/\0", "\ud800", "x" * 300, "no\0where/x"])
def test_an_export_to_what_no_disk_has(run, oblrpo, tmp_path, name):
    complained(oblrpo("export", run, "--output", f"{tmp_path}/{name}"), "cannot")
    complained(oblrpo("export", f"{tmp_path}/{name}"))


def test_no_key_of_the_environment_is_written(small_run, tmp_path, monkeypatch):
    """Neither in the run, its trackers' files and its page, nor on the console."""
    monkeypatch.setenv("HOME", str(tmp_path))
    secrets = {
        name: f"sk-canary-{number:040x}"
        for number, name in enumerate(["WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY"])
    }
    for name, secret in secrets.items():
        monkeypatch.setenv(name, secret)
    (tmp_path / "reward.py").write_text(
        "def f(completions, **columns):\n    return [len(c) % 3 for c in completions]\n"
    )
    told = small_run(
        rewards=f"{tmp_path / 'reward.py'}:f", steps=2,
        **({"report_to": "tensorboard"} if find_spec("tensorboard") else {}),
    )  # fmt: skip
    assert told[0] == 0, told
    wrong = small_run(output=tmp_path / "wrong", rewards=f"{tmp_path / 'reward.py'}:g", steps=2)
    assert wrong[0] == 2
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    written = b"".join(path.read_bytes() for path in files) + "".join([*told[1:], *wrong[1:]]).encode()
    assert not [name for name, secret in secrets.items() if secret.encode() in written]
