"""Rewards that say nothing: a service that is down, a task that is solved, rewards that are rare."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from lab.moving.change import RLOO
from lab.moving.place import Figures, Place, Reward, drift, first_step, load, lowercase, mean

DOWN = range(10, 40)
CONSTANTS = (0.0, 0.37, 1.0)


def down_at(constant: float) -> Reward:
    """The example's reward, and a constant in steps 10 to 39."""

    def reward(step: int, completions: list[str], _: dict[str, list[Any]]) -> list[float]:
        return [constant] * len(completions) if step in DOWN else lowercase(completions)

    return reward


def outage(at: Place) -> Figures:
    """M3: every completion earns the same in steps 10 to 39, for three constants."""
    found: Figures = {}
    for constant in CONSTANTS:
        run = at.train(f"{constant:g}", down_at(constant), save_steps=3)
        rates, n_snr = run.column("learning_rate", 1, 60), run.column("n_snr", 10, 39)
        during, before = rates[9:39], rates[8]
        if not before > 0:
            raise RuntimeError("the step before the outage made no update: there is no rate to compare with")
        found |= {
            f"at {constant:g}: N SNR": mean(n_snr),
            f"{constant:g}: updates": sum(rate > 0 for rate in during),
            f"{constant:g}: rate x": max(during) / before,
            f"{constant:g}: nats a token": drift(load(run.checkpoint(9)), load(run.checkpoint(39)), at.seed),
            f"{constant:g}: rate after / before": rates[41] / before,
            f"({constant:g}: reward)": mean(run.column("reward", 56, 60)),
        }
    return found


def easier(_: int, completions: list[str], __: dict[str, list[Any]]) -> list[float]:
    """Most completions of a solved task earn exactly 1, and a few less: 15 of 16 letters are enough."""
    return [min(1.0, share / 0.9) for share in lowercase(completions)]


def flipped(seed: int) -> Reward:
    """As `easier`, and one in 128 completions earns .9 whatever it is."""

    def reward(step: int, completions: list[str], columns: dict[str, list[Any]]) -> list[float]:
        chance = np.random.default_rng((seed, step)).random(len(completions))
        earned = easier(step, completions, columns)
        return [0.9 if lot < 1 / 128 else value for lot, value in zip(chance, earned, strict=True)]

    return reward


def solved(at: Place) -> Figures:
    """The default on tasks that are soon solved, for 150 steps: does its rate end where the signal does?"""
    found: Figures = {}
    rewards = {"share": None, "share / .9": easier, "one in 128 flipped": flipped(at.seed)}
    for name, reward in rewards.items():
        run = at.train(name.replace(" ", "_").replace("/", "over"), reward, steps=150)
        earned, rates = run.column("reward", 1, 150), run.column("learning_rate", 1, 150)
        since = first_step(earned, 0.99)
        before = max(rates[: int(min(since, 150))])
        after = [rate for rate in rates[int(min(since, 150)) :] if rate > 0]
        entropies = [value for value in run.column("entropy", 1, 150) if math.isfinite(value)]
        found |= {
            f"{name}: .99 at step": since,
            f"{name}: updates after": len(after),
            f"{name}: largest rate before": before,
            f"{name}: after": max(after, default=0.0),
            f"{name}: entropy there": mean(run.column("entropy", int(min(since, 150)), int(min(since, 150)))),
            f"{name}: entropy at the end": entropies[-1],
            f"({name}: reward)": mean(earned[-5:]),
        }
    return found


def two_of_a_letter(_: int, completions: list[str], __: dict[str, list[Any]]) -> list[float]:
    """1 for at least two letters a; of a policy with random weights .2 % succeed."""
    return [float(text.count("a") >= 2) for text in completions]


def rare(at: Place) -> Figures:
    """A reward that one in some hundred completions earns: steps until the mean of five steps is .5."""
    found: Figures = {}
    for name, settings in {
        "default": {},
        "rloo at 3e-3": RLOO | {"learning_rate": 3e-3},
        "rloo at 1e-2": RLOO | {"learning_rate": 1e-2},
    }.items():
        run = at.train(name.replace(" ", "_"), two_of_a_letter, steps=120, **settings)
        earned = run.column("reward", 1, 120)
        found[name] = first_step(earned, 0.5, window=5)
        found[f"({name}: first 3 steps)"] = mean(earned[:3])
    return found
