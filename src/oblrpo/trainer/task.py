"""The problems of a run, made from its config, and taken step by step; digests of all that it learns from."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from oblrpo.checksums import sum_of, sum_of_texts
from oblrpo.environments import Environments
from oblrpo.errors import InputError
from oblrpo.objects import PREFIX, Objects, as_stable_json, plain_name
from oblrpo.policy import Policy
from oblrpo.rewards import Rewards, of_rows
from oblrpo.runs import RunFolder
from oblrpo.settings import TaskConfig, TrainConfig
from oblrpo.step import Learner, Samples, StepResult
from oblrpo.tasks import BENCHMARKS, DataTask, Problem, Task, make_task
from oblrpo.tasks.benchmarks import load_benchmark
from oblrpo.tasks.data import PLACEHOLDER, problems_of
from oblrpo.tasks.rows import native, value_at
from oblrpo.tasks.sources import Rows, is_hub_name, keep_rows, read_source
from oblrpo.trainer.demonstrations import Demonstration


def task_of(config: TrainConfig, objects: Objects | None = None) -> Task:
    """Return the named task, the benchmark, or the user's data, which may be rows among `objects`."""
    task, seed, objects = config.task, config.run.seed, objects or Objects()
    objects.check(data=(*task.data, *task.eval_data), rewards=task.rewards)
    if task.task in BENCHMARKS:
        return _benchmark(task, seed)
    if task.data:
        heldout = _problems(read_source(task.eval_data, "test", objects.rows), task) if task.eval_data else None
        problems = data_problems(task, objects)
        about = about_rows(task.data, problems, task.eval_data, heldout)
        return DataTask(name_of(task.data), problems, heldout, task.heldout_fraction, seed, about=about)
    for name in ("eval_data", "where", "prompt_template"):
        if getattr(task, name):
            raise InputError(f"{name} needs data; the task {task.task!r} generates its problems.")
    return make_task(task.task, seed, **task.task_args)


def rows_to_keep(task: TaskConfig, problems: Sequence[Problem]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return held-out problems of `data` as its rows, and notes on columns that JSON cannot hold and are left out.

    Arrays and tuples become lists. A benchmark has its problems from the hub, and a task of its own makes them again.
    """
    rows, lost = list[dict[str, Any]](), dict[str, str]()
    for problem in problems if task.data and task.task not in BENCHMARKS else ():
        columns = dict(problem.columns)
        asked = {task.prompt_column: problem.question or problem.prompt, task.answer_column: problem.answer}
        columns |= {name: value for name, value in asked.items() if value and value_at(columns, name) is None}
        if task.answer_column == "answer" and columns.get("answer") is None:  # the row has none
            columns.pop("answer", None)
        rows.append({name: native(value) for name, value in columns.items()})
        lost |= {name: type(value).__name__ for name, value in rows[-1].items() if not _fits_json(value)}
    kinds = ", ".join(f"{name!r} ({kind})" for name, kind in lost.items())
    note = (
        f"heldout_rows.jsonl cannot hold what is in {kinds}: a reward that reads it cannot evaluate this run once it "
        "is loaded again. Text, numbers, lists and dicts are kept."
    )
    return [{name: value for name, value in row.items() if name not in lost} for row in rows], [note] * bool(lost)


def _fits_json(value: Any) -> bool:
    """Whether a value that is written as JSON comes back as it was."""
    try:
        text = json.dumps(value, ensure_ascii=False)
        return repr(json.loads(text.encode())) == repr(value)  # repr, for NaN, and 1 is not True
    except (TypeError, ValueError, RecursionError):
        return False


def with_kept_rows(config: TrainConfig, objects: Objects) -> TrainConfig:
    """Return a run's settings with the held-out rows that it has kept as all of its data, unless `objects` has these.

    So its files may have moved or changed, and its rows may have been objects of a program that has ended.
    """
    kept = RunFolder(Path(config.run.output)).heldout_rows
    if not kept.is_file() or {*config.task.data, *config.task.eval_data} & objects.rows.keys():
        return config
    return replace(config, task=replace(config.task, data=(str(kept),), eval_data=(str(kept),), where={}))


def drop_long_prompts(task: Task, policy: Policy, most: int) -> None:
    """Leave out a data set's problems whose prompts have more than `most` tokens; 0 leaves out none."""
    if not most:
        return
    if not isinstance(task, DataTask):
        raise InputError(f"max_prompt_length needs data; the task {task.name!r} generates its problems.")
    long = {row for row, length in policy.long(*task.prompts, most).items() if length > most}
    task.drop(f"longer than {most} tokens (max_prompt_length)", long)


def _benchmark(task: TaskConfig, seed: int) -> Task:
    train = BENCHMARKS[task.task].train
    if not task.data and not train:
        raise InputError(f"{task.task} has no training split on the hub; give the problems to train on with data.")
    if task.task_args:
        raise InputError(f"task_args is {task.task_args}, but {task.task} takes none; choose rows with where.")
    template = task.prompt_template
    problems = load_benchmark(task.task, task.data, "train" if task.data else train, task.where, template)
    heldout = None
    if task.eval_data or not task.data:
        heldout = load_benchmark(task.task, task.eval_data, "test", template=template)
    rows = about_rows(task.data or (task.task,), problems, task.eval_data or (task.task,), heldout)
    about = f"{BENCHMARKS[task.task].about} {rows}"
    return DataTask(task.task, problems, heldout, task.heldout_fraction, seed, ("math",), about)


def data_problems(task: TaskConfig, objects: Objects, split: str = "train") -> Sequence[Problem]:
    """Return the problems of `data`, in the order of its rows; `split` is that of a data set whose name says none."""
    return _problems(keep_rows(read_source(task.data, split, objects.rows), task.where), task)


def about_rows(
    data: Sequence[str], problems: Sequence[Problem], eval_data: Sequence[str], heldout: Sequence[Problem] | None
) -> str:
    """Say which rows a run learns from, and which are held out where these are others; `None`: they are not."""
    parts = [(data, problems), *([] if heldout is None else [(eval_data, heldout)])]
    rows = [
        ("" if names[0].startswith(PREFIX) else f"{len(found):,} rows of ") + ", ".join(map(plain_name, names))
        for names, found in parts
    ]
    return "; held out: ".join(rows) + "."


def name_of(data: Sequence[str]) -> str:
    """Return what messages and files call these data; rows of a Python program have no name."""
    return "data" if data[0].startswith(PREFIX) else Path(data[0]).stem


def _problems(rows: Rows, task: TaskConfig) -> Sequence[Problem]:
    template = task.prompt_template or PLACEHOLDER
    # A reward of the user's may do with any answer, or without one; what it needs it says itself.
    compared, faults = of_rows(task.rewards or ["numeric"])
    return problems_of(rows, task.prompt_column, task.answer_column, template, faults, compared)


def sources_of(
    config: TrainConfig,
    task: Task,
    rows: Sequence[Demonstration],
    rewards: Rewards,
    environments: Environments | None = None,
) -> dict[str, str]:
    """Return the SHA-256 of all data, rewards, baselines, tasks and environments that settings name, by both names.

    By them a change is noticed before the run resumes. Of a file it is that of its bytes, of a data set of the hub that
    of the problems and rows made of it, of all others that of the file it is written in. Rows of a
    Python program have theirs in the settings, in their word.
    """
    parts: dict[str, Sequence[Any]] = {"sft_data": rows}
    names = {"data": config.task.data, "eval_data": config.task.eval_data, "sft_data": config.warm_start.sft_data}
    if isinstance(task, DataTask):
        own_test = config.task.eval_data or (config.task.task in BENCHMARKS and not config.task.data)
        parts |= {"data": task.given, "eval_data": task.own}
        if config.task.task in BENCHMARKS:  # what is not named is the benchmark's own, from the hub
            names |= {name: names[name] or (config.task.task,) for name in ("data", "eval_data") if own_test}
    digests: dict[str, str] = {}
    files: dict[str, str] = {}
    for setting, given in names.items():
        for name in given:
            if name.startswith(PREFIX):
                continue
            if name in BENCHMARKS or (len(given) == 1 and is_hub_name(name)):
                rows_as_text = (json.dumps(as_stable_json(vars(row)), sort_keys=True) for row in parts[setting])
                digests[f"{setting} {name}"] = sum_of_texts(rows_as_text)
            else:
                digests[f"{setting} {name}"] = files[name] = files.get(name) or sum_of(Path(name))
    for setting, name in (("baseline", config.algorithm.baseline), ("task", config.task.task)):
        if ":" in name:  # of the user's own
            digests[f"{setting} {name}"] = sum_of(Path(name.rpartition(":")[0]))
    if environments:
        named = {name: digest for name, (digest, _) in environments.digests_and_gaps.items() if digest}
        digests |= {f"environment {name}": digest for name, digest in named.items()}
    return digests | rewards.digests()


class Prompts:
    """Takes the prompts of every step from the task, which decides by the number of the step.

    With `dynamic_sampling` (DAPO's) prompts whose outputs have earned the same are dropped, and others sampled for
    them. Batches are taken from the task one after the other until prompts_per_step prompts have outputs that differ,
    or so many rounds are over; what is missing then is filled up with prompts that were dropped, which give no
    gradient. The prompts that are trained on depend on what their outputs earned: the objective is another one.
    """

    def __init__(self, task: Task, config: TrainConfig) -> None:
        self.task, self.size, self.most = task, config.rollout.prompts_per_step, config.rollout.dynamic_sampling
        self.batches = 0
        """How many batches of the task dynamic sampling has used so far."""

    def step(self, learner: Learner, number: int) -> tuple[list[Problem], StepResult]:
        """Let the learner make a step; return it with the problems that it learned from."""
        if not self.most:
            problems = self.task.train_batch(number, self.size)
            return problems, learner.step(problems, number)
        problems, rounds = list[Problem](), list[Samples]()
        differ = torch.zeros(0, dtype=torch.bool)
        while len(rounds) < self.most and int(differ.sum()) < self.size:
            self.batches += 1
            more = self.task.train_batch(self.batches, self.size)
            rounds.append(learner.sample(more))
            problems += more
            rewards_PG, valid_PG = rounds[-1].rewards_PG, rounds[-1].valid_PG
            most_P, least_P = (
                rewards_PG.where(valid_PG, -torch.inf).amax(1),
                rewards_PG.where(valid_PG, torch.inf).amin(1),
            )
            differ = torch.cat([differ, (most_P > least_P).cpu()])
        chosen_P = torch.argsort(differ, descending=True, stable=True)[: self.size]
        sampled = Samples.join(rounds)
        done = learner.learn_from(sampled.at(chosen_P), number)
        return [problems[index] for index in chosen_P.tolist()], replace(done, all_samples=sampled, rounds=len(rounds))

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next draw depends on, beside the number of the step."""
        return {"batches": self.batches} if self.most else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.batches = int(state["batches"]) if self.most else 0
