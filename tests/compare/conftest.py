"""Comparisons of very small policies, and folders that look as if they had been run."""

import os
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path

import pytest

from oblrpo.compare.plan import Plan
from oblrpo.compare.spec import read_spec
from oblrpo.runs.rows import NEEDED
from oblrpo.settings import yaml_text
from tests.cli.conftest import DENSE_REWARD, SMALL, dense_reward, oblrpo

__all__ = ["dense_reward", "oblrpo"]

BASE = {key[2:].replace("-", "_"): value for key, value in SMALL.items()} | {
    "warm_start_steps": 3, "warm_start_args": {"batch": 4}, "ledger_steps": 2, "save_steps": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def dense_trainings(tmp_path_factory):
    """Let training processes use `DENSE_REWARD`: the process they are forked from starts from nothing."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(DENSE_REWARD)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [before])])
    forkserver._forkserver._stop()  # one that another test has started
    yield
    forkserver._forkserver._stop()
    os.environ.pop("PYTHONPATH")
    if before is not None:
        os.environ["PYTHONPATH"] = before


@pytest.fixture
def write_spec(tmp_path):
    """Write a spec over the small base, and return its path."""

    def write(base=(), **keys):
        path = tmp_path / "spec.yaml"
        path.write_text(yaml_text({"base": BASE | dict(base)} | keys))
        return path

    return write


def launch(spec, output, *flags):
    """`oblrpo compare` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", "from oblrpo.cli import main; main()", "compare", str(spec), "--output", str(output),
         *map(str, flags)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


def plan_of(spec, output):
    """The plan of a spec's file."""
    return Plan(read_spec(str(spec), {}, {}), Path(output))


def pretend(run, accuracies, every=1, reward=lambda step: 0.01 * step, **more):
    """Leave what a run would have left: held-out accuracy every so many steps, reward and further metrics each step."""
    run.folder.create(run.config)
    for step in range(run.config.run.steps + 1 if len(accuracies) > 1 else 1):
        row = {"step": step}
        if step:
            row |= dict.fromkeys(NEEDED, 0.1) | {"reward": reward(step), "step_time": 0.5} | more
        if step % every == 0 and step // every < len(accuracies):
            row |= {"eval/accuracy": accuracies[step // every], "eval/accuracy_stderr": 0.01}
        run.folder.write_metrics(row)
