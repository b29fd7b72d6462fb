"""What commands do once their settings are known, called by the command line and by Python alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oblrpo.errors import InputError, nearby
from oblrpo.model_files import base_of, check_is_there
from oblrpo.objects import PREFIX, Objects
from oblrpo.regular_files import regular
from oblrpo.runs import RunFolder
from oblrpo.settings import (
    RewardsConfig,
    SamplingConfig,
    TaskConfig,
    TrainConfig,
    flatten,
    recipe_settings,
    refuse_named,
    refuse_no_effect,
    with_fields,
)

if TYPE_CHECKING:
    from oblrpo.policy import Policy
    from oblrpo.report.console import Progress
    from oblrpo.tasks import Task
    from oblrpo.trainer.loop import Trainer


NO_PROBLEMS = "give data to evaluate on, or a benchmark; only a checkpoint of a run has held-out problems of its own."


def check_settings(config: TrainConfig, given: Mapping[str, str], base: TrainConfig) -> None:
    """Refuse what cannot work, and settings without effect: `given`, as they are written there, or the recipe's."""
    from oblrpo.trainer.check import check

    check(config)
    of_recipe = recipe_settings(base.recipe) if base.recipe else {}
    if "recipe" not in of_recipe:  # the config.yaml of a run names its recipe, and has every setting
        refuse_no_effect({name: f"{base.recipe}: {name}" for name in of_recipe}, base)
    refuse_no_effect(given, config)


def run_training(trainer: Trainer, progress: Progress) -> Path:
    """Run the trainer, write the page of the run, and return its path; a run that fails leaves its page, too."""
    from oblrpo.report.page import write_report

    folder = trainer.folder
    try:
        with progress:
            trainer.run(progress)
    except Exception:
        if trainer.done is not None and folder.failure():  # it had begun; else the folder may be another's
            with suppress(Exception):  # what ended it is reported, not what that did to the page
                write_report(folder.path)
        raise
    return write_report(folder.path)


def summary_of(trainer: Trainer, width: int) -> str:
    """Return what a console of so many columns shows of a run at its end."""
    from oblrpo.diagnosis.next_steps import Left, next_steps
    from oblrpo.report.console import summary
    from oblrpo.report.record import before_and_after

    folder, rows, watch = trainer.folder, trainer.folder.read_metrics(), trainer.monitors.watch
    pairs = before_and_after(folder, [row for row in rows if row.get("eval/accuracy") is not None], most=3)
    do_next = next_steps(watch, Left(rows, flatten(trainer.config), folder))
    best = folder.best_step(trainer.accuracy)
    return summary(rows, trainer.config.run.output, watch.facts, best, pairs, do_next, width)


def check_files(*sources: Sequence[str]) -> None:
    """Refuse files of data that are not there, before libraries and models load, which takes a while."""
    from oblrpo.tasks.rows import unreadable
    from oblrpo.tasks.sources import is_hub_name

    for names in sources:
        of_hub = len(names) == 1 and is_hub_name(names[0])
        for path in [] if of_hub else [Path(name) for name in names if not name.startswith(PREFIX)]:
            try:
                regular(path)
            except (OSError, ValueError) as error:
                raise unreadable(path, error) from error


def check_evaluation(
    given: Mapping[str, str], model: str, data: Sequence[str], run: TrainConfig | None, benchmark: bool = False
) -> None:
    """Refuse a model that is not there, no problems, and settings (`given`, as they are written) without effect."""
    if model and not model.startswith(PREFIX):
        check_is_there(base_of(model) or model)
        if not (data or run or benchmark or Path(model).exists()):
            meant = f" Did you mean 'runs/{model}'?" if Path("runs", model).exists() else nearby(Path(model))
            raise InputError(
                f"{model!r} is no file or folder here; a run is named by its folder, as runs/mine, and a model on the "
                f"hub needs data or a benchmark to be evaluated on.{meant}"
            )
    if not (data or run or benchmark):
        raise InputError(NO_PROBLEMS)
    if run and run.turns.names and not (benchmark or (data and "rewards" in given)):
        raise InputError(
            f"the run acts in {', '.join(run.turns.names)}, and oblrpo evaluate draws single answers: its held-out "
            "accuracy over episodes is eval/accuracy of its metrics. To grade single answers, give data and rewards."
        )
    check_files(data)
    of_rows = ["where", "prompt_column", "answer_column"]
    why: dict[str, list[str]] = {}
    if benchmark:
        why["a benchmark has its own columns and comparison"] = [field.name for field in fields(RewardsConfig)]
    else:
        why["no benchmark is named"] = ["processes", "seconds"]
        if not data:
            why["the problems are the held-out ones of the run"] = of_rows
    refuse_named(given, why)


def check_kept(run: TrainConfig, data: Sequence[str], rewards: Sequence[str], objects: Objects) -> None:
    """Refuse an evaluation by or on objects that are gone, before a policy loads; a run keeps its held-out rows."""
    kept = RunFolder(Path(run.run.output)).heldout_rows.is_file()
    objects.check(data=data or (() if kept else (*run.task.data, *run.task.eval_data)), rewards=rewards)


def evaluate_rows(
    policy: Policy | None,
    data: tuple[str, ...],
    run: TrainConfig | None,
    sampling: SamplingConfig,
    grading: RewardsConfig,
    folder: Path,
    objects: Objects | None = None,
    ks: Sequence[int] = (),
    progress: Callable[[int, int, Sequence[str]], None] = lambda done, total, notes: None,
) -> dict[str, Any]:
    """Return a policy's figures, or else those of the folder, on rows of `data` or the run's held-out problems."""
    from oblrpo.evaluation.sampled import SavedCompletions, evaluate_saved
    from oblrpo.rewards import Rewards
    from oblrpo.rollout import make_sampler
    from oblrpo.tasks import DataTask
    from oblrpo.trainer.task import data_problems, drop_long_prompts, name_of, task_of, with_kept_rows

    objects = objects or Objects()
    task: Task
    if data:
        objects.check(data=data, rewards=grading.rewards)
        saved = SavedCompletions(folder, name_of(data))
        # What was drawn is scored with the prompts it was drawn for.
        template = sampling.prompt_template if policy is not None else str(saved.settings().get("prompt_template", ""))
        rows = with_fields(TaskConfig(), vars(grading) | {"data": data, "prompt_template": template}, "oblrpo.evaluate")
        problems = data_problems(rows, objects, "test")
        task = DataTask(saved.file.stem, [], problems)
    elif run is not None and policy is not None:
        saved = SavedCompletions(folder, "heldout")
        run = replace(run, task=replace(run.task, rewards=grading.rewards, prompt_template=sampling.prompt_template))
        task = task_of(with_kept_rows(run, objects), objects)
        drop_long_prompts(task, policy, run.task.max_prompt_length)
        problems = task.heldout(run.run.eval_prompts)
    else:
        raise InputError(NO_PROBLEMS)
    rewards = Rewards(task, grading.rewards, grading.on_reward_error, grading.reward_seconds, objects.functions)
    try:
        sampler = cache(lambda: make_sampler(policy, sampling, sampling.trust_remote_code))  # type: ignore[arg-type]
        graded, how_drawn = evaluate_saved(
            policy, sampler, problems[: sampling.limit or None], rewards, sampling, saved, ks, progress,
            rewards.needs_ids,
        )  # fmt: skip
    finally:
        rewards.close()
    of_rewards = {"rewards": rewards.names, "threshold": grading.threshold, "masked": graded.masked}
    result = {"data": saved.file.stem} | graded.figures(grading.threshold) | of_rewards | how_drawn
    saved.write_result(result)
    return result
