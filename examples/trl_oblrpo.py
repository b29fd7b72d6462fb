"""OBLR-PO in TRL: sums, with `OBLRPOTrainer` where `GRPOTrainer` stood.

    pip install '.[trl]'  # in a checkout
    python examples/trl_oblrpo.py                              # a small policy with random weights, a minute on a CPU
    python examples/trl_oblrpo.py --model Qwen/Qwen3-0.6B      # any causal language model
    python examples/trl_oblrpo.py --look                       # TRL's own GRPOTrainer, and what its gradient is like
    oblrpo report runs/trl                                     # one page of either run

Two names are all that changes from a script of TRL's; `--look` changes none, and adds a callback.
"""

import argparse
import random
import re

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from oblrpo.adapters.trl import OBLRPOConfig, OBLRPOTrainer, VarianceLedgerCallback
from oblrpo.policy import make_policy
from oblrpo.settings import PolicyConfig


def sums(count, seed=0):
    """Rows of prompt and answer; TRL hands every column but the prompt to the reward."""
    rng = random.Random(seed)
    pairs = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(count)]
    return Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]})


def right(completions, answer, **_):
    """1 for the right sum as the first number; a tenth for every digit, so that random weights have a beginning."""
    found = [re.findall(r"\d+", completion) for completion in completions]
    digits = [sum(letter.isdigit() for letter in text) / max(1, len(text)) for text in completions]
    return [
        float(bool(numbers) and numbers[0] == wanted) + 0.1 * share
        for numbers, wanted, share in zip(found, answer, digits, strict=True)
    ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="", help="folder or hub name; a small policy is built if none is given")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--look", action="store_true", help="train with GRPOTrainer, and only look at the gradient")
    parser.add_argument("--output", default="runs/trl")
    arguments = parser.parse_args()
    policy = make_policy(PolicyConfig(model=arguments.model))
    kind, config = (GRPOTrainer, GRPOConfig) if arguments.look else (OBLRPOTrainer, OBLRPOConfig)
    trainer = kind(
        policy.model,
        right,
        args=config(
            output_dir=arguments.output,
            max_steps=arguments.steps,
            per_device_train_batch_size=16,
            gradient_accumulation_steps=4,
            num_generations=8,
            max_completion_length=8,
            learning_rate=1e-4,  # where the measured rate begins; GRPOTrainer keeps to it
            use_cpu=policy.device.type == "cpu",
            bf16=policy.device.type != "cpu",
            report_to="none",
            logging_steps=5,
            save_strategy="no",
        ),
        train_dataset=sums(512),
        processing_class=policy.tokenizer,
    )
    if arguments.look:
        trainer.add_callback(VarianceLedgerCallback(trainer, every=5))
    trainer.train()
    trainer.save_state()  # trainer_state.json, which `oblrpo report` reads; checkpoints have one of their own


if __name__ == "__main__":
    main()
