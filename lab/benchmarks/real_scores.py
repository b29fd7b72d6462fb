"""What score norms of a real policy are like, and what each baseline makes of them, on batches of a recipe.

    python -m lab.benchmarks.real_scores MODEL --recipe RECIPE [--batches 4] [--prompts 8] [--seed 0]

Draws the recipe's own batches from the policy in MODEL, and prints
- the exponent a of ||grad log pi||^2 ~ T^a within prompts, by least squares on logarithms; its 95 % interval counts
  each prompt as one observation. OPO takes a = 1;
- how well each forward-only proxy agrees with the exact norms within prompts: the correlation of logarithms, and the
  root mean square error in nats. The calibrated one is asked before it sees a batch;
- the gradient's variance under every unbiased baseline over RLOO's on the same batch: the geometric mean of batches
  with a 95 % interval by Student's t. One batch more is drawn first, from which the shrunk baseline's prior and the
  calibrated proxy learn.
"""

import argparse
import math
import time
from dataclasses import dataclass, replace

import torch

from oblrpo.estimators import BASELINES, Prior
from oblrpo.intervals import geometric_mean, mean, student_t
from oblrpo.policy import load_policy
from oblrpo.policy.sequences import MicroBatches, rows_of
from oblrpo.rewards import Rewards
from oblrpo.rollout import sample
from oblrpo.scores import PROXIES, CalibratedProxy, Features, ScoreTape, agreement
from oblrpo.scores.proxies import log_error
from oblrpo.settings import TrainConfig, load_recipe
from oblrpo.step import Batch
from oblrpo.step.flow import ImportanceWeights
from oblrpo.step.look import Looks
from oblrpo.tables.algorithms import RATIOS
from oblrpo.trainer.task import task_of


@dataclass(frozen=True)
class Drawn:
    """A batch of completions with what the tables need of it."""

    batch: Batch
    features: Features
    norm2_S: torch.Tensor


class Source:
    """Batches of a recipe's problems, answered by one policy."""

    def __init__(self, model: str, config: TrainConfig) -> None:
        self.policy = load_policy(model, replace(config.policy, model=model, device="cpu"))
        self.rollout = config.rollout
        self.micro_batches = MicroBatches(tokens=config.rollout.tokens_per_micro_batch)
        self.task = task_of(config)
        self.rewards, self.tape = Rewards(self.task), ScoreTape(self.policy.model)

    def draw(self, number: int) -> Drawn:
        """The batch of a number: sampled, rewarded, and scored exactly."""
        rollout, G = self.rollout, self.rollout.num_generations
        problems = self.task.train_batch(number, rollout.prompts_per_step)
        torch.manual_seed(number)
        prompts = [problem.prompt for problem in problems]
        rollouts = sample(self.policy, prompts, G, rollout.max_completion_length, rollout.temperature)
        rewards_PG, valid_PG = (torch.tensor(each) for each in self.rewards(problems, rollouts.completions))
        norm2_S, order, features = torch.zeros(rewards_PG.numel()), [], []
        for index_P in self.micro_batches.of(rollouts.sequences, G):
            rows_S = rows_of(index_P, G)
            with self.tape:
                logps = self.policy.logps(rollouts.sequences.at(rows_S), rollout.temperature)
                self.tape.record(logps.logps_S)
            norm2_S[rows_S] = self.tape.norm2()
            order.append(rows_S)
            features.append(logps.features)
        self.tape.forget()
        joined = Features.join(features).at(torch.cat(order).argsort())
        return Drawn(Batch.of(rollouts.sequences, rewards_PG, valid_PG), joined, norm2_S)


def exponent(batches: list[Drawn], G: int) -> str:
    """The slope of log norm2 on log length within prompts, with an interval over prompts."""
    both_SK = torch.cat([torch.stack([b.features.length_S.double(), b.norm2_S.double()], 1) for b in batches]).log()
    both_PGK = both_SK.view(-1, G, 2)
    x_PG, y_PG = (both_PGK - both_PGK.mean(1, keepdim=True)).unbind(2)
    varied_P = (x_PG != 0).any(1)
    x_PG, y_PG, P = x_PG[varied_P], y_PG[varied_P], int(varied_P.sum())
    if P < 2:
        return "Outputs of a prompt hardly differ in length: there is no exponent, and proxies by length say nothing."
    slope = float((x_PG * y_PG).sum() / x_PG.square().sum())
    pull_P = (x_PG * (y_PG - slope * x_PG)).sum(1)
    error = math.sqrt(float(pull_P.square().sum()) * P / (P - 1)) / float(x_PG.square().sum())
    explained = 1 - float((y_PG - slope * x_PG).square().sum() / y_PG.square().sum())
    lengths_S = torch.cat([b.features.length_S for b in batches])
    return (
        f"a = {slope:.2f} +- {student_t(P - 1) * error:.2f} over {P} prompts whose outputs differ in length; length "
        f"explains {explained:.2f} of the variance of log norms within them. Lengths: {lengths_S.min():.0f} to "
        f"{lengths_S.max():.0f} tokens, {lengths_S.mean():.1f} in the mean."
    )


def proxies(batches: list[Drawn], G: int, first: Drawn) -> None:
    """Print the agreement of each proxy, in the mean over batches."""
    calibrated = CalibratedProxy()
    calibrated.observe(first.features, first.norm2_S, G)
    found: dict[str, list[tuple[float, float]]] = {}
    for each in batches:
        weights = {name: of(each.features) for name, of in PROXIES.items()}
        weights["calibrated"] = calibrated.predict(each.features)
        for name, proxy_S in weights.items():
            both = agreement(proxy_S, each.norm2_S, G), log_error(proxy_S, each.norm2_S, G)
            found.setdefault(name, []).append(both)
        calibrated.observe(each.features, each.norm2_S, G)
    print("| proxy | correlation | error, nats |\n|---|---|---|")
    for name, pairs in found.items():
        print(f"| {name} | " + " | ".join(cell(list(values)) for values in zip(*pairs, strict=True)) + " |")


def cell(values: list[float]) -> str:
    """Mean and interval over batches; nothing where a batch has no spread to correlate."""
    if any(map(math.isnan, values)):
        return ""
    found = mean(values)
    return f"{found.value:.2f} +- {found.margin:.2f}"


def variances(source: Source, batches: list[Drawn], first: Drawn) -> None:
    """Print the variance of every unbiased baseline over RLOO's."""
    looks = Looks(source.policy, source.rollout.temperature, source.micro_batches)
    prior, ratios, shares = Prior(), {}, []
    for number, each in enumerate((first, *batches)):
        if number:
            looked = looks.at(each.batch, each.batch.count_P.nonzero().flatten(), number)
            ledger = looks.ledger(looked, each.batch, prior, ImportanceWeights(RATIOS["none"]))
            entries = {name: entry.variance for name, entry in ledger.entries.items() if BASELINES[name].unbiased}
            for name, variance in entries.items() if entries["rloo"] else ():
                ratios.setdefault(name, []).append(variance / entries["rloo"])
            of_rloo = ledger.entries["rloo"]
            shares.append(max(of_rloo.signal2, 0.0) / of_rloo.variance if of_rloo.variance > 0 else math.nan)
        prior.observe(each.batch.rewards_PG, each.norm2_S.view_as(each.batch.rewards_PG), each.batch.valid_PG)
        prior.next_step()
    print("| baseline | variance over RLOO's |\n|---|---|")
    for name, values in sorted(ratios.items(), key=lambda item: geometric_mean(item[1]).value):
        found = geometric_mean(values)
        print(f"| {name} | {found.value:.3f} ({found.low:.3f} to {found.high:.3f}) |")
    print(f"\nN SNR under RLOO, batch by batch: {', '.join(f'{share:.2f}' for share in shares)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--recipe", default="smollm2-arithmetic")
    parser.add_argument("--batches", type=int, default=4, help="at least 2, for intervals")
    parser.add_argument("--prompts", type=int)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    begun = time.perf_counter()
    config = load_recipe(arguments.recipe, TrainConfig())
    rollout = replace(config.rollout, prompts_per_step=arguments.prompts or config.rollout.prompts_per_step)
    config = replace(config, rollout=rollout, run=replace(config.run, seed=arguments.seed))
    source = Source(arguments.model, config)
    first, *batches = (source.draw(1 + number) for number in range(arguments.batches + 1))
    G, rewards = rollout.num_generations, torch.cat([each.batch.rewards_PG for each in batches])
    print(
        f"{arguments.model} on {arguments.recipe}: {arguments.batches} batches of {rollout.prompts_per_step} prompts x "
        f"{G}, seed {arguments.seed}, mean reward {rewards.mean():.3f}\n\n{exponent(batches, G)}\n"
    )
    proxies(batches, G, first)
    print()
    variances(source, batches, first)
    print(f"\n{time.perf_counter() - begun:.0f} s")


if __name__ == "__main__":
    main()
