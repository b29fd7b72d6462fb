"""TensorBoard, Weights & Biases and trackio, each through its own library."""

from oblrpo.trackers.libraries import TRACKERS, check_trackers
from oblrpo.trackers.reporter import Reporter

__all__ = ["TRACKERS", "Reporter", "check_trackers"]
