"""One episode of a task of verifiers in this process: its tools, its trace and its score."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

import verifiers.v1 as vf
from mcp.server.mcpserver.tools.base import Tool as Described
from transformers.utils.chat_template_utils import parse_google_format_docstring
from verifiers.v1.dialects import parse_message
from verifiers.v1.graph import prepare_turn
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.mcp.server import _call_state
from verifiers.v1.state import state_cls
from verifiers.v1.types import Response
from verifiers.v1.utils.decorators import discover_decorated, invoke


@dataclass(frozen=True)
class Tool:
    """A tool of a toolset, as verifiers' MCP server has it."""

    name: str
    """The name that a model calls it by."""
    place: int
    """The place of its toolset among those of an episode."""
    function: str
    """The name of the toolset's method."""
    described: Described
    """Its arguments, and what becomes of its result."""

    def method(self) -> Callable[..., Any]:
        """Return a method that calls the tool of the episode which is being played, described for transformers."""
        function, parameters = self.described.fn, self.described.parameters.get("properties", {})
        hints, signature = get_type_hints(function), inspect.signature(function)
        words, arguments, _ = parse_google_format_docstring(inspect.getdoc(function) or self.name)
        about = {name: (arguments or {}).get(name) or parameters[name].get("description") for name in parameters}

        async def method(environment: Any, **given: Any) -> str:
            return await environment._played.call(self, given)

        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        others = [each.replace(annotation=hints[name]) for name, each in signature.parameters.items()]
        method.__name__ = method.__qualname__ = self.name
        method.__annotations__ = {name: hints[name] for name in signature.parameters}
        method.__signature__ = inspect.Signature([own, *others])  # type: ignore[attr-defined]
        lines = [f"    {name}: {' '.join((said or name.replace('_', ' ')).split())}" for name, said in about.items()]
        method.__doc__ = "\n".join([words or self.name, "", *(["Args:", *lines] if lines else [])])
        return method


def tools_of(toolsets: Sequence[vf.Toolset]) -> Iterator[Tool]:
    """Yield the tools of an episode's toolsets, named as by verifiers' harnesses."""
    for place, toolset in enumerate(toolsets):
        for function in discover_decorated(toolset, "tool"):
            name, prefix = getattr(function, "tool_name", None) or function.__name__, toolset.server_name
            described = Described.from_function(function, name=name, description=inspect.getdoc(function) or name)
            yield Tool(f"{prefix}_{name}" if prefix else name, place, function.__name__, described)


class Played:
    """An episode: a task, its toolsets, and the trace that the task's hooks read."""

    def __init__(self, task: vf.Task, shared: Sequence[vf.Toolset]) -> None:
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig(harness={"id": "null"}))
        self.task, self.trace = task, vf.Trace(task=about, agent=agent, state=state_cls(type(task))())
        self.own = task.toolsets(task.config)
        self.toolsets = [*self.own, *shared]

    @classmethod
    async def begin(cls, task: vf.Task, shared: Sequence[vf.Toolset] = ()) -> Played:
        """Set up a task and the toolsets that it has for itself, in verifiers' order."""
        played = cls(task, shared)
        await invoke(task.setup, {"trace": played.trace, "runtime": None})
        for toolset in played.own:
            await toolset.setup()
            await toolset.setup_task(task.data)
        return played

    async def call(self, tool: Tool, given: Mapping[str, Any]) -> str:
        """Return a tool's result as verifiers' harness hands it to a model.

        As over its state channel, a tool works on a copy of the episode's state, which is kept if the call succeeds.

        Raises:
            RuntimeError: the tool failed, or its arguments do not fit; in the words of the MCP server.
        """
        toolset, meta = self.toolsets[tool.place], tool.described.fn_metadata
        kind = state_cls(type(toolset))
        try:
            arguments = meta.validate_arguments(dict(given))
            state = kind() if kind is vf.State else kind.model_validate_json(self.trace.state.model_dump_json())
            before, token = state.model_dump_json(), _call_state.set(state)
            try:
                result = getattr(toolset, tool.function)(**arguments)
                result = await result if inspect.isawaitable(result) else result
            finally:
                _call_state.reset(token)
            if kind is not vf.State and (after := state.model_dump_json()) != before:
                self.trace.state = type(self.trace.state).model_validate_json(after)
            answer = meta.convert_result(result)
            text = mcp_content_to_chat_content(answer.content)
        except Exception as error:  # of the tool's author, or of pydantic
            raise RuntimeError(f"Error executing tool {tool.described.name}: {error}") from error
        if not isinstance(text, str):
            raise RuntimeError(
                f"Error executing tool {tool.described.name}: it returned an image, and this takes text."
            )
        if answer.is_error:
            raise RuntimeError(text)
        return text

    async def score(self, completion: str | Sequence[Mapping[str, Any]]) -> float:
        """Finish the task, score what the policy wrote, and return the weighted sum of its rewards.

        The trace holds messages; tokens are oblrpo's, and what counts them (`trace.usage`) raises an error.
        """
        trace, data = self.trace, self.task.data
        texts = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        prompt = data.prompt if isinstance(data.prompt, list) else [vf.UserMessage(content=data.prompt)]
        messages = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
        messages += prompt
        for message in map(parse_message, _with_ids(texts)):
            if message.role == "assistant":
                response = Response(id="", created=0, model="", message=message, finish_reason=None)
                trace.calls.append(_Call(prepare_turn(trace, list(messages)).commit(response)))
            messages.append(message)
        if messages[-1].role == "assistant" and not messages[-1].tool_calls:
            trace.stop("agent_completed")
        else:
            prepare_turn(trace, messages).commit_prompt()
        await invoke(self.task.finalize, {"trace": trace, "runtime": None})
        await self.task.score(trace)
        return float(trace.reward)


def _with_ids(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Our messages as an API has them: calls have ids, which their results repeat, and arguments are JSON."""
    count, open_calls = 0, []
    for message in messages:
        if message["role"] == "tool":
            yield {**message, "tool_call_id": open_calls.pop(0) if open_calls else ""}
            continue
        calls, open_calls = [], []
        for call in message.get("tool_calls") or ():
            function, arguments = call["function"], call["function"].get("arguments", {})
            arguments = arguments if isinstance(arguments, str) else json.dumps(arguments)
            open_calls.append(f"call_{(count := count + 1)}")
            calls.append({"id": open_calls[-1], "type": "function", "function": {**function, "arguments": arguments}})
        yield {**message, "tool_calls": calls}


class _Call:
    """A call of the model, of which the trace knows the message alone."""

    def __init__(self, node: int) -> None:
        self.node, self.error = node, None

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"`{name}` of the policy's turns (tokens, why they ended) is not known to a reward here")
