"""The parts of a run, made from its config; configs that cannot work are refused here, and others adjusted."""

import sys
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from oblrpo.algorithms import ratio_of, resolve
from oblrpo.clock import Clock
from oblrpo.environments import Environments
from oblrpo.errors import InputError
from oblrpo.estimators import SNRSchedule
from oblrpo.memory import keep_freed
from oblrpo.objects import Objects
from oblrpo.policy import Policy, adopt_policy, load_policy, make_policy
from oblrpo.policy.checks import check_lengths
from oblrpo.policy.model import LEAST_COMPLETION
from oblrpo.policy.sequences import MicroBatches
from oblrpo.policy.tool_calls import ToolFormat
from oblrpo.rewards import Rewards, split_weight
from oblrpo.rewards.built_in import is_built_in
from oblrpo.rollout import EpisodeSampler, Sampler, make_sampler
from oblrpo.settings import RolloutConfig, TrainConfig, flatten, with_settings
from oblrpo.step import Learner, Looks, Movement, StepBaseline, counted
from oblrpo.step.look import look_steps
from oblrpo.step.reference import Reference
from oblrpo.tasks import BENCHMARKS, DataTask, Problem, Task
from oblrpo.trainer.optimizers import make_optimizer, make_scheduler

SMALL_MODEL = 5_000_000  # parameters up to which one CPU thread is fastest


def row_batches(rollout: RolloutConfig) -> MicroBatches:
    """Micro-batches of rows that are no groups, as large as those of groups."""
    return MicroBatches(rollout.prompts_per_micro_batch * rollout.num_generations, rollout.tokens_per_micro_batch)


def load_checkpoint(checkpoint: Path, config: TrainConfig) -> Policy:
    """Return the policy of a checkpoint."""
    try:
        return load_policy(str(checkpoint), config.policy)
    except InputError as error:
        fix = "If its files are damaged, remove that folder to resume from the checkpoint before it."
        raise InputError(f"{error} {fix}") from None


def policy_of(config: TrainConfig, objects: Objects, checkpoint: Path | None) -> Policy:
    """Return the policy of a run."""
    if objects.model is not None:
        return adopt_policy(objects.model, objects.tokenizer, config.policy, checkpoint)
    return load_checkpoint(checkpoint, config) if checkpoint else make_policy(config.policy)


def environments_of(config: TrainConfig, objects: Objects | None = None) -> tuple[TrainConfig, Environments]:
    """Return the environments of a run, if it has any, and its config with their reward, as in TRL, and with chat."""
    turns, task = config.turns, config.task
    if not turns.names:
        return config, Environments()
    if not config.policy.model:
        raise InputError("tools need a model whose chat template shows them, and none is named: set model.")
    if config.policy.chat is False:
        raise InputError("calls and results of tools are shown by the model's chat template: leave out --no-chat.")
    objects = objects or Objects()
    objects.check(environment=turns.names)
    environments = Environments(turns.environment, turns.tools, turns.max_tool_response_length, objects.environments)
    own, named = environments.reward, [split_weight(name)[0] for name in task.rewards]
    if turns.environment and task.data and task.task not in BENCHMARKS and not own and not task.rewards:
        raise InputError(
            f"environment {environments.name} has no get_reward(self) and the run no rewards: define it, or name some."
        )
    if is_built_in(own):
        raise InputError(f"the environment's class is called {own}, as a reward of ours is; give it another name.")
    if own and own not in named:
        config = replace(config, task=replace(task, rewards=(*task.rewards, own)))
    return replace(config, policy=replace(config.policy, chat=True)), environments


def with_tools(policy: Policy, environments: Environments | None) -> Policy:
    """Return the policy with prompts that show the tools of its environments."""
    if not environments:
        return policy
    if policy.tokenizer.chat_template is None:
        raise InputError(
            "tools need a chat template that shows them, and the model's tokenizer has none: give an instruct model."
        )
    args = {**policy.format.template_args, "tools": environments.tools}
    return replace(policy, format=replace(policy.format, template_args=args))


def sampler_of(policy: Policy, config: TrainConfig, environments: Environments | None = None) -> Sampler:
    """Return the sampler of a run, which reports what weights of rewards and its correction need of the draws."""
    logps = config.rollout.sampler_correction != "auto"
    sampler = make_sampler(policy, config.rollout, config.policy.trust_remote_code, features=True, logps=logps)
    if not environments:
        return sampler
    how = ToolFormat.of(policy.tokenizer, policy.format, environments.tools)
    return EpisodeSampler(sampler, policy, environments, how, config.turns)


def make_learner(
    policy: Policy, rewards: Rewards, config: TrainConfig, sampler: Sampler | None = None, rows: int | None = None
) -> Learner:
    """Return the learner of a config and a policy, with all its parts; a sampler that is given is not made again.

    `rows` is the number of prompts of the task; None: without number.
    """
    optim, rollout, scores = config.optim, config.rollout, config.scores
    algorithm, iterations = resolve(config.algorithm, optim), config.algorithm.num_iterations
    groups = MicroBatches(rollout.prompts_per_micro_batch, rollout.tokens_per_micro_batch)
    optimizer, row_blocks = make_optimizer(optim, policy.parameters), row_batches(rollout)
    try:
        schedule = SNRSchedule(
            optimizer,
            algorithm.schedule,
            warmup=optim.warmup_steps * iterations,  # the schedule counts updates
            kl=optim.schedule_kl,
            updates=iterations,
            low_precision=policy.low_precision,
        )
    except (ValueError, TypeError) as error:
        raise InputError(f"cannot train with these settings: {error}") from None
    beta, clock, G = config.algorithm.beta, Clock(), rollout.num_generations
    every = look_steps(scores.look_steps, algorithm.schedule)
    return Learner(
        policy=policy,
        sampler=sampler or sampler_of(policy, config),
        rewards=clock.part("rewards")(rewards),
        rollout=rollout,
        micro_batches=row_blocks,
        algorithm=algorithm,
        ratio=ratio_of(config.algorithm, algorithm),
        baseline=StepBaseline(algorithm.baseline, scores.score_norms),
        looks=Looks(policy, rollout.temperature, groups, every, scores.ledger_steps),
        schedule=schedule,
        movement=Movement(policy, rollout.temperature, row_blocks),
        optimizer=optimizer,
        scheduler=make_scheduler(optim.lr_scheduler_type, optimizer, config.run.steps * iterations),
        num_iterations=iterations,
        clip_max=rollout.clip_max,
        reward_clip=config.algorithm.reward_clip,
        reference=Reference(policy, beta, rollout.temperature, row_blocks) if beta else None,
        rows=None if rollout.dynamic_sampling else counted(rows, rollout.prompts_per_step, G, algorithm),
        clock=clock,
    )


def set_threads(threads: int, policy: Policy) -> None:
    """Choose torch's CPU threads: one for a small model, whose threads would only wait for each other.

    On a CPU freed memory is kept from here on; where weights are large, `Learner.update` gives it back.
    """
    if policy.device.type == "cpu":
        keep_freed()
    size = sum(p.numel() for p in policy.model.parameters())
    torch.set_num_threads(threads or (1 if size < SMALL_MODEL else torch.get_num_threads()))


FEWEST = 8  # rows of data from which on a step's number of prompts is chosen
PAIR = 2  # prompts that a step, and a measurement of held-out accuracy, have at least
UNTRAINED = 64
"""Tokens up to which a policy may write that knows nothing yet, and so hardly ever ends by itself."""


def adjust(
    config: TrainConfig, task: Task, policy: Policy, free: Collection[str]
) -> tuple[TrainConfig, list[Problem], int, str]:
    """Let the settings that are `free` give way to the problems there are, and to the model's context.

    Returns:
        The config, the held-out problems, the tokens of the longest prompt, and a line about what has given way.
    """
    before, now, why = flatten(config), flatten(config), dict[str, str]()
    data = task if isinstance(task, DataTask) else None
    if data:
        if "prompts_per_step" in free and len(data.given) < FEWEST:
            raise InputError(
                f"{data.name} has too few rows ({len(data.given)}); give at least {FEWEST}, or set prompts_per_step "
                "yourself." + "".join(f" {note}" for note in data.notes)
            )
        if "warm_start_steps" in free and not now["sft_data"]:
            now["warm_start_steps"], why["warm_start_steps"] = 0, "data has no demonstrations"
        if "heldout_fraction" in free:
            data.hold_out(*(PAIR if name in free else now[name] for name in ("eval_prompts", "prompts_per_step")))
            now["heldout_fraction"] = data.fraction
            why["heldout_fraction"] = f"{len(data.given) - data.rows} of {len(data.given)} rows held out"
        if "prompts_per_step" in free:
            now["prompts_per_step"] = max(PAIR, min(now["prompts_per_step"], data.rows))
            why["prompts_per_step"] = "no more to train on"
    heldout = task.heldout(now["eval_prompts"], PAIR if "eval_prompts" in free else None)
    now["eval_prompts"], why["eval_prompts"] = len(heldout), "no more are held out"
    first = task.train_batch(1, now["prompts_per_step"])
    prompts, sizes = data.prompts if data else ([problem.prompt for problem in [*heldout, *first]], ())
    room, why["max_completion_length"] = now["max_completion_length"], "the model's context"
    least, spare = room, 1 if data else 2  # prompts that are yet to come may be longer
    if "max_completion_length" in free:
        least = LEAST_COMPLETION
        if not (config.policy.model or now["sft_data"] or now["warm_start_steps"]):
            room, why["max_completion_length"] = min(room, UNTRAINED), "a policy that is built begins with random text"
    # Prompts of up to `enough` tokens change nothing below.
    of_vllm = config.rollout.vllm.max_model_len if config.rollout.sampler == "vllm" else None
    group = now["tokens_per_micro_batch"] // now["num_generations"] or sys.maxsize
    enough = min(((of_vllm or sys.maxsize) - room) // spare, group - room)
    longest, of_model = policy.room(prompts, room, least, spare, sizes, enough)
    if (room := config.rollout.fit(longest, of_model, least, spare)) < of_model:
        why["max_completion_length"] = "vllm_args.max_model_len"
    check_lengths(policy, lambda: max(policy.long(prompts, sizes, 0).values()) + room)
    needed = (longest + room) * now["num_generations"]
    now["max_completion_length"], why["tokens_per_micro_batch"] = room, "one prompt with its completions"
    if 0 < now["tokens_per_micro_batch"] < needed:
        if "tokens_per_micro_batch" not in free:
            raise InputError(
                f"tokens_per_micro_batch is {now['tokens_per_micro_batch']}, but the longest prompt with "
                f"{now['num_generations']} completions may take {needed} tokens, and a group stays whole: set it to "
                f"at least {needed}, or lower num_generations or max_completion_length."
            )
        now["tokens_per_micro_batch"] = needed
    bent = {name: reason for name, reason in why.items() if now[name] != before[name]}
    sentences = {name: f"{name} {now[name]} instead of {before[name]} ({reason})" for name, reason in bent.items()}
    words = "; ".join((sentences | {name: why[name] for name in bent if name == "heldout_fraction"}).values())
    # What not setting chat does stands in the head of the run.
    config = with_settings(config, {name: now[name] for name in bent} | {"chat": bool(now["chat"])}, "", ())
    return config, heldout, longest, f"adjusted   {words}\n" if words else ""
