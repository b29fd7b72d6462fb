"""TensorBoard, Weights & Biases and trackio, each through its own library."""

from oblrpo.trackers.reporter import Reporter, check_trackers

__all__ = ["Reporter", "check_trackers"]
