"""What the command line takes before a run begins, in CPU seconds beside what it cannot do without.

    python -m lab.benchmarks.door --model models/smollm2-135m-instruct

A dry run is set beside a program that imports torch and transformers and loads the model, a refused value beside an
unknown flag. Each round calls them in turn, in processes of their own with one thread; the ratios are of medians.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys

LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32), AutoTokenizer.from_pretrained(sys.argv[1])
"""
DOOR = "from oblrpo.cli import main; main()"


def cpu_seconds(*arguments: str) -> float:
    """User and system time of a Python process."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", *arguments], env=environment, capture_output=True, text=True)
    assert done.returncode in {0, 2}, done.stderr  # 2: refused in a sentence
    return spent() - before


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/smollm2-135m-instruct")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    dry = ["train", "--task", "arithmetic", "--max-completion-length", "4", "--model", args.model, "--dry-run"]
    commands = {
        "torch, transformers, the model": (LOAD, args.model),
        "train --dry-run": (DOOR, *dry),
        "train --nope 1": (DOOR, "train", "--nope", "1"),
        "train --temperature -1": (DOOR, "train", "--temperature", "-1"),
        "train --algorithm nope": (DOOR, "train", "--algorithm", "nope"),
        "train --help": (DOOR, "train", "--help"),
        "evaluate nope": (DOOR, "evaluate", "nope"),
    }
    taken: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(args.rounds):
        for name, words in commands.items():
            taken[name].append(cpu_seconds(*words))
    median = {name: statistics.median(seconds) for name, seconds in taken.items()}
    load, unknown = (median[name] for name in ("torch, transformers, the model", "train --nope 1"))
    print("| command | CPU seconds | times what it is set beside |\n|---|---|---|")
    for name, seconds in median.items():
        beside = load if name in ("torch, transformers, the model", "train --dry-run") else unknown
        print(f"| `{name}` | {seconds:.2f} | {seconds / beside:.2f} |")


if __name__ == "__main__":
    main()
