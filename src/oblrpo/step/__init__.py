"""The step of OBLR-PO: the paper's Algorithm 1 in `algorithm1`, what flows through it in `flow`, and its extras."""

from oblrpo.step.algorithm1 import Algorithm1, Movement, add_to_gradient
from oblrpo.step.baseline import SCORE_NORMS, BaselinePass, StepBaseline
from oblrpo.step.flow import Batch, Gradient, Part, Samples, Update

__all__ = [
    "SCORE_NORMS",
    "Algorithm1",
    "BaselinePass",
    "Batch",
    "Gradient",
    "Movement",
    "Part",
    "Samples",
    "StepBaseline",
    "Update",
    "add_to_gradient",
]
