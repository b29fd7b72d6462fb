"""The command line as a user meets it, in this process or in a fork of it."""

import json
import os
import re
import shutil
import sys
import traceback
import warnings

import pytest
from transformers.utils import logging as transformers_logging

import oblrpo.trainer.loop
from oblrpo import cli
from oblrpo.cli import interrupts
from oblrpo.tasks import PathTask

CATCH = interrupts.catch
TIMES = re.compile("step_time$|time/")
"""Metrics in which a run need not repeat itself."""

# A policy with random weights never finds a route; this reward has signal from the first step, as real tasks do.
DENSE_REWARD = """
from oblrpo.tasks import PathTask
PathTask.reward = lambda self, problem, completion: len(completion.encode()) % 5 / 4
"""

SMALL = {
    "--model-args": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, "--prompts-per-step": 4,
    "--num-generations": 3, "--max-completion-length": 6, "--steps": 4, "--eval-prompts": 5, "--eval-samples": 2,
    "--eval-steps": 2, "--threads": 1, "--device": "cpu", "--learning-rate": 1e-2, "--save-total-limit": 20,
    "--save-steps": 1, "--ledger-steps": 50,
}  # fmt: skip


@pytest.fixture
def oblrpo(monkeypatch, capsys):
    """Call with arguments; returns (exit code, stdout, stderr)."""
    yield lambda *arguments: called(cli.main, arguments, monkeypatch, capsys)
    transformers_logging.enable_progress_bar()


def called(main, arguments, monkeypatch, capsys):
    """Call `main` as the command line does; returns (exit code, stdout, stderr)."""
    monkeypatch.setattr("oblrpo.cli.interrupts.catch", lambda: None)  # Ctrl-C is pytest's
    monkeypatch.setattr(sys, "argv", ["oblrpo", *map(str, arguments)])
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = stop.code or 0
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def dense_reward(monkeypatch):
    """`DENSE_REWARD` in this process."""
    monkeypatch.setattr(PathTask, "reward", PathTask.reward)  # put back afterwards
    exec(DENSE_REWARD, {})


NO_PAGE = "import oblrpo.report.page as page; page.write_report = lambda run, output=None: run\n"


class Fork:
    """The command line in a fork of this process, which has loaded torch already; the code `before` runs first.

    Its standard output and error are pipes, as those of `subprocess.Popen`.
    """

    def __init__(self, argv, before=""):
        (out, to_out), (err, to_err), self.returncode = os.pipe(), os.pipe(), None
        for stream in (sys.__stdout__, sys.__stderr__):
            stream.flush()  # or the child would say it again
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # pytest has threads, of which the child needs none
            self.pid = os.fork()
        if self.pid == 0:
            os.dup2(to_out, 1)
            os.dup2(to_err, 2)
            for descriptor in (out, err, to_out, to_err):
                os.close(descriptor)
            os._exit(self._run(argv, before))
        os.close(to_out)
        os.close(to_err)
        self.stdout, self._err = os.fdopen(out), os.fdopen(err)

    def _run(self, argv, before):
        # Streams of its own: those of pytest may be of a file, in which one can seek.
        sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
        sys.stderr = sys.__stderr__ = open(2, "w", closefd=False)  # noqa: SIM115
        interrupts.catch = CATCH
        code = 0
        try:
            exec(DENSE_REWARD + NO_PAGE + before, {})
            sys.argv = ["oblrpo", *argv]
            cli.main()
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        return code

    def send_signal(self, number):
        """As that of `subprocess.Popen`."""
        os.kill(self.pid, number)

    def communicate(self):
        """Wait for its end; returns what it said to standard output, that has not been read, and to standard error."""
        with self.stdout, self._err:
            out = self.stdout.read()
            err = self._err.read()
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            return out, err


def start(output, before="", **settings):
    """The small run with `DENSE_REWARD`, in a fork of this process."""
    flags = [str(x) for pair in (SMALL | settings).items() for x in pair]
    return Fork(["train", *flags, "--output", str(output)], before)


@pytest.fixture
def no_page(monkeypatch):
    """Leave out the page that a run ends with: two seconds of drawing."""
    monkeypatch.setattr("oblrpo.report.page.write_report", lambda run, output=None: run)


@pytest.fixture(autouse=True)
def page_where_marked(request):
    """No page in this folder's tests but those marked `page`, which are of it."""
    if "page" not in request.keywords:
        request.getfixturevalue("no_page")


@pytest.fixture
def small_run(oblrpo, tmp_path):
    """Train a very small policy, or `model`; keywords replace or add flags. Returns (code, stdout, stderr)."""

    def call(*arguments, output=tmp_path / "run", **settings):
        small = {key: value for key, value in SMALL.items() if key != "--model-args" or "model" not in settings}
        flags = small | {f"--{key.replace('_', '-')}": value for key, value in settings.items()}
        return oblrpo("train", *arguments, *[x for pair in flags.items() for x in pair], "--output", output)

    return call


@pytest.fixture(scope="session")
def _place_of_whole(tmp_path_factory):
    return tmp_path_factory.mktemp("whole") / "run"


@pytest.fixture
def whole(_place_of_whole, oblrpo, dense_reward, monkeypatch):
    """The small run of four steps with `DENSE_REWARD`, made once a session; no test writes to it."""
    if not _place_of_whole.exists():
        flags = [word for pair in SMALL.items() for word in pair]
        with monkeypatch.context() as patch:
            patch.setattr("oblrpo.report.page.write_report", lambda run, output=None: run)
            code, _, err = oblrpo("train", *flags, "--output", _place_of_whole)
        assert code == 0, err
    return _place_of_whole


@pytest.fixture
def run(whole, tmp_path):
    """A copy of that run, which a test may harm and resume."""
    return shutil.copytree(whole, tmp_path / "run")


def weights_of(run, step):
    """The bytes of a checkpoint's weights."""
    return (run / "checkpoints" / f"step_{step}" / "model.safetensors").read_bytes()


def metrics_of(run):
    """Rows of metrics.jsonl without the time, which is all that two runs of one seed may differ in."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not TIMES.match(key)} for row in rows]


def complained(result, *words):
    """Exit code 2, no traceback, and these words in the message."""
    code, _, err = result
    assert code == 2, err
    assert "Traceback" not in err
    flat = " ".join(err.replace("│", " ").split())
    for word in words:
        assert word in flat, flat
