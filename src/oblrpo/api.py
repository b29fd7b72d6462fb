"""Train and evaluate from Python: the settings are those of the command line, by the same names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.text import Text

from oblrpo.commands import check_evaluation, check_settings, evaluate_rows, run_training, saved_settings, summary_of
from oblrpo.errors import InputError, check_current_folder
from oblrpo.objects import Objects, split_objects
from oblrpo.runs import checkpoint_of, run_of
from oblrpo.settings import (
    RewardsConfig,
    SamplingConfig,
    TrainConfig,
    as_in_run,
    check_sampling,
    hint,
    load_recipe,
    with_fields,
    with_settings,
)
from oblrpo.settings.typed import settings_of
from oblrpo.streams import PLAIN

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from oblrpo.settings.keywords import EvaluateKeywords, TrainKeywords
    from oblrpo.trainer.loop import Trainer


class Run:
    """A run that `oblrpo.train` has finished: its metrics, its policy, its page, and what it left on the disk.

    Example: `pandas.DataFrame(run.metrics).plot(x="step", y=["reward", "n_snr"])`.
    """

    def __init__(self, trainer: Trainer, report: Path) -> None:
        self._trainer = trainer
        self.output = trainer.folder.path
        """Folder of everything that the run left behind."""
        self.report = report
        """File of the run's page, HTML."""
        self.policy = trainer.policy
        """The trained policy, with its `model` and `tokenizer`."""

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict a step; step 0 holds the held-out accuracy before training alone."""
        return self._trainer.folder.read_metrics()

    def evaluate(
        self,
        data: Any = None,
        reward: Any = None,
        *,
        reward_weights: Sequence[float] | None = None,
        k: int | Sequence[int] = (),
        progress: bool = True,
        **settings: Unpack[EvaluateKeywords],
    ) -> dict[str, Any]:
        """Return the figures of the policy as it is now, as `oblrpo.evaluate` does for a checkpoint of the run.

        Its arguments are those of `oblrpo.evaluate`; what is not given is the run's: its held-out problems, rewards and
        settings.
        """
        policy, own = self.policy, self._trainer.objects
        words, objects = split_objects(
            policy.model, policy.tokenizer, data, **_rewards(reward, reward_weights, settings)
        )
        objects = replace(objects, rows={**own.rows, **objects.rows}, functions={**own.functions, **objects.functions})
        return _evaluate(words, settings, objects, self._trainer.config, k, progress)

    def export(
        self, output: str | os.PathLike[str] | None = None, *, step: int | None = None, merge: bool = False
    ) -> Path:
        """Write the model and its card into a folder to share, and return that, as `oblrpo export` does.

        `output`, by default `export` in the run's own folder, must not be there yet. `step` is that of the checkpoint,
        by default of the newest, and `merge` adds adapters to the weights of their model.
        """
        from oblrpo.report.export import export

        return export(self.output, None if output is None else Path(output), step, merge)

    def __repr__(self) -> str:
        rows = self.metrics
        figures = {
            "reward": [row["reward"] for row in rows if row.get("reward") is not None],
            "held-out accuracy": [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None],
        }
        words = [f"{name} {values[0]:.3f} -> {values[-1]:.3f}" for name, values in figures.items() if values]
        return f"Run({', '.join([f'{str(self.output)!r}', f'{self._trainer.done} steps', *words])})"


def train(
    recipe: str = "",
    *,
    model: Any = None,
    tokenizer: Any = None,
    data: Any = None,
    eval_data: Any = None,
    sft_data: Any = None,
    reward: Any = None,
    reward_weights: Sequence[float] | None = None,
    resume: bool = False,
    accept_changed: bool = False,
    progress: bool = True,
    **settings: Unpack[TrainKeywords],
) -> Run:
    """Train a policy as `oblrpo train` does, with objects of this program where that command takes names.

    A loaded model is trained in place, on its device, without dropout. A reward function runs in this process: nothing
    ends a call that takes too long.

    Args:
        recipe: a built-in recipe or a YAML file of settings, which the others override.
        model: a folder or hub name, or a loaded model of transformers or PEFT; `(model, tokenizer)` is understood too.
        tokenizer: the tokenizer of a loaded model.
        data: rows (a list of dicts, a `datasets.Dataset`, any iterable of dicts), or names of files or of a data set on
            the hub. The column `prompt` holds text or messages; the others reach the reward function by their names.
        eval_data: held-out rows, as `data`; None holds out a share of `data`.
        sft_data: rows, as `data`, to learn from before RL: `prompt`, and `completion`, text or one message of the
            assistant. None: nothing, unless `warm_start_steps` says so.
        reward: `f(prompts, completions, **columns) -> list of numbers` as in TRL, a name as on the command line, or a
            list of both, which are summed.
        reward_weights: a number for each of them, as in TRL; None: 1 each, or what stands behind names (`math@0.5`).
        resume: continue the run in `output` from its latest checkpoint; give the same objects again.
        accept_changed: with `resume`: continue although data or rewards have changed since the run started.
        progress: show a bar and figures; False: say nothing.
        settings: every setting of `oblrpo train`, by the same name: `steps=100, output="runs/mine"`. Numbers that are
            not set give way to the data; the first lines of the run say so.

    Returns:
        The finished run.

    Raises:
        InputError: what the user can fix, in one sentence, as on the command line.
        KeyboardInterrupt: stopped, after the step in progress and its checkpoint; `resume` continues.

    Examples:
        >>> rows = [{"prompt": f"Word {number}: "} for number in range(100)]
        >>> def vowels(completions, **columns):
        ...     return [float("a" in text) for text in completions]
        >>> small = {"prompts_per_step": 8, "max_completion_length": 4, "eval_prompts": 4, "progress": False}
        >>> run = train(data=rows, reward=vowels, steps=1, output="runs/mine", **small)
        >>> [row["step"] for row in run.metrics], run.report.name
        ([0, 1], 'report.html')
    """
    check_current_folder()
    rewards = _rewards(reward, reward_weights, settings)
    words, objects = split_objects(model, tokenizer, data, eval_data, sft_data=sft_data, **rewards)
    given = words | _plain(settings)
    objects.refuse_no_effect(given)
    if accept_changed and not resume:
        raise InputError("accept_changed has no effect without resume; remove it.")
    base = load_recipe(recipe, TrainConfig()) if recipe else TrainConfig()
    start = saved_settings(str(given.get("output", base.run.output))) if resume else base
    config = with_settings(start, given, "oblrpo.train")
    if objects.model is not None:
        # What the settings say of loading does not hold of a model that is loaded.
        dtype = "bfloat16" if "bfloat16" in str(getattr(objects.model, "dtype", "")) else "float32"
        in_4_bits = bool(getattr(objects.model, "is_loaded_in_4bit", False))
        config = with_settings(config, {"dtype": dtype, "load_in_4bit": in_4_bits}, "the model", ())
    check_settings(config, {name: name for name in given}, base)

    from oblrpo.report.console import Progress, console_of_program
    from oblrpo.trainer.loop import Trainer

    console = console_of_program(progress)
    with _left_as_it_was(config.policy.device):
        trainer = Trainer(config, resume, objects, accept_changed)
        for note in objects.notes():
            console.print(note, highlight=False)
        report = run_training(trainer, Progress(console))
    end = summary_of(trainer).encode(console.encoding, PLAIN).decode(console.encoding)
    console.print(Text.from_ansi(end), highlight=False)
    return Run(trainer, report)


def evaluate(
    model: Any,
    data: Any = None,
    reward: Any = None,
    *,
    tokenizer: Any = None,
    reward_weights: Sequence[float] | None = None,
    k: int | Sequence[int] = (),
    progress: bool = True,
    **settings: Unpack[EvaluateKeywords],
) -> dict[str, Any]:
    """Return avg@k and pass@k of a model on rows of data by rewards, with 95 % intervals over problems.

    A checkpoint of a run is evaluated as the run does it, by the run's rewards, on its held-out problems, where nothing
    else is given. A loaded model is in eval mode meanwhile.

    Args:
        model: a folder or hub name, a run (its newest checkpoint is taken) or a checkpoint, or a loaded model;
            `(model, tokenizer)` is understood too.
        data: rows, or names of files or of a data set on the hub; None for the held-out problems of the run.
        reward: a function as of `oblrpo.train`, a name, or a list of both; None for the run's, or else `numeric`.
        tokenizer: the tokenizer of a loaded model.
        reward_weights: a number for each reward, as of `oblrpo.train`.
        k: size or sizes for pass@k; none for 1, 2, 4, ... and all completions of a problem.
        progress: show how far it is.
        settings: as of `oblrpo evaluate`, such as `samples=8`. Files are kept where `output` is given.

    Returns:
        What `oblrpo evaluate --json` prints of one result: `result["avg@k"]["value"]`, `result["avg@k"]["interval"]`,
        `result["pass@k"]["4"]["value"]`, and so on.

    Raises:
        InputError: what the user can fix, in one sentence.

    Examples:
        >>> from oblrpo.policy import make_policy
        >>> from oblrpo.settings import PolicyConfig
        >>> policy, rows = make_policy(PolicyConfig(device="cpu")), [{"prompt": "2 + 2 =", "answer": "4"}]
        >>> few = {"samples": 2, "max_completion_length": 4, "progress": False}
        >>> evaluate(policy.model, rows, "numeric", tokenizer=policy.tokenizer, **few)["avg@k"]["k"]
        2
    """
    words, objects = split_objects(model, tokenizer, data, **_rewards(reward, reward_weights, settings))
    if "model" not in words:
        raise InputError("there is no model to evaluate; give a folder, a hub name, or a loaded model.")
    words["model"] = checkpoint_of(words["model"])
    return _evaluate(words, settings, objects, run_of(words["model"]), k, progress)


def _evaluate(
    words: dict[str, Any],
    settings: Mapping[str, Any],
    objects: Objects,
    run: TrainConfig | None,
    k: int | Sequence[int],
    progress: bool,
) -> dict[str, Any]:
    """Load a policy, or take the one of `objects`, and return its figures."""
    sampling, grading = as_in_run(run) if run else (SamplingConfig(), RewardsConfig())
    given = words | _plain(settings)
    names = {setting.name for part in (sampling, grading) for setting in settings_of(part)}
    for name in settings:
        if name not in names:
            raise InputError(f"oblrpo.evaluate has no setting {name!r}.{hint(name, {*names, 'data', 'model'})}")
    objects.refuse_no_effect(given)
    check_evaluation({name: name for name in given}, words["model"], given.get("data", ()), run)
    sampling = with_fields(sampling, given, "oblrpo.evaluate")
    grading = with_fields(grading, given, "oblrpo.evaluate")
    ks = [k] if isinstance(k, int) else list(k)
    sampling = check_sampling(sampling, ks, given)

    from oblrpo.policy import adopt_policy, load_policy
    from oblrpo.report.console import console_of_program, evaluating

    console, config = console_of_program(progress), sampling.policy(words["model"])
    with _left_as_it_was(config.device, objects.model), TemporaryDirectory() as nowhere:
        if objects.model is not None:
            policy = adopt_policy(objects.model, objects.tokenizer, config, train=False)
        else:
            policy = load_policy(config.model, config, train=False)
        folder, data = Path(given.get("output", nowhere)).absolute(), given.get("data", ())
        with evaluating(console=console) as show:
            return evaluate_rows(policy, data, run, sampling, grading, folder, objects, ks, show)


def _rewards(reward: Any, weights: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return rewards and weights for `split_objects`; `rewards`, the command line's name, stands for `reward`."""
    if reward is not None and "rewards" in settings:
        raise InputError("reward and rewards are the same; give one of them.")
    return {"rewards": settings.get("rewards") if reward is None else reward, "reward_weights": weights}


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings that `split_objects` has not dealt with, paths as text."""
    return {
        name: os.fspath(value) if isinstance(value, os.PathLike) else value
        for name, value in settings.items()
        if name != "rewards"
    }


@contextmanager
def _left_as_it_was(device: str, model: Any = None) -> Iterator[None]:
    """Put back what a run sets of the program: random states, threads, bars, memory, environment; a model's modes."""
    import torch
    from transformers.utils import logging

    from oblrpo.memory import keep_freed
    from oblrpo.rollout.engine import put_back

    with ExitStack() as after, torch.random.fork_rng(range(torch.cuda.device_count()) if device != "cpu" else ()):
        if logging.is_progress_bar_enabled():
            after.callback(logging.enable_progress_bar)
            logging.disable_progress_bar()
        after.callback(torch.set_num_threads, torch.get_num_threads())
        after.callback(keep_freed, False)
        after.callback(put_back)
        for module in [] if model is None else model.modules():
            after.callback(setattr, module, "training", module.training)
        yield


def _signature(function: Callable[..., Any], *parts: Any) -> inspect.Signature:
    """Return a function's signature with every setting of the parts in the place of **settings, for help()."""
    own = inspect.signature(function)
    parameters = {name: p for name, p in own.parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD}
    for name, default, kind, _ in (setting for part in parts for setting in settings_of(part)):
        keyword = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
        parameters.setdefault(name, keyword)
    return own.replace(parameters=list(parameters.values()))


train.__signature__ = _signature(train, TrainConfig())  # type: ignore[attr-defined]
evaluate.__signature__ = _signature(evaluate, SamplingConfig(), RewardsConfig())  # type: ignore[attr-defined]
