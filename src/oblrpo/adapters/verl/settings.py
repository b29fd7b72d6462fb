"""The adapter's own settings, `+oblrpo.KEY=VALUE` on verl's command line, and what must hold of verl's.

With these its gradient is the one whose signal and noise are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from omegaconf import OmegaConf

from oblrpo.adapters.shared import Rule, check
from oblrpo.errors import InputError
from oblrpo.settings.annotations import Range, check_ranges
from oblrpo.settings.typed import of_mapping
from oblrpo.tables.algorithms import refusal

ESTIMATORS = {"oblr_po": "oblr", "oblr_po_shrunk": "oblr_shrunk"}
"""The names of the advantage estimators in verl, each with its baseline in `estimators.BASELINES`."""


@dataclass(frozen=True)
class Settings:
    """How scores are taken and the rate is set."""

    schedule: Literal["auto", "debiased", "plugin", "off"] = "auto"
    """Factor on actor.optim.lr: auto (measured from the updates themselves; actor.optim.lr is only where it begins),
    debiased or plugin (N SNR / (1 + N SNR)), or off."""
    kl: Annotated[float, Range(1e-6)] = 1.0
    """Nats a completion that a step of the measured rate is meant to move the policy by at most."""
    score_norms: Literal["exact", "calibrated"] = "calibrated"
    """Weights of rewards in the baseline: calibrated, a proxy from the forward alone that learns from exact norms of
    some prompts every calibration_steps steps; or exact squared score norms in every step."""
    calibration_steps: Annotated[int, Range(1)] = 10
    """With calibrated norms, steps between two with exact norms; signal and noise are measured in those alone."""
    calibration_share: Annotated[float, Range(1e-6, 1)] = 0.25
    """With calibrated norms, the share of a batch's prompts that exact norms are taken of, in those steps."""
    inner_products: Literal["exact", "sketched"] = "exact"
    """How the inner products of one prompt's scores are taken, for the SNR: exact (a prompt's outputs go through
    the model together) or sketched (unbiased estimates; micro-batches are verl's own, and a prompt may be spread over
    ranks)."""
    prompts_per_micro_batch: Annotated[int, Range(1)] = 1
    """How many prompts go through the model at a time in the pass that takes exact inner products."""
    sketch_dimensions: Annotated[int, Range(1)] = 4096
    """How many numbers a sketch keeps of a sequence."""
    sketch_directions: Annotated[int, Range(1)] = 16
    """How many random combinations of each matrix's rows a sketch starts from."""
    ledger_steps: Annotated[int, Range(0)] = 0
    """Every so many steps the variance ledger is taken; 0: never."""

    @property
    def needs_moments(self) -> bool:
        """Whether the gradient's signal and noise are measured."""
        return self.schedule != "off"

    @property
    def calibrated(self) -> bool:
        """Whether weights come from a forward alone, and most steps measure neither norms nor signal and noise."""
        return self.score_norms == "calibrated"

    @property
    def exact_pairs(self) -> bool:
        """Whether all outputs of a prompt must go through the model together, on one rank."""
        return self.needs_moments and self.inner_products == "exact"


def read_settings(given: Mapping[str, Any] | None) -> Settings:
    """Return the settings in `config.oblrpo`."""
    settings = of_mapping(Settings, given or {}, "oblrpo")
    check_ranges(settings)
    return settings


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
    Rule("algorithm.adv_estimator", lambda value: value != "gae", "it gives each token an advantage of its own",
         f"one of {', '.join(ESTIMATORS)}"),
    Rule("algorithm.filter_groups.enable", OFF, "selecting prompts by what was sampled changes the objective"),
    Rule("algorithm.rollout_correction.bypass_mode", OFF, "the trainer's own log-probabilities come with the scores"),
    Rule("algorithm.rollout_correction.rollout_is", UNSET, "truncated weights make every baseline biased"),
    Rule("algorithm.rollout_correction.rollout_rs", UNSET, "it drops tokens by what was sampled"),
    Rule(f"{ROLLOUT}.top_p", (1,), "completions are then not samples of the policy"),
    Rule(f"{ROLLOUT}.top_k", (-1, 0), "completions are then not samples of the policy"),
    Rule(f"{ROLLOUT}.full_determinism", OFF, "a prompt's completions, and their turns, would share random numbers"),
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

REPLACED_ENDS = {"glm4_moe", "glm4v", "glm4v_moe", "glm_moe_dsa"}
"""The types of models whose end of a turn, `<|observation|>`, verl replaces by the tool's before it masks tokens."""


def check_tools(rollout: Any, model_type: str, longest: int) -> None:
    """Refuse tools where verl miscounts the policy's tokens, or would leave out episodes that fill `longest` tokens."""
    given = [key for key in ("tool_config_path", "function_tool_path") if rollout.multi_turn[key]]
    if not given:
        return
    tools = f"oblr_po does not work with {ROLLOUT}.multi_turn.{given[0]}={rollout.multi_turn[given[0]]} and"
    if model_type in REPLACED_ENDS:
        why = "verl takes the token that ends the policy's turn for the tool's"
        raise InputError(f"{tools} a {model_type} model: {why}; set it to null, or use another model.")
    if longest < (needed := rollout.prompt_length + rollout.response_length):
        context = f"{ROLLOUT}.max_model_len={longest}: an episode that fills it fails, and verl leaves it out"
        sizes = f"data.max_prompt_length + data.max_response_length={needed}"
        raise InputError(f"{tools} {context}; set it to at least {sizes}, or lower those.")


def check_config(config: Any, settings: Settings) -> None:
    """Refuse what the adapter cannot do exactly, by name."""
    check(
        RULES,
        "oblr_po",
        lambda key: OmegaConf.select(config, key),
        lambda value: "null" if value is None else str(value),
        _refused_together(config.actor_rollout_ref, config.data, settings),
    )


def _refused_together(parts: Any, data: Any, settings: Settings) -> Iterator[str]:
    """What several settings make impossible: "what: why; fix."."""
    actor, batch = parts.actor, f"data.train_batch_size={data.train_batch_size}"
    if actor.ppo_mini_batch_size != data.train_batch_size:
        size = f"{ACTOR}.ppo_mini_batch_size={actor.ppo_mini_batch_size}"
        yield f"{size}: the rate is set for one update per batch; set it to {batch}."
    if actor.loss_agg_mode == "seq-mean-token-sum-norm" and actor.loss_scale_factor is None:
        longest = f"data.max_response_length={data.max_response_length}"
        why = "the divisor would be each micro-batch's longest completion"
        yield f"{ACTOR}.loss_scale_factor=null: {why}; set it to {longest}."
    if settings.needs_moments and data.train_batch_size < 2:
        yield f"{batch}: one prompt's gradient has no measurable noise; set it to at least 2."
    if settings.calibrated and parts.rollout.n < 2:
        why = "+oblrpo.score_norms=calibrated compares a prompt's completions"
        yield f"{ROLLOUT}.n={parts.rollout.n}: {why}; set it to at least 2, or +oblrpo.score_norms=exact."
    if refused := refusal(settings.schedule, actor.optim.optimizer, actor.optim.lr):
        yield f"{ACTOR}.optim with +oblrpo.schedule={settings.schedule}: {refused}"
