"""Turning prompts, text or messages, into the tokens that a policy continues."""

from __future__ import annotations

import ctypes
import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain, groupby
from typing import Any, TypeVar

from oblrpo.errors import InputError, did_you_mean
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


Prompt = str | Sequence[Mapping[str, Any]]
"""A prompt is text, or messages: `oblrpo.tasks.task.Messages` may bring arguments of the template."""
Completion = str | Sequence[Mapping[str, Any]]
"""A completion is text, or messages: those of the assistant are the policy's turns, between which stand others'."""

TEMPLATE_SECONDS = 60.0
"""How long templates may take; a thousand prompts take a tenth of a second by those that models come with."""

MARKS_OF_SPACES = (
    {"type": "Prepend", "prepend": "\u2581"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
)
"""Steps of normalizers that put a character of three bytes for a space; NFC, too, makes no text longer than that."""

SET = "set --chat (chat=True in Python)"
BARE = (
    "the model has a chat template, but the prompts are plain text and do not go through it. That suits a base model; "
    f"for an instruct model {SET}. --no-chat hides this line."
)

Returned = TypeVar("Returned")


@dataclass(frozen=True)
class PromptFormat:
    """How prompts become tokens: text as it is, messages by the tokenizer's chat template."""

    chat: bool | None = None
    """Whether text, too, is shown to the model as a message of the user; None, where it is not set, is no."""
    system_prompt: str = ""
    """First message of a conversation that has no system message."""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as enable_thinking of Qwen3."""

    def tokens(self, tokenizer: Any, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Return the token ids of each prompt."""
        plain = [row for row, prompt in enumerate(prompts) if self.is_text(prompt)]
        messages = sorted(set(range(len(prompts))) - set(plain))
        rows: list[list[int]] = [[] for _ in prompts]
        if plain:
            # As the tokenizer does by itself, with the tokens that begin a text, if it has any; without those that end
            # one, because the policy continues it.
            texts = [str(prompts[row]) for row in plain]
            before, behind = _added(tokenizer, next(filter(None, texts), ""))
            for row, ids in zip(plain, tokenizer(texts, padding=False).input_ids, strict=True):
                # A text that a chat template has made brings the tokens with it that begin one.
                begun = before if ids[:before] == ids[before : 2 * before] else 0
                rows[row] = ids[begun : len(ids) - behind]
        if messages:
            limit = TEMPLATE_SECONDS * (1 + len(prompts) // 1000)
            shown = in_time(lambda: [self.text(tokenizer, prompts[row]) for row in messages], limit)
            for row, text in zip(messages, shown, strict=True):
                rows[row] = tokenizer(text, add_special_tokens=False).input_ids
        if not all(rows):
            raise InputError("a prompt is empty; the policy needs at least one token to continue.")
        return rows

    def bound(self, tokenizer: Any, shown: Sequence[Prompt]) -> tuple[float, int]:
        """Return `times` and `beside`: a prompt has at most times (bytes + beside) tokens; infinity if that is unknown.

        No token of a fast tokenizer stands for less than a byte of the text that its normalizer leaves. What a chat
        template puts beside the text of messages is the most that it puts beside those in `shown`.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        steps = json.loads(backend.normalizer.__getstate__()) if backend and backend.normalizer else {"normalizers": []}
        steps = steps.get("normalizers", [steps])
        known = backend and all(step["type"] == "NFC" or step in MARKS_OF_SPACES for step in steps)
        beside = 1 + _added(tokenizer, "a")[0]  # 1: a space that may be put before
        for prompt in shown:
            if not self.is_text(prompt):
                texts = [prompt] if isinstance(prompt, str) else [str(each.get("content", "")) for each in prompt]
                text = self._conversation(tokenizer, prompt).text
                beside = max(beside, len(text.encode()) - len("".join(texts).encode()))
        return (3 if steps else 1) if known else math.inf, beside

    def is_text(self, prompt: Prompt) -> bool:
        """Whether the model reads the prompt as it is, and not in the chat template."""
        return isinstance(prompt, str) and not self.chat

    def turn_ends(self, tokenizer: Any, prompt: Prompt, *behind: Mapping[str, Any]) -> list[int]:
        """Return the tokens that the template has behind an answer, before messages `behind`; none if it shows none."""
        conversation = self._conversation(tokenizer, prompt)
        shown = in_time(lambda: shown_or_nothing(conversation.answered(ANSWER, *behind)), TEMPLATE_SECONDS)
        ids: list[int] = tokenizer(shown.rpartition(ANSWER)[2], add_special_tokens=False).input_ids
        return ids if ANSWER in shown else []

    def answer(
        self, tokenizer: Any, prompt: Prompt, answer: Completion, ends: Sequence[int], place: str
    ) -> tuple[list[int], list[int]]:
        """Return the token ids of an answer as it stands behind its prompt in one text, and 1 for the policy's own.

        A turn of the policy ends with the first of `ends` that the template has behind it. Where it has none, as after
        text, that is the tokenizer's own, or else (sampling would not stop there) the first of all. What stands between
        two turns has 0. `place` names the answer in messages.
        """
        own = tokenizer.eos_token_id if tokenizer.eos_token_id in ends else ends[0]
        if isinstance(answer, str):
            if self.is_text(prompt):
                ids = [*_continued(tokenizer, place, str(prompt), answer), own]
                return ids, [1] * len(ids)
            answer = [{"role": "assistant", "content": answer}]
        elif self.is_text(prompt):
            raise InputError(f"{place}: the completion is messages, but the prompt is plain text; {SET}.")
        conversation = self._conversation(tokenizer, prompt)
        texts, ended = in_time(lambda: _turns(conversation, answer, ends, place), TEMPLATE_SECONDS)
        whole, *parts = tokenizer(["".join(texts), *texts], add_special_tokens=False).input_ids
        if list(chain(*parts)) != whole:  # tokens lie across, or a text has others where it stands alone
            before = accumulate(texts[:-1])
            parts[1:] = [_continued(tokenizer, place, *both) for both in zip(before, texts[1:], strict=True)]
        mask = [1 - index % 2 for index, part in enumerate(parts[1:]) for _ in part]
        return [*chain(*parts[1:]), *[own] * (not ended)], mask + [1] * (not ended)

    def text(self, tokenizer: Any, prompt: Prompt) -> str:
        """Return the text that the model reads."""
        if isinstance(prompt, str) and self.is_text(prompt):
            return prompt
        if tokenizer.chat_template is None:
            which, cure = "the prompts are messages", "give an instruct model, or prompts that are text"
            if isinstance(prompt, str):
                which, cure = "chat shows prompts as messages of a user", "leave out chat"
            raise InputError(f"{which}, but the model's tokenizer has no chat template; {cure}.")
        conversation, where = self._conversation(tokenizer, prompt), getattr(prompt, "where", "") or "a prompt"
        try:
            shown = conversation.text
        except Exception as error:  # a template may raise whatever it likes
            raise InputError(
                f"the model's chat template refuses {where}: {' '.join(str(error).split())[:200]}."
            ) from None
        if ignored := conversation.ignored(getattr(prompt, "template_args", {})):
            raise InputError(
                f"{where}: the model's chat template does not show {ignored}; remove it, or give the model a template "
                "that shows it."
            )
        return shown

    def preview(self, tokenizer: Any, prompt: Prompt) -> str:
        """Return the text that the model reads in a line, with its escapes; the middle of a long one is left out."""
        text = self.text(tokenizer, prompt)
        return repr(text if len(text) <= 200 else f"{text[:120]} ... {text[-75:]}")

    def notes(self, tokenizer: Any, prompts: Sequence[Prompt]) -> list[str]:
        """Return what a user should know of the chat template, by the first prompt that it shows, or else the first."""
        shown = next((prompt for prompt in prompts if not self.is_text(prompt)), None)
        if shown is None:
            given = {"system_prompt": self.system_prompt, "chat_template_args": self.template_args}
            if idle := " and ".join(name for name, value in given.items() if value):
                return [f"{idle} has no effect: the prompts are plain text and skip the chat template; {SET}."]
            # A text that went through a template before holds what that puts between a question and its answer.
            question = self._conversation(tokenizer, "A question")
            turn = "" if self.chat is False else in_time(question.generation_prompt, TEMPLATE_SECONDS)
            return [BARE] if turn and not any(turn.splitlines()[0] in prompt for prompt in prompts) else []
        conversation = self._conversation(tokenizer, shown)
        return in_time(lambda: conversation.notes(self.template_args), TEMPLATE_SECONDS)

    def _conversation(self, tokenizer: Any, prompt: Prompt) -> Conversation:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(dict, prompt))
        if self.system_prompt and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self.system_prompt})
        return Conversation(tokenizer, messages, {**self.template_args, **getattr(prompt, "template_args", {})})


def _turns(
    conversation: Conversation, answer: Sequence[Mapping[str, Any]], ends: Sequence[int], place: str
) -> tuple[list[str], bool]:
    """Return the texts of a prompt, a turn, what others say, the next turn and so on; whether a token ends the last.

    Each turn goes up to the word that ends it, so that what a template has behind that is the others'. What is shown of
    more messages has to begin with what is shown of fewer: the model is to learn behind what it will have read.
    """
    shown, behind, end = shown_or_nothing(conversation), "", ""
    texts, last, known = [shown], len(conversation.messages) + len(answer), dict[bool, tuple[str, str]]()
    for own, block in groupby(answer, key=lambda message: message["role"] == "assistant"):
        messages = list(block)
        calls = messages[0].get("tool_calls", ()) if own else ()
        longer = replace(conversation, messages=[*conversation.messages, *messages], begins=not own)
        whole, (behind, end) = shown_or_nothing(longer), known.get(bool(calls), ("", "")) if own else ("", "")
        if own and not (end and whole.endswith(behind)):
            found = _behind(conversation, messages[0], ends)
            if found is None and not calls:  # the template shows no answers
                whole = shown + messages[0]["content"]
            behind, end = known[bool(calls)] = found or ("", "")
        said = [*(message.get("content") or "" for message in messages), *(call["function"]["name"] for call in calls)]
        rest = "".join(whole[len(shown) :].split())
        is_whole = all("".join(text.split()) in rest for text in said)
        if not (is_whole and whole.startswith(shown) and whole.endswith(behind)):
            raise InputError(
                f"{place}: the {'model' if own else 'tool'}'s turn begins after ...{shown[-40:]!r}, but the chat "
                f"template shows this answer as ...{whole[-60:]!r}, which does not continue from there with the whole "
                "answer. Set chat_template_args so that it does, or give prompt and completion as text, as the "
                "template shows them."
            )
        if own and not end and (calls or len(longer.messages) < last):
            raise InputError(
                f"{place}: the chat template has no token behind ...{whole[-40:]!r} that ends the model's turn, so "
                "that nothing can follow it; give the model a template that has one."
            )
        text = whole[: len(whole) - len(behind) + behind.index(end) + len(end)] if own else whole
        texts.append(text[len(shown) :])
        conversation, shown = longer, text
    return texts, bool(end)


def _behind(conversation: Conversation, message: Mapping[str, Any], ends: Sequence[int]) -> tuple[str, str] | None:
    """Return what the template has behind such a message, and the first word there that is one of `ends`."""
    tokenizer, calls = conversation.tokenizer, "tool_calls" in message
    other = {"tool_calls": [{"type": "function", "function": {"name": ANSWER, "arguments": {}}}]}
    changed = {**message, **(other if calls else {"content": ANSWER})}
    some = shown_or_nothing(replace(conversation, messages=[*conversation.messages, changed], begins=False))
    behind = some.rpartition(ANSWER)[2]
    tokens = tokenizer(behind, add_special_tokens=False).input_ids
    end = next((word for token in tokens if token in ends and (word := tokenizer.decode([token])) in behind), "")
    if calls:  # behind its name stands more of the call
        behind = end + behind.partition(end)[2] if end else ""
    return (behind, end) if ANSWER in some else None


def _continued(tokenizer: Any, place: str, before: str, text: str) -> list[int]:
    """Return the tokens of a text behind another's, as they are in both together or, at least, decode to them."""
    prompt, whole = tokenizer([before, before + text], add_special_tokens=False).input_ids
    for apart in (before, "", "\n", "=", "a"):  # where a token lies across, behind what does not grow together with it
        head, ids = tokenizer([apart, apart + text], add_special_tokens=False).input_ids
        answer: list[int] = ids[len(head) :]
        if ids[: len(head)] == head and tokenizer.decode(prompt + answer) == tokenizer.decode(whole):
            return answer
    raise InputError(
        f"{place}: no tokens for {text[:40]!r} continue the prompt's tokens: end the prompt elsewhere, such as before "
        "a space, and begin the completion with that space."
    )


def _added(tokenizer: Any, text: str) -> tuple[int, int]:
    """How many tokens the tokenizer puts before and behind every text by itself, shown by a text that has tokens."""
    bare, full = (tokenizer(text, add_special_tokens=on).input_ids for on in (False, True))
    if not bare:
        return 0, 0
    before = next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), len(full) - len(bare))
    return before, len(full) - len(bare) - before


class TooSlow(BaseException):  # so that no other handler catches it
    """The time of a chat template was up: its code comes with a model, and may loop for years."""


def in_time(function: Callable[[], Returned], seconds: float) -> Returned:
    """Return what a function returns; Python code that takes longer is ended where it stands, in whatever thread.

    One operation of the interpreter's own, such as a power of huge numbers, is waited for.
    """
    caller, lock, over = ctypes.c_ulong(threading.get_ident()), threading.Lock(), threading.Event()

    def throw(what: Any) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(caller, what)

    def late() -> None:
        with lock:
            if not over.is_set():
                throw(ctypes.py_object(TooSlow))

    timer = threading.Timer(seconds, late)
    timer.daemon = True
    timer.start()
    try:
        try:
            return function()
        finally:
            timer.cancel()
            with lock:
                over.set()
                throw(None)  # what was thrown and has not arrived
    except TooSlow:
        longest = f"{TEMPLATE_SECONDS:g} seconds"
        raise InputError(f"the model's chat template is refused: it takes longer than {longest}.") from None
