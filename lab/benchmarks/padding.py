"""How much of what goes through the model is padding, in micro-batches by tokens.

    python -m lab.benchmarks.padding [--lengths docs/results/padding_lengths.jsonl] [--extra 24]

The lengths are those of completions that SmolLM2-135M-Instruct drew (`rollout.sample`, temperature 1, seed 0; prompts
of the recipe smollm2-format and the first questions of GSM8K's test set), and log-normal ones around a length of the
prompt's own. Shares are of the tokens of a step's rows, as they go through the model in micro-batches by tokens:
- whole groups: a micro-batch is one rectangle, in the order of the groups' longest rows;
- each alone: a group is one rectangle, which no other way to put whole groups together can be below;
- by length: rows of like length share a forward, as `step.Learner.gradient` has it, where one forward more costs
  `extra` tokens; with the number of forwards of a micro-batch. Once more where half of the rows, drawn at random, are
  left out.
"""

import argparse
import json
from itertools import product
from pathlib import Path

import torch

from oblrpo.policy import Sequences
from oblrpo.policy.sequences import MicroBatches, of_like_length


def sequences_of(prompt_S: torch.Tensor, completion_S: torch.Tensor) -> Sequences:
    """Rows of prompts and completions of these lengths."""
    prompt_mask_SQ = torch.arange(int(prompt_S.max())).flip(0) < prompt_S[:, None]
    mask_SC = torch.arange(int(completion_S.max())) < completion_S[:, None]
    return Sequences.of(prompt_mask_SQ.long(), prompt_mask_SQ.long(), mask_SC.long(), mask_SC.long())


def log_normal(prompts: int, G: int, within: float) -> Sequences:
    """Prompts of 50 to 150 tokens; completions around a length of the prompt's own, itself around 150, up to 512."""
    drawn = torch.Generator().manual_seed(0)
    prompt_S = torch.randint(50, 151, (prompts,), generator=drawn).repeat_interleave(G)
    center_PG = 0.5 * torch.randn(prompts, 1, generator=drawn) + within * torch.randn(prompts, G, generator=drawn)
    return sequences_of(prompt_S, (150 * center_PG.exp()).round().clamp(1, 512).flatten())


def padding(sequences: Sequences, G: int, budget: int, extra: int, kept_S: torch.Tensor) -> list[float]:
    """Shares of padding, by the ways above, and forwards a micro-batch."""
    count_P, lengths_S = kept_S.view(-1, G).sum(1), sequences.mask_ST.sum(1)
    there_P, index_S = count_P > 0, kept_S.nonzero().flatten()
    blocks = MicroBatches(tokens=budget).of(sequences.at(index_S), G, count_P[there_P])
    groups = lengths_S[index_S].split(count_P[there_P].tolist())
    whole = [torch.cat([groups[int(place)] for place in block]) for block in blocks]
    cut = [rows[index] for rows in whole for index in of_like_length(rows, extra)]
    real = int(lengths_S[index_S].sum())
    shares = [1 - real / sum(len(rows) * int(rows.max()) for rows in ways) for ways in (whole, groups, cut)]
    return [*shares, len(cut) / len(whole)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", default="docs/results/padding_lengths.jsonl")
    parser.add_argument("--extra", type=int, default=24)
    arguments = parser.parse_args()
    batches = {}
    for line in Path(arguments.lengths).read_text().splitlines():
        row = json.loads(line)
        lengths = sequences_of(torch.tensor(row["prompt"]), torch.tensor(row["completion"]))
        batches[row["name"]] = lengths, row["generations"]
    batches |= {f"log-normal, sd {sd}, 32 x 8": (log_normal(32, 8, sd), 8) for sd in (0.3, 0.5)}
    print("| lengths | tokens | whole groups | each alone | by length | forwards | half the rows: whole | by length |")
    print("|---" * 8 + "|")
    for (name, (sequences, G)), budget in product(batches.items(), (512, 1024, 2048, 4096)):
        half_S = torch.rand(sequences.count, generator=torch.Generator().manual_seed(1)) < 0.5
        shares = padding(sequences, G, budget, arguments.extra, torch.ones_like(half_S))
        of_half = padding(sequences, G, budget, arguments.extra, half_S)
        whole, alone, cut, half, half_cut = (f"{share:.1%}" for share in (*shares[:3], of_half[0], of_half[2]))
        print(f"| {name} | {budget} | {whole} | {alone} | {cut} | {shares[3]:.1f} | {half} | {half_cut} |")


if __name__ == "__main__":
    main()
