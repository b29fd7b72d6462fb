"""What a chat template shows of messages, and what it ignores."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from oblrpo.errors import did_you_mean
from oblrpo.tasks.rows import kind_of
from oblrpo.tasks.task import SAID

ANSWER = "An-answer-0"
"""A content that no conversation has."""


@dataclass(frozen=True)
class Conversation:
    """Messages with the arguments of the chat template that shows them."""

    tokenizer: Any
    messages: Sequence[Mapping[str, Any]]
    args: Mapping[str, Any]
    begins: bool = True
    """Whether the turn of the model begins behind them (add_generation_prompt)."""

    @cached_property
    def text(self) -> str:
        """What the model reads; a template may raise whatever it likes."""
        shown: str = self.tokenizer.apply_chat_template(
            self.messages, tokenize=False, add_generation_prompt=self.begins, **self.args
        )
        return shown

    def answered(self, answer: str = ANSWER, *behind: Mapping[str, Any]) -> Conversation:
        """The same with an answer of the model, and messages behind it."""
        message = {"role": "assistant", "content": answer}
        return replace(self, messages=[*self.messages, message, *behind], begins=False)

    def generation_prompt(self) -> str:
        """What stands behind the last message where the model's turn begins; nothing if answers are not shown."""
        question, answered = (
            shown_or_nothing(each).rpartition(self.messages[-1]["content"])[1:] for each in (self, self.answered())
        )
        before, answer, _ = answered[1].partition(ANSWER)
        return (question[1].strip() or before.strip()) if all(answered) and answer else ""

    def ignored(self, own: Iterable[str]) -> str:
        """Return in words the first thing that the template ignores, or nothing.

        That is one of the arguments `own`, a key of SAID or the content of a message; or a content comes out as Python
        writes it. `notes` says of the system prompt and of other keys.
        """
        for name in own:
            if self._ignores(name):
                return f"{name!r} (of the columns tools and chat_template_kwargs)"
        for index, message in enumerate(self.messages):
            role, content = message["role"], message.get("content", "")
            # A content of other roles may be part of their name.
            found = role in {"user", "assistant"} and str(content).strip() in self.text
            if content and role != "system" and not found and self._same(self._with(index, content=ANSWER)):
                return f"the content of message {index} ({role}), {kind_of(content)}"
            for key in message:
                if key in SAID - self._words and self._same(self._with(index, **{key: None})):
                    return f"{key!r} of message {index} ({role})"
            if not isinstance(content, str):
                written, empty = (self._with(index, content=text) for text in (str(content), ""))
                if self._same(written) and not self._same(empty):
                    return f"the content of message {index} ({role}), {kind_of(content)}, but as Python writes it"
        return ""

    def notes(self, given: Iterable[str]) -> list[str]:
        """Return what the template ignores: arguments `given`, the system prompt, keys, add_generation_prompt."""
        notes = [
            f"the model's chat template ignores {name!r} of chat_template_args.{did_you_mean(name, self._words)}"
            for name in given
            if self._ignores(name)
        ]
        system = next((index for index, message in enumerate(self.messages) if message["role"] == "system"), None)
        if system is not None and self._same(self._with(system, content=ANSWER)):
            notes.append("the model's chat template ignores the system prompt: the model does not read it.")
        read = self._words | SAID | {"role", "content", "tool_call_id"}
        if keys := {key for message in self.messages for key in message} - read:
            bare = [{key: value for key, value in message.items() if key not in keys} for message in self.messages]
            if self._same(replace(self, messages=bare)):
                notes.append(f"the model's chat template ignores {', '.join(sorted(map(repr, keys)))} of the messages.")
        if self._same(replace(self, begins=False)):
            before, answer, _ = shown_or_nothing(self.answered()).partition(ANSWER)
            if answer and (begin := before.removeprefix(self.text).strip()) and before.startswith(self.text):
                notes.append(
                    "the model's chat template ignores add_generation_prompt: completions begin without "
                    f"{begin!r}, which it puts before an answer."
                )
        return notes

    @property
    def _words(self) -> frozenset[str]:
        return words_of(self.tokenizer.get_chat_template(self.args.get("chat_template"), self.args.get("tools")))

    def _ignores(self, name: str) -> bool:
        """Whether the template neither reads an argument nor changes with it."""
        rest = {key: value for key, value in self.args.items() if key != name}
        return name not in self._words and self._same(replace(self, args=rest))

    def _with(self, index: int, **changes: Any) -> Conversation:
        """The same with changes to a message, of which None removes a key."""
        changed = {key: value for key, value in {**self.messages[index], **changes}.items() if value is not None}
        return replace(self, messages=[*self.messages[:index], changed, *self.messages[index + 1 :]])

    def _same(self, other: Conversation) -> bool:
        return shown_or_nothing(other) == self.text


def shown_or_nothing(conversation: Conversation) -> str:
    """Return what a template shows, and nothing where it refuses."""
    try:
        return conversation.text
    except Exception:  # a template may raise whatever it likes
        return ""


@lru_cache
def words_of(template: str) -> frozenset[str]:
    """Return the names and strings in the code of a template."""
    from jinja2 import Environment  # which is needed for templates only

    return frozenset(word.strip("'\"") for _, kind, word in Environment().lex(template) if kind in {"name", "string"})
