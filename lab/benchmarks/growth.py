"""How time and memory of a step grow: with completions, tokens, parameters and rows of data, beside TRL's GRPO.

    python -m lab.benchmarks.growth [--axes completions tokens parameters rows] [--rounds 2] \\
        [--csv docs/results/growth.csv] [--picture docs/pictures/growth.svg] [--only-report]

needs TRL for its half (`pip install '.[trl]'`), and leaves it out where it is not installed. Ours is
`oblrpo.train` with its defaults (exact norms, the measured rate), TRL's is GRPOTrainer without activation checkpointing
and without files. Both begin with the same random weights, in float32 on one thread and in one micro-batch; each case
is a process of its own, and the two take turns. A step is counted in CPU seconds from one call of the reward function
to the next, the median of three, so that it holds a gradient, an update and the next batch's sampling. Of `rows` it is
instead what comes before the first reward: reading, checking and splitting a JSON Lines file of short sums, and one
small batch. Memory is the peak of the process over what its imports took. The exponent is the slope of a straight line
through the logarithms, without the smallest size, where what is fixed weighs most.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch

from oblrpo.memory import keep_freed, resident_bytes

G, STEPS = 8, 4
COLUMNS = ("axis", "size", "who", "round", "parameters", "seconds", "peak_gb")


class Case(NamedTuple):
    """A model, a batch and a data set."""

    completions: int = 64
    tokens: int = 64
    hidden_size: int = 128
    rows: int = 1000


SIZES: dict[str, tuple[int, ...]] = {
    "completions": (16, 32, 64, 128, 256),
    "tokens": (16, 32, 64, 128, 256),
    "parameters": (64, 128, 256, 512),  # in units of hidden_size; what is drawn is the number of parameters
    "rows": (10**3, 10**4, 10**5, 10**6),
}
FIELD = {"parameters": "hidden_size"}
SMALL = Case(completions=16, tokens=4, hidden_size=16)
"""What the rows of data are read for."""


def case_of(axis: str, size: int) -> Case:
    """The case that lies at a size of an axis."""
    return (SMALL if axis == "rows" else Case())._replace(**{FIELD.get(axis, axis): size})


def rows(count: int) -> Iterator[dict[str, str]]:
    for index in range(count):
        yield {"prompt": f"What is {index} + 1?", "answer": str(index + 1)}


def model_of(case: Case) -> Any:
    """A Qwen3 of four layers and a vocabulary of 2,048, so that few completions end before they have to."""
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    h, heads = case.hidden_size, max(2, case.hidden_size // 64)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=2048, hidden_size=h, intermediate_size=3 * h, num_hidden_layers=4, num_attention_heads=heads,
            num_key_value_heads=heads // 2, head_dim=h // heads, max_position_embeddings=4096,
            tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip
    model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
    return model


class Clock:
    """A reward function that reads the clock; its rewards differ within a group, and mean nothing."""

    __name__ = "clock"

    def __init__(self) -> None:
        self.read: list[float] = []

    def __call__(self, completions: list[str], **_: Any) -> list[float]:
        self.read.append(time.process_time())
        return [sum(letter.lower() < "n" for letter in text) / max(1, len(text)) for text in completions]


def ours(case: Case, file: str, folder: str, clock: Clock) -> None:
    import oblrpo
    from oblrpo.policy import byte_tokenizer

    oblrpo.train(
        model=model_of(case), tokenizer=byte_tokenizer(), data=file, reward=clock, output=folder, progress=False,
        prompts_per_step=case.completions // G, num_generations=G, max_completion_length=case.tokens, steps=STEPS,
        eval_steps=0, eval_prompts=8, threads=1,
    )  # fmt: skip


def trl(case: Case, file: str, folder: str, clock: Clock) -> None:
    from datasets import load_dataset
    from trl import GRPOConfig, GRPOTrainer

    from oblrpo.policy import byte_tokenizer

    trainer = GRPOTrainer(
        model_of(case), clock, processing_class=byte_tokenizer(),
        train_dataset=load_dataset("json", data_files=file, split="train", cache_dir=folder),
        args=GRPOConfig(
            output_dir=folder, max_steps=STEPS, num_generations=G, per_device_train_batch_size=case.completions,
            max_completion_length=case.tokens, use_cpu=True, bf16=False, gradient_checkpointing=False,
            report_to="none", save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        ),
    )  # fmt: skip
    trainer.train()


WHO = {"oblrpo": ours, "TRL": trl}


def measure(who: str, axis: str, size: int, file: str, folder: str) -> dict[str, float]:
    """Take a few steps in this process."""
    torch.set_num_threads(1)
    keep_freed()
    case, clock = case_of(axis, size), Clock()
    parameters = sum(parameter.numel() for parameter in model_of(case).parameters())
    for library in ("oblrpo.trainer.loop", *(["trl"] if who == "TRL" else [])):
        importlib.import_module(library)  # is not what is measured
    base, begun = resident_bytes(), time.process_time()
    WHO[who](case, file, folder, clock)
    between = [after - before for before, after in pairwise(clock.read[:STEPS])]  # behind them held-out accuracy
    seconds = clock.read[0] - begun if axis == "rows" else statistics.median(between)
    peak = int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024
    return {"parameters": parameters, "seconds": round(seconds, 4), "peak_gb": round((peak - base) / 1e9, 4)}


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case that is not in the CSV, each in a process of its own."""
    arguments.csv.parent.mkdir(parents=True, exist_ok=True)
    found = read(arguments.csv)
    known = {(row["axis"], int(row["size"]), row["who"], int(row["round"])) for row in found}
    names = ["oblrpo"] + ["TRL"] * bool(importlib.util.find_spec("trl"))
    for number in range(arguments.rounds):
        for axis in arguments.axes:
            for size in SIZES[axis]:
                for who in names if number % 2 == 0 else reversed(names):
                    if (axis, size, who, number) in known:
                        continue
                    with tempfile.TemporaryDirectory() as folder:
                        file = Path(folder) / "rows.jsonl"
                        lines = rows(case_of(axis, size).rows)
                        file.write_text("".join(json.dumps(row) + "\n" for row in lines), encoding="utf-8")
                        words = ["--measure", who, axis, str(size), str(file), f"{folder}/run"]
                        command = [sys.executable, "-m", "lab.benchmarks.growth", *words]
                        said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                    figures = json.loads(said.splitlines()[-1])
                    found.append({"axis": axis, "size": size, "who": who, "round": number} | figures)
                    print(*found[-1].values(), flush=True)
                    with arguments.csv.open("w", newline="") as file:
                        writer = csv.DictWriter(file, COLUMNS)
                        writer.writeheader()
                        writer.writerows(found)
    return found


def read(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


Curve = dict[float, float]
"""Size -> mean over rounds."""


def curve(found: list[dict[str, Any]], axis: str, who: str, figure: str) -> Curve:
    by_size: dict[float, list[float]] = {}
    for row in found:
        if row["axis"] == axis and row["who"] == who:
            size = float(row["parameters" if axis == "parameters" else "size"])
            by_size.setdefault(size, []).append(float(row[figure]))
    return {size: statistics.mean(values) for size, values in sorted(by_size.items())}


def exponent(line: Curve) -> float:
    """The slope of log figure against log size, without the smallest size."""
    points = [(math.log(size), math.log(value)) for size, value in line.items()][1:]
    return statistics.linear_regression(*zip(*points, strict=True)).slope


FIGURES = {"seconds": "CPU seconds", "peak_gb": "peak, GB"}


def report(found: list[dict[str, Any]]) -> None:
    """A table an axis, with the exponents and TRL's figures over ours."""
    for axis in dict.fromkeys(row["axis"] for row in found):
        lines = {(who, figure): curve(found, axis, who, figure) for figure in FIGURES for who in WHO}
        there = {key: line for key, line in lines.items() if line}
        sizes = list(next(iter(there.values())))
        print(f"\n| {axis} | " + " | ".join(f"{size:,.0f}" for size in sizes) + " | exponent |")
        print("|---" * (len(sizes) + 2) + "|")
        for (who, figure), line in there.items():
            values = " | ".join(f"{line[size]:.3g}" for size in sizes)
            print(f"| {who}, {FIGURES[figure]} | {values} | {exponent(line):.2f} |")
        for figure, name in FIGURES.items():
            if (theirs := there.get(("TRL", figure))) and (mine := there.get(("oblrpo", figure))):
                print(f"| TRL's {name} over ours | " + " | ".join(f"{theirs[s] / mine[s]:.2f}" for s in sizes) + " | |")


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """All curves in one picture, seconds above and memory below, with the exponents at their ends."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    from lab.benchmarks.pictures import FAINT, RIGHT, STYLE
    from oblrpo.report.charts import short

    colours = {"oblrpo": RIGHT, "TRL": FAINT}
    with mpl.rc_context(STYLE):
        axes = [axis for axis in SIZES if any(row["axis"] == axis for row in found)]
        page = Figure(figsize=(2.6 * len(axes), 4.6), layout="constrained")
        for place, (figure, name) in enumerate(FIGURES.items()):
            for column, axis in enumerate(axes):
                panel = page.add_subplot(2, len(axes), 1 + column + place * len(axes))
                panel.spines[["top", "right"]].set_visible(False)
                lines = {who: line for who in WHO if (line := curve(found, axis, who, figure))}
                for above, (who, line) in enumerate(sorted(lines.items(), key=lambda each: list(each[1].values())[-1])):
                    panel.loglog(list(line), list(line.values()), "o-", color=colours[who], ms=3.5, lw=1.6, label=who)
                    panel.annotate(
                        f"{exponent(line):.2f}", list(line.items())[-1], (4, 6 * (2 * above - 1)), fontsize=8,
                        textcoords="offset points", va="center", color=colours[who],
                    )  # fmt: skip
                panel.margins(x=0.2, y=0.1)
                for side, (low, high) in ((panel.xaxis, panel.get_xlim()), (panel.yaxis, panel.get_ylim())):
                    wide = math.log10(high / low) > 2
                    side.set_major_locator(LogLocator(subs=(1.0,) if wide else (1.0, 2.0, 5.0), numticks=9))
                    side.set_minor_locator(NullLocator())
                    side.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
                if place:
                    panel.set_xlabel("rows of data" if axis == "rows" else axis)
                if not column:
                    panel.set_ylabel(name)
                    if not place:
                        panel.legend(frameon=False, fontsize=9)
        page.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--axes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=Path("runs/growth.csv"))
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--only-report", action="store_true", help="print what is in the CSV")
    parser.add_argument("--measure", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        who, axis, size, file, folder = arguments.measure
        print(json.dumps(measure(who, axis, int(size), file, folder)))
        return
    found = read(arguments.csv) if arguments.only_report else run(arguments)
    report(found)
    if arguments.picture:
        draw(found, arguments.picture)


if __name__ == "__main__":
    main()
