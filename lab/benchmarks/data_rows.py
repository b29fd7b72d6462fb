"""What a data set of many rows costs before the first step: CPU seconds and peak memory, in a process of its own.

    python -m lab.benchmarks.data_rows [--rows 1000000] [--kind jsonl]

The rows are short sums with their answers. "problems" is reading, checking and splitting them; "trainer" is
all of that and what a run does beside: counting every prompt's tokens, a tiny policy of the byte tokenizer. Memory is
the peak of the process less what its imports took.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from oblrpo.memory import resident_bytes
from oblrpo.settings import PolicyConfig, RunConfig, TaskConfig, TrainConfig
from oblrpo.trainer.loop import Trainer
from oblrpo.trainer.task import task_of

STAGES: dict[str, Callable[[TrainConfig], object]] = {"problems": task_of, "trainer": Trainer}


def rows(count: int) -> Iterator[dict[str, str]]:
    for index in range(count):
        yield {"prompt": f"What is {index} + 1?", "answer": str(index + 1)}


def write(path: Path, count: int) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            table = csv.DictWriter(file, ["prompt", "answer"])
            table.writeheader()
            table.writerows(rows(count))
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows(count))


def measure(stage: str, file: str, folder: str) -> None:
    """Carry out one stage in this process, and print its figures as JSON."""
    torch.set_num_threads(1)
    config = TrainConfig(
        task=TaskConfig(data=(file,)),
        policy=PolicyConfig(model_args={"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}),
        run=RunConfig(output=folder),
    )
    before, begin = resident_bytes(), time.process_time()
    made = STAGES[stage](config)
    seconds = time.process_time() - begin
    peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    print(json.dumps({"seconds": seconds, "peak": (peak - before) / 1e9, "kept": (resident_bytes() - before) / 1e9}))
    del made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--kind", choices=["jsonl", "csv"], default="jsonl")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(*arguments.measure)
        return
    print("| stage | rows | CPU seconds | peak memory (GB) | kept (GB) |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"rows.{arguments.kind}"
        write(file, arguments.rows)
        for stage in arguments.stages:
            command = [sys.executable, "-m", "lab.benchmarks.data_rows", "--measure", stage, str(file), f"{folder}/run"]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found = json.loads(said.splitlines()[-1])
            figures = f"{found['seconds']:.1f} | {found['peak']:.2f} | {found['kept']:.2f}"
            print(f"| {stage} | {arguments.rows:,} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
