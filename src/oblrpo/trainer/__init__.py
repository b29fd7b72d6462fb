"""Algorithm 1 (`algorithm1`) and the run around it (`loop`)."""

from oblrpo.trainer.algorithm1 import Learner
from oblrpo.trainer.gradient import GradientEstimate, Update
from oblrpo.trainer.loop import Trainer

__all__ = ["GradientEstimate", "Learner", "Trainer", "Update"]
