"""The page of a run: what is on it, and that it says what the run's files say."""

import math
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest

from oblrpo.diagnosis import diagnose
from oblrpo.errors import InputError
from oblrpo.intervals import geometric_mean
from oblrpo.report.charts import short
from oblrpo.report.curves import course, critical_batch, line_of, n_snr, variance_ratios
from oblrpo.report.page import DRAWN, samples, write_report
from oblrpo.report.record import read_run
from oblrpo.runs import HELD_OUT, RunFolder
from oblrpo.tables.baselines import BASELINES
from oblrpo.tables.metrics import AVERAGED_STEPS, CHARTS, ROW_OF
from tests.report.conftest import completions, row, write_run_into

BEFORE = {"step": 0, "eval/accuracy": 0.25, "eval/accuracy_stderr": 0.02}
LEDGER = {f"variance/{name}": 2.0 + place for place, name in enumerate(BASELINES)}
RARE = {
    "completions/trained_ratio": 0.5, "completions/clipped_ratio": 0.1, "completions/masked_ratio": 0.2,
    "step_kl": 0.01, "step_kl_target": 0.01, "sampling/sequence_logp_difference/mean": 0.1,
    "turns/mean": 2.5, "tools/call_frequency": 1.5, "tools/failure_frequency": 0.1,
}  # fmt: skip
"""What is drawn only where it is not as usual."""


def write_finished_run(folder):
    """A run with all that a page shows."""
    rows = [BEFORE, *(row(step, **RARE) for step in range(1, 11))]
    rows[1] |= LEDGER
    rows[10] |= LEDGER | {"snr_low": 0.04}
    rows[10] |= {"eval/accuracy": 0.5, "eval/accuracy_stderr": 0.03, "baseline/spread": 99.0, "skipped": 1.0}
    run = write_run_into(folder, rows, {1: completions(), 10: completions()})
    for step, reward in ((0, 0.0), (10, 1.0)):
        asked = {"prompt": "held <i>out</i>", "answer": "7", "completion": f"said at {step}", "reward": reward}
        RunFolder(run).write_completions(step, [asked], HELD_OUT)
    return run


@pytest.fixture
def finished_run(tmp_path):
    return write_finished_run(tmp_path)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a finished run."""
    return write_report(write_finished_run(tmp_path_factory.mktemp("finished"))).read_text()


def test_everything_is_on_the_page(page):
    titles = re.findall(r"<h2 id=[a-z-]+>(Before and after|Samples)|<figcaption><b>(.*?)</b>", page)
    assert ["".join(title) for title in titles] == [chart.title for chart in CHARTS]
    assert "0.250 ± 0.039 to 0.500 ± 0.059" in page
    assert "batch used: 4" in page
    assert "<b>not finite, in step 10.</b>" in page
    assert "No problem found" not in page
    assert "finished, 10 steps" in page
    for name in BASELINES:
        assert f">{name}</text>" in page
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_it_needs_nothing_from_anywhere(page):
    assert "http" not in page.replace("http://www.w3.org", "").replace("http-equiv", "")
    assert "<script" not in page
    assert "http-equiv" not in page
    assert not re.search(r"(src|href)=\"(?!#)", page.replace('xlink:href="#', 'href="#'))


def test_text_of_a_run_is_never_markup(page):
    assert "<b>text" not in page
    assert "&lt;b&gt;text 0&lt;/b&gt;" in page


def test_drawings_are_well_formed_and_ids_are_of_one_element(page):
    drawings = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    for drawing in drawings:
        ElementTree.fromstring(drawing)
    assert len(drawings) == len(re.findall("<figcaption>", page)) > 0
    links = re.findall(r'href="#([\w-]+)"', page.split("</nav>")[0])
    assert {"learning", "samples", "settings"} <= set(links)
    for link in links:
        assert page.count(f"<h2 id={link}>") == 1


def test_a_run_of_little_has_a_page_of_little(write_run):
    for rows in ([BEFORE], [BEFORE, row(1)], [{"step": 0, "eval/accuracy": 0.1, "eval/accuracy_stderr": None}]):
        run = write_run(rows)
        page = write_report(run).read_text()
        assert f"step {rows[-1]['step']} of 10" in page
        assert re.search(f"{diagnose(run).verdict} \\d+ of \\d+ conditions could be checked", page)
        assert "No problem found so far, in fewer than 20 steps" in page
        assert "What next" not in page
        assert "nan" not in re.sub(r"<style>.*?</style>", "", page, flags=re.DOTALL).lower().replace("finan", "")


def test_steps_without_an_update_or_rewards_have_no_values(write_run):
    nothing = dict.fromkeys(row(1), None) | {"step": 2, "learning_rate": 0.0, "completions/masked_ratio": 1.0}
    page = write_report(write_run([BEFORE, row(1), nothing, row(3)])).read_text()
    assert "Completions without a reward" in page
    only = write_report(write_run([BEFORE, nothing | {"step": 1}], name="only")).read_text()
    assert "Reward and held-out accuracy" in only


def test_the_interval_of_the_averaged_reward(write_run):
    """Nine steps of standard error 0.05 each: 1.96 x 0.05 / 3; the ends, of fewer steps, are left out."""
    rows = [row(step) for step in range(1, 21)]
    line = line_of(read_run(write_run(rows)), "reward")
    half = AVERAGED_STEPS // 2
    assert line.y[:half] == [None] * half
    assert line.y[-half:] == [None] * half
    assert line.y[half] == pytest.approx(0.25)
    assert line.high[half] - line.y[half] == pytest.approx(1.959964 * 0.05 / 3, rel=1e-6)
    assert line.low[0] is None
    without = [{key: value for key, value in each.items() if key != "reward_stderr"} for each in rows]
    assert line_of(read_run(write_run(without, name="without")), "reward").low is None


def test_the_batch_used_and_the_interval_of_the_critical_one(write_run, monkeypatch):
    drawn = {}

    def note(title, lines, **further):
        drawn[title] = (lines, further)
        return ""

    monkeypatch.setattr("oblrpo.report.charts.chart", note)
    record = read_run(write_run([row(1, snr_low=0.04), row(2), row(3, snr_low=0.004)]))
    for draw in (n_snr, critical_batch):
        draw(record, next(chart for chart in CHARTS if chart.kind == draw.__name__))
    lines, further = drawn["Critical batch size, and the batch used"]
    assert lines[0].low == [pytest.approx(10)] * 3
    assert lines[0].high == [pytest.approx(25), None, None]  # SNR may be 0; over ten times all else
    assert further["levels"] == [(4, "batch used: 4")]
    lines, _ = drawn["Signal to noise of the batch gradient"]
    assert lines[0].high == [pytest.approx(0.4)] * 3  # N times snr_high


def test_variance_ratios_are_geometric_means(write_run):
    rows = [
        row(1, **{"variance/rloo": 2.0, "variance/js": 1.0}),
        row(2),
        row(3, **{"variance/rloo": 1.0, "variance/js": 2.0}),
    ]
    found = variance_ratios(rows, "js")
    assert found == [0.5, 2.0]
    assert variance_ratios(rows, "oblr") == []
    mean = geometric_mean(found)
    margin = 12.7062 * math.log(2)  # s of -log 2 and log 2 over sqrt(2) is log 2
    assert mean.value == pytest.approx(1)
    assert (math.log(mean.low), math.log(mean.high)) == pytest.approx((-margin, margin), rel=1e-5)
    one = geometric_mean([0.5])
    assert (one.low, one.value, one.high) == (one.value, pytest.approx(0.5), one.value)


def test_charts_are_of_metrics_of_the_table_and_of_known_kinds(write_run):
    assert set(DRAWN) == {chart.kind for chart in CHARTS}
    assert {key for chart in CHARTS for key in chart.keys.split()} <= set(ROW_OF)
    record = read_run(write_run([row(1, **{"completions/trained_ratio": 1.0})]))
    as_usual = {"Completions trained on", "Truncated completions", "Completions without a reward"}
    assert not any(course(record, chart) for chart in CHARTS if chart.title in as_usual)


SAMPLES = next(chart for chart in CHARTS if chart.kind == "samples")


def test_samples_show_prompts_of_the_last_step_that_taught_something_first(write_run):
    def reward(number):
        return float(number in {4, 6})  # prompt 2 and 3 differ within themselves

    rows = [row(1), row(2), row(3, reward=None)]
    steps = {step: completions(reward) for step in (1, 2, 3)}
    steps[2][4]["completion"] = "of step 2"
    (shown,) = samples(read_run(write_run(rows, steps)), SAMPLES)
    assert "Step 2. " in shown
    assert "of step 2" in shown
    assert shown.index("prompt 2") < shown.index("prompt 3") < shown.index("prompt 0")
    assert "+0.750" in shown
    assert "-0.250" in shown


def test_long_texts_are_folded_and_masked_ones_named(write_run):
    texts = completions(lambda number: 0.0)
    texts[0] |= {"completion": "x" * 5000, "reward": None, "baseline": None, "advantage": None}
    del texts[1]["score_norm2"]
    (page,) = samples(read_run(write_run([row(1)], {1: texts})), SAMPLES)
    assert "<summary><code>" + "x" * 240 + " …</code> <small>5000 characters" in page
    assert "x" * 2000 + " </code><small>… 1000 characters left out …</small><code> " + "x" * 2000 + "</code>" in page
    assert "x" * 2001 not in page
    assert "masked" in page
    assert "not taken" in page


@pytest.mark.parametrize("length", [1, 24, 25, 240, 241, 100_000])
@pytest.mark.parametrize("masked", [False, True])
def test_samples_are_shown_whatever_their_length(write_run, length, masked):
    kept = completions()
    for each in kept:
        each |= {"completion": "y" * length, "reward": None if masked else each["reward"]}
    steps = [row(step, reward=None if masked else 0.5) for step in (1, 2)]
    shown = "".join(samples(read_run(write_run(steps, {1: kept, 2: kept})), SAMPLES))
    assert len(shown) < 200_000
    assert shown.count("y" * min(length, 240)) >= 6  # 3 prompts x 2 completions


@pytest.mark.parametrize(
    ("value", "printed"),
    [(3e-4, "3e-4"), (0.25, "0.25"), (188.4, "188"), (1664.2, "1664"), (12345, "12.3k"), (3.4e6, "3.4M"), (0, "0"),
     (-12345, "-12.3k"), (2.5e-5, "2.5e-5"), (5e12, "5.0e+12")],
)  # fmt: skip
def test_short_numbers(value, printed):
    assert short(value) == printed


def test_damaged_files_are_named(finished_run):
    (finished_run / "completions" / "step_10.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(InputError, match=r"step_10.jsonl line 1 has no advantage"):
        write_report(finished_run)
    (finished_run / "metrics.jsonl").write_text('{"reward": 1}\n')
    with pytest.raises(InputError, match=r"metrics.jsonl line 1 is damaged \(not a row of a step\)"):
        write_report(finished_run)
    (finished_run / "metrics.jsonl").write_text('{"step": 1, "reward": 1}\n')
    (finished_run / "config.yaml").write_text("steps: many\n")
    with pytest.raises(InputError, match="steps is 'many'"):
        write_report(finished_run)


@pytest.mark.parametrize(
    "line", ['{"step": 1, "reward": "x"}', '{"step": 1, "reward": 1e999}', '{"step": 0}', '{"step": 1, "warnings": 3}']
)
def test_a_line_that_is_damaged_is_named(finished_run, line):
    lines = (finished_run / "metrics.jsonl").read_text().splitlines()
    (finished_run / "metrics.jsonl").write_text("\n".join([*lines[:1], line, *lines[1:]]) + "\n")
    with pytest.raises(InputError, match=r"metrics.jsonl line 2 is damaged .*; remove that line"):
        write_report(finished_run)


def test_a_reason_to_fail_that_is_no_text_is_shown_as_far_as_it_is(write_run):
    run = write_run([BEFORE])
    (run / "failure.txt").write_bytes(b"the disk \xff\xfe refused")
    assert "the disk \ufffd\ufffd refused" in write_report(run).read_text()


def test_a_page_needs_no_torch(finished_run):
    code = (
        "import sys, pathlib; from oblrpo.report.page import write_report; "
        f"write_report(pathlib.Path({str(finished_run)!r})); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
