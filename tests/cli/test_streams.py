"""A run goes on whatever its standard output and error are: closed, without a reader, or of few characters."""

import os
import subprocess
import sys

import pytest

from oblrpo import streams
from tests.cli.conftest import DENSE_REWARD, NO_PAGE, SMALL, metrics_of

REWARD = (
    "def told(completions, **_):\n    print('told é', flush=True)\n    return [len(c) % 5 / 4 for c in completions]\n"
)


@pytest.fixture
def run(tmp_path):
    """Train with a reward that prints, by a shell whose `streams` are those of the run."""

    def call(streams, **environment):
        (tmp_path / "mine.py").write_text(REWARD, encoding="utf-8")
        flags = [str(word) for pair in SMALL.items() for word in pair]
        code = NO_PAGE + DENSE_REWARD + "from oblrpo.cli import main; main()"
        command = [sys.executable, "-c", code, "train", *flags, "--output", str(tmp_path / "run")]
        command += ["--rewards", f"{tmp_path / 'mine.py'}:told"]
        shell = ["sh", "-c", f'("$@"; echo "code $?" > {tmp_path}/code) {streams}', "sh", *command]
        done = subprocess.run(shell, capture_output=True, env=os.environ | environment, timeout=300, check=False)
        assert (tmp_path / "code").read_text() == "code 0\n", done.stderr
        assert [row["step"] for row in metrics_of(tmp_path / "run")] == [0, 1, 2, 3, 4]
        return done.stdout

    return call


@pytest.mark.slow
def test_there_may_be_only_ascii_and_standard_error_may_be_closed(run):
    out = run("2>&-", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="").decode("ascii")
    assert "held-out accuracy" in out


@pytest.mark.slow
@pytest.mark.parametrize("streams", [">&- 2>&- <&-", "2>&1 | head -n 1"])
def test_nobody_need_read_it(run, streams):
    assert len(run(streams).splitlines()) == streams.count("|")


def test_a_character_that_is_not_there_is_written_plainly():
    told = "0.5 ± 0.1 … é \udcc3"
    assert told.encode("ascii", streams.PLAIN) == rb"0.5 +- 0.1 ... \xe9 \udcc3"
    assert told.encode("latin-1", streams.PLAIN) == b"0.5 \xb1 0.1 ... \xe9 \\udcc3"
    with pytest.raises(UnicodeDecodeError):
        b"\xff".decode("ascii", streams.PLAIN)


@pytest.mark.parametrize(("command", "code"), [("--help", 1), ("train", 0)])
def test_only_commands_that_leave_files_go_on_when_nobody_reads(command, code):
    """The others would compute for nobody."""
    program = (
        "import sys; from oblrpo import cli\n"
        "cli.dispatch = lambda argv: (print('x' * 100000), print('more'), sys.stdout.flush()); cli.main()"
    )
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-c", program, command], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (code, "")


def test_a_program_may_have_no_standard_output():
    """As one without a console on Windows; the file that is opened next must not take its number."""
    code = (
        "import os, sys; from oblrpo.streams import install_streams; install_streams(); print('x')\n"
        "print('y', file=sys.stderr); "
        "file = open(os.devnull); assert file.fileno() > 2, file.fileno(); sys.exit(7)"
    )
    done = subprocess.run(["sh", "-c", '"$@" <&- >&- 2>&-', "sh", sys.executable, "-c", code], check=False)
    assert done.returncode == 7
