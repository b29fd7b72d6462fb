"""Rewards of a batch of completions: the task's own, built-in ones, and the user's functions."""

from oblrpo.rewards.builtin import NEED_ANSWER
from oblrpo.rewards.rewards import Rewards, split_weight

__all__ = ["NEED_ANSWER", "Rewards", "split_weight"]
