"""How well forward-only proxies stand in for exact score norms, along the demo's own training.

    python -m lab.benchmarks.proxies --folder runs/proxies --seeds 3

Trains the demo once a seed with exact norms, looking at every step (`--look-steps 1`), and prints the agreement:
the correlation of log proxy and log norm within prompts, the calibrated proxy's before it has seen the batch. Runs that
are there already are read, not repeated.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

PROXIES = ("length", "logit", "calibrated")


def run(folder: Path, seed: int) -> list[dict]:
    output = folder / f"seed_{seed}"
    if not (output / "report.html").exists():
        command = [sys.executable, "-c", "from oblrpo.cli import main; main()", "train", "demo", "--seed", str(seed)]
        subprocess.run([*command, "--look-steps", "1", "--output", str(output)], check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()][1:]


def mean(rows: list[dict], proxy: str) -> float:
    values = [row.get(f"score_norm2/agreement_{proxy}") for row in rows]
    return statistics.mean(value for value in values if value is not None and not math.isnan(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("runs/proxies"))
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    print("| seed | steps | " + " | ".join(PROXIES) + " |\n|---|---|" + "---|" * len(PROXIES))
    for seed in range(arguments.seeds):
        rows = run(arguments.folder, seed)
        for name, part in (("2 - 20", rows[1:20]), ("all from 2", rows[1:]), ("last 20", rows[-20:])):
            print(f"| {seed} | {name} | " + " | ".join(f"{mean(part, proxy):.3f}" for proxy in PROXIES) + " |")


if __name__ == "__main__":
    main()
