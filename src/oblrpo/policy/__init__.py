"""Causal language model and tokenizer, and the log-probability of whole completions."""

from oblrpo.policy.model import Logps, Policy, load_policy, make_policy
from oblrpo.policy.sequences import Sequences
from oblrpo.policy.tokenizer import byte_tokenizer
from oblrpo.policy.warm_start import warm_start

__all__ = ["Logps", "Policy", "Sequences", "byte_tokenizer", "load_policy", "make_policy", "warm_start"]
