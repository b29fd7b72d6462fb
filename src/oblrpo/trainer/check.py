"""Settings that cannot work are refused before anything is built, and before torch loads, which takes seconds."""

import os
from os.path import isfile

from oblrpo.algorithms import ratio_of, resolve
from oblrpo.errors import InputError
from oblrpo.model_files import check_policy
from oblrpo.rewards import Rewards, split_weight
from oblrpo.rewards.built_in import is_built_in
from oblrpo.settings import TrainConfig, check_ranges, every_value
from oblrpo.tables.algorithms import refusal
from oblrpo.tables.baselines import BASELINES
from oblrpo.tasks import BENCHMARKS, make_task
from oblrpo.tasks.gym import PREFIX as REASONING_GYM
from oblrpo.trackers import check_trackers

MOST_COMPLETIONS = 2**24  # completions of a step; their bare text would take gigabytes


def check(config: TrainConfig) -> None:
    """Refuse settings that cannot work, before anything is built, and one of several processes that share a run."""
    if (size := os.environ.get("WORLD_SIZE", "")).strip() not in {"", "0", "1"}:
        raise InputError(
            f"oblrpo train runs in one process, and this is one of {size} (WORLD_SIZE, set by torchrun or accelerate "
            "launch): start it without those, or unset WORLD_SIZE. OBLRPOTrainer in TRL, and verl, use several."
        )
    _check_sizes(config)
    algorithm = resolve(config.algorithm, config.optim)
    G, smallest = config.rollout.num_generations, BASELINES[algorithm.baseline].smallest_group
    if smallest > G:
        raise InputError(
            f"the baseline {algorithm.baseline!r} compares a prompt's completions, so num_generations must be at least "
            f"{smallest}, not {G}."
        )
    check_ranges(config)
    if refused := refusal(algorithm.schedule, config.optim.optimizer, config.optim.learning_rate):
        raise InputError(refused)
    if algorithm.smallest_group > G:
        raise InputError(
            f"the normalisation {algorithm.normalisation!r} needs a num_generations of at least "
            f"{algorithm.smallest_group}, not {G}."
        )
    whole = ratio_of(config.algorithm, algorithm).is_importance_weight
    if config.algorithm.num_iterations > 1 and algorithm.schedule == "ess" and not whole:
        raise InputError(
            f"schedule ess follows the importance weights of whole completions, which the ratio {algorithm.ratio!r} "
            "does not use: set ratio to sequence, or another schedule."
        )
    _ = config.rollout.clip_max  # which refuses what cannot be read
    config.rollout.check_temperature(config.rollout.temperature)
    config.rollout.check_at_once(G, "num_generations")
    config.rollout.check_at_once(config.run.eval_samples, "eval_samples")
    if config.rollout.dynamic_sampling and G < 2:
        raise InputError("dynamic_sampling drops prompts whose completions agree; set num_generations to at least 2.")
    warm = config.warm_start
    rows = bool(config.task.data or config.task.task in BENCHMARKS)
    if warm.warm_start_steps and "warm_start_steps" in config.given and rows and not warm.sft_data:
        raise InputError("warm_start_steps needs sft_data or a built-in task, which has demonstrations; data has none.")
    task = config.task
    if not all(isinstance(key, str) for key in task.task_args):
        raise InputError(f"task_args is {task.task_args}; its keys must be names.")
    made = None
    if not rows and ":" not in task.task and not task.task.startswith(REASONING_GYM):  # which load what is not ours
        made = make_task(task.task, config.run.seed, **task.task_args)
    if made and config.turns.environment:
        raise InputError(f"environment needs data, whose rows begin its episodes; the task {task.task!r} has none.")
    names = {text: split_weight(text)[0] for text in task.rewards}
    given = {".", ":"} if not config.turns.environment else set[str]()  # whose reward goes by its class's name
    ours = [t for t, n in names.items() if is_built_in(n) or (given and not (given & set(n) or isfile(f"{n}.py")))]
    Rewards(made, [text for text in ours if made or names[text] != "task"]).close()
    check_policy(config.policy)
    check_trackers(config.run.report_to)
    if config.rollout.sampler == "vllm":
        from oblrpo.rollout.engine import check_version  # which loads torch

        check_version()


def _check_sizes(config: TrainConfig) -> None:
    """Refuse what no machine holds and what no file can: numbers, batches and text."""
    for name, value in every_value(config).items():
        if isinstance(value, int) and name != "seed" and abs(value) >= 2**31:
            raise InputError(f"{name} is beyond 2^31; no machine holds that.")
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text != text.encode("utf-8", "ignore").decode():
                raise InputError(f"{name} is {text!r:.100}, which holds half a surrogate pair; write it as UTF-8.")
            if isinstance(text, str) and "\0" in text:
                raise InputError(f"{name} is {text!r:.100}, which holds the character NUL; leave that out.")
    P, G = config.rollout.prompts_per_step, config.rollout.num_generations
    if P * G > MOST_COMPLETIONS:
        raise InputError(
            f"prompts_per_step x num_generations is {P * G:,} completions per step, more than {MOST_COMPLETIONS:,}; "
            "lower one of them."
        )
