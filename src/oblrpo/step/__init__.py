"""The step of OBLR-PO: written once in `step`, what flows through it in `flow`, exact scores in `look`, its extras."""

from oblrpo.step.baseline import BaselinePass, StepBaseline
from oblrpo.step.flow import NO_SIGNAL, Batch, Gradient, Samples, StepResult, Update
from oblrpo.step.look import Look, LookAtBatch, Looks, counted
from oblrpo.step.step import Learner, Movement

__all__ = [
    "NO_SIGNAL", "BaselinePass", "Batch", "Gradient", "Learner", "Look", "LookAtBatch", "Looks", "Movement", "Samples",
    "StepBaseline", "StepResult", "Update", "counted",
]  # fmt: skip
