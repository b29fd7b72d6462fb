"""The run: Algorithm 1 with what a run adds to it (`learner`), and the steps around it (`loop`)."""

from oblrpo.step import Gradient, Update
from oblrpo.trainer.learner import Learner, StepResult
from oblrpo.trainer.loop import Trainer

__all__ = ["Gradient", "Learner", "StepResult", "Trainer", "Update"]
