"""A reward gets what it asks for by name: texts, tokens, columns of the data; and may be async."""

import datetime
import time
from collections import deque, namedtuple

import pytest
import torch

from oblrpo.errors import InputError
from oblrpo.policy import Sequences
from oblrpo.rewards import Rewards
from oblrpo.rewards.user import copied
from oblrpo.rollout import Rollouts
from oblrpo.tasks import DataTask, Problem
from oblrpo.trainer.loop import part_metrics
from tests.rewards.conftest import RewardSet

SOURCE = """
import asyncio, sys
def any_column(completions, **columns):
    return [float(len(columns)) for _ in completions]
def plain(completions):
    return [1.0] * len(completions)
def blob(completions, blob, **columns):
    return [1.0] * len(completions)
def reads(completions, **columns):
    return [len(columns["blob"])]
def tokens(completion_ids, **columns):
    return [float(sum(ids)) for ids in completion_ids]
clients = []
async def sleeps(completions, **columns):
    clients.append(asyncio.get_running_loop())
    await asyncio.sleep(0.5)
    return [float(clients.count(clients[0]))] * len(completions)
class Judge:
    async def __call__(self, completions, **columns):
        await asyncio.sleep(0.5)
        return [10.0] * len(completions)
judge = Judge()
async def raises(completions, **columns):
    return [1 / 0]
async def leaves(completions, **columns):
    sys.exit(3)
"""


@pytest.fixture
def path(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)
    return lambda name: f"{tmp_path}/mine.py:{name}"


@pytest.mark.parametrize("odd", [b"x", datetime.datetime(2020, 1, 1), [10**5000]], ids=type)
def test_a_column_that_no_process_can_be_given_is_no_matter_to_a_reward_that_does_not_name_it(path, odd):
    columns = {"answer": ["1", "2"], "blob": ["text", odd]}
    assert RewardSet([path("plain")])(["p", "q"], ["a", "b"], columns) == [1.0, 1.0]
    rewards = RewardSet([path("any_column")])
    assert rewards(["p", "q"], ["a", "b"], columns) == [2.0, 2.0], "prompts and answer are left"
    assert rewards(["p", "q"], ["a", "b"], columns) == [2.0, 2.0]
    with pytest.raises(InputError, match=r"raised KeyError: 'blob' \(mine.py.*column 'blob' \(\w+\) cannot be handed"):
        RewardSet([path("reads")])(["p", "q"], ["a", "b"], columns)
    with pytest.raises(InputError) as caught:
        RewardSet([path("blob")])(["p", "what is q"], ["a", "b"], columns)
    words = f"column 'blob' ({type(odd).__name__}) cannot be handed to its process"
    assert words in str(caught.value)
    assert "in the row of the prompt 'what is q'; make it text" in str(caught.value)


def test_a_function_gets_what_it_names_and_no_more():
    def score(completions, level):
        return [float(each) for each in level]

    problems = [Problem("p", "1", {"level": 3, "other": object()})]
    rewards = Rewards(DataTask("mine", []), ["python:f"], functions={"python:f": score})
    assert rewards(problems, ["a", "b"]) == ([[3.0, 3.0]], [[True, True]])


def test_tokens_are_given_to_rewards_as_in_trl_with_those_that_text_leaves_out(path):
    """A column of that name is never taken for them."""
    ids, mask = torch.tensor([[9, 9, 4, 5, 0], [0, 9, 6, 7, 8]]), torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    own = mask.clone()
    own[:, :2] = 0
    rollouts = Rollouts(Sequences(ids, mask, own, 2), ["a", "b"], torch.zeros(2))
    assert rollouts.ids() == [[4, 5], [6, 7, 8]]
    problems = [Problem("p", "1", {"completion_ids": "mine"})]
    seen = []

    def watch(completions, completion_ids):
        seen.extend(completion_ids)
        return [float(len(each)) for each in completion_ids]

    names = ["python:f", path("tokens"), "length@0"]
    rewards = Rewards(DataTask("mine", []), names, functions={"python:f": watch})
    assert rewards.needs_ids
    assert rewards(problems, rollouts.completions, rollouts.ids)[0] == [[2.0 + 9, 3.0 + 21]]
    assert seen == [[4, 5], [6, 7, 8]]
    with pytest.raises(InputError, match=r"completion_ids'; it can be given answer, prompts, completions;"):
        rewards(problems, rollouts.completions)


@pytest.mark.slow
def test_async_rewards_are_awaited_at_once_on_a_loop_that_lasts(path):
    async def here(completions, **columns):
        import asyncio

        await asyncio.sleep(0.5)
        return [100.0] * len(completions)

    names = ["python:f", path("sleeps"), path("judge"), path("plain")]
    rewards = Rewards(DataTask("mine", []), names, functions={"python:f": here})
    started = time.monotonic()
    assert rewards([Problem("p", "1")], ["a", "b"])[0] == [[112.0, 112.0]]
    assert time.monotonic() - started < 1.3
    assert rewards([Problem("p", "1")], ["a", "b"])[0] == [[113.0, 113.0]], (
        "a client of the first call may be used again"
    )


def test_an_async_reward_that_raises_or_leaves_is_named(path):
    async def raises(completions, **columns):
        raise ValueError("no key")

    rewards = Rewards(DataTask("mine", []), ["python:f"], functions={"python:f": raises})
    with pytest.raises(InputError, match=r"'python:f' raised ValueError: no key \(test_what_they_get.py line"):
        rewards([Problem("p", "1")], ["a", "b"])
    with pytest.raises(InputError, match=r"raised ZeroDivisionError: division by zero \(mine.py line"):
        RewardSet([path("raises")])(["p"], ["a"])
    with pytest.raises(InputError, match="its process ended"):
        RewardSet([path("leaves")])(["p"], ["a"])


def test_what_each_earned_is_told_by_the_name_of_the_function(path):
    names = [path("plain") + "@-3", "length@0.5", "python:g"]
    rewards = Rewards(DataTask("mine", []), names, functions={"python:g": lambda completions: [None, 2.0]})
    rewards([Problem("p", "1")], ["a", "b c"])
    rewards([Problem("p", "1")], ["a", "b c"])
    assert rewards.take_earned() == {"plain": [1.0] * 4, "length": [1.0, 2.0] * 2, "g": [2.0] * 2}
    assert rewards.take_earned() == {}
    names = [path("plain"), "python:plain"]
    rewards = Rewards(DataTask("mine", []), names, functions={"python:plain": lambda completions: [0.0] * 2})
    rewards([Problem("p", "1")], ["a", "b c"])
    assert rewards.take_earned() == {names[0]: [1.0] * 2, names[1]: [0.0] * 2}


def test_metrics_of_each_reward_are_those_of_trl():
    """Mean and standard deviation (n - 1) over the whole batch, without completions that it does not apply to."""
    values = torch.tensor([1.0, 2.0, 4.0])
    found = part_metrics({"f": values.tolist(), "g": [3.0], "h": []})
    wanted = {"f": (values.mean().item(), values.std().item()), "g": (3.0, torch.nan), "h": (torch.nan,) * 2}
    for name, figures in wanted.items():
        assert (found[f"rewards/{name}/mean"], found[f"rewards/{name}/std"]) == pytest.approx(figures, nan_ok=True)


def test_containers_of_a_row_are_copied_to_any_depth():
    Point = namedtuple("Point", "name values")
    value = {"point": Point("a", [1]), "last": deque([1]), "pair": ([2], {3})}
    own = copied(value)
    own["point"].values.append(9)
    own["last"].append(9)
    own["pair"][0].append(9)
    own["pair"][1].add(9)
    assert (own["point"], own["last"], own["pair"]) == (Point("a", [1, 9]), deque([1, 9]), ([2, 9], {3, 9}))
    assert value == {"point": Point("a", [1]), "last": deque([1]), "pair": ([2], {3})}
