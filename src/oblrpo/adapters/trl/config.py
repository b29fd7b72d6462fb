"""The settings of `OBLRPOTrainer`: those of TRL's `GRPOConfig`, some with other defaults, and ours.

And what must hold in TRL for advantages to be right and for signal and noise to be measured; of all else that changes
TRL's objective one sentence says so.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import trl
from trl import GRPOConfig

from oblrpo.adapters.shared import Rule, check, check_version, off
from oblrpo.adapters.trl import sampling
from oblrpo.adapters.trl.accumulated import first_half
from oblrpo.errors import InputError
from oblrpo.rollout.weights import check_weights, is_tied
from oblrpo.step.baseline import SCORE_NORMS
from oblrpo.tables.algorithms import SCHEDULES
from oblrpo.tables.baselines import UNBIASED

LOGGER = logging.getLogger(__name__)

check_version("trl", trl.__version__, (1, 16), (1, 17))  # `OBLRPOTrainer` overrides what is inside it

RULES = (
    Rule("scale_rewards", ("none",), "rewards would be divided by a deviation that depends on the completion itself"),
    Rule("multi_objective_aggregation", ("sum_then_normalize",),
         "each reward would be divided by a deviation that depends on the completion itself"),
    Rule("temperature", lambda value: value > 0, "greedy completions have no score", "temperature=1.0"),
    Rule("optim", lambda value: not any(word in str(value).lower() for word in ("lomo", "layerwise")),
         "it updates weights within the backward, before the gradient is measured", "optim='adamw_torch'"),
    Rule("fp16", (False,), "its loss is scaled, and so are the gradients that are measured", "bf16=True"),
    Rule("fsdp", off, "sharded weights are not handled yet",
         "no fsdp; with sharded weights use oblrpo's verl adapter"),
    Rule("deepspeed", off, "sharded weights are not handled yet",
         "no deepspeed; with sharded weights use oblrpo's verl adapter"),
    Rule("baseline", UNBIASED, "it must be an unbiased one", "one of " + ", ".join(UNBIASED)),
    Rule("score_norms", SCORE_NORMS, "it is unknown", "one of " + ", ".join(SCORE_NORMS)),
    Rule("look_steps", lambda value: value is None or value >= 0, "it must be at least 0", "look_steps=10"),
    Rule("schedule", tuple(SCHEDULES), "it is unknown", "one of " + ", ".join(SCHEDULES)),
)  # fmt: skip

OBJECTIVE = (
    Rule("loss_type", ("luspo", "dr_grpo"), "it weighs completions by their lengths, or by those of the batch"),
    Rule("beta", (0.0,), "its penalty is in the loss"),
    Rule("num_iterations", (1,), "later updates on a batch are off-policy, and clipped"),
    Rule("entropy_coef", (0.0, None), "it adds the entropy's gradient"),
    Rule("use_adaptive_entropy", (False,), "it adds the entropy's gradient"),
    Rule("router_aux_loss_coef", (0.0, None), "it adds the router's gradient"),
    Rule("top_entropy_quantile", (1.0,), "it leaves out tokens"),
    Rule("off_policy_mask_threshold", (None,), "it leaves out completions"),
    Rule("mask_truncated_completions", (False,), "it leaves out completions by what they contain"),
    Rule("vllm_importance_sampling_correction", (False,), "its ratios are bounded"),
    *sampling.RULES,
)  # fmt: skip
"""Under which TRL's objective is the expected reward and nothing else; a sentence names those that do not hold."""


def check_config(args: Any) -> None:
    """Refuse a configuration under which advantages, signal or noise would be wrong, naming each parameter's fix."""
    check(RULES, "OBLRPOTrainer", lambda key: getattr(args, key), repr, _refused_together(args))


def beside_the_reward(trainer: Any, noisy: str, draws: dict[str, Any]) -> list[str]:
    """What makes TRL's objective another than the expected reward, by parameter.

    noisy says what noise there is in TRL's forward, and draws what changes the distribution of completions.
    """
    args, own = trainer.args, "of the model's own generation_config, with which TRL's is filled, "
    said = [
        f"{rule.key}={value!r} ({rule.why})" for rule in OBJECTIVE if not rule.holds(value := getattr(args, rule.key))
    ]
    if args.steps_per_generation > args.gradient_accumulation_steps:
        said.append(f"steps_per_generation={args.steps_per_generation} (later updates on a batch are off-policy)")
    for name, value in draws.items():
        if not any(each.startswith(f"{name}=") for each in said):
            whose = own if getattr(trainer.generation_config, name, value) is None else ""
            said.append(f"{name}={value!r} ({whose}{sampling.SAMPLES})")
    return said + ([f"noise in TRL's forward ({noisy})"] if noisy else [])


def noise_to_come(model: torch.nn.Module, args: Any) -> str:
    """Noise that TRL's forward will have, and has not yet: adapters begin at 0, and NEFTune with the training."""
    if args.neftune_noise_alpha:
        return f"neftune_noise_alpha={args.neftune_noise_alpha}"
    rates = {name: part.p for name, part in model.named_modules() if isinstance(part, torch.nn.Dropout) and part.p}
    return next((f"{name} of {rate:g}, and {len(rates) - 1} more" for name, rate in rates.items()), "")


def _refused_together(args: Any) -> Iterator[str]:
    """What cannot be, of parameters that depend on each other."""
    if (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        yield (
            "reentrant gradient checkpointing, which hides its layers from the score; set "
            "gradient_checkpointing_kwargs={'use_reentrant': False}."
        )
    size, G, parts = args.per_device_train_batch_size, args.num_generations, args.steps_per_generation
    if size * parts % G:
        yield (
            f"per_device_train_batch_size={size}, steps_per_generation={parts} and num_generations={G}: the "
            f"{size * parts} completions that a process generates together must be whole prompts of {G}; make "
            f"per_device_train_batch_size or steps_per_generation a multiple of {G}."
        )
    elif args.schedule in SCHEDULES and SCHEDULES[args.schedule].needs_signal and (why := without_halves(args)):
        yield f"schedule={args.schedule!r} and {why}, or schedule='off'."


def without_halves(args: Any) -> str:
    """Why signal and noise of an update cannot be told apart, and what to set; empty where they can."""
    size, G, steps = args.per_device_train_batch_size, args.num_generations, args.gradient_accumulation_steps
    if args.num_iterations > 1 and args.steps_per_generation % steps:
        return (
            f"num_iterations={args.num_iterations} and steps_per_generation={args.steps_per_generation} with "
            f"gradient_accumulation_steps={steps}: an update would hold the same completions more than once, so that "
            "its halves are not independent; make steps_per_generation a multiple of gradient_accumulation_steps"
        )
    if first_half(steps, size, G):
        return ""
    if size * steps * args.world_size < 2 * G:
        return (
            f"updates of fewer than two prompts ({size} x {steps} completions per process, {G} per prompt): one "
            "prompt's gradient has no measurable noise; set gradient_accumulation_steps to "
            f"{-(-2 * G // (size * args.world_size))} or more"
        )
    if args.look_steps == 1 and steps == args.steps_per_generation and size >= G and size * steps >= 2 * G:
        return ""  # all prompts' own norms are known, if TRL's objective is the expected reward (`OBLRPOTrainer`)
    cure = f"per_device_train_batch_size={size * steps // 2} and gradient_accumulation_steps=2, which is the same "
    return (
        f"per_device_train_batch_size={size} and gradient_accumulation_steps={steps} with {G} completions per prompt: "
        "signal and noise are separated by two halves of an update, each of whole micro-batches and whole prompts; "
        f"set {cure if size * steps % (2 * G) == 0 else 'gradient_accumulation_steps to an even number for an '}update"
    )


def check_trainer(trainer: Any) -> None:
    """Refuse models that cannot be looked at, and launchers of which no process holds the whole weights."""
    check((), "OBLRPOTrainer", str, further=_refused_of(trainer))


def _refused_of(trainer: Any) -> Iterator[str]:
    """What cannot be, of the trainer once it is made."""
    kind, args = trainer.accelerator.distributed_type, trainer.args
    if kind not in {"NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA"}:
        yield (
            f"the launcher {kind.value}: sharded weights are not handled yet; launch with plain data parallelism, or "
            "use oblrpo's verl adapter."
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
    if SCHEDULES[args.schedule].needs_signal and rows // at_once * at_once < 2:  # an update ends with its epoch
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
    kinds = {parameter.dtype for parameter in trainer.model.parameters()}
    if trainer.use_transformers_continuous_batching and args.bf16 and kinds != {torch.bfloat16}:
        yield (
            "use_transformers_continuous_batching=True under bf16=True: TRL then rounds the weights that are trained "
            "to bfloat16 for good; set bf16=False, or leave it out."
        )


@dataclass
class OBLRPOConfig(GRPOConfig):  # type: ignore[misc]
    r"""Configuration of [`OBLRPOTrainer`]; every parameter of [`~trl.GRPOConfig`], and those below.

    Seven of its own defaults (below, first) differ: the gradient of the expected reward is then TRL's, and its noise
    can be measured.
    """

    loss_type: str = field(
        default="luspo",
        metadata={"help": "The sum over tokens of each sequence, the mean over sequences: the expected reward's loss."},
    )
    importance_sampling_level: str = field(
        default="sequence", metadata={"help": "One ratio a completion, as `luspo` is meant to have."}
    )
    scale_rewards: str = field(
        default="none",
        metadata={"help": "Rewards are not scaled: their standard deviation would depend on the completion itself."},
    )
    gradient_accumulation_steps: int = field(
        default=8,
        metadata={"help": "Micro-batches per update. Signal and noise are measured between two halves of them."},
    )
    lr_scheduler_type: str = field(
        default="constant", metadata={"help": "TRL's scheduler, which multiplies the rate of `schedule`."}
    )
    vllm_importance_sampling_correction: bool = field(
        default=False, metadata={"help": "Bounded ratios in the loss would bias the gradient."}
    )
    router_aux_loss_coef: float | None = field(
        default=0.0, metadata={"help": "The router's loss would add a gradient that is not the expected reward's."}
    )

    baseline: str = field(
        default="oblr_shrunk",
        metadata={
            "help": f"What is subtracted from each reward: {', '.join(f'`{name}`' for name in UNBIASED)}. Baselines "
            "that look at the completion's own reward are refused, because they are biased."
        },
    )
    look_steps: int | None = field(
        default=None,
        metadata={
            "help": "Steps between looks, which take exact squared score norms; each of the first five steps has one. "
            "1: every step looks at all prompts, as in the paper; above 1: at as many as 2 % of the run's work pays "
            "for. 0: no looks. None: 10, or 1 with a schedule that needs it (debiased, plugin)."
        },
    )
    score_norms: str = field(
        default="calibrated",
        metadata={
            "help": "Weights of rewards in the oblr baselines: `calibrated` (exact norms if all prompts were looked "
            "at, otherwise a regression on earlier looks), or always a proxy: `length`, `logit`."
        },
    )
    schedule: str | None = field(
        default=None,
        metadata={
            "help": "What sets the learning rate: "
            + "; ".join(f"`{name}`, {row.meaning}" for name, row in SCHEDULES.items())
            + ". None: `auto`, or `off` with a warning if an update has no two halves of whole prompts."
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
        if self.schedule is None:
            self.schedule = "auto"
            if why := without_halves(self):
                self.schedule = "off"
                LOGGER.warning("The learning rate is not measured, and stays yours (schedule='off'): %s.", why)
        check_config(self)
