"""The command line as a user meets it, in this process."""

import json
import os
import subprocess
import sys

import pytest
from transformers.utils import logging as transformers_logging

from oblrpo import cli
from oblrpo.tasks import PathTask

# A policy with random weights never finds a route; this reward has signal from the first step, as real tasks do.
DENSE_REWARD = """
from oblrpo.tasks import PathTask
PathTask.reward = lambda self, problem, completion: len(completion.encode()) % 5 / 4
"""

SIZES = ("--hidden-size", "--num-hidden-layers", "--num-attention-heads")

SMALL = {
    "--hidden-size": 16, "--num-hidden-layers": 1, "--num-attention-heads": 2, "--prompts-per-step": 4,
    "--num-generations": 3, "--max-completion-length": 6, "--steps": 4, "--eval-prompts": 5, "--eval-samples": 2,
    "--eval-steps": 2, "--threads": 1, "--device": "cpu", "--learning-rate": 1e-2, "--save-total-limit": 20,
}  # fmt: skip


@pytest.fixture
def oblrpo(monkeypatch, capsys):
    """Call with arguments; returns (exit code, stdout, stderr)."""
    yield lambda *arguments: called(cli.main, arguments, monkeypatch, capsys)
    transformers_logging.enable_progress_bar()


def called(main, arguments, monkeypatch, capsys):
    """Call `main` as the command line does; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr("oblrpo.cli.interrupts.catch", lambda: None)  # Ctrl-C is pytest's
    monkeypatch.setattr(sys, "argv", ["oblrpo", *map(str, arguments)])
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def dense_reward(monkeypatch):
    """`DENSE_REWARD` in this process."""
    monkeypatch.setattr(PathTask, "reward", PathTask.reward)  # put back afterwards
    exec(DENSE_REWARD, {})


def start(output, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, before="", **settings):
    """The small run with `DENSE_REWARD`, and the code `before`, in a process of its own."""
    flags = [str(x) for pair in (SMALL | settings).items() for x in pair]
    code = DENSE_REWARD + before + "from oblrpo.cli import main; main()"
    return subprocess.Popen(
        [sys.executable, "-c", code, "train", *flags, "--output", str(output)],
        stdout=stdout, stderr=stderr, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


@pytest.fixture
def no_page(monkeypatch):
    """Leave out the page that a run ends with: two seconds of drawing, where a test is of something else."""
    monkeypatch.setattr("oblrpo.report.page.write_report", lambda run, output=None: run)


@pytest.fixture
def small_run(oblrpo, tmp_path):
    """Train a very small policy, or `model`; keywords replace or add flags. Returns (code, stdout, stderr)."""

    def call(*arguments, output=tmp_path / "run", **settings):
        small = {key: value for key, value in SMALL.items() if key not in SIZES or "model" not in settings}
        flags = small | {f"--{key.replace('_', '-')}": value for key, value in settings.items()}
        return oblrpo("train", *arguments, *[x for pair in flags.items() for x in pair], "--output", output)

    return call


def weights_of(run, step):
    """The bytes of a checkpoint's weights."""
    return (run / "checkpoints" / f"step_{step}" / "model.safetensors").read_bytes()


def metrics_of(run):
    """Rows of metrics.jsonl without the time, which is all that two runs of one seed may differ in."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "step_time"} for row in rows]


def complained(result, *words):
    """Exit code 2, no traceback, and these words in the message."""
    code, _, err = result
    assert code == 2, err
    assert "Traceback" not in err
    flat = " ".join(err.replace("│", " ").split())
    for word in words:
        assert word in flat, flat
