"""What is sent to a library, once, through kills, resumes and failures; with a library of our own."""

import json
import sys
import time
from types import ModuleType

import pytest

from oblrpo.errors import InputError
from oblrpo.runs import RunFolder
from oblrpo.runs.rows import NEEDED
from oblrpo.trackers import Reporter, check_trackers
from oblrpo.trackers import reporter as reporting
from oblrpo.trackers.reporter import NOTE, TRACKERS, values_of

SETTINGS = {"project": "tests", "steps": 9}


class Fake:
    """Remembers what it was told; `fail_at` a step."""

    fail_at = None

    def __init__(self, opening):
        self.opening, self.lacks, self.steps, self.closed = opening, opening.sent + 1, [], None
        Fake.latest = self

    def log(self, step, values):
        if step == self.fail_at:
            raise OSError("disk full")
        self.steps.append(step)

    def close(self, failed):
        self.closed = failed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setitem(TRACKERS, "fake", Fake)
    monkeypatch.setattr(Fake, "fail_at", None)
    return RunFolder(tmp_path)


def leg(folder, steps, warn=print, names=("fake",), stop=None):
    """One start of the run: writes and sends each step, as the trainer does."""
    with Reporter(names, folder, SETTINGS, warn) as reporter:
        for step in steps:
            reporter.log(folder.write_metrics({"step": step} | dict.fromkeys(NEEDED, 0.5)))
        if stop:
            raise stop
    return getattr(Fake, "latest", None)


def test_every_step_once_with_a_resume_from_an_earlier_checkpoint(folder):
    first = leg(folder, range(6))
    assert first.steps == [0, 1, 2, 3, 4, 5]
    assert (first.closed, first.opening.sent, first.opening.project) == (False, -1, "tests")
    folder.drop_metrics_after(3)
    second = leg(folder, range(4, 9))
    assert second.steps == [6, 7, 8]
    assert (second.opening.name, second.opening.identity) == (first.opening.name, first.opening.identity)
    assert json.loads((folder.path / NOTE).read_text())["fake"]["step"] == 8


def test_a_library_that_comes_later_gets_all(folder):
    leg(folder, range(4), names=())
    assert not (folder.path / NOTE).exists()
    assert leg(folder, range(4, 6)).steps == [0, 1, 2, 3, 4, 5]


def test_a_library_that_fails_is_given_up_and_makes_up_for_it(folder, monkeypatch):
    told = []
    monkeypatch.setattr(Fake, "fail_at", 3)
    first = leg(folder, range(6), told.append)
    assert first.steps == [0, 1, 2]
    assert first.closed is True
    assert len(told) == 1
    assert "fake failed at step 3" in told[0]
    assert "OSError: disk full" in told[0]
    monkeypatch.setattr(Fake, "fail_at", None)
    assert leg(folder, range(6, 8)).steps == [3, 4, 5, 6, 7]


class Mute(Exception):  # noqa: N818
    def __str__(self):
        raise ValueError("no words")


def leave(*_):
    raise SystemExit(3)


def fail_without_words(*_):
    raise Mute


@pytest.mark.parametrize(
    ("does", "words"),
    [(lambda *_: time.sleep(60), "no answer in"), (leave, "SystemExit: 3"), (fail_without_words, "a Mute that cannot")],
)
@pytest.mark.parametrize("where", ["log", "close"])
def test_a_library_that_hangs_ends_the_program_or_has_no_words_is_given_up(folder, monkeypatch, where, does, words):
    told, started = [], time.monotonic()
    monkeypatch.setattr(reporting, "PATIENCE", 0.3)
    monkeypatch.setattr(Fake, where, does)
    with Reporter(["fake"], folder, SETTINGS, told.append) as reporter:
        for step in range(3):
            reporter.log(folder.write_metrics({"step": step} | dict.fromkeys(NEEDED, 0.5)))
    assert len(told) == 1
    assert words in told[0]
    assert ("failed at step 0" if where == "log" else "did not close") in told[0]
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("does", "words"),
    [
        (leave, "SystemExit: 3"),
        (fail_without_words, "Mute: a Mute that cannot be shown"),
        (lambda *_: time.sleep(60), "no answer in 300 s"),
    ],
)
def test_a_library_that_ends_the_program_or_hangs_as_it_starts_is_an_input_error(folder, monkeypatch, does, words):
    monkeypatch.setattr(reporting, "PATIENCE", 0.3)
    monkeypatch.setitem(TRACKERS, "fake", does)
    with pytest.raises(InputError, match=rf"fake cannot be started \({words}\)"):
        leg(folder, range(2))


@pytest.mark.parametrize(("stop", "failed"), [(ValueError("fault"), True), (KeyboardInterrupt("stopped"), False)])
def test_a_run_that_ends_badly_is_closed_as_such(folder, stop, failed):
    with pytest.raises(type(stop)):
        leg(folder, range(2), stop=stop)
    assert Fake.latest.closed is failed


def test_a_library_that_cannot_start_is_an_input_error(folder, monkeypatch):
    def refuse(opening):
        raise RuntimeError("no\nkey")

    monkeypatch.setitem(reporting.TRACKERS, "second", refuse)
    with pytest.raises(InputError, match=r"second cannot be started \(RuntimeError: no key\)"):
        leg(folder, range(2), names=("fake", "second"))
    assert Fake.latest.closed is True


def test_a_damaged_note(folder):
    leg(folder, range(2))
    for damage in ("[", "[]", '{"fake": 3}'):
        (folder.path / NOTE).write_text(damage)
        with pytest.raises(InputError, match=r"trackers.json is damaged"):
            leg(folder, range(2, 3))


def test_values_are_numbers_under_their_own_keys_and_warnings():
    row = {"step": 3, "reward": 0.5, "snr": None, "eval/accuracy": 1, "warnings": ["a", "b"]}
    assert values_of(row) == {"reward": 0.5, "eval/accuracy": 1, "warnings": "a\n\nb"}


def test_messages_of_an_episode_are_text_in_a_table(folder, monkeypatch):
    tables = []
    monkeypatch.setattr(Fake, "log", lambda self, step, values: tables.append(values["completions"]))
    monkeypatch.setitem(SETTINGS, "log_completions", True)
    folder.completions.mkdir()
    folder.write_completions(1, [{"completion": "é", "turns": 1, "messages": [{"role": "assistant", "content": "é"}]}])
    leg(folder, [1])
    assert tables == [
        [{"step": 1, "completion": "é", "turns": 1, "messages": '[{"role": "assistant", "content": "é"}]'}]
    ]


def test_names_are_checked(monkeypatch):
    monkeypatch.setattr("oblrpo.trackers.reporter.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"pip install 'oblrpo\[trackio\]'"):
        check_trackers(["trackio"])
    with pytest.raises(InputError, match=r"unknown report_to 'wand'.*Did you mean 'wandb'"):
        check_trackers(["wand"])
    monkeypatch.setattr("oblrpo.trackers.reporter.find_spec", lambda name: True)
    with pytest.raises(InputError, match="wandb twice"):
        check_trackers(["wandb", "wandb"])
    check_trackers(list(TRACKERS))


class Run:
    """A run of wandb, without it."""

    resumed = False

    def __init__(self):
        self.steps, self.finished = [], False

    def log(self, values, step, commit):
        self.steps.append(step)

    def finish(self, exit_code):
        self.finished = True


def test_a_run_that_the_program_has_open_in_wandb_stays_open(folder, monkeypatch):
    """`init` returns that one where it is not asked for another (wandb 0.31 outside notebooks)."""
    module, users, ours = ModuleType("wandb"), Run(), Run()
    module.Settings = dict
    module.init = lambda settings, **_: ours if settings.get("reinit") == "create_new" else users
    monkeypatch.setitem(sys.modules, "wandb", module)
    leg(folder, range(3), names=["wandb"])
    assert (users.steps, users.finished) == ([], False)
    assert (ours.steps, ours.finished) == ([0, 1, 2], True)
