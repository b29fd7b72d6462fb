"""What a step and a look hold, by the number of completions."""

import torch

from lab.benchmarks.long_rows import SMALL, peaks, policy_of


def test_a_peak_grows_with_the_tokens_of_a_micro_batch_alone():
    policy = policy_of(SMALL | {"vocab_size": 300}, torch.float32, 0)
    few, many = (peaks(policy, count, 1024, 16) for count in (128, 1024))
    more = peaks(policy, 256, 2048, 16)
    for one, eight_times, twice_as_wide in zip(few, many, more, strict=True):
        assert eight_times < 1.1 * one < twice_as_wide
