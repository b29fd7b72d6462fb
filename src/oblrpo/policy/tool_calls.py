"""Calls of tools in the turns of a policy, and the tokens of what tools return, as the chat template writes both."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import transformers

from oblrpo.errors import InputError
from oblrpo.policy.prompts import ANSWER, TEMPLATE_SECONDS, Conversation, PromptFormat, in_time

ASKED, RESULT = "A-question-0", "A-result-"
"""Contents that no conversation has."""

SINCE = (5, 15)
"""The transformers whose response templates read calls with the types of the tools' schemas."""

STUCK, STUCK_SECONDS = "\n" * 1000, 0.1
r"""A policy may repeat itself in an argument; patterns such as \s*.*?\s* take seconds for this, and hours for more."""

THOUGHT = {"reasoning_content": {"open": "<think>", "close_pattern": r"</think>\s*"}}
CALLED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def _tags(opened: str, key: str, value: str) -> dict[str, Any]:
    """Calls whose arguments are in tags, which the schemas type; one that is not closed is left out."""
    tag = rf"{key}(?:{value}|.*(*SKIP)(*FAIL))"
    inline = {"tag_pattern": tag, "value_parser": {"name": "text", "args": {"strip": False}}}
    closed = {"open_pattern": opened, "close_pattern": r"</tool_call>\s*", "repeats": True}
    return {"tool_calls": {**closed, "content": "xml-inline", "content_args": inline, "transform": CALLED}, **THOUGHT}


FAMILIES: dict[str, dict[str, Any]] = {
    "Hermes, Qwen 2.5, Qwen 3": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        **THOUGHT,
    },
    "Qwen 3.5, Nemotron 3": _tags(
        r"<tool_call>\s*<function=(?P<name>[^<>\n]+)>",
        r"<parameter=(?P<key>[^<>\n]+)>",
        r"\n?(?P<value>.*?)\n?</parameter>",
    ),
    "GLM 4.5": _tags(
        r"<tool_call>(?P<name>[\w.-]+)",
        r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>",
        r"(?P<value>.*?)</arg_value>",
    ),
    "Llama 3": {
        "tool_calls": {
            "open_pattern": r'(?:<\|python_tag\|>)?\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
            "close_pattern": r"\}\s*\Z",
            "repeats": True,
            "content": "json",
            "transform": CALLED,
        }
    },
}
"""How families whose tokenizers bring no response template write calls: fields of such a template."""

WRITTEN = "calls of tools, and answers, as the model's chat template writes them"
CHANGES = (
    "the model's chat template shows what stands before in another way once calls or results of tools follow; give it "
    "a template that does not."
)
CURE = (
    "set response_template in the model's tokenizer_config.json (TRL's add_response_schema knows one for more "
    f"families), or give the model a chat template whose calls are known here ({', '.join(FAMILIES)})"
)


@dataclass(frozen=True)
class ToolFormat:
    """How a model's turns write calls of tools, and how it reads what they return."""

    asked: Conversation
    """A question, with the schemas of the tools."""
    response: Any
    """The response template, as transformers loads it."""
    own: bool
    """Whether the tokenizer brings it: what the patterns of others want to see of the end token is not known."""

    @classmethod
    def of(cls, tokenizer: Any, prompt_format: PromptFormat, tools: Sequence[Mapping[str, Any]]) -> ToolFormat:
        """Return the format that reads back a call of each tool as the chat template writes it.

        `tools` are JSON schemas, as of transformers' get_json_schema. The tokenizer's own response template reads the
        calls or, where it has none, or one that takes hours for a turn that repeats itself, the first of FAMILIES that
        can. InputError says what the chat template does not show, or that nothing reads its calls.
        """
        if tuple(map(int, transformers.__version__.split(".")[:2])) < SINCE:
            raise InputError(
                f"tools need transformers {SINCE[0]}.{SINCE[1]} or later, which reads calls by response templates; "
                f"this is {transformers.__version__}: pip install -U transformers."
            )
        if not tokenizer.chat_template or not tools:
            lacks = "at least one tool" if tokenizer.chat_template else "a chat template, and the tokenizer has none"
            raise InputError(f"turns with tools need {lacks}; give an instruct model whose template shows tools.")
        system = [{"role": "system", "content": prompt_format.system_prompt}] if prompt_format.system_prompt else []
        args = {**prompt_format.template_args, "tools": list(tools)}
        asked = Conversation(tokenizer, [*system, {"role": "user", "content": ASKED}], args)
        return in_time(lambda: _format(asked, getattr(tokenizer, "response_template", None)), TEMPLATE_SECONDS)

    def parse(self, context_ids: Sequence[int], turn_ids: Sequence[int]) -> dict[str, Any]:
        """Return the assistant's message of a turn behind its context, with `tool_calls` if it makes any.

        The types of arguments are those of the schemas. A turn of which a call cannot be parsed is text without calls,
        as in TRL. Names and arguments are what the policy wrote: a tool that does not exist, or any value of JSON.
        """
        try:
            return self._message(context_ids, turn_ids)
        except Exception:  # a policy may write anything, and parsers raise what they like
            content = self.asked.tokenizer.decode(list(turn_ids), skip_special_tokens=True)
            return {"role": "assistant", "content": content}

    def results(
        self, message: Mapping[str, Any], results: Sequence[tuple[str, str]], turn_ids: Sequence[int] = ()
    ) -> list[int]:
        """Return the token ids that follow a turn: the results, each a tool's name and text, and the next turn's begin.

        Special tokens in a result are read as text, so that a tool cannot end its turn and begin another. An end that
        the turn `turn_ids` has written itself is not written again.
        """
        name, *names = map(self._name, (message["tool_calls"][0]["function"]["name"], *(tool for tool, _ in results)))
        contents = [_clean(content) for _, content in results]
        ids = in_time(lambda: self._result_ids(name, list(zip(names, contents, strict=True))), TEMPLATE_SECONDS)
        return ids[1:] if turn_ids and ids[:1] == list(turn_ids[-1:]) else ids

    def _message(self, context_ids: Sequence[int], turn_ids: Sequence[int]) -> dict[str, Any]:
        from transformers.utils.chat_parsing import parse_response

        before, text = map(self.asked.tokenizer.decode, (list(context_ids), list(turn_ids)))
        end = self.asked.tokenizer.decode(self._specials(turn_ids[-1:]))
        text = text if self.own else text.removesuffix(end)
        if not self.response.start_anchor_re.search(before):
            before = ""  # all of which would be read as the turn, calls of other turns with it
        parsed = parse_response(text, self.response, prefix=before, tools=self.asked.args["tools"])
        message: dict[str, Any] = _clean({**parsed, "role": "assistant", "content": parsed.get("content") or ""})
        message["content"] = message["content"].removesuffix(end)
        for call in message.get("tool_calls", []):
            if call["type"] != "function" or not isinstance(call["function"]["name"], str):
                raise ValueError("no call")
            if call["function"].get("arguments") is None:
                call["function"]["arguments"] = {}
        return message

    def _result_ids(self, name: str, results: Sequence[tuple[str, str]]) -> list[int]:
        marks = [(tool, f"{RESULT}{index}-") for index, (tool, _) in enumerate(results)]
        (end, text), (_, marked) = self._behind(name, results), self._behind(name, marks)
        begin = len(self._ids(end))  # in front of all, because tokenizers may begin a text in a way of their own
        ids = self._ids(end + text)
        if self._specials(ids) == self._specials(self._ids(end + marked)):
            return ids[begin:]
        ids, rest = [], marked
        for index, (mark, result) in enumerate(zip(marks, results, strict=True)):
            _, one = self._behind(name, [*marks[:index], result, *marks[index + 1 :]])
            before, _, after = marked.partition(mark[1])
            framed = one.startswith(before) and one.endswith(after)
            shown = one[len(before) : len(one) - len(after)] if framed else result[1]
            head, _, rest = rest.partition(mark[1])
            ids += self._ids(end + head)[begin:] + self._ids(shown, split_special_tokens=True)
        return ids + self._ids(end + rest)[begin:]

    def _behind(self, name: str, results: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """Return the token that ends a turn with a call, nothing if none does, and the text that follows it."""
        messages = [*map(dict, self.asked.messages), _call(name, {"argument": ANSWER})]
        tools = [{"role": "tool", "name": tool, "content": content} for tool, content in results]
        called = _text(replace(self.asked, messages=messages, begins=False), "calls of tools")
        turn = called.partition(ANSWER)[2]
        behind = _text(replace(self.asked, messages=messages + tools), "results of tools").partition(ANSWER)[2]
        turn, end = self._ended(turn)
        if not turn or not behind.startswith(turn):
            raise InputError(CHANGES)
        return end, behind[len(turn) :]

    def _ended(self, turn: str) -> tuple[str, str]:
        """Return a turn without the space behind its end token, as sampling leaves it, and that token, or nothing."""
        end = self.asked.tokenizer.decode(self._specials(self._ids(turn))[-1:])
        space = turn.rpartition(end)[2] if end else turn
        return (turn, "") if space.strip() else (turn.removesuffix(space), end)

    def _name(self, name: str) -> str:
        """The name of a tool, which the policy wrote, and special tokens with it."""
        clean: str = _clean(name)
        return "unknown" if self._specials(self._ids(clean)) else clean

    def _ids(self, text: str, **how: bool) -> list[int]:
        ids: list[int] = self.asked.tokenizer(text, add_special_tokens=False, **how).input_ids
        return ids

    @cached_property
    def _special(self) -> frozenset[int]:
        """All special tokens, of which all_special_ids holds those with a role, such as the end token."""
        added = self.asked.tokenizer.added_tokens_decoder.items()
        return frozenset(self.asked.tokenizer.all_special_ids) | {token for token, word in added if word.special}

    def _specials(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self._special]


def _clean(value: Any, depth: int = 100) -> Any:
    """A value of JSON without what others refuse in it: halves of surrogate pairs, NaN, what is nested too deeply."""
    if not depth:
        raise ValueError("nested too deeply")
    if isinstance(value, str):
        return value.encode(errors="replace").decode()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return [_clean(each, depth - 1) for each in value]
    if isinstance(value, dict):
        return {_clean(key): _clean(each, depth - 1) for key, each in value.items()}
    return value


def _call(name: str, arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _value(schema: Mapping[str, Any]) -> Any:
    """Return a value that a JSON schema allows; a text that could be a number shows whether types are kept."""
    if choices := schema.get("enum") or [_value(each) for each in schema.get("anyOf") or schema.get("oneOf") or ()]:
        return choices[0]
    kind = schema.get("type", "string")
    kind = kind if isinstance(kind, str) else kind[0]
    if kind == "array":
        return [_value(schema.get("items") or {})]
    if kind == "object":
        return {key: _value(each) for key, each in (schema.get("properties") or {"key": {}}).items()}
    return {"integer": 7, "number": 0.5, "boolean": True, "null": None}.get(kind, "12")


def _text(conversation: Conversation, what: str) -> str:
    try:
        return conversation.text
    except Exception as error:  # a template may raise whatever it likes
        because = " ".join(str(error).split())[:200]
        raise InputError(
            f"the model's chat template refuses {what}: {because}; give it a template that shows tools."
        ) from None


def _turn(before: Conversation, message: Mapping[str, Any], what: str) -> tuple[str, str]:
    """Return the context of a turn, up to where its own text begins, and the turn."""
    whole = _text(replace(before, messages=[*before.messages, message], begins=False), what)
    context = _text(before, what)
    same = next((at for at, (one, other) in enumerate(zip(context, whole, strict=False)) if one != other), len(context))
    return context[:same], whole[same:]


def _shown(what: str, words: Sequence[str], text: str) -> None:
    if hidden := [word for word in words if word not in text]:
        raise InputError(
            f"the model's chat template does not show {what} ({hidden[0]!r} is missing); give it a template that does."
        )


def _format(asked: Conversation, own: Any) -> ToolFormat:
    """Return the first format that makes the round trip: calls of all tools, and answers without and behind results."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    tools = [tool.get("function", tool) for tool in asked.args["tools"]]
    keys = {tool["name"]: (tool.get("parameters") or {}).get("properties") or {} for tool in tools}
    _shown("the tools", [word for name in keys for word in (name, *keys[name])], _text(asked, "tools"))
    calls = [_call(name, {key: _value(each) for key, each in keys[name].items()}) for name in keys]
    turns = [(call, *_turn(asked, call, "calls of tools")) for call in calls]
    for name, (_, _, turn) in zip(keys, turns, strict=True):
        _shown("calls of tools", [name], turn)
    name, answer = tools[0]["name"], {"role": "assistant", "content": ANSWER}
    read = replace(asked, messages=[*asked.messages, calls[0], {"role": "tool", "name": name, "content": RESULT}])
    turns += [(answer, *_turn(before, answer, "results of tools")) for before in (asked, read)]
    _shown("the results of tools", [RESULT], turns[-1][1])
    if not all(ASKED in context for _, context, _ in turns) or not turns[-1][1].startswith(turns[0][1]):
        raise InputError(CHANGES)
    why = "no parser known here reads"
    if own:
        try:
            found = ToolFormat(asked, load_response_template(own), own=True)
        except Exception as error:
            raise InputError(f"the tokenizer's response_template is refused: {error}.") from None
        if not _reads(found, turns):
            raise InputError(f"the tokenizer's response_template does not read {WRITTEN}; correct it.")
        if not _is_slow(found, _call(name, dict.fromkeys(keys[name], STUCK))):
            return found
        why = "the tokenizer's response_template takes hours for a turn that repeats itself, and nothing else reads"
    for spec in _specs(turns[-2:]):
        found = ToolFormat(asked, load_response_template(spec), own=False)
        if _reads(found, turns):
            return found
    raise InputError(f"{why} {WRITTEN}; {CURE}.")


def _reads(found: ToolFormat, turns: Sequence[tuple[Mapping[str, Any], str, str]]) -> bool:
    """Whether turns are read as the messages that they are, and results can follow a call."""
    for message, context, turn in turns:
        parsed = found.parse(found._ids(context), found._ids(found._ended(turn)[0]))
        known = bool(found.response.start_anchor_re.search(context)) and parsed["content"].strip() == message["content"]
        if not known or parsed.get("tool_calls") != message.get("tool_calls"):
            return False
    return bool(found._behind("tool", [("tool", RESULT)])[1])


def _is_slow(found: ToolFormat, stuck: Mapping[str, Any]) -> bool:
    """Whether a call takes long to read that never comes to the end of its first argument."""
    context, turn = _turn(found.asked, stuck, "calls of tools")
    ids = found._ids(context), found._ids(turn.partition(STUCK)[0] + STUCK)
    began = time.thread_time()
    found.parse(*ids)
    return time.thread_time() - began > STUCK_SECONDS


def _specs(answers: Sequence[tuple[Any, str, str]]) -> list[dict[str, Any]]:
    """Return a response template for each of FAMILIES; answers behind a question and results show the anchors."""
    begins = [context.rpartition(mark)[2] for (_, context, _), mark in zip(answers, (ASKED, RESULT), strict=True)]
    anchors = [anchor for begin in begins if (anchor := begin.partition("<think>")[0]).strip()]
    return [{"start_anchor": anchors, "fields": {**each, "content": {}}} for each in FAMILIES.values() if anchors]
