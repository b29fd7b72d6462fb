"""Calls of tools in the turns of a policy, and the tokens of what tools return, as the chat template writes both."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import transformers

from oblrpo.errors import InputError
from oblrpo.policy.prompts import ANSWER, TEMPLATE_SECONDS, Conversation, PromptFormat, in_time

ASKED, RESULT = "A-question-0", "A-result-"
"""Contents that no conversation has."""

SINCE = (5, 15)
"""The transformers that parses calls by response templates, with the types of the tools' schemas."""

CURE = (
    "set response_template in the model's tokenizer_config.json (transformers' documentation, response parsing), or "
    "give the model a chat template whose calls are known here (Qwen, Llama 3, GLM)"
)

FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
JSON_CALL = {"content": "json", "transform": {"type": "function", "function": "{content}"}}
THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}


def xml_calls(name: str, argument: str) -> dict[str, Any]:
    """Return a field of a response template: calls in <tool_call>, their arguments in tags, typed by the schemas."""
    inline = {"tag_pattern": argument, "value_parser": {"name": "text"}}
    pattern = {"open_pattern": rf"<tool_call>\s*{name}", "close_pattern": r"</tool_call>\s*"}
    return {**pattern, "content": "xml-inline", "content_args": inline, "transform": FUNCTION}


def candidates(ends: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the field of calls, as of a response template, of families whose tokenizers bring none."""
    end = "|".join(map(re.escape, ends))
    yield {"open": "<tool_call>", "close_pattern": r"</tool_call>\s*", **JSON_CALL}  # Hermes, Qwen 2.5 and 3
    yield xml_calls(  # Qwen 3.5, Nemotron 3
        r"<function=(?P<name>[^\n>]+)>", r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>"
    )
    yield xml_calls(  # GLM 4.5
        r"(?P<name>[^\s<]+)", r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"
    )
    yield {  # Llama 3
        "open_pattern": r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
        "close_pattern": rf"\}}\s*(?:{end}|\Z)",
        "content": "json",
        "transform": FUNCTION,
    }


@dataclass(frozen=True)
class ToolFormat:
    """How a model's turns write calls of tools, and how it reads what they return."""

    asked: Conversation
    """A question, with the schemas of the tools."""
    response: Any
    """The response template, as transformers loads it."""

    @classmethod
    def of(cls, tokenizer: Any, prompt_format: PromptFormat, tools: Sequence[Mapping[str, Any]]) -> ToolFormat:
        """Return the format that reads back a call of each tool as the chat template writes it.

        `tools` are JSON schemas, as of transformers' get_json_schema. What reads calls is the tokenizer's own response
        template or, where it has none, the first of `candidates`. InputError says what a template does not show.
        """
        if tuple(map(int, transformers.__version__.split(".")[:2])) < SINCE:
            raise InputError(
                f"tools need transformers {SINCE[0]}.{SINCE[1]} or later, which parses calls, and this is "
                f"{transformers.__version__}: pip install -U transformers."
            )
        if not tokenizer.chat_template:
            raise InputError(
                "tools need a chat template, and the model's tokenizer has none; give an instruct model whose template "
                "shows tools."
            )
        system = [{"role": "system", "content": prompt_format.system_prompt}] if prompt_format.system_prompt else []
        args = {**prompt_format.template_args, "tools": list(tools)}
        asked = Conversation(tokenizer, [*system, {"role": "user", "content": ASKED}], args)
        return in_time(lambda: _format(asked, getattr(tokenizer, "response_template", None)), TEMPLATE_SECONDS)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model."""
        return self.asked.tokenizer

    def parse(self, context_ids: Sequence[int], turn_ids: Sequence[int]) -> dict[str, Any]:
        """Return the assistant's message of a turn behind its context, with `tool_calls` if it makes any.

        The types of arguments are those of the schemas. A turn of which a call cannot be parsed is text without calls,
        as in TRL. An argument's value, and the arguments as a whole, may be any that JSON has.
        """
        before, text = (self.tokenizer.decode(list(ids)) for ids in (context_ids, turn_ids))
        try:
            return self._message(before, text)
        except Exception:  # what a policy writes may be anything, and parsers raise what they like
            content = self.tokenizer.decode(list(turn_ids), skip_special_tokens=True)
            return {"role": "assistant", "content": content}

    def results(
        self, message: Mapping[str, Any], results: Sequence[tuple[str, str]], turn_ids: Sequence[int] = ()
    ) -> list[int]:
        """Return the token ids that follow a turn: the results, each a tool's name and text, and the next turn's begin.

        Special tokens in a result are read as text: a tool cannot end its turn and begin another. An end that the turn
        `turn_ids` has written itself is not written again.
        """
        name = message["tool_calls"][0]["function"]["name"]
        plain = [(tool, content.encode(errors="replace").decode()) for tool, content in results]
        ids = in_time(lambda: self._result_ids(name, plain), TEMPLATE_SECONDS)
        return ids[1:] if turn_ids and ids[:1] == list(turn_ids[-1:]) else ids

    def _message(self, before: str, text: str) -> dict[str, Any]:
        from transformers.utils.chat_parsing import parse_response

        parsed = parse_response(text, self.response, prefix=before, tools=self.asked.args["tools"])
        content = parsed.get("content") or ""
        for end in self.tokenizer.all_special_tokens:
            content = content.removesuffix(end)
        message = {**parsed, "role": "assistant", "content": content}
        for call in message.get("tool_calls", []):
            if call["type"] != "function" or not isinstance(call["function"]["name"], str):
                raise ValueError("no call")
            if call["function"].get("arguments") is None:
                call["function"]["arguments"] = {}
        return message

    def _ids(self, text: str, **how: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False, **how).input_ids
        return ids

    def _specials(self, ids: Sequence[int]) -> list[int]:
        special = set(self.tokenizer.all_special_ids)
        return [token for token in ids if token in special]

    def _behind(self, name: str, results: Sequence[tuple[str, str]]) -> tuple[str, str]:
        """Return the token that ends a turn with a call, nothing if none does, and the text that follows it."""
        called = replace(self.asked, messages=[*self.asked.messages, _call(name, {"argument": ANSWER})], begins=False)
        tools = [{"role": "tool", "name": tool, "content": content} for tool, content in results]
        whole = replace(called, messages=[*called.messages, *tools], begins=True)
        (_, found, turn), (_, _, behind) = (each.text.partition(ANSWER) for each in (called, whole))
        last = self._specials(self._ids(turn))[-1:]
        end = self.tokenizer.decode(last) if last else ""
        if end and (rest := turn.rpartition(end)[2]).strip() == "":
            turn = turn[: len(turn) - len(rest)]
        else:
            end = ""
        if not found or not behind.startswith(turn):
            raise InputError(
                "the model's chat template does not show results of tools behind the call as it shows the call alone; "
                "give it a template that does."
            )
        return end, behind[len(turn) :]

    def _result_ids(self, name: str, results: Sequence[tuple[str, str]]) -> list[int]:
        marks = [(tool, f"{RESULT}{index}-") for index, (tool, _) in enumerate(results)]
        (end, text), (_, marked) = self._behind(name, results), self._behind(name, marks)
        begin = len(self._ids(end))  # in front, so that the tokenizer begins no text there
        ids, harmless = (self._ids(end + each) for each in (text, marked))
        if self._specials(ids) == self._specials(harmless):
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


def _call(name: str, arguments: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": arguments}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _value(schema: Mapping[str, Any]) -> Any:
    """Return a value that a JSON schema allows; a text that could be a number shows whether types are kept."""
    if schema.get("enum"):
        return schema["enum"][0]
    for union in ("anyOf", "oneOf"):
        if schema.get(union):
            return _value(schema[union][0])
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
        raise InputError(
            f"the model's chat template refuses {what}: {' '.join(str(error).split())[:200]}; give it a template that "
            "shows tools."
        ) from None


def _turn(before: Conversation, message: Mapping[str, Any], what: str) -> tuple[str, str]:
    """Return the context of a turn, up to where its own text begins, and the turn."""
    whole = _text(replace(before, messages=[*before.messages, message], begins=False), what)
    context = _text(before, what)
    same = next((at for at, (one, other) in enumerate(zip(context, whole, strict=False)) if one != other), len(context))
    return context[:same], whole[same:]


def _format(asked: Conversation, own: Any) -> ToolFormat:
    """Return the first format that makes the round trip with all tools."""
    from transformers.utils.chat_parsing.response_templates import load_response_template

    tools = [tool.get("function", tool) for tool in asked.args["tools"]]
    properties = [(tool.get("parameters") or {}).get("properties") or {} for tool in tools]
    prompt = _text(asked, "tools")
    for tool, keys in zip(tools, properties, strict=True):
        if hidden := [word for word in (tool["name"], *keys) if word not in prompt]:
            raise InputError(
                f"the model's chat template does not show the tools ({hidden[0]!r} of {tool['name']} is nowhere in the "
                "prompt); give it a template that shows them."
            )
    calls = [
        _call(tool["name"], {key: _value(each) for key, each in keys.items()})
        for tool, keys in zip(tools, properties, strict=True)
    ]
    turns = [(call, *_turn(asked, call, "calls of tools")) for call in calls]
    for tool, (_, context, turn) in zip(tools, turns, strict=True):
        if ASKED not in context or tool["name"] not in turn:
            raise InputError(
                f"the model's chat template does not show the model's calls of tools (of {tool['name']}) behind its "
                "generation prompt; give it a template that shows them."
            )
    result = {"role": "tool", "name": tools[0]["name"], "content": RESULT}
    read = replace(asked, messages=[*asked.messages, calls[0], result])
    answer = {"role": "assistant", "content": ANSWER}
    for before in (asked, read):
        turns.append((answer, *_turn(before, answer, "results of tools")))
    if RESULT not in turns[-1][1]:
        raise InputError(
            "the model's chat template does not show the results of tools; give it a template that shows them."
        )
    errors = ""
    for spec in [own] if own else _specs(asked, [(context, turn) for _, context, turn in turns[-2:]]):
        try:
            found = ToolFormat(asked, load_response_template(spec))
        except Exception as error:
            errors = f" ({' '.join(str(error).split())[:200]})"
            continue
        if all(_reads(found, *turn) for turn in turns):
            found._behind(tools[0]["name"], [(tools[0]["name"], RESULT)])
            return found
    which = f"the tokenizer's response_template does not read{errors}" if own else "no parser known here reads"
    raise InputError(f"{which} the calls of tools that the model's chat template writes; {CURE}.")


def _reads(found: ToolFormat, message: Mapping[str, Any], context: str, turn: str) -> bool:
    parsed = found.parse(found._ids(context), found._ids(turn))
    parsed["content"] = parsed["content"].strip()
    anchored = found.response.start_anchor_re.search(context)
    return bool(anchored) and all(parsed.get(key) == message.get(key) for key in ("role", "content", "tool_calls"))


def _specs(asked: Conversation, answers: Sequence[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """Yield whole response templates: where turns begin and end is read off two answers, without and behind results."""
    thought = "<think>"
    begins = [context.rpartition(mark)[2] for (context, _), mark in zip(answers, (ASKED, RESULT), strict=True)]
    anchors = [begin.partition(thought)[0].rstrip() for begin in begins]
    tokenizer = asked.tokenizer
    ends = [end for end in tokenizer.all_special_tokens if end]
    end = answers[0][1].rpartition(ANSWER)[2].strip()
    for calls in candidates(ends):
        yield {
            "defaults": {"role": "assistant"},
            "start_anchor": [anchor for anchor in anchors if anchor],
            "fields": {
                "reasoning_content": THOUGHT,
                "tool_calls": {**calls, "repeats": True},
                "content": {"content": "text"} | ({"close_pattern": rf"{re.escape(end)}\s*"} if end else {}),
            },
        }
