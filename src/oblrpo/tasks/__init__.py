"""Prompts and verifiers: generated tasks, published benchmarks, the user's own data."""

import inspect
from collections.abc import Callable

from oblrpo.errors import InputError, did_you_mean
from oblrpo.tasks.addition import AdditionTask
from oblrpo.tasks.benchmarks import BENCHMARKS
from oblrpo.tasks.countdown import CountdownTask
from oblrpo.tasks.data import DataTask
from oblrpo.tasks.generated import GeneratedTask
from oblrpo.tasks.path import PathTask
from oblrpo.tasks.task import Demonstrator, Problem, Task, Verifier

TASKS: dict[str, Callable[..., Demonstrator]] = {task.name: task for task in (AdditionTask, CountdownTask, PathTask)}


def make_task(name: str, seed: int = 0, /, **parameters: object) -> Demonstrator:
    """Return the generated task of that name.

    Raises:
        InputError: no such task, no such parameter of it, or a parameter out of range.
    """
    if name not in TASKS:
        raise InputError(f"Unknown task '{name}'; the tasks are: {', '.join(TASKS)}.{did_you_mean(name, TASKS)}")
    known = [parameter for parameter in inspect.signature(TASKS[name]).parameters if parameter != "seed"]
    for parameter in parameters:
        if parameter not in known:
            raise InputError(
                f"Task '{name}' has no parameter '{parameter}'; it has: {', '.join(known)}."
                f"{did_you_mean(parameter, known)}"
            )
    return TASKS[name](seed, **parameters)


__all__ = [
    "BENCHMARKS",
    "TASKS",
    "DataTask",
    "Demonstrator",
    "GeneratedTask",
    "Problem",
    "Task",
    "Verifier",
    "make_task",
]
