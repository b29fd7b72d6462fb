"""Whole steps of a recipe by several samplers: CPU seconds by parts, and how far a sampler is from the policy.

    python -m lab.benchmarks.sampler_steps runs/samplers --seeds 2 --samplers transformers vllm vllm-bfloat16 \\
        -- smollm2-arithmetic --model models/smollm2-135m-instruct --steps 8 --eval-steps 0

What follows -- goes to `oblrpo train`. Every run is a process of its own on one thread, whose clock counts CPU seconds.
The samplers take turns within a seed, each seed beginning with another. Finished runs stay and are not repeated. Times
are means over all steps but the first of a run. Sampling has the sync of an engine's weights in it, and a whole step
all but held-out accuracy, which is that of the last step that measured it, with its step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from oblrpo.runs import heldout_accuracy_of

CODE = """
import sys, time, types
from oblrpo import clock, cli
clock.time = types.SimpleNamespace(perf_counter=time.process_time)
sys.exit(cli.main())
"""
PARTS = ("sampling", "training", "ledger")
APART = ("sampling_logp_difference/mean", "sequence_logp_difference/mean", "importance_sampling_ratio/mean",
         "truncated_ratio")  # fmt: skip


def run(folder: Path, sampler: str, seed: int, words: list[str]) -> None:
    """One run; what it says goes to a file beside its folder."""
    name, _, dtype = sampler.partition("-")
    words = [*words, "--sampler", name, *(["--vllm-args", f"{{dtype: {dtype}}}"] if dtype else [])]
    unfinished = folder.with_name(f"{folder.name}.part")
    words += ["--seed", str(seed), "--threads", "1", "--output", str(unfinished)]
    shutil.rmtree(unfinished, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.log").open("w") as log:
        subprocess.run([sys.executable, "-c", CODE, "train", *words], stdout=log, stderr=log, check=True)
    unfinished.rename(folder)


def line(sampler: str, runs: list[list[dict[str, Any]]]) -> str:
    """A sampler's row of the table."""
    steps = [row for rows in runs for row in rows if row["step"] > 1]
    spent = [{key: value for key, value in row.items() if key.startswith("time/")} for row in steps]
    seconds = [mean(row.get(f"time/{part}", 0.0) for row in spent) for part in PARTS]
    seconds.append(mean(sum(row.values()) - row.get("time/evaluation", 0.0) for row in spent))
    apart = [mean(row[f"sampling/{key}"] for row in steps) if f"sampling/{key}" in steps[0] else None for key in APART]
    ends = [list(heldout_accuracy_of(rows).items())[-1:] for rows in runs]
    cells = [f"{sampler}, {len(runs)} x {steps[-1]['step']} steps", *(f"{each:.2f}" for each in seconds)]
    cells += ["" if each is None else f"{each:.3g}" for each in apart]
    return " | ".join([*cells, ", ".join(f"{value:.3f} ({step})" for end in ends for step, value in end)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samplers", nargs="+", default=["transformers", "vllm", "vllm-bfloat16"])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("words", nargs="+", help="after --: what `oblrpo train` is called with")
    arguments = parser.parse_args()
    samplers, found = arguments.samplers, {name: [] for name in arguments.samplers}
    for seed in range(arguments.seeds):
        for name in samplers[seed % len(samplers) :] + samplers[: seed % len(samplers)]:
            folder = arguments.folder / f"{name}_{seed}"
            if not folder.is_dir():
                run(folder, name, seed, arguments.words)
            found[name].append([json.loads(each) for each in (folder / "metrics.jsonl").read_text().splitlines()])
    print(f"| | {' | '.join([*PARTS, 'whole step', *APART, 'held-out'])} |\n|{'---|' * (len(PARTS) + len(APART) + 3)}")
    for name, runs in found.items():
        print(f"| {line(name, runs)} |")


if __name__ == "__main__":
    main()
