"""What a run's own figures say about the batch size."""

import math


def advice(prompts: int, n_snr: float | None, ours: bool = True) -> str:
    """Say in a sentence what the measured N SNR of a batch of N prompts means for its size; None, NaN: no gradient.

    A run's N SNR is a mean over the policies of its last steps; `ours` names the command that measures one policy, of a
    run of ours. At the rate that a batch of N prompts supports, a single step gains in proportion to
    N SNR / (1 + N SNR) (theorem 4). Over many steps noise averages out, and more prompts buy less than that.
    """
    if n_snr is None or math.isnan(n_snr):
        return (
            f"your {prompts} prompts gave no gradient, so that nothing is known of the batch size: look at the rewards"
        )
    over = "a mean over the policies of the last steps"
    if ours:
        over += " (of one: oblrpo diagnose RUN --look)"
    if not n_snr > 0:
        return (
            f"your {prompts} prompts show no signal above the noise, {over}: only a larger batch can tell where to go"
        )
    doubled = 2 * (1 + n_snr) / (1 + 2 * n_snr)
    halved = (1 + n_snr) / (2 + n_snr)
    return (
        f"your {prompts} prompts are {n_snr:.2g}x the critical batch of {prompts / n_snr:.0f}, {over}: doubling them "
        f"would buy about {doubled:.2f}x the progress of a step, and less over many; halving them leaves "
        f"{halved:.2f}x, and more"
    )
