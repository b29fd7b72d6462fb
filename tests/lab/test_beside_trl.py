"""Our runs and TRL's side by side: what is run, what the clock counts, and the tables."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from lab.benchmarks import against_trl, trl_run
from oblrpo.errors import InputError
from oblrpo.policy import make_policy
from oblrpo.report import console
from oblrpo.trainer import loop
from oblrpo.trainer.task import task_of

ROOT = Path(__file__).parents[2]


def clock_rows(seconds, accuracies, every=10):
    return [
        {"step": n * every, "samples": n * every * 256, "seconds": n * seconds, "cpu_seconds": n * seconds / 2}
        | {"accuracy": accuracy}
        for n, accuracy in enumerate(accuracies)
    ]


def test_the_comparison_with_trl_reads_finished_runs(tmp_path, printed_by):
    for name, seconds, accuracies in [("trl-grpo", 8.0, [0.2, 0.3, 0.4]), ("grpo", 4.0, [0.2, 0.5, 0.6])]:
        for seed in range(2):
            folder = tmp_path / f"{name}_{seed}"
            folder.mkdir()
            (folder / "clock.json").write_text(json.dumps(clock_rows(seconds, accuracies)))
    (tmp_path / "rloo_0").mkdir()
    (tmp_path / "rloo_0" / "clock.json").write_text(json.dumps(clock_rows(4.0, [0.2, 0.5])))  # stopped halfway
    settings = ["--folder", tmp_path, "--seeds", 2, "--steps", 20, "--seconds", 6, 10, "--only-report"]
    printed = printed_by("against_trl", settings)
    # 10 steps in 4 s against 10 in 8 s; half as much of CPU time
    assert "| grpo | 2.500 | 2.000 | 0.200 | 2.000 |" in printed
    assert "| grpo | 0.200 | 0.500 | 0.600 |" in printed
    assert "| trl-grpo | 0.275 | 0.325 | 16 |" in printed
    assert "| grpo | 0.550 |  | 8 |" in printed  # its runs are over after 8 s
    assert "rloo" not in printed.replace("trl-rloo", "")
    found = against_trl.read_csv(tmp_path / "none.csv")
    assert found == {}
    grpo, rloo = against_trl.Variant("grpo"), against_trl.Variant("rloo", "3e-06")
    kept = {(grpo, 0): clock_rows(4.0, [0.2, 0.5, 0.6]), (rloo, 7): clock_rows(8.0, [0.2])}
    against_trl.write_csv(tmp_path / "kept.csv", kept)
    assert against_trl.read_csv(tmp_path / "kept.csv") == kept
    published = against_trl.read_csv(ROOT / "docs" / "results" / "against_trl.csv")  # without rates and memory
    assert [row["step"] for row in published[grpo, 0]] == [0, 20, 40, 60]


def test_the_comparison_with_trl_gives_every_contender_its_rates(tmp_path, printed_by):
    """Two rates of TRL's and of ours, but not of the one that measures; throughput is that of all of them."""
    for place, seconds, last in [
        ("trl-default_1e-06_0", 6.0, 0.3), ("trl-default_1e-05_0", 10.0, 0.4),
        ("rloo_1e-06_0", 4.0, 0.5), ("rloo_1e-05_0", 4.0, 0.6), ("oblrpo_shrunk_0", 2.0, 0.7),
    ]:  # fmt: skip
        (tmp_path / place).mkdir()
        rows = [row | {"peak_mb": 2500.0} for row in clock_rows(seconds, [0.2, last])]
        (tmp_path / place / "clock.json").write_text(json.dumps(rows))
    names = ["--contenders", "trl-default", "rloo", "oblrpo_shrunk", "--trl-rates", "1e-6", "1e-5"]
    words = ["--folder", tmp_path, "--seeds", 1, "--steps", 10, *names, "--rates", "1e-6", "1e-5", "--only-report"]
    printed = printed_by("against_trl", words)
    assert "| trl-default | 1.250 | 1.000 | 0.400 | 1.000 | 2.5 |" in printed  # 8 s for 10 steps, half of CPU time
    assert "| rloo | 2.500 | 2.000 | 0.200 | 2.000 | 2.5 |" in printed
    for line in (
        "trl-default at 1e-05 | 0.200 | 0.400",
        "rloo at 1e-06 | 0.200 | 0.500",
        "oblrpo_shrunk | 0.200 | 0.700",
    ):
        assert f"| {line} |" in printed


def test_runs_beside_trl_are_started_with_what_was_said(tmp_path, monkeypatch, printed_by):
    calls = []

    def run(command, env, **_):
        calls.append([str(word) for word in command[3:]] + [env["OMP_NUM_THREADS"]])
        folder = Path(command[5])
        folder.mkdir()
        (folder / "clock.json").write_text(json.dumps(clock_rows(1.0, [0.2, 0.3])))

    monkeypatch.setattr(against_trl.subprocess, "run", run)
    monkeypatch.setattr(against_trl, "_is_there", lambda name: name != "trl")
    words = ["--folder", tmp_path / "new", "--seeds", 1, "--steps", 10, "--contenders", "grpo", "oblrpo_shrunk"]
    words += ["--rates", "3e-6", "--recipe", "addition.yaml", "--model", "some/folder", "--threads", 2]
    printed = printed_by("against_trl", words)
    assert [call[:3] for call in calls] == [
        [name, "some/folder", str(tmp_path / "new" / place)]
        for name, place in [("grpo", "grpo_3e-06_0"), ("oblrpo_shrunk", "oblrpo_shrunk_0")]
    ]
    first, second = (dict(zip(call[3:-1:2], call[4:-1:2], strict=True)) for call in calls)
    assert (first["--rate"], first["--recipe"], first["--threads"], calls[0][-1]) == (
        "3e-06",
        "addition.yaml",
        "2",
        "2",
    )
    assert "--rate" not in second
    assert "2 threads a process" in printed
    printed_by("against_trl", words)
    assert len(calls) == 2  # runs that are there are not repeated


def test_after_the_search_a_contender_runs_at_its_best_rate(tmp_path, monkeypatch, printed_by):
    calls = []

    def run(command, **_):
        folder = Path(command[5])
        calls.append(folder.name)
        folder.mkdir()
        last = 0.5 if "3e-06" in folder.name else 0.3
        (folder / "clock.json").write_text(json.dumps(clock_rows(1.0, [0.2, last])))

    monkeypatch.setattr(against_trl.subprocess, "run", run)
    words = ["--folder", tmp_path, "--seeds", 3, "--search-seeds", 1, "--steps", 10, "--contenders", "rloo", "grpo"]
    printed_by("against_trl", [*words, "--rates", "1e-6", "3e-6", "--model", "some"])
    assert calls[:4] == ["rloo_1e-06_0", "rloo_3e-06_0", "grpo_1e-06_0", "grpo_3e-06_0"]
    assert calls[4:] == ["grpo_3e-06_1", "rloo_3e-06_1", "rloo_3e-06_2", "grpo_3e-06_2"]


def trl_config(model, tmp_path, settings, *words):
    (tmp_path / "own.yaml").write_text(settings)
    flags = ["--recipe", str(tmp_path / "own.yaml"), *words]
    arguments = trl_run.parser().parse_args(["trl-grpo", str(model), str(tmp_path), *flags])
    return trl_run.config_of(arguments)


def test_trl_is_given_the_recipes_prompts_and_rewards(saved_model, tmp_path):
    text = "task: arithmetic\nprompts_per_step: 3\nnum_generations: 2\nmax_completion_length: 5\n"
    config = trl_config(saved_model, tmp_path, text, "--rate", "2e-6", "--seed", "4")
    assert (config.optim.learning_rate, config.run.seed, config.rollout.prompts_per_step) == (2e-6, 4, 3)
    lessons = trl_run.Lessons(config, make_policy(config.policy))
    asked = [problem for step in (1, 2) for problem in task_of(config).train_batch(step, 3)]
    assert lessons.draw({"row": [2, 3]}) == {"prompt": [asked[2].prompt, asked[3].prompt], "row": [2, 3]}
    completions = [asked[3].answer, "nothing", "nothing", asked[1].answer + "\nmore"]
    assert lessons.reward(prompts=[], completions=completions, row=[3, 3, 1, 1]) == [1.0, 0.0, 0.0, 1.0]


def test_masked_rewards_are_none_for_trl(saved_model, tmp_path):
    config = trl_config(saved_model, tmp_path, "task: arithmetic\nnum_generations: 2\n")
    lessons = trl_run.Lessons(config, make_policy(config.policy))
    lessons.rewards = lambda problems, completions: ([[0.5, 0.0], [0.0, 2.0]], [[True, False], [True, True]])
    assert lessons.reward(completions=["a", "b", "c", "d"], row=[0, 0, 1, 1]) == [0.5, None, 0.0, 2.0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("prompts_per_step: 6\nprompts_per_micro_batch: 4\n", "6 is no multiple of 4"),
        ("optimizer: SGD\n", "leave out optimizer"),
    ],
)
def test_what_trl_would_do_otherwise_is_refused(settings, said, saved_model, tmp_path):
    config = trl_config(saved_model, tmp_path, settings)
    with pytest.raises(InputError, match=said):
        trl_run.check("trl-rloo", config)
    trl_run.check("rloo", config)


def test_a_run_of_ours_beside_trl(saved_model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(loop, "heldout_accuracy", loop.heldout_accuracy)  # put back what the run replaces
    monkeypatch.setattr(console.Progress, "step", console.Progress.step)
    sizes = ["--steps", "2", "--every", "1", "--eval-prompts", "4", "--prompts", "8", "--rate", "1e-5"]
    monkeypatch.setattr("sys.argv", ["trl_run", "rloo", str(saved_model), str(tmp_path / "run"), *sizes])
    trl_run.main()
    rows = json.loads((tmp_path / "run" / "clock.json").read_text())
    assert [row["samples"] for row in rows] == [0, 32, 64]
    assert all(row["peak_mb"] is None or row["peak_mb"] > 100 for row in rows)
    assert "AdamW at 1e-05" in capsys.readouterr().out
    assert 0 <= rows[0]["seconds"] < rows[1]["seconds"] < rows[2]["seconds"]


def test_the_clock_stands_still_while_accuracy_is_measured(monkeypatch):
    hands = [0.0, 0.0]
    monkeypatch.setattr(trl_run, "_now", lambda: list(hands))
    clock = trl_run.Clock(64)

    def evaluate():
        hands[:] = [hands[0] + 100, hands[1] + 50]
        return SimpleNamespace(value=0.5), []

    for step in range(3):
        clock.aside(evaluate)()
        clock.after(step)
        hands[:] = [hands[0] + 2, hands[1] + 1]
    assert [(row["seconds"], row["cpu_seconds"]) for row in clock.rows] == [(0, 0), (2, 1), (4, 2)]
