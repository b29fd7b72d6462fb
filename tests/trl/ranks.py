"""One of several processes of a run; `test_gradient` starts them and compares what they leave.

python -m tests.trl.ranks FOLDER
"""

import sys
from pathlib import Path

import torch

from oblrpo.adapters.trl import VarianceLedgerCallback
from tests.trl.support import Capture, ours, theirs

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
    looked = theirs(folder, max_steps=1)
    ledger, mine = VarianceLedgerCallback(looked), []
    take = ledger._over_processes
    ledger._over_processes = lambda found, n: (mine.append(found["variance/rloo"]), take(found, n))[1]
    looked.add_callback(ledger)
    looked.train()
    left |= {"ledger": looked.state.log_history[0], "variance": mine[0]}
    torch.save(left, folder / f"rank_{trainer.accelerator.process_index}.pt")
