"""A taskset as rows, an environment and a reward; what this cannot do as verifiers does is refused."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.utils.loaders import default_harness_id, environment_class, load_taskset, taskset_config_type

from oblrpo.adapters.verifiers.episode import Played, tools_of
from oblrpo.errors import InputError
from oblrpo.workers import in_thread


class FromTaskset(NamedTuple):
    """What `oblrpo.train` takes: data=rows, environment=environment, reward=reward."""

    rows: list[dict[str, Any]]
    """A row a task: its prompt as messages, its place among the tasks, and the hash of its data."""
    environment: type | None
    """A class whose methods are the tools, under the names that verifiers gives them; None if there are none."""
    reward: Callable[..., Any]
    """The sum of a task's weighted rewards and judges."""


def from_taskset(
    taskset: str | vf.Taskset, most: int | None = None, without: Sequence[str] = (), **configuration: Any
) -> FromTaskset:
    """Return rows, environment and reward of a taskset of verifiers.

    The policy meets what verifiers' harness `null` shows a model: the task's prompts and its tools, until it answers
    without a call. Tools, `setup`, `finalize`, rewards and judges run in this process.

    Args:
        taskset: the name of an installed taskset, or one that was made.
        most: the first so many tasks; an endless taskset needs it.
        without: hooks of the task (`@vf.stop`) that are left out, such as a limit of turns that `max_turns` replaces.
        configuration: of a taskset that is given by its name, such as `task={"judges": []}`.

    Raises:
        InputError: it cannot be loaded, or needs something of verifiers that this does not do; all of it is named.
    """
    name = taskset if isinstance(taskset, str) else taskset.config.id or type(taskset).__module__.partition(".")[0]
    if configuration and not isinstance(taskset, str):
        raise InputError(f"{', '.join(configuration)}: the taskset is made already; give these where it is made.")
    try:
        if isinstance(taskset, str):
            taskset = load_taskset(taskset_config_type(name).model_validate({"id": name, **configuration}))
        tasks = list(taskset.take(most)) if most else list(taskset) if taskset.bounded else None
    except Exception as error:  # of the taskset's own code, too
        raise InputError(f"the taskset '{name}' cannot be loaded: {error}") from error
    if tasks is None:
        raise InputError(f"the taskset '{name}' is endless; give most=..., the number of its first tasks to take.")
    if not tasks:
        raise InputError(f"the taskset '{name}' has no tasks.")
    shared = taskset.toolsets(taskset.config)
    toolsets = [*tasks[0].toolsets(tasks[0].config), *shared]
    unknown = {*without} - {hook.__name__ for hook in tasks[0].hooks("stop")}
    if unknown:
        raise InputError(f"without: the tasks of '{name}' have no @vf.stop called {', '.join(sorted(unknown))}.")
    if refused := list(
        dict.fromkeys([*_of_package(name), *_of_tools(toolsets), *_of_tasks(tasks, bool(toolsets), without)])
    ):
        raise InputError(f"the taskset '{name}' cannot be trained on here: it {'; it '.join(refused)}.")
    kind = type(taskset).__name__
    rows = [{"prompt": _prompt(task.data), "task": place, "hash": task.hash} for place, task in enumerate(tasks)]
    for each in shared:  # in a thread: a notebook has an event loop of its own
        in_thread(asyncio.run, each.setup()).result()
    environment = _environment(kind, tasks, toolsets, shared) if toolsets else None
    return FromTaskset(rows, environment, _reward(kind, tasks, bool(toolsets)))


def _of_package(name: str) -> Iterable[str]:
    """What the package of a taskset brings beside it."""
    if (kind := environment_class(name)) is not vf.SingleAgentEnv:
        yield f"has an Env of its own ({kind.__name__}), which plays the user, or further agents"
    if default_harness_id(name) != "bash":  # verifiers' word for none
        yield "has a harness of its own, which writes the conversation"


def _of_tools(toolsets: Iterable[vf.Toolset]) -> Iterable[str]:
    for each in toolsets:
        if each.config.url or each.config.runtime.type != "subprocess":
            yield f"has tools that run elsewhere ({type(each).__name__})"
        elif type(each).register is not vf.Toolset.register:
            yield f"registers tools otherwise than by @vf.tool ({type(each).__name__})"


def _of_tasks(tasks: Sequence[vf.Task], acts: bool, without: Sequence[str]) -> Iterable[str]:
    for task in tasks:
        data, kind = task.data, type(task)
        prompt = data.prompt if isinstance(data.prompt, list) else [vf.UserMessage(content=data.prompt or "")]
        if data.prompt is None:
            yield "has tasks without a prompt, which a user of verifiers opens"
        elif any(not isinstance(message.content, (str, type(None))) for message in prompt):
            yield "has prompts of several parts, such as images"
        if task.NEEDS_CONTAINER or any(
            (data.image, data.workdir, data.agent_user, data.skills, data.artifacts, task.runtime_env())
        ):
            yield "needs a container, or files of one"
        hooks = [
            getattr(task, hook) for hook in ("setup", "finalize") if getattr(kind, hook) is not getattr(vf.Task, hook)
        ]
        scores = [*task.hooks("metric"), *task.hooks("reward"), *(judge.score for judge in task.plugged_judges())]
        if wants := [each.__name__ for each in (*hooks, *scores) if _wants_runtime(each)]:
            yield f"wants a runtime of verifiers ({', '.join(wants)})"
        if not (task.hooks("reward") or task.plugged_judges()):
            yield "has no @vf.reward and no judge"
        if any(getattr(getattr(kind, name), "intercept", False) is True for name in dir(kind)):
            yield "rewrites messages (@vf.intercept)"
        # Without tools the first answer ends an episode, whatever they say.
        stops = {hook.__name__ for hook in task.hooks("stop")} - {*without} if acts else ()
        if stops:
            yield f"ends episodes by @vf.stop ({', '.join(sorted(stops))}); leave it out (without), and set max_turns"
        if task.config != tasks[0].config:
            yield "has tasks of several configurations"


def _wants_runtime(hook: Callable[..., Any]) -> bool:
    parameter = inspect.signature(hook).parameters.get("runtime")
    return parameter is not None and parameter.default is parameter.empty


def _prompt(data: vf.TaskData) -> list[dict[str, Any]]:
    system = [vf.SystemMessage(content=data.system_prompt)] if data.system_prompt else []
    prompt = data.prompt if isinstance(data.prompt, list) else [vf.UserMessage(content=data.prompt)]
    return [message_to_wire(message) for message in (*system, *prompt)]


def _environment(
    kind: str, tasks: Sequence[vf.Task], toolsets: Sequence[vf.Toolset], shared: Sequence[vf.Toolset]
) -> type:
    """Return a class with a method for each tool; all tasks have the same."""

    async def reset(self: Any, task: int, **_: Any) -> None:
        """Begin the episode of a task."""
        self._played = None
        self._played = await Played.begin(tasks[task], shared)

    members: dict[str, Any] = {"reset": reset, "_played": None}
    for tool in tools_of(toolsets):
        if tool.name in {*members, "get_reward"} or tool.name.startswith("_"):
            raise InputError(f"two tools of {kind} are called {tool.name!r}, or the name means something else here.")
        if tool.described.context_kwarg or tool.described.resolved_params:
            raise InputError(f"the tool {tool.name!r} of {kind} asks its MCP server for more than its arguments.")
        members[tool.name] = tool.method()
    return type(kind, (), members)


def _reward(kind: str, tasks: Sequence[vf.Task], acts: bool) -> Callable[..., Any]:
    async def reward(
        completions: Sequence[Any], task: Sequence[int], environments: Sequence[Any] | None = None, **_: Any
    ) -> list[Any]:
        """Score every completion; an error stands in the place of its score, and leaves out no other."""
        if acts and environments is None:
            raise InputError(f"the reward of {kind} belongs to its environment; give both.")
        begun = [Played.begin(tasks[place]) for place in task] if environments is None else []
        played = await asyncio.gather(*begun) if begun else [each._played for each in environments or ()]
        scores = [each.score(completion) for each, completion in zip(played, completions, strict=True)]
        return await asyncio.gather(*scores, return_exceptions=True)

    reward.__name__ = kind
    return reward
