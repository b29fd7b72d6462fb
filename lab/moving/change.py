"""Rewards with outliers, and rewards that change: M9, M10, M12 to M14."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from lab.moving.place import Figures, Place, Reward, first_step, geometric_mean, lowercase, mean

RLOO: dict[str, Any] = {"algorithm": "rloo", "schedule": "off"}
CHANGE = 25
"""The last step of the first reward, which is at .9 or so: a policy that is surer writes no digit to learn from."""


def noisy(seed: int, clean: dict[int, float]) -> Reward:
    """The example's reward + .3 t with 1.5 degrees of freedom; `clean` takes the mean of each step without it."""

    def reward(step: int, completions: list[str], _: dict[str, list[Any]]) -> list[float]:
        earned = lowercase(completions)
        clean.setdefault(step, sum(earned) / len(earned))  # a later call of the same step is that of evaluation
        noise = 0.3 * np.random.default_rng((seed, step)).standard_t(1.5, len(earned))
        return [value + float(more) for value, more in zip(earned, noise, strict=True)]

    return reward


ARMS: dict[str, dict[str, Any]] = {
    "default": {},
    "default, reward_clip 1": {"reward_clip": 1.0},
    "rloo at 3e-3": RLOO | {"learning_rate": 3e-3},
    "rloo at 3e-3, reward_clip 1": RLOO | {"learning_rate": 3e-3, "reward_clip": 1.0},
}


def outliers(at: Place, of: Callable[[int, dict[int, float]], Reward] = noisy) -> Figures:
    """M9: what the last five steps have earned without the noise, after 75 steps."""
    found: Figures = {}
    for name, settings in ARMS.items():
        clean: dict[int, float] = {}
        at.train(re.sub(r"\W+", "_", name), of(at.seed, clean), steps=75, **settings)
        found[name] = mean([clean[step] for step in range(71, 76)])
    return found


def hundreds(seed: int, clean: dict[int, float]) -> Reward:
    """The example's reward, and 100 or -100 for one completion in 128."""

    def reward(step: int, completions: list[str], _: dict[str, list[Any]]) -> list[float]:
        earned, random = lowercase(completions), np.random.default_rng((seed, step))
        clean.setdefault(step, sum(earned) / len(earned))
        hit, sign = random.random(len(earned)) < 1 / 128, random.choice([-1, 1], len(earned))
        return [100.0 * int(way) if out else value for value, out, way in zip(earned, hit, sign, strict=True)]

    return reward


def rare_hundreds(at: Place) -> Figures:
    """M14: the same with one reward in 128 at 100 or -100."""
    return outliers(at, hundreds)


def absurd(step: int, completions: list[str], _: dict[str, list[Any]]) -> list[float]:
    """The example's reward, and 1,000 for one completion of step 10."""
    return [1000.0 if step == 10 and not place else value for place, value in enumerate(lowercase(completions))]


def one_absurd(at: Place) -> Figures:
    """M12: what is earned 35 steps after one reward of 1,000, and how long steps are then."""
    found: Figures = {}
    for name, settings in {"SGD": {"optimizer": "SGD"}, "AdamW": {}}.items():
        run = at.train(name, absurd, steps=45, **settings)
        kls, targets = run.column("step_kl", 16, 45), run.column("step_kl_target", 16, 45)
        over = [kl / target for kl, target in zip(kls, targets, strict=True) if target > 0]
        found[f"{name}: reward"] = mean(run.column("reward", 41, 45))
        found[f"{name}: KL over target, steps 16 to 45"] = geometric_mean([max(each, 1e-12) for each in over])
    return found


def another_zero(at: Place) -> Figures:
    """The example's reward less 1, and plus 1: what 30 steps earn in the mean, in the example's own units."""
    found: Figures = {}
    for offset in (0, -1, 1):

        def moved(_: int, completions: list[str], __: dict[str, list[Any]], offset: int = offset) -> list[float]:
            return [value + offset for value in lowercase(completions)]

        for name, settings in {"default": {}, "none": {"algorithm": "reinforce", "schedule": "auto"}}.items():
            run = at.train(f"{name}_{offset}", moved, steps=30, **settings)
            found[f"{offset:+d}, {name}"] = mean(run.column("reward", 1, 30)) - offset
    return found


def changing(change: int, max_completion_length: int = 16) -> Reward:
    """The share of lowercase letters up to a step, then that of digits."""

    def reward(step: int, completions: list[str], _: dict[str, list[Any]]) -> list[float]:
        counts = str.islower if step <= change else str.isdigit
        return [sum(counts(letter) for letter in text) / max_completion_length for text in completions]

    return reward


def changes(at: Place, change: int = CHANGE, **given: Any) -> Figures:
    """M10: steps from the change on until digits earn .5, going on and begun afresh from the policy of the change."""
    letters, numbers = changing(change, **given), changing(0, **given)
    going = at.train("going_on", letters, steps=change + 80, save_steps=change, **given)
    found: Figures = {"default going on": first_step(going.column("reward", change + 1, change + 80), 0.5)}
    model = str(going.checkpoint(change))
    for name, settings in {
        "default afresh": {},
        "rloo at 3e-3 afresh": RLOO | {"learning_rate": 3e-3},
        "rloo at 1e-2 afresh": RLOO | {"learning_rate": 1e-2},
    }.items():
        run = at.train(name.replace(" ", "_"), numbers, model=model, **given, **settings)
        found[name] = first_step(run.column("reward", 1, 60), 0.5)
    return found


def early_changes(at: Place) -> Figures:
    """M13: the same after 14 and after 18 steps, with completions of 8 tokens."""
    found: Figures = {}
    for change in (14, 18):
        figures = changes(Place(at.folder / str(change), at.seed), change, max_completion_length=8)
        found |= {f"{change}: {name}": value for name, value in figures.items()}
    return found
