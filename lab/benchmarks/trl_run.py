"""One run beside TRL, in a process of its own; `lab.benchmarks.against_trl` calls it.

    python -m lab.benchmarks.trl_run trl-grpo runs/warm/checkpoints/step_0 runs/trl-grpo [--recipe demo] [--rate 3e-6]

Prompts, rewards, completions a prompt, lengths, temperature and the held-out measurement are those of the recipe, and
its rate is unless another is given. The clock runs from the first step on, over all that a step takes (prompts,
sampling, rewards, gradient, update, what is written), and stands still while held-out accuracy is measured, which the
same code does for all. Ours is `oblrpo train RECIPE` with nothing switched off: score norms, metrics, completions,
checkpoints, the ledger as often as the recipe says. TRL's writes nothing (with `--logs`, its log). Loading the model,
and the page that ours ends with, are outside the clock.

`trl-grpo` is TRL's GRPOTrainer with the loss that ours has under this name (grpo: each completion's mean over its
tokens, rewards scaled by their group's deviation) and no clipping; `trl-rloo` its RLOOTrainer; `trl-default` its
GRPOTrainer with TRL 1.16's own loss (dapo: the mean over all tokens) and its clipping at norm 1. What is not named here
is as TRL has it: no KL term, truncated completions counted, transformers' fused AdamW without weight decay. On a
processor its bfloat16 and its activation checkpointing would only cost time: both are off. Its rate is constant.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from oblrpo.errors import InputError
from oblrpo.evaluation.sampled import heldout_accuracy
from oblrpo.seeds import seed_of
from oblrpo.settings import TrainConfig, load_recipe, with_settings

OURS = ("grpo", "rloo", "oblrpo_thrifty", "oblrpo_shrunk")
TRL = ("trl-grpo", "trl-rloo", "trl-default")
LOSSES: dict[str, dict[str, Any]] = {
    "trl-grpo": {"loss_type": "grpo", "scale_rewards": "group", "max_grad_norm": 0.0},
    "trl-rloo": {"normalize_advantages": False, "max_grad_norm": 0.0},
    "trl-default": {"max_grad_norm": 1.0},
}
"""What TRL's contenders differ in."""


def config_of(arguments: argparse.Namespace) -> TrainConfig:
    """The recipe as this run has it: the model, the seed, the sizes and the rate that were given."""
    given = {
        "model": arguments.model, "warm_start_steps": 0, "seed": arguments.seed, "steps": arguments.steps,
        "eval_steps": arguments.every, "eval_prompts": arguments.eval_prompts, "threads": arguments.threads,
    }  # fmt: skip
    given |= {} if arguments.rate is None else {"learning_rate": arguments.rate}
    given |= {"prompts_per_step": arguments.prompts} if arguments.prompts else {}
    given |= {"num_generations": arguments.generations} if arguments.generations else {}
    return with_settings(load_recipe(arguments.recipe, TrainConfig()), given, arguments.recipe)


class Clock:
    """Wall and CPU seconds of training, written down after each step whose held-out accuracy was measured."""

    def __init__(self, completions: int) -> None:
        self.rows: list[dict[str, float]] = []
        self._completions = completions  # of a step
        self._started, self._away = _now(), [0.0, 0.0]
        self._accuracy: float | None = None

    def aside(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an evaluation so that its time is not counted."""

        def measured(*inputs: Any, **named: Any) -> Any:
            begun = _now()
            accuracy, *further = evaluate(*inputs, **named)
            self._away = [away + now - then for away, now, then in zip(self._away, _now(), begun, strict=True)]
            self._accuracy = accuracy.value
            return accuracy, *further

        return measured

    def after(self, step: int) -> None:
        """A step is done with all that belongs to it; step 0 starts the clock."""
        if not step:
            self._started, self._away = _now(), [0.0, 0.0]
        if self._accuracy is not None:
            spent = [now - then - away for now, then, away in zip(_now(), self._started, self._away, strict=True)]
            row = {"step": step, "samples": step * self._completions, "seconds": spent[0], "cpu_seconds": spent[1]}
            self.rows.append(row | {"accuracy": self._accuracy, "peak_mb": peak_mb()})
            self._accuracy = None


def _now() -> list[float]:
    return [time.perf_counter(), time.process_time()]


def peak_mb() -> float | None:
    """The most memory that this process has held, in MB; None where the system does not say."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.is_file() else []
    return next((int(line.split()[1]) / 1e3 for line in lines if line.startswith("VmHWM")), None)


@contextmanager
def watched_by(clock: Clock) -> Iterator[None]:
    """Let the clock read every run of ours meanwhile."""
    from oblrpo.report import console
    from oblrpo.trainer import loop

    shown = console.Progress.step

    def step(self: console.Progress, number: int, metrics: dict[str, Any]) -> None:
        shown(self, number, metrics)
        clock.after(number)

    loop.heldout_accuracy, console.Progress.step = clock.aside(heldout_accuracy), step  # type: ignore[method-assign]
    try:
        yield
    finally:
        loop.heldout_accuracy, console.Progress.step = heldout_accuracy, shown  # type: ignore[method-assign]


def run_ours(arguments: argparse.Namespace, config: TrainConfig, clock: Clock) -> None:
    """The command line's own run, with a clock at its evaluations and at the end of its steps."""
    from oblrpo.cli import dispatch

    flags = {
        "model": config.policy.model, "warm-start-steps": 0, "algorithm": arguments.contender, "seed": config.run.seed,
        "steps": config.run.steps, "eval-steps": config.run.eval_steps, "eval-prompts": config.run.eval_prompts,
        "threads": config.run.threads, "output": arguments.folder, "learning-rate": config.optim.learning_rate,
        "prompts-per-step": config.rollout.prompts_per_step, "num-generations": config.rollout.num_generations,
    }  # fmt: skip
    flags |= {"ledger-steps": 0} if arguments.no_ledger else {}
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    with watched_by(clock):
        dispatch(["train", arguments.recipe, *words])


class Lessons:
    """The recipe's prompts as TRL's trainer asks for them, row by row, and its rewards in TRL's signature."""

    def __init__(self, config: TrainConfig, policy: Any) -> None:
        from oblrpo.rewards import Rewards
        from oblrpo.trainer.task import drop_long_prompts, task_of

        self.P, self.G = config.rollout.prompts_per_step, config.rollout.num_generations
        self.task, self.policy, words = task_of(config), policy, config.task
        drop_long_prompts(self.task, policy, words.max_prompt_length)
        self.rewards = Rewards(self.task, words.rewards, words.on_reward_error, words.reward_seconds)

    def problems(self, rows: list[int]) -> list[Any]:
        """Those of a run of ours: row r is prompt r % P of step 1 + r // P."""
        batches = {step: self.task.train_batch(step, self.P) for step in {1 + row // self.P for row in rows}}
        return [batches[1 + row // self.P][row % self.P] for row in rows]

    def draw(self, rows: dict[str, list[int]]) -> dict[str, list[Any]]:
        """Prompts as the text that ours reads, with their rows.

        Raises:
            InputError: TRL would read other tokens in it.
        """
        prompts = [problem.prompt for problem in self.problems(rows["row"])]
        texts = [self.policy.format.text(self.policy.tokenizer, prompt) for prompt in prompts]
        if self.policy.tokenizer(texts).input_ids != self.policy.tokens(prompts):
            raise InputError("TRL would begin the prompts of this recipe with other tokens; compare on text prompts.")
        return {"prompt": texts, "row": rows["row"]}

    def reward(self, completions: list[str], row: list[int], **_: Any) -> list[float | None]:
        """The recipe's rewards of whole groups; None where a completion has none."""
        rewards_PG, valid_PG = self.rewards(self.problems(row[:: self.G]), completions)
        pairs = (pair for group in zip(rewards_PG, valid_PG, strict=True) for pair in zip(*group, strict=True))
        return [float(reward) if valid else None for reward, valid in pairs]


def run_trl(arguments: argparse.Namespace, config: TrainConfig, clock: Clock) -> None:
    """TRL's trainer with the same settings: no activation checkpointing, no KL term, nothing written."""
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    from oblrpo.policy import make_policy
    from oblrpo.rollout import make_sampler
    from oblrpo.trainer.setup import set_threads

    run, rollout, rate = config.run, config.rollout, config.optim.learning_rate
    policy = make_policy(config.policy)
    set_threads(run.threads, policy)
    model, lessons = policy.model, Lessons(config, policy)
    # the prompts of a run of ours, drawn when they are asked for, as there
    data = Dataset.from_dict({"row": range(run.steps * lessons.P)}).with_transform(lessons.draw)
    held_out = policy, lessons.rewards, lessons.task.heldout(run.eval_prompts), run.eval_samples, rollout
    sampler, measure = make_sampler(policy, rollout), clock.aside(heldout_accuracy)

    def evaluate(step: int) -> None:
        training = model.training
        model.eval()
        measure(*held_out, seed_of(run.seed, step) ^ 1, sampler)  # the seed of a run of ours
        model.train(training)

    class Evaluate(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            evaluate(0)
            clock.after(0)

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if arguments.same_draws:
                torch.manual_seed(seed_of(run.seed, state.global_step + 1))  # as ours before every step

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % run.eval_steps == 0 or state.global_step == run.steps:
                evaluate(state.global_step)
            clock.after(state.global_step)

    rloo = arguments.contender == "trl-rloo"
    make_config, make_trainer = (RLOOConfig, RLOOTrainer) if rloo else (GRPOConfig, GRPOTrainer)
    parts = lessons.P // (rollout.prompts_per_micro_batch or lessons.P)
    trainer = make_trainer(
        model, lessons.reward, train_dataset=data, processing_class=policy.tokenizer, callbacks=[Evaluate()],
        optimizers=(torch.optim.AdamW(model.parameters(), lr=rate, fused=True, weight_decay=0.0), None),
        args=make_config(
            **LOSSES[arguments.contender], output_dir=str(arguments.folder), seed=run.seed, max_steps=run.steps,
            beta=0.0, per_device_train_batch_size=lessons.P * lessons.G // parts, gradient_accumulation_steps=parts,
            steps_per_generation=parts, num_iterations=1, num_generations=lessons.G,
            max_completion_length=rollout.max_completion_length, temperature=rollout.temperature, shuffle_dataset=False,
            learning_rate=rate, lr_scheduler_type="constant", use_cpu=policy.device.type == "cpu", bf16=False,
            gradient_checkpointing=False, report_to="none", save_strategy="no", logging_steps=1,
            logging_strategy="steps" if arguments.logs else "no",
            disable_tqdm=True, dataloader_num_workers=0, dataloader_pin_memory=False,
        ),
    )  # fmt: skip
    trainer.train()
    if arguments.logs:
        trainer.save_state()  # trainer_state.json


def check(contender: str, config: TrainConfig) -> None:
    """Refuse what TRL's trainer here would do otherwise than ours.

    Raises:
        InputError: names the settings.
    """
    part, P = config.rollout.prompts_per_micro_batch, config.rollout.prompts_per_step
    if contender in TRL and part and P % part:
        raise InputError(f"TRL needs equal micro-batches; prompts_per_step {P} is no multiple of {part}.")
    if contender in TRL and (config.optim.optimizer != "AdamW" or config.optim.optimizer_args):
        raise InputError("TRL's contenders have AdamW as it stands; leave out optimizer and optimizer_args.")


def parser() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("contender", choices=[*TRL, *OURS])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path, help="what the run leaves; clock.json is written at its end")
    parser.add_argument("--recipe", default="demo", help="recipe or YAML file")
    parser.add_argument("--rate", type=float, help="learning rate; the recipe's if none is given")
    parser.add_argument("--logs", action="store_true", help="let TRL log every step, into its trainer_state.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between measurements of held-out accuracy")
    parser.add_argument("--eval-prompts", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=0, help="prompts a step; 0: the recipe's")
    parser.add_argument("--generations", type=int, default=0, help="completions a prompt; 0: the recipe's")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--same-draws", action="store_true", help="seed TRL's sampling as ours is, step by step")
    parser.add_argument("--no-ledger", action="store_true", help="ours take no variance ledger")
    return parser


def main() -> None:
    arguments = parser().parse_args()
    try:
        config = config_of(arguments)
        check(arguments.contender, config)
        clock = Clock(config.rollout.prompts_per_step * config.rollout.num_generations)
        (run_trl if arguments.contender in TRL else run_ours)(arguments, config, clock)
    except InputError as error:
        parser().error(str(error))
    (arguments.folder / "clock.json").write_text(json.dumps(clock.rows, indent=1))


if __name__ == "__main__":
    main()
