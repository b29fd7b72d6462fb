"""Rewards of a batch of completions: the task's own, built-in ones, and the user's functions."""

from oblrpo.rewards.builtin import BUILT_IN, NEED_ANSWER
from oblrpo.rewards.reward_set import RewardErrors, Rewards, RewardSet, split_weight

__all__ = ["BUILT_IN", "NEED_ANSWER", "RewardErrors", "RewardSet", "Rewards", "split_weight"]
