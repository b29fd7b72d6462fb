"""Rewards of texts, without problems around them."""

from oblrpo.rewards import Rewards


class RewardSet(Rewards):
    """The weighted sums of rewards by name, called with prompts, completions and columns."""

    def __init__(self, names, *args, **settings):
        super().__init__(None, names, *args, **settings)

    def __call__(self, prompts, completions, columns=None, ids=None):
        return self.sums(prompts, completions, columns or {}, ids)
