"""The noise of a batch gradient along a run, separated: between prompts, and within them.

    python -m lab.benchmarks.noise_split RUN ... [--prompts 240] [--outputs 32] [--seed 0]

The gradient of P prompts with G outputs each has the variance (B + W_G) / P. B is the trace of the covariance, over
prompts, of a prompt's expected gradient. W_G is the mean over prompts of that of its gradient from G outputs. With
N = P G outputs in a batch that is (B + W_G) G / N: which G leaves the least of it does not depend on N.

Each checkpoint of a run answers Q fresh prompts M times. A prompt's outputs are dealt into groups of G, whose gradients
are independent: their sample variance gives W_G, the products of two of them the squared norm of the prompt's expected
gradient, and the products of two prompts the signal ||grad J||^2. B is the one less the other, and may be negative by
chance. Nothing of it is biased under `rloo`. The prior of `oblr_shrunk` has seen another group of every prompt, its own
among them, which makes its W_G too low by order 1 / Q. Margins are 95 %, by a jackknife over prompts.

Tables: signal, B and W_G in squared gradient norms; the share of W_G in B + W_G; and (B + W_G) G over that of
`oblr_shrunk` at G = 4, with the G of the least.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lab.benchmarks.pool import Pool, draw
from lab.benchmarks.variance import gradients, within
from oblrpo.estimators import BASELINES
from oblrpo.intervals import student_t
from oblrpo.runs import RunFolder

SIZES = (1, 2, 4, 8, 16)
NAMES = ("rloo", "oblr_shrunk")
REFERENCE = ("oblr_shrunk", 4)
"""What variances are divided by."""


@dataclass(frozen=True)
class Split:
    """Signal and noise, each from all prompts and then, for the jackknife, from all but every one: (1 + Q,)."""

    signal_N: Tensor
    between_N: Tensor
    within_N: dict[tuple[str, int], Tensor]
    """By baseline and G."""

    def share_N(self, name: str, G: int) -> Tensor:
        """The part of a prompt's variance that comes from sampling its outputs."""
        return self.within_N[name, G] / (self.between_N + self.within_N[name, G])

    def variance_N(self, name: str, G: int) -> Tensor:
        """The variance of the batch gradient at a fixed number of outputs, but for that number."""
        return G * (self.between_N + self.within_N[name, G])


def left_out(values_Q: Tensor) -> Tensor:
    """The mean over all prompts, then over all but each."""
    return torch.cat([values_Q.mean()[None], (values_Q.sum() - values_Q) / (len(values_Q) - 1)])


def signal(mean_QL: Tensor) -> Tensor:
    """The mean product of two prompts' gradients, then without each prompt."""
    inner_QQ = mean_QL.double() @ mean_QL.double().T
    inner_QQ.fill_diagonal_(0)
    own_Q, Q = inner_QQ.sum(1), len(inner_QQ)
    return torch.cat([own_Q.mean()[None] / (Q - 1), (own_Q.sum() - 2 * own_Q) / ((Q - 1) * (Q - 2))])


def between(inner_QRR: Tensor, signal_N: Tensor) -> Tensor:
    """The variance of prompts' expected gradients: of independent groups' products, less the signal."""
    R = inner_QRR.shape[1]
    pairs_Q = inner_QRR.sum((1, 2)) - inner_QRR.diagonal(dim1=1, dim2=2).sum(1)
    return left_out(pairs_Q / (R * (R - 1))) - signal_N


def split(pool: Pool, seed: int) -> Split:
    """All of it for one policy, with groups of every size of which its outputs make two."""
    M = pool.rewards.shape[1]
    within_N, signal_N, between_N = {}, torch.empty(0), torch.empty(0)
    for name in NAMES:
        for G in SIZES:
            if BASELINES[name].smallest_group > G or 2 * G > M:
                continue
            inner_QRR, sketch_QRL = gradients(pool, name, G, None, seed)
            within_N[name, G] = left_out(within(inner_QRR))
            if (name, G) == ("rloo", REFERENCE[1]):
                signal_N = signal(sketch_QRL.mean(1))
                between_N = between(inner_QRR, signal_N)
    return Split(signal_N, between_N, within_N)


def cell(values_N: Tensor, form: str) -> str:
    """The figure of all prompts with the jackknife's margin."""
    rest_Q = values_N[1:]
    Q = len(rest_Q)
    error = ((rest_Q - rest_Q.mean()).square().sum() * (Q - 1) / Q).sqrt().item()
    return f"{values_N[0].item():{form}} +- {student_t(Q - 1) * error:{form}}"


def rows(found: Split, title: str, accuracy: float) -> tuple[list[str], list[str], list[str]]:
    """One policy's lines of the three tables."""
    before = f"{title} | {accuracy:.2f} | {cell(found.signal_N, '.2g')} | {cell(found.between_N, '.2g')}"
    of_reference_N = found.variance_N(*REFERENCE)
    noise, shares, variances = [], [], []
    for name in NAMES:
        sizes = [G for G in SIZES if (name, G) in found.within_N]
        least = min(sizes, key=lambda G: found.variance_N(name, G)[0].item())
        within = {G: cell(found.within_N[name, G], ".2g") for G in sizes}
        share = {G: cell(found.share_N(name, G), ".2f") for G in sizes}
        variance = {G: cell(found.variance_N(name, G) / of_reference_N, ".2f") for G in sizes}
        noise.append(line(before, name, *(within.get(G, "") for G in SIZES)))
        shares.append(line(title, name, *(share.get(G, "") for G in SIZES)))
        variances.append(line(title, name, *(variance.get(G, "") for G in SIZES), str(least)))
    return noise, shares, variances


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    for name, value in {"prompts": 240, "outputs": 32, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    tables: tuple[list[str], list[str], list[str]] = [], [], []
    for folder in map(RunFolder, arguments.runs):
        config = folder.saved_config()
        for step in folder.checkpoint_steps():
            began = time.process_time()
            pool = draw(
                str(folder.checkpoint(step)), config.task.task, config.task.task_args, arguments.prompts,
                arguments.outputs, arguments.seed, config.rollout.max_completion_length,
            )  # fmt: skip
            found = rows(split(pool, arguments.seed), f"{folder.path.name}, {step}", pool.rewards.mean().item())
            for table, new in zip(tables, found, strict=True):
                table += new
            print(*found[0], *found[1], *found[2], f"{time.process_time() - began:.0f} CPU s", sep="\n", flush=True)
    print(f"\n{arguments.prompts} prompts x {arguments.outputs} outputs, seed {arguments.seed}")
    sizes = [f"G = {G}" for G in SIZES]
    heads = (
        line("W_G: run, step", "accuracy", "signal", "B", "baseline", *sizes),
        line("share of W_G: run, step", "baseline", *sizes),
        line("variance: run, step", "baseline", *sizes, "least at"),
    )
    for head, table in zip(heads, tables, strict=True):
        print("", head, "|---" * (head.count("|") - 1) + "|", *table, sep="\n")


if __name__ == "__main__":
    main()
