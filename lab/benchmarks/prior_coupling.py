"""How much too high `moments` finds the signal under `oblr_shrunk`, whose prior couples the prompts of a batch.

    python -m lab.benchmarks.prior_coupling [--sizes 2 3 4 8 16 32] [--outputs 4] [--runs 400] [--steps 60] [--seed 0]

The policy is a softmax of features over eight outputs of each of 64 prompts, so that the true signal ||grad J||^2 is
known. Many runs draw batches one after another, each with the prior that it keeps. With a prior of earlier steps alone
the prompts are independent, and the estimate of the signal is unbiased. Let d_i be by how much prompt i's gradient
differs from that. Given the outputs of the other prompts its mean is 0, so that the signal is too high by the mean of
<d_i, d_k> over pairs of prompts. Other runs keep a prior of earlier steps alone: what is their gradient's noise?
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lab.theory.worlds import World, linear_bandit
from oblrpo.estimators import Prior
from oblrpo.estimators.baselines import STRENGTHS, shrunk

MEMORY = 0.8
SETTLE = 20
"""Steps until the prior's memory is full (0.8^20 = 0.01)."""


@dataclass
class Priors:
    """The `Prior` of each of R runs, all of them at once; R is an axis before P here."""

    runs: int
    past_only: bool = False
    sums_R13: Tensor = field(init=False)
    risk_RN: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums_R13 = torch.zeros(self.runs, 1, 3, dtype=torch.float64)
        self.risk_RN = torch.zeros(self.runs, len(STRENGTHS), dtype=torch.float64)

    def baselines(self, rewards_RPG: Tensor, norm2_RPG: Tensor, past_only: bool) -> Tensor:
        """The baselines of `oblr_shrunk`, (R, P, G)."""
        chosen_R = torch.tensor(STRENGTHS, dtype=torch.float64)[self.risk_RN.argmin(1)]
        strength_R = torch.where(self.risk_RN.any(1), chosen_R, Prior.FIRST)
        return self._shrunk(rewards_RPG, norm2_RPG, strength_R, past_only)

    def _shrunk(self, rewards_RPG: Tensor, norm2_RPG: Tensor, strength_R: Tensor, past_only: bool) -> Tensor:
        own_RP3 = torch.stack([torch.ones_like(norm2_RPG), norm2_RPG, norm2_RPG * rewards_RPG], -1).sum(2)
        known_RP3 = self.sums_R13 + (0 if past_only else 1) * (own_RP3.sum(1, keepdim=True) - own_RP3)
        count_N1, weight_N1, weighted_N1 = known_RP3.reshape(-1, 3, 1).clamp(min=1e-300).unbind(1)
        rewards_NG, norm2_NG = rewards_RPG.flatten(0, 1), norm2_RPG.flatten(0, 1)
        strength_N1 = strength_R.repeat_interleave(rewards_RPG.shape[1])[:, None]
        prior_N1 = torch.where(count_N1 > 1e-200, weight_N1 / count_N1, 0), weighted_N1 / weight_N1
        result_NG: Tensor = shrunk(rewards_NG, torch.ones_like(norm2_NG), norm2_NG, *prior_N1, strength_N1)  # type: ignore[arg-type]
        return result_NG.view_as(rewards_RPG)

    def next_step(self, rewards_RPG: Tensor, norm2_RPG: Tensor) -> None:
        """Take in a batch, and make an earlier step of it."""
        for index, strength in enumerate(STRENGTHS):
            strength_R = torch.full((self.runs,), strength, dtype=torch.float64)
            off_RPG = rewards_RPG - self._shrunk(rewards_RPG, norm2_RPG, strength_R, self.past_only)
            self.risk_RN[:, index] += (norm2_RPG * off_RPG.square()).sum((1, 2))
        own_RP3 = torch.stack([torch.ones_like(norm2_RPG), norm2_RPG, norm2_RPG * rewards_RPG], -1).sum(2)
        self.sums_R13 = MEMORY * (self.sums_R13 + own_RP3.sum(1, keepdim=True))
        self.risk_RN = MEMORY * self.risk_RN


class Tally:
    """Means over batches of one kind."""

    def __init__(self, true2: float) -> None:
        self.true2, self.excess_N, self.norm2_N, self.other2_N = true2, [], [], []  # type: ignore[var-annotated]

    def add(self, group_RPD: Tensor, before_RPD: Tensor, other_RPD: Tensor) -> None:
        """Take in the prompts' gradients: as they are, with earlier steps' prior, and of runs that have no other."""
        P, differ_RPD = group_RPD.shape[1], group_RPD - before_RPD
        pairs_R = differ_RPD.sum(1).square().sum(1) - differ_RPD.square().sum((1, 2))
        self.excess_N.append(pairs_R / (P * (P - 1)))
        self.norm2_N.append(group_RPD.mean(1).square().sum(1))
        self.other2_N.append(other_RPD.mean(1).square().sum(1))

    def row(self) -> str:
        """How many times too high the signal is, and N SNR by how much; the other prior's noise over this one's."""
        excess_N, norm2_N, other2_N = (torch.cat(each) for each in (self.excess_N, self.norm2_N, self.other2_N))
        excess, error = float(excess_N.mean()), 1.96 * float(excess_N.std()) / math.sqrt(len(excess_N))
        noise = float(norm2_N.mean()) - self.true2
        signal = f"{1 + excess / self.true2:.3f} +- {error / self.true2:.3f}"
        ratio = (float(other2_N.mean()) - self.true2) / noise
        return f"{signal} | {self.true2 / noise:.3f} | {excess / noise:+.4f} | {ratio:.3f}"


def batches_of(world: World, P: int, G: int, runs: int, steps: int, seed: int) -> tuple[Tally, Tally]:
    """Draw so many batches of each run; what the first says, and what those with a full memory say."""
    generator = torch.Generator().manual_seed(seed)
    prior, other = Priors(runs), Priors(runs, past_only=True)
    true2 = float(world.gradient_D.square().sum())
    first, later = Tally(true2), Tally(true2)
    for step in range(steps):
        prompt_RP = torch.randint(len(world.rewards_QO), (runs, P), generator=generator)
        output_NG = torch.multinomial(world.pi_QO[prompt_RP.flatten()], G, replacement=True, generator=generator)
        prompt_RP1, output_RPG = prompt_RP[..., None], output_NG.view(runs, P, G)
        rewards_RPG, norm2_RPG = world.rewards_QO[prompt_RP1, output_RPG], world.norm2_QO[prompt_RP1, output_RPG]
        score_RPGD = world.score_QOD[prompt_RP1, output_RPG]
        if step == 0 or step >= SETTLE:
            groups = [
                ((rewards_RPG - each.baselines(rewards_RPG, norm2_RPG, past))[..., None] * score_RPGD).mean(2)
                for each, past in ((prior, False), (prior, True), (other, True))
            ]
            (later if step else first).add(*groups)
        prior.next_step(rewards_RPG, norm2_RPG)
        other.next_step(rewards_RPG, norm2_RPG)
    return first, later


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 3, 4, 8, 16, 32])
    parser.add_argument("--outputs", type=int, default=4)
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = linear_bandit(args.seed, Q=64, O=8, D=16, scale=0.3)
    print(
        "| prompts | batch | signal, times the true one | N SNR | N SNR too high by | noise with earlier steps alone |"
    )
    print("|---|---|---|---|---|---|")
    for P in args.sizes:
        first = batches_of(world, P, args.outputs, 1000 * args.runs // P, 1, args.seed)[0]
        later = batches_of(world, P, args.outputs, args.runs, SETTLE + args.steps, args.seed)[1]
        print(f"| {P} | first | {first.row()} |")
        print(f"| {P} | later | {later.row()} |", flush=True)


if __name__ == "__main__":
    main()
