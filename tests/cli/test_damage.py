"""A run whose files were damaged on the disk never goes on as another run."""

import shutil

import pytest

from oblrpo.checksums import SUMS, damage
from tests.cli.conftest import complained, metrics_of, weights_of

pytestmark = pytest.mark.usefixtures("no_page")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def run(whole, small_run, dense_reward, tmp_path):
    """A run of four steps with a checkpoint of each, copied from one that is made once."""
    if not whole.exists():
        code, _, err = small_run(output=whole)
        assert code == 0, err
    shutil.copytree(whole, tmp_path / "run", dirs_exist_ok=True)
    config = tmp_path / "run" / "config.yaml"
    assert config.read_text().startswith("# SHA-256 of the settings below: ")
    return tmp_path / "run"


def flip(path, place):
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


def zero_half(path, _):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


@pytest.mark.parametrize("file", ["model.safetensors", "oblrpo_state.safetensors", "oblrpo_state.json", "config.json"])
@pytest.mark.parametrize(("harm", "place"), [(flip, 0.5), (flip, 0.99), (zero_half, 0), (lambda p, _: p.unlink(), 0)])
def test_the_checkpoint_before_a_damaged_one_is_resumed_from(run, whole, oblrpo, file, harm, place):
    newest = sorted((run / "checkpoints").iterdir())[-1]
    assert newest.name == "step_4"
    harm(newest / file, place)
    assert damage(newest).startswith(file)
    code, out, err = oblrpo("train", "--resume", "--output", run)
    assert code == 0, err
    assert "resuming after step 3" in out
    assert f"the checkpoint of step 4 is damaged ({file} is" in " ".join((out + err).split())
    assert metrics_of(run) == metrics_of(whole)
    assert weights_of(run, 4) == weights_of(whole, 4)
    assert (run / "checkpoints" / "damaged_step_4" / SUMS).is_file()


def test_checksums_that_are_damaged_themselves(run, oblrpo):
    for step, text in ((4, "nonsense"), (3, ""), (2, "00  ../config.yaml\n"), (1, "00  config.json\n")):
        (run / "checkpoints" / f"step_{step}" / SUMS).write_text(text)
    (run / "checkpoints" / "step_0" / SUMS).unlink(missing_ok=True)
    complained(oblrpo("train", "--resume", "--output", run), "every checkpoint in")
    (run / "checkpoints" / "step_0" / SUMS).write_bytes(b"\xff\xfe")
    complained(oblrpo("train", "--resume", "--output", run), f"step_0: {SUMS} is missing or cannot be read")


@pytest.mark.parametrize("harm", ["", "\n\n", "cut", "another"])
def test_settings_that_are_not_what_the_run_wrote_are_refused(run, oblrpo, harm):
    config = run / "config.yaml"
    text = config.read_text()
    config.write_text({"cut": text[: len(text) // 2], "another": text.replace("seed: 0", "seed: 1")}.get(harm, harm))
    assert config.read_text() != text
    complained(oblrpo("train", "--resume", "--output", run, "--steps", 6), "config.yaml")
    config.write_text(text)
    assert oblrpo("train", "--resume", "--output", run)[0] == 0


ROTTEN = [b"\xff\xfe", b"null", b'{"reward": 1}', b'{"step": "3"}', b'{"step": true}', b"[" * 100_000, b'[["step", 1]]']


def test_rotten_lines_are_set_aside_and_counted(run, whole, oblrpo):
    metrics = run / "metrics.jsonl"
    shutil.rmtree(run / "checkpoints" / "step_4")
    metrics.write_bytes(b"\n".join(ROTTEN) + b"\n" + metrics.read_bytes())
    code, out, err = oblrpo("train", "--resume", "--output", run)
    assert code == 0, err
    assert f"{len(ROTTEN)} lines of {metrics} are damaged" in " ".join((out + err).split())
    assert metrics_of(run) == metrics_of(whole)
    assert (run / "metrics.damaged").read_bytes().split(b"\n")[:-1] == ROTTEN


@pytest.mark.parametrize("lost", [5, 2])
def test_history_that_is_gone_is_told(run, oblrpo, lost):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[lost:]))
    code, out, err = oblrpo("train", "--resume", "--output", run)
    assert code == 0, err
    assert f"has nothing of {lost} of the 5 steps" in " ".join((out + err).split())


def test_a_start_that_was_killed_before_its_settings_were_written(small_run, oblrpo, whole, run, tmp_path):
    began = tmp_path / "began"
    (began / "checkpoints").mkdir(parents=True)
    (began / "completions").mkdir()
    (began / ".config.yaml.partial").write_text("ste")
    complained(oblrpo("train", "--resume", "--output", began), "leave out --resume to start one")
    assert small_run(output=began)[0] == 0
    assert metrics_of(began) == metrics_of(whole)


@pytest.mark.parametrize("name", ["step_\u00b2", "step_007", "step_", "step_1e3", "step_-1"])
def test_folders_that_are_no_checkpoints_are_left_alone(run, oblrpo, name):
    (run / "checkpoints" / name).mkdir()
    assert oblrpo("train", "--resume", "--output", run)[0] == 0
    assert (run / "checkpoints" / name).is_dir()


@pytest.mark.parametrize("place", ["metrics.jsonl", "completions", "checkpoints", "checkpoints/step_9", "failure.txt"])
def test_what_stands_in_the_wrong_place_is_named(run, oblrpo, place):
    if (run / place).is_file():
        (run / place).unlink()
        (run / place).mkdir()
    elif place == "failure.txt":
        (run / place).mkdir()
    else:
        shutil.rmtree(run / place, ignore_errors=True)
        (run / place).write_text("a file")
    result = oblrpo("train", "--resume", "--output", run)
    complained(result, str(run / place), "move it away")


def test_folders_that_are_gone_are_made_again(run, oblrpo):
    shutil.rmtree(run / "completions")
    (run / "checkpoints" / ".step_5.partial").write_text("a file")
    assert oblrpo("train", "--resume", "--output", run, "--steps", 5)[0] == 0
    assert (run / "completions" / "step_5.jsonl").is_file()
