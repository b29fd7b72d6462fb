"""What a run's own figures say about the batch size."""

import math
from collections.abc import Sequence

from oblrpo.runs import Metrics


def advice(prompts: int, steps: Sequence[Metrics]) -> str:
    """Say what the critical batch means for a batch of N prompts; empty where it is not known.

    It is that of the newest of the steps that measured one, a mean over the policies so far. It is not known where SNR
    has no interval yet, or one that reaches 0. At the rate that a batch of N prompts supports, a single step gains in
    proportion to r / (1 + r) with r = N / critical batch (theorem 4). Over many steps noise averages out, and more
    prompts buy less than that.
    """
    measured = (row for row in reversed(steps) if row.get("n_snr") is not None and row.get("grad_norm") != 0)
    newest = next(measured, {})
    critical, low = newest.get("critical_batch_size"), newest.get("snr_low", math.inf)  # logs may hold no interval
    if not prompts or not critical or not math.isfinite(critical) or not (low or 0) > 0:
        return ""
    ratio = prompts / critical
    doubled, halved = 2 * (1 + ratio) / (1 + 2 * ratio), (1 + ratio) / (2 + ratio)
    return (
        f"{prompts} prompts are {ratio:.2g}x the critical batch of {critical:.0f}, where noise equals signal. Twice as "
        f"many would give about {doubled:.2f}x the progress of a step, half as many {halved:.2f}x; over many steps the "
        "difference is smaller"
    )
