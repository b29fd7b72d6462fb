"""A run at each of its checkpoints, with the update that it made, or would make, next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.rewards import Rewards
from oblrpo.rollout import Sampler
from oblrpo.runs import RunFolder
from oblrpo.runs.state_files import load_state
from oblrpo.seeds import seed_of
from oblrpo.settings import TrainConfig
from oblrpo.step import Learner
from oblrpo.tasks import Task
from oblrpo.trainer.setup import load_checkpoint, make_learner, sampler_of, set_threads
from oblrpo.trainer.task import drop_long_prompts, task_of


@dataclass(frozen=True)
class Standing:
    """A run as it stood at one checkpoint."""

    step: int
    """Step of the checkpoint."""
    policy: Policy
    """Policy of the checkpoint."""
    config: TrainConfig
    """Settings of the run."""
    rewards: Rewards
    """The run's rewards; a completion that the run would leave out is NaN."""
    update: Callable[[], float]
    """Makes the run's next update of the policy and returns its learning rate, 0 where the run would make none."""


def standings(run: Path, device: str | None = None) -> Iterator[Standing]:
    """Load a run at each checkpoint that it has kept, oldest first; the run's folder is left as it is.

    Args:
        run: the run's folder.
        device: where to compute, if not where the run did.

    Raises:
        InputError: there is no run or no checkpoint, or the run's sampler cannot be had here.
    """
    folder = RunFolder(run)
    config = folder.saved_config()
    if device is not None:
        config = replace(config, policy=replace(config.policy, device=device))
    steps = folder.checkpoint_steps()
    if not steps:
        raise InputError(f"{run} holds no checkpoint yet.")
    task = task_of(config)
    rewards = Rewards(task, config.task.rewards, config.task.on_reward_error, config.task.reward_seconds)
    sampler: Sampler | None = None
    try:
        for step in steps:
            checkpoint = folder.checkpoint(step)
            policy = load_checkpoint(checkpoint, config)
            if sampler is None:
                drop_long_prompts(task, policy, config.task.max_prompt_length)
                sampler = _sampler(policy, config, checkpoint)
            set_threads(config.run.threads, policy)
            learner = make_learner(policy, rewards, config, sampler)
            learner.load_state_dict(load_state(checkpoint), str(run))
            update = partial(_update, learner, task, config, step + 1)
            yield Standing(step, policy, config, rewards, update)
    finally:
        rewards.close()


def _sampler(policy: Policy, config: TrainConfig, checkpoint: Path) -> Sampler:
    try:
        return sampler_of(policy, config)
    except InputError as error:
        raise InputError(
            f"the run's next update needs the run's sampler: {error} "
            f"`python -m lab.probe {checkpoint}` measures that policy without an update."
        ) from None


def _update(learner: Learner, task: Task, config: TrainConfig, step: int) -> float:
    """Do what `trainer.loop` does in this step."""
    torch.manual_seed(seed_of(config.run.seed, step))
    learner.sampler.sync(learner.policy)
    problems = task.train_batch(step, config.rollout.prompts_per_step)
    updates = learner.step(problems, step).updates
    return updates[-1].learning_rate if updates else 0.0
