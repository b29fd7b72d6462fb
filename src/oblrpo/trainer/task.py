"""The problems of a run, made from its config."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oblrpo.errors import InputError
from oblrpo.objects import PREFIX, Objects
from oblrpo.policy import Policy
from oblrpo.rewards import NEED_ANSWER, split_weight
from oblrpo.settings import TaskConfig, TrainConfig
from oblrpo.tasks import BENCHMARKS, DataTask, Problem, Task, make_task
from oblrpo.tasks.benchmarks import load_benchmark
from oblrpo.tasks.data import PLACEHOLDER, problems_of
from oblrpo.tasks.sources import Stream, keep_rows, read_source


def task_of(config: TrainConfig, objects: Objects | None = None) -> Task:
    """Return the built-in task, the benchmark, or the user's data, which may be rows among `objects`."""
    task, seed, objects = config.task, config.run.seed, objects or Objects()
    objects.check(data=(*task.data, *task.eval_data), rewards=task.rewards)
    if not all(isinstance(key, str) for key in task.task_args):
        raise InputError(f"task_args is {task.task_args}; its keys must be names.")
    if task.task in BENCHMARKS:
        return _benchmark(task, seed)
    if task.data:
        heldout = _problems(read_source(task.eval_data, "test", objects.rows), task) if task.eval_data else None
        return DataTask(name_of(task.data), data_problems(task, objects), heldout, task.heldout_fraction, seed)
    for name in ("eval_data", "where", "prompt_template"):
        if getattr(task, name):
            raise InputError(f"{name} needs data; the task {task.task!r} generates its problems.")
    return make_task(task.task, seed, **task.task_args)


def drop_long_prompts(task: Task, policy: Policy, most: int) -> None:
    """Leave out a data set's problems whose prompts have more than `most` tokens; 0 leaves out none."""
    if not most:
        return
    if not isinstance(task, DataTask):
        raise InputError(f"max_prompt_length needs data; the task {task.name!r} generates its problems.")
    rows = [*task.given, *task.own]
    lengths = policy.lengths([problem.prompt for problem in rows], room=None)
    long = {id(problem) for problem, length in zip(rows, lengths, strict=True) if length > most}
    task.drop(f"longer than {most} tokens (max_prompt_length)", lambda problem: id(problem) in long)


def _benchmark(task: TaskConfig, seed: int) -> Task:
    train = BENCHMARKS[task.task].train
    if not task.data and not train:
        raise InputError(f"{task.task} has no training split on the hub; give the problems to train on with data.")
    if task.task_args:
        raise InputError(f"task_args is {task.task_args}, but {task.task} takes none; choose rows by where.")
    template = task.prompt_template
    problems = load_benchmark(task.task, task.data, "train" if task.data else train, task.where, template)
    heldout = None
    if task.eval_data or not task.data:
        heldout = load_benchmark(task.task, task.eval_data, "test", template=template)
    return DataTask(task.task, problems, heldout, task.heldout_fraction, seed, ("math",))


def data_problems(task: TaskConfig, objects: Objects, split: str = "train") -> list[Problem]:
    """Return the problems of `data`, in the order of its rows; `split` is that of a data set whose name says none."""
    return _problems(keep_rows(read_source(task.data, split, objects.rows), task.where), task)


def name_of(data: Sequence[str]) -> str:
    """Return what messages and files call these data; rows of a Python program have no name."""
    return "data" if data[0].startswith(PREFIX) else Path(data[0]).stem


def _problems(rows: Stream, task: TaskConfig) -> list[Problem]:
    rewards = {split_weight(name)[0] for name in task.rewards} or {"numeric"}
    template = task.prompt_template or PLACEHOLDER
    # A reward of the user's may do with any answer, or without one; what it needs it says itself.
    compared = bool(rewards & NEED_ANSWER)
    return problems_of(rows, task.prompt_column, task.answer_column, template, "numeric" in rewards, compared)
