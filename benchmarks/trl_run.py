"""One run beside TRL, in a process of its own; `benchmarks.against_trl` calls it.

    python -m benchmarks.trl_run trl-grpo runs/warm/checkpoints/step_0 runs/trl-grpo [--seed 0] [--steps 60]

Prompts, completions a prompt, lengths, temperature, rate and the held-out measurement are those of the recipe `demo`.
The clock runs from the first step on, over all that a step takes (prompts, sampling, rewards, gradient, update, what is
written), and stands still while held-out accuracy is measured, which the same code does for all. Ours is `oblrpo train
demo` with nothing switched off: score norms, metrics, completions and a checkpoint every step, the ledger every 20
steps. TRL's writes nothing. Loading the model, and the page that ours ends with, are outside the clock.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from oblrpo.config import TrainConfig
from oblrpo.evaluation import heldout_accuracy
from oblrpo.seeds import seed_of
from oblrpo.settings import load_recipe

OURS = ("grpo", "rloo", "oblrpo_shrunk")
TRL = ("trl-grpo", "trl-rloo")
RECIPE = load_recipe("demo", TrainConfig())
P, G = RECIPE.rollout.prompts_per_step, RECIPE.rollout.num_generations


class Clock:
    """Wall and CPU seconds of training, written down after each step whose held-out accuracy was measured."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self._started, self._away = _now(), [0.0, 0.0]
        self._accuracy: float | None = None

    def aside(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap an evaluation so that its time is not counted."""

        def measured(*inputs: Any) -> Any:
            begun = _now()
            accuracy = evaluate(*inputs)
            self._away = [away + now - then for away, now, then in zip(self._away, _now(), begun, strict=True)]
            self._accuracy = accuracy.value
            return accuracy

        return measured

    def after(self, step: int) -> None:
        """A step is done with all that belongs to it; step 0 starts the clock."""
        if not step:
            self._started, self._away = _now(), [0.0, 0.0]
        if self._accuracy is not None:
            spent = [now - then - away for now, then, away in zip(_now(), self._started, self._away, strict=True)]
            row = {"step": step, "samples": step * P * G, "seconds": spent[0], "cpu_seconds": spent[1]}
            self.rows.append(row | {"accuracy": self._accuracy})
            self._accuracy = None


def _now() -> list[float]:
    return [time.perf_counter(), time.process_time()]


def run_ours(arguments: argparse.Namespace, clock: Clock) -> None:
    """The command line's own run, with a clock at its evaluations and at the end of its steps."""
    from oblrpo.cli import dispatch
    from oblrpo.trainer import loop, progress

    shown = progress.Progress.step

    def step(self: progress.Progress, number: int, metrics: dict[str, Any]) -> None:
        shown(self, number, metrics)
        clock.after(number)

    loop.heldout_accuracy, progress.Progress.step = clock.aside(heldout_accuracy), step  # type: ignore[method-assign]
    flags = {
        "model": arguments.model, "warm-start-steps": 0, "algorithm": arguments.contender, "seed": arguments.seed,
        "steps": arguments.steps, "eval-steps": arguments.every, "eval-prompts": arguments.eval_prompts,
        "output": arguments.folder,
    }  # fmt: skip
    dispatch(["train", "demo", *(str(word) for name, value in flags.items() for word in (f"--{name}", value))])


def run_trl(arguments: argparse.Namespace, clock: Clock) -> None:
    """TRL's trainer, told to do the same: one micro-batch, no activation checkpointing, no KL term, nothing written."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

    from oblrpo.policy import Policy
    from oblrpo.rewards import Rewards
    from oblrpo.rollout import make_sampler
    from oblrpo.tasks import Problem, make_task

    torch.set_num_threads(1)
    task = make_task(RECIPE.task.task, arguments.seed, **RECIPE.task.task_args)

    def draw(rows: dict[str, list[int]]) -> dict[str, list[str]]:
        batches = {step: task.train_batch(step, P) for step in {1 + row // P for row in rows["row"]}}
        problems = [batches[1 + row // P][row % P] for row in rows["row"]]
        return {"prompt": [each.prompt for each in problems], "answer": [each.answer for each in problems]}

    # the prompts of a run of ours, drawn when they are asked for, as there
    data = Dataset.from_dict({"row": range(arguments.steps * P)}).with_transform(draw)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32)
    policy = Policy(model, tokenizer)
    held_out = policy, Rewards(task), task.heldout(arguments.eval_prompts), RECIPE.run.eval_samples, RECIPE.rollout
    sampler, measure = make_sampler(policy, RECIPE.rollout), clock.aside(heldout_accuracy)

    def evaluate(step: int) -> None:
        training = model.training
        model.eval()
        measure(*held_out, seed_of(arguments.seed, step) ^ 1, sampler)  # the seed of a run of ours
        model.train(training)

    class Evaluate(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            evaluate(0)
            clock.after(0)

        def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if arguments.same_draws:
                torch.manual_seed(seed_of(arguments.seed, state.global_step + 1))  # as ours before every step

        def on_step_end(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
            if state.global_step % arguments.every == 0 or state.global_step == arguments.steps:
                evaluate(state.global_step)
            clock.after(state.global_step)

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        return task.rewards([Problem(*each) for each in zip(prompts, answer, strict=True)], completions)

    grpo = arguments.contender == "trl-grpo"
    own = {"loss_type": "grpo", "scale_rewards": "group"} if grpo else {"normalize_advantages": False}
    make_config, make_trainer = (GRPOConfig, GRPOTrainer) if grpo else (RLOOConfig, RLOOTrainer)
    rollout, rate = RECIPE.rollout, RECIPE.optim.learning_rate
    config = make_config(
        **own, output_dir=str(arguments.folder), seed=arguments.seed, max_steps=arguments.steps, beta=0.0,
        per_device_train_batch_size=P * G, gradient_accumulation_steps=1, steps_per_generation=1, num_iterations=1,
        num_generations=G, max_completion_length=rollout.max_completion_length, temperature=rollout.temperature,
        shuffle_dataset=False, learning_rate=rate, lr_scheduler_type="constant", max_grad_norm=0.0,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none", logging_strategy="no",
        save_strategy="no", disable_tqdm=True, dataloader_num_workers=0, dataloader_pin_memory=False,
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True, weight_decay=0.0)  # as ours
    trainer = make_trainer(
        model, reward, args=config, train_dataset=data, processing_class=tokenizer, callbacks=[Evaluate()],
        optimizers=(optimizer, None),
    )  # fmt: skip
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("contender", choices=[*TRL, *OURS])
    parser.add_argument("model")
    parser.add_argument("folder", type=Path, help="what the run leaves; clock.json is written at its end")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20, help="steps between measurements of held-out accuracy")
    parser.add_argument("--eval-prompts", type=int, default=512)
    parser.add_argument("--same-draws", action="store_true", help="seed TRL's sampling as ours is, step by step")
    arguments, clock = parser.parse_args(), Clock()
    (run_trl if arguments.contender in TRL else run_ours)(arguments, clock)
    (arguments.folder / "clock.json").write_text(json.dumps(clock.rows, indent=1))


if __name__ == "__main__":
    main()
