"""The run: the steps, and what stands around them (`loop`)."""

from oblrpo.step import Gradient, Learner, StepResult, Update
from oblrpo.trainer.loop import Trainer

__all__ = ["Gradient", "Learner", "StepResult", "Trainer", "Update"]
