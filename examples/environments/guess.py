"""Guess a number from 1 to 7 in three guesses, enough for anyone who halves what is left: a turn needs all before it.

    python examples/environments/data.py data                    # games, and some to imitate
    python examples/environments/small_policy.py models/small    # a policy that has never seen either
    oblrpo train --model models/small --data data/guess.jsonl --sft-data data/guess_shown.jsonl \
        --environment examples/environments/guess.py:Guess --max-turns 5 --max-completion-length 48 \
        --warm-start-steps 100 --warm-start-args '{learning_rate: 3e-3, batch: 16}' \
        --prompts-per-step 16 --num-generations 8 --steps 40 --output runs/guess
"""

from typing import Any


class Guess:
    """What an episode is: `reset` gets the columns of a row, `guess` is a tool, and `get_reward` says how it went."""

    def reset(self, secret: int, **columns: Any) -> None:
        """Begin a game."""
        self._secret, self._guesses, self._found = secret, 0, False

    def guess(self, number: int) -> str:
        """Guess the number, and learn whether it is higher or lower.

        Args:
            number: The guess.
        """
        self._guesses += 1
        self._found = self._found or number == self._secret
        return "found" if number == self._secret else "higher" if number < self._secret else "lower"

    def get_reward(self) -> float:
        """Return 1 for a number found in three guesses, and half of that for more."""
        return self._found * (1.0 if self._guesses <= 3 else 0.5)
