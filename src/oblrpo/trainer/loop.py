"""The run: warm start, then step after step of rollout, learning, evaluation and checkpoint.

Every step seeds torch from (seed, step) and draws its prompts from (seed, step). So the random state and the data
position of a resumed run are functions of the step it resumes at, and evaluation cannot disturb training.
"""

from __future__ import annotations

import random
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from transformers import get_scheduler

from oblrpo.algorithms import Algorithm, resolve
from oblrpo.config import OptimConfig, TrainConfig
from oblrpo.errors import InputError
from oblrpo.estimators import BASELINES
from oblrpo.evaluate import heldout_accuracy
from oblrpo.policy import Policy, load_policy, make_policy, warm_start
from oblrpo.rewards import rewards_of
from oblrpo.rollout import sample
from oblrpo.tasks import DataFileTask, Demonstrator, Task, make_task
from oblrpo.trainer import state_files
from oblrpo.trainer.algorithm1 import Learner
from oblrpo.trainer.metrics import completion_rows, step_metrics
from oblrpo.trainer.progress import Progress
from oblrpo.trainer.run_folder import RunFolder

SMALL_MODEL = 5_000_000


class Trainer:
    """One run, new or resumed, described by its config.

    Raises:
        InputError: anything the user can mend, before the output folder is touched where that is possible.
    """

    def __init__(self, config: TrainConfig, resume: bool = False) -> None:
        check(config)
        self.config = config
        self.algorithm = resolve(config.algorithm, config.optim)
        self.task = task_of(config)
        self.heldout = self.task.heldout(config.run.eval_prompts)
        self.folder = RunFolder(Path(config.run.output))
        self.resume = resume
        self.done: int | None = None  # the step the policy has reached; None: not even warm-started
        self.tokens = 0
        torch.manual_seed(config.run.seed)
        checkpoint = self._checkpoint() if resume else None
        self.policy = load_checkpoint(checkpoint, config) if checkpoint else make_policy(config.policy)
        self.policy.encode([problem.prompt for problem in self.heldout], config.rollout.max_completion_length)
        set_threads(config.run.threads, self.policy)
        self.learner = make_learner(self.policy, config, self.algorithm)
        if checkpoint:
            self._restore(state_files.load_state(checkpoint))

    def run(self, progress: Progress) -> None:
        """Train to the configured step, from the latest checkpoint if resuming.

        Raises:
            KeyboardInterrupt: stopped by a signal, after the step in progress and its checkpoint.
        """
        if not self.resume:
            self.folder.create(self.config)
        self.folder.drop_metrics_after(-1 if self.done is None else self.done)
        progress.start(self)
        first = 0 if self.done is None else self.done + 1
        with _stop_between_steps() as stopped:
            for step in range(first, self.config.run.steps + 1):
                self._finish_step(step, self._step(step) if step else self._before(progress), progress)
                if stopped():
                    break
        if stopped():
            self._save()
            raise KeyboardInterrupt(f"stopped after step {self.done}; go on with --resume.")

    def _checkpoint(self) -> Path | None:
        self.folder.require_same(self.config)
        return self.folder.latest_checkpoint()

    def _restore(self, state: dict[str, Any]) -> None:
        self.done, self.tokens = state["step"], state["tokens"]
        self.learner.optimizer.load_state_dict(state["optimizer"])
        self.learner.schedule.load_state_dict(state["schedule"])
        self.learner.scheduler.load_state_dict(state["scheduler"])

    def _warm_start(self, progress: Progress) -> None:
        config = self.config.warm_start
        if not config.warm_start_steps:
            return
        demonstrator = cast(Demonstrator, self.task)

        def demonstrations(step: int) -> tuple[list[str], list[str]]:
            problems = self.task.train_batch(-1 - step, config.warm_start_batch)  # steps that RL never draws
            rng = random.Random(f"demonstrations/{self.config.run.seed}/{step}")
            shown = [demonstrator.demonstration(problem, rng, config.warm_start_noise) for problem in problems]
            return [problem.prompt for problem in problems], shown

        warm_start(
            self.policy, demonstrations, config.warm_start_steps, config.warm_start_learning_rate, progress.warm_start
        )

    def _before(self, progress: Progress) -> dict[str, Any]:
        self._warm_start(progress)
        return {"step": 0} | self._accuracy(0)

    def _step(self, step: int) -> dict[str, Any]:
        started = time.perf_counter()
        config = self.config.rollout
        torch.manual_seed(seed_of(self.config.run.seed, step))
        problems = self.task.train_batch(step, config.prompts_per_step)
        rollouts = sample(
            self.policy,
            [problem.prompt for problem in problems],
            config.num_generations,
            config.max_completion_length,
            config.temperature,
        )
        rewards_PG = rewards_of(self.task, problems, rollouts.completions).to(self.policy.device)
        updates = self.learner.learn(rollouts, rewards_PG)
        self.tokens += rollouts.sequences.tokens
        self.folder.write_completions(step, completion_rows(problems, rollouts, rewards_PG, updates[0].estimate))
        metrics = step_metrics(step, rollouts, rewards_PG, updates, self.tokens)
        if step == self.config.run.steps or (self.config.run.eval_steps and step % self.config.run.eval_steps == 0):
            metrics |= self._accuracy(step)
        return metrics | {"step_time": time.perf_counter() - started}

    def _accuracy(self, step: int) -> dict[str, float]:
        run = self.config.run
        seed = seed_of(run.seed, step) ^ 1
        accuracy = heldout_accuracy(self.policy, self.task, self.heldout, run.eval_samples, self.config.rollout, seed)
        return {"eval/accuracy": accuracy.value, "eval/accuracy_stderr": accuracy.stderr}

    def _finish_step(self, step: int, metrics: dict[str, Any], progress: Progress) -> None:
        self.folder.write_metrics(metrics)
        self.done = step
        run = self.config.run
        if step == run.steps or step == 0 or (run.save_steps and step % run.save_steps == 0):
            self._save()
        progress.step(step, metrics)

    def _save(self) -> None:
        assert self.done is not None
        state = {
            "step": self.done,
            "tokens": self.tokens,
            "optimizer": self.learner.optimizer.state_dict(),
            "schedule": self.learner.schedule.state_dict(),
            "scheduler": self.learner.scheduler.state_dict(),
        }
        self.folder.save_checkpoint(self.done, self.policy, state, self.config.run.save_total_limit)


def check(config: TrainConfig) -> None:
    """Refuse settings that cannot work, before anything is built.

    Raises:
        InputError: names the setting.
    """
    algorithm = resolve(config.algorithm, config.optim)
    G, smallest = config.rollout.num_generations, BASELINES[algorithm.baseline].smallest_group
    if smallest > G:
        raise InputError(
            f"the baseline {algorithm.baseline!r} leaves one output out, so num_generations must be at least "
            f"{smallest}, not {G}."
        )
    least = {
        "prompts_per_step": (config.rollout.prompts_per_step, 2),
        "num_generations": (G, 2 if algorithm.normalisation == "group_std" else 1),
        "max_completion_length": (config.rollout.max_completion_length, 1),
        "prompts_per_micro_batch": (config.rollout.prompts_per_micro_batch, 0),
        "num_iterations": (config.algorithm.num_iterations, 1),
        "steps": (config.run.steps, 0),
        "eval_prompts": (config.run.eval_prompts, 2),
        "eval_samples": (config.run.eval_samples, 1),
        "save_total_limit": (config.run.save_total_limit, 1),
        "warm_start_steps": (config.warm_start.warm_start_steps, 0),
        "warm_start_batch": (config.warm_start.warm_start_batch, 1),
    }
    for key, (value, minimum) in least.items():
        if value < minimum:
            raise InputError(f"{key} is {value}; it must be at least {minimum}.")
    if not config.rollout.temperature > 0:
        raise InputError(f"temperature is {config.rollout.temperature}; it must be above 0 (greedy has no gradient).")
    if config.warm_start.warm_start_steps and config.task.data:
        raise InputError("warm_start_steps needs a built-in task, which can demonstrate; a data file cannot.")


def task_of(config: TrainConfig) -> Task:
    """The built-in task or the user's data file."""
    task = config.task
    if not task.data:
        return make_task(task.task, seed=config.run.seed, **task.task_args)
    return DataFileTask(
        task.data,
        prompt_column=task.prompt_column,
        answer_column=task.answer_column,
        reward=task.reward,
        prompt_template=task.prompt_template,
        seed=config.run.seed,
    )


def load_checkpoint(checkpoint: Path, config: TrainConfig) -> Policy:
    """The policy of a checkpoint.

    Raises:
        InputError: a file is missing or damaged.
    """
    try:
        return load_policy(str(checkpoint), config.policy)
    except InputError as error:
        raise InputError(f"{error} Remove that folder to resume from the checkpoint before it.") from None


def make_learner(policy: Policy, config: TrainConfig, algorithm: Algorithm) -> Learner:
    """Optimizer, scheduler and learner for a policy.

    Raises:
        InputError: the optimizer or the schedule refuses its settings, or the model has a layer without a rule.
    """
    optimizer = make_optimizer(config.optim, policy)
    scheduler = get_scheduler(config.optim.lr_scheduler_type, optimizer, 0, config.run.steps)
    try:
        return Learner(policy, algorithm, optimizer, scheduler, config.rollout, config.algorithm, config.optim)
    except (ValueError, TypeError) as error:
        raise InputError(f"these settings cannot be trained with: {error}") from None


def make_optimizer(config: OptimConfig, policy: Policy) -> torch.optim.Optimizer:
    """The named class of torch.optim on the policy's trainable parameters.

    Raises:
        InputError: no such class, or it refuses its arguments.
    """
    kind = getattr(torch.optim, config.optimizer, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise InputError(f"torch.optim has no optimizer {config.optimizer!r}; try AdamW or SGD.")
    try:
        return kind(policy.parameters, lr=config.learning_rate, **config.optimizer_args)  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise InputError(f"{config.optimizer} refuses its settings: {error}.") from None


def set_threads(threads: int, policy: Policy) -> None:
    """Choose torch's CPU threads: threads of a small model spend their time waiting for each other."""
    size = sum(p.numel() for p in policy.model.parameters())
    torch.set_num_threads(threads or (1 if size < SMALL_MODEL else torch.get_num_threads()))


def seed_of(seed: int, step: int) -> int:
    """A seed of its own for every step of every run."""
    return zlib.crc32(f"{seed}/{step}".encode()) << 1


@contextmanager
def _stop_between_steps() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C or SIGTERM end the run after the step in progress; a second one ends it at once."""
    caught: list[int] = []

    def note(number: int, frame: object) -> None:
        caught.append(number)
        for each in before:
            signal.signal(each, before[each])

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            signal.signal(number, note)
    except ValueError:  # not in the main thread: signals go elsewhere
        before = {}
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
