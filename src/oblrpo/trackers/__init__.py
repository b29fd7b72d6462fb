"""TensorBoard, Weights & Biases and trackio, each through its own library."""

from oblrpo.trackers.libraries import check_trackers
from oblrpo.trackers.reporter import Reporter

__all__ = ["Reporter", "check_trackers"]
