"""A run killed at one of its file operations, then resumed, has the metrics and weights of one that was never killed.

`OBLRPO_KILLS` says how many points are tried, evenly spread; with `all`, as `make attack` has it, every one; with `2/5`
the second of every five.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.cli.conftest import DENSE_REWARD, NO_PAGE, SMALL, metrics_of, weights_of

STEPS = 4

# One interpreter loads everything, and forks a child for every run. An audit hook sees what opens, renames and removes.
DRIVER = """
import json, os, sys
import oblrpo.trainer.loop
from oblrpo.cli import main
import oblrpo.cli.train
folder, wanted, *flags = sys.argv[1:]
watched, seen, kill_at = None, 0, 0
def tick():
    global seen
    seen += 1
    if seen == kill_at:
        os.kill(os.getpid(), 9)
def hook(event, arguments):
    if watched and event in {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}:
        if event != "open" or not str(arguments[1]).startswith("r"):
            if watched in str(arguments[0]) or isinstance(arguments[0], int):
                tick()
sys.addaudithook(hook)
sync = os.fsync
def fsync(descriptor):
    sync(descriptor)
    if watched:
        tick()
os.fsync = fsync
def run(output, kill, *further):
    global watched, kill_at
    reading, writing = os.pipe()
    if not (child := os.fork()):
        watched, kill_at = output, kill
        os.dup2(os.open(output + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
        os.dup2(1, 2)
        sys.argv = ["oblrpo", "train", *flags, "--output", output, *further]
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        os.write(writing, str(seen).encode())
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    os.close(writing)
    count = os.read(reading, 20)
    os.close(reading)
    return status, int(count or 0)
status, total = run(folder + "/whole", 0)
assert status == 0
if "/" in wanted:
    first, every = map(int, wanted.split("/"))
else:
    first, every = 1, 1 if wanted == "all" else max(1, total // int(wanted))
points = range(first, total + 1, every)
results = []
for point in points:
    output = f"{folder}/k{point}"
    killed = run(output, point)[0]
    begun = os.path.isfile(output + "/config.yaml")
    results.append([point, killed, run(output, 0, *(["--resume"] if begun else []))[0]])
print(json.dumps([total, results]))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="runs are forks")
def test_a_run_goes_on_from_wherever_it_was_killed(tmp_path):
    flags = [
        str(x)
        for pair in (SMALL | {"--steps": STEPS, "--eval-steps": 0, "--save-total-limit": 2}).items()
        for x in pair
    ]
    wanted = os.environ.get("OBLRPO_KILLS", "3")
    done = subprocess.run(
        [sys.executable, "-c", DENSE_REWARD + NO_PAGE + DRIVER, str(tmp_path), wanted, *flags],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    total, results = json.loads(done.stdout.splitlines()[-1])
    assert total > 100
    whole = tmp_path / "whole"
    for point, killed, resumed in results:
        run = tmp_path / f"k{point}"
        assert (point, killed) == (point, 9)
        assert (point, resumed) == (point, 0), (tmp_path / f"k{point}.log").read_text()[-2000:]
        assert metrics_of(run) == metrics_of(whole), point
        assert weights_of(run, STEPS) == weights_of(whole, STEPS), point
    print(f"{len(results)} of {total} kill points")
