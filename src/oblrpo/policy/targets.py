"""Demonstrations as tokens: the prompt as it is sampled from, and the answer as it stands behind it in one text.

A tokenizer may put a space before what begins a text, and a template one before an answer, or an empty thought.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oblrpo.errors import InputError
from oblrpo.policy.prompts import Prompt, in_time

if TYPE_CHECKING:
    from oblrpo.policy.model import Policy

APART = ("", "\n", "=", "a")
"""Where a token lies across a prompt's end, what comes behind is tokenized behind one of these: the first will do where
no space is put before a text, and of the others one does not grow together with it."""


def tokens_of(
    policy: Policy, prompts: Sequence[Prompt], completions: list[str], places: Sequence[str] = ()
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of prompts, and of their completions with an end token; `places` names them in messages.

    The end is the first token behind an answer in the chat template on which sampling stops; where there is none, as
    after text, the tokenizer's own, or else (sampling would not stop there) the first of the model's.
    """
    tokenizer, form, ends = policy.tokenizer, policy.format, policy.end_tokens
    own = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
    places = places or [f"the demonstration {completion[:40]!r}..." for completion in completions]
    prompt_rows, answer_rows = policy.tokens(prompts), list[list[int]]()
    both = list(zip(prompts, completions, strict=True))
    shown = in_time(lambda: [form.answered(tokenizer, *each) for each in both], len(both))
    for place, row, answer, (before, whole, behind) in zip(places, prompt_rows, completions, shown, strict=True):
        is_shown = "".join(answer.split()) in "".join(whole[len(before) :].split())
        if not (is_shown and whole.startswith(before) and whole.endswith(behind)):
            raise InputError(
                f"{place}: the model's turn begins behind ...{before[-40:]!r}, but the chat template shows this answer "
                f"as ...{whole[-60:]!r}, which does not continue that with all of it. Set chat_template_args under "
                "which it does, or give prompt and completion as text, the prompt as the template shows it."
            )
        turn = tokenizer(behind, add_special_tokens=False).input_ids
        end = next((word for token in turn if token in ends and (word := tokenizer.decode([token])) in behind), "")
        kept = whole[len(before) : len(whole) - len(behind) + behind.index(end) + len(end)]
        answer_rows.append(_continued(tokenizer, place, before, kept) + [own] * (not end))
        if (length := len(row) + len(answer_rows[-1])) > policy.longest:
            raise InputError(
                f"{place}: prompt and completion have {length} tokens with the end token, but the model reads "
                f"{policy.longest}; shorten or remove it."
            )
    policy.check_known("demonstration", answer_rows)
    return prompt_rows, answer_rows


def _continued(tokenizer: Any, place: str, before: str, text: str) -> list[int]:
    """Return the tokens of a text behind another's, as they are in both together or, at least, decode to them."""
    prompt, whole = tokenizer([before, before + text], add_special_tokens=False).input_ids
    for apart in (before, *APART):
        head, ids = tokenizer([apart, apart + text], add_special_tokens=False).input_ids
        answer: list[int] = ids[len(head) :]
        if ids[: len(head)] == head and tokenizer.decode(prompt + answer) == tokenizer.decode(whole):
            return answer
    raise InputError(
        f"{place}: the tokenizer has no tokens for {text[:40]!r} that continue the prompt's: end the prompt elsewhere, "
        "such as before a space, which the completion then begins with."
    )
