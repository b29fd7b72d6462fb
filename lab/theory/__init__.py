"""The paper's theorems, run on policies small enough to enumerate: claimed against computed."""

from lab.theory.claims import Claim, Measurement
from lab.theory.suite import Findings, run_all
from lab.theory.worlds import FAMILIES, World

__all__ = ["FAMILIES", "Claim", "Findings", "Measurement", "World", "run_all"]
