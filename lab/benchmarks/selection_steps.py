"""What a step costs that trains on what pulls, over one that trains on everything and over one of TRL's GRPO.

    python -m lab.benchmarks.selection_steps runs/selection/oblrpo_shrunk_*/checkpoints/step_120 [--steps 10]

Every policy that is given (such as those that `lab.benchmarks.selection` ends with) is trained on for a few steps by
every contender, in one process and one thread: the contenders take turns step by step, each with a copy of its own, so
that other work on the machine hits all alike. A step of ours is sampling, rewards, gradient and update, without ledger,
checkpoint and files; every tenth takes exact norms, as it does by default. TRL's GRPO (left out where TRL is not
installed) has as many steps at a stretch, and its clock stands still while accuracy is measured. CPU seconds. After
each policy's steps its outputs are drawn --draws times on one batch, and the mean square of what that changes in the
gradient is set against what the ledger says of the same batch.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from lab.benchmarks import trl_run
from lab.benchmarks.against_trl import table
from lab.benchmarks.runs import mean_interval
from oblrpo.policy import load_policy
from oblrpo.rewards import Rewards
from oblrpo.seeds import seed_of
from oblrpo.settings import TrainConfig, load_recipe, with_settings
from oblrpo.trainer import Learner
from oblrpo.trainer.learner import taken_of
from oblrpo.trainer.setup import make_learner, set_threads
from oblrpo.trainer.task import task_of

DRAWN = {"algorithm": "oblrpo_shrunk", "score_norms": "calibrated"}
CONTENDERS: dict[str, dict[str, str]] = {
    "rloo, all": {"algorithm": "rloo", "train_on": "all"},
    "rloo, exact skip": {"algorithm": "rloo"},
    "grpo, all": {"algorithm": "grpo", "train_on": "all"},
    "grpo, exact skip": {"algorithm": "grpo"},
    "shrunk, all": {"algorithm": "oblrpo_shrunk"},
    "shrunk, compute-optimal": DRAWN | {"train_on": "compute-optimal"},
    "TRL's GRPO": {},
}
OVER = {"rloo, exact skip": "rloo, all", "grpo, exact skip": "grpo, all"} | dict.fromkeys(
    ("shrunk, compute-optimal",), "shrunk, all"
)
"""What each saves over."""
COLUMNS = ("seed", "contender", "seconds", "trained", "predicted", "measured", "of_gradient", "by_draws")
Row = dict[str, Any]


def learner_of(recipe: str, model: str, seed: int, settings: dict[str, str]) -> Learner:
    """A learner of a recipe's task with a policy of its own."""
    given = {"model": model, "warm_start_steps": 0, "seed": seed, "ledger_steps": 1000} | settings
    config = with_settings(load_recipe(recipe, TrainConfig()), given, recipe)
    policy = load_policy(model, config.policy)
    set_threads(1, policy)
    task = task_of(config)
    learner = make_learner(policy, Rewards(task, config.task.rewards), config)
    learner.ledger.exact = True
    return learner


def seconds_of_ours(arguments: argparse.Namespace, learners: dict[str, Learner], seed: int) -> list[Row]:
    """CPU seconds of each contender's steps, in turns; the first two, which also make buffers, are left out."""
    names, rows = list(learners), []
    taken: dict[str, list[float]] = {name: [] for name in names}
    trained: dict[str, list[float]] = {name: [] for name in names}
    for step in range(2, arguments.steps + 4):
        for name in names[step % len(names) :] + names[: step % len(names)]:
            learner = learners[name]
            problems = learner.rewards.task.train_batch(seed_of(seed, step) % 2**31, learner.rollout.prompts_per_step)
            torch.manual_seed(seed_of(seed, step))
            begun = time.process_time()
            done = learner.step(problems, step)
            taken[name].append(time.process_time() - begun)
            trained[name] += [update.gradient.trained for update in done.updates]
    for name in names:
        rows.append({"contender": name, "seconds": statistics.mean(taken[name][2:]),
                     "trained": statistics.mean(trained[name][2:])})  # fmt: skip
    return rows


def seconds_of_trl(arguments: argparse.Namespace, model: str, seed: int) -> float:
    """CPU seconds of a step of TRL's GRPO."""
    words = ["trl-grpo", model, tempfile.mkdtemp(), "--recipe", arguments.recipe, "--seed", str(seed)]
    words += ["--steps", str(arguments.steps), "--every", str(arguments.steps), "--eval-prompts", "2"]
    given = trl_run.parser().parse_args(words)
    config = trl_run.config_of(given)
    clock = trl_run.Clock(config.rollout.prompts_per_step * config.rollout.num_generations)
    trl_run.run_trl(given, config, clock)
    return clock.rows[-1]["cpu_seconds"] / arguments.steps


def variance(learner: Learner, seed: int, draws: int) -> dict[str, float]:
    """What drawing adds to the gradient's variance on one batch: predicted, by the ledger, and over many draws."""
    torch.manual_seed(seed)
    problems = learner.rewards.task.train_batch(seed_of(seed, 0) % 2**31, learner.rollout.prompts_per_step)
    batch = learner.batch(learner.sample(problems))
    learner.ledger.every = 1
    learner.ledger.metrics(batch, learner.baseline.prior, 1)
    drawn = learner.gradient(batch, 1)
    batch_drawn = taken_of(drawn)
    found = learner.ledger.of_draw(batch_drawn)
    learner.train_on, train_on = "all", learner.train_on
    whole = learner.gradient(batch, 1)
    learner.train_on = train_on
    mean = [p.grad.clone() for p in learner.policy.parameters if p.grad is not None]
    squares = []
    for _ in range(draws):
        learner.gradient(batch, 1)
        grads = [p.grad for p in learner.policy.parameters if p.grad is not None]
        squares.append(sum(float((one - all_).square().sum()) for one, all_ in zip(grads, mean, strict=True)))
    assert batch_drawn.draw is not None
    return {
        "predicted": batch_drawn.draw.added,
        "measured": found["added_variance/measured"],
        "of_gradient": found["added_variance/of_gradient"],
        "by_draws": statistics.mean(squares) / (whole.moments.trace_cov / whole.moments.n),
    }


def report(kept: list[Row]) -> str:
    """Seconds of each contender and what they are over others'; what drawing adds to the variance."""
    by_name = {name: {str(r["seed"]): r for r in kept if r["contender"] == name} for name in CONTENDERS}
    seconds = {name: {seed: float(row["seconds"]) for seed, row in of.items()} for name, of in by_name.items()}

    def times(name: str, over: str) -> str:
        mine, theirs = seconds[name], seconds.get(over, {})
        return mean_interval([theirs[seed] / mine[seed] for seed in mine if seed in theirs])

    lines = [
        [name, mean_interval([float(row["trained"]) for row in of.values() if row["trained"] != ""]),
         mean_interval(list(seconds[name].values())), times(name, OVER.get(name, "")), times(name, "TRL's GRPO")]
        for name, of in by_name.items() if of
    ]  # fmt: skip
    titles = ["", "share trained on", "CPU s a step", "times as fast as with all", "as TRL's GRPO"]
    keys = ("predicted", "measured", "of_gradient", "by_draws")
    added = [
        [name, *(mean_interval([float(row[key]) for row in of.values()]) for key in keys)]
        for name, of in by_name.items() if of and all(row.get("predicted") for row in of.values())
    ]  # fmt: skip
    told = ["added variance", "predicted", "measured", "over the gradient's, ledger", "the same, over draws"]
    return table(titles, lines) + "\n\n" + table(told, added)


def measured(arguments: argparse.Namespace) -> list[Row]:
    """A row for every policy and contender."""
    kept: list[Row] = []
    for seed, model in enumerate(arguments.models):
        ours = {name: settings for name, settings in CONTENDERS.items() if settings}
        learners = {name: learner_of(arguments.recipe, model, seed, settings) for name, settings in ours.items()}
        for row in seconds_of_ours(arguments, learners, seed):
            learner = learners[str(row["contender"])]
            further = variance(learner, seed, arguments.draws) if learner.selection.draws else {}
            kept.append({"seed": seed, **row, **further})
        if importlib.util.find_spec("trl"):
            trl = seconds_of_trl(arguments, model, seed)
            kept.append({"seed": seed, "contender": "TRL's GRPO", "seconds": trl, "trained": 1.0})
        print(model, *(f"{row['contender']}: {row['seconds']:.3f}" for row in kept if row["seed"] == seed), flush=True)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", help="policies, each a seed")
    parser.add_argument("--recipe", default="demo")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--csv", type=Path, default=Path("runs/selection_steps.csv"))
    parser.add_argument("--only-report", action="store_true", help="print what the CSV holds")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.only_report:
        kept = measured(arguments)
        arguments.csv.parent.mkdir(parents=True, exist_ok=True)
        with arguments.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(kept)
    with arguments.csv.open(newline="") as file:
        print("Means over policies with 95 % intervals (Student's t).\n")
        print(report(list(csv.DictReader(file))))


if __name__ == "__main__":
    main()
