"""Ctrl-C at any moment, once or twice 20 ms apart: one sentence, exit code 130, at most the step in progress lost."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.conftest import metrics_of, start

pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals")

ENDED = {130, -signal.SIGINT}
"""A second one may come when Python has put its own answer back: the shell then says 130 as well."""

# Says when a place is reached, on standard output, and stays there long enough to be interrupted.
STAY = """
import sys, time
def stays(place, call):
    def staying(*arguments, **named):
        print("at", place, flush=True)
        time.sleep(0.3)
        return call(*arguments, **named)
    return staying
import oblrpo.trainer.loop as loop, oblrpo.runs.folder as folder, oblrpo.step.step as step
"""
PLACES = {
    "model": "loop.policy_of = stays('model', loop.policy_of)\n",
    "warm": "loop.Trainer._warm_start = stays('warm', loop.Trainer._warm_start)\n",
    "step": "step.Learner.step = stays('step', step.Learner.step)\n",
    "save": "folder.write_sums = stays('save', folder.write_sums)\n",
}


def interrupted(process, place, times):
    """Interrupt a process when it is at a place; returns what it said to standard error."""
    for line in process.stdout:
        if line == f"at {place}\n":
            break
    for _ in range(times):
        process.send_signal(signal.SIGINT)
        time.sleep(0.02)
    _, err = process.communicate()
    assert process.returncode in ENDED, err
    assert "Traceback" not in err
    assert err.count("oblrpo: ") == 1, err
    return err.replace("stopping after this step; press Ctrl-C again to stop immediately\n", "").strip()


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_says_so_and_goes_on(place, times, tmp_path, oblrpo):
    run = tmp_path / "run"
    said = interrupted(start(run, STAY + PLACES[place], **{"--warm-start-steps": 2}), place, times)
    if place == "model":
        assert said == "oblrpo: interrupted."
        assert not run.exists()
        return
    if times == 1:
        at = {"warm": "in the warm start", "step": "after step 1", "save": "after step 0"}
        command = f"oblrpo train --resume --output {run} (from Python resume=True)."
        assert said == f"oblrpo: stopped {at[place]}; continue with: {command}"
    code, _, err = oblrpo("train", "--resume", "--output", run)
    assert code == 0, err
    assert [row["step"] for row in metrics_of(run)] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(
    "swallowed", ["", "try:\n    {0}\nexcept BaseException: raise ImportError('no part') from None"]
)
def test_while_libraries_load(swallowed, times, tmp_path):
    wait = "print('at import', flush=True); import time; time.sleep(60)"
    (tmp_path / "torch.py").write_text(swallowed.format(wait) or wait)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from oblrpo.cli import main; main()"
    command = [sys.executable, "-c", code, "train", "demo", "--output", str(tmp_path / "run")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert interrupted(process, "import", times) == "oblrpo: interrupted."


@pytest.mark.skipif(sys.platform != "linux", reason="a server of forks")
@pytest.mark.parametrize(("after", "times"), [(0, 1), (0, 2), (0.3, 1)])
def test_while_a_comparison_starts(after, times, tmp_path):
    """It reaches the process that trainings are forked from, too, and what it was asked to fork is not there then."""
    (tmp_path / "torch.py").write_text("import time; time.sleep(0.6); raise ImportError('it has loaded')")
    (tmp_path / "spec.yaml").write_text("base: demo\nvariants: {a: {}, b: {baseline: rloo}}\n")
    code = (
        "import time; from multiprocessing.forkserver import ForkServer; from oblrpo.cli import main\n"
        "run = ForkServer.ensure_running\n"
        f"def staying(self): run(self); time.sleep({after}); print('at start', flush=True)\n"
        "ForkServer.ensure_running = staying; main()"
    )
    command = [sys.executable, "-c", code, "compare", str(tmp_path / "spec.yaml"), "--output", str(tmp_path / "runs")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )  # fmt: skip
    process.send_signal = lambda number: os.killpg(process.pid, number)
    said = interrupted(process, "start", times)
    assert times == 2 or said == "oblrpo: stopped with 0 of 6 runs finished; run the same command to continue."


@pytest.mark.parametrize(
    "work",
    [
        "wait()",
        "exec('try: wait()\\nexcept KeyboardInterrupt: raise ValueError(1) from None')",  # a library's
        "not Swallows()",  # Python cannot raise it there
    ],
)
@pytest.mark.parametrize("times", [1, 2])
def test_while_it_works(work, times):
    code = (
        "import time; from oblrpo import cli\n"
        "def wait(): print('at work', flush=True); time.sleep(60)\n"
        "class Swallows:\n    def __del__(self): wait()\n"
        f"cli.dispatch = lambda argv: ({work}, time.sleep(60))\ncli.main()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert interrupted(process, "work", times) == "oblrpo: interrupted."


def test_who_was_told_to_ignore_it_does():
    code = (
        "import os, signal; from oblrpo import cli; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "cli.dispatch = lambda argv: os.kill(os.getpid(), signal.SIGINT); cli.main()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
