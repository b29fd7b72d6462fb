"""What people type: one sentence that says what to type instead, and exit code 2."""

import pytest

from oblrpo.cli import COMMANDS
from oblrpo.cli.diagnose import DiagnoseCommand
from oblrpo.cli.evaluate import EvaluateCommand
from oblrpo.cli.flags import parse
from oblrpo.cli.train import _parse
from oblrpo.settings import TrainConfig, flatten


def settings(*words):
    return flatten(_parse(list(words), TrainConfig()).config)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output=x", "--chat", "true", "demo"], {"output": "x", "chat": True, "recipe": "demo"}),
        (["demo", "--bf16", "True", "--steps", "1_000"], {"bf16": True, "steps": 1000, "recipe": "demo"}),
        (["--bf16", "false", "--chat"], {"bf16": False, "chat": True}),
        (["--no-chat", "--no_bf16", "--load-in-4bit=True"], {"chat": False, "bf16": False, "load_in_4bit": True}),
        (["--max_completion_length", "5", "--learning-rate", "1e-6"], {"max_completion_length": 5}),
        (["--data", "a.jsonl", "b.jsonl", "--data", "c.jsonl"], {"data": ["a.jsonl", "b.jsonl", "c.jsonl"]}),
        (["--report_to", "none", "--save-steps", "None"], {"report_to": [], "save_steps": None}),
        (["--learning-rate", "-1", "--seed", "-3"], {"learning_rate": -1.0, "seed": -3}),
        (["--steps", "3", "--steps", "4", "--model="], {"steps": 4, "model": ""}),
        (["--recipe", "demo", "--lora", "{r: 16}"], {"recipe": "demo", "lora": {"r": 16}}),
        (["--task", "arithmetic", "--algorithm", "grpo"], {"task": "arithmetic", "algorithm": "grpo"}),  # sections, too
        (["--chat", "demo", "--no_load-in-4bit"], {"chat": True, "recipe": "demo", "load_in_4bit": False}),
        (["--system-prompt", "- be brief", "--output=-x"], {"system_prompt": "- be brief", "output": "-x"}),
    ],
)
def test_what_is_meant_is_taken(words, said):
    found = settings(*words)
    assert {name: found[name] for name in said} == said


def test_lists_of_numbers_and_the_first_word_by_its_name(tmp_path, monkeypatch):
    command = parse(EvaluateCommand(), ["--k", "1", "4", "--model", "m"], "oblrpo evaluate")
    assert (command.k, command.model) == ((1, 4), "m")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lr=0.1").mkdir()
    assert parse(DiagnoseCommand(), ["lr=0.1"], "oblrpo diagnose").run == "lr=0.1"


def test_help_and_version_by_every_name(oblrpo):
    usage = oblrpo()
    assert usage[0] == 0
    assert oblrpo("help") == oblrpo("-h") == oblrpo("--help") == usage
    for command in COMMANDS:
        assert oblrpo("help", command) == oblrpo(command, "--help") == oblrpo(command, "x", "-h")
        assert oblrpo(command, "-h")[1].startswith(f"usage: oblrpo {command} ")
    assert oblrpo("version") == oblrpo("-V") == oblrpo("--version")


def test_every_setting_is_in_the_help_of_its_command(oblrpo):
    """One table a section, where sections have the names of settings in them."""
    out = oblrpo("diagnose", "--help")[1]
    for line in (
        "usage: oblrpo diagnose RUN|LOG [--setting VALUE ...]",
        "  --[no-]look  ",
        "  --prompts INT",
    ):
        assert line in out
    out = " ".join(oblrpo("train", "--help-all")[1].split())
    assert "--dtype float32|bfloat16 Type of the loaded weights." in out
    assert "which are float32 themselves. [float32]" in out
    assert "Config(" not in out
