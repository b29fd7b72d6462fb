"""The settings of verl that must hold for its gradient to be the one whose signal and noise are measured."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from oblrpo.adapters.shared import Rule, check
from oblrpo.adapters.verl.settings import ESTIMATORS, Settings
from oblrpo.errors import InputError
from oblrpo.tables.schedules import refusal

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{part}" for part in ("actor", "model", "rollout"))

OFF, UNSET = (False, None), (None, False, "")

RULES = (
    Rule("trainer.use_v1", (True,), "the old trainer has no place for score norms"),
    Rule(f"{ACTOR}.strategy", ("fsdp2",), "scores are taken from parameters that FSDP2 shards"),
    Rule(f"{ACTOR}.loss_agg_mode", ("seq-mean-token-sum", "seq-mean-token-sum-norm"),
         "it weights completions by length, which is not the gradient of the expected reward"),
    Rule(f"{ACTOR}.policy_loss.loss_mode", ("gpg",),
         "clipping and ratios of log-probabilities from two passes change the gradient; gpg is -A log pi"),
    Rule(f"{ACTOR}.ppo_epochs", (1,), "after the first update the batch is off-policy"),
    Rule(f"{ACTOR}.use_kl_loss", OFF, "its gradient is not in the baseline or in the signal",
         f"{ACTOR}.use_kl_loss=False and algorithm.use_kl_in_reward=True"),
    Rule(f"{ACTOR}.entropy_coeff", (0, None), "it adds the entropy's gradient"),
    Rule("algorithm.filter_groups.enable", OFF, "selecting prompts by what was sampled changes the objective"),
    Rule("algorithm.rollout_correction.bypass_mode", OFF, "the trainer's own log-probabilities come with the scores"),
    Rule("algorithm.rollout_correction.rollout_is", UNSET, "truncated weights make every baseline biased"),
    Rule("algorithm.rollout_correction.rollout_rs", UNSET, "it drops tokens by what was sampled"),
    Rule(f"{ROLLOUT}.top_p", (1,), "completions are then not samples of the policy"),
    Rule(f"{ROLLOUT}.top_k", (-1, 0), "completions are then not samples of the policy"),
    Rule(f"{ROLLOUT}.temperature", lambda value: value > 0, "greedy completions have no score",
         f"{ROLLOUT}.temperature=1.0"),
    Rule(f"{ACTOR}.ulysses_sequence_parallel_size", (1,), "a sequence's score would be spread over ranks"),
    Rule(f"{MODEL}.use_fused_kernels", OFF, "the fused head hides its weight's use from the score"),
    Rule(f"{MODEL}.use_liger", OFF, "its layers write over the gradients that scores are made of"),
    Rule(f"{ACTOR}.use_prefix_grouper", OFF, "it mixes the completions of a prompt"),
    Rule(f"{MODEL}.mtp.enable", OFF, "its loss adds another gradient"),
    Rule(f"{ACTOR}.fsdp_config.qat.enable", OFF, "quantised layers have no rule"),
    Rule("trainer.critic_warmup", (0, None), "steps without an update would be taken for steps of the policy"),
    Rule("distillation.enabled", OFF, "its loss adds another gradient"),
    Rule(f"{ACTOR}.fsdp_config.offload_policy", OFF,
         "parameters on another device than the activations are not handled",
         f"{ACTOR}.fsdp_config.param_offload=True instead"),
    Rule(f"{ACTOR}.fsdp_config.mixed_precision.param_dtype", lambda value: value not in {"fp16", "float16"},
         "its loss is scaled, and so are the gradients that are measured",
         f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16"),
)  # fmt: skip


def check_config(config: Any) -> None:
    """Refuse what the adapter cannot do exactly, by name."""
    check(
        RULES,
        "oblr_po",
        lambda key: OmegaConf.select(config, key),
        lambda value: "null" if value is None else str(value),
    )
    _check_batch(config)
    if config.algorithm.adv_estimator == "gae":
        choice = " or ".join(ESTIMATORS)
        raise InputError(f"oblr_po needs one advantage per completion, and gae gives each token its own; set {choice}.")


def _check_batch(config: Any) -> None:
    actor = config.actor_rollout_ref.actor
    if actor.ppo_mini_batch_size != config.data.train_batch_size:
        raise InputError(
            f"oblr_po does not work with {ACTOR}.ppo_mini_batch_size={actor.ppo_mini_batch_size}: the rate is set for "
            f"one update per batch; set it to data.train_batch_size={config.data.train_batch_size}."
        )
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        raise InputError(
            f"oblr_po does not work with {ACTOR}.loss_scale_factor=null: the divisor would be each micro-batch's "
            f"longest completion; set it to data.max_response_length={config.data.max_response_length}."
        )


def check_choice(config: Any, settings: Settings) -> None:
    """Refuse settings of the adapter that cannot work with those of verl."""
    if settings.needs_moments and config.data.train_batch_size < 2:
        raise InputError("data.train_batch_size must be at least 2: one prompt's gradient has no measurable noise.")
    if settings.calibrated and config.actor_rollout_ref.rollout.n < 2:
        raise InputError(
            f"+oblrpo.score_norms=calibrated compares a prompt's completions; set {ROLLOUT}.n to at least 2, or "
            "+oblrpo.score_norms=exact."
        )
    optim = config.actor_rollout_ref.actor.optim
    if refused := refusal(settings.schedule, optim.optimizer, optim.lr):
        raise InputError(f"{ACTOR}.optim and +oblrpo.schedule={settings.schedule}: {refused}")
