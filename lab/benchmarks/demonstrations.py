"""Rows of prompt and completion for `oblrpo train --sft-data`, from a task's own demonstrations.

    python -m lab.benchmarks.demonstrations --task-args '{min_terms: 2, max_terms: 4, largest: 20}' \\
        --rows 400 --noise 0.1 > lab/recipes/sums.jsonl

The problems are of the task's training part, without repetition; each step of a demonstration is wrong with the
probability --noise. The rows are a function of the arguments alone.
"""

import argparse
import json
import random
from collections.abc import Iterator

from lab.tasks import ADDITION
from oblrpo.settings import read_yaml
from oblrpo.tasks import make_task


def rows_of(task: str, task_args: dict, rows: int, noise: float, seed: int) -> Iterator[dict[str, str]]:
    made = make_task(task, seed, **task_args)
    rng = random.Random(f"rows/{seed}")
    for problem in made.train_batch(-1, rows):
        yield {"prompt": problem.prompt, "completion": made.demonstration(problem, rng, noise)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--task", default=ADDITION)
    parser.add_argument("--task-args", default="{}", help="YAML, as of `oblrpo train`")
    parser.add_argument("--rows", type=int, default=400)
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    for row in rows_of(asked.task, read_yaml(asked.task_args, "--task-args"), asked.rows, asked.noise, asked.seed):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
