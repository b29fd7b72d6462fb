"""Figures by rewards: of a run in Python, of a checkpoint by name, and by `oblrpo evaluate --data`."""

import json
import math
import shutil

import pytest

import oblrpo
from oblrpo.errors import InputError
from oblrpo.evaluation.evaluate import batches_of, evaluate
from oblrpo.rewards import Rewards
from oblrpo.tasks import DataTask, Problem
from tests.door.conftest import ROWS, letters, loaded, write_rows

PROBLEMS = [Problem("p", "1"), Problem("q", "2")]


def scored(texts, reward, on_error="raise", size=16, ks=()):
    rewards = Rewards(DataTask("d", []), ["python:f"], on_error, functions={"python:f": reward})
    return evaluate(batches_of(PROBLEMS, texts, size), len(texts[0]), rewards, ks)


def numbers(completions, **columns):
    return [None if text == "-" else float(text) for text in completions]


def test_figures_in_closed_form():
    result = scored([["1", "0", "0", "1"], ["0", "0", "0", "1"]], numbers, ks=(1, 2)).figures()
    assert result["avg@k"]["value"] == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert result["avg@k"]["interval"] == pytest.approx([0.375 - 1.96 / 8, 0.375 + 1.96 / 8], abs=1e-4)
    assert {k: each["value"] for k, each in result["pass@k"].items()} == pytest.approx(
        {"1": 3 / 8, "2": ((1 - 1 / 6) + 1 / 2) / 2}
    )


def test_a_threshold_says_what_passes_and_intervals_of_any_reward_are_not_cut():
    texts = [["5", "-3"], ["9", "8"]]
    result = scored(texts, numbers, ks=(2,)).figures(8.5)
    assert result["pass@k"]["2"]["value"] == 1 / 2
    assert result["avg@k"]["value"] == pytest.approx((1 + 8.5) / 2)
    assert result["avg@k"]["interval"][1] > 8.5
    assert scored(texts, numbers).figures(-10.0)["pass@k"]["1"]["value"] == 1.0


def test_masked_completions_count_nowhere():
    result = scored([["1", "-"], ["-", "-"]], numbers, on_error="mask")
    assert result.figures()["avg@k"]["value"] == 1.0
    assert (result.masked, "pass@k" in result.figures()) == (3, False)
    with pytest.raises(InputError, match="all completions are masked"):
        scored([["-"], ["-"]], numbers, on_error="mask").figures()


def test_rewards_are_called_in_batches_with_their_own_columns():
    seen = []

    def watch(prompts, completions, answer, **columns):
        seen.append((prompts, completions, answer))
        return [0.0] * len(completions)

    scored([["a", "b"], ["c", "d"]], watch, size=1)
    assert seen == [(["p", "p"], ["a", "b"], ["1", "1"]), (["q", "q"], ["c", "d"], ["2", "2"])]


def test_a_run_evaluates_its_policy_on_its_held_out_problems_or_on_others(train, tmp_path):
    run = train(temperature=0.7)
    held = run.evaluate(progress=False)
    assert (held["problems"], held["samples"], held["data"]) == (5, 2, "heldout")  # as the run measures
    assert (held["settings"]["temperature"], held["settings"]["max_completion_length"]) == (0.7, 6)
    assert held["rewards"] == ["python:letters"]
    assert run.evaluate(progress=False) == held
    other = run.evaluate(ROWS[:3], "numeric", samples=4, seed=1, output=tmp_path / "kept", progress=False)
    assert (other["problems"], other["samples"], other["rewards"]) == (3, 4, ["numeric"])
    assert json.loads((tmp_path / "kept" / "data.result.json").read_text()) == other
    assert len((tmp_path / "kept" / "data.jsonl").read_text().splitlines()) == 12
    assert run.evaluate(ROWS[:3], rewards=[letters, "length"], k=2, progress=False)["pass@k"].keys() == {"2"}
    again = oblrpo.evaluate((run.policy.model, run.policy.tokenizer), ROWS[:3], letters, samples=2, progress=False,
                            max_completion_length=6, temperature=0.7)  # fmt: skip
    assert again["avg@k"] == run.evaluate(ROWS[:3], progress=False)["avg@k"]


def test_a_reward_that_reads_tokens_has_those_that_were_drawn_also_of_a_file(train, tmp_path):
    def tokens(completion_ids):
        return [float(len(ids)) for ids in completion_ids]

    run = train(reward=tokens, steps=1)
    assert run.metrics[1]["reward"] == run.metrics[1]["completions/mean_length"]
    for _ in range(2):  # drawn, and read
        found = run.evaluate(output=tmp_path / "kept", problems_per_batch=2, progress=False)
        assert found["avg@k"]["value"] == pytest.approx(found["mean_length"])
    run.evaluate(reward="length", output=tmp_path / "texts", progress=False)
    with pytest.raises(InputError, match="completion_ids'; it can be given answer, level, prompts, completions"):
        run.evaluate(output=tmp_path / "texts", progress=False)


def test_a_checkpoint_by_name_is_asked_as_its_run_asked(train, tmp_path):
    run = train(temperature=0.7)
    checkpoint = run.output / "checkpoints" / "step_4"
    by_name = oblrpo.evaluate(checkpoint, ROWS[:6], letters, device="cpu", progress=False)
    here = run.evaluate(ROWS[:6], progress=False)
    assert by_name["avg@k"] == here["avg@k"]
    assert by_name["settings"] == here["settings"] | {"model": str(checkpoint)}
    with pytest.raises(InputError, match="rewards is 'python:letters', an object of the Python program"):
        oblrpo.evaluate(checkpoint, ROWS[:6], progress=False)
    with pytest.raises(InputError, match="where has no effect because the problems are the held-out ones"):
        oblrpo.evaluate(checkpoint, reward=letters, where={"level": 1}, progress=False)
    assert oblrpo.evaluate(run.output, ROWS[:6], letters, device="cpu", progress=False) == by_name
    shutil.rmtree(run.output / "checkpoints")
    (run.output / "checkpoints").mkdir()
    with pytest.raises(InputError, match="holds no checkpoint; train with --save-steps"):
        oblrpo.evaluate(run.output, ROWS[:6], letters, progress=False)
    with pytest.raises(InputError, match="has no setting 'model'"):
        run.evaluate(model="another", progress=False)


def test_what_nobody_has_set_follows_k_and_the_context():
    given = {"data": ROWS[:2], "reward": letters, "progress": False}
    found = oblrpo.evaluate(loaded(max_position_embeddings=90), k=3, **given)
    assert (found["samples"], list(found["pass@k"])) == (3, ["3"])
    assert found["settings"]["max_completion_length"] == 90 - len("0 is")
    with pytest.raises(InputError, match="with completions of 2048 it does not fit the model's 90"):
        oblrpo.evaluate(loaded(max_position_embeddings=90), max_completion_length=2048, **given)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"smaples": 3}, "oblrpo.evaluate has no setting 'smaples'. Did you mean 'samples'"),
        ({"samples": "3"}, "samples is '3'"),
        ({"samples": 0}, "samples is 0"),
        ({"device": "cpu"}, "device has no effect"),
        ({"split": "test"}, "oblrpo.evaluate has no setting 'split'. Use data, such as owner/name"),
        ({"reward_seconds": 3.0}, "reward_seconds has no effect"),
        ({"k": [9], "samples": 1}, "k is 9"),
        ({"data": None}, "give data to evaluate on"),
        ({"model": None}, "there is no model to evaluate"),
        ({"model": "no/such/folder/here"}, "cannot load the model 'no/such/folder/here'"),
    ],
)
def test_mistakes(more, words):
    given = {"model": loaded(), "data": ROWS[:2], "reward": letters, "max_completion_length": 4, "progress": False}
    with pytest.raises(InputError, match=words):
        oblrpo.evaluate(**given | more)


@pytest.fixture
def checkpoint(train, tmp_path):
    """Of a run from files, with a template and another column, as `train --data` leaves it."""
    data = write_rows(tmp_path / "rows.jsonl", [row | {"q": row.pop("prompt")} for row in map(dict, ROWS)])
    (tmp_path / "mine.py").write_text("def words(completions, **columns):\n    return [1.0] * len(completions)\n")
    run = train(
        data=data, prompt_column="q", prompt_template="Q: {prompt}?", temperature=0.7, steps=1,
        reward=["numeric", f"{tmp_path}/mine.py:words@0.5"],
    )  # fmt: skip
    return run.output / "checkpoints" / "step_1"


def test_the_command_line_scores_what_train_data_trained(checkpoint, tmp_path, command_line):
    held = tmp_path / "test.jsonl"
    write_rows(held, [{"q": "1 and 1", "answer": 2, "level": 1}, {"q": "2 and 1", "answer": 3, "level": 2}])
    where = ["--device", "cpu", "--output", tmp_path / "out"]
    code, out, err = command_line("evaluate", checkpoint, "--data", held, "--json", *where)
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert (result["data"], result["problems"], result["samples"]) == ("test", 2, 2)
    assert result["settings"]["first_prompt"] == "Q: 1 and 1?"
    assert result["rewards"] == ["numeric", f"{tmp_path}/mine.py:words@0.5"]
    assert result["avg@k"]["value"] >= 0.5
    assert json.loads((tmp_path / "out" / "test.result.json").read_text()) == result
    code, out, err = command_line("evaluate", checkpoint, "--data", held, "--rewards", "length", *where)
    assert code == 0, err
    assert "rewards length, pass: a reward of at least 1" in out
    code, out, err = command_line(
        "evaluate", "--regrade", "--data", held, "--prompt-column", "q", "--rewards", f"{tmp_path}/mine.py:words",
        "--output", tmp_path / "out", "--json",
    )  # fmt: skip
    assert code == 0, err
    assert json.loads(out)["results"][0]["avg@k"]["value"] == 1.0
    code, out, err = command_line("evaluate", checkpoint, "--json", *where)  # the run's held-out problems
    assert code == 0, err
    assert json.loads(out)["results"][0]["problems"] == 5
    assert math.isfinite(json.loads(out)["results"][0]["avg@k"]["value"])
