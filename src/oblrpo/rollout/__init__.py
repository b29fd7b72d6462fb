"""Sampling completions from a policy: by our loop, by transformers' `generate`, or by vLLM (extra `vllm`)."""

from oblrpo.policy import Policy
from oblrpo.rollout.rollouts import Rollouts, Sampler, join
from oblrpo.rollout.transformers import TransformersSampler, sample
from oblrpo.settings import RolloutConfig

__all__ = ["Rollouts", "Sampler", "TransformersSampler", "join", "make_sampler", "sample"]


def make_sampler(
    policy: Policy, config: RolloutConfig, trust_remote_code: bool = False, features: bool = False
) -> Sampler:
    """Return the sampler that the config asks for, with the policy's weights.

    With `features` it tells what the draws know of each completion; vLLM always tells what it can.
    """
    if config.sampler == "transformers":
        return TransformersSampler(policy, config.sampler_correction != "auto", features)
    from oblrpo.rollout.vllm import VLLMSampler, open_engine  # loads vLLM, which takes its time

    return VLLMSampler(policy, *open_engine(policy, config, trust_remote_code))
