"""The policy: a causal language model with its tokenizer, and the log-probability of whole completions."""

from oblrpo.policy.gguf import is_gguf
from oblrpo.policy.load import adopt_policy, check_is_there, check_policy, load_policy, make_policy, stand_in
from oblrpo.policy.model import Logps, Policy
from oblrpo.policy.prompts import Prompt, PromptFormat
from oblrpo.policy.sequences import Sequences
from oblrpo.policy.tokenizer import byte_tokenizer
from oblrpo.policy.warm_start import accumulate_loss, sequences_of, tokens_of, warm_start

__all__ = [
    "Logps",
    "Policy",
    "Prompt",
    "PromptFormat",
    "Sequences",
    "accumulate_loss",
    "adopt_policy",
    "byte_tokenizer",
    "check_is_there",
    "check_policy",
    "is_gguf",
    "load_policy",
    "make_policy",
    "sequences_of",
    "stand_in",
    "tokens_of",
    "warm_start",
]
