"""Two processes never write one output; one that dies, however, does not keep others from it."""

import subprocess
import sys

import pytest

from oblrpo.errors import InputError
from oblrpo.evaluation.sampled import SavedCompletions, collect
from oblrpo.rollout import make_sampler
from oblrpo.runs import locked
from oblrpo.settings import SamplingConfig
from oblrpo.tasks import Problem
from tests.cli.conftest import complained, metrics_of

HOLD = "import sys, time; from pathlib import Path; from oblrpo.runs import locked\n"
HOLD += "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"


@pytest.fixture
def elsewhere():
    """Hold a folder or file in another process, which is then returned."""
    processes = []

    def hold(path):
        process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], stdout=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield hold
    for process in processes:
        process.kill()
        process.communicate()


def test_one_at_a_time(tmp_path):
    for path in (tmp_path, tmp_path / "file"):
        with locked(path), pytest.raises(InputError, match="another process is writing"), locked(path):
            pass
        with locked(path):
            pass


def test_a_run_that_another_process_writes_is_left_alone(run, oblrpo, elsewhere):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.is_file()}
    other = elsewhere(run)
    complained(oblrpo("train", "--resume", "--output", run, "--steps", 5), "another process is writing", str(run))
    assert {path: path.stat().st_mtime_ns for path in before} == before
    complained(oblrpo("train", "--task", "arithmetic", "--output", run), "another process is writing", str(run))
    other.kill()
    other.wait()
    complained(oblrpo("train", "--task", "arithmetic", "--output", run), f"{run} already exists; add --resume")
    assert oblrpo("train", "--resume", "--output", run, "--steps", 5)[0] == 0
    assert [row["step"] for row in metrics_of(run)] == [0, 1, 2, 3, 4, 5]


def test_a_comparison_that_another_process_makes_is_left_alone(oblrpo, elsewhere, tmp_path, monkeypatch):
    monkeypatch.setattr("oblrpo.compare.training.check", lambda plan: None)  # which loads libraries in a process
    out = tmp_path / "out"
    out.mkdir()
    elsewhere(out)
    result = oblrpo("compare", "against-rloo", "--output", out, "--set", "{steps: 1, warm_start_steps: 0}")
    complained(result, "another process is writing", str(out))
    assert not (out / "runs").exists()


def test_an_evaluation_that_another_process_draws_is_left_alone(elsewhere, tmp_path, tiny_policy):
    problems = [Problem("1 + 1", "2")]
    asked = SamplingConfig(max_completion_length=2, problems_per_batch=1)
    saved = SavedCompletions(tmp_path, "mine")
    sampler = make_sampler(tiny_policy, asked)
    given = tiny_policy, lambda: sampler, problems, asked, saved
    collect(*given)
    assert len(saved.rows()) == 1
    elsewhere(tmp_path / "mine.jsonl")
    elsewhere(tmp_path / "others.jsonl")
    with pytest.raises(InputError, match="another process is writing"):
        collect(*given)
