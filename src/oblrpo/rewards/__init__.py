"""Rewards of a batch of completions: the task's own, built-in ones, and the user's functions."""

from oblrpo.rewards.rewards import NEED_ANSWER, Rewards, split_weight

__all__ = ["NEED_ANSWER", "Rewards", "split_weight"]
