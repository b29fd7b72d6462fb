"""What a run's own figures say about the batch size."""


def advice(prompts: int, n_snr: float, ours: bool = True) -> str:
    """Say in a sentence what the measured N SNR of a batch of N prompts means for its size.

    A run's N SNR is a mean over the policies of its last steps; `ours` names the command that measures one policy, of a
    run of ours. At the rate that a batch of N prompts supports, a single step gains in proportion to
    N SNR / (1 + N SNR) (theorem 4). Over many steps noise averages out, and more prompts buy less than that.
    """
    over = "a mean over the policies of the last steps" + ("; of one: oblrpo diagnose RUN --look" if ours else "")
    if not n_snr > 0:
        return f"your {prompts} prompts show no signal above the noise ({over}): only a larger batch can show one"
    doubled = 2 * (1 + n_snr) / (1 + 2 * n_snr)
    halved = (1 + n_snr) / (2 + n_snr)
    return (
        f"your {prompts} prompts are {n_snr:.2g}x the critical batch of {prompts / n_snr:.0f}, where noise equals "
        f"signal ({over}). Twice as many would give about {doubled:.2f}x the progress of one step, and less over many "
        f"steps; half as many {halved:.2f}x, and more over many"
    )
