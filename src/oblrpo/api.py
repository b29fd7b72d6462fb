"""Train and evaluate from Python: the settings are those of the command line, by the same names."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from oblrpo.commands import (
    check_evaluation,
    check_kept,
    check_settings,
    evaluate_rows,
    run_training,
    summary_of,
)
from oblrpo.errors import InputError, check_current_folder, check_folder
from oblrpo.objects import Objects, split_objects
from oblrpo.runs import HELD_OUT, RunFolder, checkpoint_of, run_of
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

if TYPE_CHECKING:
    import pandas
    from matplotlib.axes import Axes
    from typing_extensions import Unpack

    from oblrpo.diagnosis import Diagnosis
    from oblrpo.policy import Policy
    from oblrpo.report.record import RunRecord
    from oblrpo.settings.keywords import EvaluateKeywords, TrainKeywords


class Run:
    """A run in its folder, finished or not: what `oblrpo.train` returns, and `oblrpo.load` at any later time.

    `print(run)` shows its figures, and what the policy said to the same prompts before and after; a notebook shows its
    curve, too. All of it is read from the folder when it is asked for, and the policy alone needs torch.
    """

    def __init__(self, output: Path, policy: Policy | None = None, objects: Objects | None = None) -> None:
        self.output = output
        """Folder of everything that the run left behind."""
        self._policy, self._objects = policy, objects or Objects()

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """One dict a step, as `metrics.jsonl` has them; step 0 holds the held-out accuracy before training alone."""
        return RunFolder(self.output).read_metrics()

    def to_pandas(self) -> pandas.DataFrame:
        """Return the metrics as a table of pandas, a row a step; its index is the step.

        Raises:
            InputError: pandas is not installed.
        """
        if find_spec("pandas") is None:
            raise InputError("a table needs pandas; install it with: pip install pandas, or take run.metrics, a list.")
        import pandas

        return pandas.DataFrame(self.metrics or {"step": []}).set_index("step")

    def plot(self, *metrics: str, ax: Axes | None = None) -> Axes:
        """Draw metrics over the steps, on new axes or on `ax`, and return the axes of matplotlib.

        Without names it is reward and held-out accuracy. What is noisy is drawn as on the run's page: a moving average,
        the steps as dots. A band is a 95 % interval, where a metric has one. On `ax`, lines are named after their run:
        `second.plot("reward", ax=first.plot("reward"))`.

        Raises:
            InputError: the run has no figures of such a metric.
        """
        from oblrpo.report.notebook import plot

        return plot(self._record(), metrics, ax)

    def samples(self, step: int | None = None, held_out: bool = False) -> list[dict[str, Any]]:
        """Return the completions of a step, by default the newest, a dict each: prompt, completion, reward, and so on.

        They are those that the step learned from, with baseline and advantage; with `held_out` those of held-out
        prompts, which are the same prompts in every step that measured the held-out accuracy.

        Raises:
            InputError: there are none, or none of that step.
        """
        folder, of = RunFolder(self.output), HELD_OUT if held_out else ""
        steps = folder.completion_steps(of)
        if step in {None, *steps} and steps:
            return folder.read_completions(steps[-1] if step is None else step, of)
        what = "completions of held-out prompts" if held_out else "completions"
        newest = f"; the newest are of step {steps[-1]}" if steps else ""
        raise InputError(f"{self.output} has no {what}{'' if step is None else f' of step {step}'}{newest}.")

    @property
    def policy(self) -> Policy:
        """The policy, with its `model` and `tokenizer`: as training left it, or that of the newest checkpoint."""
        if self._policy is None:
            from oblrpo.policy import load_policy

            name = checkpoint_of(str(self.output))
            config = as_in_run(RunFolder(self.output).saved_config())[0].policy(name)
            with _left_as_it_was(config.device):
                self._policy = load_policy(name, config, train=False)
        return self._policy

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
        settings. A loaded run has kept its held-out rows, but no reward function: give that again. Its newest
        checkpoint is then loaded for each call, unless `policy` has been asked for.
        """
        policy, own = self._policy, self._objects
        if policy is None:
            return evaluate(
                self.output, data, reward, reward_weights=reward_weights, k=k, progress=progress, **settings
            )
        words, objects = split_objects(
            policy.model, policy.tokenizer, data, **_rewards(reward, reward_weights, settings)
        )
        objects = replace(objects, rows={**own.rows, **objects.rows}, functions={**own.functions, **objects.functions})
        return _evaluate(words, settings, objects, RunFolder(self.output).saved_config(), k, progress)

    def export(
        self, output: str | os.PathLike[str] | None = None, *, step: int | None = None, merge: bool = False
    ) -> Path:
        """Write the model and its card into a folder to share, and return that, as `oblrpo export` does.

        `output`, by default `export` in the run's own folder, must not be there yet. `step` is that of the checkpoint,
        by default of the newest, and `merge` adds adapters to the weights of their model.
        """
        from oblrpo.report.export import export

        return export(self.output, None if output is None else Path(output), step, merge)

    def diagnose(self) -> Diagnosis:
        """Return what is wrong with the run, as `oblrpo.diagnose` does; `print` shows it in words."""
        from oblrpo.diagnosis import diagnose

        return diagnose(self)

    @property
    def report(self) -> Path:
        """File of the run's page, HTML; it is written anew where the run has gone on since."""
        from oblrpo.report.page import write_report

        page, written = self.output / "report.html", RunFolder(self.output).metrics_file
        is_new = page.is_file() and written.is_file() and page.stat().st_mtime_ns > written.stat().st_mtime_ns
        return page if is_new else write_report(self.output)

    def _record(self) -> RunRecord:
        from oblrpo.report.record import read_run

        if record := read_run(self.output):
            return record
        raise InputError(f"{self.output} has not finished a step yet; try again later, or see its failure.txt.")

    def __repr__(self) -> str:
        from oblrpo.report.notebook import as_text

        return as_text(self.output)

    def _repr_html_(self) -> str:
        from oblrpo.report.notebook import as_html

        return as_html(self.output)


def load(run: str | os.PathLike[str]) -> Run:
    """Return the run in a folder, as `oblrpo.train` has returned it: finished, stopped, failed or still training.

    What it learned from is not loaded: rows and reward functions of a Python program stay with that program. The run
    has kept its held-out rows: `load("runs/mine").evaluate(reward=f)`.

    Args:
        run: the folder of a run of `oblrpo train` or `oblrpo.train`, its `output`.

    Raises:
        InputError: the folder holds no such run.

    Examples:
        >>> rows = [{"prompt": f"Word {number}: "} for number in range(100)]
        >>> def vowels(completions, **columns):
        ...     return [float("a" in text) for text in completions]
        >>> small = {"prompts_per_step": 8, "max_completion_length": 4, "eval_prompts": 4, "progress": False}
        >>> _ = train(data=rows, reward=vowels, steps=1, output="runs/loaded", **small)
        >>> run = load("runs/loaded")
        >>> len(run.metrics), len(run.samples()), run.evaluate(reward=vowels, progress=False)["problems"]
        (2, 32, 4)
    """
    if not isinstance(run, (str, os.PathLike)):
        raise InputError(f"run is a {type(run).__name__}; give the folder of a run, such as 'runs/mine'.")
    path = Path(os.path.abspath(run))
    check_folder(path)
    folder = RunFolder(path)
    if not folder.config_file.is_file():
        raise InputError(f"{path} holds no run of oblrpo train (no config.yaml){_instead(path)}.")
    folder.saved_config()
    return Run(path)


def _instead(path: Path) -> str:
    """What to do with a folder that holds no run, as the end of a sentence."""
    for above in (path.parent.parent, path.parent):
        if (above / "config.yaml").is_file():
            return f"; it is a part of the run {above}, which is to be loaded"
    if any(path.glob("config.json")) or any(path.glob("adapter_config.json")):
        return "; it holds a model, which oblrpo.evaluate takes"
    if any(path.glob("trainer_state.json")) or any(path.glob("*/trainer_state.json")):
        return "; oblrpo.diagnose and `oblrpo report` read what TRL has left there"
    runs = [each.parent.name for each in sorted(path.glob("*/config.yaml"))]
    return f"; it has runs in it: {', '.join(runs[:5])}{', ...' * (len(runs) > 5)}" if runs else ""


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
    environment: Any = None,
    tools: Any = None,
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
        environment: a class whose public methods are tools, with `reset(**row)` and perhaps `get_reward()`, as TRL's
            `environment_factory`; or its name, as on the command line. A class lives in this process, in threads.
        tools: functions that the policy may call, or names of some.
        resume: continue the run in `output` from its latest checkpoint; give the same objects again.
        accept_changed: with `resume`: continue although data or rewards have changed since the run started.
        progress: show a bar and figures; False: say nothing.
        settings: every setting of `oblrpo train`, by the same name: `steps=100, output="runs/mine"`. Numbers that are
            not set give way to the data; the first lines of the run say so.

    Returns:
        The finished run, which `oblrpo.load` returns later.

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
    acting = {"environment": environment, "tools": tools}
    words, objects = split_objects(model, tokenizer, data, eval_data, sft_data=sft_data, **rewards, **acting)
    given = words | _plain(settings)
    objects.refuse_no_effect(given)
    if accept_changed and not resume:
        raise InputError("accept_changed has no effect without resume; remove it.")
    base = load_recipe(recipe, TrainConfig()) if recipe else TrainConfig()
    start = RunFolder(Path(str(given.get("output", base.run.output)))).saved_config() if resume else base
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
        run_training(trainer, Progress(console))
    console.print(summary_of(trainer, console.width), highlight=False)
    return Run(trainer.folder.path, trainer.policy, trainer.objects)


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
        reward: a function as of `oblrpo.train`, a name, or a list of both; None for the run's, or else `numeric`. A
            function of Python that a run learned from is not kept: give it again.
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
    if isinstance(model, Run):
        return model.evaluate(data, reward, reward_weights=reward_weights, k=k, progress=progress, **settings)
    words, objects = split_objects(model, tokenizer, data, **_rewards(reward, reward_weights, settings))
    if "model" not in words:
        raise InputError("there is no model to evaluate; give a folder, a hub name, or a loaded model.")
    words["model"] = checkpoint_of(words["model"])
    run = run_of(words["model"])
    if run:
        check_kept(run, words.get("data", ()), words.get("rewards", run.task.rewards), objects)
    return _evaluate(words, settings, objects, run, k, progress)


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
