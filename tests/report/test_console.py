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
        "step 1/2  reward -  N SNR -  lr 1.0e-03 (x0.50 by the schedule)",
        "step 2/2  reward 0.250  N SNR 2.00 (67% signal)  lr 1.0e-03 (x0.50 by the schedule)  held-out 0.500",
    ]


def test_lines_have_the_held_out_figure_of_their_own_step_and_the_bar_says_of_which():
    measured, printed = STEP | {"eval/accuracy": 0.5, "eval/accuracy_stderr": 0.1}, {}
    for terminal in (False, True):
        printed[terminal] = io.StringIO()
        console = Console(file=printed[terminal], width=200, force_terminal=terminal)
        with Progress(console) as progress:
            progress.start("a run", 400, 0, 2, (2, 0.625))
            progress.step(20, STEP)
            progress._bar.refresh()
            progress.step(21, measured)  # no line is due
            progress.step(40, STEP)
    lines = printed[False].getvalue().splitlines()[1:]
    assert [line.partition("  ")[0] for line in lines] == ["step 20/400", "step 21/400", "step 40/400"]
    assert ["held-out" in line for line in lines] == [False, True, False]
    live = printed[True].getvalue()
    assert 0 < live.index("held-out 0.625 (step 2)") < live.index("held-out 0.500 (step 21)")


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
