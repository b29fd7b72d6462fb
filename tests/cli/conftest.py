"""The command line as a user meets it, in this process."""

import json
import sys

import pytest
from transformers.utils import logging as transformers_logging

from oblrpo import cli

SMALL = {
    "--hidden-size": 16, "--num-hidden-layers": 1, "--num-attention-heads": 2, "--prompts-per-step": 4,
    "--num-generations": 3, "--max-completion-length": 6, "--steps": 4, "--eval-prompts": 5, "--eval-samples": 2,
    "--eval-steps": 2, "--threads": 1, "--device": "cpu",
}  # fmt: skip


@pytest.fixture
def oblrpo(monkeypatch, capsys):
    """Call with arguments; returns (exit code, stdout, stderr)."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["oblrpo", *map(str, arguments)])
        try:
            cli.main()
            code = 0
        except SystemExit as stop:
            code = stop.code or 0
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    yield call
    transformers_logging.enable_progress_bar()


@pytest.fixture
def small_run(oblrpo, tmp_path):
    """Train a very small policy; keywords replace or add flags. Returns (code, stdout, stderr)."""

    def call(*arguments, output=tmp_path / "run", **settings):
        flags = SMALL | {f"--{key.replace('_', '-')}": value for key, value in settings.items()}
        return oblrpo("train", *arguments, *[x for pair in flags.items() for x in pair], "--output", output)

    return call


def metrics_of(run):
    """Rows of metrics.jsonl without the time, which is all that two runs of one seed may differ in."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "step_time"} for row in rows]
