"""Runs that act: whatever a tool does, they go on or say in a sentence why not, and are resumed as if nothing was."""

import json
import re
import signal
import time

import psutil
import pytest

from tests.acting import save_policy, save_rows
from tests.cli.conftest import Fork, metrics_of

DO = '''
import os, random, sys, time

class Do:
    """It does what letters say."""
    def reset(self, number, **row):
        if number == {bad}:
            raise OSError("no net")
        self.said, self.number = "", number
        return f" {{number}} {{random.randint(0, 9)}}"
    def do(self, what: str) -> str:
        """Do it.

        Args:
            what: What to do.
        """
        self.said += what
        {action}
        return what * self.number + str(random.random())[2:5]
    def get_reward(self):
        return {reward}
'''
FLAGS = {
    "--steps": 3, "--prompts-per-step": 4, "--num-generations": 3, "--max-completion-length": 60, "--eval-prompts": 4,
    "--eval-samples": 2, "--eval-steps": 0, "--threads": 1, "--device": "cpu", "--tool-seconds": 0.3, "--save-steps": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"), "abcde")


@pytest.fixture
def command(tmp_path, policy):
    """Flags of a run whose tool does `action`."""

    def made(action="pass", bad=-1, reward='float(self.said.count("a"))', **flags):
        (tmp_path / "do.py").write_text(DO.format(action=action, bad=bad, reward=reward))
        given = {"--model": policy, "--data": save_rows(tmp_path / "rows.jsonl"), "--output": tmp_path / "run", **FLAGS}
        given |= {"--environment": f"{tmp_path / 'do.py'}:Do"} | flags
        kept = {name: value for name, value in given.items() if (name, value) != ("--data", None)}
        return ["train", *(str(part) for pair in kept.items() for part in pair if part is not None)]

    return made


def rows_of(folder):
    """The log of all completions."""
    files = sorted((folder / "completions").glob("step_*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


FAULTS = """
        letter = what[:1]
        if letter == "b": raise ValueError("no b")
        if letter == "c": time.sleep(60)
        if letter == "d": os._exit(1)
        if letter == "e": print("e" * 300_000); return "e" * 300_000
"""


def test_a_run_goes_on_whatever_its_tools_do(oblrpo, command, tmp_path):
    code, out, err = oblrpo(*command(FAULTS, **{"--max-tool-response-length": 20, "--max-completion-length": 300}))
    assert code == 0, err[-500:]
    assert "eeee" * 9 not in out + err
    rows = rows_of(tmp_path / "run")
    assert {"answer", "length", "error"} <= {row["stop"] for row in rows}
    assert {row["stop"] for row in rows if len(row["messages"]) > row["turns"]}
    assert all((row["reward"] is None) == (row["stop"] == "error") for row in rows)
    said = {message["content"] for row in rows for message in row["messages"] if message["role"] == "tool"}
    assert "{'error': 'no b'}" in said
    assert "eeeeeeeeeeeeeeeeeeee... (the first 20 of 300,000 characters)" in said
    assert any(text.startswith("{'error': 'took long... (the first 20") for text in said)
    last = metrics_of(tmp_path / "run")[-1]
    assert 0 < last["completions/masked_ratio"] < 1
    told = "ended early; these are left out. The first: the tool 'do': "
    assert " ".join((out + err).split()).count(told) == 1
    assert last["tools/failure_frequency"] > 0
    assert last["turns/mean"] > 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bad": 3}, r"reset of Do failed for the prompt 'Row \d+': OSError: no net"),
        ({"reward": "1 / 0"}, r"reward 'Do' returned an error, ZeroDivisionError: division by zero \(do.py line 2\d\)"),
        ({"reward": "'much'"}, "reward 'Do' returned 'much'"),
        ({"action": "return [{'type': 'image', 'image': 0}]"}, "the tool 'do' returned an image"),
        ({"--data": None, "--task": "arithmetic"}, "environment needs data"),
        ({"--no-chat": None}, "leave out --no-chat"),
        ({"--environment": "nowhere.py:Do"}, "environment file nowhere.py does not exist"),
        ({"--tools": "nowhere.py:do"}, "tool file nowhere.py does not exist"),
        ({"--max-turns": 1}, "max_turns is 1"),
        ({"--model": ""}, "tools need a model whose chat template shows them"),
    ],
)
def test_what_cannot_work_is_said_in_a_sentence(oblrpo, command, given, words):
    code, _, err = oblrpo(*command(**given))
    assert (code, len(err.strip().splitlines())) == (2, 1), err
    assert re.search(words, err)


def test_settings_of_tools_have_no_effect_without_any(oblrpo, command):
    arguments = [
        part for part in command(**{"--max-turns": 3}) if not str(part).endswith(":Do") and part != "--environment"
    ]
    code, _, err = oblrpo(*arguments)
    assert code == 2
    assert "there is neither an environment nor a tool" in err


def test_two_runs_are_the_same_run_and_so_is_one_that_was_killed_in_a_tool(oblrpo, command, tmp_path):
    arguments = command()
    assert oblrpo(*arguments)[0] == 0
    assert oblrpo(*[str(part).replace("/run", "/again") for part in arguments])[0] == 0
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "again")
    mark = tmp_path / "here"
    slow = f"""
        if os.path.isdir({str(tmp_path / "killed" / "checkpoints" / "step_1")!r}) and not os.path.exists({str(mark)!r}):
            open({str(mark)!r}, "w").write(str(os.getpid()))
            time.sleep(60)
"""
    command(slow, **{"--tool-seconds": 50})
    killed = [str(part).replace("/run", "/killed") for part in arguments]
    killed[killed.index("--tool-seconds") + 1] = "50"
    run = Fork(killed)
    deadline = time.monotonic() + 120
    while not (mark.exists() and mark.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    tool = psutil.Process(int(mark.read_text()))
    run.send_signal(signal.SIGKILL)
    run.communicate()
    assert not psutil.wait_procs([tool], 10)[1]  # nothing of the run is left
    code, _, err = oblrpo("train", "--resume", "--output", tmp_path / "killed")
    assert code == 0, err
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "killed")


def test_an_environment_that_has_changed_is_noticed(oblrpo, command, tmp_path):
    assert oblrpo(*command(**{"--steps": 1}))[0] == 0
    command("self.said += 'a'")
    code, _, err = oblrpo("train", "--resume", "--output", tmp_path / "run", "--steps", 2)
    assert code == 2
    assert f"environment {tmp_path / 'do.py'}:Do changed since" in err


def test_evaluate_says_what_it_does_not_do(oblrpo, command, tmp_path):
    assert oblrpo(*command(**{"--steps": 1}))[0] == 0
    code, _, err = oblrpo("evaluate", "--model", tmp_path / "run")
    assert code == 2
    assert "oblrpo evaluate draws single answers" in err


def test_an_environment_that_nothing_rewards_is_refused(oblrpo, command, tmp_path):
    """Else its answers would be compared with those of the data, which has none."""
    arguments = command()
    (tmp_path / "do.py").write_text((tmp_path / "do.py").read_text().replace("get_reward", "_get_reward"))
    code, _, err = oblrpo(*arguments)
    assert (code, err.count("\n")) == (2, 1)
    assert "environment Do has no get_reward(self) and the run no rewards: define it, or name some." in err
    assert oblrpo(*arguments, "--rewards", "length@0.1")[0] == 0
