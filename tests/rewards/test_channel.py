"""What a reward's function may do to the process it runs in: one sentence says so, and nothing is left behind."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from oblrpo.errors import InputError
from tests.rewards.conftest import RewardSet

SOURCE = """
import os, sys, subprocess, time
calls = 0
def twice(completions, **_):
    global calls
    calls += 1
    if calls == 1 and not os.fork():
        time.sleep(0.2)
        return [666.0] * len(completions)
    time.sleep(0.4)
    return [float(calls)] * len(completions)
def rubbish(completions, **_):
    for fd in range(3, 20):
        try:
            os.write(fd, b"rubbish\\n")
        except OSError:
            pass
    return [1.0] * len(completions)
def closes(completions, **_):
    os.closerange(3, 2000)
    return [1.0] * len(completions)
def long(completions, **_):
    raise ValueError("x" * 10_000_000)
def half(completions, **_):
    raise ValueError("\\ud800")
class Odd(Exception):
    def __str__(self):
        raise RuntimeError
def unsaid(completions, **_):
    raise Odd
def odd_values(completions, **_):
    return [Odd()] * len(completions)
def daemons(completions, prompts, **_):
    for env in (None, {}):
        child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"], start_new_session=True,
            env=env)
        open(prompts[0], "a").write(str(child.pid) + "\\n")
    if completions[0] == "die":
        os._exit(0)
    time.sleep(60)
"""


@pytest.fixture
def reward(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    made = []

    def make(name, seconds=20, on_error="raise"):
        made.append(RewardSet([f"{tmp_path}/mine.py:{name}"], on_error, seconds))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_a_fork_that_comes_back_is_no_answer(reward):
    rewards = reward("twice")
    assert rewards(["p"], ["a"]) == [1.0]
    assert [rewards(["p"], ["a"]) for _ in range(2)] == [[2.0], [3.0]]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rubbish", "mine.py:rubbish' failed: its process sent an invalid reply; fix it"),
        ("closes", "mine.py:closes' failed: its process ended before it answered; fix it"),
        ("long", "xxx ... (mine.py line"),
        ("half", r"raised ValueError: \ud800 (mine.py line"),
        ("unsaid", "raised Odd: a Odd that cannot be shown"),
        ("odd_values", "returned Odd()"),
    ],
)
def test_what_it_does_is_one_sentence(reward, name, words):
    with pytest.raises(InputError) as caught:
        reward(name)(["p"], ["a"])
    assert words in str(caught.value)
    assert len(str(caught.value).encode()) < 1000


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize(("how", "left"), [("hang", 0), ("die", 1)])
def test_processes_in_a_session_of_their_own_end_with_it(reward, tmp_path, how, left):
    """Of a process that dies by itself, one with an environment of its own is found no more."""
    rewards = reward("daemons", seconds=2, on_error="mask")
    assert rewards([str(tmp_path / "pids")], [how]) == [None]
    time.sleep(0.1)
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    alive = [
        pid for pid in pids if os.path.exists(f"/proc/{pid}") and " Z " not in Path(f"/proc/{pid}/stat").read_text()
    ]
    for pid in alive:
        os.kill(pid, 9)
    assert len(pids) == 2
    assert len(alive) <= left


def test_a_worker_that_the_program_never_stops_ends_with_it_in_silence():
    """Also where it is kept so long that the modules it needs are gone before it."""
    code = (
        "import sys; from oblrpo.workers import Worker\n"
        "sys.kept = Worker('oblrpo.rewards.worker:main'); sys.kept.ask({'path': 'math.sqrt'}, 60)\n"
        "print(sys.kept._process.pid)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    assert not psutil.pid_exists(int(ended.stdout))
