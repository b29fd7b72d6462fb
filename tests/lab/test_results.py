"""The runs behind the claim: what is planned, what is kept of a run, and one that is really made."""

import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.benchmarks import turning
from lab.results import __main__ as results
from lab.results import pictures
from lab.results.book import LINES, Book, Run, lines_of
from lab.results.pace import SHARE, arrival, pace_report
from lab.results.plan import PARTS, Arm, Part
from lab.results.policies import SKILLS, recipe_of
from lab.results.tables import along, rates_chosen, report, reported
from lab.results.training import train_all
from lab.results.tried import TRIED, InSteps, Unguided
from oblrpo.estimators import Moments, SNRSchedule
from oblrpo.estimators.measured_rate import FIRST
from oblrpo.estimators.schedule import MEASURED_RATES
from oblrpo.settings import TrainConfig, load_recipe, with_settings
from oblrpo.tables.algorithms import SCHEDULES
from oblrpo.trainer.check import check
from oblrpo.trainer.task import task_of

TINY = Part(
    "tiny",
    policies=("a", "b"),
    sizes=((2, 4),),
    arms=(Arm("ours", {}, (1e-5, 1e-3)), Arm("theirs", {"algorithm": "rloo"}, (0.1, 0.2), searched=True)),
    seeds=(3, 4),
    search=(1, 2),
    completions=80,
)


def metrics(end, steps=48):
    rows = [{"step": 0, "eval/accuracy": 0.25}]
    rows += [{"step": n, "reward": n / steps, "cpu_time": 2.0, "step_kl": 0.5} for n in range(1, steps + 1)]
    rows[-1]["eval/accuracy"] = end
    return rows


def test_a_run_is_kept_as_a_few_lines():
    run = Run("a", 2, 4, "ours", "1e-05", 3)
    first, *lines = lines_of(run, metrics(0.75))
    assert (first.step, first.accuracy) == (0, 0.25)
    assert math.isnan(first.reward)
    assert len(lines) == LINES
    assert [line.step for line in lines] == list(range(2, 49, 2))
    assert lines[-1] == (48, 48 * 8, 96.0, 0.9896, 0.75, 0.0, 0.5)


def test_a_book_reads_what_it_has_written(tmp_path):
    book = Book(tmp_path / "new" / "tiny.csv")
    runs = [Run("a", 2, 4, "ours", "1e-05", seed) for seed in (3, 4)]
    for run, end in zip(runs, (0.5, 0.75), strict=True):
        book.add(run, metrics(end))
    again = Book(book.file)
    assert again.ends() == {runs[0]: 0.5, runs[1]: 0.75}
    assert again.runs[runs[0]][1:] == book.runs[runs[0]][1:]


def test_searched_arms_go_on_at_their_best_rate(tmp_path):
    """The rate is chosen on seeds that are not reported, at every place by itself."""
    book = Book(tmp_path / "tiny.csv")
    rounds = TINY.rounds(book)
    search = next(rounds)
    assert {run.arm for run, _ in search} == {"theirs"}
    assert {run.seed for run, _ in search} == {1, 2}
    for run, settings in search:
        assert (settings["steps"], settings["learning_rate"]) == (10, float(run.rate))
        good = {"a": "0.1", "b": "0.2"}[run.policy]
        book.add(run, metrics(0.9 if run.rate == good else 0.1))
    runs = [run for run, _ in next(rounds)]
    assert {(run.policy, run.rate) for run in runs if run.arm == "theirs"} == {("a", "0.1"), ("b", "0.2")}
    assert {run.rate for run in runs if run.arm == "ours"} == {"1e-05", "0.001"}
    assert {run.seed for run in runs} == {3, 4}
    for run in runs:
        book.add(run, metrics({"ours": 0.75, "theirs": 0.5}[run.arm]))
    text = report(TINY, book)
    assert "| theirs |  | 0.500 | 0.500 | 0.500 |" in text  # the seeds of the search are not in it
    assert "| theirs |  | 0.250 | 0.250 | 0.250 +- 0.000 |" in text
    assert "a, 2 x 4, theirs: 0.1" in rates_chosen(TINY, book)


def test_how_soon_a_reward_is_reached(tmp_path):
    """Ours rises by 1/24 a step in every run; of three of theirs one arrives."""
    book = Book(tmp_path / "tiny.csv")
    for run, _ in next(TINY.rounds(book)):
        book.add(run, metrics(0.9 if run.rate == "0.1" else 0.1))
    ours, theirs = Run("a", 2, 4, "ours", "1e-05", 3), Run("a", 2, 4, "theirs", "0.1", 3)
    for change, speed in (({}, 0.9), ({"policy": "b"}, 0.5), ({"seed": 4}, 0.0)):
        for run, slope in ((ours, 1.0), (theirs, speed)):
            rewards = [row | {"reward": slope * row["step"] / 24} for row in metrics(0.5, 24)]
            book.add(run._replace(**change), rewards)
    lines = book.runs[ours]
    assert arrival(lines, 0.5, "completions") == pytest.approx(13 * 8)  # the mean of steps 11 to 13 is that of 12
    assert arrival(lines, 11.75 / 24, "cpu_seconds") == pytest.approx(12.75 * 2)
    assert arrival(lines, 0.0, "completions") == 3 * 8
    assert arrival(lines, 1.1, "completions") == math.inf
    begun, best = (1 + 1 + 0.9 + 0.0) / 4 / 24, 23 / 24
    target = begun + SHARE * (best - begun)
    ratio = (target * 24 / 0.9 + 1) / (target * 24 + 1)
    assert along(TINY, book) == ""  # where accuracy was measured before and after alone
    text = pace_report(TINY, book)
    assert f"To a mean reward of {target:.3f} (a), " in text
    assert "| ours | 1e-05 |  |  | 3 of 3 |" in text
    assert f"| theirs |  | {ratio:.2f} | {ratio:.2f} | 1 of 3 |" in text


def test_a_part_without_a_search_may_say_how_soon_a_reward_is_reached(tmp_path):
    part = replace(TINY, arms=(Arm("ours", {}, (1e-5,)), Arm("theirs", {}, (0.1,))))
    book = Book(tmp_path / "tiny.csv")
    for seed in (3, 4):
        book.add(Run("a", 2, 4, "ours", "1e-05", seed), metrics(0.5))
        book.add(Run("a", 2, 4, "theirs", "0.1", seed), metrics(0.5))
    assert not any("To a mean reward" in table for table in results.report_of(part, book))
    tables = "\n".join(results.report_of(replace(part, paced=True), book))
    assert "| theirs | 0.1 | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) | 2 of 2 |" in tables


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_the_settings_of_a_part_are_those_of_a_run(part):
    for arm in part.arms:
        settings = {name: value for name, value in {**part.settings, **arm.settings}.items() if name != "rule"}
        check(with_settings(load_recipe("demo", TrainConfig()), settings, part.name))


def test_accuracies_on_the_way(tmp_path):
    book = Book(tmp_path / "tiny.csv")
    for seed, end in ((3, 0.5), (4, 0.7)):
        rows = metrics(end)
        rows[24]["eval/accuracy"] = 0.4
        book.add(Run("a", 2, 4, "ours", "1e-05", seed), rows)
    text = along(TINY, book)
    assert "| arm | rate | 0 | 192 | 384 | CPU s a step | seeds |" in text
    assert "| ours | 1e-05 | 0.250 | 0.400 | 0.600 | 2.0 | 2 |" in text


@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_no_run_is_planned_twice(part, tmp_path):
    search, runs = list(part.rounds(Searched(tmp_path / "none.csv")))
    planned = [run for run, _ in (*search, *runs)]
    assert planned
    assert len(planned) == len(set(planned))
    assert not {run.seed for run, _ in search} & {run.seed for run, _ in runs}


class Searched(Book):
    """A book in which every rate did equally well."""

    def ends(self, keep=None):
        return {Run("", 0, 0, "", "", 0): 0.5}


def test_a_run_is_made_and_noted(tmp_path):
    """With the rule before; its folder goes, and a second call makes nothing."""
    book, run = Book(tmp_path / "runs.csv"), Run("demo", 2, 2, "in-steps", "1e-05", 0)
    small = {"hidden_size": 16, "num_hidden_layers": 1}
    settings = {
        "model_args": small, "warm_start_steps": 0, "steps": 2, "prompts_per_step": 2, "num_generations": 2,
        "learning_rate": 1e-5, "eval_prompts": 4, "ledger_steps": 0, "rule": "in-steps",
    }  # fmt: skip
    for _ in range(2):
        train_all(book, {run: ("demo", settings)}, tmp_path / "runs", 1)
        assert [line.step for line in book.runs[run]] == [0, 1, 2]
        assert book.runs[run][-1].cpu_seconds > 0
        assert not (tmp_path / "runs" / run.place).exists()
    with pytest.raises(RuntimeError, match="its log"):
        train_all(book, {run._replace(seed=1): ("demo", {"learning_rate": -1.0})}, tmp_path / "runs", 1)


def test_rules_that_were_tried(monkeypatch):
    """The control of the slope sees none; the rule before counts updates."""
    for name, rule in TRIED.items():
        monkeypatch.setitem(MEASURED_RATES, name, rule)
        monkeypatch.setitem(SCHEDULES, name, SCHEDULES["auto"])
    parameter = torch.nn.Parameter(torch.zeros(2))
    for name, kind in (("unguided", Unguided), ("in-steps", InSteps)):
        schedule = SNRSchedule(torch.optim.SGD([parameter], lr=1.0), name)
        assert type(schedule.rule) is kind
        for sign in (1.0, -1.0) * 10:
            parameter.grad = torch.full((2,), sign)
            schedule.step(Moments(1.0, 1.0, 16))
            before = parameter.detach().clone()
            schedule.optimizer.step()
            schedule.limit_step(lambda before=before: 0.1 * (parameter.detach() - before)[None])
        assert schedule.target_kl == pytest.approx({"unguided": FIRST**2, "in-steps": 1 / (20 + 4)}[name])

    SNRSchedule(torch.optim.SGD([parameter], lr=1.0, momentum=0.99), "any-momentum")  # which auto refuses


def test_a_shared_book_gives_each_part_its_own(tmp_path):
    """Runs at other rates, which another part made of a searched arm, are not this part's."""
    book = Book(tmp_path / "tiny.csv")
    for run, _ in next(TINY.rounds(book)):
        book.add(run, metrics(0.9 if run.rate == "0.1" else 0.1))
    for rate, end in (("0.1", 0.5), ("0.2", 0.7), ("5", 0.8)):
        book.add(Run("a", 2, 4, "theirs", rate, 3), metrics(end))
    book.add(Run("a", 2, 4, "theirs", "0.1", 9), metrics(0.8))  # a seed of the other part
    assert [run.rate for run, _ in reported(TINY, book)["theirs", ""]] == ["0.1"]
    assert [run.seed for run, _ in reported(TINY, book)["theirs", ""]] == [3]


@pytest.mark.parametrize("name", ["learning", "rates"])
def test_pictures_are_of_the_runs_that_are_there(name):
    """The last point of the green curve is the mean that the table has."""
    label, part = (("default", "1e-06"), "smollm2") if name == "learning" else (("default", "1e-05"), "rates")
    runs = pictures.claimed(part)[label]
    line = next(line for line in pictures.PICTURES[name]().axes[0].lines if line.get_color() == pictures.OURS)
    if name == "rates":
        runs = [(run, lines) for run, lines in runs if run.policy == "addition-high" and run.prompts == 64]
    assert line.get_ydata()[-1] == pytest.approx(statistics.fmean(lines[-1].accuracy for _, lines in runs))


def test_the_window_shows_every_run():
    """Green dots are the ends of the default's runs, by the rate they begin with, and its line their means."""
    ends = {}
    for run, (*_, last) in Book(pictures.CLAIM / "smollm2.csv").runs.items():
        if run.arm == "default" and run.seed in PARTS["window"].seeds:
            ends.setdefault(float(run.rate), []).append(last.accuracy)
    green = [line for line in pictures.window().axes[0].lines if line.get_color() == pictures.OURS]
    means, dots = (dict(zip(line.get_xdata(), line.get_ydata(), strict=False)) for line in green)
    assert means == pytest.approx({rate: statistics.fmean(of) for rate, of in ends.items()})
    assert dots.keys() == ends.keys()
    assert len(green[1].get_xdata()) == sum(map(len, ends.values())) >= 8


def test_what_updates_would_gain_once_more(monkeypatch):
    """Plain gradient ascent on J = theta: an update of d promises d, and would gain it again."""
    seen = []
    monkeypatch.setitem(MEASURED_RATES, "auto", turning.watching(Unguided, seen))
    parameter = torch.nn.Parameter(torch.zeros(1))
    schedule = SNRSchedule(torch.optim.SGD([parameter], lr=0.5), "auto")
    for _ in range(17):
        parameter.grad = -torch.ones(1)
        schedule.step(Moments(1.0, 1.0, 16))
        before = parameter.detach().clone()
        schedule.optimizer.step()
        schedule.limit_step(lambda before=before: (parameter.detach() - before)[None])
        seen[-1]["moved"] = float(parameter.detach() - before)
    for update in seen[:-1]:
        assert update["promise"] == pytest.approx(update["moved"], rel=0.01)
        assert update["gain"] == pytest.approx(update["moved"], rel=0.01)
    lines = turning.table([{"reward": 0.5}] * 17, seen).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:4]] == ["| 1 to 3", "| 4 to 6"]
    assert lines[-1].startswith("| 16 to 17 | 0.500 |")
    assert lines[-1].endswith(" +- nan | 0.010 |")


def test_tables_compare_with_any_arm(monkeypatch, capsys):
    words = ["lab.results", "--only-report", "--parts", "few", "--first"]
    monkeypatch.setattr("sys.argv", [*words, "kl 0.005"])
    results.main()
    printed = capsys.readouterr().out
    assert "kl 0.005 from 1e-05 less each, seed by seed" in printed
    assert printed.index("| kl 0.005 |") < printed.index("| default |")
    monkeypatch.setattr("sys.argv", [*words, "kl"])
    with pytest.raises(SystemExit, match="2"):
        results.main()
    assert "'kl' is no arm of every part" in capsys.readouterr().err


@pytest.mark.parametrize("policy", sorted({policy for part in PARTS.values() for policy in part.policies}))
def test_every_policy_has_a_task_that_can_be_made(policy, tmp_path, monkeypatch):
    """By a recipe of the package or of the laboratory, whose tasks are named by their files."""
    monkeypatch.chdir(Path(__file__).parents[2])
    if policy in SKILLS:
        config = with_settings(load_recipe("demo", TrainConfig()), SKILLS[policy], policy)
    else:
        config = load_recipe(recipe_of(policy, 0, tmp_path)[0], TrainConfig())
    assert len(task_of(config).train_batch(1, 4)) == 4
