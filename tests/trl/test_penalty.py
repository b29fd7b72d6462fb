"""`beta`: the reward less beta log(pi / pi_ref), with the policy that training began with as the reference."""

import pytest
import torch
from peft import LoraConfig

from oblrpo import estimators
from tests.trl.support import Capture, flat, ours, reward, scores, tiny_policy
from tests.trl.test_gradient import G, assert_close, policy_of

BETA = 0.3
LORA = {"r": 2, "target_modules": "all-linear", "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}


def logps(policy, batch, temperature):
    """log pi(o|q) of every row, one forward each."""
    found = []
    for row in range(len(batch["prompt_ids"])):
        real = {name: batch[f"{name}_ids"][row][batch[f"{name}_mask"][row].bool()] for name in ("prompt", "completion")}
        ids = torch.cat([real["prompt"], real["completion"]])
        with torch.no_grad():
            logits = policy.model(input_ids=ids[None]).logits[0, len(real["prompt"]) - 1 : -1] / temperature
        found.append(logits.log_softmax(-1).gather(1, real["completion"][:, None]).sum())
    return torch.stack(found)


def raw(trainer, batch):
    """The rewards themselves."""
    texts = [trainer.processing_class.batch_decode(batch[f"{name}_ids"], skip_special_tokens=True)
             for name in ("prompt", "completion")]  # fmt: skip
    return torch.tensor(reward(*texts)).view(-1, G)


@pytest.mark.parametrize(
    "given",
    [
        {"baseline": "oblr", "temperature": 0.7},
        {"baseline": "rloo", "peft_config": LoraConfig(**LORA), "gradient_checkpointing": True},
        {"baseline": "oblr", "score_method": "two_pass"},
    ],
    ids=["oblr", "rloo with adapters", "two passes"],
)
def test_the_gradient_is_that_of_the_reward_less_the_penalty(tmp_path, given):
    trainer = ours(
        tmp_path, tiny_policy(torch.float64), max_steps=3, beta=BETA, learning_rate=0.05, schedule="off", **given
    )
    assert trainer.ref_model is None
    captured = Capture(trainer)
    trainer.train()
    first, *_, last = captured.updates
    assert trainer.state.log_history[0]["kl"] == pytest.approx(0, abs=1e-6)
    gradients, kl, tokens = [], 0.0, 0
    for batch in last["batch"]:
        ref_S = logps(policy_of(trainer, first), batch, trainer.temperature)
        policy = policy_of(trainer, last)
        ratio_S = logps(policy, batch, trainer.temperature) - ref_S
        scores_SN = scores(policy, batch, trainer.temperature)
        rewards_PG, norm2_PG = raw(trainer, batch) - BETA * ratio_S.view(-1, G), scores_SN.square().sum(1).view(-1, G)
        b = estimators.baseline(given["baseline"], rewards_PG, norm2_PG=norm2_PG)
        gradients.append((rewards_PG - b).flatten()[:, None] * scores_SN)
        kl, tokens = kl + ratio_S.sum(), tokens + batch["completion_mask"].sum()
    assert_close(-flat(last["grads"]), torch.cat(gradients).mean(0))
    assert trainer.state.log_history[2]["kl"] == pytest.approx(float(kl / tokens), rel=1e-5)
    assert abs(float(kl / tokens)) > 1e-3


def test_a_resumed_run_has_the_reference_that_it_began_with(tmp_path):
    words = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1, "beta": BETA, "learning_rate": 0.05}
    whole = ours(tmp_path / "whole", **words)
    whole.train()
    again = ours(tmp_path / "again", **words)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-1"))
    start = tiny_policy().model.state_dict()
    held = dict(
        zip(
            (n for n, p in again.model.named_parameters() if p.requires_grad),
            again._reference.state_dict()["weights"],
            strict=True,
        )
    )
    assert all(torch.equal(start[name], weight) for name, weight in held.items())
    assert again.state.log_history[1]["kl"] != 0
