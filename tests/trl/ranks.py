"""One of several processes of a run; `test_gradient` starts them and compares what they leave.

python -m tests.trl.ranks FOLDER
"""

import sys
from pathlib import Path

import torch

from tests.trl.support import Capture, ours

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    trainer = ours(folder, max_steps=2, baseline="oblr")
    captured = Capture(trainer)
    trainer.train()
    left = {
        "updates": captured.updates,
        "state": {"schedule": trainer._schedule.state_dict(), **trainer._gradient.state_dict()},
        "weights": trainer.model.state_dict(),
        "log": trainer.state.log_history,
    }
    torch.save(left, folder / f"rank_{trainer.accelerator.process_index}.pt")
