"""What a step of OBLRPOTrainer costs over one of TRL's GRPOTrainer, generation included: ratios of CPU seconds.

    python -m lab.benchmarks.trl_steps [--rounds 5] [--shapes tokens words answers long] \\
        [--model models/smollm2-135m-instruct]

needs TRL (`pip install '.[trl]'`). All contenders begin with the same weights and train on the same prompts in one
process and one thread, in float32, without activation checkpointing; completions run to the longest length. They take
turns within a round, each round beginning with another, so that other work on the machine hits all alike. A round's
figure is the median over steps, without the first six: those have a look each, and later ones a tenth. `no look` are
steps without one, `look_steps=1` has one in all. `oblr_shrunk` with the rate of the schedule auto but for `rate off`.
With --model the shape `real` is measured, on that model.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from typing import Any, NamedTuple

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from lab.benchmarks.runs import mean_interval
from oblrpo.adapters.trl import OBLRPOConfig, OBLRPOTrainer
from oblrpo.policy import make_policy
from oblrpo.settings import PolicyConfig

G = 8
CONTENDERS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "no look": {},
    "rate off": {"schedule": "off"},
    "every step": {"look_steps": 1},
}
FIRST = 6
"""Steps that do not count: the first five have a look each."""


class Shape(NamedTuple):
    """A model and a batch."""

    hidden_size: int
    layers: int
    rows: int
    """Completions of a step."""
    parts: int
    """Micro-batches."""
    tokens: int
    """Of a completion."""


SHAPES = {
    "tokens": Shape(128, 4, 128, 2, 16),
    "words": Shape(256, 4, 32, 2, 64),
    "answers": Shape(256, 6, 16, 2, 192),
    "long": Shape(128, 4, 16, 2, 512),
}
REAL = Shape(576, 30, 16, 2, 24)


class Clock(TrainerCallback):
    """CPU seconds of every step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if not self.seconds:
            self._last = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.process_time()
        self.seconds.append(now - self._last)
        self._last = now


def reward(completions: list[str], **_: Any) -> list[float]:
    """The share of letters of the first half of the alphabet, so that rewards differ within a group."""
    return [sum(letter.lower() < "n" for letter in text) / max(1, len(text)) for text in completions]


def seconds_of(contender: str, shape: Shape, model: str, steps: int, seed: int) -> float:
    """CPU seconds of a step: the median of those without a look, but for the contender that always takes one."""
    torch.manual_seed(seed)
    built = PolicyConfig(
        model_args={"hidden_size": shape.hidden_size, "num_hidden_layers": shape.layers, "num_attention_heads": 4}
    )
    policy = make_policy(PolicyConfig(model=model, device="cpu") if model else built)
    policy.model.generation_config.eos_token_id = None
    kind, config = (GRPOTrainer, GRPOConfig) if contender == "grpo" else (OBLRPOTrainer, OBLRPOConfig)
    prompts = [f"Question {seed} {index:04d}: what comes next?" for index in range(steps * shape.rows // G)]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            policy.model, reward, processing_class=policy.tokenizer, callbacks=[clock],
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            args=config(
                **CONTENDERS[contender], output_dir=folder, seed=seed, max_steps=steps, num_generations=G,
                per_device_train_batch_size=shape.rows // shape.parts, gradient_accumulation_steps=shape.parts,
                max_completion_length=shape.tokens, use_cpu=True, bf16=False, gradient_checkpointing=False,
                report_to="none", logging_steps=5, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
            ),
        )  # fmt: skip
        trainer.train()
    return statistics.median(clock.seconds[FIRST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=FIRST + 3, help="steps of a round, of each contender")
    parser.add_argument("--shapes", nargs="*", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--model", default="", help="folder of a model for the shape `real`")
    arguments = parser.parse_args()
    if not FIRST < arguments.steps < 10:
        parser.error(f"--steps must be above {FIRST} and below 10, in which another look is due.")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    shapes = {name: (SHAPES[name], "") for name in arguments.shapes}
    shapes |= {"real": (REAL, arguments.model)} if arguments.model else {}
    lines = []
    for name, (shape, model) in shapes.items():
        found: dict[str, list[float]] = {contender: [] for contender in CONTENDERS}
        for turn in range(arguments.rounds):
            order = list(CONTENDERS)
            for contender in order[turn % len(order) :] + order[: turn % len(order)]:
                found[contender].append(seconds_of(contender, shape, model, arguments.steps, turn))
        ratios = {
            contender: [mine / theirs for mine, theirs in zip(taken, found["grpo"], strict=True)]
            for contender, taken in found.items()
        }
        cells = [f"{name}: {shape.rows} x {shape.tokens} tokens", f"{statistics.mean(found['grpo']):.2f}"]
        lines.append(cells + [mean_interval(ratios[contender]) for contender in CONTENDERS if contender != "grpo"])
        print(" | ".join(lines[-1]), flush=True)
    print()
    titles = ["shape", "GRPOTrainer, CPU s a step", *(contender for contender in CONTENDERS if contender != "grpo")]
    for line in [titles, ["---"] * len(titles), *lines]:
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
