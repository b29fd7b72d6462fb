"""The peak of a step of OBLRPOTrainer over one of TRL's GRPOTrainer's, each in a process of its own.

    python -m lab.benchmarks.trl_memory [--rows 8 2] [--tokens 512] [--hidden-size 384] [--layers 8] [--cases grpo ...]
        [--shortest 1]

needs TRL (`pip install '.[trl]'`). TRL's defaults where memory is concerned: activation checkpointing, AdamW and
eight completions a prompt; float32. The peak is that of the second step, when the optimizer has its averages, over what
the process held before the first, which is a short one. Completions are random tokens, all of one length or, with
`--shortest`, of lengths drawn evenly from that on: generation is left out. `--rows` are completions of a micro-batch;
every update has 16. A look is at all of them, where it is taken.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from oblrpo.adapters.trl import OBLRPOConfig, OBLRPOTrainer
from oblrpo.memory import give_back, resident_bytes
from oblrpo.policy import make_policy
from oblrpo.settings import PolicyConfig

G, UPDATE = 8, 16
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "no look": {"look_steps": 0},
    "no look, rate off": {"look_steps": 0, "schedule": "off"},
    "look": {"look_steps": 1},
    "rloo": {"baseline": "rloo"},
}


class Peaks(TrainerCallback):
    """The most that the process held in each step, and the step's CPU seconds."""

    def __init__(self) -> None:
        self.bytes: list[int] = []
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        give_back()
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        self._start = time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.process_time() - self._start)
        self.bytes.append(int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024)


def measure(case: str, rows: int, arguments: argparse.Namespace) -> dict[str, float]:
    """Train two steps in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sizes = {
        "hidden_size": arguments.hidden_size, "num_hidden_layers": arguments.layers, "num_attention_heads": 8,
        "max_position_embeddings": 2 * arguments.tokens,
    }  # fmt: skip
    built = PolicyConfig(model_args=sizes, device="cpu")
    policy, peaks = make_policy(built), Peaks()
    kind, config = (GRPOTrainer, GRPOConfig) if case == "grpo" else (OBLRPOTrainer, OBLRPOConfig)
    with tempfile.TemporaryDirectory() as folder:
        trainer = kind(
            policy.model, lambda completions, **_: torch.rand(len(completions)).tolist(),
            processing_class=policy.tokenizer, callbacks=[peaks],
            train_dataset=Dataset.from_dict({"prompt": [f"{index:04d}=" for index in range(64)]}),
            args=config(
                **CASES[case], output_dir=folder, max_steps=2, num_generations=G, per_device_train_batch_size=rows,
                gradient_accumulation_steps=UPDATE // rows, max_completion_length=arguments.tokens, use_cpu=True,
                bf16=False, report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
            ),
        )  # fmt: skip

        def draw(prompts: list[list[int]], *_: Any) -> tuple[list[list[int]], None]:
            longest = arguments.tokens if trainer.state.global_step else 4
            shortest = min(arguments.shortest or longest, longest)
            generator = torch.Generator().manual_seed(0)  # so that every case has the same lengths
            lengths_S = torch.randint(shortest, longest + 1, (len(prompts),), generator=generator)
            return [torch.randint(3, 250, (length,)).tolist() for length in lengths_S.tolist()], None

        trainer._generate_single_turn = draw
        give_back()
        base = resident_bytes()
        trainer.train()
    return {"peak": (peaks.bytes[1] - base) / 1e9, "seconds": peaks.seconds[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--shortest", type=int)
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure(arguments.here[0], int(arguments.here[1]), arguments)))
        return
    print("| completions a micro-batch | trainer | peak over the base, GB | over grpo's | CPU time over grpo's |")
    print("|---|---|---|---|---|")
    for rows in arguments.rows:
        theirs: dict[str, float] = {}
        for case in ["grpo", *(each for each in arguments.cases if each != "grpo")]:
            command = [sys.executable, "-m", "lab.benchmarks.trl_memory", *sys.argv[1:], "--here", case, str(rows)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found = json.loads(done.stdout.splitlines()[-1])
            theirs = theirs or found
            ratios = [f"{found[key] / theirs[key]:.2f}" for key in ("peak", "seconds")]
            print(f"| {rows} | {case} | {found['peak']:.2f} | {' | '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
