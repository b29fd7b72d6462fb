"""What must hold in TRL for the gradient to be the mean over sequences of A grad log pi, and for it to be measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from oblrpo.errors import InputError
from oblrpo.estimators import BASELINES, SCHEDULE_MODES

UNBIASED = tuple(name for name, entry in BASELINES.items() if entry.unbiased)
"""The baselines that the adapter takes."""


class Rule(NamedTuple):
    """A condition on one parameter of the configuration."""

    key: str
    holds: Callable[[Any], bool]
    why: str
    mend: str


def _off(value: Any) -> bool:
    return not value


def _is(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


SAMPLES = "outputs are then not samples of the policy whose score is taken"
ADDED = "it adds a gradient that is neither in the baseline nor in the signal"

RULES = (
    Rule(
        "loss_type",
        _is("luspo"),
        "it weighs or clips tokens in another way than the gradient of the expected reward",
        "loss_type='luspo', the sum over each sequence's tokens",
    ),
    Rule(
        "scale_rewards",
        _is("none"),
        "rewards would be divided by a deviation that depends on the output itself",
        "scale_rewards='none'",
    ),
    Rule(
        "multi_objective_aggregation",
        _is("sum_then_normalize"),
        "each reward would be divided by a deviation that depends on the output itself",
        "multi_objective_aggregation='sum_then_normalize'",
    ),
    Rule("num_iterations", _is(1), "after the first update the batch is off-policy", "num_iterations=1"),
    Rule("beta", _off, ADDED, "beta=0.0 and put the penalty into the reward"),
    Rule("sync_ref_model", _off, "there is no reference model without beta", "sync_ref_model=False"),
    Rule("delta", _is(None), "it clips ratios", "delta=None"),
    Rule("entropy_coef", _off, ADDED, "entropy_coef=0.0"),
    Rule("use_adaptive_entropy", _off, ADDED, "use_adaptive_entropy=False"),
    Rule("router_aux_loss_coef", _is(0), ADDED, "router_aux_loss_coef=0.0"),
    Rule("top_entropy_quantile", _is(1), "it leaves out tokens", "top_entropy_quantile=1.0"),
    Rule("off_policy_mask_threshold", _is(None), "it leaves out outputs", "off_policy_mask_threshold=None"),
    Rule(
        "mask_truncated_completions",
        _off,
        "leaving out outputs for what they are makes another objective",
        "mask_truncated_completions=False and let the reward say what a truncated completion is worth",
    ),
    Rule("disable_dropout", bool, "with dropout a score is not that of the policy which sampled",
         "disable_dropout=True"),
    Rule("vllm_importance_sampling_correction", _off, "truncated ratios make every baseline biased",
         "vllm_importance_sampling_correction=False"),
    Rule("top_p", _is(1), SAMPLES, "top_p=1.0"),
    Rule("top_k", _off, SAMPLES, "top_k=0"),
    Rule("min_p", _off, SAMPLES, "min_p=None"),
    Rule("repetition_penalty", _is(1), SAMPLES, "repetition_penalty=1.0"),
    Rule("temperature", lambda value: value > 0, "greedy outputs have no score", "temperature=1.0"),
    Rule("generation_kwargs", _off, "they may change how outputs are sampled", "generation_kwargs=None"),
    Rule("cast_lm_head_to_fp32", _off, "the head's weight is then used around its module",
         "cast_lm_head_to_fp32=False; log-probabilities are taken in float32 anyway"),
    Rule(
        "optim",
        lambda value: not any(word in str(value).lower() for word in ("lomo", "layerwise")),
        "it updates weights within TRL's backward, which is not run",
        "optim='adamw_torch'",
    ),
    Rule("use_liger_kernel", _off, "its layers hide how their weights are used", "use_liger_kernel=False"),
    Rule("torch_compile", _off, "a compiled model cannot be recorded", "torch_compile=False"),
    Rule("neftune_noise_alpha", _off, "the score is not that of the policy which sampled", "neftune_noise_alpha=None"),
    Rule("fp16", _off, "its loss is scaled, and so are the gradients that are measured", "bf16=True"),
    Rule("fsdp", _off, "no process holds a sequence's gradient",
         "no fsdp; with sharded weights use oblrpo's verl adapter"),
    Rule("deepspeed", _off, "it takes the backward into its own hands",
         "no deepspeed; with sharded weights use oblrpo's verl adapter"),
    Rule("baseline", _is(*UNBIASED), "there are, unbiased: " + ", ".join(UNBIASED), "one of those"),
    Rule("score_norms", _is("exact", "calibrated"), "there is no such choice", "'exact' or 'calibrated'"),
    Rule("score_method", _is("auto", "gram", "instantiate"), "there is no such choice", "'auto'"),
    Rule("calibration_steps", lambda value: value >= 1, "it is a number of steps", "calibration_steps=10"),
    Rule("schedule", _is(*SCHEDULE_MODES), "there is no such choice", "one of " + ", ".join(SCHEDULE_MODES)),
    Rule("schedule_kl_every", lambda value: value >= 1, "it is a number of completions", "schedule_kl_every=4"),
)  # fmt: skip


def check_config(args: Any) -> None:
    """Refuse a configuration that cannot be trained with exactly, naming the parameter and its cure.

    Raises:
        InputError: a parameter has such a value.
    """
    for rule in RULES:
        value = getattr(args, rule.key)
        if not rule.holds(value):
            raise InputError(f"OBLRPOTrainer does not work with {rule.key}={value!r}: {rule.why}; set {rule.mend}.")
    if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise InputError(
            "OBLRPOTrainer does not work with reentrant gradient checkpointing, which hides its layers from the "
            "score; set gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
    if args.steps_per_generation != args.gradient_accumulation_steps:
        raise InputError(
            f"OBLRPOTrainer does not work with steps_per_generation={args.steps_per_generation} and "
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: an update needs its own whole batch; "
            "leave out steps_per_generation and generation_batch_size."
        )
    size, G = args.per_device_train_batch_size, args.num_generations
    if size % G:
        raise InputError(
            f"OBLRPOTrainer does not work with per_device_train_batch_size={size} and num_generations={G}: all "
            f"completions of a prompt go through the model together; make it a multiple of {G}."
        )
    if args.generation_batch_size < 2 * G:
        raise InputError(
            "OBLRPOTrainer needs at least two prompts an update, because one prompt's gradient has no measurable "
            "noise; set gradient_accumulation_steps to 2 or more."
        )


def check_trainer(trainer: Any) -> None:
    """Refuse models and launchers under which a sequence's gradient cannot be had.

    Raises:
        InputError: there is one of these.
    """
    kind = trainer.accelerator.distributed_type
    if kind not in {"NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA"}:
        raise InputError(
            f"OBLRPOTrainer does not work under {kind.value}: no process holds a sequence's gradient; launch with "
            "plain data parallelism, or use oblrpo's verl adapter."
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        raise InputError("OBLRPOTrainer does not work on a model that is loaded in shards; load it whole.")
    if trainer.args.n_gpu > 1:
        raise InputError(
            "OBLRPOTrainer does not work on several GPUs of one process; start it with accelerate launch or torchrun."
        )
    if trainer.accelerator.mixed_precision not in {"no", "bf16"}:
        raise InputError(
            f"OBLRPOTrainer does not work with mixed precision {trainer.accelerator.mixed_precision}; set bf16=True."
        )
    if trainer._is_vlm:
        raise InputError("OBLRPOTrainer does not work with models of images; use one of text.")
