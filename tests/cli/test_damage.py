"""A run whose files were damaged on the disk never goes on as another run."""

import json
import re
import shutil

import pytest

from oblrpo.checksums import SUMS, damage, write_sums
from oblrpo.diagnosis import Facts
from oblrpo.report.console import summary
from oblrpo.runs.rows import NEEDED, kept_and_damaged
from oblrpo.trainer.loop import Monitors
from tests.cli.conftest import complained, metrics_of, weights_of


def flip(path, place):
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 1
    path.write_bytes(content)


def zero_half(path, _):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))


@pytest.mark.parametrize("file", ["model.safetensors", "oblrpo_state.tensors", "oblrpo_state.json", "config.json"])
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


@pytest.mark.parametrize("checksum", ["as it was", "blank", "removed", "removed with the identity"])
@pytest.mark.parametrize("harm", ["", "\n\n", "cut", "another"])
def test_settings_that_are_not_what_the_run_wrote_are_refused(run, oblrpo, harm, checksum):
    config = run / "config.yaml"
    text = config.read_text()
    changed = {"cut": text[: len(text) // 2], "another": text.replace("seed: 0", "seed: 1")}.get(harm, harm)
    if checksum == "blank":
        changed = re.sub("^# SHA-256.*", "#", changed)
    elif checksum != "as it was":
        changed = changed.partition("\n")[2].partition("identity:" if "identity" in checksum else "\0")[0]
    config.write_text(changed)
    assert config.read_text() != text
    complained(oblrpo("train", "--resume", "--output", run, "--steps", 6), "config.yaml")
    config.write_text(text)
    assert oblrpo("train", "--resume", "--output", run)[0] == 0


@pytest.mark.parametrize("harm", ["weights unlisted", "cut", "weights gone", "state gone", "another file", "below"])
def test_a_checkpoint_whose_checksums_do_not_cover_it_is_damaged(run, whole, oblrpo, harm):
    newest = run / "checkpoints" / "step_4"
    lines = (newest / SUMS).read_text().splitlines(keepends=True)
    lost = {"weights unlisted": "  model.", "weights gone": "  model.", "state gone": "oblrpo_state.json"}.get(
        harm, "\0"
    )
    kept = lines[:1] if harm == "cut" else [line for line in lines if lost not in line]
    (newest / SUMS).write_text("".join(kept))
    if harm.endswith("gone"):
        for file in newest.glob(f"*{lost.strip()}*"):
            file.unlink()
    elif harm == "another file":
        (newest / "adapter_config.json").write_text("{}")
    elif harm == "below":
        (newest / "additional_chat_templates").mkdir()
        (newest / "additional_chat_templates" / "x.jinja").write_text("x")
    else:
        flip(newest / "model.safetensors", 0.9)
    code, out, err = oblrpo("train", "--resume", "--output", run)
    assert code == 0, err
    assert "the checkpoint of step 4 is damaged (" in " ".join((out + err).split())
    assert metrics_of(run) == metrics_of(whole)
    assert weights_of(run, 4) == weights_of(whole, 4)


def test_what_a_user_has_put_into_a_checkpoint_is_left_alone(run, oblrpo):
    """Only what loading could read has to be listed."""
    newest = run / "checkpoints" / "step_4"
    (newest / "onnx").mkdir()
    for name in ("model-f16.gguf", "notes.json~", "onnx/config.json"):
        (newest / name).write_text("mine")
    code, out, err = oblrpo("train", "--resume", "--output", run)
    assert code == 0, err
    assert "is damaged" not in out + err
    assert (newest / "model-f16.gguf").is_file()


def test_checksums_cover_what_lies_deeper_and_pass_over_hidden_files(tmp_path):
    (tmp_path / "deeper").mkdir()
    (tmp_path / "deeper" / "file").write_text("as it was")
    write_sums(tmp_path)
    (tmp_path / ".DS_Store").write_text("of the system")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "file").write_text("of the hub")
    assert not damage(tmp_path)
    assert damage(tmp_path, ["*model*.safetensors"]) == "*model*.safetensors is missing"
    (tmp_path / "deeper" / "file").write_text("another")
    assert damage(tmp_path) == "deeper/file is not what was written"


@pytest.mark.parametrize("other", [{"seed": 1}, {"model_args": {"hidden_size": 32}}, {"optimizer": "SGD"}, "its own"])
def test_a_checkpoint_that_the_run_did_not_write_there_is_set_aside(run, whole, small_run, oblrpo, tmp_path, other):
    newest, source = run / "checkpoints" / "step_4", run / "checkpoints" / "step_2"
    if other != "its own":
        assert small_run(output=tmp_path / "other", **other)[0] == 0
        source = tmp_path / "other" / "checkpoints" / "step_4"
    shutil.rmtree(newest)
    shutil.copytree(source, newest)
    code, out, err = oblrpo("train", "--resume", "--output", run)
    assert code == 0, err
    why = "it is of step 2" if other == "its own" else "another run wrote it"
    assert f"the checkpoint of step 4 is damaged ({why}) and is now in" in " ".join((out + err).split())
    assert metrics_of(run) == metrics_of(whole)
    assert weights_of(run, 4) == weights_of(whole, 4)


def test_a_run_of_nothing_but_checkpoints_of_another_is_refused(run, small_run, oblrpo, tmp_path):
    assert small_run(output=tmp_path / "other", seed=1)[0] == 0
    shutil.rmtree(run / "checkpoints")
    shutil.copytree(tmp_path / "other" / "checkpoints", run / "checkpoints")
    complained(oblrpo("train", "--resume", "--output", run), "every checkpoint in", "step_4: another run wrote it")


ROTTEN = [
    b"\xff\xfe", b"null", b'{"reward": 1}', b'{"step": "3"}', b'{"step": true}', b"[" * 100_000, b'[["step", 1]]',
    b'{"step": 1}', b'{"step": 1, "reward": 0.5}', b'{"step": 0, "eval/accuracy": "high"}', b'{"step": -1}',
    b'{"step": 0, "eval/accuracy": 1e999}', b'{"step": 0, "eval/accuracy": NaN}', b'{"step": 0, "warnings": 7}',
    b'{"step": 0, "eval/accuracy": ' + b"9" * 400 + b"}",
]  # fmt: skip


def test_rotten_lines_are_set_aside_and_counted(run, whole, oblrpo):
    metrics = run / "metrics.jsonl"
    shutil.rmtree(run / "checkpoints" / "step_4")
    metrics.write_bytes(b"\n".join(ROTTEN) + b"\n" + metrics.read_bytes())
    code, out, err = oblrpo("train", "--resume", "--output", run)
    assert code == 0, err
    assert f"{len(ROTTEN)} lines of {metrics} are damaged" in " ".join((out + err).split())
    assert metrics_of(run) == metrics_of(whole)
    assert (run / "metrics.damaged").read_bytes().split(b"\n")[:-1] == ROTTEN


def changed_lines(lines):
    """Lines with a step, harmed in every way, and how many of them are then damaged."""
    row = json.loads(lines[2])
    yield "doubled", [line for line in lines for _ in range(2)], len(lines)
    yield "reversed", lines[::-1], len(lines) - 1
    yield "swapped", [lines[0], lines[2], lines[1], *lines[3:]], 1
    for key in NEEDED:
        yield f"no {key}", [*lines[:2], json.dumps({name: row[name] for name in row if name != key}), *lines[3:]], 1
    for value in ("text", True, [1.0], {}, float("inf")):
        yield f"reward {value!r}", [*lines[:2], json.dumps(row | {"reward": value}), *lines[3:]], 1
    yield "reward null", [*lines[:2], json.dumps(row | {"reward": None}), *lines[3:]], 1


def test_lines_that_lack_something_or_come_twice_are_set_aside_and_counted(run, oblrpo):
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines()
    for name, harmed, count in changed_lines(lines):
        metrics.write_text("".join(line + "\n" for line in harmed))
        code, out, err = oblrpo("train", "--resume", "--output", run)
        assert code == 0, (name, err)
        assert f"{count} lines of {metrics} are damaged" in " ".join((out + err).split()), name
        steps = [row["step"] for row in metrics_of(run)]
        assert steps == sorted(set(steps)), name
        assert len((run / "metrics.damaged").read_bytes().splitlines()) == count, name
        (run / "metrics.damaged").unlink()


@pytest.mark.parametrize("measured_rate", [False, True])
def test_whatever_is_kept_can_be_read_again(run, measured_rate):
    """Of every row that is not set aside, whatever it lacks or holds, monitors and summary make something."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    mismatch = {"sequence_logp_difference/mean": 2.0, "sampling_logp_difference/mean": 0.1, "truncated_ratio": 0.5}
    full = rows[4] | {f"sampling/{key}": value for key, value in mismatch.items()} | {"step_kl": 0.1, "skipped": 1.0}
    for key in full.keys() - {"step"}:
        less = {name: value for name, value in full.items() if name != key}
        for row in (less, full | {key: None}, full | {key: 0}, full | {key: "x"}, full | {key: -(10**300)}):
            kept, damaged = kept_and_damaged([json.dumps(each).encode() for each in [*rows[:4], row]], 4)
            assert len(kept) + len(damaged) == 5
            assert row is not less or bool(damaged) == (key in NEEDED)
            monitors = Monitors(Facts(measured_rate=measured_rate))
            for each in [*kept, *[each | {"step": 5} for each in kept[4:] * 12]]:
                monitors.observe(each)
            assert "everything is in" in summary(kept, "run", Facts(prompts=4))


@pytest.mark.page
def test_steps_that_lack_any_other_metric_are_kept_and_drawn(run, oblrpo):
    """As those of a version that did not log it yet, whatever the table says of it now."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    row = rows[4] | rows[1]  # which has a ledger
    others = [key for key in row if key not in {"step", *NEEDED}]
    assert len(others) > 50
    lacking = [
        {name: value for name, value in row.items() if name != key} | {"step": n} for n, key in enumerate(others, 1)
    ]
    bare = {"step": len(others) + 1} | {key: row[key] for key in NEEDED}
    rows = [rows[0], *lacking, bare]
    kept, damaged = kept_and_damaged([json.dumps(each).encode() for each in rows], len(rows))
    assert (kept, damaged) == (rows, [])
    (run / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    assert oblrpo("report", run)[0] == 0
    assert "Learning rate</b>" in (run / "report.html").read_text()


@pytest.mark.parametrize("lost", [5, 2])
def test_history_that_is_gone_is_told(run, oblrpo, lost):
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[lost:]))
    code, out, err = oblrpo("train", "--resume", "--output", run)
    assert code == 0, err
    assert f"lacks {lost} of the 5 steps" in " ".join((out + err).split())


def test_a_start_that_was_killed_before_its_settings_were_written(small_run, oblrpo, whole, run, tmp_path):
    began = tmp_path / "began"
    (began / "checkpoints").mkdir(parents=True)
    (began / "completions").mkdir()
    (began / ".config.yaml.partial").write_text("ste")
    complained(oblrpo("train", "--resume", "--output", began), "remove --resume to start one")
    assert small_run(output=began)[0] == 0
    assert metrics_of(began) == metrics_of(whole)


@pytest.mark.parametrize("name", ["step_\u00b2", "step_007", "step_", "step_1e3", "step_-1"])
def test_folders_that_are_no_checkpoints_are_left_alone(run, oblrpo, name):
    (run / "checkpoints" / name).mkdir()
    assert oblrpo("train", "--resume", "--output", run)[0] == 0
    assert (run / "checkpoints" / name).is_dir()


@pytest.mark.parametrize("place", ["metrics.jsonl", "completions", "checkpoints", "failure.txt"])
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
    complained(result, str(run / place))


def test_folders_that_are_gone_are_made_again(run, oblrpo):
    shutil.rmtree(run / "completions")
    (run / "checkpoints" / ".step_5.partial").write_text("a file")
    assert oblrpo("train", "--resume", "--output", run, "--steps", 5)[0] == 0
    assert (run / "completions" / "step_5.jsonl").is_file()
