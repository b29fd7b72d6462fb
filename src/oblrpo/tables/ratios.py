"""The ratios of several updates on one batch, a row each. `estimators/ratios.py` has their functions."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Bounds:
    """How far a ratio may go before it is clipped; what the two numbers bound depends on the ratio."""

    low: float = math.inf
    high: float = math.inf


@dataclass(frozen=True)
class Ratio:
    """What is known of a way to weigh the gradient of log pi on completions of an earlier policy."""

    function: str
    """Its function in `estimators.ratios`."""
    meaning: str
    source: str = ""
    by_token: bool = False
    """Whether tokens of one completion have weights of their own."""
    by_sign: bool = False
    """Whether the advantage's sign matters. Advantages are then those of the first update, as their sources have it."""
    is_importance_weight: bool = False
    """Whether it is that itself, which a sampler's correction takes against the sampler instead."""
    bounds: Bounds = Bounds()
    """How far it may go; in `RATIOS` as its source has it."""


RATIOS: dict[str, Ratio] = {
    "sequence": Ratio("sequence", "importance weight of the completion", is_importance_weight=True),
    "none": Ratio("none", "the weight 1"),
    "ppo": Ratio("ppo", "by token, clipped", "Schulman et al. 2017 (PPO), arXiv 1707.06347", by_token=True,
                 by_sign=True, bounds=Bounds(0.2, 0.2)),
    "gspo": Ratio("gspo", "by completion, clipped", "Zheng et al. 2025 (GSPO), arXiv 2507.18071", by_sign=True,
                  bounds=Bounds(3e-4, 4e-4)),
    "cispo": Ratio("cispo", "by token, truncated", "MiniMax 2025 (CISPO), arXiv 2506.13585; the bound of Khatri et "
                   "al. 2025 (ScaleRL), arXiv 2510.13786", by_token=True, bounds=Bounds(high=5.0)),
    "dppo": Ratio("dppo", "by token, masked", "Qi et al. 2026 (DPPO), arXiv 2602.04879", by_token=True, by_sign=True,
                  bounds=Bounds(0.15, 0.15)),
}  # fmt: skip
"""The ratios by name, with the bounds of their sources."""
