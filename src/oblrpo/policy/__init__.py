"""The policy: a causal language model with its tokenizer, and the log-probability of whole completions."""

from oblrpo.policy.load import adopt_policy, byte_tokenizer, load_policy, make_policy, stand_in
from oblrpo.policy.model import Logps, Policy, tokens_of
from oblrpo.policy.prompts import Prompt, PromptFormat
from oblrpo.policy.sequences import Sequences

__all__ = [
    "Logps", "Policy", "Prompt", "PromptFormat", "Sequences", "adopt_policy", "byte_tokenizer", "load_policy",
    "make_policy", "stand_in", "tokens_of",
]  # fmt: skip
