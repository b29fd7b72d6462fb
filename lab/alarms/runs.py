"""Real runs that learn, for `python -m lab.alarms`: ours on every task with a warm start, SmolLM2, TRL's GRPOTrainer.

    python -m lab.alarms.runs [--folder runs/alarms] [--seeds 5] [--processes 2]
    python -m lab.alarms runs/alarms/*_*_*

Each takes about a minute on one thread, those of SmolLM2 (`make smollm2`) up to twenty. TRL's are made where TRL is
installed (`make env-trl`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lab.benchmarks.runs import STARTS, after_start, rows, train_all, warm_starts

ARMS: dict[str, dict[str, Any]] = {
    "default": {"algorithm": "oblrpo_thrifty", "learning_rate": 1e-5},
    "rloo": {"algorithm": "rloo", "learning_rate": 2e-4},
    "grpo": {"algorithm": "grpo", "learning_rate": 2e-4},
}
SIZE: dict[str, Any] = {
    "prompts_per_step": 32, "num_generations": 4, "steps": 80, "eval_steps": 10, "eval_prompts": 64, "save_steps": 0,
    "optimizer": "AdamW",
}  # fmt: skip
PENALTY = "default with --beta 0.02"
ON_SUMS = {"default": "oblrpo_thrifty --learning-rate 1e-6", "rloo": "rloo --learning-rate 1e-5",
           "grpo": "grpo --learning-rate 1e-5"}  # fmt: skip
MODEL = Path("models/smollm2-135m-instruct")
WARM = 2  # warm starts a task; seeds take turns


def trl_words(policy: Path, output: Path, contender: str, seed: int) -> list[str]:
    """The command of a run of TRL's on routes in graphs."""
    sizes = {"steps": SIZE["steps"], "every": SIZE["steps"], "eval-prompts": 16, "prompts": 32, "threads": 1}
    flags = {"recipe": "demo", "rate": 2e-4, "seed": seed} | sizes
    words = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "lab.benchmarks.trl_run", contender, str(policy), str(output), *words, "--logs"]


def on_sums(folder: Path) -> None:
    """SmolLM2's sums, where the model is."""
    for arm, words in ON_SUMS.items() if MODEL.is_dir() else ():
        output = folder / f"smollm2_{arm}_51"
        if rows(output, 40) is None:
            flags = f"--algorithm {words} --steps 40 --seed 51 --ledger-steps 0 --save-steps 0 --output {output}"
            code = "from oblrpo.cli import main; main()"
            subprocess.run([sys.executable, "-c", code, "train", "smollm2-arithmetic", *flags.split()], check=True)


def main() -> None:
    """Make what is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/alarms"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    starts = warm_starts(arguments.folder / "warm", STARTS, WARM, arguments.processes)
    runs = {
        (task, arm, seed): (
            arguments.folder / f"{task}_{arm}_{seed}",
            after_start(task, starts[task, seed % WARM]) | settings | SIZE | {"seed": seed},
        )
        for seed in range(arguments.seeds)
        for task in STARTS
        for arm, settings in (ARMS | ({PENALTY: ARMS["default"] | {"beta": 0.02}} if task == "path" else {})).items()
    }
    missing = {key: run for key, run in runs.items() if rows(run[0], SIZE["steps"]) is None}
    train_all(missing, arguments.processes, lambda key: print(*key, flush=True))
    on_sums(arguments.folder)
    if find_spec("trl") is None:
        print("TRL is not installed here: its runs are left out")
        return
    for seed in range(arguments.seeds):
        for contender in ("trl-grpo", "trl-default"):
            output = arguments.folder / f"path_{contender}_{seed}"
            if not (output / "trainer_state.json").is_file():
                subprocess.run(trl_words(starts["path", seed % WARM], output, contender, seed), check=True)
                print("path", contender, seed, flush=True)


if __name__ == "__main__":
    main()
