"""`oblrpo.load`: a run from its folder is what `oblrpo.train` has returned, and evaluates on the rows that it kept."""

import json
import math
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import numpy
import pytest
from matplotlib import pyplot

import oblrpo
from oblrpo.errors import InputError
from oblrpo.runs import RunFolder
from tests.door.conftest import ROWS, letters, loaded, metrics_of, write_rows

TRL_RUN = Path(__file__).parents[1] / "report" / "trl_run"


@pytest.fixture(autouse=True)
def without_windows():
    pyplot.switch_backend("Agg")
    yield
    pyplot.close("all")


def figures(result):
    return {key: value for key, value in result.items() if key != "settings"}


def test_a_run_is_the_same_after_it_was_loaded(train, tmp_path, monkeypatch):
    run = train(temperature=0.7)
    monkeypatch.chdir(tmp_path)
    again = oblrpo.load("run")
    assert type(again) is type(run)
    assert metrics_of(again) == metrics_of(run)
    assert (again.output, again.report, str(again)) == (run.output, run.report, str(run))
    assert str(run).startswith("Run('run'), 4 steps\n")
    assert again.samples() == run.samples() == run.samples(4) != run.samples(3)
    assert again.samples(held_out=True) == run.samples(4, held_out=True)
    assert str(again.diagnose()) == str(run.diagnose()) == str(oblrpo.diagnose(again))
    weights = run.policy.model.state_dict()
    assert {name: weight.tolist() for name, weight in again.policy.model.state_dict().items()} == {
        name: weight.tolist() for name, weight in weights.items()
    }
    assert again.policy is again.policy
    assert again.export("shared").joinpath("README.md").is_file()


def test_runs_of_python_rows_are_evaluated_by_what_they_kept(train, tmp_path):
    run = train(temperature=0.7)
    held = run.evaluate(progress=False)
    again = oblrpo.load(tmp_path / "run")
    loaded_again = again.evaluate(reward=letters, device="cpu", progress=False)
    assert figures(loaded_again) == figures(held)
    by_name = oblrpo.evaluate(tmp_path / "run", reward=letters, device="cpu", progress=False)
    assert figures(by_name) == figures(held)
    assert oblrpo.evaluate(again, reward=letters, progress=False) == loaded_again
    assert again.evaluate(rewards="numeric", progress=False)["rewards"] == ["numeric"]
    again.policy.model.get_input_embeddings().weight.data.zero_()  # the policy as it is now, once it is there
    assert again.evaluate(reward=letters, progress=False)["avg@k"] != held["avg@k"]
    gone = r"rewards is 'python:letters', .* which is not kept; give it again from Python \(reward=\.\.\. of"
    for call in (again.evaluate, lambda **more: oblrpo.evaluate(tmp_path / "run", **more)):
        with pytest.raises(InputError, match=gone):
            call(progress=False)
    moved = tmp_path / "elsewhere" / "moved"
    moved.parent.mkdir()
    shutil.move(tmp_path / "run", moved)
    assert figures(oblrpo.load(moved).evaluate(reward=letters, progress=False)) == figures(held)
    (moved / "heldout_rows.jsonl").unlink()  # as runs before 0.4 have left none
    with pytest.raises(InputError, match=r"data is 'python:60 rows, .* from Python"):
        oblrpo.load(moved).evaluate(reward=letters, progress=False)
    assert oblrpo.load(moved).evaluate(ROWS[:3], letters, progress=False)["problems"] == 3


def test_rows_without_an_answer_are_kept_so(train, tmp_path):
    train(data=[{"prompt": row["prompt"]} for row in ROWS], steps=0)
    assert {*json.loads((tmp_path / "run" / "heldout_rows.jsonl").read_text().splitlines()[0])} == {"prompt"}
    with pytest.raises(InputError, match=r"heldout_rows\.jsonl line 1 has no column 'answer'"):
        oblrpo.load(tmp_path / "run").evaluate(reward="numeric", progress=False)


def test_the_command_line_evaluates_what_a_run_of_python_kept(train, tmp_path, command_line, monkeypatch):
    train(steps=0)
    monkeypatch.chdir(tmp_path)
    command = ["evaluate", "run", "--device", "cpu", "--json"]
    code, out, err = command_line(*command, "--rewards", "length")
    assert code == 0, err
    assert json.loads(out)["results"][0]["problems"] == 5
    monkeypatch.setattr("oblrpo.cli.evaluate._load", lambda command: pytest.fail("refused before a policy is loaded"))
    code, _, err = command_line(*command)
    assert code == 2
    assert "rewards is 'python:letters', an object of the Python program" in err


def test_what_a_reward_was_given_is_kept(train, tmp_path, capsys):
    """Messages, a column of another name, a template's question, numbers of numpy, NaN; but no object, said once."""
    model, tokenizer = loaded()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    of_row = {}

    def watch(prompts, completions, level, unit, gap, tags, **columns):
        for asked, *given in zip(prompts, level, unit, gap, tags, strict=True):
            of_row.setdefault(str(asked), []).append([*given[:2], math.isnan(given[2]), list(given[3])])
        return [float(len(said[0]["content"])) for said in completions]

    rows = [
        {
            "asked": [{"role": "user", "content": row["prompt"]}], "solution": 3, "level": numpy.int64(row["level"]),
            "unit": {"of": ["m", None]}, "gap": math.nan, "tags": ("ä", 1.5), "day": date(2024, 1, 1), "by": {1: 2},
        }
        for row in ROWS
    ]  # fmt: skip
    names = {"prompt_column": "asked", "answer_column": "solution"}
    train(model=(model, tokenizer), data=rows, reward=watch, steps=0, progress=True, **names)
    note = "cannot hold what is in 'day' (date), 'by' (dict): a reward that reads it cannot evaluate this run"
    assert note in capsys.readouterr().out
    begun = dict(of_row)
    of_row.clear()
    again = oblrpo.load(tmp_path / "run").evaluate(reward=watch, progress=False)
    assert again["problems"] == len(of_row) == len(begun) == 5
    assert of_row == begun


def test_kept_rows_have_the_question_without_its_template(train, tmp_path):
    train(prompt_template="Q: {prompt}?", steps=0)
    kept = (tmp_path / "run" / "heldout_rows.jsonl").read_text().splitlines()
    assert all(json.loads(line) in ROWS for line in kept)
    assert len(kept) == 5
    held = oblrpo.load(tmp_path / "run").evaluate(reward=letters, progress=False)
    assert held["settings"]["first_prompt"] == f"Q: {json.loads(kept[0])['prompt']}?"


def test_files_that_have_gone_or_changed_are_not_missed(train, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl")
    run = train(data=data, reward="length", where={"level": [0, 1]}, steps=1)
    held = run.evaluate(progress=False)
    write_rows(data, [{"prompt": "another", "answer": "1", "level": 0}] * 9)
    assert figures(oblrpo.load(tmp_path / "run").evaluate(progress=False)) == figures(held)
    data.unlink()
    assert figures(oblrpo.load(tmp_path / "run").evaluate(progress=False)) == figures(held)


def test_a_run_that_goes_on_keeps_what_it_is_then_measured_on(train, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl")
    train(data=data, steps=1)
    rows = [row | {"prompt": f"{row['prompt']} now"} for row in ROWS]
    write_rows(data, rows)
    train(data=data, steps=2, resume=True, accept_changed=True)
    kept = [json.loads(line) for line in (tmp_path / "run" / "heldout_rows.jsonl").read_text().splitlines()]
    assert all(row in rows for row in kept)
    assert [row["step"] for row in oblrpo.load(tmp_path / "run").metrics] == [0, 1, 2]


def test_no_torch_before_the_policy_is_asked_for(train, tmp_path):
    train(steps=2, eval_steps=1)
    code = (
        "import sys, oblrpo; run = oblrpo.load(sys.argv[1]); run.metrics; run.to_pandas(); run.samples(); print(run); "
        "run.samples(held_out=True); run.plot('reward'); run._repr_html_(); run.diagnose(); run.report; "
        "assert 'torch' not in sys.modules; run.policy; assert 'torch' in sys.modules"
    )
    ran = subprocess.run([sys.executable, "-c", code, tmp_path / "run"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "the same held-out prompts before and after" in ran.stdout


def test_a_run_that_failed_or_is_not_done_says_so(train, tmp_path):
    calls = []

    def breaks(completions, **columns):
        calls.append(1)
        if len(calls) == 4:  # two are of the held-out prompts before training
            raise RuntimeError("no more")
        return letters(completions)

    with pytest.raises(InputError, match="raised RuntimeError: no more"):
        train(reward=breaks, eval_steps=0)
    run = oblrpo.load(tmp_path / "run")
    state, failed, *_ = str(run).splitlines()
    assert state.endswith(", step 1 of 4")
    assert failed.startswith("failed            reward 'python:breaks' raised RuntimeError: no more")
    assert "<td>failed<td>reward &#39;python:breaks&#39;" in run._repr_html_()
    assert [row["step"] for row in run.metrics] == [0, 1]
    shutil.copy(run.output / "completions" / "step_1.jsonl", run.output / "completions" / "step_2.jsonl")  # cut short
    assert len(run.samples()) == 12
    assert {row["prompt"] for row in run.samples()} <= {row["prompt"] for row in ROWS}
    with pytest.raises(InputError, match="no completions of step 2; the newest are of step 1"):
        run.samples(2)
    assert run.evaluate(reward=letters, progress=False)["problems"] == 5


def test_before_the_first_step(train, tmp_path, monkeypatch):
    def breaks(completions, **columns):
        raise RuntimeError("never")

    with pytest.raises(InputError, match="raised RuntimeError: never"):
        train(reward=breaks)
    monkeypatch.undo()  # what keeps the other tests from drawing pages
    run = oblrpo.load(tmp_path / "run")
    assert str(run).endswith(", no step is finished yet")
    assert "no step is finished yet" in run._repr_html_()
    assert run.metrics == []
    assert len(run.to_pandas()) == 0
    for call, words in {
        run.samples: "has no completions.",
        run.plot: "has not finished a step yet",
        lambda: run.policy: "holds no checkpoint",
        lambda: run.report: "with a finished step",
        run.export: "with a finished step",
    }.items():
        with pytest.raises(InputError, match=words):
            call()


def test_the_page_is_of_the_newest_step(train, monkeypatch):
    run = oblrpo.load(train(steps=1).output)
    monkeypatch.undo()  # what keeps the other tests from drawing pages
    assert not (run.output / "report.html").exists()  # of a run that was killed
    first = run.report.stat().st_mtime_ns
    assert run.report.stat().st_mtime_ns == first
    RunFolder(run.output).write_metrics(run.metrics[-1] | {"step": 2})
    assert run.report.stat().st_mtime_ns > first
    assert "finished" in run.report.read_text()


def test_what_is_no_run_is_refused_in_a_sentence(train, tmp_path):
    run = train(steps=0, eval_prompts=2)
    run.export()
    (tmp_path / "file").write_text("")
    for given, words in {
        3: "run is a int; give the folder of a run",
        str(tmp_path / "rum"): "rum is not there; give the folder of a run. Did you mean 'run'",
        str(tmp_path / "file"): "file is not a folder; give the folder of a run",
        str(tmp_path): r"no run of oblrpo train \(no config.yaml\); it has runs in it: run\.",
        str(run.output / "checkpoints" / "step_0"): "it is a part of the run .*/run, which is to be loaded",
        str(run.output / "export"): "it is a part of the run .*/run, which is to be loaded",
        TRL_RUN: "oblrpo.diagnose and `oblrpo report` read what TRL has left there",
    }.items():
        with pytest.raises(InputError, match=words):
            oblrpo.load(given)
    shutil.move(run.output / "export", tmp_path / "shared")
    with pytest.raises(InputError, match=r"it holds a model, which oblrpo\.evaluate takes"):
        oblrpo.load(tmp_path / "shared")
    (run.output / "config.yaml").write_text("steps: many\n")
    with pytest.raises(InputError, match=r"config\.yaml: steps is 'many'"):
        oblrpo.load(run.output)


def test_metrics_as_a_table(train, monkeypatch):
    run = train()
    table = run.to_pandas()
    assert table.index.name == "step"
    assert table["reward"].dropna().tolist() == [row["reward"] for row in run.metrics[1:]]
    assert table["eval/accuracy"].notna().tolist() == [True, False, True, False, True]
    monkeypatch.setattr("oblrpo.api.find_spec", lambda name: None)
    with pytest.raises(InputError, match="a table needs pandas; install it with: pip install pandas"):
        run.to_pandas()


def test_metrics_on_axes(train):
    run = train(eval_steps=1)
    rows, axes = run.metrics, run.plot()
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == (
        "Reward and held-out accuracy", "step", "mean reward",
    )  # fmt: skip
    named = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    assert list(named) == ["reward", "eval/accuracy"]
    assert named["eval/accuracy"].get_ydata().tolist() == [row["eval/accuracy"] for row in rows]
    band = axes.collections[1].get_paths()[0].vertices[:, 1]
    assert max(band) == pytest.approx(
        max(row["eval/accuracy"] + 1.96 * row["eval/accuracy_stderr"] for row in rows), 1e-4
    )
    for step in (5, 6):
        RunFolder(run.output).write_metrics(rows[-1] | {"step": step, "n_snr": 2.0, "snr_low": 0.25, "snr_high": 0.75})
    for key, high in (("snr", 0.75), ("n_snr", 3.0)):  # 4 prompts a step
        alone = run.plot(key)
        assert alone.get_title() in (key, "Signal to noise of the batch gradient")
        assert alone.collections[0].get_paths()[0].vertices[:, 1].max() == high
    entropy = run.plot("entropy", "time/sampling")
    assert (entropy.get_title(), entropy.get_ylabel()) == ("entropy, time/sampling", "")
    assert run.plot("reward", ax=axes) is axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["reward", "eval/accuracy", "reward, run"]
    assert len({line.get_color() for line in axes.get_lines() if not line.get_label().startswith("_")}) == 3
    assert axes.get_title() == "Reward and held-out accuracy"
    for names, words in {
        ("rewards",): r"no figures of the metric 'rewards'. Did you mean 'reward'\? It has: step, ",
        ("warnings",): "no figures of the metric 'warnings'",
    }.items():
        with pytest.raises(InputError, match=words):
            run.plot(*names)
    masked = train(
        output=run.output.parent / "masked", steps=1, on_reward_error="mask",
        reward=lambda completions, **_: [None] * len(completions),
    )  # fmt: skip
    with pytest.raises(InputError, match="masked has no figures of the metric 'reward'"):
        masked.plot()


def test_the_same_prompts_before_and_after(train):
    """In lines of text the first three, each on its line; in a notebook eight, with the curve; HTML is only text."""

    def shouts(completions, **columns):
        return [float(len(text)) for text in completions]

    rows = [row | {"prompt": f"<b>{'x' * 100}</b>\n{row['prompt']}"} for row in ROWS]
    run = train(data=rows, reward=shouts, eval_prompts=12, learning_rate=0.0, algorithm="rloo")
    first, last = (run.samples(step, held_out=True)[::2] for step in (0, 4))
    lines = str(run).splitlines()
    shown = lines[lines.index("the same held-out prompts before and after, with their rewards:") + 1 :]
    assert len(shown) == 9
    for number, (before, after) in enumerate(zip(first[:3], last[:3], strict=True)):
        prompt, *said = shown[3 * number : 3 * number + 3]
        assert prompt.strip().endswith(repr(before["prompt"][-30:])[1:])
        assert "x ... x" in prompt
        for line, each in zip(said, (before, after), strict=True):
            assert line.split()[1] == f"{each['reward']:.3g}"
            assert len(line) < 100
    page = run._repr_html_()
    assert page.count("<tr><td><") == 8
    assert page.count("<svg") == 1
    assert "&lt;b&gt;" in page
    assert "<b>x" not in page
