"""The policies that runs begin with: a recipe's, or one that was warm-started once a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.benchmarks.runs import STARTS
from lab.results.training import start
from lab.tasks import ADDITION
from oblrpo.compare.training import how_it_ended

SKILLS: dict[str, dict[str, Any]] = {
    **STARTS,
    "sums": {
        "task": "arithmetic", "task_args": {"shots": 0, "operations": "+-", "largest": 60}, "max_completion_length": 6,
        "warm_start_steps": 600, "warm_start_args": {"noise": 0.05},
    },
    "two-digit-addition": {
        "task": ADDITION, "task_args": {"min_terms": 2, "max_terms": 3, "largest": 30}, "max_completion_length": 24,
        "warm_start_steps": 500, "warm_start_args": {"noise": 0.05},
    },
}  # fmt: skip
"""Tasks at a level of skill: settings over the demo's of the supervised warm start, and of the task."""
RECIPES = Path(__file__).parents[1] / "recipes"
"""Recipes of the laboratory, beside those of the package."""


def recipe_of(policy: str, seed: int, folder: Path) -> tuple[str, dict[str, Any]]:
    """The recipe of a policy, and the settings over it with which a run begins; a warm start is made where none is.

    Raises:
        RuntimeError: the warm start failed.
    """
    if policy not in SKILLS:
        own = RECIPES / f"{policy}.yaml"
        return str(own) if own.is_file() else policy, {}
    skill = SKILLS[policy]
    output = folder / f"warm_{policy}_{seed}"
    checkpoint = output / "checkpoints" / "step_0"
    if not checkpoint.is_dir():
        process = start("demo", {**skill, "steps": 0, "seed": seed}, output)
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{output}: {how_it_ended(process)}; its log: {output}.log")
    return "demo", {**skill, "warm_start_steps": 0, "model": str(checkpoint)}
