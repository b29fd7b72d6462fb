"""Rewards with outliers, and rewards that change: M9, M10."""

from __future__ import annotations

from typing import Any

import numpy as np

from lab.moving.place import Figures, Place, Reward, first_step, lowercase, mean

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


def outliers(at: Place) -> Figures:
    """M9: what the last five steps have earned without the noise, after 75 steps."""
    found: Figures = {}
    for name, settings in {"default": {}, "rloo at 3e-3": RLOO | {"learning_rate": 3e-3}}.items():
        clean: dict[int, float] = {}
        at.train(name.replace(" ", "_"), noisy(at.seed, clean), steps=75, **settings)
        found[name] = mean([clean[step] for step in range(71, 76)])
    return found


def digits(completions: list[str]) -> list[float]:
    """The share of digits."""
    return [sum(letter.isdigit() for letter in text) / 16 for text in completions]


def changing(step: int, completions: list[str], _: dict[str, list[Any]]) -> list[float]:
    """Lowercase letters up to the change, then digits."""
    return lowercase(completions) if step <= CHANGE else digits(completions)


def only_digits(_: int, completions: list[str], __: dict[str, list[Any]]) -> list[float]:
    """Digits from the first step on."""
    return digits(completions)


def changes(at: Place) -> Figures:
    """M10: steps from the change on until digits earn .5, going on and begun afresh from the policy of the change."""
    going = at.train("going_on", changing, steps=CHANGE + 80, save_steps=CHANGE)
    found: Figures = {"default going on": first_step(going.column("reward", CHANGE + 1, CHANGE + 80), 0.5)}
    model = str(going.checkpoint(CHANGE))
    for name, settings in {
        "default afresh": {},
        "rloo at 3e-3 afresh": RLOO | {"learning_rate": 3e-3},
        "rloo at 1e-2 afresh": RLOO | {"learning_rate": 1e-2},
    }.items():
        run = at.train(name.replace(" ", "_"), only_digits, model=model, **settings)
        found[name] = first_step(run.column("reward", 1, 60), 0.5)
    return found
