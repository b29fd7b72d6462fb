"""Rewards of a batch of completions: the task's own, built-in ones, and the user's functions."""

from oblrpo.rewards.rewards import Rewards, of_rows
from oblrpo.settings.shared import split_weight

__all__ = ["Rewards", "of_rows", "split_weight"]
