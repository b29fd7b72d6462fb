"""Several generations an update: `steps_per_generation` below `gradient_accumulation_steps`."""

import hashlib

import pytest
import torch

from oblrpo.errors import InputError
from tests.trl.support import PROMPTS, Capture, flat, ours

G = 4


def same_words(trainer):
    """Let completions depend on nothing but their prompt and their number within its group; return the calls' rows."""
    rows, ends = [], trainer.processing_class.eos_token_id

    def turn(prompt_ids, *_, **__):
        rows.append(len(prompt_ids))
        words = [list(hashlib.sha256(f"{ids} {row % G}".encode()).digest()[:8]) for row, ids in enumerate(prompt_ids)]
        return [ids if row % G else [*ids[:5], ends] for row, ids in enumerate(words)], None

    trainer._generate_single_turn = turn
    return rows


@pytest.mark.parametrize(
    "given",
    [
        {"baseline": "rloo"},
        {"baseline": "oblr", "look_steps": 1, "schedule": "off"},
        {
            "baseline": "oblr",
            "look_steps": 1,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "steps_per_generation": 4,
        },
    ],
    ids=["rloo", "exact norms", "halves of groups"],
)
def test_an_update_of_several_generations_is_that_of_one(tmp_path, given):
    """With baselines of a group alone: others see what was generated together, and earlier generations."""
    found = []
    words = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, **given}
    words["shuffle_dataset"] = False  # of whose prompts there is no number, then
    several = words.pop("steps_per_generation", 1)
    for steps_per_generation in (words["gradient_accumulation_steps"], several):
        trainer = ours(tmp_path, steps_per_generation=steps_per_generation, **words)
        rows, captured = same_words(trainer), Capture(trainer)
        trainer.train()
        found.append((trainer, captured.updates, rows))
    (whole, before, whole_rows), (parts, after, part_rows) = found
    assert (whole_rows, part_rows) == (
        [16] * 3,
        [words["per_device_train_batch_size"] * several] * (3 * words["gradient_accumulation_steps"] // several),
    )
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(flat(one["grads"]), flat(other["grads"]), rtol=1e-4, atol=1e-7)
    last = len(parts._logs["advantages"])
    assert last == words["per_device_train_batch_size"] * several
    for shown in (lambda logs: logs["advantages"], lambda logs: logs["extra"]["baseline"]):
        assert list(shown(parts._logs)) == pytest.approx(list(shown(whole._logs))[-last:], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("given", [{"num_iterations": 2}, {"steps_per_generation": 4}], ids=["iterations", "updates"])
def test_several_updates_are_made_on_one_generation(tmp_path, given):
    """Each with a rate of its own, measured; moments are averaged of the first pass over the completions."""
    trainer = ours(tmp_path, max_steps=4, **given)
    rows, captured = same_words(trainer), Capture(trainer)
    trainer.train()
    size = 16 if "num_iterations" in given else 32
    assert rows == [size] * 2
    first, second = captured.updates[0]["generation"], captured.updates[1]["generation"]
    assert first is second
    assert first is not captured.updates[2]["generation"]
    logs = [log for log in trainer.state.log_history if "reward" in log or "step_kl" in log]
    assert all(log["step_kl"] > 0 and log["learning_rate"] > 0 for log in logs)
    assert len({log["learning_rate"] for log in logs}) == 4


@pytest.mark.parametrize("given", [{"steps_per_generation": 1}, {"steps_per_generation": 3}])
def test_an_update_that_holds_the_same_completions_twice_has_no_halves(tmp_path, caplog, given):
    """They would not be independent: with nothing set the rate stays the user's."""
    trainer = ours(tmp_path, num_iterations=2, per_device_train_batch_size=4, gradient_accumulation_steps=4, **given)
    assert "an update would hold the same completions more than once" in caplog.text
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log or "lr_factor" in log]
    assert all(log["lr_factor"] == 1 for log in logs)
    assert not any("snr" in log for log in logs)


def test_epochs_of_one_prompt_are_refused(tmp_path):
    """An update ends with its epoch, so that all of them would be left out."""
    with pytest.raises(InputError, match=r"1 prompts per epoch, 1 of them generated together.*leave out steps_per_gen"):
        ours(tmp_path, prompts=PROMPTS[:1], per_device_train_batch_size=4, steps_per_generation=1)


def test_the_last_prompt_of_an_epoch_alone_makes_no_update(tmp_path):
    """One prompt's gradient has no noise that could be measured; of equal settings TRL's sampler leaves it out."""
    words = {"per_device_train_batch_size": 4, "steps_per_generation": 1, "log_completions": True}
    trainer = ours(tmp_path, prompts=PROMPTS[:3], max_steps=3, **words)
    captured = Capture(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "reward" in log]
    assert [log["skipped"] for log in logs] == [0, 1, 0]
    assert [log["learning_rate"] > 0 for log in logs] == [True, False, True]
    assert all(
        torch.equal(captured.updates[1]["weights"][name], value)
        for name, value in captured.updates[2]["weights"].items()
    )
