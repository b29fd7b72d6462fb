"""Sampling completions from a policy: by our loop, by transformers' `generate`, or by vLLM."""

from oblrpo.policy import Policy
from oblrpo.rollout.episodes import EpisodeSampler
from oblrpo.rollout.rollouts import Rollouts, Sampler, join, sample_problems
from oblrpo.rollout.transformers import TransformersSampler, sample
from oblrpo.rollout.vllm import VLLMSampler
from oblrpo.settings import SamplerConfig

__all__ = [
    "EpisodeSampler",
    "Rollouts",
    "Sampler",
    "TransformersSampler",
    "VLLMSampler",
    "join",
    "make_sampler",
    "sample",
    "sample_problems",
]


def make_sampler(
    policy: Policy, config: SamplerConfig, trust_remote_code: bool = False, features: bool = False, logps: bool = False
) -> TransformersSampler | VLLMSampler:
    """Return the config's sampler; with `features` and `logps` it keeps these of the draws, which vLLM always does."""
    if config.sampler == "transformers":
        return TransformersSampler(policy, logps, features, config.max_num_seqs)
    return VLLMSampler(policy, config.vllm, trust_remote_code)
