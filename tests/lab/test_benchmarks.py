"""The scripts behind docs/lab_book.md still run: each on a policy of a few thousand parameters, with a few outputs."""

import importlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import oblrpo as oblrpo_package
from lab.benchmarks import growth, prior_coupling
from lab.benchmarks.crowd import Crowd, Job, Place, optimizer_of, together
from lab.benchmarks.real_scores import Drawn, Source, exponent, proxies
from oblrpo.estimators import Prior, SNRSchedule, baseline, moments
from oblrpo.estimators.rules import mean_kl
from oblrpo.policy import make_policy
from oblrpo.scores import Features
from oblrpo.settings import PolicyConfig, TrainConfig, load_recipe
from oblrpo.tasks.addition import AdditionTask
from oblrpo.trainer.task import task_of

ROOT = Path(__file__).parents[2]
COMPARISONS = sorted((ROOT / "lab" / "comparisons").glob("*.yaml"))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    torch.manual_seed(0)
    sizes = PolicyConfig(model_args={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}, device="cpu")
    folder = tmp_path_factory.mktemp("benchmarks") / "model"
    make_policy(sizes).save(folder)
    return folder


class ByFirst:
    """A random policy solves nothing: here the first character decides."""

    def __init__(self, task):
        self.task = task

    def __call__(self, problems, completions):
        G = len(completions) // len(problems)
        parities = [float(ord(text[:1] or " ") % 2) for text in completions]
        rewards_PG = [parities[start : start + G] for start in range(0, len(parities), G)]
        return rewards_PG, [[True] * G for _ in rewards_PG]


def printed_by(name, arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [name, *map(str, arguments)])
    importlib.import_module(f"lab.benchmarks.{name}").main()
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("variance", ["--prompts", 24, "--outputs", 8, "--groups", 4], "| oblr_shrunk | "),
        ("ledger", ["--batches", 3, "--prompts", 3, "--outputs", 2], "| oblr_shrunk | "),
        ("ledger", ["--batches", 3, "--prompts", 3, "--outputs", 2, "--projected"], "| oblr_shrunk | "),
        ("schedule", ["--prompts", 64, "--outputs", 2, "--sizes", 4], "| 4 | "),
    ],
)
def test_statistics_of_one_policy(name, sizes, said, model, monkeypatch, capsys):
    monkeypatch.setattr("lab.benchmarks.pool.Rewards", ByFirst)
    monkeypatch.setattr("lab.benchmarks.ledger.Rewards", ByFirst)
    printed = printed_by(name, [model, *sizes], monkeypatch, capsys)
    assert said in printed
    assert not [line for line in printed.splitlines() if " nan" in line]


def test_the_coupling_of_prompts_by_the_prior(monkeypatch, capsys):
    printed = printed_by("prior_coupling", ["--sizes", 2, 3, "--runs", 6, "--steps", 3], monkeypatch, capsys)
    assert {row[: len("| 2 | later |")] for row in printed.splitlines()} >= {"| 2 | first |", "| 3 | later |"}
    assert "nan" not in printed


def test_the_noise_scale_in_other_ways(monkeypatch, capsys):
    """The command itself stops where gns-pytorch and we differ on whether there is a figure at all."""
    pytest.importorskip("gns_pytorch", reason="gns-pytorch is of the extra `dev`")
    sizes = ["--batches", 3, "--prompts", 16, "--outputs", 2, "--window", 1]
    printed = printed_by("noise_scale", sizes, monkeypatch, capsys)
    apart = re.search(r"at most (\S+) apart", printed)
    assert float(apart[1]) < 1e-3
    assert "| micro-batches of 8 prompts | " in printed
    assert not [line for line in printed.splitlines() if " nan" in line]


@pytest.mark.parametrize("past_only", [False, True])
def test_the_priors_of_many_runs_are_those_of_each(past_only):
    many, one = prior_coupling.Priors(2, past_only), Prior(past_only=past_only)
    generator = torch.Generator().manual_seed(0)
    for _ in range(4):
        rewards_RPG = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
        norm2_RPG = torch.rand(2, 3, 4, generator=generator, dtype=torch.float64)
        expected_PG = baseline("oblr_shrunk", rewards_RPG[1], norm2_PG=norm2_RPG[1], prior=one)
        torch.testing.assert_close(many.baselines(rewards_RPG, norm2_RPG, past_only)[1], expected_PG)
        many.next_step(rewards_RPG, norm2_RPG)
        one.observe(rewards_RPG[1], norm2_RPG[1])
        one.next_step()


def test_what_hybrids_cost(monkeypatch, capsys):
    from lab.benchmarks import hybrids

    monkeypatch.setattr(hybrids, "WIDER", {})
    printed = printed_by("hybrids", ["lfm2", "--rounds", 1, "--shapes", "4x8"], monkeypatch, capsys)
    assert re.search(r"\| lfm2 \| 0\.0 M \| Conv1d \| [\d.]+ \([\d.]+ to [\d.]+\) \|", printed)


def test_score_norms_of_a_recipe(model, monkeypatch, capsys):
    monkeypatch.setattr("lab.benchmarks.real_scores.Rewards", ByFirst)
    arguments = [model, "--recipe", "demo", "--batches", 3, "--prompts", 6]
    printed = printed_by("real_scores", arguments, monkeypatch, capsys)
    for said in ("a = ", "| calibrated | ", "| rloo | 1.000 (1.000 to 1.000) |", "| oblr_shrunk | "):
        assert said in printed
    assert not [line for line in printed.splitlines() if " nan" in line]


def test_scores_come_back_in_the_order_of_their_outputs(model, monkeypatch):
    monkeypatch.setattr("lab.benchmarks.real_scores.Rewards", ByFirst)
    config = load_recipe("demo", TrainConfig())
    whole, parts = (
        Source(str(model), replace(config, rollout=replace(config.rollout, tokens_per_micro_batch=tokens))).draw(1)
        for tokens in (0, 500)
    )
    torch.testing.assert_close(parts.norm2_S, whole.norm2_S)
    for name, values_S in vars(whole.features).items():
        torch.testing.assert_close(getattr(parts.features, name), values_S)


def test_the_exponent_of_norms_that_grow_with_the_square_of_length():
    length_S = torch.tensor([1.0, 2, 4, 8, 3, 3])
    ones_S = torch.ones(6)
    norm2_S = length_S**2 * torch.tensor([5.0, 5, 7, 7, 1, 1])  # a scale of each group's own
    drawn = Drawn(None, Features(length_S, ones_S, ones_S, ones_S), norm2_S)
    assert exponent([drawn], 2).startswith("a = 2.00 +- 0.00 over 2 prompts")


def test_score_norms_of_outputs_of_one_length(capsys):
    """No exponent, and nothing that a proxy by length could agree with."""
    ones_S, norm2_S = torch.ones(6), torch.tensor([1.0, 2, 3, 4, 5, 6])
    drawn = Drawn(None, Features(4 * ones_S, norm2_S**2, ones_S, ones_S), norm2_S)
    assert exponent([drawn], 2).startswith("Outputs of a prompt hardly differ")
    proxies([drawn, drawn], 2, drawn)
    printed = capsys.readouterr().out
    assert "| length |  | 0.22 +- 0.00 |" in printed  # ln(2), ln(4/3) and ln(6/5), halved, root mean square
    assert "| logit | 1.00 +- 0.00 | 0.22 +- 0.00 |" in printed


def test_the_exactness_of_two_families(monkeypatch, capsys):
    from lab.benchmarks import exactness

    chosen = {name: exactness.FAMILIES[name] for name in ("gemma2-tied", "olmo-untied-clipped")}
    monkeypatch.setattr(exactness, "FAMILIES", chosen)
    threads = torch.get_num_threads()
    printed = printed_by("exactness", [], monkeypatch, capsys)
    torch.set_num_threads(threads)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in printed.splitlines()[2:]]
    assert [row[0] for row in rows] == list(chosen)
    for _, *errors in rows:
        single, double = ([float(error) for error in part] for part in (errors[:3], errors[3:]))
        assert 1e-9 < max(single) < 1e-4  # one of two group norms may agree to the bit on some processors
        assert max(double) < 1e-12


def test_the_agreement_of_proxies_over_finished_runs(tmp_path, monkeypatch, capsys):
    """Steps 1 to 30; the first is left out of all averages, and so is a step without a value."""
    for seed, value in enumerate((0.2, 0.4)):
        run = tmp_path / f"seed_{seed}"
        run.mkdir()
        (run / "report.html").touch()
        keys = [f"score_norm2/agreement_{name}" for name in ("length", "length16", "logit", "calibrated")]
        lines = [{"step": n} | dict.fromkeys(keys, value if n < 21 else value + 0.3) for n in range(31)]
        lines[1] |= dict.fromkeys(keys, 9.0)
        lines[5][keys[0]] = None
        lines[6][keys[0]] = value + 0.18
        (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    printed = printed_by("proxies", ["--folder", tmp_path, "--seeds", 2], monkeypatch, capsys)
    assert "| 0 | 2 - 20 | 0.210 | 0.200 | 0.200 | 0.200 |" in printed  # 18 values of `length`, one of them 0.38
    assert "| 1 | all from 2 | 0.514 | 0.503 | 0.503 | 0.503 |" in printed
    assert "| 1 | last 20 | 0.550 | 0.550 | 0.550 | 0.550 |" in printed


def clock_rows(seconds, accuracies, every=10):
    return [
        {"step": n * every, "samples": n * every * 256, "seconds": n * seconds, "cpu_seconds": n * seconds / 2}
        | {"accuracy": accuracy}
        for n, accuracy in enumerate(accuracies)
    ]


def test_the_comparison_with_trl_reads_finished_runs(tmp_path, monkeypatch, capsys):
    from lab.benchmarks import against_trl

    for name, seconds, accuracies in [("trl-grpo", 8.0, [0.2, 0.3, 0.4]), ("grpo", 4.0, [0.2, 0.5, 0.6])]:
        for seed in range(2):
            folder = tmp_path / f"{name}_{seed}"
            folder.mkdir()
            (folder / "clock.json").write_text(json.dumps(clock_rows(seconds, accuracies)))
    (tmp_path / "rloo_0").mkdir()
    (tmp_path / "rloo_0" / "clock.json").write_text(json.dumps(clock_rows(4.0, [0.2, 0.5])))  # stopped halfway
    settings = ["--folder", tmp_path, "--seeds", 2, "--steps", 20, "--seconds", 6, 10, "--only-report"]
    printed = printed_by("against_trl", settings, monkeypatch, capsys)
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


def test_the_comparison_with_trl_gives_every_contender_its_rates(tmp_path, monkeypatch, capsys):
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
    printed = printed_by("against_trl", words, monkeypatch, capsys)
    assert "| trl-default | 1.250 | 1.000 | 0.400 | 1.000 | 2.5 |" in printed  # 8 s for 10 steps, half of CPU time
    assert "| rloo | 2.500 | 2.000 | 0.200 | 2.000 | 2.5 |" in printed
    for line in (
        "trl-default at 1e-05 | 0.200 | 0.400",
        "rloo at 1e-06 | 0.200 | 0.500",
        "oblrpo_shrunk | 0.200 | 0.700",
    ):
        assert f"| {line} |" in printed


def test_runs_beside_trl_are_started_with_what_was_said(tmp_path, monkeypatch, capsys):
    from lab.benchmarks import against_trl

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
    printed = printed_by("against_trl", words, monkeypatch, capsys)
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
    printed_by("against_trl", words, monkeypatch, capsys)
    assert len(calls) == 2  # runs that are there are not repeated


def test_after_the_search_a_contender_runs_at_its_best_rate(tmp_path, monkeypatch, capsys):
    from lab.benchmarks import against_trl

    calls = []

    def run(command, **_):
        folder = Path(command[5])
        calls.append(folder.name)
        folder.mkdir()
        last = 0.5 if "3e-06" in folder.name else 0.3
        (folder / "clock.json").write_text(json.dumps(clock_rows(1.0, [0.2, last])))

    monkeypatch.setattr(against_trl.subprocess, "run", run)
    words = ["--folder", tmp_path, "--seeds", 3, "--search-seeds", 1, "--steps", 10, "--contenders", "rloo", "grpo"]
    printed_by("against_trl", [*words, "--rates", "1e-6", "3e-6", "--model", "some"], monkeypatch, capsys)
    assert calls[:4] == ["rloo_1e-06_0", "rloo_3e-06_0", "grpo_1e-06_0", "grpo_3e-06_0"]
    assert calls[4:] == ["grpo_3e-06_1", "rloo_3e-06_1", "rloo_3e-06_2", "grpo_3e-06_2"]


def test_curves_of_a_comparison(tmp_path, monkeypatch, capsys):
    """Two seeds of 4 prompts x 2; evaluation in steps 0, 2 and 4, whose time does not count."""
    for seed, last in enumerate((0.5, 0.7, 0.9)):
        run = tmp_path / "runs" / "rloo" / "lr_1e-06" / f"seed_{seed}"
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("steps: 4\nprompts_per_step: 4\nnum_generations: 2\n")
        rows = [{"step": n, "step_time": 10.0 if n % 2 else 90.0} for n in range(1, 4 if seed == 2 else 5)]
        rows = [{"step": 0, "eval/accuracy": 0.1}, *rows]
        for row in rows:
            if row["step"] in {2, 4}:
                row["eval/accuracy"] = 0.3 if row["step"] == 2 else last
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [tmp_path, "--csv", tmp_path / "kept.csv", "--seconds", 10, 40]
    printed = printed_by("curves", words, monkeypatch, capsys)
    assert "| rloo | 1e-06 | 2 | 0.100 | 0.300 | 0.600 |" in printed  # the third run is not finished
    assert "| rloo | 1e-06 | 2 | 0.200 | 0.600 |" in printed
    assert printed_by("curves", words[1:], monkeypatch, capsys) == printed


def test_the_page_of_training_on_what_pulls(tmp_path, monkeypatch, capsys):
    """TRL's twice as slow as RLOO, thrice in the second half; the best accuracy is 0.5, 80 % of it 0.4."""
    ours = clock_rows(4.0, [0.2, 0.3, 0.5])
    theirs = clock_rows(8.0, [0.2, 0.3, 0.4])
    theirs[2]["cpu_seconds"] = theirs[1]["cpu_seconds"] + 3 * (ours[2]["cpu_seconds"] - ours[1]["cpu_seconds"])
    for place, rows in [("rloo_0.0004", ours), ("rloo_0.001", clock_rows(4.0, [0.2, 0.2, 0.2])),
                        ("trl-grpo_0.0004", theirs), ("shrunk-optimal", ours)]:  # fmt: skip
        (tmp_path / f"{place}_0").mkdir()
        (tmp_path / f"{place}_0" / "clock.json").write_text(json.dumps(rows))
    words = ["--folder", tmp_path, "--seeds", 1, "--steps", 20, "--rate", "4e-4", "1e-3", "--only-report"]
    printed = printed_by("selection", words, monkeypatch, capsys)
    assert "| rloo | 0.200 | 2.500 | 3.000 | 0.500 | 0.325 | 3.000 | 1.000 | 0.300 |" in printed
    assert "| trl-grpo | 0.500 | 1.000 | 1.000 | 0.400 | 0.300 | 10.000 | 3.333 | 1.000 |" in printed
    assert "CPU s to accuracy 0.400" in printed
    assert "| shrunk-optimal | " in printed
    assert "oblrpo_shrunk" not in printed  # it has no runs


def test_the_page_of_single_steps(tmp_path, monkeypatch, capsys):
    lines = ["seed,contender,seconds,trained,predicted,measured,of_gradient,by_draws"]
    for seed in range(3):
        lines += [f'{seed},"rloo, all",0.6,1.0,,,,', f'{seed},"rloo, exact skip",0.3,0.25,,,,']
        lines += [f'{seed},"shrunk, compute-optimal",0.2,0.4,0.1,0.08,0.05,0.06', f"{seed},TRL's GRPO,0.5,1.0,,,,"]
    (tmp_path / "kept.csv").write_text("\n".join(lines) + "\n")
    printed = printed_by("selection_steps", ["--only-report", "--csv", tmp_path / "kept.csv"], monkeypatch, capsys)
    assert "| rloo, exact skip | 0.250 +- 0.000 | 0.300 +- 0.000 | 2.000 +- 0.000 | 1.667 +- 0.000 |" in printed
    assert "| shrunk, compute-optimal | 0.100 +- 0.000 | 0.080 +- 0.000 | 0.050 +- 0.000 | 0.060 +- 0.000 |" in printed


def test_the_page_of_prompts(tmp_path, monkeypatch, capsys):
    """Dynamic sampling takes twice the completions: after equally many it is halfway through."""
    lines = ["algorithm,variant,seed,step,completions,cpu_seconds,accuracy,reward,noise"]
    for seed in range(3):
        for variant, times, last in (("epochs", 1, 0.5), ("dynamic", 2, 0.8)):
            rows = [(0, 0, 0.0, 0.2), (10, 100 * times, 4.0 * times, 0.4), (20, 200 * times, 8.0 * times, last)]
            lines += [f"rloo,{variant},{seed},{a},{b},{c},{d},0.5,3.0" for a, b, c, d in rows]
    (tmp_path / "kept.csv").write_text("\n".join(lines) + "\n")
    printed = printed_by("prompt_sampling", ["--only-report", "--csv", tmp_path / "kept.csv"], monkeypatch, capsys)
    zero = "0.000 +- 0.000"
    assert f"| rloo | epochs | 0.500 +- 0.000 | 0.500 +- 0.000 | {zero} | 0.500 +- 0.000 | {zero} | 10.000" in printed
    assert "| rloo | dynamic | 0.800 +- 0.000 | 0.400 +- 0.000 | -0.100 +- 0.000 | 0.400" in printed


def test_a_recipe_without_a_model_beside_trl(tmp_path, monkeypatch, capsys):
    file = tmp_path / "own.yaml"
    file.write_text("task: path\n")
    with pytest.raises(SystemExit) as stopped:
        printed_by("against_trl", ["--recipe", file, "--contenders", "grpo"], monkeypatch, capsys)
    assert stopped.value.code == 2
    assert "names no model; give one with --model." in capsys.readouterr().err


def trl_config(model, tmp_path, settings, *words):
    from lab.benchmarks import trl_run

    (tmp_path / "own.yaml").write_text(settings)
    flags = ["--recipe", str(tmp_path / "own.yaml"), *words]
    arguments = trl_run.parser().parse_args(["trl-grpo", str(model), str(tmp_path), *flags])
    return trl_run.config_of(arguments)


def test_trl_is_given_the_recipes_prompts_and_rewards(model, tmp_path):
    from lab.benchmarks import trl_run

    text = "task: addition\nprompts_per_step: 3\nnum_generations: 2\nmax_completion_length: 5\n"
    config = trl_config(model, tmp_path, text, "--rate", "2e-6", "--seed", "4")
    assert (config.optim.learning_rate, config.run.seed, config.rollout.prompts_per_step) == (2e-6, 4, 3)
    lessons = trl_run.Lessons(config, make_policy(config.policy))
    asked = [problem for step in (1, 2) for problem in task_of(config).train_batch(step, 3)]
    assert lessons.draw({"row": [2, 3]}) == {"prompt": [asked[2].prompt, asked[3].prompt], "row": [2, 3]}
    completions = [asked[3].answer, "nothing", "nothing", "x=" + asked[1].answer]
    assert lessons.reward(prompts=[], completions=completions, row=[3, 3, 1, 1]) == [1.0, 0.0, 0.0, 1.0]


def test_masked_rewards_are_none_for_trl(model, tmp_path):
    from lab.benchmarks import trl_run

    config = trl_config(model, tmp_path, "task: addition\nnum_generations: 2\n")
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
def test_what_trl_would_do_otherwise_is_refused(settings, said, model, tmp_path):
    from lab.benchmarks import trl_run
    from oblrpo.errors import InputError

    config = trl_config(model, tmp_path, settings)
    with pytest.raises(InputError, match=said):
        trl_run.check("trl-rloo", config)
    trl_run.check("rloo", config)


def test_the_comparison_with_trl_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    from lab.benchmarks import against_trl

    monkeypatch.setattr(against_trl, "_is_there", lambda name: False)
    with pytest.raises(SystemExit) as stopped:
        printed_by("against_trl", ["--folder", tmp_path / "new"], monkeypatch, capsys)
    assert stopped.value.code == 2
    assert "pip install 'trl" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_run_of_ours_beside_trl(model, tmp_path, monkeypatch, capsys):
    from lab.benchmarks import trl_run
    from oblrpo.report import console
    from oblrpo.trainer import loop

    monkeypatch.setattr(loop, "heldout_accuracy", loop.heldout_accuracy)  # put back what the run replaces
    monkeypatch.setattr(console.Progress, "step", console.Progress.step)
    sizes = ["--steps", "2", "--every", "1", "--eval-prompts", "4", "--prompts", "8", "--rate", "1e-5"]
    monkeypatch.setattr("sys.argv", ["trl_run", "rloo", str(model), str(tmp_path / "run"), *sizes])
    trl_run.main()
    rows = json.loads((tmp_path / "run" / "clock.json").read_text())
    assert [row["samples"] for row in rows] == [0, 32, 64]
    assert all(row["peak_mb"] is None or row["peak_mb"] > 100 for row in rows)
    assert "AdamW at 1e-05" in capsys.readouterr().out
    assert 0 <= rows[0]["seconds"] < rows[1]["seconds"] < rows[2]["seconds"]


def test_the_clock_stands_still_while_accuracy_is_measured(monkeypatch):
    from types import SimpleNamespace

    from lab.benchmarks import trl_run

    hands = [0.0, 0.0]
    monkeypatch.setattr(trl_run, "_now", lambda: list(hands))
    clock = trl_run.Clock(64)

    def evaluate():
        hands[:] = [hands[0] + 100, hands[1] + 50]
        return SimpleNamespace(value=0.5)

    for step in range(3):
        clock.aside(evaluate)()
        clock.after(step)
        hands[:] = [hands[0] + 2, hands[1] + 1]
    assert [(row["seconds"], row["cpu_seconds"]) for row in clock.rows] == [(0, 0), (2, 1), (4, 2)]


def test_runs_are_trained_once_and_kept_in_a_csv(tmp_path, monkeypatch, capsys):
    from lab.benchmarks import runs

    small = {"warm_start_steps": 1, "model_args": {"hidden_size": 16, "num_hidden_layers": 1}}
    monkeypatch.setitem(runs.STARTS, "path", small)
    file = tmp_path / "runs.csv"
    line = "path,64x4,oblr_shrunk,1,0.1000,0.2000,0.3000"
    file.write_text(f"task,split,baseline,seed,accuracy before,after,reward of the last 20 steps\n{line}\n")
    words = ["--folder", tmp_path, "--tasks", "path", "--baselines", "oblr", "--seeds", 1, "--steps", 1, "--csv", file]
    printed = printed_by("splits", [*words, "--processes", 1], monkeypatch, capsys)
    assert printed.startswith("path 64x4 oblr 0 ")
    kept, made = file.read_text().splitlines()[1:]
    assert kept == line
    assert made.startswith("path,64x4,oblr,0,0.")
    monkeypatch.setattr(runs, "start", None)  # nothing is left to train
    assert "path 64x4" not in printed_by("splits", words, monkeypatch, capsys)


def test_a_failed_run_is_named(tmp_path):
    from lab.benchmarks.runs import train_all

    runs = {("one",): (tmp_path / "one", {"steps": 1, "task_args": {"nodes": -1}})}
    with pytest.raises(RuntimeError, match=r"one: .*; its log: .*one\.log"):
        train_all(runs, 2)


def write_lines(file, head, lines):
    file.write_text("\n".join([head, *lines]) + "\n")


def test_tables_of_splits(tmp_path, monkeypatch, capsys):
    lines = [f"path,64x4,oblr_shrunk,{s},0.1,{0.5 + s / 10:.1f},0.6" for s in range(3)]
    lines += [f"path,{split},rloo,{s},0.1,0.5,0.{3 + s}" for s in range(2) for split in ("64x4", "32x8")]
    file = tmp_path / "runs.csv"
    write_lines(file, "task,split,baseline,seed,accuracy before,after,reward of the last 20 steps", lines)
    words = ["--only-report", "--csv", file, "--tasks", "path", "--seeds", 3, "--baselines", "oblr_shrunk", "rloo"]
    printed = printed_by("splits", words, monkeypatch, capsys)
    assert "path (0.100 before)" in printed
    assert "| oblr_shrunk |  | 0.600 +- 0.248 |  |" in printed  # 0.5, 0.6, 0.7: 4.303 * 0.1 / sqrt(3)
    assert "| rloo |  | 0.350 (2) | 0.350 (2) |" in printed
    assert "| rloo |  | 0.250 | 0.250 |" in printed  # 0.6 - (0.3, 0.4), seed by seed
    assert "| rloo |  | 0.250 |  |" in printed  # of the same split


def test_completions_are_pooled_over_comparisons(tmp_path, monkeypatch, capsys):
    """Three seeds of 64 completions a step; a rate that two seeds tried is not the best one's."""
    columns = "variant,learning_rate,seed,steps,completions,completions_to_target"
    reached = {
        "rloo": (400, 800, "not reached"), "half": (200, 400, 1), "begins": (200, 64, 100), "never": (100, "", 100),
    }  # fmt: skip
    lines = [f"{name},0.1,{seed},10,640,{value}" for name, three in reached.items() for seed, value in enumerate(three)]
    files = [tmp_path / "one.csv", tmp_path / "two.csv"]
    for file in files:
        write_lines(file, columns, [*lines, "half,0.2,0,10,640,100", "half,0.2,1,10,640,100"])
    printed = printed_by("pooled", files, monkeypatch, capsys)
    assert "| half | 0.50 (0.50 to 0.50) | 4 of 4 |" in printed
    assert "| begins |  | 2 of 4 |" in printed
    assert "| never |  | 2 of 4 |" in printed


@pytest.mark.parametrize("spec", COMPARISONS, ids=lambda path: path.stem)
def test_the_comparisons_of_the_results_page_can_be_run(spec, tmp_path, oblrpo, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = []
    if spec.stem.startswith("smollm2"):  # a small model in the place of the real one, which writes more tokens
        policy = make_policy(PolicyConfig(model_args={"hidden_size": 16, "num_hidden_layers": 1}))
        policy.tokenizer.chat_template = "{{ messages[0].content }}="
        policy.save(Path("models/smollm2-135m-instruct"))
        more = ["--set", "{tokens_per_micro_batch: 4096}"]
    code, out, err = oblrpo("compare", spec, "--output", tmp_path / "out", "--dry-run", *more)
    assert code == 0, err
    assert "seed 0" in out


def test_the_shipped_demonstrations_are_what_the_command_writes(monkeypatch, capsys):
    command = re.search(r"--task-args '(.*?)'", importlib.import_module("lab.benchmarks.demonstrations").__doc__)[1]
    printed = printed_by("demonstrations", ["--task-args", command, "--rows", 400, "--noise", 0.1], monkeypatch, capsys)
    shipped = Path(oblrpo_package.__file__).parent / "recipes" / "sums.jsonl"
    assert printed == shipped.read_text()
    heldout = {problem.prompt for problem in AdditionTask(min_terms=2, max_terms=4, largest=20).heldout(200)}
    assert not heldout & {json.loads(line)["prompt"] for line in printed.splitlines()}


def test_sampling(model, monkeypatch, capsys):
    sizes = ["--rounds", 1, "--prompts", 2, "--generations", 2, "--max-completion-length", 4]
    printed = printed_by("sampling", ["--model", model, *sizes], monkeypatch, capsys)
    assert printed.count("| oblrpo | ") == printed.count("| `generate` as TRL calls it | ") == 2


def test_whole_steps_by_samplers(model, tmp_path, monkeypatch, capsys):
    words = ["--model", model, "--steps", 2, "--prompts-per-step", 2, "--max-completion-length", 2, "--eval-prompts", 2]
    arguments = [tmp_path, "--seeds", 1, "--samplers", "transformers", "--", *words]
    first = printed_by("sampler_steps", arguments, monkeypatch, capsys).splitlines()[-1]
    assert re.match(r"\| transformers, 1 x 2 steps \| 0\.\d\d \| .* \| \d\.\d{3} \(2\) \|$", first)
    assert printed_by("sampler_steps", arguments, monkeypatch, capsys).splitlines()[-1] == first


def test_memory(model, monkeypatch, capsys):
    sizes = ["--here", "--tokens", 0, "--prompts", 2, "--generations", 2, "--prompt", 4, "--completion", 5]
    printed = printed_by("memory", ["--model", model, *sizes], monkeypatch, capsys)
    found = json.loads(printed)
    assert 0 < found["activations"] < found["foretold"] < 10 * found["peak"]


def test_rules_on_small_policies(tmp_path, monkeypatch, capsys):
    """Every run is made once; a rule stands over the best fixed rate of its point."""
    module = importlib.import_module("lab.benchmarks.rate_rules")
    words = ["", "--csv", str(tmp_path / "runs.csv"), "--processes", "1", "--seeds", "1", "--worlds", "graded"]
    words += ["--completions", "320", "--prompts", "4", "--starts", "1e-2"]
    monkeypatch.setattr(
        "sys.argv",
        [*words, "--rules", "off:rate=0.01", "off:rate=0.1", "auto", "blind", "auto:kl=0.5"],
    )
    module.main()
    first = capsys.readouterr().out
    rewards = {
        line.split(",")[0]: float(line.split(",")[-1]) for line in (tmp_path / "runs.csv").read_text().split()[1:6]
    }
    assert rewards["off:rate=0.1"] > rewards["off:rate=0.01"]
    assert f"| best fixed rate | | {rewards['off:rate=0.1']:.3f} at 0.1 |" in first
    assert f"| auto | 1e-2 | {rewards['auto'] / rewards['off:rate=0.1']:.3f} |" in first
    less = (rewards["auto"] - rewards["blind"]) / rewards["off:rate=0.1"]
    assert f"| blind | 1e-2 | {rewards['blind'] / rewards['off:rate=0.1']:.3f} | {less:.3f} |" in first
    monkeypatch.setattr(module, "run", None)
    module.main()
    assert capsys.readouterr().out == first


@pytest.mark.parametrize("name", ["sparse", "graded", "long-graded"])
def test_the_gradient_of_the_small_policies_is_that_of_their_expected_reward(name):
    module = importlib.import_module("lab.benchmarks.rate_rules")
    world = module.World(name, seed=3)
    schedule = module.SNRSchedule(torch.optim.SGD([world.weights], lr=0.0), "off")
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
    module = importlib.import_module("lab.benchmarks.rate_rules")
    world = module.World("graded", seed=0)
    schedule = module.SNRSchedule(torch.optim.SGD([world.weights], lr=3.0), "off")
    felt = []
    schedule.confine = lambda change: felt.append(mean_kl(change()))
    with torch.no_grad():
        before_QTV = world.logps(world.features_QF)
        world.step(4096, schedule)
        after_QTV = world.logps(world.features_QF)
    exact = float((before_QTV.exp() * (before_QTV - after_QTV)).sum((1, 2)).mean())
    assert felt == [pytest.approx(exact, rel=0.05)]


def test_long_runs_under_schedules_that_know_the_noise_and_that_do_not(tmp_path, monkeypatch, capsys):
    """Rates are chosen on the first seeds and reported on the others; what is in the CSV is not run again."""
    module = importlib.import_module("lab.benchmarks.convergence")
    monkeypatch.setattr(module, "RATES", {"AdamW": (0.01, 0.1)})
    words = ["", "--csv", str(tmp_path / "runs.csv"), "--worlds", "graded", "--prompts", "4", "--steps", "40"]
    monkeypatch.setattr("sys.argv", [*words, "--optimizers", "AdamW", "--seeds", "3", "--tuning-seeds", "1"])
    module.main()
    first = capsys.readouterr().out
    found = module.read(tmp_path / "runs.csv")
    ends = {(place.seed, name): rewards[1] for (place, name), rewards in found.items()}
    best = max(("fixed:rate=0.01", "fixed:rate=0.1"), key=lambda name: ends[0, name])
    assert f"{ends[1, best] / 2 + ends[2, best] / 2:.3f}" in next(x for x in first.splitlines() if f"| {best} |" in x)
    assert {len(line.split("|")) for line in first.splitlines() if "rate=" in line or "auto" in line} == {10}
    monkeypatch.setattr(module, "run", None)
    module.main()
    assert capsys.readouterr().out == first


def test_long_runs_of_a_task(tmp_path, monkeypatch, capsys):
    """The table has what the CSV has; every key is a run that can be told apart."""
    module = importlib.import_module("lab.benchmarks.convergence")
    rows = (
        "task,contender,rate,seed,after 1250,after 2500,after 5000,after 10000\npath,debiased,0.003,0,0.1,0.2,0.3,0.4\n"
    )
    (tmp_path / "path.csv").write_text(rows)
    printed = printed_by("convergence", ["--task", "path", "--folder", tmp_path, "--only-report"], monkeypatch, capsys)
    assert printed.splitlines()[2:] == ["| debiased | 0.003 | 0.100 | 0.200 | 0.300 | 0.400 |"]
    keys = module.task_keys("path")
    assert len(keys) == len(set(keys)) == 8


def test_the_course_of_theorem_4s_factor(monkeypatch, capsys):
    words = ["--world", "graded", "--rate", 30, "--steps", 32, "--seeds", 0]
    printed = printed_by("convergence_factors", words, monkeypatch, capsys)
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


def test_a_power_law_has_its_exponent():
    line = {float(size): 3 * size**1.5 for size in (10, 20, 40, 80)}
    assert growth.exponent(line) == pytest.approx(1.5)
    line[10.0] = 1e6  # the smallest size has no say
    assert growth.exponent(line) == pytest.approx(1.5)


def test_growth_is_measured_in_whole_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(growth, "keep_freed", lambda: None)
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in growth.rows(300)))
    found = growth.measure("oblrpo", "rows", 300, str(file), str(tmp_path / "run"))
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(growth.STEPS + 1))
    assert 0 < steps[1]["completions/mean_length"] <= growth.SMALL.tokens
    assert found["seconds"] > 0
    assert found["parameters"] == sum(p.numel() for p in growth.model_of(growth.SMALL).parameters())


def test_growth_reports_what_is_in_its_file(tmp_path, capsys):
    line = "completions,{size},{who},0,9,{seconds},{peak}"
    rows = [
        line.format(size=size, who=who, seconds=times * size, peak=times * size**2)
        for size in (8, 16, 32) for who, times in (("oblrpo", 1), ("TRL", 3))
    ]  # fmt: skip
    file = tmp_path / "growth.csv"
    file.write_text("\n".join([",".join(growth.COLUMNS), *rows]))
    found = growth.read(file)
    growth.report(found)
    printed = capsys.readouterr().out
    assert "| oblrpo, CPU seconds | 8 | 16 | 32 | 1.00 |" in printed
    assert "| TRL, peak, GB | 192 | 768 | 3.07e+03 | 2.00 |" in printed
    assert "| TRL's CPU seconds over ours | 3.00 | 3.00 | 3.00 | |" in printed
    growth.draw(found, tmp_path / "growth.svg")
    assert "completions" in (tmp_path / "growth.svg").read_text()


def test_a_cosine_shortens_the_steps_of_the_measured_rate():
    """The first step is the same with and without it; later ones are shorter."""
    crowd = importlib.import_module("lab.benchmarks.crowd")
    place = crowd.Place("sparse", "SGD", 4, 8, 0)
    plain, shorter = (crowd.run(crowd.Job(place, (name,)))[1] for name in ("auto", "auto" + crowd.COSINE))
    assert shorter[8] == plain[8]  # after an eighth of 8 steps
    assert shorter[1] != plain[1]
