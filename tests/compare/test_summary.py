"""Figures of a comparison, from runs whose results are known."""

import csv
import json
import math
import re
import statistics
from io import StringIO

import pytest
from rich.console import Console

from oblrpo.compare.plan import Plan
from oblrpo.compare.spec import read_spec
from oblrpo.compare.summary import band, summarise
from oblrpo.compare.table import lines, notes, print_table, window, write_page, write_table
from oblrpo.errors import InputError
from tests.compare.conftest import plan_of, pretend

VARIANTS = {"rloo": {"algorithm": "rloo"}, "ours": {"algorithm": "oblrpo"}}
RATES = [1e-4, 1e-3, 1e-2]
FINALS = {
    # variant, rate: final accuracy of seeds 0, 1, 2
    ("rloo", 1e-4): (0.30, 0.32, 0.31), ("rloo", 1e-3): (0.50, 0.54, 0.52), ("rloo", 1e-2): (0.10, 0.10, 0.10),
    ("ours", 1e-4): (0.40, 0.42, 0.41), ("ours", 1e-3): (0.60, 0.66, 0.60), ("ours", 1e-2): (0.59, 0.62, 0.62),
}  # fmt: skip


def column(summary, name):
    """The cells of a column, a variant each."""
    return [line[name] for line in lines(summary)]


@pytest.fixture
def plan(write_spec, tmp_path):
    spec = write_spec(variants=VARIANTS, learning_rates=RATES, seeds=3, base={"steps": 4, "warm_start_steps": 0})
    return plan_of(spec, tmp_path / "out")


@pytest.fixture
def filled(plan):
    """Every run there: accuracy 0.2 before, rising linearly over four steps."""
    for variant in plan.spec.variants:
        for run in plan.search(variant):
            rate, seed = run.config.optim.learning_rate, run.config.run.seed
            final = FINALS[variant.name, rate][seed]
            curve = [0.2 + (final - 0.2) * step / 4 for step in range(5)]
            ours = variant.name == "ours"
            ratio = 0.5 if ours else 0.8
            more = {"variance/rloo": 2.0, "variance/oblr": 2.0 * ratio, "variance/js": 0.0}
            pretend(run, curve, reward=lambda step, ours=ours: 0.01 * step + 0.02 * (not ours), **more)
    return plan


def test_the_best_rate_its_accuracy_and_the_paired_test(filled):
    summary = summarise(filled)
    rloo, ours = summary.outcomes
    assert (rloo.rate, ours.rate) == (1e-3, 1e-3)
    assert rloo.final.value == pytest.approx(0.52)
    assert rloo.final.margin == pytest.approx(4.30265 * 0.02 / math.sqrt(3), rel=1e-5)
    assert rloo.before.value == pytest.approx(0.2)
    test = summary.tests["ours"]
    assert test.difference.value == pytest.approx(0.1)  # 0.10, 0.12, 0.08
    t = 0.1 / (0.02 / math.sqrt(3))
    assert test.p == pytest.approx(1 - t / math.sqrt(2 + t * t))
    assert test.adjusted == test.p
    line = lines(summary)[1]
    assert [line[name] for name in ("variant", "rate", "before", "accuracy after", "seeds")] == [
        "ours", "0.001", "0.200 ± 0.000", "0.620 ± 0.086", "3/3",
    ]  # fmt: skip


def test_rollouts_to_the_target(filled):
    """0.8 x 0.62 = 0.496; the line from 0.2 to `final` over 4 steps of 12 completions, which smoothing leaves."""
    summary = summarise(filled)
    assert summary.level == pytest.approx(0.496)
    rloo, ours = summary.outcomes
    for seed, final in enumerate(FINALS["ours", 1e-3]):
        assert ours.completions[seed] == pytest.approx(48 * (0.496 - 0.2) / (final - 0.2))
    assert rloo.median_completions == pytest.approx(48 * (0.496 - 0.2) / (0.52 - 0.2))
    assert column(summary, "completions to target")[1] == "36 (31 to 36)"
    logs = [math.log((FINALS["rloo", 1e-3][s] - 0.2) / (FINALS["ours", 1e-3][s] - 0.2)) for s in range(3)]
    middle, margin = statistics.fmean(logs), 4.30265 * statistics.stdev(logs) / math.sqrt(3)
    expected = [math.exp(middle + sign * margin) for sign in (0, -1, 1)]
    assert column(summary, "over reference's") == ["", "{:.2f} ({:.2f} to {:.2f})".format(*expected)]
    assert "the range of 3 seeds, a 75% interval for the median" in "\n".join(notes(summary))


def test_what_was_measured_at_its_ends_alone_has_no_rollouts_to_a_target(write_spec, tmp_path):
    """A line between two points is no curve."""
    base = {"warm_start_steps": 0, "eval_steps": 0}
    spec = write_spec(variants={"a": None, "b": {}}, seeds=3, target={"accuracy": 0.5}, base=base)
    plan = plan_of(spec, tmp_path / "out")
    for variant in plan.spec.variants:
        for run in plan.search(variant):
            pretend(run, [0.2, 0.7], every=4)
    run.note_failure("diverged", "lower learning_rate")
    summary = summarise(plan)
    assert column(summary, "completions to target") == ["", ""]
    assert "accuracy was measured only at the ends of runs; set eval_steps" in "\n".join(notes(summary))
    rows = csv.DictReader(write_table(summary, tmp_path).read_text().splitlines())
    assert {row["completions_to_target"] for row in rows} == {""}


def test_the_windows_of_usable_rates(filled):
    rloo, ours = summarise(filled).outcomes
    assert window(rloo.window).startswith("0.00")
    inside = (0.468 - 0.31) / (0.52 - 0.31)
    assert rloo.window.low == pytest.approx(10 ** (-4 + inside))
    assert not rloo.window.open_high
    assert ours.window.open_high
    assert ours.window.high == pytest.approx(1e-2)
    assert window(ours.window).count("~") == 1


def test_variance_ratios_leave_out_what_has_none(filled):
    rloo, ours = summarise(filled).outcomes
    assert ours.variance_ratio("oblr").value == pytest.approx(0.5)
    assert rloo.variance_ratio("oblr").value == pytest.approx(0.8)
    assert ours.variance_ratio("js") is None


def test_diverged_failed_and_missing_runs_are_never_dropped_silently(filled):
    ours = filled.spec.variants[1]
    runs = {seed: filled.run(ours, 1e-3, seed) for seed in range(3)}
    for seed, (kind, kept) in enumerate((("diverged", 2), ("failed", 2))):
        rows = runs[seed].folder.metrics_file.read_text().splitlines(keepends=True)
        runs[seed].folder.metrics_file.write_text("".join(rows[:kept]))
        runs[seed].note_failure(kind, "lower\nlearning_rate")
    summary = summarise(filled)
    outcome = summary.outcomes[1]
    assert outcome.rate == 1e-2  # 1e-3 lacks a seed
    printed = "\n".join(notes(summary))
    assert "ours, rate 0.001, seed 0: diverged: lower learning_rate" in printed
    assert "ours, rate 0.001, seed 1: failed: lower learning_rate" in printed
    assert "1 of 18 runs have not ended" not in printed
    runs[1].failed_file.unlink()
    summary = summarise(filled)
    assert "1 of 18 runs have not ended" in "\n".join(notes(summary))
    states = {(r.run.variant, r.rate, r.seed): (r.state, r.final) for r in summary.results}
    assert states["ours", 1e-3, 0] == ("diverged", 0.0)
    assert states["ours", 1e-3, 1] == ("part", None)


def diverge(run):
    """Let a run have diverged before its first step."""
    run.folder.metrics_file.unlink(missing_ok=True)
    run.note_failure("diverged", "lower learning_rate")


def test_a_diverged_run_counts_as_zero_where_no_accuracy_is_negative(filled):
    ours = filled.spec.variants[1]
    diverge(filled.run(ours, 1e-3, 0))
    summary = summarise(filled)
    outcome = summary.outcomes[1]
    assert outcome.rate == 1e-2
    assert outcome.by_rate[1e-3] == [0.0, 0.66, 0.60]
    assert "A run that diverged counts with accuracy 0. " in "\n".join(notes(summary))


def test_a_rate_that_diverges_loses_against_negative_accuracies(write_spec, tmp_path):
    """Of 1e-4 at -0.4, 1e-3 with one of two seeds diverged at -0.1, 1e9 diverged, the first is the best."""
    spec = write_spec(
        variants={"a": None}, learning_rates=[1e-4, 1e-3, 1e9], seeds=3, search_seeds=2, base={"warm_start_steps": 0}
    )
    plan = plan_of(spec, tmp_path / "out")
    variant = plan.spec.variants[0]
    for seed in (0, 1):
        pretend(plan.run(variant, 1e-4, seed), [-1.0, -0.9, -0.6, -0.5, -0.4])
        diverge(plan.run(variant, 1e9, seed))
    pretend(plan.run(variant, 1e-3, 0), [-0.5, -0.5, -0.3, -0.2, -0.1])
    diverge(plan.run(variant, 1e-3, 1))
    assert plan.best_rate(variant) == 1e-4
    assert [run.config.optim.learning_rate for run in plan.later(variant)] == [1e-4]
    summary = summarise(plan)
    (outcome,) = summary.outcomes
    assert (outcome.rate, outcome.final.value, outcome.window) == (1e-4, -0.4, None)
    assert outcome.by_rate == {1e-4: [-0.4, -0.4], 1e-3: [-0.1, -1.0], 1e9: [-1.0, -1.0]}  # the lowest of any run
    assert "counts with accuracy -1, the lowest that any run measured" in "\n".join(notes(summary))
    rows = csv.DictReader(write_table(summary, tmp_path).read_text().splitlines())
    assert [row["accuracy_after"] for row in rows if row["state"] == "diverged"] == ["-1"] * 3


def test_where_all_rates_diverge_it_is_said(write_spec, tmp_path):
    base = {"warm_start_steps": 0}
    spec = write_spec(variants={"a": None, "wild": None}, learning_rates=[1e8, 1e9], seeds=1, base=base)
    plan = plan_of(spec, tmp_path / "out")
    good, wild = plan.spec.variants
    for run in plan.search(good):
        pretend(run, [0.2, 0.2, 0.2, 0.2, 0.3])
    for run in plan.search(wild):
        diverge(run)
    assert plan.best_rate(wild) == 1e8
    printed = notes(summarise(plan))
    assert "wild: every run diverged, at every rate; lower the rates." in printed
    assert not any(note.startswith("a: every run diverged") for note in printed)


def test_a_run_whose_completions_were_all_masked_has_no_result(write_spec, tmp_path):
    spec = write_spec(variants={"a": None}, learning_rates=[1e-3, 1e-2], seeds=2, base={"warm_start_steps": 0})
    plan = plan_of(spec, tmp_path / "out")
    variant = plan.spec.variants[0]
    for seed in (0, 1):
        pretend(plan.run(variant, 1e-3, seed), [0.2, 0.2, 0.3, 0.3, 0.3])
    pretend(plan.run(variant, 1e-2, 0), [math.nan, 0.2, 0.9, 0.9, 0.9])
    pretend(plan.run(variant, 1e-2, 1), [0.2, 0.2, 0.9, 0.9, math.nan])
    assert plan.run(variant, 1e-2, 1).is_done()  # it is not run again
    summary = summarise(plan)
    assert summary.outcomes[0].rate == 1e-3
    printed = "\n".join(notes(summary))
    assert "a, rate 0.01, seed 1: unmeasured: every held-out completion of its last step was masked" in printed
    assert "have not ended" not in printed
    assert "unmeasured" in write_page(summary, tmp_path).read_text()
    rows = list(csv.DictReader(write_table(summary, tmp_path).read_text().splitlines()))
    found = {(r["learning_rate"], r["seed"]): (r["accuracy_before"], r["accuracy_after"]) for r in rows}
    assert found["0.01", "0"] == ("", "0.9")
    assert found["0.01", "1"] == ("0.2", "")


def test_where_no_rate_has_an_accuracy_it_is_said(write_spec, tmp_path):
    base = {"warm_start_steps": 0}
    spec = write_spec(variants={"a": None}, learning_rates=[1e-3, 1e-2], seeds=2, search_seeds=2, base=base)
    plan = plan_of(spec, tmp_path / "out")
    for run in plan.search(plan.spec.variants[0]):
        pretend(run, [0.2, 0.2, 0.3, 0.3, math.nan if run.config.run.seed else 0.4])
    printed = "\n".join(notes(summarise(plan)))
    assert "a: no rate has an accuracy on every seed that chooses rates, so none was chosen." in printed


def test_seeds_that_ended_below_their_start_are_counted(write_spec, tmp_path):
    plan = plan_of(write_spec(variants={"a": None, "b": {}}, seeds=3, base={"warm_start_steps": 0}), tmp_path / "out")
    a, b = (plan.search(variant) for variant in plan.spec.variants)
    for run, final in zip([*a, *b[:2]], (0.3, 0.1, 0.2, 0.3, 0.05), strict=True):
        pretend(run, [0.2, 0.2, 0.4, 0.4, final])
    diverge(b[2])
    outcomes = summarise(plan).outcomes
    assert [outcome.fallen for outcome in outcomes] == [1, 2]
    assert column(summarise(plan), "lowest") == ["0.100 (1 fell)", "0.000 (2 fell)"]


def test_a_run_that_was_there_before_it_diverged_has_been_there(write_spec, tmp_path):
    spec = write_spec(
        variants={"a": None}, seeds=1, target={"accuracy": 0.5, "window": 1}, base={"warm_start_steps": 0}
    )
    plan = plan_of(spec, tmp_path / "out")
    (run,) = plan.search(plan.spec.variants[0])
    pretend(run, [0.2, 0.7], every=2)
    run.folder.drop_metrics_after(2)
    run.note_failure("diverged", "lower learning_rate")
    assert summarise(plan).outcomes[0].completions == {0: pytest.approx(24 * 0.3 / 0.5)}


def test_steps_without_a_reward_are_left_out(write_spec, tmp_path):
    target = {"accuracy": 0.025, "curve": "reward", "window": 1}
    plan = plan_of(
        write_spec(variants={"a": None}, seeds=1, target=target, base={"warm_start_steps": 0}), tmp_path / "o"
    )
    (run,) = plan.search(plan.spec.variants[0])
    pretend(run, [0.1] * 5)
    rows = [row | ({"reward": None} if row["step"] == 2 else {}) for row in run.folder.read_metrics()]
    run.folder.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarise(plan)
    assert summary.outcomes[0].completions == {0: pytest.approx(18)}
    (row,) = csv.DictReader(write_table(summary, tmp_path).read_text().splitlines())
    assert float(row["reward_last_20_steps"]) == pytest.approx((0.01 + 0.03 + 0.04) / 3, rel=1e-5)


def test_runs_that_never_reach_the_target_count_as_such(write_spec, tmp_path):
    spec = write_spec(variants={"a": None, "b": {}}, seeds=3, target={"accuracy": 0.5}, base={"warm_start_steps": 0})
    plan = plan_of(spec, tmp_path / "out")
    finals = {"a": (0.6, 0.3, 0.7), "b": (0.3, 0.3, 0.7)}
    for variant in plan.spec.variants:
        for run, final in zip(plan.search(variant), finals[variant.name], strict=True):
            pretend(run, [0.2, 0.2, final, final, final])
    a, b = summarise(plan).outcomes
    assert math.isfinite(a.median_completions)
    assert b.median_completions == math.inf
    cells = column(summarise(plan), "completions to target")
    assert cells[0].endswith(" to never, 2 of 3 reached it)")
    assert cells[1] == "not reached (1 of 3 reached it)"
    assert column(summarise(plan), "over reference's") == ["", ""]  # no mean of the one seed that both bring there
    rows = list(csv.DictReader(write_table(summarise(plan), tmp_path).read_text().splitlines()))
    assert [row["completions_to_target"] for row in rows if row["variant"] == "b"][:2] == ["not reached"] * 2


def test_a_target_by_reward_counts_from_the_policy_before_the_step(write_spec, tmp_path):
    """Rewards 0.01, 0.02, 0.03, 0.04 are of policies after 0, 12, 24, 36 completions."""
    target = {"accuracy": 0.025, "curve": "reward", "window": 1}
    plan = plan_of(
        write_spec(variants={"a": None}, seeds=1, target=target, base={"warm_start_steps": 0}), tmp_path / "o"
    )
    pretend(plan.run(plan.spec.variants[0], plan.spec.variants[0].learning_rates[0], 0), [0.1, 0.1, 0.1, 0.1, 0.1])
    assert summarise(plan).outcomes[0].completions == {0: pytest.approx(18)}


@pytest.mark.parametrize(
    ("target", "level"),
    [
        ({"of_best": 0.5}, 0.5 * 0.62),
        ({"of_gain": 0.5}, 0.2 + 0.5 * 0.42),
        ({"accuracy": 0.4, "curve": "reward"}, 0.4),
        ({"of_best": 0.5, "curve": "reward"}, 0.5 * 0.045),  # of the curve it is a level of, not of accuracy
        ({"of_gain": 0.5, "curve": "reward"}, 0.02 + 0.5 * (0.045 - 0.02)),
        ({"curve": "reward"}, 0.8 * 0.045),
        ({}, 0.8 * 0.62),
    ],
)
def test_the_level_of_a_target(filled, tmp_path, target, level):
    """Rewards of "ours" are 0.01, 0.02, 0.03, 0.04, of the better "rloo" 0.03 to 0.06."""
    spec = read_spec(str(tmp_path / "spec.yaml"), {"target": target}, {})
    summary = summarise(Plan(spec, filled.output))
    assert summary.level == pytest.approx(level)
    assert ("of the way from the start of the runs" in "\n".join(notes(summary))) == ("of_gain" in target)


def test_no_target_lies_below_where_runs_begin(write_spec, tmp_path):
    """Accuracy rises from 0.7 to 0.75, of which 0.8 is 0.6."""
    spec = write_spec(variants={"a": None, "b": {}}, seeds=2, base={"warm_start_steps": 0})
    plan = plan_of(spec, tmp_path / "out")
    for variant in plan.spec.variants:
        for run in plan.search(variant):
            pretend(run, [0.7, 0.71, 0.72, 0.74, 0.75])
    assert summarise(plan).level is None


@pytest.mark.parametrize("target", [{"of_gain": 0.5}, {"of_best": 0.5}, {"of_best": 0.5, "curve": "reward"}])
def test_where_nothing_is_gained_there_is_no_target(write_spec, tmp_path, target):
    """Accuracy falls from 0.2 to 0, rewards are below 0."""
    spec = write_spec(variants={"a": None, "b": {}}, seeds=2, target=target, base={"warm_start_steps": 0})
    plan = plan_of(spec, tmp_path / "out")
    for variant in plan.spec.variants:
        for run in plan.search(variant):
            pretend(run, [0.2, 0.1, 0.0, 0.0, 0.0], reward=lambda step: -1 / step)
    summary = summarise(plan)
    assert summary.level is None
    assert column(summary, "completions to target") == ["", ""]
    assert "There is none: it would not be above the start of the runs" in "\n".join(notes(summary))
    rows = csv.DictReader(write_table(summary, tmp_path).read_text().splitlines())
    assert {row["completions_to_target"] for row in rows} == {""}


def test_of_rewards_a_variant_that_diverged_is_not_the_best(filled, tmp_path):
    """A run that diverged has no reward to end at: 0 may be more than others get."""
    run = filled.run(filled.spec.variants[0], 1e-3, 0)
    run.folder.drop_metrics_after(2)
    run.note_failure("diverged", "lower learning_rate")
    for rate in (1e-4, 1e-2):
        for seed in range(3):
            other = filled.run(filled.spec.variants[0], rate, seed)
            other.folder.drop_metrics_after(0)
            other.note_failure("diverged", "lower learning_rate")
    spec = read_spec(str(tmp_path / "spec.yaml"), {"target": {"curve": "reward"}}, {})
    assert summarise(Plan(spec, filled.output)).level == pytest.approx(0.8 * 0.025)


def test_completions_over_the_references_are_of_all_seeds_or_none(write_spec, tmp_path):
    """Four variants: the reference, one as fast, one with a seed that fails below the target, one that begins there."""
    names = ("reference", "same", "failed", "begins")
    spec = write_spec(
        variants=dict.fromkeys(names), seeds=2, target={"accuracy": 0.5, "window": 1}, base={"warm_start_steps": 0}
    )
    plan = plan_of(spec, tmp_path / "out")
    for variant in plan.spec.variants:
        for run in plan.search(variant):
            begins = variant.name == "begins" and run.config.run.seed == 1
            pretend(run, [0.5 if begins else 0.2, 0.3, 0.4, 0.5, 0.6])
            if variant.name == "failed" and run.config.run.seed == 1:
                run.folder.drop_metrics_after(2)
                run.note_failure("failed", "the disk is full")
    summary = summarise(plan)
    assert column(summary, "over reference's") == ["", "1.00 (1.00 to 1.00)", "", ""]
    assert "blank where a seed never reaches the target or starts there" in "\n".join(notes(summary))
    assert column(summary, "completions to target")[3].endswith("1 started there)")
    printed = StringIO()
    print_table(summary, Console(file=printed, width=120))
    assert "  1.00  " in printed.getvalue()
    backwards = read_spec(str(tmp_path / "spec.yaml"), {"reference": "begins"}, {})
    assert "not all seeds of the reference reach it" in "\n".join(notes(summarise(Plan(backwards, plan.output))))


def titles(page):
    """Of the page's drawings, each of which is there."""
    figures = re.findall(r"<figcaption><b>(.*?)</b>.*?</figcaption>(<svg .*?</svg>)\s*</figure>", page, re.DOTALL)
    return [title for title, _ in figures]


def test_page_and_table(filled, tmp_path):
    summary = summarise(filled)
    page = write_page(summary, tmp_path).read_text()
    assert "http" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    assert titles(page) == [
        "Held-out accuracy at the best rate", "Reward, mean of 9 steps", "Final accuracy against learning rate",
        "rloo: held-out accuracy by rate", "ours: held-out accuracy by rate",
        "Gradient variance along each variant&#39;s runs",
    ]  # fmt: skip
    for text in ("0.620\xa0±\xa00.086", "+0.100 ± 0.050", "algorithm: oblrpo", "prefers-color-scheme"):
        assert text in page
    rows = list(csv.DictReader(write_table(summary, tmp_path).read_text().splitlines()))
    assert len(rows) == 18
    row = next(r for r in rows if (r["variant"], r["learning_rate"], r["seed"]) == ("ours", "0.001", "1"))
    assert (row["state"], row["accuracy_after"], row["steps"], row["completions"]) == ("finished", "0.66", "4", "48")
    assert row["variance_oblr_over_rloo"] == "0.5"
    assert row["variance_js_over_rloo"] == ""


def test_a_page_of_one_run(write_spec, tmp_path):
    """Nothing to compare, no interval, no grid, no ledger: what is there is shown."""
    plan = plan_of(write_spec(variants={"only": None}, seeds=1, base={"warm_start_steps": 0}), tmp_path / "o")
    with pytest.raises(InputError, match="holds no finished run"):
        summarise(plan)
    pretend(plan.search(plan.spec.variants[0])[0], [0.1, 0.2, 0.3, 0.3, 0.4])
    summary = summarise(plan)
    drawn = titles(write_page(summary, tmp_path).read_text())
    assert drawn == ["Held-out accuracy at the best rate", "Reward, mean of 9 steps"]
    assert column(summary, "accuracy after") == ["0.400"]


def test_a_variant_of_one_low_rate_is_drawn_before_others(write_spec, tmp_path):
    """Warnings of matplotlib are errors here: an axis of rates must have a width from the first one on."""
    base = {"warm_start_steps": 0}
    variants = {"one": {"learning_rate": 1e-6}, "some": {"learning_rates": [1e-6, 1e-5]}}
    plan = plan_of(write_spec(variants=variants, seeds=1, base=base), tmp_path / "o")
    for run in plan.all_known():
        pretend(run, [0.1, 0.2, 0.3, 0.3, 0.4])
    assert "Final accuracy against learning rate" in titles(write_page(summarise(plan), tmp_path).read_text())


def test_while_runs_are_missing_the_best_rate_so_far_is_shown(plan):
    variant = plan.spec.variants[0]
    pretend(plan.run(variant, 1e-4, 0), [0.2, 0.3, 0.3, 0.3, 0.3])
    pretend(plan.run(variant, 1e-2, 1), [0.2, 0.3, 0.3, 0.3, 0.5])
    rloo, ours = summarise(plan).outcomes
    assert (rloo.rate, rloo.final.value, rloo.final.n) == (1e-2, 0.5, 1)
    assert ours.final is None
    assert plan.best_rate(variant) is None  # nothing is trained on the strength of that


def test_bands_are_of_the_points_that_all_runs_have():
    x, middle, low, high = band([[(0, 1.0), (5, 3.0)], [(0, 2.0), (5, 5.0), (9, 9.0)]])
    assert (x, middle, low, high) == ([0, 5], [1.5, 4.0], [1.0, 3.0], [2.0, 5.0])
    _, _, low, _ = band([[(0, 1.0)], [(0, 2.0)], [(0, 3.0)]])
    assert low[0] == pytest.approx(2 - 4.302653 / math.sqrt(3), abs=1e-5)
