"""Prompts and verifiers: generated tasks, reasoning-gym, benchmarks, the user's own data."""

import inspect
from collections.abc import Callable

from oblrpo.errors import InputError, did_you_mean
from oblrpo.tasks.arithmetic import AdditionTask, ArithmeticTask
from oblrpo.tasks.benchmarks import BENCHMARKS
from oblrpo.tasks.countdown import CountdownTask
from oblrpo.tasks.data import DataTask
from oblrpo.tasks.gym import PREFIX, ReasoningGymTask
from oblrpo.tasks.instructions import InstructionsTask
from oblrpo.tasks.path import PathTask
from oblrpo.tasks.task import Demonstrator, GeneratedTask, Problem, Task, Verifier

TASK_CLASSES = (AdditionTask, ArithmeticTask, CountdownTask, InstructionsTask, PathTask)
TASKS: dict[str, Callable[..., Demonstrator]] = {task.name: task for task in TASK_CLASSES}


def make_task(name: str, seed: int = 0, /, **parameters: object) -> Demonstrator:
    """Return the built-in task of that name; after `reasoning_gym/` the name is one of reasoning-gym's.

    Examples:
        >>> task = make_task("addition", 0, max_terms=3)
        >>> [problem] = task.train_batch(step=1, size=1)
        >>> problem.prompt, task.rewards([problem], ["1+1=2,2+6=8"])
        ('1+1+6=', [1.0])
    """
    if name.startswith(PREFIX):
        return ReasoningGymTask(name.removeprefix(PREFIX), seed, **parameters)  # type: ignore[arg-type]
    if name not in TASKS:
        raise InputError(
            f"Unknown task '{name}'; the tasks are: {', '.join(TASKS)} and {PREFIX}NAME.{did_you_mean(name, TASKS)}"
        )
    names = [parameter for parameter in inspect.signature(TASKS[name]).parameters if parameter != "seed"]
    for parameter in parameters:
        if parameter not in names:
            raise InputError(
                f"Task '{name}' has no parameter '{parameter}'; it has: {', '.join(names)}."
                f"{did_you_mean(parameter, names)}"
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
