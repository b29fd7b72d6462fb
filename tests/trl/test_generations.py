"""Several generations an update: `steps_per_generation` below `gradient_accumulation_steps`."""

import hashlib

import pytest
import torch

from oblrpo.errors import InputError
from tests.trl.support import PROMPTS, Capture, flat, ours

G = 4


def same_words(trainer):
    """Let completions depend on nothing but their prompt and their number within its group; return the calls' rows."""
    rows = []

    def turn(prompt_ids, *_, **__):
        rows.append(len(prompt_ids))
        seeds = (f"{ids} {row % G}".encode() for row, ids in enumerate(prompt_ids))
        return [list(hashlib.sha256(seed).digest()[:8]) for seed in seeds], None

    trainer._generate_single_turn = turn
    return rows


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"baseline": "rloo"},
        {"score_method": "two_pass", "beta": 0.1},
        {"score_norms": "calibrated", "calibration_steps": 2, "schedule": "debiased"},
        {
            "score_norms": "calibrated",
            "calibration_steps": 2,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 8,
            "steps_per_generation": 4,
        },
    ],
    ids=["one pass", "rloo", "two passes with a penalty", "calibrated", "halves of groups"],
)
def test_an_update_of_several_generations_is_that_of_one(tmp_path, given):
    found = []
    words = {"max_steps": 3, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, **given}
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
    for key in ("snr", "trace_cov", "step_kl", "learning_rate", "baseline/mean"):
        if key in whole.state.log_history[2]:
            assert parts.state.log_history[2][key] == pytest.approx(whole.state.log_history[2][key], rel=1e-3), key
    last = len(parts._logs["advantages"])
    assert last == words["per_device_train_batch_size"] * several
    for shown in (lambda logs: logs["advantages"], lambda logs: logs["extra"]["baseline"]):
        assert list(shown(parts._logs)) == pytest.approx(list(shown(whole._logs))[-last:], rel=1e-3, abs=1e-6)


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
