"""`import oblrpo` is instant, and what it exports is there when it is used."""

import ast
import inspect
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import oblrpo
from lab.keywords import written
from oblrpo import api
from oblrpo.cli import train
from oblrpo.settings import RewardsConfig, SamplingConfig, TrainConfig, flatten, keywords

EXPORTS = {
    "train",
    "evaluate",
    "load",
    "Run",
    "ScoreTape",
    "SNRSchedule",
    "baseline",
    "BASELINES",
    "ledger",
    "InputError",
    "diagnose",
}


def test_the_import_loads_nothing_that_takes_time():
    """What would take seconds is a library; none is loaded, whatever this machine is busy with."""
    code = "import sys; before = set(sys.modules); import oblrpo; print(*set(sys.modules) - before)"
    bare = [sys.executable, "-E", "-c", code]  # -E: nothing that other tests put on PYTHONPATH
    out = subprocess.run(bare, capture_output=True, text=True, check=True).stdout.split()
    assert {name.split(".")[0] for name in out} - sys.stdlib_module_names == {"oblrpo"}


def test_the_door_itself_needs_no_torch_before_it_trains():
    code = "import sys, oblrpo; oblrpo.train, oblrpo.evaluate, oblrpo.InputError; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


REFUSED = """\
train --temperature -1
train --prompts-per-step 0
train --lr-scheduler-type x
train --algorithm nope
train --schedule kl --learning-rate 0
train --task nope
train --rewards nope
train --rewards regex:( --data mine.yaml
train --dtype bfloat16
train --report-to nope
train --sampler-correction nope
train --model models/nope
train --output taken
train mine.yaml
evaluate nope
evaluate ./nope --data mine.yaml
evaluate mine.yaml --temperature -1 --data mine.yaml
"""


def test_what_is_refused_needs_no_torch(tmp_path):
    (tmp_path / "mine.yaml").write_text("num_iterations: 0")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "config.yaml").touch()
    code = (
        "import sys\nfrom oblrpo.cli import dispatch\nfrom oblrpo.errors import InputError\n"
        f"for line in {REFUSED!r}.splitlines():\n    try:\n        dispatch(line.split())\n"
        "    except InputError:\n        assert 'torch' not in sys.modules, line\n"
        "    else:\n        raise SystemExit(line)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)


def test_help_has_the_flags_of_the_readme_and_no_rate(capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text().replace("\\\n", "")
    commands = [line for line in readme.splitlines() if line.startswith("oblrpo train")]
    assert commands
    train.run(["--help"])
    told = capsys.readouterr().out
    for flag in re.findall(r"--[a-z-]+", " ".join(commands)):
        assert re.search(rf"^  {flag.replace('--', '--(.no-.)?')} ", told, re.MULTILINE), flag
    assert "--learning-rate" not in told


def test_every_export_is_there_and_listed():
    nodes = ast.walk(ast.parse(Path(oblrpo.__file__).read_text()))
    named = [alias for each in nodes if isinstance(each, ast.ImportFrom) for alias in each.names if alias.asname]
    assert {alias.name for alias in named} == {alias.asname for alias in named} == EXPORTS  # for type checkers
    assert set(dir(oblrpo)) >= EXPORTS
    for name in EXPORTS:
        assert getattr(oblrpo, name) is not None
    assert oblrpo.train is api.train
    with pytest.raises(AttributeError, match="has no attribute 'trian'"):
        _ = oblrpo.trian


def test_functions_are_no_modules_even_after_everything_is_loaded():
    """A subpackage of an export's name would take its place."""
    folder = Path(oblrpo.__file__).parent
    assert not {path.stem for path in folder.iterdir()} & EXPORTS


def test_help_is_one_screen_that_names_every_export():
    text = pydoc.plain(pydoc.render_doc(oblrpo))
    described = text[: text.index("PACKAGE CONTENTS")]
    assert len(described.splitlines()) <= 30
    for name in EXPORTS:
        assert re.search(rf"\b{name}\b", described.split("To train")[1]), name
    assert len(text.splitlines()) < 100


def test_the_keywords_are_those_of_the_config():
    assert Path(keywords.__file__).read_text() == written()
    fields = [each for each in ast.walk(ast.parse(written())) if isinstance(each, ast.AnnAssign)]
    flat = set(flatten(TrainConfig())) | {*vars(SamplingConfig()), *vars(RewardsConfig())}
    assert {each.target.id for each in fields} == flat - {
        "recipe",
        "model",
        "data",
        "eval_data",
        "sft_data",
        "environment",
        "tools",
    }


def test_help_shows_every_setting_with_its_default():
    parameters = inspect.signature(oblrpo.train).parameters
    flat = flatten(TrainConfig())
    assert set(flat) <= set(parameters)
    assert parameters["steps"].default == 100
    assert parameters["sampler"].default == "transformers"
    assert "learning_rate: float = 1e-06" in pydoc.render_doc(oblrpo.train, renderer=pydoc.plaintext)
    assert inspect.signature(oblrpo.evaluate).parameters["threshold"].default == 1.0
