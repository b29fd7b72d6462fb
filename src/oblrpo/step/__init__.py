"""The step of OBLR-PO: the paper's Algorithm 1 in `algorithm1`, and in a file each what may wrap it."""

from oblrpo.step.algorithm1 import Algorithm1, add_to_gradient
from oblrpo.step.baseline import StepBaseline
from oblrpo.step.batch import Batch
from oblrpo.step.gradient import Gradient, Part, Update
from oblrpo.step.movement import Movement
from oblrpo.step.samples import Sampled
from oblrpo.step.weights import SCORE_NORMS, RewardWeights

__all__ = [
    "SCORE_NORMS",
    "Algorithm1",
    "Batch",
    "Gradient",
    "Movement",
    "Part",
    "RewardWeights",
    "Sampled",
    "StepBaseline",
    "Update",
    "add_to_gradient",
]
