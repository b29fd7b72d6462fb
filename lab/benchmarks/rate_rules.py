"""Rules for the learning rate on policies so small that their expected reward is known exactly.

    python -m lab.benchmarks.rate_rules [--rules off:rate=0.1 auto kl:kl=0.02 ...] [--completions 1280 15360] \\
        [--seeds 5]
    python -m lab.benchmarks.rate_rules --csv docs/results/rate_rules.csv --only-report

The policy answers each of 512 prompts of 24 features with 4 tokens out of 8, a linear softmax each (768 weights). The
reward of `sparse` is 1 if all four tokens are right, that of `graded` the share that is. In `long-sparse` and
`long-graded` 44 tokens follow that no reward looks at (9,216 weights). Every step takes P prompts of 4 completions,
RLOO's baseline and AdamW; a run ends after a number of completions, and its figure is the policy's exact expected
reward then. A rule is a mode of `SNRSchedule` with settings: `off:rate=0.1` is a fixed rate. `blind` is the measured
rate that does not know how long outputs are, `unguided` the one that sees no slope, `in-steps` the one before, which
counts updates. Rules without a rate start at each of `--starts`. Prints each rule's mean over that of the
best fixed rate of the point, and over all points the first rule that has no rate less the others, seed by seed.
Every line of the CSV is a run; finished runs are not repeated.
"""

from __future__ import annotations

import argparse
import csv
import statistics
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.benchmarks.runs import mean_interval
from lab.results.tried import TRIED
from oblrpo.estimators import Moments, SNRSchedule, moments
from oblrpo.estimators.averages import MomentAverage
from oblrpo.estimators.measured_rate import MeasuredRate
from oblrpo.estimators.schedule import MEASURED_RATES, BatchFacts
from oblrpo.tables.algorithms import SCHEDULES

FEATURES, JUDGED, CHOICES, PROMPTS, GENERATIONS = 24, 4, 8, 512, 4
WORLDS = {"sparse": 4, "graded": 4, "long-sparse": 48, "long-graded": 48}
"""How many tokens an answer has, of which the first `JUDGED` are rewarded."""
SPREAD = {"sparse": 0.5, "graded": 1.0}
"""How far the first policy is from one that is right: the size of a normal disturbance of its weights."""
FIXED = [f"off:rate={rate:g}" for rate in (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)]


class Blind(MeasuredRate):
    """The control: outputs count as one token, however long they are."""

    def factor(self, average: MomentAverage, batch: BatchFacts) -> float:
        return super().factor(average, batch._replace(mean_length=None))


class Point(NamedTuple):
    """What a run is of; the first columns of the CSV."""

    rule: str
    start: str
    """The rate that a rule starts at; empty for a fixed one."""
    world: str
    completions: int
    prompts: int
    seed: int


class World:
    """Prompts, their right answers, and a policy."""

    def __init__(self, name: str, seed: int) -> None:
        self.reward, self.length = name.removeprefix("long-"), WORLDS[name]
        self.random = torch.Generator().manual_seed(seed)
        spread = torch.randn(FEATURES, generator=self.random).exp()
        self.features_QF = self._normal(PROMPTS, FEATURES) * spread
        self.features_QF /= self.features_QF.norm(dim=1, keepdim=True)
        right = self._normal(self.length, CHOICES, FEATURES)
        self.answers_QT = torch.einsum("tvf,qf->qtv", right, self.features_QF).argmax(-1)
        self.weights = torch.nn.Parameter(3 * (right + SPREAD[self.reward] * self._normal(*right.shape)))

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def logps(self, features_PF: Tensor) -> Tensor:
        """Of every choice, (P, T, V)."""
        return torch.einsum("tvf,pf->ptv", self.weights, features_PF).log_softmax(-1)

    @torch.no_grad()
    def expected_reward(self) -> float:
        right_QT = self.logps(self.features_QF).gather(-1, self.answers_QT[..., None])[..., 0].exp()
        return float(self._rewarded(right_QT).mean())

    def _rewarded(self, right_T: Tensor) -> Tensor:
        """The reward of answers whose tokens are right, or right with a chance; the last axis is the tokens'."""
        judged_T = right_T[..., :JUDGED]
        return judged_T.prod(-1) if self.reward == "sparse" else judged_T.mean(-1)

    def step(self, P: int, schedule: SNRSchedule) -> None:
        """Sample a batch, take the gradient and its moments, update and limit_step."""
        measured, change_ST = self.gradient(P)
        schedule.step(measured, mean_length=self.length)
        schedule.optimizer.step()
        schedule.limit_step(change_ST)

    def gradient(self, P: int) -> tuple[Moments, Callable[[], Tensor]]:
        """Sample a batch and set the weights' gradient; its moments, and how each token's log pi changes after."""
        index_P = torch.randint(PROMPTS, (P,), generator=self.random)
        features_PF, answers_P1T = self.features_QF[index_P], self.answers_QT[index_P][:, None]
        with torch.no_grad():
            logps_PTV = self.logps(features_PF)
        probs_PTV = logps_PTV.exp()
        drawn = torch.multinomial(probs_PTV.flatten(0, 1), GENERATIONS, True, generator=self.random)
        tokens_PGT = drawn.view(P, self.length, GENERATIONS).transpose(1, 2)
        rewards_PG = self._rewarded((tokens_PGT == answers_P1T).float())
        others_PG = (rewards_PG.sum(1, keepdim=True) - rewards_PG) / (GENERATIONS - 1)
        # The score of a token in its logits is its one-hot vector less the probabilities.
        scores_PGTV = torch.nn.functional.one_hot(tokens_PGT, CHOICES) - probs_PTV[:, None]
        pull_PTV = torch.einsum("pg,pgtv->ptv", (rewards_PG - others_PG) / GENERATIONS, scores_PGTV)
        self.weights.grad = -torch.einsum("ptv,pf->tvf", pull_PTV, features_PF) / P
        norm2_P = pull_PTV.square().sum((1, 2)) * features_PF.square().sum(1)

        def change_ST() -> Tensor:
            changed_PGTV = (self.logps(features_PF) - logps_PTV)[:, None].expand(-1, GENERATIONS, -1, -1)
            return changed_PGTV.gather(-1, tokens_PGT[..., None])[..., 0].flatten(0, 1)

        return moments(norm2_P, self.weights.grad.square().sum()), change_ST


def run(point: Point) -> tuple[Point, float]:
    """The exact expected reward of the policy that a run ends with."""
    torch.set_num_threads(1)
    MEASURED_RATES.update(blind=Blind, **TRIED)
    SCHEDULES.update(dict.fromkeys(("blind", *TRIED), SCHEDULES["auto"]))
    mode, _, settings = point.rule.partition(":")
    given: dict[str, Any] = {name: float(value) for name, value in (s.split("=") for s in settings.split(",") if s)}
    world = World(point.world, point.seed)
    rate = given.pop("rate", None) or float(point.start)
    schedule = SNRSchedule(torch.optim.AdamW([world.weights], lr=rate, weight_decay=0.0), mode, **given)
    for _ in range(point.completions // (point.prompts * GENERATIONS)):
        world.step(point.prompts, schedule)
    return point, world.expected_reward()


def run_all(missing: list[Point], processes: int) -> Iterator[tuple[Point, float]]:
    """Every run as it ends, so many at a time."""
    if processes == 1:
        yield from map(run, missing)
    elif missing:
        with get_context("spawn").Pool(processes) as pool:
            yield from pool.imap_unordered(run, missing, chunksize=4)


def points(args: argparse.Namespace) -> Iterator[Point]:
    for world in args.worlds:
        for completions in args.completions:
            for P in args.prompts:
                for rule in args.rules:
                    for start in [""] if "rate=" in rule else args.starts:
                        yield from (Point(rule, start, world, completions, P, seed) for seed in range(args.seeds))


def read(path: Path) -> dict[Point, float]:
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = {}
    for row in rows:
        sizes = (int(row[name]) for name in ("completions", "prompts", "seed"))
        found[Point(row["rule"], row["start"], row["world"], *sizes)] = float(row["reward"])
    return found


def write(path: Path, found: dict[Point, float]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([*Point._fields, "reward"])
        writer.writerows([*point, f"{reward:.4f}"] for point, reward in found.items())


Best = dict[tuple[str, int, int], tuple[float, str]]
"""The reward of the best fixed rate, and the rate, by world, completions and prompts."""


def best_fixed(args: argparse.Namespace, found: dict[Point, float]) -> Best:
    """The fixed rate that is best in the mean over seeds, at every point."""
    seeds: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for point in points(args):
        if "rate=" in point.rule and point in found:
            by_rate = seeds.setdefault((point.world, point.completions, point.prompts), {})
            by_rate.setdefault(point.rule.partition("=")[2], []).append(found[point])
    return {
        place: max((statistics.mean(rewards), rate) for rate, rewards in by_rate.items())
        for place, by_rate in seeds.items()
    }


def over_best(args: argparse.Namespace, found: dict[Point, float], best: Best) -> dict[Point, float]:
    """The reward of every run that is not at a fixed rate, over that of the best one of its point."""
    return {
        point: found[point] / best[point.world, point.completions, point.prompts][0]
        for point in points(args)
        if "rate=" not in point.rule and point in found
    }


def report(args: argparse.Namespace, found: dict[Point, float]) -> None:
    """For each world and length a table of every rule over the best fixed rate; then the first rule less the others."""
    best = best_fixed(args, found)
    shares = over_best(args, found, best)
    for world in args.worlds:
        for completions in args.completions:
            print(f"\n{world}, {completions} completions\n")
            print("| rule | from | " + " | ".join(f"{P} prompts" for P in args.prompts) + " | mean | least |")
            print("|" + "---|" * (len(args.prompts) + 4))
            fixed = [best[world, completions, P] for P in args.prompts]
            print("| best fixed rate | | " + " | ".join(f"{reward:.3f} at {rate}" for reward, rate in fixed) + " | | |")
            for rule, start in rules_of(args):
                cells = [
                    statistics.mean(
                        shares[Point(rule, start, world, completions, P, seed)] for seed in range(args.seeds)
                    )
                    for P in args.prompts
                ]
                cells += [statistics.mean(cells), min(cells)]
                print(f"| {rule} | {start} | " + " | ".join(f"{share:.3f}" for share in cells) + " |")
    for completions in args.completions:
        report_pooled(args, shares, completions)


def report_pooled(args: argparse.Namespace, shares: dict[Point, float], completions: int) -> None:
    """Every rule's mean over all points of a length, and the first one less it, seed by seed."""
    print(f"\nall rewards and batches, {completions} completions\n")
    print("| rule | from | mean | first less it |\n|---|---|---|---|")
    means = {
        (rule, start): [
            statistics.mean(
                shares[Point(rule, start, world, completions, P, seed)] for world in args.worlds for P in args.prompts
            )
            for seed in range(args.seeds)
        ]
        for rule, start in rules_of(args)
    }
    first = next(iter(means.values()))
    for (rule, start), by_seed in means.items():
        less = [mine - other for mine, other in zip(first, by_seed, strict=True)]
        print(f"| {rule} | {start} | {statistics.mean(by_seed):.3f} | {mean_interval(less)} |")


def rules_of(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The rules that are compared with fixed rates, from each of their starts."""
    return [(rule, start) for rule in args.rules if "rate=" not in rule for start in args.starts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rules", nargs="+", default=[*FIXED, "auto", "blind", "kl"])
    parser.add_argument("--starts", nargs="+", default=["1e-4", "1e-2", "1"])
    parser.add_argument("--worlds", nargs="+", choices=list(WORLDS), default=list(WORLDS))
    parser.add_argument("--completions", nargs="+", type=int, default=[15360])
    parser.add_argument("--prompts", nargs="+", type=int, default=[4, 8, 16, 32, 64, 128, 256])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--csv", type=Path, default=Path("runs/rate_rules.csv"))
    parser.add_argument("--only-report", action="store_true", help="print what the CSV has")
    args = parser.parse_args()
    found = read(args.csv)
    missing = [] if args.only_report else [point for point in points(args) if point not in found]
    for done, (point, reward) in enumerate(run_all(missing, args.processes), start=1):
        found[point] = round(reward, 4)  # as the CSV has it
        if done % 100 == 0 or done == len(missing):
            write(args.csv, found)
    report(args, found)


if __name__ == "__main__":
    main()
