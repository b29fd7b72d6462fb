"""Rewards of a batch of completions: from a task, or from the user's own functions."""

from oblrpo.rewards.batch import rewards_of
from oblrpo.rewards.user import RewardErrors, RewardSet, load_reward

__all__ = ["RewardErrors", "RewardSet", "load_reward", "rewards_of"]
