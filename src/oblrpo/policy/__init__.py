"""The policy: a causal language model with its tokenizer, and the log-probability of whole completions."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oblrpo.policy.load import adopt_policy, byte_tokenizer, load_policy, make_policy, stand_in
    from oblrpo.policy.model import Logps, Policy, tokens_of
    from oblrpo.policy.prompts import Prompt, PromptFormat
    from oblrpo.policy.sequences import Sequences

__all__ = [
    "Logps", "Policy", "Prompt", "PromptFormat", "Sequences", "adopt_policy", "byte_tokenizer", "load_policy",
    "make_policy", "stand_in", "tokens_of",
]  # fmt: skip

_PLACES = {
    **dict.fromkeys(("Logps", "Policy", "tokens_of"), "model"),
    **{"Prompt": "prompts", "PromptFormat": "prompts", "Sequences": "sequences"},
}
"""Where names come from that are not of `load`; settings are checked without torch (`files`), which takes seconds."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'oblrpo.policy' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"oblrpo.policy.{_PLACES.get(name, 'load')}"), name)
    return value
