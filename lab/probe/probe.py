"""`python -m lab.probe`: local smoothness at each checkpoint of a run, and along the run's next update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from lab.probe import curvature
from lab.probe.curvature import Samples
from lab.probe.lanczos import Direction, inner
from lab.probe.next_update import standings
from oblrpo.errors import InputError
from oblrpo.intervals import Mean
from oblrpo.policy import Policy, load_policy
from oblrpo.rewards import Rewards
from oblrpo.seeds import seed_of
from oblrpo.settings import RolloutConfig, TrainConfig
from oblrpo.trainer.check import check
from oblrpo.trainer.setup import set_threads
from oblrpo.trainer.task import task_of

Note = Callable[[str], None]
"""Called with a line on what is being done."""

FAR = 1_000_000
"""The probe's own samples take the prompts of steps from this one on, which no run reaches."""


@dataclass(frozen=True)
class Along:
    """What was found along one update of the run, from th to th'."""

    learning_rate: float
    """Rate that the update was made at."""
    length: float
    """Length of the update, || th' - th ||."""
    curvature: Mean
    """Curvature of J along it, (th' - th)' grad^2 J (th' - th) / || th' - th ||^2."""
    secant: float
    """Secant || grad J(th') - grad J(th) || / || th' - th || from two independent halves; 0 where noise drowns it."""
    promised: float | None
    """Improvement that theorem 3 promises, <grad J, th' - th> - (c/2) || th' - th ||^2 with the upper estimate of c;
    None where c is unknown."""
    second_order: float
    """Improvement to second order, <grad J, th' - th> + (1/2) (th' - th)' grad^2 J (th' - th)."""
    realised: Mean
    """Improvement that was made, J(th') - J(th)."""


@dataclass(frozen=True)
class Curvature:
    """The largest |curvature| c of J at one place, from below and from above."""

    lowest: float
    """Least eigenvalue of grad^2 J on the samples that were searched; noise makes it too large in size."""
    highest: float
    """Greatest eigenvalue there, also too large in size."""
    residual: float
    """How far the search may still be from an eigenvalue."""
    elsewhere: Mean
    """Curvature along the steepest direction on other samples; on average no larger in size than c."""

    @property
    def lower(self) -> float:
        """Lower estimate of c: the size of the curvature along the direction found, on other samples."""
        return abs(self.elsewhere.value)

    @property
    def upper(self) -> float:
        """Upper estimate of c: the larger end in size, plus the residual; on average no less than c."""
        return max(abs(self.lowest), abs(self.highest)) + self.residual

    @property
    def rate(self) -> float:
        """Theorem 4's eta_0 = 1 / c by the upper estimate, for steps along the gradient itself (SGD)."""
        return 1 / self.upper if self.upper else math.inf


@dataclass(frozen=True)
class Place:
    """What was found at one checkpoint."""

    step: int
    """Step of the checkpoint."""
    reward: float
    """Mean reward of the second batch."""
    informative: tuple[int, int]
    """Prompts of each batch whose rewards vary."""
    prompts: int
    """Prompts that were drawn for each batch."""
    gradient_norm2: float
    """Estimate of || grad J ||^2 from two independent halves; negative by chance where noise drowns it."""
    curvature: Curvature | None
    """Largest curvature; None where the rewards of a batch vary on no prompt, so that nothing is known of it."""
    path: Along | None
    """What was found along the run's next update; None where a model was probed."""


@dataclass(frozen=True)
class Effort:
    """How many samples and iterations to spend."""

    prompts: int
    """Prompts of each of the two batches."""
    outputs: int
    """Completions a prompt."""
    iterations: int
    """Products with the Hessian, at most."""
    seed: int
    """Seed of the samples and of the first direction."""


def probe_run(run: Path, effort: Effort, device: str | None = None, note: Note = lambda text: None) -> Iterator[Place]:
    """Probe a run at each checkpoint that it has kept, along the update that the run made, or would make, next.

    Args:
        run: the run's folder.
        effort: how much to spend.
        device: where to compute, if not where the run did.
        note: called with a line on what is being done.

    Raises:
        InputError: there is no run or no checkpoint, too few samples, or the run's sampler cannot be had here.
    """
    _check(effort)
    for at in standings(run, device):
        yield _place(at.policy, at.rewards, at.config.rollout, effort, at.step, at.update, note)


def probe_model(config: TrainConfig, effort: Effort, note: Note = lambda text: None) -> Place:
    """Probe the config's model on its task, without an update; `note` is called with a line on what is being done.

    Raises:
        InputError: the model or the task cannot be had, or too few samples.
    """
    _check(effort)
    check(config)
    policy = load_policy(config.policy.model, config.policy)
    set_threads(config.run.threads, policy)
    rewards = Rewards(task_of(config), config.task.rewards, "raise", config.task.reward_seconds)
    return _place(policy, rewards, config.rollout, effort, 0, None, note)


def _check(effort: Effort) -> None:
    if effort.prompts < curvature.FEWEST_PROMPTS or effort.outputs < 2 or effort.iterations < 1:
        raise InputError("a probe needs at least 4 prompts, 2 outputs a prompt and 1 iteration.")
    if not -(2**63) <= effort.seed < 2**63:
        raise InputError(f"probe_seed is {effort.seed}; it must be at least -2^63 and less than 2^63.")


def _place(
    policy: Policy, rewards: Rewards, rollout: RolloutConfig, effort: Effort, step: int,
    update: Callable[[], float] | None, note: Note,
) -> Place:  # fmt: skip
    """Draw two batches that share no problem, from the policy itself, and look at them."""
    note(f"step {step}: drawing 2 batches of {effort.prompts} prompts with {effort.outputs} completions each")
    torch.manual_seed(seed_of(effort.seed, FAR + step))
    rollout = replace(rollout, num_generations=effort.outputs)
    one, two = (
        curvature.draw(policy, rewards, rewards.task.train_batch(FAR + 2 * step + half, effort.prompts), rollout)
        for half in range(2)
    )
    generator = torch.Generator().manual_seed(effort.seed)
    return look(policy, (one, two), effort.iterations, generator, step, update, note)


def look(
    policy: Policy, batches: tuple[Samples, Samples], iterations: int, generator: torch.Generator, step: int,
    update: Callable[[], float] | None, note: Note = lambda text: None,
) -> Place:  # fmt: skip
    """Find the steepest direction of J in the first batch and measure everything in the second.

    Args:
        policy: the policy, left as it was.
        batches: two independent batches of its completions.
        iterations: products with the Hessian, at most.
        generator: random source of the first direction.
        step: step of the checkpoint.
        update: moves the policy on and returns the learning rate; None: do not look along an update.
        note: called with a line on what is being done.
    """
    one, two = batches
    halves = curvature.gradients(policy, two)
    found = None
    note(f"step {step}: the direction in which the reward bends most, at most {iterations} products with the Hessian")
    if one.informative and two.informative:
        ritz = curvature.steepest_curvature(policy, one, iterations, generator)
        elsewhere = curvature.curvature_along(policy, two, ritz.direction)
        found = Curvature(ritz.lowest, ritz.highest, ritz.residual, elsewhere)
    if update is not None:
        note(f"step {step}: along the run's next update")
    return Place(
        step=step,
        reward=float(two.rewards_PG.nanmean()),
        informative=(one.informative, two.informative),
        prompts=two.drawn,
        gradient_norm2=inner(*halves),
        curvature=found,
        path=None if update is None else along(policy, two, halves, None if found is None else found.upper, update),
    )


def along(
    policy: Policy, samples: Samples, halves: tuple[Direction, Direction], c: float | None, update: Callable[[], float]
) -> Along:
    """Make an update, look back along it, and take it back.

    Args:
        policy: the policy, left as it was.
        samples: completions of the policy that the update does not see.
        halves: estimates of grad J from them, as `curvature.gradients` gives them.
        c: a curvature that J does not exceed, if one is known.
        update: moves the policy on and returns the learning rate.
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
