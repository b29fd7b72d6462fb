"""The examples: the algorithm in one file, rows and a reward of one's own, and environments."""

import copy
import importlib.util
import json
import runpy
from pathlib import Path

import pytest
import torch

from oblrpo.rollout import TransformersSampler
from tests.cli.conftest import no_page, oblrpo, small_run
from tests.scores.stay_double import StayDouble
from tests.trainer.learners import learn, learner_of, samples_of

__all__ = ["no_page", "oblrpo", "small_run"]

FOLDER = Path(__file__).parents[1] / "examples" / "summaries"
SPEC = importlib.util.spec_from_file_location("overlap", FOLDER / "overlap.py")
overlap = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(overlap)


@pytest.mark.parametrize(
    ("reference", "text", "value"),
    [  # the last three as rouge-score 0.1.2 has them
        ("the cat sat", "the cat sat", 1.0),
        ("The cat sat.", "the CAT -- sat", 1.0),
        ("the cat sat", "sat cat the", 1 / 3),
        ("the cat sat", "", 0.0),
        ("", "the cat", 0.0),
        ("the cat sat", "dogs", 0.0),
        ("the cat sat", "the the the the the the", 2 / 9),
        ("Paul's lost ring came back on a carrot.", "Paul lost a ring, a carrot had it", 0.5882352941176471),
        ("The ferry left at noon", "At noon the first ferry left the harbour at last", 0.5333333333333333),
        ("police killed the gunman", "police kill the gunman", 0.75),
    ],
)
def test_the_overlap_in_words(reference, text, value):
    assert overlap.f1(reference, text) == pytest.approx(value, abs=1e-15)
    assert overlap.rouge_l([text], [["another", reference]]) == [pytest.approx(value, abs=1e-15)]


@pytest.mark.usefixtures("no_page")
def test_a_run_on_summaries(small_run, tmp_path):
    passages = FOLDER / "passages.jsonl"
    code, _, err = small_run(
        data=passages, sft_data=passages, rewards=f"{FOLDER / 'overlap.py'}:rouge_l", warm_start_steps=2,
        prompt_template="{prompt}\nSummary:\n", heldout_fraction=0.25, steps=2, max_completion_length=16,
    )  # fmt: skip
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions" / "step_2.jsonl").read_text().splitlines()]
    assert len(rows) == 12
    assert all(row["prompt"].endswith("\nSummary:\n") and 0 <= row["reward"] <= 1 for row in rows)


ACTING = FOLDER.parent / "environments"


@pytest.mark.usefixtures("no_page")
@pytest.mark.parametrize(
    ("name", "settings"), [("prices", {"rewards": "exact"}), ("guess", {"max_turns": 5})], ids=["prices", "guess"]
)
def test_environments_as_their_first_lines_say(small_run, monkeypatch, tmp_path, name, settings):
    """A policy is built, imitates a few episodes and acts for two steps; its tool is called."""
    for file, folder in (("data.py", "data"), ("small_policy.py", "model")):
        monkeypatch.setattr("sys.argv", [file, str(tmp_path / folder)])
        runpy.run_path(str(ACTING / file), run_name="__main__")
    code, out, err = small_run(
        model=tmp_path / "model", data=tmp_path / "data" / f"{name}.jsonl", warm_start_steps=40,
        sft_data=tmp_path / "data" / f"{name}_shown.jsonl", warm_start_args={"batch": 8, "learning_rate": 3e-3},
        environment=f"{ACTING / name}.py:{name.capitalize()}", steps=2, max_completion_length=40, **settings,
    )  # fmt: skip
    assert code == 0, err
    lines = (tmp_path / "run" / "completions" / "step_2.jsonl").read_text().splitlines()
    messages = [message for line in lines for message in json.loads(line)["messages"]]
    tool = {"prices": "price", "guess": "guess"}[name]
    assert tool in {message["name"] for message in messages if message["role"] == "tool"}
    assert f"{tool} (" in out


def test_the_game_and_the_shop_say_what_they_should():
    prices, guess = (runpy.run_path(str(ACTING / f"{name}.py")) for name in ("prices", "guess"))
    shop, game = prices["Prices"](), guess["Guess"]()
    shop.reset(prices={"egg": 7, "rice": 2}, prompt="Day 1: egg?")
    assert (shop.price("egg"), shop.price(item="rice")) == (7, 2)
    for guesses, reward in (([4, 6, 5], 1.0), ([4, 6, 7, 5], 0.5), ([5, 5, 5, 5], 0.5), ([4, 6, 7], 0.0)):
        game.reset(secret=5, prompt="Game 1")
        said = {4: "higher", 5: "found", 6: "lower", 7: "lower"}
        assert [game.guess(number) for number in guesses] == [said[number] for number in guesses]
        assert game.get_reward() == reward


@pytest.fixture
def stay_double():
    """Norms and softmaxes of transformers go down to float32 without it."""
    with StayDouble():
        yield


SPEC_ONE = importlib.util.spec_from_file_location("one_file", FOLDER.parent / "one_file.py")
one_file = importlib.util.module_from_spec(SPEC_ONE)
SPEC_ONE.loader.exec_module(one_file)


@pytest.mark.usefixtures("stay_double")
def test_one_file_makes_the_trainers_updates(tiny_policy):
    """The same samples move the same weights to the same place, in float64, over steps of the measured rate.

    The trainer looks at all prompts in every step here, and takes its gradient plainly.

    In the third every reward is 1: nothing moves there, and nothing is remembered.
    """
    tiny_policy.model.double()
    model = copy.deepcopy(tiny_policy.model)
    learner = learner_of(tiny_policy, "oblrpo_shrunk", optimizer=torch.optim.AdamW, lr=1e-3)
    mine = one_file.OBLRPO(model, torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0))
    begun = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    for step in range(1, 6):
        torch.manual_seed(step)
        rollouts = TransformersSampler(tiny_policy).sample(["a", "bc", "d=", "ab>c"], 4, 6, 1.0)
        rewards_PG = torch.rand(4, 4, dtype=torch.float64) * (torch.rand(4, 4) > 0.5)
        rewards_PG = torch.ones_like(rewards_PG) if step == 3 else rewards_PG
        updates = learn(learner, samples_of(rollouts, rewards_PG), step).updates
        sequences = rollouts.sequences
        rows = [
            [row[kept.bool()].tolist() for row, kept in zip(ids, mask, strict=True)]
            for ids, mask in (
                (sequences.ids_ST[:, : sequences.start], sequences.mask_ST[:, : sequences.start]),
                (sequences.completion_SC, sequences.own_SC),
            )
        ]
        ids_ST, own_ST = one_file.rows(*rows)
        metrics = mine.step(ids_ST.clamp(max=tiny_policy.vocabulary - 1), own_ST.double(), rewards_PG)
        if step == 3:
            assert (updates, metrics) == ((), {"learning_rate": 0.0})
        else:
            assert metrics["learning_rate"] == pytest.approx(updates[0].learning_rate, rel=1e-6)
            assert metrics["step_kl"] == pytest.approx(updates[0].kl, rel=1e-6)
        moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - begun
        theirs = torch.cat([p.detach().flatten() for p in tiny_policy.model.parameters()]) - begun
        torch.testing.assert_close(moved, theirs, rtol=1e-6, atol=1e-9)
    assert moved.abs().max() > 1e-3


def test_one_file_is_short_and_samples_as_it_says(monkeypatch):
    assert len((FOLDER.parent / "one_file.py").read_text().splitlines()) <= 150
    torch.manual_seed(0)
    monkeypatch.setattr(one_file, "STEPS", 1)
    monkeypatch.setattr(one_file, "WARM", 2)
    printed = []
    monkeypatch.setattr("builtins.print", lambda *words: printed.append(" ".join(words)))
    one_file.main()
    assert printed[0].startswith("step   1  reward ")
