"""How long a step should be: theorem 4's least of the loss along an update, whose curvature need not be known.

Let an update d move the policy by y = sqrt(KL / T) root-nats a token. Along it the gain in J is A y - C y^2 / 2, so
that a step of A / C is best; theorem 4 bounds C by an unknown constant. What can be seen is the slope at the
end of the step. The next batch has other prompts, so that its gradient g of J is unbiased where d has ended, and

    r = g'd / y,  E[r] = A - C y.

With J of curvature c and a gradient of signal S and noise T / N, g'd is eta (S - eta c (S + T/N)) in the mean, which is
0 at theorem 4's eta = (1/c) S / (S + T / N), whatever c, S and T are.

A step that is best by itself is too long for a run: what its noise breaks, later steps have to repair. How much that is
can be bounded. Averaged over a noise n, an update changes J by E[F sum_t m_t] / 2, where m_t is the part of token t.
Its mean is 0 whatever came before, so that tokens with orthogonal scores add up as sqrt(T), and noise costs up to a
constant times sd(F) sqrt(T) y^2. The noise s that one prompt puts into r is sd(F) sqrt(2 T / G) for G outputs a prompt:
up to a constant the same. So C is taken to be greater by s, and the step is A / (C + s). It is found by iteration,

    y  <-  (mean of y + (mean of r) / s) / 2,  whose fixed point has r = s y, or A - C y = s y.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY = 320.0
"""How many prompts the means reach back."""
FEWEST = 5.0
"""How many batches they reach back at the least."""
FIRST = 0.1
"""The step that is taken for right while nothing is known: root-nats a token, 0.01 nats."""
BELIEF = 48.0
"""How many prompts that counts for."""
UNSEEN = 1.0
"""After how many batches half of the mean slope's square is taken off when noise is estimated."""
OUTLIER = 4.0
"""How many standard deviations a slope counts for at the most: one batch must not make noise of all that follow."""
LEAST = 0.01
"""The shortest step; noise would wander below it."""


@dataclass
class Slope:
    """The length of the next step, from what the last ones would have gained had they been longer.

    `length` is in root-nats a token, sqrt(KL / T). In units of s, the noise of one prompt, the means of r weigh as many
    prompts as they are of, beside `BELIEF` prompts that say `FIRST`. The fields are sums that forget; with them a run
    resumes.
    """

    prompts: float = 0.0
    gain: float = 0.0
    square: float = 0.0
    lengths: float = 0.0
    batches: float = 0.0
    seen: float = 0.0

    def observe(self, slope: float, length: float, P: float) -> None:
        """Take in the slope r at the end of a step of this length, by the gradient of the P prompts after it."""
        keep = math.exp(-1 / max(MEMORY / P, FEWEST))
        if self.batches > 2:  # else two alike would bound all that follow
            bound = OUTLIER * max(self.noise, abs(self.gain / self.prompts) * math.sqrt(P)) / math.sqrt(P)
            slope = min(max(slope, -bound), bound) if bound else slope
        self.seen += 1
        self.batches = keep * self.batches + 1
        self.prompts = keep * self.prompts + P
        self.gain = keep * self.gain + P * slope
        self.square = keep * self.square + (P * slope) ** 2
        self.lengths = keep * self.lengths + P * length

    @property
    def noise(self) -> float:
        """s, the standard deviation of the slope that one prompt shows; 0 before the first one.

        The mean of few slopes is not known: only the share n / (n + `UNSEEN`) of its square is taken off, n being all
        the batches that were ever seen, so that two slopes that are alike by chance do not look like certainty.
        """
        if not self.prompts:
            return 0.0
        mean, P = self.gain / self.prompts, self.prompts / self.batches
        known = self.seen / (self.seen + UNSEEN)
        among = self.batches / (self.batches - known)  # whatever is known, noise alone comes out as it is
        return math.sqrt(max(0.0, self.square / self.prompts - known * P * mean**2) * among)

    @property
    def length(self) -> float:
        """The length of the next step in root-nats a token."""
        noise = self.noise
        slopes = self.gain / noise if noise else 0.0
        return max(LEAST, (BELIEF * FIRST + (self.lengths + slopes) / 2) / (BELIEF + self.prompts))
