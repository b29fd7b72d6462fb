"""From a config to the parts of a run, and what no config may say."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import get_scheduler

from oblrpo.algorithms import Algorithm, resolve
from oblrpo.config import OptimConfig, RolloutConfig, TrainConfig
from oblrpo.errors import InputError
from oblrpo.estimators import BASELINES
from oblrpo.policy import Policy, check_policy, load_policy
from oblrpo.rollout.vllm import LEAST_TEMPERATURE
from oblrpo.scores import METHODS
from oblrpo.settings import flatten
from oblrpo.tasks import BENCHMARKS
from oblrpo.trackers import check_trackers
from oblrpo.trainer.algorithm1 import Learner
from oblrpo.trainer.score_norms import SCORE_NORMS

SMALL_MODEL = 5_000_000

PRECONDITIONED = ("Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad")

MOST = sys.float_info.max
RANGES = (
    # setting, least, most
    ("prompts_per_step", 2, MOST),
    ("num_generations", 1, MOST),
    ("max_completion_length", 1, MOST),
    ("prompts_per_micro_batch", 0, MOST),
    ("temperature", 1e-3, MOST),
    ("num_iterations", 1, MOST),
    ("importance_sampling_clip_max", 0, MOST),
    ("vllm_gpu_memory_utilization", 0, 1),
    ("vllm_max_model_length", 0, MOST),
    ("score_memory_mb", 0, MOST),
    ("calibration_steps", 0, MOST),
    ("ledger_steps", 0, MOST),
    ("prior_strength", -1, MOST),
    ("prior_memory", 0, 1),
    ("schedule_kl_every", 1, MOST),
    ("learning_rate", 0, MOST),
    ("max_grad_norm", 0, MOST),
    ("warmup_steps", 0, MOST),
    ("steps", 0, MOST),
    ("eval_steps", 0, MOST),
    ("eval_prompts", 2, MOST),
    ("eval_samples", 1, MOST),
    ("save_steps", 0, MOST),
    ("save_total_limit", 1, MOST),
    ("threads", 0, MOST),
    ("seed", -(2**63), 2**63 - 1),
    ("num_hidden_layers", 1, MOST),
    ("initializer_range", 0, MOST),
    ("max_position_embeddings", 2, MOST),
    ("warm_start_steps", 0, MOST),
    ("warm_start_batch", 1, MOST),
    ("warm_start_learning_rate", 0, MOST),
    ("warm_start_noise", 0, 1),
    ("max_prompt_length", 0, MOST),
    ("reward_seconds", 1e-3, MOST),
)
"""What every number may be; NaN is within no range."""


def check(config: TrainConfig) -> None:
    """Refuse settings that cannot work, before anything is built.

    Raises:
        InputError: names the setting.
    """
    algorithm = resolve(config.algorithm, config.optim)
    G, smallest = config.rollout.num_generations, BASELINES[algorithm.baseline].smallest_group
    if smallest > G:
        raise InputError(
            f"the baseline {algorithm.baseline!r} compares outputs of a prompt, so num_generations must be at least "
            f"{smallest}, not {G}."
        )
    for key, least, most in RANGES:
        value = flatten(config)[key]
        if not least <= value <= most:
            raise InputError(
                f"{key} is {value}; it must be a finite number of at least {least:g}"
                + (f" and at most {most:g}." if most < MOST else ".")
            )
    _check_schedule(config.optim, algorithm.schedule)
    if algorithm.normalisation == "group_std" and G < 2:
        raise InputError(f"the normalisation 'group_std' needs a num_generations of at least 2, not {G}.")
    _check_scores(config, algorithm)
    _check_sampler(config.rollout)
    if -1 < config.algorithm.prior_strength < 0:
        raise InputError(
            f"prior_strength is {config.algorithm.prior_strength}; it must be at least 0, or -1 for a choice."
        )
    if config.warm_start.warm_start_steps and (config.task.data or config.task.task in BENCHMARKS):
        raise InputError("warm_start_steps needs a built-in task, which can demonstrate; data cannot.")
    check_policy(config.policy)
    check_trackers(config.run.report_to)


def _check_schedule(optim: OptimConfig, schedule: str) -> None:
    if schedule == "auto" and optim.optimizer in {"Rprop", "Adafactor"}:
        raise InputError(f"schedule 'auto' sets the learning rate, which {optim.optimizer} makes its own; try AdamW.")
    if schedule == "auto" and not optim.learning_rate:
        raise InputError("schedule 'auto' needs a learning_rate above 0 to start from.")
    if optim.schedule_metric == "optimizer" and optim.optimizer_args.get("centered"):
        raise InputError("schedule_metric 'optimizer' needs plain averages of squared gradients; leave out centered.")
    if optim.schedule_metric == "optimizer" and optim.optimizer not in PRECONDITIONED:
        raise InputError(
            f"schedule_metric 'optimizer' needs squared gradients, which {optim.optimizer} does not keep; "
            f"choose one of: {', '.join(PRECONDITIONED)}."
        )


def _check_scores(config: TrainConfig, algorithm: Algorithm) -> None:
    scores = config.scores
    methods = [name for name in METHODS if name != "streamed"]  # which gives no gradient
    known = (("score_method", scores.score_method, methods), ("score_norms", scores.score_norms, SCORE_NORMS))
    for key, value, table in known:
        if value not in table:
            raise InputError(f"unknown {key} {value!r}; choose one of: {', '.join(table)}.")
    if scores.score_method == "folds" and not BASELINES[algorithm.baseline].spanned:
        spanned = ", ".join(name for name, baseline in BASELINES.items() if baseline.spanned)
        raise InputError(
            f"score_method folds keeps three sums a prompt, which do not give the baseline {algorithm.baseline!r}; "
            f"choose one of: {spanned}."
        )
    if scores.ledger == "exact" and config.rollout.prompts_per_micro_batch:
        raise InputError("ledger 'exact' compares all pairs of completions at once; set prompts_per_micro_batch to 0.")
    if scores.score_norms == "calibrated" and (not scores.calibration_steps or config.rollout.num_generations < 2):
        raise InputError(
            "score_norms 'calibrated' needs calibration_steps of at least 1 and num_generations of at least 2."
        )


def _check_sampler(rollout: RolloutConfig) -> None:
    if 0 < rollout.importance_sampling_clip_max < 1:
        raise InputError(
            f"importance_sampling_clip_max is {rollout.importance_sampling_clip_max}; below 1 it would cut "
            "weights that need no correction. Set it to at least 1, or to 0 for weights that are not truncated."
        )
    if rollout.sampler == "vllm" and rollout.temperature < LEAST_TEMPERATURE:
        raise InputError(
            f"vLLM samples at a temperature of at least {LEAST_TEMPERATURE}, not at {rollout.temperature}; raise it, "
            "or use the sampler transformers."
        )


def load_checkpoint(checkpoint: Path, config: TrainConfig) -> Policy:
    """The policy of a checkpoint.

    Raises:
        InputError: a file is missing or damaged.
    """
    try:
        return load_policy(str(checkpoint), config.policy)
    except InputError as error:
        mend = "If its files are damaged, remove that folder to resume from the checkpoint before it."
        raise InputError(f"{error} {mend}") from None


def make_learner(policy: Policy, config: TrainConfig, algorithm: Algorithm) -> Learner:
    """Optimizer, scheduler and learner for a policy.

    Raises:
        InputError: the optimizer or the schedule refuses its settings, or the model has a layer without a rule.
    """
    optimizer = make_optimizer(config.optim, policy)
    scheduler = get_scheduler(
        config.optim.lr_scheduler_type, optimizer, 0, config.run.steps * config.algorithm.num_iterations
    )
    try:
        return Learner(
            policy, algorithm, optimizer, scheduler, config.rollout, config.algorithm, config.optim, config.scores
        )
    except (ValueError, TypeError) as error:
        raise InputError(f"these settings cannot be trained with: {error}") from None


def make_optimizer(config: OptimConfig, policy: Policy) -> torch.optim.Optimizer:
    """The named class of torch.optim on the policy's trainable parameters.

    Raises:
        InputError: no such class, or it refuses its arguments.
    """
    kind = getattr(torch.optim, config.optimizer, None)
    if config.optimizer in {"LBFGS", "SparseAdam"}:
        raise InputError(f"{config.optimizer} needs a closure or sparse gradients, which there are none; try AdamW.")
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InputError(f"torch.optim has no optimizer {config.optimizer!r}; try AdamW or SGD.")
    if refused := {"maximize", "differentiable", "capturable"} & set(config.optimizer_args):
        raise InputError(f"optimizer_args must not set {', '.join(sorted(refused))}: the update descends the loss -J.")
    try:
        return kind(policy.parameters, lr=config.learning_rate, **config.optimizer_args)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise InputError(f"{config.optimizer} refuses its settings: {error}.") from None


def set_threads(threads: int, policy: Policy) -> None:
    """Choose torch's CPU threads: threads of a small model spend their time waiting for each other."""
    size = sum(p.numel() for p in policy.model.parameters())
    torch.set_num_threads(threads or (1 if size < SMALL_MODEL else torch.get_num_threads()))
