"""The policies that runs begin with: a recipe's, or one that was warm-started once a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lab.benchmarks.runs import STARTS
from lab.results.training import start
from oblrpo.compare.training import how_it_ended


def recipe_of(policy: str, seed: int, folder: Path) -> tuple[str, dict[str, Any]]:
    """The recipe of a policy, and the settings over it with which a run begins; a warm start is made where none is.

    Raises:
        RuntimeError: the warm start failed.
    """
    if policy not in STARTS:
        return policy, {}
    skill: dict[str, Any] = STARTS[policy]
    output = folder / f"warm_{policy}_{seed}"
    checkpoint = output / "checkpoints" / "step_0"
    if not checkpoint.is_dir():
        process = start("demo", {**skill, "steps": 0, "seed": seed}, output)
        process.join()
        if process.exitcode:
            raise RuntimeError(f"{output}: {how_it_ended(process)}; its log: {output}.log")
    return "demo", {**skill, "warm_start_steps": 0, "model": str(checkpoint)}
