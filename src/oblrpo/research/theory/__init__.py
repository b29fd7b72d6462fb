"""The paper's theorems, run on policies small enough to enumerate: claimed against computed."""

from oblrpo.research.theory.claims import Claim, Measurement
from oblrpo.research.theory.suite import Findings, run_all
from oblrpo.research.theory.worlds import FAMILIES, World

__all__ = ["FAMILIES", "Claim", "Findings", "Measurement", "World", "run_all"]
