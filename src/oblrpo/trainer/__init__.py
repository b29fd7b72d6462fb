"""The trainer: Algorithm 1 (`algorithm1`) and the run around it (`loop`)."""

from oblrpo.trainer.algorithm1 import Learner
from oblrpo.trainer.loop import Trainer
from oblrpo.trainer.results import Gradient, Step, Update

__all__ = ["Gradient", "Learner", "Step", "Trainer", "Update"]
