"""Runs on as many processes as there are, of which `test_processes` compares what they leave.

python -m tests.trl.ranks FOLDER
"""

import os
import sys
from pathlib import Path

import torch

from oblrpo.adapters.trl import VarianceLedgerCallback
from tests.trl.support import Capture, flat, ours, theirs, tiny_policy

RUNS = {
    "oblr_shrunk": {"baseline": "oblr_shrunk", "look_steps": 2, "per_device_train_batch_size": 4},
    "oblr, two a process": {
        "baseline": "oblr", "num_generations": 2, "per_device_train_batch_size": 2, "rows": 8, "look_steps": 1,
    },
    "rloo, six a process": {"baseline": "rloo", "num_generations": 6, "per_device_train_batch_size": 6, "rows": 24},
    "halves of groups": {  # which are other halves on two processes: other signal and noise, and so another rate
        "look_steps": 1, "per_device_train_batch_size": 2, "loss_type": "dapo", "entropy_coef": 0.1, "schedule": "off",
    },
}  # fmt: skip
"""The settings of each; an update of the whole batch has so many `rows`."""


def generate_the_same(trainer):
    """Let completions depend on the step and on the row of the whole batch, and not on who draws them."""

    def generate(prompts, *_):
        first, made = trainer.accelerator.process_index * len(prompts), []
        for row in range(first, first + len(prompts)):
            generator = torch.Generator().manual_seed(1000 * trainer.state.global_step + row)
            length = int(torch.randint(1, 9, (), generator=generator))
            made.append(torch.randint(40, 120, (length,), generator=generator).tolist())
        return made, None

    trainer._generate_single_turn = generate
    return trainer


def left_by_runs(folder):
    """What each run leaves behind on this process."""
    processes, left = int(os.environ.get("WORLD_SIZE", "1")), {}
    for name, given in RUNS.items():
        given = {"per_device_train_batch_size": 8, "rows": 16} | given
        parts = given.pop("rows") // given["per_device_train_batch_size"] // processes
        trainer = ours(folder, tiny_policy(torch.float64), max_steps=3, gradient_accumulation_steps=parts, **given)
        captured = Capture(generate_the_same(trainer))
        trainer.train()
        left[name] = {
            "gradients": [flat(update["grads"]) for update in captured.updates],
            "weights": flat(trainer.model.state_dict()),
            "state": {"schedule": trainer._schedule.state_dict(), **trainer._advantages.state_dict()},
            "log": trainer.state.log_history,
        }
    trainer = generate_the_same(theirs(folder, max_steps=2, gradient_accumulation_steps=2 // processes))
    trainer.add_callback(VarianceLedgerCallback(trainer, every=1))
    trainer.train()
    return left | {"ledger": trainer.state.log_history}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.save(left_by_runs(sys.argv[1]), Path(sys.argv[1]) / f"rank_{os.environ['RANK']}.pt")
