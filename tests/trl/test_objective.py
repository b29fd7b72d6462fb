"""Whatever changes TRL's loss is TRL's: on the same completions and advantages weights are those of GRPOTrainer."""

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from oblrpo.policy import Policy, byte_tokenizer
from tests.trl.support import Capture, flat, ours, theirs, tiny_policy
from tests.trl.test_generations import same_words
from tests.trl.test_sampling import SIZES

FOLLOWED = {
    **{loss: {"loss_type": loss} for loss in ("grpo", "bnpo", "dr_grpo", "dapo", "luspo", "cispo", "sapo", "vespo")},
    "token ratios": {"loss_type": "grpo", "importance_sampling_level": "token", "num_iterations": 2},
    "two-sided": {"num_iterations": 2, "delta": 1.01, "epsilon": 0.4, "epsilon_high": 0.4},
    "beta": {"beta": 0.5},
    "corrected beta": {"beta": 0.5, "use_bias_correction_kl": True, "num_iterations": 2},
    "moving reference": {"beta": 0.5, "sync_ref_model": True, "ref_model_sync_steps": 2},
    "entropy": {"entropy_coef": 0.5},
    "adaptive entropy": {"use_adaptive_entropy": True, "entropy_coef_max": 1.0, "entropy_target": 9.0},
    "high entropies": {"top_entropy_quantile": 0.5},
    "off-policy mask": {"off_policy_mask_threshold": 1e-9, "num_iterations": 2},
    "truncated ones masked": {"mask_truncated_completions": True, "loss_type": "dapo"},
    "updates of a generation": {"steps_per_generation": 4},
    "generations of an update": {"steps_per_generation": 1},
    "parts of groups": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "loss_type": "dapo"},
    "experts": {"router_aux_loss_coef": 0.5},
    "checkpointed": {"gradient_checkpointing": True},
    "compiled": {"torch_compile": True, "torch_compile_backend": "aot_eager"},
    "bf16": {"bf16": True},
    "scheduler": {"lr_scheduler_type": "cosine", "warmup_steps": 1, "weight_decay": 0.1, "max_grad_norm": 0.1},
    "reward_weights": {"reward_weights": [0.5]},
    "temperature": {"temperature": 0.6},
}
WITHOUT_EFFECT = {
    "luspo", "checkpointed", "compiled", "reward_weights", "generations of an update", "updates of a generation",
    "parts of groups",
}  # fmt: skip
"""Options that leave the loss as it is, or change who is trained on when."""


def policy_for(name, folder):
    """A policy that TRL finds in a folder, where it takes its reference from."""
    policy = tiny_policy()
    if name == "experts":
        torch.manual_seed(0)
        policy = Policy(MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4)), byte_tokenizer())
    policy.model.save_pretrained(folder / "model")
    policy.model.config._name_or_path = str(folder / "model")
    return policy


@pytest.mark.parametrize("name", FOLLOWED)
def test_the_weights_are_those_of_grpo_trainer_under_our_advantages(tmp_path, monkeypatch, name):
    """Bit by bit, after three steps; TRL's own advantages lead elsewhere, and so does the loss without the option."""
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)
    advantages, found = [], {}

    class Fed(GRPOTrainer):
        def _generate_and_score_completions(self, inputs):
            output = super()._generate_and_score_completions(inputs)
            return output | {"advantages": fed.pop(0)} if fed else output

    def trained(make, **given):
        words = {"max_steps": 3, "learning_rate": 0.02, "lr_scheduler_type": "constant"} | given
        trainer = make(tmp_path, policy_for(name, tmp_path), **words)
        same_words(trainer)
        captured = Capture(trainer)
        trainer.train()
        return trainer, flat(trainer.model.state_dict()), [flat(update["grads"]) for update in captured.updates]

    def kept(*others, **given):
        trainer, fed_with = ours(*others, schedule="off", **given), advantages
        of = trainer._generate_and_score_completions

        def generate(inputs):
            fed_with.append((output := of(inputs))["advantages"])
            return output

        trainer._generate_and_score_completions = generate
        return trainer

    same = {"importance_sampling_level": "sequence", "scale_rewards": "none", "loss_type": "luspo"}
    same |= {"router_aux_loss_coef": 0.0, "num_generations": 4}
    _, found["ours"], grads = trained(kept, **same | FOLLOWED[name])
    for which, given in (("fed", FOLLOWED[name]), ("their advantages", FOLLOWED[name]), ("without", {})):
        if which == "without" and name in WITHOUT_EFFECT:
            continue
        fed = [] if which == "their advantages" else list(advantages)
        _, found[which], theirs_ = trained(lambda *o, **g: theirs(*o, kind=Fed, **g), **same | given)
        if which == "fed":
            assert all(map(torch.equal, grads, theirs_))
    assert torch.equal(found["ours"], found["fed"])
    assert not torch.equal(found["ours"], found["their advantages"])
    assert name in WITHOUT_EFFECT or not torch.equal(found["ours"], found["without"])


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_an_update_is_measured_by_completions_that_were_trained_on(tmp_path, rows):
    """Where truncated ones are masked, three in four here, those left are enough to measure it by."""
    words = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": 16 // rows, "learning_rate": 0.02}
    trainer = ours(tmp_path, mask_truncated_completions=True, max_steps=3, **words)
    same_words(trainer)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "step_kl" in log]
    assert len(logs) == 3
    assert all(log["step_kl"] > 0 for log in logs)
