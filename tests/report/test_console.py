"""What a person sees of steps whose metrics have no value."""

import io
import math

import pytest
from rich.console import Console

from oblrpo.diagnosis import Facts
from oblrpo.report.console import Progress, summary

STEP = {"reward": 0.25, "snr": 0.5, "n_snr": 2.0, "learning_rate": 1e-3, "lr_factor": 0.5, "step_time": 1.0}


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_a_step_whose_completions_were_all_masked(nothing):
    printed = io.StringIO()
    with Progress(Console(file=printed, width=200)) as progress:
        progress.start("a run", 2, 0, None)
        progress.step(0, {"step": 0, "eval/accuracy": nothing, "eval/accuracy_stderr": nothing})
        progress.step(1, STEP | {"reward": nothing, "n_snr": nothing})
        progress.step(2, STEP | {"eval/accuracy": 0.5, "eval/accuracy_stderr": nothing})
    assert printed.getvalue().splitlines()[1:] == [
        "step 0/2  held-out -",
        "step 1/2  reward -  held-out -  N SNR -  lr 1.0e-03 (x0.50 by the schedule)",
        "step 2/2  reward 0.250  held-out 0.500  N SNR 2.00 (67% signal)  lr 1.0e-03 (x0.50 by the schedule)",
    ]


def test_a_resumed_run_shows_the_last_known_accuracy():
    printed = io.StringIO()
    with Progress(Console(file=printed, width=200)) as progress:
        progress.start("a run", 4, 0, 2, 0.625)
        progress.step(3, STEP)
    assert "held-out 0.625" in printed.getvalue()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ((0.25, 0.02), (0.5, 0.03), "held-out accuracy 0.250 +- 0.039 (step 0) -> 0.500 +- 0.059 (step 1), 95 %"),
        ((0.25, 0.02), (None, None), "held-out accuracy 0.250 +- 0.039 (step 0) -> none (step 1, all masked), 95 %"),
        ((None, None), (0.5, None), "held-out accuracy none (step 0, all masked) -> 0.500 (step 1), 95 %"),
    ],
)
def test_the_summary_of_accuracies_that_may_be_missing(before, after, words):
    keys = ("eval/accuracy", "eval/accuracy_stderr")
    rows = [
        {"step": 0} | dict(zip(keys, before, strict=True)),
        {"step": 1} | STEP | dict(zip(keys, after, strict=True)),
    ]
    assert words in summary(rows, "runs/mine", Facts(prompts=64))


def test_the_summary_averages_the_last_twenty_steps_and_updates():
    """Of 30 steps every third makes no update: its rate is 0, and the twenty before it that did begin at step 2."""
    rows = [STEP | {"step": n, "reward": n / 100, "learning_rate": n * 1e-5 if n % 3 else 0.0} for n in range(1, 31)]
    said = summary(rows, "runs/x", Facts(prompts=4))
    assert "reward            0.205, mean of the last 20 steps\n" in said
    assert "learning rate     1.5e-04 (x0.50 by the schedule), mean of the last 20 updates\n" in said


def test_the_summary_says_what_the_time_went_for():
    rows = [{"step": 0, "time/warm_start": 2.0}, STEP | {"step": 1, "time/training": 5.0, "time/files": 0.5}]
    rows.append(STEP | {"step": 2, "time/training": 2.5})
    said = summary(rows, "runs/x", Facts(prompts=4))
    assert "1.00 s per step; of all the time training 75%, warm start 20%, files 5%\n" in said
    assert "1.00 s per step\n" in summary([STEP | {"step": 1}], "runs/x", Facts(prompts=4))
