"""The small policies on which rules of the rate are compared: their gradients, their movement, and the tables."""

import pytest
import torch

from lab.benchmarks import convergence, rate_rules
from lab.benchmarks.crowd import COSINE, Crowd, Job, Place, optimizer_of, run, together
from lab.benchmarks.rate_rules import World
from oblrpo.estimators import SNRSchedule, moments
from oblrpo.estimators.measuring import mean_kl


def test_rules_on_small_policies(tmp_path, monkeypatch, capsys):
    """Every run is made once; a rule stands over the best fixed rate of its point."""
    words = ["", "--csv", str(tmp_path / "runs.csv"), "--processes", "1", "--seeds", "1", "--worlds", "graded"]
    words += ["--completions", "320", "--prompts", "4", "--starts", "1e-2"]
    words += ["--rules", "off:rate=0.01", "off:rate=0.1", "auto", "blind", "auto:kl=0.5"]
    monkeypatch.setattr("sys.argv", words)
    rate_rules.main()
    first = capsys.readouterr().out
    rewards = {
        line.split(",")[0]: float(line.split(",")[-1]) for line in (tmp_path / "runs.csv").read_text().split()[1:6]
    }
    assert rewards["off:rate=0.1"] > rewards["off:rate=0.01"]
    assert f"| best fixed rate | | {rewards['off:rate=0.1']:.3f} at 0.1 |" in first
    assert f"| auto | 1e-2 | {rewards['auto'] / rewards['off:rate=0.1']:.3f} |" in first
    less = (rewards["auto"] - rewards["blind"]) / rewards["off:rate=0.1"]
    assert f"| blind | 1e-2 | {rewards['blind'] / rewards['off:rate=0.1']:.3f} | {less:.3f} |" in first
    monkeypatch.setattr(rate_rules, "run", None)
    rate_rules.main()
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("name", ["sparse", "graded", "long-graded"])
def test_the_gradient_of_the_small_policies_is_that_of_their_expected_reward(name):
    world = World(name, seed=3)
    schedule = SNRSchedule(torch.optim.SGD([world.weights], lr=0.0), "off")
    right_QT = world.logps(world.features_QF).gather(-1, world.answers_QT[..., None])[..., 0].exp()[:, :4]
    reward = (right_QT.prod(1) if name == "sparse" else right_QT.mean(1)).mean()
    assert float(reward.detach()) == pytest.approx(world.expected_reward())
    exact = torch.autograd.grad(reward, world.weights)[0]
    found = []
    for _ in range(200):
        world.step(64, schedule)
        found.append(-world.weights.grad)
    mean, error = torch.stack(found).mean(0), torch.stack(found).std(0) / 200**0.5
    assert float(((mean - exact) / (error + 1e-9)).square().mean()) == pytest.approx(1.0, abs=0.25)
    assert float(schedule.smoothed.signal2) == pytest.approx(float(exact.square().sum()), rel=0.5)


def test_the_movement_of_the_small_policies_is_their_kl():
    """Half the mean squared change of the outputs' log-probabilities, against the KL of all of them."""
    world = World("graded", seed=0)
    schedule = SNRSchedule(torch.optim.SGD([world.weights], lr=3.0), "off")
    felt = []
    schedule.limit_step = lambda change: felt.append(mean_kl(change()))
    with torch.no_grad():
        before_QTV = world.logps(world.features_QF)
        world.step(4096, schedule)
        after_QTV = world.logps(world.features_QF)
    exact = float((before_QTV.exp() * (before_QTV - after_QTV)).sum((1, 2)).mean())
    assert felt == [pytest.approx(exact, rel=0.05)]


def test_long_runs_under_schedules_that_know_the_noise_and_that_do_not(tmp_path, monkeypatch, capsys):
    """Rates are chosen on the first seeds and reported on the others; what is in the CSV is not run again."""
    monkeypatch.setattr(convergence, "RATES", {"AdamW": (0.01, 0.1)})
    words = ["", "--csv", str(tmp_path / "runs.csv"), "--worlds", "graded", "--prompts", "4", "--steps", "40"]
    monkeypatch.setattr("sys.argv", [*words, "--optimizers", "AdamW", "--seeds", "3", "--tuning-seeds", "1"])
    convergence.main()
    first = capsys.readouterr().out
    found = convergence.read(tmp_path / "runs.csv")
    ends = {(place.seed, name): rewards[1] for (place, name), rewards in found.items()}
    best = max(("fixed:rate=0.01", "fixed:rate=0.1"), key=lambda name: ends[0, name])
    assert f"{ends[1, best] / 2 + ends[2, best] / 2:.3f}" in next(x for x in first.splitlines() if f"| {best} |" in x)
    assert {len(line.split("|")) for line in first.splitlines() if "rate=" in line or "auto" in line} == {10}
    monkeypatch.setattr(convergence, "run", None)
    convergence.main()
    assert capsys.readouterr().out == first


def test_long_runs_of_a_task(tmp_path, printed_by):
    """The table has what the CSV has; every key is a run that can be told apart."""
    rows = (
        "task,contender,rate,seed,after 1250,after 2500,after 5000,after 10000\npath,debiased,0.003,0,0.1,0.2,0.3,0.4\n"
    )
    (tmp_path / "path.csv").write_text(rows)
    printed = printed_by("convergence", ["--task", "path", "--folder", tmp_path, "--only-report"])
    assert printed.splitlines()[2:] == ["| debiased | 0.003 | 0.100 | 0.200 | 0.300 | 0.400 |"]
    keys = convergence.task_keys("path")
    assert len(keys) == len(set(keys)) == 8


def test_the_course_of_theorem_4s_factor(printed_by):
    words = ["--world", "graded", "--rate", 30, "--steps", 32, "--seeds", 0]
    printed = printed_by("convergence_factors", words)
    rows = [[float(cell) for cell in line.split("|")[1:-1]] for line in printed.splitlines()[2:]]
    assert [row[0] for row in rows] == [2, 4, 8, 16, 32]
    assert all(0 < row[2] < 0.2 for row in rows)
    assert all(row[3] < row[6] for row in rows)


@pytest.mark.parametrize("name", ["sparse", "noisy"])
def test_the_gradient_of_a_crowd_is_that_of_its_expected_reward(name):
    crowd = Crowd(name, seed=3, K=2)
    right_KQT = crowd.logps(crowd.features_QF).gather(-1, crowd.answers_QT[None, ..., None].expand(2, -1, -1, 1)).exp()
    right_KQT = right_KQT[..., 0]
    reward_K = (right_KQT.prod(2) if name == "sparse" else right_KQT.mean(2)).mean(1)
    assert reward_K.tolist() == pytest.approx(crowd.expected_K().tolist())
    exact = torch.autograd.grad(reward_K.sum(), crowd.weights)[0][0]
    found = []
    for _ in range(200):
        norm2_KP, norm2_K, _ = crowd.ascend(64)
        assert torch.equal(crowd.weights.grad[0], crowd.weights.grad[1])
        found.append(-crowd.weights.grad[0])
    mean, error = torch.stack(found).mean(0), torch.stack(found).std(0) / 200**0.5
    assert float(((mean - exact) / (error + 1e-9)).square().mean()) == pytest.approx(1.0, abs=0.25)
    assert norm2_KP.shape == (2, 64)
    assert float(norm2_K[0]) == pytest.approx(float(found[-1].square().sum()))


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_crowd_goes_where_each_would_go_alone(optimizer):
    """Side by side at their own rates, with the factors that `SNRSchedule` gives a policy of its own."""
    contenders = ("fixed:rate=0.1", "debiased:rate=2")
    job = Job(Place("sparse", optimizer, 8, 30, seed=0), contenders)
    crowd = Crowd("sparse", 0, 2)
    step = together(crowd, job)
    for t in range(30):
        step(t)
    for k, (mode, rate) in enumerate([("off", 0.1), ("debiased", 2.0)]):
        one = Crowd("sparse", 0, 1)
        schedule = SNRSchedule(optimizer_of(optimizer, one.weights, rate), mode)
        for _ in range(30):
            norm2_KP, norm2_K, _ = one.ascend(8)
            schedule.step(moments(norm2_KP[0], norm2_K[0]))
            schedule.optimizer.step()
        torch.testing.assert_close(crowd.weights[k], one.weights[0], rtol=1e-4, atol=1e-5)


def test_the_movement_of_one_of_a_crowd_is_its_kl():
    crowd = Crowd("graded", seed=0, K=1)
    with torch.no_grad():
        before_KQTV = crowd.logps(crowd.features_QF)
        _, _, change_ST = crowd.ascend(4096)
        crowd.weights.sub_(3 * crowd.weights.grad)
        after_KQTV = crowd.logps(crowd.features_QF)
    exact = float((before_KQTV.exp() * (before_KQTV - after_KQTV)).sum((2, 3)).mean())
    assert mean_kl(change_ST()) == pytest.approx(exact, rel=0.05)


def test_a_cosine_shortens_the_steps_of_the_measured_rate():
    """The first step is the same with and without it; later ones are shorter."""
    place = Place("sparse", "SGD", 4, 8, 0)
    plain, shorter = (run(Job(place, (name,)))[1] for name in ("auto", "auto" + COSINE))
    assert shorter[8] == plain[8]  # after an eighth of 8 steps
    assert shorter[1] != plain[1]
