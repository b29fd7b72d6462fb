"""The policy: a causal language model with its tokenizer, and the log-probability of whole completions."""

from oblrpo.policy.load import adopt_policy, byte_tokenizer, load_policy, make_policy, stand_in
from oblrpo.policy.model import Logps, Policy, tokens_of
from oblrpo.policy.prompts import Completion, Prompt, PromptFormat
from oblrpo.policy.sequences import Sequences

__all__ = [
    "Completion", "Logps", "Policy", "Prompt", "PromptFormat", "Sequences", "adopt_policy", "byte_tokenizer",
    "load_policy", "make_policy", "stand_in", "tokens_of",
]  # fmt: skip
