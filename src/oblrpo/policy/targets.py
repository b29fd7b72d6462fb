"""Demonstrations as tokens: the prompt as it is sampled from, and the answer as it stands behind it.

They are tokenized together, messages as the chat template shows them with the answer: a tokenizer may put a space before
what begins a text, and a template may have one there, or an empty thought.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from oblrpo.errors import InputError
from oblrpo.policy.prompts import Prompt, PromptFormat

if TYPE_CHECKING:
    from oblrpo.policy.model import Policy

APART = ("", "\n", "=", "a")
"""Where a token lies across a prompt's end, what comes behind is tokenized behind one of these; the first will do for
tokenizers that put no space before a text, and of the others one does not grow together with it."""


def tokens_of(
    policy: Policy, prompts: Sequence[Prompt], completions: list[str], places: Sequence[str] = ()
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the token ids of prompts, and of their completions with an end token; `places` names them in messages.

    Both together are the tokens of one text, and decode to it. The end is the first token of those that the chat
    template puts behind an answer on which sampling stops; where there is none, as after text, the tokenizer's own, or
    else (sampling would not stop there) the first of the model's.
    """
    tokenizer, form, ends = policy.tokenizer, policy.format, policy.end_tokens
    places = places or [f"the demonstration {completion[:40]!r}..." for completion in completions]
    own = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
    prompt_rows, texts = policy.tokens(prompts), list[tuple[str, str, bool]]()
    for place, shown, answer in zip(places, form.answered(tokenizer, prompts, completions), completions, strict=True):
        texts.append(_ended(tokenizer, place, *shown, answer, ends))
    plain = [form.is_text(prompt) for prompt in prompts]
    whole = dict[int, list[int]]()
    for bare in set(plain):
        rows = [row for row, is_plain in enumerate(plain) if is_plain == bare]
        chosen = [texts[row][1] for row in rows]
        ids = (
            PromptFormat().tokens(tokenizer, chosen) if bare else tokenizer(chosen, add_special_tokens=False).input_ids
        )
        whole |= dict(zip(rows, ids, strict=True))
    answers = []
    for row, (place, prompt, (before, text, ended)) in enumerate(zip(places, prompt_rows, texts, strict=True)):
        answers.append(_behind(tokenizer, place, prompt, whole[row], text[len(before) :]) + ([] if ended else [own]))
        if (length := len(prompt) + len(answers[-1])) > policy.longest:
            raise InputError(
                f"{place}: prompt and completion have {length} tokens with the end token, but the model reads "
                f"{policy.longest}; shorten or remove it."
            )
    policy.check_known("demonstration", answers)
    return prompt_rows, answers


def _ended(
    tokenizer: Any, place: str, before: str, whole: str, behind: str, answer: str, ends: Sequence[int]
) -> tuple[str, str, bool]:
    """Return a prompt's text, and that of the whole up to a token which ends the answer, and whether there is one."""
    common = len(os.path.commonprefix([before, whole]))
    is_shown = "".join(answer.split()) in "".join(whole[common:].split())
    if not (common == len(before) and is_shown and whole.endswith(behind)):
        raise InputError(
            f"{place}: the model's chat template begins its turn with {before[common:]!r}, and there shows this answer "
            f"as {whole[common:][:40]!r}, so that what is learned would not continue what is sampled. Set "
            "chat_template_args under which it does, or give prompt and completion as text, the prompt as the template "
            "shows it."
        )
    turn = tokenizer(behind, add_special_tokens=False).input_ids
    end = next((word for token in turn if token in ends if (word := tokenizer.decode([token])) in behind), "")
    kept = behind.index(end) + len(end)
    return before, whole[: len(whole) - len(behind) + kept], bool(end)


def _behind(tokenizer: Any, place: str, prompt: list[int], whole: list[int], rest: str) -> list[int]:
    """Return the tokens that stand behind a prompt's in the whole text, of which `rest` is behind the prompt."""
    if whole[: len(prompt)] == prompt:
        return whole[len(prompt) :]
    text = tokenizer.decode(whole)
    for apart in APART:
        head, both = (tokenizer(each, add_special_tokens=False).input_ids for each in (apart, apart + rest))
        answer: list[int] = both[len(head) :]
        if both[: len(head)] == head and tokenizer.decode([*prompt, *answer]) == text:
            return answer
    raise InputError(
        f"{place}: the tokenizer has no tokens for {rest[:40]!r} that continue the prompt's: end the prompt elsewhere, "
        "such as before a space, which the completion then begins with."
    )
