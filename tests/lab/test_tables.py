"""Tables and data of the lab book, from runs and files whose figures are known."""

import json
import re
from pathlib import Path

import pytest

from lab.benchmarks import demonstrations, growth, runs
from lab.tasks.addition import AdditionTask
from oblrpo.policy import make_policy
from oblrpo.settings import PolicyConfig

ROOT = Path(__file__).parents[2]
COMPARISONS = sorted((ROOT / "lab" / "comparisons").glob("*.yaml"))


def write_lines(file, head, lines):
    file.write_text("\n".join([head, *lines]) + "\n")


def test_curves_of_a_comparison(tmp_path, printed_by):
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
    printed = printed_by("curves", words)
    assert "| rloo | 1e-06 | 2 | 0.100 | 0.300 | 0.600 |" in printed  # the third run is not finished
    assert "| rloo | 1e-06 | 2 | 0.200 | 0.600 |" in printed
    assert printed_by("curves", words[1:]) == printed


def test_the_page_of_prompts(tmp_path, printed_by):
    """Dynamic sampling takes twice the completions: after equally many it is halfway through."""
    lines = ["algorithm,variant,seed,step,completions,cpu_seconds,accuracy,reward,noise"]
    for seed in range(3):
        for variant, times, last in (("epochs", 1, 0.5), ("dynamic", 2, 0.8)):
            rows = [(0, 0, 0.0, 0.2), (10, 100 * times, 4.0 * times, 0.4), (20, 200 * times, 8.0 * times, last)]
            lines += [f"rloo,{variant},{seed},{a},{b},{c},{d},0.5,3.0" for a, b, c, d in rows]
    (tmp_path / "kept.csv").write_text("\n".join(lines) + "\n")
    printed = printed_by("prompt_sampling", ["--only-report", "--csv", tmp_path / "kept.csv"])
    zero = "0.000 +- 0.000"
    assert f"| rloo | epochs | 0.500 +- 0.000 | 0.500 +- 0.000 | {zero} | 0.500 +- 0.000 | {zero} | 10.000" in printed
    assert "| rloo | dynamic | 0.800 +- 0.000 | 0.400 +- 0.000 | -0.100 +- 0.000 | 0.400" in printed


def test_tables_of_splits(tmp_path, printed_by):
    lines = [f"path,64x4,oblr_shrunk,{s},0.1,{0.5 + s / 10:.1f},0.6" for s in range(3)]
    lines += [f"path,{split},rloo,{s},0.1,0.5,0.{3 + s}" for s in range(2) for split in ("64x4", "32x8")]
    file = tmp_path / "runs.csv"
    write_lines(file, "task,split,baseline,seed,accuracy before,after,reward of the last 20 steps", lines)
    words = ["--only-report", "--csv", file, "--tasks", "path", "--seeds", 3, "--baselines", "oblr_shrunk", "rloo"]
    printed = printed_by("splits", words)
    assert "path (0.100 before)" in printed
    assert "| oblr_shrunk |  | 0.600 +- 0.248 |  |" in printed  # 0.5, 0.6, 0.7: 4.303 * 0.1 / sqrt(3)
    assert "| rloo |  | 0.350 (2) | 0.350 (2) |" in printed
    assert "| rloo |  | 0.250 | 0.250 |" in printed  # 0.6 - (0.3, 0.4), seed by seed
    assert "| rloo |  | 0.250 |  |" in printed  # of the same split


def test_runs_are_trained_once_and_kept_in_a_csv(tmp_path, monkeypatch, printed_by):
    small = {"warm_start_steps": 1, "model_args": {"hidden_size": 16, "num_hidden_layers": 1}}
    monkeypatch.setitem(runs.STARTS, "path", small)
    file = tmp_path / "runs.csv"
    line = "path,64x4,oblr_shrunk,1,0.1000,0.2000,0.3000"
    file.write_text(f"task,split,baseline,seed,accuracy before,after,reward of the last 20 steps\n{line}\n")
    words = ["--folder", tmp_path, "--tasks", "path", "--baselines", "oblr", "--seeds", 1, "--steps", 1, "--csv", file]
    printed = printed_by("splits", [*words, "--processes", 1])
    assert printed.startswith("path 64x4 oblr 0 ")
    kept, made = file.read_text().splitlines()[1:]
    assert kept == line
    assert made.startswith("path,64x4,oblr,0,0.")
    monkeypatch.setattr(runs, "start", None)  # nothing is left to train
    assert "path 64x4" not in printed_by("splits", words)


def test_a_failed_run_is_named(tmp_path):
    planned = {("one",): (tmp_path / "one", {"steps": 1, "task_args": {"nodes": -1}})}
    with pytest.raises(RuntimeError, match=r"one: .*; its log: .*one\.log"):
        runs.train_all(planned, 2)


def test_completions_are_pooled_over_comparisons(tmp_path, printed_by):
    """Three seeds of 64 completions a step; a rate that two seeds tried is not the best one's."""
    columns = "variant,learning_rate,seed,steps,completions,completions_to_target"
    reached = {
        "rloo": (400, 800, "not reached"), "half": (200, 400, 1), "begins": (200, 64, 100), "never": (100, "", 100),
    }  # fmt: skip
    lines = [f"{name},0.1,{seed},10,640,{value}" for name, three in reached.items() for seed, value in enumerate(three)]
    files = [tmp_path / "one.csv", tmp_path / "two.csv"]
    for file in files:
        write_lines(file, columns, [*lines, "half,0.2,0,10,640,100", "half,0.2,1,10,640,100"])
    printed = printed_by("pooled", files)
    assert "| half | 0.50 (0.50 to 0.50) | 4 of 4 |" in printed
    assert "| begins |  | 2 of 4 |" in printed
    assert "| never |  | 2 of 4 |" in printed


@pytest.mark.parametrize("spec", COMPARISONS, ids=lambda path: path.stem)
def test_the_comparisons_of_the_results_page_can_be_run(spec, tmp_path, oblrpo, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lab").symlink_to(ROOT / "lab")  # where its recipes and tasks are
    more = []
    if spec.stem.startswith("smollm2"):  # a small model in the place of the real one, which writes more tokens
        policy = make_policy(PolicyConfig(model_args={"hidden_size": 16, "num_hidden_layers": 1}))
        policy.tokenizer.chat_template = "{{ messages[0].content }}="
        policy.save(Path("models/smollm2-135m-instruct"))
        more = ["--set", "{tokens_per_micro_batch: 4096}"]
    code, out, err = oblrpo("compare", spec, "--output", tmp_path / "out", "--dry-run", *more)
    assert code == 0, err
    assert "seed 0" in out


def test_the_shipped_demonstrations_are_what_the_command_writes(printed_by):
    command = re.search(r"--task-args '(.*?)'", demonstrations.__doc__)[1]
    printed = printed_by("demonstrations", ["--task-args", command, "--rows", 400, "--noise", 0.1])
    shipped = ROOT / "lab" / "recipes" / "sums.jsonl"
    assert printed == shipped.read_text()
    heldout = {problem.prompt for problem in AdditionTask(min_terms=2, max_terms=4, largest=20).heldout(200)}
    assert not heldout & {json.loads(line)["prompt"] for line in printed.splitlines()}


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
