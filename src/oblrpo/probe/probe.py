"""`oblrpo probe`: local smoothness at each checkpoint of a run, and along the very next update the run would make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from oblrpo.algorithms import resolve
from oblrpo.config import RolloutConfig, TrainConfig
from oblrpo.errors import InputError
from oblrpo.policy import Policy, load_policy
from oblrpo.probe import curvature
from oblrpo.probe.curvature import Direction, Measured, Samples
from oblrpo.rewards import Rewards
from oblrpo.rollout import sample
from oblrpo.runs import RunFolder, load_state
from oblrpo.seeds import seed_of
from oblrpo.trainer.algorithm1 import Learner
from oblrpo.trainer.setup import check, load_checkpoint, make_learner, set_threads
from oblrpo.trainer.task import task_of

FAR = 1_000_000
"""Steps whose prompts no run has drawn."""


@dataclass(frozen=True)
class Along:
    """Along one update of the run."""

    learning_rate: float
    length: float
    """|| th' - th ||."""
    curvature: Measured
    """(th' - th)' grad^2 J (th' - th) / || th' - th ||^2."""
    secant: float
    """|| grad J(th') - grad J(th) || / || th' - th ||, from two independent halves; 0 where noise makes it negative."""
    promised: float
    """Theorem 3: <grad J, th' - th> - (c/2) || th' - th ||^2 with the measured c."""
    second_order: float
    """<grad J, th' - th> + (1/2) (th' - th)' grad^2 J (th' - th)."""
    realised: Measured
    """J(th') - J(th)."""


@dataclass(frozen=True)
class Place:
    """What was found at one checkpoint."""

    step: int
    reward: float
    gradient_norm2: float
    """|| grad J ||^2, from two independent halves; negative by chance where noise drowns it."""
    in_sample: float
    """Largest |curvature| on the samples it was looked for in: too large by noise."""
    smoothness: Measured
    """|curvature| of that direction on other samples: c is at least that, but for its error."""
    path: Along | None

    @property
    def safe_rate(self) -> float:
        """1 / c at the upper end of its 95 % interval: theorem 4's eta_0 for a step along the gradient itself (SGD)."""
        return 1 / (abs(self.smoothness.value) + 1.96 * self.smoothness.stderr)


@dataclass(frozen=True)
class Effort:
    """How many samples and iterations to spend."""

    prompts: int
    outputs: int
    iterations: int
    seed: int


def probe_run(run: Path, effort: Effort) -> Iterator[Place]:
    """At each checkpoint that the run has kept, with the update that the run made, or would make, next.

    Raises:
        InputError: there is no run, no checkpoint, or too few samples.
    """
    _check(effort)
    folder = RunFolder(run)
    config = folder.saved_config()
    config = replace(config, scores=replace(config.scores, ledger="off", calibration_steps=0))
    steps = folder.checkpoint_steps()
    if not steps:
        raise InputError(f"{run} holds no checkpoint yet.")
    rewards, algorithm = _rewards(config), resolve(config.algorithm, config.optim)
    for step in steps:
        checkpoint = folder.checkpoint(step)
        policy = load_checkpoint(checkpoint, config)
        set_threads(config.run.threads, policy)
        state = load_state(checkpoint)
        learner = make_learner(policy, config, algorithm)
        learner.load_state_dict(state, str(run))
        yield _place(policy, rewards, config.rollout, effort, step, (learner, config))


def probe_model(config: TrainConfig, effort: Effort) -> Place:
    """Of the config's model on its task, without an update.

    Raises:
        InputError: the model or the task cannot be had, or too few samples.
    """
    _check(effort)
    check(config)
    policy = load_policy(config.policy.model, config.policy)
    set_threads(config.run.threads, policy)
    return _place(policy, _rewards(config), config.rollout, effort, 0, None)


def _rewards(config: TrainConfig) -> Rewards:
    return Rewards(task_of(config), config.task.rewards, "raise", config.task.reward_seconds)


def _check(effort: Effort) -> None:
    if effort.prompts < 4 or effort.outputs < 2 or effort.iterations < 1:
        raise InputError("a probe needs at least 4 prompts, 2 outputs a prompt and 1 iteration.")


def _place(
    policy: Policy, rewards: Rewards, rollout: RolloutConfig, effort: Effort, step: int,
    next_update: tuple[Learner, TrainConfig] | None,
) -> Place:  # fmt: skip
    torch.manual_seed(seed_of(effort.seed, FAR + step))
    rollout = replace(rollout, num_generations=effort.outputs)
    one, two = (
        curvature.draw(policy, rewards, rewards.task.train_batch(FAR + 2 * step + half, effort.prompts), rollout)
        for half in range(2)
    )
    even, odd = curvature.gradients(policy, two)
    generator = torch.Generator().manual_seed(effort.seed)
    direction, in_sample = curvature.steepest_curvature(policy, one, effort.iterations, generator)
    along = curvature.curvature_along(policy, two, direction)
    sign = 1.0 if in_sample >= 0 else -1.0
    smoothness = Measured(sign * along.value, along.stderr)
    path = None if next_update is None else _path(policy, rewards, two, (even, odd), smoothness, step, *next_update)
    return Place(
        step=step,
        reward=_reward(two),
        gradient_norm2=curvature.inner(even, odd),
        in_sample=abs(in_sample),
        smoothness=smoothness,
        path=path,
    )


def _reward(samples: Samples) -> float:
    return float(samples.rewards_PG.mean())


def _path(
    policy: Policy, rewards: Rewards, samples: Samples, halves: tuple[Direction, Direction], smoothness: Measured,
    step: int, learner: Learner, config: TrainConfig,
) -> Along:  # fmt: skip
    """Make the run's next update and look back along it."""
    before = [p.detach().clone() for p in policy.parameters]
    torch.manual_seed(seed_of(config.run.seed, step + 1))
    problems = rewards.task.train_batch(step + 1, config.rollout.prompts_per_step)
    rollouts = sample(
        policy, [problem.prompt for problem in problems], config.rollout.num_generations,
        config.rollout.max_completion_length, config.rollout.temperature,
    )  # fmt: skip
    rewards_PG = torch.tensor(rewards(problems, rollouts.completions), device=policy.device)
    updates = learner.learn(rollouts, rewards_PG, step + 1)
    realised = curvature.improvement(policy, samples)
    after_even, after_odd = curvature.gradients(policy, samples)
    change = [p.detach() - old for p, old in zip(policy.parameters, before, strict=True)]
    with torch.no_grad():
        for p, old in zip(policy.parameters, before, strict=True):
            p.copy_(old)
    bend = curvature.curvature_along(policy, samples, change)
    length2 = curvature.inner(change, change)
    first = sum(curvature.inner(half, change) for half in halves) / 2
    turns = [
        [new - old for new, old in zip(after, half, strict=True)]
        for after, half in zip((after_even, after_odd), halves, strict=True)
    ]
    return Along(
        learning_rate=updates[-1].learning_rate,
        length=length2**0.5,
        curvature=bend,
        secant=(max(curvature.inner(*turns), 0.0) / length2) ** 0.5 if length2 else 0.0,
        promised=first - max(smoothness.value, 0.0) / 2 * length2,
        second_order=first + bend.value / 2 * length2,
        realised=realised,
    )


def print_place(place: Place) -> None:
    """A few lines, for people."""
    c = place.smoothness
    print(
        f"step {place.step}: reward {place.reward:.3f}, ||grad J||^2 {place.gradient_norm2:.3g}\n"
        f"  curvature      c >= {c.value:.3g} +- {1.96 * c.stderr:.2g} (95 %, other samples; {place.in_sample:.3g} "
        "where it was looked for)\n"
        f"  safe eta_0     {place.safe_rate:.3g} = 1 / c at the upper end, for steps along the gradient itself (SGD)"
    )
    if place.path is None:
        return
    along = place.path
    print(
        f"  next update    rate {along.learning_rate:.3g}, length {along.length:.3g}, curvature along it "
        f"{along.curvature.value:.3g} +- {1.96 * along.curvature.stderr:.2g}, secant {along.secant:.3g}\n"
        f"  improvement    bound {along.promised:+.4f}, second order {along.second_order:+.4f}, realised "
        f"{along.realised.value:+.4f} +- {1.96 * along.realised.stderr:.4f}"
    )
