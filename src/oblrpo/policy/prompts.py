"""Turning prompts, text or messages, into the tokens that a policy continues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oblrpo.errors import InputError

Prompt = str | Sequence[Mapping[str, str]]
"""A prompt is text, or messages with a role and a content."""


@dataclass(frozen=True)
class PromptFormat:
    """How prompts become tokens: text as it is, messages by the tokenizer's chat template."""

    chat: bool = False
    """Whether text, too, is shown to the model as a message of the user."""
    system_prompt: str = ""
    """First message of a conversation that has no system message."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as enable_thinking of Qwen3."""

    def tokens(self, tokenizer: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt.

        Raises:
            InputError: a prompt is empty, or the chat template is missing or refuses the messages.
        """
        plain = [row for row, prompt in enumerate(prompts) if isinstance(prompt, str) and not self.chat]
        rows: list[list[int]] = [[] for _ in prompts]
        if plain:
            # As the tokenizer does by itself, with the tokens that begin a text, if it has any.
            for row, ids in zip(
                plain, tokenizer([prompts[row] for row in plain], padding=False).input_ids, strict=True
            ):
                rows[row] = ids
        for row in set(range(len(prompts))) - set(plain):
            rows[row] = tokenizer(self.text(tokenizer, prompts[row]), add_special_tokens=False).input_ids
        if not all(rows):
            raise InputError("a prompt is empty: it has no token for the policy to go on from.")
        return rows

    def text(self, tokenizer: Any, prompt: Prompt) -> str:
        """Return the text that the model reads.

        Raises:
            InputError: the chat template is missing or refuses the messages.
        """
        if isinstance(prompt, str) and not self.chat:
            return prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(each) for each in prompt]
        if self.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        if tokenizer.chat_template is None:
            raise InputError(
                "the prompts are messages, but the model's tokenizer has no chat template; use plain text."
            )
        try:
            shown: str = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self.template_args
            )
        except Exception as error:  # a template may raise whatever it likes
            raise InputError(
                f"the model's chat template refuses a prompt: {' '.join(str(error).split())[:200]}."
            ) from None
        return shown
