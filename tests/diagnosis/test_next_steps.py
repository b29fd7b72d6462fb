"""What is suggested at a run's end: each from figures whose answer is known, and nothing where it is not."""

import json
import math
import random
from types import SimpleNamespace

import pytest

from oblrpo.diagnosis import Watch, diagnose
from oblrpo.diagnosis.next_steps import (
    SUGGESTIONS,
    Gain,
    Left,
    NextStep,
    earlier_checkpoint,
    evaluate_less,
    flat_of,
    go_on,
    larger_batch,
    leave_out,
    next_steps,
    other_baseline,
    raise_limit,
    smaller_batch,
    stop_earlier,
)
from oblrpo.report.console import summary
from oblrpo.report.page import write_report
from oblrpo.runs import RunFolder
from tests.report.conftest import write_run, write_run_into  # noqa: F401

OURS = {"algorithm": "rloo", "eval_steps": 1, "max_completion_length": 8, "prompts_per_step": 64}


def rows_of(rewards, **metrics):
    """A row a step; a metric that is a function is one of the step."""
    ends = {"reward_min": 0.0, "reward_max": 1.0}
    return [
        {"step": step, "reward": reward}
        | ends
        | {key.replace("__", "/"): of(step) if callable(of) else of for key, of in metrics.items()}
        for step, reward in enumerate(rewards, start=1)
    ]


def noisy(course, steps, noise=0.02, seed=0):
    draw = random.Random(seed)
    return [course(step) + draw.gauss(0, noise) for step in range(steps)]


def learned_by(step, level=0.9):
    """Rises in a line up to a step, and stays there."""
    return lambda at: level * min(1.0, (at + 1) / step)


def test_flat_since_the_reward_has_stopped_rising():
    flat = flat_of(noisy(learned_by(30), 90))
    assert 24 <= flat.first <= 36
    assert abs(flat.rise) <= 0.05
    assert flat_of(noisy(learned_by(30), 9_000, 0.005)).first <= 600, "a long run is looked at in parts"


@pytest.mark.parametrize(
    "rewards",
    [
        noisy(learned_by(90), 90),
        noisy(learned_by(30), 90, noise=0.3),  # a rise would not show
        noisy(learned_by(80), 90),  # too short
        [0.9 - each for each in noisy(learned_by(30), 90)],  # it fell
        noisy(lambda at: 0.5, 90),  # it never rose
    ],
)
def test_flat_is_not_said_of(rewards):
    assert flat_of(rewards) is None


def test_the_time_since_a_run_is_flat():
    rows = rows_of(noisy(learned_by(30), 90), step_time=lambda step: 1.0 if step <= 45 else 2.0)
    found = stop_earlier(Left(rows, OURS))
    step = int(found.setting.rpartition(" ")[2].rstrip(")"))
    spent = sum(row["step_time"] for row in rows if row["step"] > step) / sum(row["step_time"] for row in rows)
    assert found.gain.value == pytest.approx(1 / (1 - spent))
    assert found.sentence.startswith(f"Flat since step {step}: {spent:.0%} of the time bought ")
    assert "of the steps" in stop_earlier(Left(rows_of([row["reward"] for row in rows]), OURS)).sentence
    assert stop_earlier(Left(rows)).setting == "", "the flags are ours"
    assert stop_earlier(Left(rows, OURS | {"lr_scheduler_type": "cosine"})) is None


@pytest.mark.parametrize(("last", "stderr", "said"), [(0.52, 0.02, True), (0.7, 0.02, False), (0.52, 0.001, True)])
def test_a_run_is_not_flat_while_held_out_accuracy_rises(last, stderr, said):
    """By more than a twentieth of what it has gained from 0, surely."""
    rows = rows_of(noisy(learned_by(30), 90))
    for row, accuracy in ((rows[0], 0.0), (rows[49], 0.5), (rows[89], last)):
        row |= {"eval/accuracy": accuracy, "eval/accuracy_stderr": stderr}
    assert (stop_earlier(Left(rows, OURS)) is not None) is said


def measured(*accuracies, stderr=0.02):
    rows = rows_of([0.5] * len(accuracies))
    return [r | {"eval/accuracy": a, "eval/accuracy_stderr": stderr} for r, a in zip(rows, accuracies, strict=True)]


def test_an_earlier_checkpoint_is_surely_better():
    found = earlier_checkpoint(Left(measured(0.2, 0.7, 0.5), OURS))
    assert found.gain.value == pytest.approx(0.2)
    assert found.gain.low == pytest.approx(0.2 - 2.2414 * math.hypot(0.02, 0.02), abs=1e-4), "of two comparisons"
    assert found.setting == "(--steps 2)"
    assert earlier_checkpoint(Left(measured(0.2, 0.5, 0.7), OURS)) is None
    # with an error of .028 a difference of .07 is certain where it is the only one, and not as the greatest of twenty
    assert earlier_checkpoint(Left(measured(0.57, 0.5), OURS)) is not None
    assert earlier_checkpoint(Left(measured(*[0.5] * 10, 0.57, *[0.5] * 10), OURS)) is None


def texts(prompt, rewards, length=4, clipped=False):
    return [{"prompt": prompt, "completion": "x", "reward": r, "length": length, "clipped": clipped} for r in rewards]


def left_of(folder, completions, rows=None, **settings):
    """What a run has left whose completions are given by step."""
    rows = rows or rows_of(noisy(learned_by(len(completions) * 2), len(completions)))
    steps = dict(enumerate(completions, start=1))
    blank = {"baseline": 0.0, "advantage": 0.0}
    path = write_run_into(folder, rows, {step: [blank | text for text in each] for step, each in steps.items()})
    return Left(rows, OURS | settings, RunFolder(path))


def test_twice_the_limit(tmp_path):
    """Of those that reach 6 of 8 tokens a half ends there and earns 1, so that 15 / 16 of the rest would in 16."""
    step = [
        text
        for prompt in range(16)
        for text in (
            *texts(f"{prompt}", [1.0, 1.0], 3),
            *texts(f"{prompt}", [1.0], 7),
            *texts(f"{prompt}", [0.0], 8, clipped=True),
        )
    ]
    found = raise_limit(left_of(tmp_path, [step] * 3))
    assert found.gain.value == pytest.approx(1 / 4 * 15 / 16)
    assert found.gain.low == pytest.approx(found.gain.value), "prompts that are all alike have no noise"
    assert found.setting == "(--max-completion-length 16)"
    tokens = 1 + 1 / 4 * 2 * (1 + 1 / 2 + 1 / 4 + 1 / 8) / ((3 + 3 + 7 + 8) / 4)
    assert f"for {tokens:.2g} times the tokens" in found.sentence


@pytest.mark.parametrize(("cut", "late"), [(0.0, 0.0), (1.0, 1.0), (0.0, None)])
def test_a_limit_is_not_raised_where_what_ends_later_earns_no_more(tmp_path, cut, late):
    end = [] if late is None else texts("a", [late] * 30, 7)
    step = [*texts("b", [1.0] * 30, 3), *end, *texts("c", [cut] * 30, 8, clipped=True)]
    assert raise_limit(left_of(tmp_path, [step])) is None


def test_a_run_that_still_rises():
    rows = rows_of(noisy(lambda at: 0.01 * at, 60, noise=0.005), reward_max=1.0)
    found = go_on(Left(rows, OURS))
    assert found.setting == "(--resume --steps 75)"
    assert 0.08 < found.gain.low < found.gain.high < 0.15, "it has come to .6 by .14, which left .4 of .54"
    high = rows_of(noisy(lambda at: 0.01 * at, 60, noise=0.005), reward_max=0.62)
    assert go_on(Left(high, OURS)) is None, "next to the highest reward there is no way left"
    assert go_on(Left(rows, OURS | {"steps": 90})) is None, "it goes on anyway"
    for course in (learned_by(20), lambda at: 0.9 - 0.01 * at):
        assert go_on(Left(rows_of(noisy(course, 60)), OURS)) is None


def test_a_run_goes_on_only_towards_what_its_prompts_have_earned(tmp_path):
    """Of two prompts one has never earned anything: .5 is the most, and the run has come to .6."""
    rewards = noisy(lambda at: 0.01 * at, 60, noise=0.005)
    for best, said in ((0.0, False), (1.0, True)):
        steps = [[*texts("a", [1.0, 0.0]), *texts("b", [best, 0.0])]] * 60
        assert (go_on(left_of(tmp_path / f"{said}", steps, rows_of(rewards))) is not None) is said


def solved_half(steps, newest=0.0):
    """Two groups a prompt and step of forty prompts; of the second twenty all but the newest earn nothing."""
    draw = random.Random(1)
    for step in range(steps):
        late = newest if step == steps - 1 else 0.0
        yield [
            text
            for prompt in range(40)
            for text in texts(f"{prompt}", [float(draw.random() < (0.5 if prompt < 20 else late)) for _ in range(4)])
        ]


def test_prompts_that_have_never_been_solved_are_left_out(tmp_path):
    found = leave_out(left_of(tmp_path, list(solved_half(5))))
    assert found.gain.value == pytest.approx(2)
    assert 1.3 < found.gain.low < 2
    assert sorted(map(int, found.prompts)) == list(range(20, 40))
    assert str(found).startswith("20 of 40 prompts have earned nothing but the lowest reward in all of their comp")
    assert "as many completions give 2 times the signal" in str(found)


def test_prompts_are_kept_that_begin_to_be_solved_or_came_but_once(tmp_path):
    assert leave_out(left_of(tmp_path / "a", list(solved_half(5, newest=0.5)))) is None
    assert leave_out(left_of(tmp_path / "b", list(solved_half(1)))) is None


def noise(r, low, high, prompts=64):
    """Figures of steps in which a batch of so many prompts has this N SNR."""
    of = {"snr": r, "snr_low": low, "snr_high": high}
    return {key: value / prompts for key, value in of.items()} | {"n_snr": r, "signal2": r, "trace_cov": float(prompts)}


def test_a_smaller_batch():
    """At r = 3, half the prompts take (1 + 3/2) / (1/2 (1 + 3)) = 5/4 times the steps, a quarter 7/4."""
    rows = rows_of(noisy(learned_by(40), 40), **noise(3.0, 2.0, 5.0))
    found = smaller_batch(Left(rows, OURS))
    assert found.setting == "(--prompts-per-step 16)"
    assert found.gain == pytest.approx(Gain(4 / (7 / 4), 4 / (6 / 3), 4 / (9 / 6)))
    assert smaller_batch(Left(rows_of(noisy(learned_by(40), 40), **noise(3.0, 0.0, 5.0)), OURS)) is None
    assert smaller_batch(Left(rows_of(noisy(learned_by(40), 40), **noise(0.5, 0.4, 0.6)), OURS)) is None


def test_a_larger_batch():
    """At r = 1/20, four times the prompts take (1 + 1/5) / (4 (1 + 1/20)) of the steps."""
    rising = noisy(learned_by(40), 40)
    found = larger_batch(Left(rows_of(rising, **noise(0.05, 0.0, 0.1)), OURS))
    assert found.gain.value == pytest.approx(4 * 1.05 / 1.2)
    assert found.setting == "(--prompts-per-step 256)"
    assert found.of == "steps"
    assert larger_batch(Left(rows_of(rising, **noise(0.2, 0.1, 0.3)), OURS)) is None
    assert larger_batch(Left(rows_of(noisy(lambda at: 0.5, 40), **noise(0.05, 0.0, 0.1)), OURS)) is None, "no learning"
    for part, value in ((slice(None, None, 2), 30.0), (slice(1, 10), 1.0)):  # intervals that reach beyond, or to 0
        drawn = rows_of(rising, **noise(0.0 if value == 1.0 else 0.05, 0.0, 0.1))
        for row in drawn[part]:
            row["signal2"] = value if row["step"] % 3 else -value / 2
        assert larger_batch(Left(drawn, OURS)) is None


def test_another_baseline():
    ledgers = {"variance__none": lambda step: 4.0 + step % 2, "variance__rloo": 1.0, "variance__mean": 0.1}
    rows = rows_of(noisy(learned_by(20), 20), **ledgers)
    found = other_baseline(Left(rows, OURS | {"algorithm": "reinforce"}))
    assert found.setting == "(--baseline rloo)", "the mean is biased"
    assert found.gain.value == pytest.approx(math.sqrt(4 * 5))
    for algorithm in ("rloo", "grpo"):  # there is no better one, and one whose variance is not comparable
        assert other_baseline(Left(rows, OURS | {"algorithm": algorithm})) is None
    ties = rows_of(noisy(learned_by(20), 20), variance__rloo=4.0, variance__js=1.0)
    assert other_baseline(Left(ties, OURS)) is None, "js trains on groups that agree, which costs more"


def test_evaluating_less_often():
    """41 evaluations of 1 s beside 40 s: with four, they take a tenth of the time."""
    rows = [{"step": 0, "time/evaluation": 1.0}]
    rows += rows_of([0.5] * 40, time__training=1.0, time__evaluation=1.0)
    found = evaluate_less(Left(rows, OURS))
    assert found.setting == "(--eval-steps 20)"
    assert found.gain.value == pytest.approx(81 / (40 + 3))
    assert evaluate_less(Left(rows, OURS | {"eval_steps": 0})) is None
    cheap = rows_of([0.5] * 40, time__training=1.0, time__evaluation=0.05)
    assert evaluate_less(Left(cheap, OURS)) is None


def suggested(name, of, value):
    return NextStep(name, of, Gain(value, value, value), f"{name}.", "(--flag)")


def test_what_makes_the_policy_better_comes_first_and_three_are_said(monkeypatch):
    made = [("a", "steps", 9.0), ("b", "time", 2.0), ("c", "completions", 3.0), ("d", "reward", 0.1)]
    monkeypatch.setattr(
        "oblrpo.diagnosis.next_steps.SUGGESTIONS",
        {lambda left, each=each: suggested(*each): frozenset() for each in made},
    )
    assert [each.name for each in next_steps(Watch(), Left([]))] == ["d", "c", "b"]


def test_where_something_is_wrong_its_cure_comes_first():
    rows = rows_of(noisy(learned_by(30), 90), step_time=1.0)
    watch = Watch().over(rows)
    assert [each.name for each in next_steps(watch, Left(rows, OURS))] == ["stop earlier"]
    ill = SimpleNamespace(findings=[SimpleNamespace(name="baselines explode", wrong=True)])
    assert next_steps(ill, Left(rows, OURS)) == []
    fallen = [*rows, *measured(0.7, 0.2)]
    assert [each.name for each in next_steps(ill, Left(fallen, OURS))] == ["take an earlier checkpoint"]


def test_every_suggestion_says_nothing_of_a_log_that_lacks_what_it_needs():
    """Also of one that names no steps."""
    for rows in ([], [{"reward": 0.5}] * 50, rows_of([0.5] * 50), [{"step": 3, "loss": math.nan}] * 50):
        assert [suggest(Left(rows)) for suggest in SUGGESTIONS] == [None] * len(SUGGESTIONS)


@pytest.fixture
def flat_run(write_run):  # noqa: F811
    return write_run(rows_of(noisy(learned_by(30), 90), step_time=1.0, learning_rate=0.1, lr_factor=1.0), steps=90)


def test_it_stands_at_the_end_of_the_diagnosis_the_page_and_the_summary(flat_run):
    found = diagnose(flat_run)
    (step,) = found.next_steps
    assert str(found).endswith(f"What next:\n-  {step}")
    assert json.loads(json.dumps(found.plain()))["next_steps"][0]["gain"]["value"] == step.gain.value
    page = write_report(flat_run).read_text()
    assert step.sentence in page.partition("<h2 id=what-next>")[2].partition("<h2")[0]
    lines = summary(RunFolder(flat_run).read_metrics(), "runs/x", Watch().facts, do_next=[step]).splitlines()
    assert lines[-2] == f"what next         {step}"
