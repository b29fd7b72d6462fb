"""Does a long run stay the same size? Slopes of memory, handles, children, disk and time over thousands of steps.

A very small run in this process, whose reward runs in a worker. Every step reads what the process holds; steps are then
averaged in blocks, and a line is fitted to the blocks by least squares, with a 95 % interval by Student's t. The first
tenth of the steps, in which libraries warm up, is left out. Time is CPU time, of the process and its workers, so that
what else the machine does is not counted. Linux only (/proc).
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers.utils import logging

from oblrpo.intervals import student_t
from oblrpo.memory import resident_bytes
from oblrpo.report.console import Progress
from oblrpo.settings import TrainConfig, with_settings
from oblrpo.trainer.loop import Trainer

SMALL = {
    "model_args": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, "prompts_per_step": 4,
    "num_generations": 3,
    "max_completion_length": 6, "eval_prompts": 5, "eval_samples": 2, "eval_steps": 10, "threads": 1, "device": "cpu",
    "rewards": ["lab.benchmarks.soak.by_chance"], "schedule_kl": 1e-3,
}  # fmt: skip

BLOCKS = 18

UNITS = {
    "memory": "MB", "handles": "", "children": "", "records": "MB", "rest of the disk": "MB", "CPU time a step": "ms"
}  # fmt: skip


def by_chance(prompts: list[str], completions: list[str], **columns: Any) -> list[float]:
    """A reward that nothing can learn, so that no step is ever without a gradient."""
    texts = (f"{prompt}\n{completion}" for prompt, completion in zip(prompts, completions, strict=True))
    return [zlib.crc32(text.encode()) % 5 / 4 for text in texts]


def children() -> list[int]:
    """The processes that this one has started and that have not been ended."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def cpu_seconds(pids: Sequence[int]) -> float:
    """User and system time of these processes so far."""
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def size(folder: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class Watch(Progress):
    """Reads what the process holds after every step."""

    def __init__(self, output: Path) -> None:
        super().__init__(Console())
        self.output, self.rows, self._records, self._before = output, list[dict[str, float]](), 0, math.nan

    def step(self, step: int, metrics: dict[str, Any]) -> None:
        """Show that a step is done, and read."""
        super().step(step, metrics)
        workers = children()
        now = cpu_seconds([os.getpid(), *workers])
        if step:
            self._records += (self.output / "completions" / f"step_{step}.jsonl").stat().st_size
        records = self._records + (self.output / "metrics.jsonl").stat().st_size
        rest = size(self.output / "checkpoints") + sum(f.stat().st_size for f in self.output.glob("*") if f.is_file())
        self.rows.append({
            "step": step, "memory": resident_bytes() / 1e6, "handles": len(os.listdir("/proc/self/fd")),
            "children": len(workers), "records": records / 1e6,
            "rest of the disk": (rest - (self.output / "metrics.jsonl").stat().st_size) / 1e6,
            "CPU time a step": (now - self._before) * 1e3,
        })  # fmt: skip
        self._before = cpu_seconds([os.getpid(), *workers])  # reading is no part of a step


def slope(values: Sequence[float]) -> tuple[float, float]:
    """The slope of a line through the means of `BLOCKS` blocks, by step, and the half-width of its 95 % interval."""
    length = len(values) // BLOCKS
    means = [sum(values[i * length : (i + 1) * length]) / length for i in range(BLOCKS)]
    places = [(i - (BLOCKS - 1) / 2) * length for i in range(BLOCKS)]
    mean, spread = sum(means) / BLOCKS, sum(place**2 for place in places)
    rise = sum(place * (each - mean) for place, each in zip(places, means, strict=True)) / spread
    left = sum((each - mean - rise * place) ** 2 for place, each in zip(places, means, strict=True))
    return rise, student_t(BLOCKS - 2) * math.sqrt(left / (BLOCKS - 2) / spread)


def main() -> None:
    """Run, write `soak.csv`, and print the slopes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, default=Path("runs/soak"))
    arguments = parser.parse_args()
    settings = SMALL | {"steps": arguments.steps, "output": str(arguments.output)}
    watch = Watch(arguments.output)
    logging.disable_progress_bar()
    Trainer(with_settings(TrainConfig(), settings, "soak")).run(watch)
    with (arguments.output / "soak.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(watch.rows[0]))
        writer.writeheader()
        writer.writerows(watch.rows)
    warm = watch.rows[1 + arguments.steps // 10 :]
    print("| | mean | slope per 1,000 steps |")
    print("|---|---|---|")
    for key, unit in UNITS.items():
        values = [row[key] for row in warm]
        rise, margin = slope(values)
        mean = f"{sum(values) / len(values):.4g} {unit}"
        print(f"| {key} | {mean} | {1000 * rise:+.3g} ± {1000 * margin:.2g} {unit} |")


if __name__ == "__main__":
    main()
