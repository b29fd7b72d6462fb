"""A price list that is new with every question: no policy can know it by heart, only the tool `price` does.

    python examples/environments/data.py data                    # questions, and episodes to imitate
    python examples/environments/small_policy.py models/small    # a policy that has never seen either
    oblrpo train --model models/small --data data/prices.jsonl --sft-data data/prices_shown.jsonl \
        --environment examples/environments/prices.py:Prices --rewards exact --max-completion-length 24 \
        --warm-start-steps 300 --warm-start-args '{learning_rate: 3e-3, batch: 16}' \
        --prompts-per-step 16 --num-generations 8 --steps 30 --output runs/prices
"""

from typing import Any


class Prices:
    """What an episode is: `reset` gets the columns of a row, and every other public method is a tool."""

    def reset(self, prices: dict[str, int], **columns: Any) -> None:
        """Open the shop; the policy does not see the list."""
        self._prices = prices

    def price(self, item: str) -> int:
        """Look up what an item costs today.

        Args:
            item: The name of the item.
        """
        return self._prices[item]
