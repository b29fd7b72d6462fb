"""`oblrpo probe`: local smoothness at each checkpoint of a run, and along the very next update the run would make."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from oblrpo.algorithms import resolve
from oblrpo.config import RolloutConfig, TrainConfig
from oblrpo.errors import InputError
from oblrpo.policy import Policy, load_policy
from oblrpo.research.probe import curvature
from oblrpo.research.probe.curvature import Samples
from oblrpo.research.probe.intervals import Measured
from oblrpo.research.probe.lanczos import Direction, inner
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
    promised: float | None
    """Theorem 3: <grad J, th' - th> - (c/2) || th' - th ||^2 with the upper estimate of c; None where it is unknown."""
    second_order: float
    """<grad J, th' - th> + (1/2) (th' - th)' grad^2 J (th' - th)."""
    realised: Measured
    """J(th') - J(th)."""


@dataclass(frozen=True)
class Curvature:
    """The largest |curvature| of J at one place, from below and from above."""

    lowest: float
    """Least eigenvalue of grad^2 J on the samples it was looked for in."""
    highest: float
    """Greatest; noise makes both too large in size."""
    residual: float
    """How far the search may still be from an eigenvalue."""
    elsewhere: Measured
    """Curvature of the steepest direction on other samples: on average no larger than c in size."""

    @property
    def lower(self) -> float:
        """|curvature| along the direction found, on other samples: its value is no more than c, its error aside."""
        return abs(self.elsewhere.value)

    @property
    def upper(self) -> float:
        """The size of the larger end in sample, and the residual: on average no less than c, if the search is done."""
        return max(abs(self.lowest), abs(self.highest)) + self.residual

    @property
    def rate(self) -> float:
        """1 / c by the upper estimate: theorem 4's eta_0 for a step along the gradient itself (SGD)."""
        return 1 / self.upper if self.upper else math.inf


@dataclass(frozen=True)
class Place:
    """What was found at one checkpoint."""

    step: int
    reward: float
    informative: tuple[int, int]
    """Prompts of each batch whose rewards vary."""
    prompts: int
    """Of each batch."""
    gradient_norm2: float
    """|| grad J ||^2, from two independent halves; negative by chance where noise drowns it."""
    curvature: Curvature | None
    """None where the rewards of a batch vary on no prompt: then nothing is known of it."""
    path: Along | None


@dataclass(frozen=True)
class Effort:
    """How many samples and iterations to spend."""

    prompts: int
    outputs: int
    iterations: int
    seed: int


def probe_run(run: Path, effort: Effort, device: str | None = None) -> Iterator[Place]:
    """At each checkpoint that the run has kept, with the update that the run made, or would make, next.

    Args:
        run: its folder.
        effort: how much to spend.
        device: where to, if not where the run was.

    Raises:
        InputError: there is no run, no checkpoint, or too few samples.
    """
    _check(effort)
    folder = RunFolder(run)
    config = folder.saved_config()
    config = replace(config, scores=replace(config.scores, ledger="off", calibration_steps=0))
    if device is not None:
        config = replace(config, policy=replace(config.policy, device=device))
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
    if not -(2**63) <= effort.seed < 2**63:
        raise InputError(f"probe_seed is {effort.seed}; it must be at least -2^63 and less than 2^63.")


def _place(
    policy: Policy, rewards: Rewards, rollout: RolloutConfig, effort: Effort, step: int,
    next_update: tuple[Learner, TrainConfig] | None,
) -> Place:  # fmt: skip
    """Draw two batches that share no problem; from then on nothing is drawn but the run's own next batch."""
    torch.manual_seed(seed_of(effort.seed, FAR + step))
    rollout = replace(rollout, num_generations=effort.outputs)
    one, two = (
        curvature.draw(policy, rewards, rewards.task.train_batch(FAR + 2 * step + half, effort.prompts), rollout)
        for half in range(2)
    )
    update = None if next_update is None else lambda: _update(policy, rewards, step, *next_update)
    generator = torch.Generator().manual_seed(effort.seed)
    return look(policy, (one, two), effort.iterations, generator, step, update)


def _update(policy: Policy, rewards: Rewards, step: int, learner: Learner, config: TrainConfig) -> float:
    """Make the run's next update; the rate it was made at."""
    torch.manual_seed(seed_of(config.run.seed, step + 1))
    problems = rewards.task.train_batch(step + 1, config.rollout.prompts_per_step)
    rollouts = sample(
        policy, [problem.prompt for problem in problems], config.rollout.num_generations,
        config.rollout.max_completion_length, config.rollout.temperature,
    )  # fmt: skip
    rewards_PG = torch.tensor(rewards(problems, rollouts.completions), device=policy.device)
    return learner.learn(rollouts, rewards_PG, step + 1)[-1].learning_rate


def look(
    policy: Policy, batches: tuple[Samples, Samples], iterations: int, generator: torch.Generator, step: int,
    update: Callable[[], float] | None,
) -> Place:  # fmt: skip
    """What two batches say of J where the policy stands: the steepest direction of the first, the rest of the second.

    Args:
        policy: left as it was.
        batches: of its completions, apart.
        iterations: products with the Hessian, at most.
        generator: of the first direction.
        step: whose checkpoint it is.
        update: moves the policy on, and returns at which rate.
    """
    one, two = batches
    halves = curvature.gradients(policy, two)
    found = None
    if one.informative and two.informative:
        ritz = curvature.steepest_curvature(policy, one, iterations, generator)
        elsewhere = curvature.curvature_along(policy, two, ritz.direction)
        found = Curvature(ritz.lowest, ritz.highest, ritz.residual, elsewhere)
    return Place(
        step=step,
        reward=float(two.rewards_PG.mean()),
        informative=(one.informative, two.informative),
        prompts=len(two.advantages_PG),
        gradient_norm2=inner(*halves),
        curvature=found,
        path=None if update is None else along(policy, two, halves, None if found is None else found.upper, update),
    )


def along(
    policy: Policy, samples: Samples, halves: tuple[Direction, Direction], c: float | None, update: Callable[[], float]
) -> Along:
    """Make an update, look back along it, and take it back.

    Args:
        policy: left as it was.
        samples: of its completions, which the update knows nothing of.
        halves: grad J by them, as `curvature.gradients` gives it.
        c: a curvature that J does not exceed, if one is known.
        update: moves the policy on, and returns at which rate.
    """
    before = [p.detach().clone() for p in policy.parameters]
    try:
        rate = update()
        realised = curvature.improvement(policy, samples)
        after = curvature.gradients(policy, samples)
        change = [p.detach() - old for p, old in zip(policy.parameters, before, strict=True)]
    finally:
        with torch.no_grad():
            for p, old in zip(policy.parameters, before, strict=True):
                p.copy_(old)
    bend = curvature.curvature_along(policy, samples, change)
    length2 = inner(change, change)
    first = sum(inner(half, change) for half in halves) / 2
    turns = [
        [new - old for new, old in zip(later, half, strict=True)] for later, half in zip(after, halves, strict=True)
    ]
    return Along(
        learning_rate=rate,
        length=length2**0.5,
        curvature=bend,
        secant=(max(inner(*turns), 0.0) / length2) ** 0.5 if length2 else 0.0,
        promised=None if c is None else first - c / 2 * length2,
        second_order=first + bend.value / 2 * length2,
        realised=realised,
    )


def print_place(place: Place) -> None:
    """A few lines, for people."""
    one, two = place.informative
    print(
        f"step {place.step}: reward {place.reward:.3f}, which varies on {one} and {two} of {place.prompts} prompts; "
        f"||grad J||^2 {place.gradient_norm2:.3g}"
    )
    if place.curvature is None:
        print("  curvature      unknown: no reward varies in one of the batches; give more prompts or outputs")
    else:
        _print_curvature(place.curvature)
    if place.path is not None:
        _print_path(place.path)


def _print_curvature(found: Curvature) -> None:
    other = found.elsewhere
    along_it = f"{1 / found.lower:.3g}" if found.lower > other.margin else "unknown (not told from 0)"
    print(
        f"  curvature      {found.lowest:.3g} to {found.highest:.3g} where it was looked for (residual "
        f"{found.residual:.2g}); |c| {found.lower:.3g} +- {other.margin:.2g} along that direction on other samples "
        f"(95 %)\n"
        f"  1 / c          {found.rate:.3g} by the upper estimate, {found.upper:.3g}; along the direction found "
        f"{along_it}: for steps along the gradient itself (SGD)"
    )


def _print_path(path: Along) -> None:
    if not path.length:
        print(f"  next update    rate {path.learning_rate:.3g}: it moves nothing")
        return
    bound = "unknown" if path.promised is None else f"{path.promised:+.4f}"
    print(
        f"  next update    rate {path.learning_rate:.3g}, length {path.length:.3g}, curvature along it "
        f"{path.curvature.value:.3g} +- {path.curvature.margin:.2g}, secant {path.secant:.3g}\n"
        f"  improvement    bound {bound} (upper estimate of c), second order {path.second_order:+.4f}, realised "
        f"{path.realised.value:+.4f} +- {path.realised.margin:.4f}"
    )
