"""How long steps are, beside how long they are meant to be: M6 to M8."""

from __future__ import annotations

from typing import Any

import numpy as np

from lab.moving.place import Figures, Place, Trained, first_step, geometric_mean, mean, rows, whole_steps

LIMIT = 0.5
"""Nats a completion that a step of the default may take."""
ARMS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "SGD": {"optimizer": "SGD"},
    "LoRA": {"lora": {"r": 8, "alpha": 16}},
    "2 updates": {"num_iterations": 2},
    "4 updates": {"num_iterations": 4},
}


LONGEST = 64


def length(_: int, completions: list[str], __: dict[str, list[Any]]) -> list[float]:
    """The number of letters, over the most that there can be."""
    return [len(text) / LONGEST for text in completions]


def over_target(run: Trained, kls: list[float], first: int = 5) -> list[float]:
    """KL of each step that made an update over what was meant, from `first` on until the reward is .99.

    After that few completions differ, and a unit of rate moves the policy less with every step.
    """
    last = first_step(run.column("reward", 1, len(run.steps)), 0.99)
    targets = run.column("step_kl_target", 1, len(run.steps))
    rates = run.column("learning_rate", 1, len(run.steps))
    triples = list(zip(kls, targets, rates, strict=True))[first - 1 : int(min(last, len(kls)))]
    return [kl / target for kl, target, rate in triples if rate > 0 and target > 0]


def arms(at: Place) -> Figures:
    """M6: the KL that a run logs over the one that it means, geometric means over the steps of `over_target`."""
    found: Figures = {}
    for name, settings in ARMS.items():
        if "lora" in settings:  # which wants a model that is there: the one that the other arms build
            settings = settings | {"model": str(at.train("built", steps=0).checkpoint(0))}
        with whole_steps() as kls:
            run = at.train(name, **settings)
        logged = run.column("step_kl", 1, len(run.steps))
        found[f"{name}: logged / target"] = geometric_mean(over_target(run, logged))
        found[f"{name}: whole step / target"] = geometric_mean(over_target(run, kls))
    return found


def growing(at: Place) -> Figures:
    """M7: the longer a completion the better, from a policy that has learned to write some four tokens."""
    random = np.random.default_rng(at.seed)
    words = ["".join(random.choice(list("abcdefgh"), size)) for size in random.geometric(0.25, 1000)]
    shown = [row | {"completion": word} for row, word in zip(rows(1000, first=2000), words, strict=True)]
    with whole_steps(LONGEST) as kls:
        run = at.train("run", length, max_completion_length=LONGEST, sft_data=shown, warm_start_steps=100, steps=60)
    lengths = run.column("completions/mean_length", 1, 60)
    logged = [kl for kl in run.column("step_kl", 1, 60) if kl > 0]
    return {
        "tokens at first": mean(lengths[:3]),
        "at the end": mean(lengths[-3:]),
        "largest logged KL": max(logged),
        "largest whole step": max(kls),
        f"steps over {LIMIT}": sum(kl > LIMIT for kl in kls),
        "steps to 60 tokens": first_step(lengths, 60.0),
    }


def updates(at: Place) -> Figures:
    """M8: the KL of steps with all their updates, on fresh completions."""
    found: Figures = {}
    for number in (1, 2, 4, 8):
        with whole_steps() as kls:
            run = at.train(f"{number}", num_iterations=number, steps=20)
        found[f"{number}: step / target"] = geometric_mean(over_target(run, kls, first=7))
        found[f"{number}: steps over {LIMIT} of 14"] = sum(kl > LIMIT for kl in kls[6:])
        found[f"{number}: largest"] = max(kls)
    return found
