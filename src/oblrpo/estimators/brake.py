"""How much shorter steps have to be so that none turns back: theorem 4's rate, found without its constant.

Along an update -eta u the loss is least where its slope is 0; theorem 4 bounds where that is by a constant c of
smoothness, which nobody knows. The next batch tells the slope itself: its gradient g of J is unbiased where the update
d has ended, and its prompts are others than those that made d. So what the same update would gain if made once more,

    E[g'd],  is > 0 where a longer step had gained more, and < 0 where the step went too far.

With J of curvature c and a gradient of signal S and noise T / N it is eta (S - eta c (S + T/N)), which is 0 at theorem
4's eta = (1/c) S / (S + T/N), whatever c, S and T are.

One batch says little. Gains by the unit of rate, so that long steps do not outweigh the shorter ones after them, are
averaged over some prompts, and only what exceeds one standard error of that average counts.
"""

from __future__ import annotations

import math

MEMORY = 160.0
"""How many prompts the average of gains reaches back."""
HARD = 2.0
"""By how much log(share) changes in `MEMORY` prompts for every standard error beyond the first."""

RELEASE = 640.0
"""After how many prompts in which nothing is seen log(share) has come back to its e-th part: noise alone would wander
down without an end."""


class Brake:
    """A share of the longest steps in (0, 1], which falls while steps turn back and recovers while they do not."""

    def __init__(self) -> None:
        self.share = 1.0
        self._gain = self._square = self._weight = self._weight2 = 0.0

    def observe(self, gain: float, P: float) -> None:
        """Take in what the last update would gain if made once more, by the gradient of the P prompts after it.

        With z the average gain over its standard error, log(share) changes by about HARD (P / MEMORY) (|z| - 1), with
        the sign of z, where |z| > 1.

        Args:
            gain: g'd / eta, of the update d that was made at the rate eta.
            P: the number of prompts of g.
        """
        keep = math.exp(-P / MEMORY)
        new = 1 - keep
        self._gain = keep * self._gain + new * gain
        self._square = keep * self._square + new * gain**2
        self._weight = keep * self._weight + new
        self._weight2 = keep**2 * self._weight2 + new**2
        if self._square:
            z = self._gain / math.sqrt(self._square / self._weight * self._weight2)
            held = math.log(self.share) * math.exp(-P / RELEASE)
            self.share = math.exp(min(0.0, held + HARD * new * math.copysign(max(abs(z) - 1, 0.0), z)))

    NUMBERS = ("share", "_gain", "_square", "_weight", "_weight2")

    def state_dict(self) -> dict[str, float]:
        """Everything that a resumed run needs."""
        return {name.removeprefix("_"): getattr(self, name) for name in self.NUMBERS}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take up where `state_dict` left off."""
        for name in self.NUMBERS:
            setattr(self, name, state[name.removeprefix("_")])
