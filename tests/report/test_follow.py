"""`--follow` on runs that are being written, stopped, resumed, and ended."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from markupsafe import Markup

from oblrpo.errors import InputError
from oblrpo.report import page as following
from oblrpo.report.page import follow
from tests.report.conftest import row

BEFORE = {"step": 0, "eval/accuracy": 0.25, "eval/accuracy_stderr": 0.02}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What is drawn is tested elsewhere, and takes seconds."""
    for name in ("chart", "drawing"):
        monkeypatch.setattr(f"oblrpo.report.charts.{name}", lambda *_, **__: Markup("<svg></svg>"))


class Story:
    """Stands for the clock: each time `follow` would sleep, the next thing happens to the run."""

    def __init__(self, monkeypatch, events):
        self.events = list(events)
        monkeypatch.setattr(following.time, "sleep", self)

    def __call__(self, seconds):
        if not self.events:
            raise KeyboardInterrupt
        self.events.pop(0)()


def line(step):
    return json.dumps(row(step)) + "\n"


def test_a_run_from_its_beginning_to_its_end(write_run, monkeypatch):
    run = write_run([BEFORE], steps=3)
    metrics, page, printed, seen = run / "metrics.jsonl", run / "report.html", [], []
    begun = metrics.read_text()
    metrics.unlink()

    def look():
        seen.append(page.read_text())

    def append(text):
        with metrics.open("a") as file:
            file.write(text)

    Story(monkeypatch, [
        lambda: append(begun), look,
        lambda: append(line(1) + line(2)[:30]), look,  # half a line
        lambda: append(line(2)[30:]), look,
        lambda: metrics.write_text(begun + line(1)), look,  # resumed from an earlier checkpoint
        lambda: append(line(2) + line(3)),
    ])  # fmt: skip
    assert follow(run, page, 7, printed.append) == page
    assert [text for text in printed if text.startswith("step")] == [
        "step 0 of 3", "step 1 of 3, reward 0.210", "step 2 of 3, reward 0.220", "step 1 of 3, reward 0.210",
        "step 3 of 3, reward 0.230",
    ]  # fmt: skip
    assert printed[1] == "no finished step yet"
    assert [f"step {step} of 3 · live" in page for step, page in zip((0, 1, 2, 1), seen, strict=True)] == [True] * 4
    assert '<meta http-equiv="refresh" content="7">' in seen[0]
    assert "http-equiv" not in page.read_text()
    assert "finished, 3 steps" in page.read_text()


def test_a_failure_ends_it(write_run, monkeypatch):
    run = write_run([BEFORE, row(1)])
    Story(monkeypatch, [lambda: (run / "failure.txt").write_text("training has diverged: a norm is NaN.\n")])
    assert follow(run, run / "page.html", 3, lambda _: None) == run / "page.html"
    page = (run / "page.html").read_text()
    assert "<b>Failed after step 1.</b> training has diverged: a norm is NaN." in page
    assert "No problem found" not in page
    assert "http-equiv" not in page


def test_a_failure_while_the_page_is_drawn_is_on_the_last_page(write_run, monkeypatch):
    run = write_run([BEFORE, row(1)])
    write = following.write_record

    def slowly(record, path, seconds=0):
        (run / "failure.txt").write_text("the disk is full.\n")
        return write(record, path, seconds)

    monkeypatch.setattr(following, "write_record", slowly)
    Story(monkeypatch, [lambda: None])
    assert follow(run, run / "page.html", 3, lambda _: None) == run / "page.html"
    page = (run / "page.html").read_text()
    assert "the disk is full" in page
    assert "http-equiv" not in page


def test_a_page_is_written_only_when_something_moved(write_run, monkeypatch):
    run = write_run([BEFORE, row(1)])
    written = []
    monkeypatch.setattr(following, "write_record", lambda record, path, seconds=0: written.append(seconds) or path)
    Story(monkeypatch, [lambda: None] * 5)
    assert follow(run, run / "page.html", 3, lambda _: None) == run / "page.html"
    assert written == [3, 0]  # and once more at Ctrl-C, for good


def test_more_steps_asked_for_on_the_way(write_run, monkeypatch):
    run = write_run([BEFORE, row(1)], steps=5)
    printed = []
    config = run / "config.yaml"
    Story(monkeypatch, [lambda: config.write_text(config.read_text().replace("steps: 5\n", "steps: 6\n"))])
    follow(run, run / "page.html", 1, printed.append)
    assert printed[-1].startswith("step 1 of 6")


def test_ctrl_c_before_anything_is_there(tmp_path, monkeypatch):
    Story(monkeypatch, [])
    assert follow(tmp_path, tmp_path / "page.html", 1, lambda _: None) is None
    assert not (tmp_path / "page.html").exists()


def test_a_folder_that_is_not_there_or_goes_away(write_run, monkeypatch, tmp_path):
    with pytest.raises(InputError, match="is not a folder"):
        follow(tmp_path / "nowhere", tmp_path / "page.html", 1, lambda _: None)
    run = write_run([BEFORE])
    Story(monkeypatch, [lambda: os.rename(run, tmp_path / "gone")])
    with pytest.raises(InputError, match="is not a folder"):
        follow(run, tmp_path / "page.html", 1, lambda _: None)


def test_damage_is_reported_and_not_followed(write_run, monkeypatch):
    run = write_run([BEFORE, row(1)])
    Story(monkeypatch, [lambda: (run / "metrics.jsonl").write_text("garbage\n" + line(1))])
    with pytest.raises(InputError, match=r"metrics.jsonl line 1 is damaged"):
        follow(run, run / "page.html", 1, lambda _: None)


def test_the_command_beside_a_writer(write_run):
    """In a process of its own, with a writer that flushes in the middle of lines; Ctrl-C ends it with a whole page."""
    run = write_run([BEFORE], steps=1000)
    command = [
        sys.executable,
        "-c",
        "from oblrpo.cli import main; main()",
        "report",
        str(run),
        "--follow",
        "--seconds",
        "1",
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    done = threading.Event()

    def write():
        with (run / "metrics.jsonl").open("a") as file:
            for step in range(1, 1000):
                text = line(step)
                for part in (text[:50], text[50:]):
                    file.write(part)
                    file.flush()
                    if done.wait(0.01):
                        return

    writer = threading.Thread(target=write)
    writer.start()
    try:
        deadline = time.monotonic() + 60
        while not (run / "report.html").is_file():
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        done.set()
        writer.join()
        process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == str(run / "report.html")
    assert "http-equiv" not in (run / "report.html").read_text()
