"""`oblrpo.train`: objects in, a run out, and everything of its folder as from the command line."""

import functools
import gc
import io
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import warnings

import matplotlib
import numpy
import pandas
import pytest
import torch
from datasets import Dataset
from rich.console import Console
from safetensors.torch import load_file
from transformers import Qwen3ForCausalLM
from transformers.utils import logging as bars

import oblrpo
from oblrpo.errors import InputError
from oblrpo.memory import resident_bytes
from oblrpo.policy import make_policy
from oblrpo.report import console
from oblrpo.rewards import Rewards
from oblrpo.rollout import engine
from oblrpo.settings import PolicyConfig, TrainConfig, adjustable, load_recipe, settings_in
from oblrpo.tasks import Problem
from tests.door.conftest import ROWS, SMALL, config_of, letters, loaded, metrics_of, write_rows


def test_objects_in_and_a_run_out(tmp_path, train):
    model, tokenizer = loaded()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    run = train(model=model, tokenizer=tokenizer, data=Dataset.from_list(ROWS))
    assert run.policy.model is model  # trained in place
    assert not model.training
    assert any(not torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    assert run.policy.tokenizer is tokenizer
    assert [row["step"] for row in run.metrics] == [0, 1, 2, 3, 4]
    assert len(pandas.DataFrame(run.metrics)["reward"].dropna()) == 4
    assert config_of(tmp_path / "run")[0] == "model: python:Qwen3ForCausalLM"
    assert config_of(tmp_path / "run")[1] == "python:letters"
    assert config_of(tmp_path / "run")[2].startswith("python:60 rows, sha256 ")
    assert str(run).startswith(f"Run({str(tmp_path / 'run')!r}), 4 steps\nreward            0.")
    assert "\nheld-out accuracy 0." in str(run)


def test_the_same_run_as_by_names(tmp_path, train):
    """Objects change nothing: a folder, a file and a path of the same things give the same metrics."""
    model, tokenizer = loaded()
    make = tmp_path / "model"
    model.save_pretrained(make)
    tokenizer.save_pretrained(make)
    (tmp_path / "mine.py").write_text(
        "def letters(completions, **columns):\n    return [sum(map(str.isalpha, text)) / 6 for text in completions]\n"
    )
    by_name = train(
        model=make, data=write_rows(tmp_path / "rows.jsonl"), reward=f"{tmp_path}/mine.py:letters", device="cpu"
    )
    by_object = train(model=(model, tokenizer), output=tmp_path / "objects")
    assert metrics_of(by_name) == metrics_of(by_object)


@pytest.mark.parametrize("kind", [list, iter, Dataset.from_list, lambda rows: (row for row in rows)])
def test_any_iterable_of_rows(tmp_path, train, kind):
    train(data=kind(ROWS), steps=0, eval_prompts=2)
    assert config_of(tmp_path / "run")[2].startswith("python:60 rows, sha256 ")


def test_other_rows_have_another_word(tmp_path, train):
    words = set()
    for name, rows in {"a": ROWS, "b": ROWS[::-1], "c": [*ROWS[:-1], {"prompt": "x", "answer": "1"}]}.items():
        train(data=rows, steps=0, eval_prompts=2, output=tmp_path / name)
        words.add(config_of(tmp_path / name)[2])
    assert len(words) == 3


def test_held_out_rows_of_their_own(train):
    asked = []

    def watch(prompts, completions, **columns):
        asked.append(set(prompts))
        return letters(completions)

    held = [{"prompt": f"held {number}"} for number in range(5)]
    train(eval_data=held, reward=watch, steps=1)
    assert asked[0] == asked[1] == {row["prompt"] for row in held}  # the second time as answers to one another
    assert all(prompt.endswith(" is") for prompt in asked[2])


def test_a_reward_sees_columns_and_messages_as_in_trl(train):
    model, tokenizer = loaded()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    seen = []

    def watch(prompts, completions, level, thing, **columns):
        seen.append((prompts[0], completions[0], level[0], thing[0], sorted(columns)))
        prompts[0][0]["content"] = "spoiled"  # harms nobody
        return [float(len(said[0]["content"])) for said in completions]

    thing = object()  # no process of its own could be given that
    rows = [row | {"prompt": [{"role": "user", "content": row["prompt"]}], "thing": thing} for row in ROWS]
    run = train(model=(model, tokenizer), data=rows, reward=watch, steps=2)
    for prompt, completion, level, given, columns in seen:
        assert prompt[0]["role"] == "user"
        assert completion[0]["role"] == "assistant"
        assert level in {0, 1, 2}
        assert given is thing
        assert columns == ["answer", "completion_ids"]
    assert "spoiled" not in str(run.samples(2) + run.samples(held_out=True))


def test_several_rewards_are_summed(tmp_path, train):
    run = train(reward=[letters, lambda completions, **_: [2.0] * len(completions), "length@0"])
    assert config_of(tmp_path / "run")[1:3] == ["python:letters", "python:<lambda>"]
    assert all(row["reward"] >= 2 for row in run.metrics[1:])
    train(rewards=[letters, letters], reward=None, steps=0, output=tmp_path / "twice")
    assert config_of(tmp_path / "twice")[1:3] == ["python:letters", "python:letters 2"]


def test_weights_as_in_trl_and_what_each_reward_earned(tmp_path, train):
    given = {"reward": [letters, lambda completions: [2.0] * len(completions), "length"]}
    run = train(**given, reward_weights=[0.5, 1, 0], steps=1, eval_steps=1)
    assert config_of(tmp_path / "run")[1:3] == ["python:letters@0.5", "python:<lambda>"]
    row = run.metrics[1]
    means = [row[f"rewards/{name}/mean"] for name in ("letters", "<lambda>", "length")]
    assert row["reward"] == pytest.approx(0.5 * means[0] + 2)
    assert means[1:] != [0, 0]
    assert row["rewards/<lambda>/std"] == 0 < row["rewards/letters/std"]
    earned = [(each["reward"] - 2) / 0.5 for each in run.samples(1)]
    assert means[0] == pytest.approx(sum(earned) / len(earned)), "held-out ones are of no step"
    with pytest.raises(InputError, match="started with other settings: rewards"):
        train(**given, steps=2, eval_steps=1, resume=True)
    given["reward_weights"] = [0.5, 1, 0]
    assert len(train(**given, steps=2, eval_steps=1, resume=True).metrics) == 3


def test_a_reward_that_changes_its_row_changes_nothing_else(train):
    """Every completion has its own copy, whatever is within; what is no container, such as a client, is shared."""
    seen, client = [], object()

    def spoils(completions, tests, ids, grid, more, completion_ids, **columns):
        seen.extend(map(repr, zip(tests, ids, grid, more, strict=True)))
        for row in range(len(completions)):
            tests[row].append(4)
            tests[row][1]["in"].append("spoiled")
            ids[row].add(5)
            grid[row][0] = 7
            more[row][0].clear()
            completion_ids[row].clear()
            assert more[row][1] is client
        return letters(completions)

    def asks(completions, completion_ids, **columns):
        return [float(bool(ids)) for ids in completion_ids]

    row = {"tests": [1, {"in": ["a"]}], "ids": {3}, "grid": numpy.zeros(2), "more": ([2], client)}
    rows = [{"prompt": f"{number} is", **row} for number in range(60)]
    run = train(data=rows, reward=[spoils, asks], steps=3)
    assert len(seen) > 4 * 3 * 3
    assert set(seen) == {repr(([1, {"in": ["a"]}], {3}, numpy.zeros(2), ([2], client)))}
    assert row["tests"] == [1, {"in": ["a"]}]
    assert all(metrics["rewards/asks/mean"] == 1 for metrics in run.metrics[1:])


def test_a_reward_gets_every_column_under_its_own_name(train):
    """As in TRL: neither the answer nor the prompt takes the place of a column; ours compare with the answer."""
    asked = []

    def watch(prompts, completions, question, solution, answer, **columns):
        asked.extend(zip(prompts, question, solution, answer, strict=True))
        return letters(completions)

    rows = [{"question": f"{n} is", "solution": str(n), "answer": f"own {n}"} for n in range(60)]
    given = {"prompt_column": "question", "answer_column": "solution", "prompt_template": "Q: {prompt}"}
    train(data=rows, reward=[watch, "exact"], steps=1, **given)
    assert asked
    for prompt, question, solution, answer in asked:
        assert (prompt, answer) == (f"Q: {question}", f"own {solution}")
    rewards = Rewards(
        None, ["exact", "python:f"], functions={"python:f": lambda answer, completions: [len(answer)] * 2}
    )
    problem = Problem("Q", "4", {"solution": "4", "answer": "own 4"})
    assert rewards([problem], ["4", "own 4"])[0] == [[1.0 + 2, 0.0 + 2]]


def test_settings_and_built_in_tasks_by_name(tmp_path, train):
    run = train(
        model=None,
        data=None,
        reward=None,
        task="arithmetic",
        model_args={"hidden_size": 16, "num_attention_heads": 2},
        steps=1,
    )
    assert run.policy.model.config.hidden_size == 16
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("steps: 1\ntemperature: 0.5\n")
    run = train(recipe=str(recipe), output=tmp_path / "two", temperature=0.9, steps=None)
    settings = settings_in(run.output / "config.yaml")
    assert (settings["temperature"], settings["steps"]) == (0.9, 4 - 3)


def state_of_program():
    """What a library may change for the whole program: compared by a test before and after."""
    loggers = [
        logging.getLogger(),
        *(each for each in logging.root.manager.loggerDict.values() if hasattr(each, "level")),
    ]
    return {
        "torch": [
            torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(),
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(),
        ],
        "random": [random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()],
        "bars": bars.is_progress_bar_enabled(), "verbosity": bars.get_verbosity(),
        "loggers": {each.name: (each.level, *map(id, each.handlers)) for each in loggers},
        "warnings": list(warnings.filters), "charts": dict(matplotlib.rcParams),
        "environment": dict(os.environ), "path": [*sys.path, os.getcwd()], "collects": gc.isenabled(),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)],
        "hooks": [sys.excepthook, sys.unraisablehook, threading.excepthook, sys.stdout, sys.stderr],
    }  # fmt: skip


@pytest.mark.parametrize("end", ["", "fails", "evaluates"])
def test_the_program_is_as_before(train, tmp_path, end):
    """Of what an engine of vLLM does to the environment, tests/vllm has more."""

    def reward(completions, **columns):
        if not engine.BEFORE:
            engine.BEFORE.update(OF_VLLM=None, HOME=os.environ["HOME"])
            os.environ |= {"OF_VLLM": "1", "HOME": "elsewhere"}
        if end == "fails":
            raise ValueError("no reward")
        return letters(completions)

    train(steps=0)  # what is loaded when it is first needed
    torch.set_num_threads(2)
    bars.enable_progress_bar()
    model, tokenizer = loaded()
    model.train()
    model.lm_head.eval()
    before, modes = state_of_program(), [module.training for module in model.modules()]
    try:
        if end == "evaluates":
            oblrpo.evaluate(model, ROWS, reward, tokenizer=tokenizer, limit=4, max_completion_length=4, progress=False)
            assert [module.training for module in model.modules()] == modes
        else:
            train(reward=reward, steps=2, threads=1, output=tmp_path / "again")
    except InputError:
        assert end == "fails"
    after = state_of_program()
    torch.set_num_threads(1)
    for name, values in before.items():
        if name == "loggers":
            after[name] = {logger: after[name][logger] for logger in values}
        assert after[name] == values, name


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator")
def test_memory_that_the_program_frees_goes_back_to_the_system_after_a_run(train):
    train(steps=1)
    held = torch.ones(2**26)  # 256 MiB
    before = resident_bytes()
    del held
    assert before - resident_bytes() > 2**27


def test_progress_false_is_silent_and_true_says_what_matters(train, capsys, tmp_path):
    train(steps=1)
    assert capsys.readouterr() == ("", "")
    train(steps=1, progress=True, output=tmp_path / "told")
    said = capsys.readouterr().out
    assert "without a time limit: letters" in said
    assert "Qwen3ForCausalLM is trained in place" in said
    assert "step 1/1" in said


def test_a_stream_may_lack_characters_and_a_prompt_may_name_an_emoji(train, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    train(data=[row | {"prompt": f"\u4e2d :smile: {row['prompt']}"} for row in ROWS], steps=1, progress=True)
    stream.flush()
    said = stream.buffer.getvalue().decode("ascii")
    assert said.count(r"\u4e2d :smile: ") == 4  # the first prompt, and three before and after


def test_what_completions_end_with_is_told(train, capsys):
    train(model=loaded(eos_token_id=7), steps=0, progress=True)
    assert "completions end with & or <eos>" in capsys.readouterr().out


def test_what_a_reward_prints_is_seen_without_a_bar(train, capsys):
    def talks(completions, **columns):
        print("a word of mine")
        return letters(completions)

    train(reward=talks, steps=0)
    assert "a word of mine" in capsys.readouterr().out


def test_resumed_with_the_same_objects_the_metrics_are_the_same(tmp_path, train):
    whole = train()
    train(output=tmp_path / "half", steps=2)
    resumed = train(output=tmp_path / "half", resume=True, model=loaded(seed=7))  # weights come from the checkpoint
    assert metrics_of(resumed) == metrics_of(whole)
    for (name, one), two in zip(
        whole.policy.model.state_dict().items(), resumed.policy.model.state_dict().values(), strict=True
    ):
        assert torch.equal(one, two), name


def test_the_policy_of_a_schedule_free_run_is_the_one_that_was_saved(tmp_path, train):
    """The average of its iterates, not the point that it was trained at."""
    run = train(optimizer="AdamWScheduleFree", schedule="off")
    saved = load_file(tmp_path / "run" / "checkpoints" / "step_4" / "model.safetensors")
    weights = run.policy.model.state_dict()
    for name, values in saved.items():  # but for rounding, on the way to the next step and back
        torch.testing.assert_close(weights[name], values, rtol=1e-5, atol=1e-6)


def test_other_rows_are_not_resumed_with(tmp_path, train):
    train(steps=1)
    with pytest.raises(InputError, match=r"started with other settings: data \(was \['python:60 rows"):
        train(resume=True, data=ROWS[1:])
    with pytest.raises(InputError, match=r"data is 'python:60 rows.*give it again"):
        train(resume=True, data=None)
    with pytest.raises(InputError, match=r"already exists; .* \(resume=True or output='runs/NAME' in Python\)"):
        train()


def test_a_reward_that_is_written_otherwise_is_not_resumed_with_unless_that_is_accepted(train):
    def score(completions, **columns):
        return [len(text) % 3 for text in completions]

    train(reward=[score, lambda completions, **columns: [0.0] * len(completions)], steps=1)

    def score(completions, **columns):
        return [len(text) % 4 for text in completions]

    other = [score, lambda completions, **columns: [1.0] * len(completions)]  # a lambda's own source cannot be had
    with pytest.raises(InputError, match=r": rewards python:score changed since.*accept_changed=True"):
        train(reward=other, resume=True, steps=2)
    assert len(train(reward=other, resume=True, accept_changed=True, steps=2).metrics) == 3


class Less:
    """A reward of two values, and of something that is none."""

    def __init__(self, less):
        self.less, self.lock = less, threading.Lock()

    def __call__(self, completions, factor=1, **columns):
        return [factor * (len(text) - self.less) for text in completions]


def test_a_reward_that_carries_other_values_is_not_resumed_with_and_what_cannot_be_told_is_said(train, capsys):
    given = [Less(3), functools.partial(letters, mine=3)]
    train(reward=given, steps=1)
    given[0].less = 4
    with pytest.raises(InputError, match=": rewards python:Less changed since"):
        train(reward=given, resume=True, steps=2)
    given[0].less = 3
    for other in ([Less(4), given[1]], [given[0], functools.partial(letters, mine=4)]):
        with pytest.raises(InputError, match=r": rewards python:(Less|letters) changed since"):
            train(reward=other, resume=True, steps=2)
    train(reward=[Less(3), functools.partial(letters, mine=3)], resume=True, steps=2, progress=True)
    said = " ".join(capsys.readouterr().out.split())
    assert "cannot check whether 'python:Less' has changed: there is no digest of lock (lock)." in said
    assert "'python:letters' has changed" not in said


def test_a_reward_that_keeps_count_of_its_calls_is_the_same_where_the_run_left_it_and_afresh(train):
    def made():
        calls = []

        def f(completions):
            calls.append(len(completions))
            return letters(completions)

        return f, calls

    (one, calls), (fresh, _) = made(), made()
    train(reward=one, steps=1)
    train(reward=one, steps=2, resume=True)
    train(reward=fresh, steps=3, resume=True)
    calls.append(0)
    with pytest.raises(InputError, match=": rewards python:f changed since"):
        train(reward=one, steps=4, resume=True)


def test_numbers_that_nobody_gave_fit_the_rows_and_stay_those_of_the_run(train, tmp_path, capsys, command_line):
    free = {"prompts_per_step": None, "eval_prompts": None, "eval_samples": 1, "steps": 1}
    train(**free, data=ROWS[:9], progress=True)
    head = capsys.readouterr().out
    assert "held-out prompts x 1 completions, rewarded by python:letters\n" in head
    assert "\nevaluating the 2 held-out prompts\n" in head
    line = "adjusted   2 of 9 rows held out; prompts_per_step 7 instead of 64"
    assert f"{line} (no more to train on); eval_prompts 2 instead of 128 (no more are held out)\n" in head
    numbers = {"heldout_fraction": 0.31, "prompts_per_step": 7, "eval_prompts": 2}
    saved = settings_in(tmp_path / "run" / "config.yaml")
    assert {name: saved[name] for name in numbers} == numbers
    run = train(**free | {"steps": 2}, data=ROWS[:9], resume=True, progress=True)
    assert "adjusted" not in capsys.readouterr().out
    resumed = settings_in(run.output / "config.yaml")
    assert {name: resumed[name] for name in numbers} == numbers
    # What a run was given is asked of another that takes its settings; what fitted its rows is not.
    again = load_recipe(str(tmp_path / "run" / "config.yaml"), TrainConfig())
    assert set(numbers) <= adjustable(again)
    assert "max_completion_length" not in adjustable(again)
    rows = write_rows(tmp_path / "eight.jsonl", ROWS[:8])
    more = ["--data", rows, "--rewards", "length", "--model", "", "--dry-run"]
    code, out, err = command_line("train", tmp_path / "run" / "config.yaml", *more)
    assert code == 0, err
    assert "prompts_per_step: 6\n" in out
    assert "prompts_per_step 6 instead of 7" in out


def test_the_command_line_reports_and_does_not_resume_objects(tmp_path, train, command_line):
    train(steps=1)
    code, _, err = command_line("train", "--resume", "--output", tmp_path / "run")
    assert code == 2
    assert "model is 'python:Qwen3ForCausalLM', an object of the Python program" in err
    assert "oblrpo.train(..., resume=True)" in err


def test_the_page_of_a_run(tmp_path, train, command_line, monkeypatch):
    monkeypatch.undo()  # of `no_page`
    run = train(steps=1)
    assert run.report == tmp_path / "run" / "report.html"
    assert "python:Qwen3ForCausalLM" in run.report.read_text()
    run.report.unlink()
    assert command_line("report", tmp_path / "run")[0] == 0
    assert run.report.exists()


def test_an_error_of_the_reward_names_it_and_keeps_its_traceback(train, tmp_path):
    def broken(completions, **columns):
        return [1 / 0]

    with pytest.raises(InputError, match="reward 'python:broken' raised ZeroDivisionError: division by zero") as caught:
        train(reward=broken)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.__cause__.__traceback__.tb_next.tb_frame.f_code.co_name == "broken"
    assert "ZeroDivisionError" in (tmp_path / "run" / "failure.txt").read_text()

    def at_times(completions, **columns):
        return letters(completions) if len(completions) == 10 else [1 / 0]  # not on held-out prompts

    run = train(reward=at_times, on_reward_error="mask", steps=1, output=tmp_path / "masked")
    assert run.metrics[1]["completions/masked_ratio"] == 1.0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"stps": 3}, "oblrpo.train: unknown setting 'stps'.*Did you mean 'steps'"),
        ({"temperature": 0.0}, "temperature is 0.0; it must be"),
        ({"accept_changed": True}, "accept_changed has no effect without resume; remove it"),
        ({"model_args": {"hidden_size": 8}}, "model_args has no effect because a loaded model"),
        ({"device": "cpu"}, "device has no effect because the model is loaded already; remove it"),
        ({"reward_seconds": 9.0}, "reward_seconds has no effect because functions of this program have no time limit"),
        ({"data": [1, 2]}, "data row 0 is a int, not a dict of columns"),
        ({"data": 3}, "data is a int; give file names, or rows"),
        ({"data": iter(())}, "data holds no rows"),
        ({"data": {"train": ROWS}}, r"data holds several named parts; give one of them, such as data=data\['train'\]"),
        ({"data": [{1: "x"}]}, "data row 0 has a column named 1"),
        ({"data": [{"question": "x"}] * 60}, "data row 0 has no column 'prompt'; its columns are: 'question'"),
        ({"eval_data": ROWS}, "data has 0 training rows, but 4 .* 60 training problems of data are held out too"),
        (
            {"data": ROWS[:10], "eval_prompts": 128},
            r"data has 10 rows, too few for 4 to train on \(prompts_per_step\) and 128 held out \(eval_prompts\)",
        ),
        ({"reward": 3}, "a reward is a int; give a function, or the name of a reward"),
        ({"reward": letters, "rewards": "numeric"}, "reward and rewards are the same"),
        ({"reward": [(letters, 0.5)]}, r"a reward is a tuple; give a function.*; weights are reward_weights=\[...\]"),
        ({"reward_weights": [1, 2]}, r"reward_weights is \[1, 2\]; give a list of 1, a number for each reward"),
        ({"reward_weights": 0.5}, "reward_weights is 0.5; give a list of 1"),
        ({"reward_weights": ["much"]}, "'python:letters@much': the weight after @ is 'much'"),
        ({"reward": "length@2", "reward_weights": [1]}, "reward 'length@2' has a weight already"),
        ({"reward": None, "reward_weights": [1]}, "reward_weights belong to reward"),
        ({"model": loaded()[0]}, r"the loaded model \(Qwen3ForCausalLM\) needs its tokenizer"),
        ({"model": "some/model", "tokenizer": loaded()[1]}, "brings its own tokenizer"),
        ({"model": (torch.nn.Linear(2, 2), loaded()[1])}, "the model is a Linear; give a causal LM of transformers"),
        ({"model": (loaded()[0], "words")}, "the tokenizer is a str"),
        ({"model": (loaded()[0].bfloat16(), loaded()[1])}, "weights in bfloat16 lose small updates"),
        ({"model": (loaded()[0].requires_grad_(False), loaded()[1])}, "no parameter of the model is trainable"),
        ({"model": loaded(eos_token_id=50256)}, "ends completions with token 50256, but knows 258 tokens; give its"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_is_written(train, tmp_path, more, words):
    with pytest.raises(InputError, match=words):
        train(**more)
    assert not (tmp_path / "run").exists()


def test_a_tokenizer_alone_belongs_to_nothing():
    with pytest.raises(InputError, match="tokenizer belongs to a loaded model"):
        oblrpo.train(tokenizer=loaded()[1])


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")  # adapters that the test puts in
def test_adapters_put_in_or_brought_along(tmp_path, train):
    peft = pytest.importorskip("peft")
    with pytest.raises(InputError, match=r"does not say which model the adapters belong to .*; save the model beneath"):
        train(lora={"r": 2}, output=tmp_path / "no")
    assert not (tmp_path / "no").exists()
    loaded()[0].save_pretrained(tmp_path / "model")

    def stored():
        return Qwen3ForCausalLM.from_pretrained(tmp_path / "model"), loaded()[1]

    def changed():
        model, tokenizer = stored()
        model.model.norm.weight.data *= 1.5
        return model, tokenizer

    with pytest.raises(InputError, match=r"not restore this policy: .*norm.weight would have other values; save the"):
        train(model=changed(), lora={"r": 2}, output=tmp_path / "no")
    loaded()[1].save_pretrained(tmp_path / "model")
    run = train(model=stored(), lora={"r": 2}, gradient_checkpointing=True)
    assert {name.split(".")[-3] for name, weight in run.policy.model.named_parameters() if weight.requires_grad} == {
        "lora_A", "lora_B",
    }  # fmt: skip
    with pytest.raises(InputError, match="the model has adapters inside it; give the PEFT model around it"):
        train(model=(run.policy.model.get_base_model(), run.policy.tokenizer), output=tmp_path / "no")
    with pytest.raises(InputError, match="has adapters already"):
        train(model=(run.policy.model, run.policy.tokenizer), lora={"r": 2}, output=tmp_path / "no")

    adapters = peft.LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")

    def adapted():
        model, tokenizer = stored()
        torch.manual_seed(3)
        return peft.get_peft_model(model, adapters), tokenizer

    whole = train(model=adapted(), output=tmp_path / "whole")
    train(model=adapted(), steps=2, output=tmp_path / "half")
    resumed = train(model=adapted(), resume=True, output=tmp_path / "half")
    assert metrics_of(resumed) == metrics_of(whole)
    other = peft.get_peft_model(changed()[0], adapters), loaded()[1]
    with pytest.raises(InputError, match=r"norm.weight would have other values"):
        train(model=other, resume=True, steps=6, output=tmp_path / "half")


def test_a_model_in_bfloat16_under_adapters_is_told_as_it_is(train, capsys, tmp_path):
    pytest.importorskip("peft")
    model, tokenizer = loaded()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    model = Qwen3ForCausalLM.from_pretrained(tmp_path / "model")
    run = train(model=(model.bfloat16(), tokenizer), lora={"r": 2}, steps=1, progress=True)
    assert settings_in(run.output / "config.yaml")["dtype"] == "bfloat16"
    assert "bfloat16 on cpu" in capsys.readouterr().out


def test_a_checkpoint_of_another_model_does_not_fit(train):
    train(steps=1)
    with pytest.raises(InputError, match=r"cannot load .*step_1 into the model that was given"):
        train(resume=True, model=loaded(tie_word_embeddings=True, attention_bias=True))


def test_a_policy_of_ours_is_a_model_like_any_other(train):
    policy = make_policy(
        PolicyConfig(model_args={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, device="cpu")
    )
    assert train(model=policy.model, tokenizer=policy.tokenizer, steps=1).policy.model is policy.model


def test_stopped_between_steps_and_gone_on_with(tmp_path, train):
    calls = []

    def interrupts(completions, **columns):
        calls.append(len(completions))
        if len(calls) == 3:  # the held-out completions come first
            signal.raise_signal(signal.SIGINT)
        return letters(completions)

    with pytest.raises(KeyboardInterrupt, match="stopped after step"):
        train(reward=interrupts, eval_steps=0)
    assert len(train(reward=interrupts, eval_steps=0, resume=True).metrics) == 5


def test_outside_the_main_thread(train):
    runs = []
    thread = threading.Thread(target=lambda: runs.append(train(steps=1)))
    thread.start()
    thread.join()
    assert len(runs[0].metrics) == 2


def test_the_console_of_a_notebook_has_a_bar_only_with_ipywidgets(monkeypatch):
    class Notebook(Console):
        def __init__(self, **more):
            super().__init__(**{"force_jupyter": True, "file": io.StringIO()} | more)

    monkeypatch.setattr(console, "Console", Notebook)
    monkeypatch.setattr(console, "_PipedConsole", Notebook)
    monkeypatch.setattr(console, "_NotebookConsole", Notebook)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as kernels set it
    monkeypatch.setattr(console.importlib.util, "find_spec", lambda name: None)
    assert not console.console_of_program(True).is_jupyter
    assert not console.console_of_program(True).is_terminal
    monkeypatch.setattr(console.importlib.util, "find_spec", lambda name: name == "ipywidgets")
    assert console.console_of_program(True).is_jupyter
    assert console.console_of_program(True).is_terminal


def test_nothing_that_works_by_name_says_otherwise():
    """Defaults of the small run are settings that there are."""
    assert set(SMALL) - {"progress"} <= set(oblrpo.train.__signature__.parameters)


def test_the_word_of_rows_is_the_same_in_every_process():
    """Sets and addresses differ between processes, and JSON refuses some keys; all would hinder a resumed run."""
    code = (
        "from oblrpo.objects import split_objects\n"
        "row = {'prompt': 'p', 'check': lambda text: 1, 'names': {'a', 'b', 'c'}, 'places': {(1, 2): 3, 'x': 4}}\n"
        "print(split_objects(data=[row])[0]['data'])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "123"
    }
    assert len(said) == 1


def test_numbers_of_numpy_are_numbers(train):
    run = train(steps=numpy.int64(1), learning_rate=numpy.float32(0.5))
    settings = settings_in(run.output / "config.yaml")
    assert (settings["steps"], settings["learning_rate"]) == (1, 0.5)


def test_rows_to_learn_from_first(tmp_path, train):
    """Rows of prompt and completion as objects come to the same as a file of them."""
    rows = [{"prompt": [{"role": "user", "content": "x"}], "completion": "y"}] * 3
    plain = [{"prompt": f"{number} or", "completion": "y"} for number in range(3)]
    by_object = train(sft_data=plain, steps=1, warm_start_args={"learning_rate": 1e-2})
    by_name = train(
        sft_data=write_rows(tmp_path / "sft.jsonl", plain),
        output=tmp_path / "b",
        steps=1,
        warm_start_args={"learning_rate": 1e-2},
    )
    assert metrics_of(by_object) == metrics_of(by_name)
    assert "eval/accuracy_before_warm_start" in by_object.metrics[0]
    assert config_of(tmp_path / "run")[1].startswith("python:3 rows, sha256 ")
    with pytest.raises(InputError, match="no chat template"):
        train(model=loaded(), sft_data=rows, output=tmp_path / "c")
    assert not (tmp_path / "c").exists()
