"""Where a situation is measured: the README's example with other settings, and how far its policy moves.

`Place.train` calls `oblrpo.train` on the tiny built policy, 32 prompts x 4 completions of at most 16 tokens, and keeps
what every step has truly earned. Nothing here knows how the rate is found.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import oblrpo
from oblrpo.policy import Policy, Sequences, load_policy
from oblrpo.rollout import make_sampler
from oblrpo.settings import PolicyConfig, RolloutConfig
from oblrpo.step import Learner, Samples, StepResult

Figures = dict[str, float]
"""What a situation comes to; a name in parentheses is for the CSV alone."""
Reward = Callable[[int, list[str], dict[str, list[Any]]], list[float]]
"""f(step, completions, columns) -> rewards; step 0 is the measurement before the first."""
EXAMPLE: dict[str, Any] = {
    "model": "", "steps": 60, "prompts_per_step": 32, "max_completion_length": 16, "eval_prompts": 32, "threads": 1,
    "device": "cpu", "eval_steps": 0, "save_steps": 0, "save_total_limit": 1000, "ledger_steps": 0, "progress": False,
}  # fmt: skip
FRESH = 128
"""Fresh prompts that a policy is sampled on, to see how far it has moved."""


def rows(count: int, part: str = "train", first: int = 0) -> list[dict[str, Any]]:
    """The README's prompts, with what distinguishes training from evaluation."""
    return [{"prompt": f"Describe {number} in a word: ", "part": part} for number in range(first, first + count)]


def lowercase(completions: Sequence[str]) -> list[float]:
    """The README's reward: the share of lowercase letters."""
    return [sum(letter.islower() for letter in text) / 16 for text in completions]


class Trained(NamedTuple):
    """A finished run, and what its steps have earned."""

    run: oblrpo.Run
    steps: list[dict[str, Any]]
    """Its metrics, step 1 first."""

    def checkpoint(self, step: int) -> Path:
        """The folder of the policy after a step, where it was saved."""
        return Path(self.run.output) / "checkpoints" / f"step_{step}"

    def column(self, name: str, first: int, last: int) -> list[float]:
        """A metric in steps `first` to `last`, NaN where a step has none."""
        values = [row.get(name) for row in self.steps[first - 1 : last]]
        return [math.nan if value is None else float(value) for value in values]


@dataclass(frozen=True)
class Place:
    """A seed, and a folder for the runs of one situation."""

    folder: Path
    seed: int

    def train(self, name: str, reward: Reward | None = None, **settings: Any) -> Trained:
        """Train anew; `reward` is the share of lowercase letters if none is given."""
        output = self.folder / name
        shutil.rmtree(output, ignore_errors=True)
        step = 0

        def rewarded(completions: list[str], part: list[str], **columns: Any) -> list[float]:
            nonlocal step
            step += part[0] == "train"
            return lowercase(completions) if reward is None else reward(step, completions, columns)

        given = EXAMPLE | {"data": rows(500), "eval_data": rows(32, "held out", 9000)} | settings
        run = oblrpo.train(reward=rewarded, output=str(output), seed=self.seed, **given)
        found = [row for row in run.metrics if row["step"]]
        if step != len(found):
            raise RuntimeError(f"{step} calls of the reward in {len(found)} steps: the step cannot be counted")
        return Trained(run, found)


def load(checkpoint: Path) -> Policy:
    """The policy of a checkpoint, to look at."""
    return load_policy(str(checkpoint), PolicyConfig(model=str(checkpoint), device="cpu"), train=False)


def fresh(policy: Policy, seed: int, length: int = 16) -> Sequences:
    """Completions that the policy draws on prompts which no run has."""
    sampler, prompts = make_sampler(policy, RolloutConfig()), [row["prompt"] for row in rows(FRESH, first=10_000)]
    with policy.seeded(seed):
        return sampler.sample(prompts, 1, length, 1.0).sequences


@torch.no_grad()
def logps(policy: Policy, sequences: Sequences) -> Tensor:
    """The log pi of every token that the policy drew, 0 elsewhere, (S, C)."""
    return torch.where(sequences.own_SC.bool(), policy.logps(sequences).token_logps_SC, 0.0)


def drift(before: Policy, after: Policy, seed: int, length: int = 16) -> float:
    """KL(before || after) in nats a token: the mean log-ratio over fresh completions of `before`."""
    drawn = fresh(before, seed, length)
    return float((logps(before, drawn) - logps(after, drawn)).sum() / drawn.own_SC.sum())


def step_kl(before_SC: Tensor, after_SC: Tensor) -> float:
    """KL(before || after) in nats a completion: the mean over rows of sum over tokens of exp(c) - 1 - c."""
    change_SC = (after_SC - before_SC).double()
    return float((change_SC.expm1() - change_SC).sum() / len(change_SC))


@contextmanager
def whole_steps(length: int = 16) -> Iterator[list[float]]:
    """The KL of every step of the runs made meanwhile, with all its updates, in nats a completion.

    It is taken on fresh completions of the policy before the step, beside whatever the run measures itself.
    """
    learn, found = Learner.learn, list[float]()

    def watched(self: Learner, samples: Samples, number: int = 0) -> StepResult:
        policy = self.policy
        drawn = fresh(policy, number, length)
        before_SC = logps(policy, drawn)
        result = learn(self, samples, number)
        found.append(step_kl(before_SC, logps(policy, drawn)))
        return result

    Learner.learn = watched  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Learner.learn = learn  # type: ignore[method-assign]


def mean(values: Sequence[float]) -> float:
    """The mean of those that are numbers; NaN of none."""
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean of those above 0; NaN of none."""
    return math.exp(mean([math.log(value) for value in values if value > 0 and math.isfinite(value)] or [math.nan]))


def first_step(values: Sequence[float], level: float, window: int = 1) -> float:
    """The first step at which the mean of the last `window` reaches a level, from 1; infinite if none does."""
    for step in range(window, len(values) + 1):
        if sum(values[step - window : step]) / window >= level:
            return step
    return math.inf
