"""Tasksets of the library verifiers as rows, an environment and a reward (docs/verifiers.md)."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_type_hints

try:
    import verifiers.v1 as vf
except ImportError as error:
    from oblrpo.errors import pip_install

    needed = f"the adapter for verifiers needs verifiers 0.4, and Python 3.11 or newer ({error})"
    raise ImportError(f"{needed}; install it with: {pip_install('verifiers')}") from error

from mcp.server.mcpserver.tools.base import Tool as McpTool
from transformers.utils.chat_template_utils import parse_google_format_docstring
from verifiers.v1.dialects.chat import message_to_wire, parse_message
from verifiers.v1.graph import prepare_turn
from verifiers.v1.harnesses.utils.mcp import mcp_content_to_chat_content
from verifiers.v1.mcp.server import _call_state
from verifiers.v1.state import state_cls
from verifiers.v1.utils.decorators import discover_decorated, invoke
from verifiers.v1.utils.loaders import default_harness_id, environment_class, load_taskset, taskset_config_type

from oblrpo.errors import InputError
from oblrpo.workers import in_thread


class FromTaskset(NamedTuple):
    """What `oblrpo.train` takes: data=rows, environment=environment, reward=reward.

    A row has a task's prompt, its place among the tasks, and the hash of its data. The methods of the environment are
    the tools, under verifiers' names; without any it is None. The reward sums a task's weighted rewards and judges.
    """

    rows: list[dict[str, Any]]
    environment: type | None
    reward: Callable[..., Any]


def from_taskset(taskset: str | vf.Taskset, most: int | None = None, without: Sequence[str] = ()) -> FromTaskset:
    """Return rows, environment and reward of a taskset of verifiers.

    The policy meets what verifiers' harness `null` shows a model: the task's prompt and its tools, until it answers
    without a call. Tools, `setup`, `finalize`, rewards and judges run in this process. What a taskset needs that this
    does not do is named in an InputError.

    Args:
        taskset: the name of an installed taskset, or one that was made.
        most: the first so many tasks; an endless taskset needs it.
        without: hooks of the task (`@vf.stop`) that are left out, such as a limit of turns that `max_turns` replaces.
    """
    name = taskset if isinstance(taskset, str) else taskset.config.id or type(taskset).__module__.partition(".")[0]
    try:
        made = load_taskset(taskset_config_type(name)(id=name)) if isinstance(taskset, str) else taskset
        tasks = list(made.take(most)) if most else list(made) if made.bounded else None
    except Exception as error:  # of the taskset's own code, too
        raise InputError(f"the taskset '{name}' cannot be loaded: {error}") from error
    if not tasks:
        why = "has no tasks" if tasks == [] else "is endless; give most=..., the number of its first tasks to take"
        raise InputError(f"the taskset '{name}' {why}.")
    shared = made.toolsets(made.config)
    toolsets = [*tasks[0].toolsets(tasks[0].config), *shared]
    if unknown := {*without} - {hook.__name__ for hook in tasks[0].hooks("stop")}:
        raise InputError(f"without: the tasks of '{name}' have no @vf.stop called {', '.join(sorted(unknown))}.")
    if refused := list(dict.fromkeys(_refusals(name, tasks, toolsets, {*without}))):
        raise InputError(f"the taskset '{name}' cannot be trained on: it {'; it '.join(refused)}.")
    try:
        for each in shared:  # in a thread: a notebook has an event loop of its own
            in_thread(asyncio.run, each.setup()).result()
    except Exception as error:  # of the toolset's own code
        raise InputError(f"the tools of the taskset '{name}' cannot be set up: {error}") from error
    prompts = [[message_to_wire(message) for message in _opening(task.data)] for task in tasks]
    rows = [{"prompt": prompts[place], "task": place, "hash": task.hash} for place, task in enumerate(tasks)]
    environment = _environment(type(made).__name__, tasks, toolsets, shared) if toolsets else None
    return FromTaskset(rows, environment, _reward(type(made).__name__, tasks, environment))


def _refusals(name: str, tasks: Sequence[vf.Task], toolsets: Sequence[vf.Toolset], without: set[str]) -> Iterator[str]:
    """Say what a taskset needs that is not done here."""
    if (kind := environment_class(name)) is not vf.SingleAgentEnv:
        yield f"has an Env of its own ({kind.__name__}), which plays the user or further agents"
    if default_harness_id(name) != "bash":  # verifiers' word for none
        yield "has a harness of its own, which writes the conversation"
    if any(each.config.url or each.config.runtime.type != "subprocess" for each in toolsets):
        yield "has tools that run elsewhere"
    if any(type(each).register is not vf.Toolset.register for each in toolsets):
        yield "has tools that are not marked by @vf.tool"
    for task in tasks:
        data, judges = task.data, [judge.score for judge in task.plugged_judges()]
        if data.prompt is None:
            yield "has no prompts: a user opens the conversation"
        elif any(isinstance(message.content, list) for message in _opening(data)):
            yield "has prompts of several parts, such as images"
        if task.NEEDS_CONTAINER or data.image or data.workdir or data.agent_user or data.skills or data.artifacts:
            yield "needs a container, or files of one"
        hooks = [hook for hook in (task.setup, task.finalize) if hook.__module__ != vf.Task.__module__]
        hooks += [*task.hooks("metric"), *(rewards := [*task.hooks("reward"), *judges])]
        asks = [inspect.signature(hook).parameters.get("runtime") for hook in hooks]
        if any(each and each.default is each.empty for each in asks):
            yield "runs programs or reads files in a runtime of verifiers (setup, finalize, rewards, metrics or judges)"
        if not rewards:
            yield "has no @vf.reward and no judge"
        if discover_decorated(task, "intercept"):
            yield "rewrites messages (@vf.intercept)"
        # Without tools the first answer ends an episode, whatever they say.
        if toolsets and (stops := {hook.__name__ for hook in task.hooks("stop")} - without):
            yield f"ends episodes by @vf.stop; set max_turns and leave out: without={sorted(stops)}"
        if task.config != tasks[0].config:
            yield "has tasks of several configurations"


def _opening(data: vf.TaskData) -> list[Any]:
    system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    return [*system, *(data.prompt if isinstance(data.prompt, list) else [vf.UserMessage(content=data.prompt)])]


def _environment(kind: str, tasks: list[vf.Task], toolsets: list[vf.Toolset], shared: list[vf.Toolset]) -> type:
    """Return a class with a method for each tool; all tasks have the same."""

    async def reset(self: Any, task: int, **_: Any) -> None:
        """Begin the episode of a task."""
        self._played = await _Played.begin(tasks[task], shared)

    members: dict[str, Any] = {"reset": reset}
    for place, toolset in enumerate(toolsets):
        for function in discover_decorated(toolset, "tool"):
            name, prefix = getattr(function, "tool_name", None) or function.__name__, toolset.server_name
            tool = McpTool.from_function(function, name=name)
            called = f"{prefix}_{name}" if prefix else name
            if called in {*members, "get_reward"} or called[0] == "_" or tool.context_kwarg or tool.resolved_params:
                raise InputError(f"the tool {called!r} of {kind} has a name that is taken, or asks its server back.")
            members[called] = _method(called, place, function.__name__, tool)
    return type(kind, (), members)


def _method(called: str, place: int, function: str, tool: McpTool) -> Callable[..., Any]:
    """Return a method that calls a tool, described as transformers wants it: type hints, and a line an argument."""
    hints, signature = get_type_hints(tool.fn), inspect.signature(tool.fn)
    words, described, _ = parse_google_format_docstring(inspect.getdoc(tool.fn) or called)
    said = {name: schema.get("description", name) for name, schema in tool.parameters.get("properties", {}).items()}
    lines = [f"    {name}: {' '.join(text.split())}" for name, text in (said | (described or {})).items()]

    async def method(self: Any, **given: Any) -> str:
        played: _Played = self._played
        return await played.call(place, function, tool, given)

    parameters = [each.replace(annotation=hints[name]) for name, each in signature.parameters.items()]
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    method.__name__ = method.__qualname__ = called
    method.__annotations__ = {name: hints[name] for name in signature.parameters}
    method.__signature__ = inspect.Signature([itself, *parameters])  # type: ignore[attr-defined]
    method.__doc__ = "\n".join([words or called, "", *(["Args:", *lines] if lines else [])])
    return method


def _reward(kind: str, tasks: Sequence[vf.Task], environment: type | None) -> Callable[..., Any]:
    async def reward(
        completions: Sequence[Any], task: Sequence[int], environments: Sequence[Any] | None = None, **_: Any
    ) -> list[Any]:
        """Score every completion; an error stands in the place of its score, and leaves out no other."""
        if environment and None in (environments or [None]):
            raise InputError(f"the reward of {kind} reads its environment; give both from Python.")
        played = [each._played for each in environments or ()]
        played = played or await asyncio.gather(*(_Played.begin(tasks[place]) for place in task))
        scores = [each.score(completion) for each, completion in zip(played, completions, strict=True)]
        return await asyncio.gather(*scores, return_exceptions=True)

    reward.__name__ = kind
    return reward


class _Played(NamedTuple):
    """An episode of a task, with the toolsets that are its own and then those of all, and the trace that hooks read."""

    task: vf.Task
    toolsets: list[vf.Toolset]
    trace: vf.Trace

    @classmethod
    async def begin(cls, task: vf.Task, shared: Sequence[vf.Toolset] = ()) -> _Played:
        about = vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = vf.AgentInfo(config=vf.AgentConfig(harness={"id": "null"}))
        trace, own = vf.Trace(task=about, agent=agent, state=state_cls(type(task))()), task.toolsets(task.config)
        await invoke(task.setup, {"trace": trace, "runtime": None})
        for toolset in own:
            await toolset.setup()
            await toolset.setup_task(task.data)
        return cls(task, [*own, *shared], trace)

    async def call(self, place: int, function: str, tool: McpTool, given: dict[str, Any]) -> str:
        """Return a tool's result, or raise its error, in the words in which verifiers' harness hands it to a model.

        As over verifiers' state channel, a tool works on a copy of the state, which is kept if it succeeds.
        """
        kind = state_cls(type(self.toolsets[place]))
        try:
            arguments = tool.fn_metadata.validate_arguments(given)
            state = kind() if kind is vf.State else kind.model_validate_json(self.trace.state.model_dump_json())
            _call_state.set(state)  # of this asyncio task: each call has one
            result = getattr(self.toolsets[place], function)(**arguments)
            result = await result if inspect.isawaitable(result) else result
            if kind is not vf.State:
                self.trace.state = type(self.trace.state).model_validate_json(state.model_dump_json())
            answer = tool.fn_metadata.convert_result(result)
        except Exception as error:  # of the tool's author, or of pydantic
            raise RuntimeError(f"Error executing tool {tool.name}: {error}") from error
        text = mcp_content_to_chat_content(answer.content)
        if answer.is_error or not isinstance(text, str):
            raise RuntimeError(text if answer.is_error else "The tool returned an image, and this takes text alone.")
        return text

    async def score(self, completion: str | Sequence[Mapping[str, Any]]) -> float:
        """Finish the task, score what the policy wrote, and return the weighted sum of its rewards."""
        written = [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion
        trace, messages = self.trace, _opening(self.task.data)
        for message in map(parse_message, _with_ids(written)):
            if message.role == "assistant":
                response = vf.Response(id="", created=0, model="", message=message, finish_reason=None)
                call = vf.ModelCall(node=prepare_turn(trace, list(messages)).commit(response))
                # Its tokens and why it ended are not known: a hook that reads them fails, and does not find none.
                del call.__dict__["usage"], call.__dict__["finish_reason"]
                trace.calls.append(call)
            messages.append(message)
        prepare_turn(trace, messages).commit_prompt()  # results that no turn followed
        if messages[-1].role == "assistant" and not messages[-1].tool_calls:
            trace.stop("agent_completed")
        await invoke(self.task.finalize, {"trace": trace, "runtime": None})
        await self.task.score(trace)
        return float(trace.reward)


def _with_ids(messages: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield our messages as an API has them: calls have ids, which results repeat, and arguments are JSON."""
    ids: list[str] = []  # of calls, the answered ones left out
    for turn, message in enumerate(messages):
        if message["role"] == "tool":
            yield {**message, "tool_call_id": ids.pop(0) if ids else ""}
            continue
        made = [call["function"] for call in message.get("tool_calls") or ()]
        ids = [f"call_{turn}_{number}" for number in range(len(made))]
        functions = [{**each, "arguments": json.dumps(each["arguments"])} for each in made]
        calls = [{"id": call, "type": "function", "function": each} for call, each in zip(ids, functions, strict=True)]
        yield {**message, "tool_calls": calls}
