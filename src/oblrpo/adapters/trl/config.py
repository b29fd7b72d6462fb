"""The settings of `OBLRPOTrainer`: those of TRL's `GRPOConfig`, some with other defaults, and ours.

And what must hold in TRL for the gradient to be the mean over sequences of A grad log pi, and for it to be measured.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
from trl import GRPOConfig

from oblrpo.adapters.shared import Rule, check, check_version, off
from oblrpo.adapters.trl import sampling
from oblrpo.errors import InputError
from oblrpo.rollout.weights import check_weights, is_tied
from oblrpo.tables.algorithms import SCHEDULES
from oblrpo.tables.baselines import UNBIASED

check_version("trl", trl.__version__, (1, 16), (1, 17))  # `OBLRPOTrainer` overrides what is inside it

LOGGER = logging.getLogger(__name__)

ADDED = "it adds a gradient that is neither in the baseline nor in the signal"

RULES = (
    Rule("loss_type", ("luspo",), "it weights or clips tokens differently from the gradient of the expected reward",
         "loss_type='luspo', the sum over each sequence's tokens"),
    Rule("scale_rewards", ("none",), "rewards would be divided by a deviation that depends on the completion itself"),
    Rule("multi_objective_aggregation", ("sum_then_normalize",),
         "each reward would be divided by a deviation that depends on the completion itself"),
    Rule("num_iterations", (1,), "after the first update the batch is off-policy"),
    Rule("beta", lambda value: value >= 0, "a reward for leaving the reference has no bound", "beta=0.0"),
    Rule("sync_ref_model", (False,), "the reference must stay the initial policy"),
    Rule("delta", (None,), "it clips ratios"),
    Rule("entropy_coef", (0.0, None), ADDED),
    Rule("use_adaptive_entropy", (False,), ADDED),
    Rule("router_aux_loss_coef", (0.0,), ADDED),
    Rule("top_entropy_quantile", (1.0,), "it leaves out tokens"),
    Rule("off_policy_mask_threshold", (None,), "it leaves out completions"),
    Rule("mask_truncated_completions", (False,), "masking completions by what they contain changes the objective",
         "mask_truncated_completions=False, and let the reward score truncated completions"),
    Rule("vllm_importance_sampling_correction", (False,), "truncated ratios make every baseline biased"),
    *sampling.RULES,
    Rule("temperature", lambda value: value > 0, "greedy completions have no score", "temperature=1.0"),
    Rule("optim", lambda value: not any(word in str(value).lower() for word in ("lomo", "layerwise")),
         "it updates weights within TRL's backward, which is not run", "optim='adamw_torch'"),
    Rule("torch_compile", (False,), "a compiled model cannot be recorded"),
    Rule("fp16", (False,), "its loss is scaled, and so are the gradients that are measured", "bf16=True"),
    Rule("fsdp", off, "no process holds a sequence's gradient",
         "no fsdp; with sharded weights use oblrpo's verl adapter"),
    Rule("deepspeed", off, "it runs the backward itself",
         "no deepspeed; with sharded weights use oblrpo's verl adapter"),
    Rule("baseline", UNBIASED, "it must be an unbiased one", "one of " + ", ".join(UNBIASED)),
    Rule("score_norms", ("exact", "calibrated"), "it is unknown", "'exact' or 'calibrated'"),
    Rule("score_method", ("auto", "gram", "instantiate", "two_pass"), "it is unknown"),
    Rule("calibration_steps", lambda value: value >= 1, "it must be at least 1", "calibration_steps=10"),
    Rule("schedule", tuple(SCHEDULES), "it is unknown", "one of " + ", ".join(SCHEDULES)),
)  # fmt: skip


def check_config(args: Any) -> None:
    """Refuse a configuration that cannot be trained with exactly, naming each parameter and its fix."""
    check(RULES, "OBLRPOTrainer", lambda key: getattr(args, key), repr, _refused_together(args))


def _refused_together(args: Any) -> Iterator[str]:
    """What cannot be, of parameters that depend on each other."""
    if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        yield (
            "reentrant gradient checkpointing, which hides its layers from the score; set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
    size, G, parts = args.per_device_train_batch_size, args.num_generations, args.steps_per_generation
    if args.gradient_accumulation_steps % parts:
        yield (
            f"steps_per_generation={parts} and gradient_accumulation_steps={args.gradient_accumulation_steps}: what is "
            "generated together would be used before and after an update; leave out steps_per_generation and "
            "generation_batch_size, or make gradient_accumulation_steps a multiple of steps_per_generation."
        )
    rows = size * parts
    if size % G and (G % size or rows % G):
        yield (
            f"per_device_train_batch_size={size} and num_generations={G}: a micro-batch must hold whole prompts or, of "
            f"{G} completions, a number that divides them, and the {rows} generated together must be whole prompts; "
            f"make it a multiple of {G}, or a divisor and gradient_accumulation_steps larger."
        )
    if size < G and args.score_method not in {"auto", "two_pass"}:
        yield (
            f"score_method={args.score_method!r} and per_device_train_batch_size={size}: one pass takes all {G} "
            "completions of a prompt together; set score_method='auto'."
        )
    if size * args.gradient_accumulation_steps * args.world_size < 2 * G:
        yield (
            f"updates of fewer than two prompts ({size} x {args.gradient_accumulation_steps} completions per process, "
            f"{G} per prompt), because one prompt's gradient has no measurable noise; set "
            f"gradient_accumulation_steps to {-(-2 * G // (size * args.world_size))} or more."
        )


def check_trainer(trainer: Any) -> None:
    """Refuse models and launchers without gradients of single sequences, or that sample from another policy."""
    check((), "OBLRPOTrainer", str, further=_refused_of(trainer))


def _refused_of(trainer: Any) -> Iterator[str]:
    """What cannot be, of the trainer once it is made."""
    kind, args = trainer.accelerator.distributed_type, trainer.args
    if kind not in {"NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA"}:
        yield (
            f"the launcher {kind.value}: no process holds a sequence's gradient; launch with plain data parallelism, "
            "or use oblrpo's verl adapter."
        )
    if getattr(trainer, "is_distributed_loading_by_transformers", False):
        yield "a model that is loaded in shards; load it whole."
    if args.n_gpu > 1:
        yield "several GPUs in one process; start it with accelerate launch or torchrun."
    if trainer.accelerator.mixed_precision not in {"no", "bf16"}:
        yield f"mixed precision {trainer.accelerator.mixed_precision}; set bf16=True."
    if trainer._is_vlm:
        yield (
            "images, and the processor of this model handles them; for prompts of text alone hand over its tokenizer: "
            "processing_class=AutoTokenizer.from_pretrained(...)."
        )
    at_once = args.generation_batch_size // args.num_generations
    rows = len(trainer.train_dataset) if hasattr(trainer.train_dataset, "__len__") else 2 * at_once
    if rows // at_once * at_once < 2:  # an update ends with its epoch
        yield (
            f"{rows} prompts per epoch, {at_once} of them generated together: every update would hold at most one, "
            "whose gradient has no measurable noise; give more, or leave out steps_per_generation."
        )
    if args.use_vllm:
        try:
            check_weights(trainer.model)
        except InputError as error:
            yield f"use_vllm=True: {error}"
        if (tied := bool(getattr(trainer.model.config, "tie_word_embeddings", False))) != is_tied(trainer.model):
            yield (
                f"use_vllm=True: the config says tie_word_embeddings={tied}, which vLLM follows; embedding and head "
                "(with their adapters) are otherwise"
            )
    if trainer.rollout_func is not None:
        return  # whose log-probabilities are compared with the policy's, batch by batch
    for name, value in sampling.not_the_policy_s(trainer).items():
        where, fix = f"the trainer's {name}", f"leave {name} out"
        if getattr(trainer.generation_config, name) is None:
            where = f"{name} of the model's own generation_config, with which TRL's is filled"
            fix = f"load the model, set model.generation_config.{name} = None, and hand it over"
        yield f"{where}, {value!r}: {sampling.SAMPLES}; {fix}."
    kinds = {parameter.dtype for parameter in trainer.model.parameters()}
    if trainer.use_transformers_continuous_batching and args.bf16 and kinds != {torch.bfloat16}:
        yield (
            "use_transformers_continuous_batching=True under bf16=True: TRL then rounds the weights that are trained "
            "to bfloat16 for good; set bf16=False, or leave it out."
        )


@dataclass
class OBLRPOConfig(GRPOConfig):  # type: ignore[misc]
    r"""Configuration of [`OBLRPOTrainer`]; every parameter of [`~trl.GRPOConfig`], and those below.

    Seven of its own defaults (below, first) differ, so that a configuration in which nothing else is set is valid.
    """

    loss_type: str = field(
        default="luspo",
        metadata={"help": "The sum over tokens of each sequence, the mean over sequences; no other is the gradient."},
    )
    importance_sampling_level: str = field(
        default="sequence", metadata={"help": "No effect, because updates are on-policy. TRL requires it with luspo."}
    )
    scale_rewards: str = field(
        default="none",
        metadata={"help": "Rewards are not scaled: their standard deviation would depend on the completion itself."},
    )
    gradient_accumulation_steps: int = field(
        default=8,
        metadata={"help": "Micro-batches per update. An update needs at least two prompts, to measure their noise."},
    )
    lr_scheduler_type: str = field(
        default="constant", metadata={"help": "TRL's scheduler, which multiplies the rate of `schedule`."}
    )
    vllm_importance_sampling_correction: bool = field(
        default=False, metadata={"help": "Truncated ratios in the loss would make every baseline biased."}
    )
    router_aux_loss_coef: float | None = field(
        default=0.0, metadata={"help": "The router's loss would add a gradient that is not measured."}
    )

    baseline: str = field(
        default="oblr_shrunk",
        metadata={
            "help": f"What is subtracted from each reward: {', '.join(f'`{name}`' for name in UNBIASED)}. Baselines "
            "that look at the completion's own reward are refused, because they are biased."
        },
    )
    score_norms: str = field(
        default="exact",
        metadata={
            "help": "Weights of rewards in the oblr baselines: `exact` squared score norms in every step, or "
            "`calibrated`, a proxy from the forward alone that learns from exact norms every `calibration_steps` "
            "steps. The gradient is unbiased with either."
        },
    )
    calibration_steps: int = field(
        default=10, metadata={"help": "With `score_norms='calibrated'`, steps between two with exact norms."}
    )
    score_method: str = field(
        default="auto",
        metadata={
            "help": "How norms and gradient are taken: `gram` or `instantiate` in one backward, which differ in "
            "memory; `two_pass` in a pass for norms (or calibrated weights) and one for the gradient, in the least; "
            "`auto` is one backward, and `two_pass` where a micro-batch is smaller than a group. All are exact."
        },
    )
    schedule: str = field(
        default="auto",
        metadata={
            "help": "Factor on the learning rate: "
            + "; ".join(f"`{name}`, {row.meaning}" for name, row in SCHEDULES.items())
        },
    )
    schedule_kl: float | None = field(
        default=None,
        metadata={
            "help": f"Most nats per completion that a step of `auto` may take (None: {SCHEDULES['auto'].nats}); the "
            f"target of `kl` ({SCHEDULES['kl'].nats})."
        },
    )

    def __post_init__(self) -> Any:
        super().__post_init__()
        if self.use_liger_kernel:  # type: ignore[has-type]
            LOGGER.warning("use_liger_kernel is ignored: its layers compute the same, but hide it from score norms.")
            self.use_liger_kernel = False
        check_config(self)
