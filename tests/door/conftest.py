"""A small model, rows and a reward as a Python program has them, and a run of a few steps."""

import json
import re
import sys

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

import oblrpo
from oblrpo import cli
from oblrpo.policy import byte_tokenizer

SMALL = {
    "steps": 4, "prompts_per_step": 4, "num_generations": 3, "max_completion_length": 6, "eval_prompts": 5,
    "eval_samples": 2, "eval_steps": 2, "threads": 1, "learning_rate": 1e-2, "save_total_limit": 20, "progress": False,
}  # fmt: skip
ROWS = [{"prompt": f"{number} is", "answer": str(number), "level": number % 3} for number in range(60)]


def letters(completions, **columns):
    """Share of letters, which random weights have some of from the first step."""
    return [sum(map(str.isalpha, text)) / 6 for text in completions]


def loaded(seed=0, **sizes):
    """A model and its tokenizer, with random weights."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.05, **sizes,
    )  # fmt: skip
    return Qwen3ForCausalLM(config), tokenizer


def metrics_of(run):
    """Rows of metrics without the times, and what a run measures at its last step: runs of one seed differ in these."""
    own = re.compile("step_time$|time/|eval/swap_loss")
    return [{key: value for key, value in row.items() if not own.match(key)} for row in run.metrics]


def config_of(folder):
    """The lines of config.yaml that name objects in a setting."""
    settings = (folder / "config.yaml").read_text().partition("identity:")[0]
    return [line.strip(" -") for line in settings.splitlines() if "python:" in line]


def write_rows(path, rows=ROWS):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def no_page(monkeypatch):
    """Leave out the page that a run ends with: two seconds of drawing, where a test is of something else."""
    monkeypatch.setattr("oblrpo.report.page.write_report", lambda run, output=None: run / "report.html")


@pytest.fixture
def train(tmp_path, no_page):
    """Train the small model on the rows; keywords replace or add arguments."""

    def call(output=tmp_path / "run", **more):
        given = {"model": loaded(), "data": ROWS, "reward": letters} | SMALL | more
        return oblrpo.train(output=output, **{name: value for name, value in given.items() if value is not None})

    yield call
    transformers_logging.enable_progress_bar()


@pytest.fixture
def command_line(monkeypatch, capsys):
    """Call `oblrpo` with arguments; returns (exit code, stdout, stderr)."""

    def call(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["oblrpo", *map(str, arguments)])
            try:
                cli.main()
                code = 0
            except SystemExit as stop:
                code = stop.code or 0
        return code, *capsys.readouterr()

    return call
