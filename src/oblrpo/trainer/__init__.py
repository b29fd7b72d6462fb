"""Algorithm 1 (`algorithm1`) and the run around it (`loop`)."""

from oblrpo.trainer.algorithm1 import Estimate, Learner, Update
from oblrpo.trainer.loop import Trainer

__all__ = ["Estimate", "Learner", "Trainer", "Update"]
