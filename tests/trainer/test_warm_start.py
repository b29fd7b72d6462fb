"""Supervised learning: the loss is that of completions alone, and blocks change nothing but memory."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from oblrpo.errors import DivergedError, InputError
from oblrpo.policy import tokens_of
from oblrpo.policy.sequences import MicroBatches
from oblrpo.settings import TrainConfig
from oblrpo.settings.train import WarmStartConfig
from oblrpo.tasks import DataTask, Problem
from oblrpo.trainer.demonstrations import Demonstration, accumulate_loss, demonstrations_of, warm_start

PROMPTS = ["ab=", "a long prompt=", "c=", "xy", "z="]
COMPLETIONS = ["b", "cd", "a long completion", "", "12"]


def gradient(policy):
    found = torch.cat([p.grad.flatten() for p in policy.parameters])
    policy.model.zero_grad()
    return found


def by_hand(policy):
    """Cross entropy of transformers' own labels, row by row without padding: completion and end token only."""
    total, tokens = torch.zeros(()), 0
    for prompt, completion in zip(PROMPTS, COMPLETIONS, strict=True):
        prompt_ids = policy.tokenizer(prompt).input_ids
        shown = [*policy.tokenizer(completion, add_special_tokens=False).input_ids, policy.end_tokens[0]]
        logits_TV = policy.model(torch.tensor([prompt_ids + shown])).logits[0]
        labels = torch.tensor([-100] * (len(prompt_ids) - 1) + shown)
        total = total + cross_entropy(logits_TV[:-1], labels, ignore_index=-100, reduction="sum")
        tokens += len(shown)
    return total / tokens


@pytest.mark.parametrize("rows", [0, 1, 2, 5, 9])
def test_the_loss_is_that_of_completions_only(tiny_policy, rows):
    expected = by_hand(tiny_policy)
    expected.backward()
    theirs = gradient(tiny_policy)
    loss = accumulate_loss(tiny_policy, tiny_policy.sequences(PROMPTS, COMPLETIONS), MicroBatches(rows))
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    torch.testing.assert_close(gradient(tiny_policy), theirs, rtol=1e-4, atol=1e-6)


def test_rows_of_a_batch_may_each_fill_the_context(tiny_policy):
    """A long prompt and another row's long completion do not have to fit together."""
    batch = tiny_policy.sequences(["a" * 2000, "b"], ["c", "d" * 2000])
    assert batch.lengths_S.tolist() == [2, 2001]
    assert batch.ids_ST.shape[1] > tiny_policy.longest
    alone = [accumulate_loss(tiny_policy, tiny_policy.sequences([p], [c])) for p, c in (("a" * 2000, "c"),)]
    logps_S = tiny_policy.logps(batch).logps_S
    assert -logps_S[0].item() / 2 == pytest.approx(alone[0], rel=1e-4)


def test_what_the_model_cannot_read_is_named(tiny_policy):
    assert len(tokens_of(tiny_policy, ["a" * 2040], ["b" * 7])[1][0]) == 8
    with pytest.raises(InputError, match=r"x line 3: prompt and completion have 2049 tokens .* the model reads 2048"):
        tokens_of(tiny_policy, ["c", "a" * 2040], ["b", "b" * 8], ["x line 2", "x line 3"])


def test_the_rate_rises_and_falls(tiny_policy, monkeypatch):
    rates = []
    step = torch.optim.AdamW.step

    def watched(self, *arguments, **more):
        rates.append(self.param_groups[0]["lr"])
        return step(self, *arguments, **more)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    for steps in (4, 50, 200):
        rates.clear()
        warm_start(tiny_policy, lambda step: (["a"], ["b"]), steps, 1e-4)
        rise = {4: 1, 50: 5, 200: 20}[steps]  # a tenth of the steps, and 20 at the most
        cosine = [(1 + math.cos(math.pi * step / steps)) / 2 for step in range(steps)]
        assert rates == pytest.approx([1e-4 * min(1, (step + 1) / rise) * cosine[step] for step in range(steps)])


def test_the_gradient_of_a_step_is_clipped_to_norm_1(tiny_policy, monkeypatch):
    """Weights five times as large have a gradient above it."""
    with torch.no_grad():
        for parameter in tiny_policy.parameters:
            parameter.mul_(5)
    accumulate_loss(tiny_policy, tiny_policy.sequences(PROMPTS, COMPLETIONS))
    assert gradient(tiny_policy).norm() > 1.5
    norms, step = [], torch.optim.AdamW.step

    def watched(self, *arguments, **more):
        norms.append(torch.cat([p.grad.flatten() for p in self.param_groups[0]["params"]]).norm().item())
        return step(self, *arguments, **more)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched)
    warm_start(tiny_policy, lambda step: (PROMPTS, COMPLETIONS), 1, 1e-4)
    assert norms == pytest.approx([1.0], rel=1e-4)


def test_a_loss_without_a_value_ends_it(tiny_policy):
    with torch.no_grad():
        tiny_policy.parameters[0].fill_(float("nan"))
    with pytest.raises(DivergedError, match="loss of the supervised learning"):
        warm_start(tiny_policy, lambda step: (["a"], ["b"]), 2, 1e-4)


def test_every_row_is_learned_from_once_an_epoch(tiny_policy):
    """In batches of four, of which the last is short; in another order in the next epoch, alike in another process."""
    rows = [Demonstration(f"row {n}", f"{n}=", str(n), f"{n}=") for n in range(11)]
    warm = WarmStartConfig(sft_data=("mine",), warm_start_args={"batch": 4})
    config = TrainConfig(warm_start=warm)
    heldout = [Problem("7=", "7")]
    found, again = (demonstrations_of(config, DataTask("mine", []), heldout, tiny_policy, rows) for _ in range(2))
    assert found.steps == 3
    assert found.notes == ["1 of 11 rows of sft_data have held-out prompts; they are left out."]
    epochs = [[found.batch(step) for step in range(start, start + 3)] for start in (0, 3)]
    for epoch in epochs:
        assert [len(prompts) for prompts, _ in epoch] == [4, 4, 2]
        drawn = [pair for prompts, completions in epoch for pair in zip(prompts, completions, strict=True)]
        assert sorted(drawn) == sorted((f"{n}=", str(n)) for n in range(11) if n != 7)
    assert epochs[0] != epochs[1]
    assert epochs[1] == [again.batch(step) for step in (3, 4, 5)]
