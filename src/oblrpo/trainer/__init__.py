"""Algorithm 1 (`algorithm1`) and the run around it (`loop`)."""

from oblrpo.trainer.algorithm1 import Learner
from oblrpo.trainer.estimate import Estimate, Update
from oblrpo.trainer.loop import Trainer

__all__ = ["Estimate", "Learner", "Trainer", "Update"]
