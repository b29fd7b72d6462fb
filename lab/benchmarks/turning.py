"""Do steps turn back? What the last update would gain if it were made once more, by the next batch's gradient.

    python -m lab.benchmarks.turning addition-high [--prompts 16] [--steps 120] [--rule in-steps] [--seed 0]

Trains a warm-started policy with a measured rate, today's or one of `lab.results.tried`, and prints for each eighth of
the run the mean reward, the KL of a step, what updates promise by the gradient that made them, and what they would gain
by the next one, with its standard error. Where the latter is below 0, steps are longer than theorem 4's.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from lab.results.policies import recipe_of
from lab.results.tried import TRIED
from oblrpo.estimators.averages import MomentAverage
from oblrpo.estimators.measured_rate import UPDATE, MeasuredRate
from oblrpo.estimators.measuring import Step
from oblrpo.estimators.moments import inner
from oblrpo.estimators.schedule import MEASURED_RATES, BatchFacts
from oblrpo.report.console import Progress
from oblrpo.settings import TrainConfig, load_recipe, with_settings
from oblrpo.trainer.loop import Trainer

Seen = list[dict[str, float]]


def watching(rule: type[MeasuredRate], seen: Seen) -> type[MeasuredRate]:
    """The same rule, which notes what every update promised and would gain."""

    class Watching(rule):  # type: ignore[misc,valid-type]
        def factor(self, average: MomentAverage, batch: BatchFacts) -> float:
            state, groups = self.gauge.optimizer.state, self.gauge.optimizer.param_groups
            parameters = [p for group in groups for p in group["params"]]
            self.gradients = [(p, p.grad.clone()) for p in parameters if p.grad is not None]
            if seen:
                seen[-1]["gain"] = -inner((g, state[p][UPDATE]) for p, g in self.gradients)
            factor: float = super().factor(average, batch)
            return factor

        def limit_step(self, change: Callable[[], Tensor], used: float | None) -> Step:
            taken: Step = super().limit_step(change, used)
            state = self.gauge.optimizer.state
            promise = -inner((g, state[p][UPDATE]) for p, g in self.gradients)
            seen.append({"kl": taken.kl, "promise": promise, "target": self.target_kl})
            return taken

    return Watching


def run(args: argparse.Namespace) -> tuple[list[dict[str, Any]], Seen]:
    """The run's metrics after step 0, and what was seen of each update but the last."""
    seen: Seen = []
    MEASURED_RATES["auto"] = watching(TRIED.get(args.rule, MeasuredRate), seen)
    recipe, begins = recipe_of(args.policy, args.seed, args.folder)
    given = begins | {
        "steps": args.steps, "prompts_per_step": args.prompts, "num_generations": 4, "seed": args.seed,
        "learning_rate": 1e-5, "eval_steps": 0, "ledger_steps": 0, "threads": 1,
        "output": str(args.folder / f"turning_{args.policy}_{args.prompts}_{args.rule}_{args.seed}"),
    }  # fmt: skip
    trainer = Trainer(with_settings(load_recipe(recipe, TrainConfig()), given, args.policy))
    with Progress(Console(quiet=True)) as progress:
        trainer.run(progress)
    return trainer.folder.read_metrics()[1:], seen


def table(rows: list[dict[str, Any]], seen: Seen) -> str:
    """A line for each eighth of the run."""
    lines = ["| steps | reward | KL | promised | gain once more | KL meant |", "|---|---|---|---|---|---|"]
    size = math.ceil(len(rows) / 8)
    for begin in range(0, len(rows), size):
        part, updates = rows[begin : begin + size], seen[begin : begin + size]
        gains = [update["gain"] for update in updates if "gain" in update]
        error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
        means = [statistics.fmean(update[name] for update in updates) for name in ("kl", "promise", "target")]
        lines.append(
            f"| {begin + 1} to {begin + len(part)} | {statistics.fmean(row['reward'] for row in part):.3f} "
            f"| {means[0]:.3f} | {means[1]:.4f} | {statistics.fmean(gains):.4f} +- {error:.4f} | {means[2]:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("policy", help="of lab.results.policies, such as addition-high")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rule", default="auto", choices=["auto", *TRIED])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=Path("runs/turning"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(table(*run(args)))


if __name__ == "__main__":
    main()
