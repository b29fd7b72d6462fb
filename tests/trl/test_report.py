"""`oblrpo report` of what real trainers leave in their folders."""

import re

import pytest
from datasets import Dataset
from trl import GRPOTrainer

from oblrpo import diagnose
from oblrpo.adapters.trl import OBLRPOTrainer, VarianceLedgerCallback
from oblrpo.report.page import write_report
from oblrpo.report.record import read_trl
from tests.trl.support import PROMPTS, ours, reward, theirs

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("kind", [GRPOTrainer, OBLRPOTrainer])
def test_the_page_of_a_run_says_what_its_log_says(tmp_path, kind):
    given = {"max_steps": 3, "save_strategy": "steps", "save_steps": 2}
    trainer = (ours if kind is OBLRPOTrainer else theirs)(tmp_path, **given)
    if kind is GRPOTrainer:
        trainer.add_callback(VarianceLedgerCallback(trainer, every=1))
    trainer.train()
    record = read_trl(tmp_path)
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert [row["step"] for row in record.steps] == [1, 2, 3]
    for key in ("reward", "learning_rate", "n_snr", "entropy", "grad_norm", "step_time"):
        assert [row[key] for row in record.steps] == [log[key] for log in logs], key
    assert record.prompts == 4
    page = write_report(tmp_path).read_text()
    shown = set(re.findall(r"<figcaption><b>(.*?)</b>", page))
    assert {"Signal to noise of the batch gradient", "Critical batch size, and the batch used"} <= shown
    assert ("Gradient variance under each baseline" in shown) == (kind is GRPOTrainer)
    assert ("Squared score norm" in shown) == (kind is OBLRPOTrainer)
    assert "Held-out reward" in page


def test_steps_without_rewards_are_named(tmp_path):
    """TRL writes null for what no completion has."""
    steps = iter(range(1, 5))

    def flaky(prompts, completions, **_):
        return [None] * len(prompts) if 2 <= next(steps) <= 3 else reward(prompts, completions)

    trainer = theirs(tmp_path, reward_funcs=flaky, max_steps=4)
    trainer.train()
    trainer.save_state()
    found = diagnose(tmp_path)
    assert [(f.name, f.since, f.until) for f in found.findings] == [("rewards missing", 2, 3)]
    assert found.steps == 4


@pytest.mark.parametrize("answers", [["even", "odd"] * 4, [""] * 8])
def test_how_much_the_completions_of_a_step_differ(tmp_path, answers):
    """Pairs are those of different answers; where there is none, of different prompts."""
    seen = []

    def note(prompts, completions, answer, **_):
        seen.extend(zip(prompts, completions, answer, strict=True))
        return [float(len(text)) for text in completions]

    data = Dataset.from_dict({"prompt": PROMPTS, "answer": answers})
    given = {"max_steps": 1, "max_completion_length": 1, "temperature": 0.05}  # of which many are alike
    trainer = ours(tmp_path, reward_funcs=note, words={"train_dataset": data}, **given)
    trainer.train()
    log, key = trainer.state.log_history[0], 2 if any(answers) else 0
    pairs = [a[1] == b[1] for a in seen for b in seen if a[key] != b[key]]
    assert 0 < sum(pairs) < len(pairs)
    assert log["completions/same_ratio"] == pytest.approx(sum(pairs) / len(pairs))
    assert log["completions/distinct_ratio"] == len({text for _, text, _ in seen}) / 16
    texts = [text for _, text, _ in seen]
    assert log["completions/commonest_ratio"] == max(map(texts.count, texts)) / 16
    assert log["completions/commonest_token_ratio"] >= log["completions/commonest_ratio"]  # one token each, or the end


def test_answers_may_be_arrays(tmp_path):
    """As a data set with a format gives them."""
    data = Dataset.from_dict({"prompt": PROMPTS, "answer": [[1, 2], [3, 4]] * 4}).with_format("numpy")
    trainer = ours(tmp_path, words={"train_dataset": data}, max_steps=1)
    trainer.train()
    assert trainer.state.log_history[0]["completions/same_ratio"] < 1
