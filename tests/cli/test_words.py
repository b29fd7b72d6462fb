"""What people type: one sentence that says what to type instead, and exit code 2."""

import pytest

from oblrpo.cli.diagnose import DiagnoseCommand
from oblrpo.cli.evaluate import EvaluateCommand
from oblrpo.cli.flags import parse
from oblrpo.cli.train import _parse
from oblrpo.errors import InputError
from oblrpo.settings import TrainConfig, flatten
from tests.cli.conftest import complained


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
        (["--task", "addition", "--algorithm", "grpo"], {"task": "addition", "algorithm": "grpo"}),  # sections, too
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


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output"], "--output has no value; write it behind the flag, as in `--output VALUE`"),
        (["--output", "--steps", "3"], "--output has no value"),
        (["--output", "-x"], "--output has no value.* or `--output=VALUE` where it begins with a dash."),
        (["--data", "a.jsonl", "\u2013output", "x"], "It begins with a typographic dash; type --output."),
        (["--zzz", "1", "demo"], "unknown argument '--zzz'; see `oblrpo train --help-all`.$"),
        (["--steps", "1e3"], "--steps is '1e3', but it must be a whole number."),
        (["--learning_rate", "1/2"], "--learning_rate is '1/2', but it must be a number."),
        (["--chat=maybe"], "--chat is 'maybe', but it must be true or false."),
        (["--sampler", "vlm"], "--sampler is 'vlm'; choose one of: transformers, vllm."),
        (["--lora", "16"], "--lora 16 must hold settings as YAML has them: `key: value`, or {key: value} on one line."),
        (["--task-args", "{a"], "--task-args {a is not valid YAML"),
        (["\u2013output", "x"], "'\u2013output'.*It begins with a typographic dash; type --output."),
        (["-\u2013output", "x"], "It begins with a typographic dash; type --output."),
        (["-output", "x"], "It is --output here."),
        (["--Model", "x"], "It is --model here."),
        (["--recpie", "x"], "Did you mean '--recipe'?"),
        (["demo", "\r"], "a line of a script ends in a space, or as lines of Windows do"),
        (["demo", "extra"], "unknown argument 'extra'; see .* takes one .RECIPE|FILE."),
        (["demo", "rows.csv"], "A data set is given with --data rows.csv."),
        (["steps=3"], "unknown argument 'steps=3'.* It is --steps here."),
        (["+a.b=3"], "Settings are written --name VALUE."),
        (["--config", "x.yaml"], "a run's settings stand in a YAML file that comes first"),
    ],
)
def test_what_is_not_understood(words, said):
    with pytest.raises(InputError, match=said.replace("?", r"\?").replace("|", r"\|")):
        settings(*words)


def test_a_command_of_another_trainer_is_answered_word_for_word(oblrpo):
    words = "algorithm.adv_estimator=grpo data.train_batch_size=64 +data.new=1 actor_rollout_ref.rollout.n=8"
    code, _, err = oblrpo("train", *words.split(), "critic.optim.lr=1e-5")
    assert code == 2
    assert err.splitlines() == [
        "oblrpo: unknown arguments; see `oblrpo train --help-all`:",
        "  algorithm.adv_estimator=grpo: It is --algorithm here.",
        "  data.train_batch_size=64: It is --prompts-per-step here, which counts prompts.",
        "  +data.new=1: Settings are written --name VALUE.",
        "  actor_rollout_ref.rollout.n=8: It is --num-generations here.",
        "  critic.optim.lr=1e-5: There is none here: a baseline stands in the place of a critic.",
    ]
    words = "--pretrain gpt2 --init_kl_coef 0.01 --steps 3 --apply_chat_template --zzz 1"
    complained(
        oblrpo("train", *words.split()), "--pretrain: It is --model here. --init_kl_coef: It is --beta here.",
        "--apply_chat_template: It is --chat here. --zzz: unknown.",
    )  # fmt: skip


def test_what_is_no_recipe(oblrpo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    for name in ("run", "model", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "run" / "config.yaml").write_text("steps: 3\n")
    (tmp_path / "model" / "config.json").write_text("{}")
    for word, said in {
        "dmeo": "no recipe or file 'dmeo'; the built-in recipes are: demo, ",
        "demo.yaml": "Did you mean 'demo'?",
        "gone.jsonl": "A data set is given with --data gone.jsonl.",
        "there.jsonl": "A data set is given with --data there.jsonl.",
        "run": "run is the folder of a run: `oblrpo train --resume --output run` resumes it, `oblrpo train run/con",
        "model": "A model is given with --model model.",
        "m.gguf": "A model is given with --model m.gguf.",
        "owner/name": "A model is given with --model, a data set with --data.",
        "empty": "A model is given with --model, a data set with --data.",
        "grpo": "An algorithm is given with --algorithm grpo.",
        "gsm8k": "A task is given with --task gsm8k.",
        "no/such.yaml": "no recipe or file 'no/such.yaml'",
        "x" * 5000: "no recipe or file",
    }.items():
        complained(oblrpo("train", word), said)
    complained(oblrpo("train", "--resume", "run"), "`oblrpo train --resume --output run` resumes it")
    complained(oblrpo("compare", "against-rlo"), "Did you mean 'against-rloo'?")


def test_help_and_version_by_every_name(oblrpo):
    usage = oblrpo()
    assert usage[0] == 0
    assert oblrpo("help") == oblrpo("-h") == oblrpo("--help") == usage
    for command in ("train", "compare", "evaluate", "diagnose", "report", "export"):
        assert oblrpo("help", command) == oblrpo(command, "--help") == oblrpo(command, "x", "-h")
        assert oblrpo(command, "-h")[1].startswith(f"usage: oblrpo {command} ")
    assert oblrpo("version") == oblrpo("-V") == oblrpo("--version")
    complained(oblrpo("help", "trian"), "unknown command 'trian'", "Did you mean 'train'?")
    complained(oblrpo("demo"), "unknown command 'demo'")


def test_every_setting_is_in_the_help_of_its_command(oblrpo):
    """One table a section, where sections have the names of settings in them."""
    out = oblrpo("diagnose", "--help")[1]
    for line in (
        "usage: oblrpo diagnose RUN|LOG [--setting VALUE ...]",
        "  --[no-]look  ",
        "  --checkpoints INT",
        "[1]",
    ):
        assert line in out
    out = " ".join(oblrpo("train", "--help-all")[1].split())
    assert "--dtype float32|bfloat16 Type of the loaded weights." in out
    assert "nothing else in it. [float32]" in out
    assert "Config(" not in out


@pytest.mark.parametrize("command", ["diagnose", "report", "export", "compare", "evaluate"])
def test_nothing_to_do(oblrpo, command):
    code, out, err = oblrpo(command)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith("oblrpo: give ")
    assert DiagnoseCommand().run == ""
