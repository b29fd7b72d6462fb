"""How long a step should be: theorem 4's least of the loss along an update, whose curvature nobody has to know.

Let an update d move the policy by y = sqrt(KL / T) root-nats a token. Along it the gain in J is A y - C y^2 / 2, so
that a step of A / C is best; theorem 4 bounds C by a constant that nobody knows. What can be seen is the slope at the
end of the step. The next batch has other prompts, so that its gradient g of J is unbiased where d has ended, and

    r = g'd / y,  E[r] = A - C y.

With J of curvature c and a gradient of signal S and noise T / N, g'd is eta (S - eta c (S + T/N)) in the mean, which is
0 at theorem 4's eta = (1/c) S / (S + T / N), whatever c, S and T are.

A step that is best by itself is too long for a run: what its noise breaks, later steps have to mend. How much that is
can be bounded. Averaged over a noise n, an update changes J by E[F sum_t m_t] / 2, where m_t is the part of token t.
Its mean is 0 whatever came before, so that tokens with orthogonal scores add up as sqrt(T), and noise costs up to a
constant times sd(F) sqrt(T) y^2. The noise s that one prompt puts into r is sd(F) sqrt(2 T / G) for G outputs a prompt:
up to a constant the same. So C is taken to be greater by s, and the step is A / (C + s). It is found by iteration,

    y  <-  (mean of y + (mean of r) / s) / 2,  whose fixed point has r = s y, or A - C y = s y.
"""

from __future__ import annotations

import math
from typing import ClassVar

MEMORY = 320.0
"""How many prompts the means reach back."""
FEWEST = 5.0
"""How many batches they reach back at the least."""
FIRST = 0.1
"""The step that is taken for right while nothing is known: root-nats a token, 0.01 nats."""
BELIEF = 48.0
"""How many prompts that counts for."""
LEAST = 0.01
"""The shortest step; noise would wander below it."""


class Slope:
    """The length of the next step, from what the last ones would have gained had they been longer.

    `length` is in root-nats a token, sqrt(KL / T). In units of s, the noise of one prompt, the means of r weigh as many
    prompts as they are of, beside `BELIEF` prompts that say `FIRST`.
    """

    NUMBERS: ClassVar[tuple[str, ...]] = ("_prompts", "_gain", "_square", "_length", "_batches")

    def __init__(self) -> None:
        self._prompts = self._gain = self._square = self._length = self._batches = 0.0

    def observe(self, slope: float, length: float, P: float) -> None:
        """Take in the slope r at the end of a step of this length, by the gradient of the P prompts after it."""
        keep = math.exp(-1 / max(MEMORY / P, FEWEST))
        self._batches = keep * self._batches + 1
        self._prompts = keep * self._prompts + P
        self._gain = keep * self._gain + P * slope
        self._square = keep * self._square + (P * slope) ** 2
        self._length = keep * self._length + P * length

    @property
    def noise(self) -> float:
        """s, the standard deviation of the slope that one prompt shows; 0 before the first one.

        A single slope is taken for noise. Where there is no noise at all, a millionth of the slope is left.
        """
        if not self._prompts:
            return 0.0
        mean, square = self._gain / self._prompts, self._square / self._prompts
        if self._batches > 1.5:
            square = (square - mean**2 * self._prompts / self._batches) * self._batches / (self._batches - 1)
        return max(math.sqrt(max(0.0, square)), 1e-6 * abs(mean))

    @property
    def length(self) -> float:
        """The length of the next step in root-nats a token."""
        noise = self.noise
        slopes = self._gain / noise if noise else 0.0
        return max(LEAST, (BELIEF * FIRST + (self._length + slopes) / 2) / (BELIEF + self._prompts))

    def state_dict(self) -> dict[str, float]:
        """Everything that a resumed run needs."""
        return {name.removeprefix("_"): getattr(self, name) for name in self.NUMBERS}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take up where `state_dict` left off."""
        for name in self.NUMBERS:
            setattr(self, name, state[name.removeprefix("_")])
