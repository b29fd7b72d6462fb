"""Prompts and verifiers: generated tasks, reasoning-gym, benchmarks, the user's own data and tasks."""

import inspect
from collections.abc import Callable
from typing import Any

from oblrpo.errors import InputError, did_you_mean
from oblrpo.tasks.arithmetic import ArithmeticTask
from oblrpo.tasks.benchmarks import BENCHMARKS
from oblrpo.tasks.data import DataTask
from oblrpo.tasks.gym import PREFIX, ReasoningGymTask
from oblrpo.tasks.path import PathTask
from oblrpo.tasks.task import Demonstrator, GeneratedTask, Problem, Task, Verifier
from oblrpo.user_code import load_named

TASKS: dict[str, Callable[..., Demonstrator]] = {task.name: task for task in (ArithmeticTask, PathTask)}


def make_task(name: str, seed: int = 0, /, **parameters: object) -> Demonstrator:
    r"""Return the built-in task of that name, reasoning-gym's (`reasoning_gym/NAME`), or one's own (`file.py:Class`).

    Examples:
        >>> task = make_task("arithmetic", 0, shots=1)
        >>> [problem] = task.train_batch(step=1, size=1)
        >>> problem.prompt, task.rewards([problem], ["18"])
        ('13+1=14\n8+10=', [1.0])
    """
    if name.startswith(PREFIX):
        return ReasoningGymTask(name.removeprefix(PREFIX), seed, **parameters)  # type: ignore[arg-type]
    if ":" not in name and name not in TASKS:
        raise InputError(
            f"Unknown task '{name}'; the tasks are: {', '.join(TASKS)}, {PREFIX}NAME, and file.py:Class for your own."
            f"{did_you_mean(name, TASKS)}"
        )
    kind = _own(name) if ":" in name else TASKS[name]
    names = [parameter for parameter in inspect.signature(kind).parameters if parameter != "seed"]
    for parameter in parameters:
        if parameter not in names:
            has = f"it has: {', '.join(names)}" if names else "it has none"
            raise InputError(f"Task '{name}' has no parameter '{parameter}'; {has}.{did_you_mean(parameter, names)}")
    return kind(seed, **parameters)


def _own(path: str) -> Callable[..., Demonstrator]:
    """Return the class at `file.py:Class`, which runs that file."""
    kind: Any = load_named(path, "task", "class")
    if not (inspect.isclass(kind) and issubclass(kind, GeneratedTask)):
        raise InputError(f"task '{path}' is not a class that inherits from oblrpo.tasks.GeneratedTask.")
    if lacks := sorted(kind.__abstractmethods__) + ([] if hasattr(kind, "name") else ["name"]):
        raise InputError(f"task '{path}' lacks what every task has: {', '.join(lacks)}.")
    return kind


__all__ = [
    "BENCHMARKS", "TASKS", "DataTask", "Demonstrator", "GeneratedTask", "Problem", "Task", "Verifier", "make_task",
]  # fmt: skip
