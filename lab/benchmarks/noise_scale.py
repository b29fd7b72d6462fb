"""The noise scale of the same batches, as we print it and as it comes out in other ways.

    python -m lab.benchmarks.noise_scale [--batches 128] [--prompts 32] [--outputs 4] [--window 16] [--seed 0]

A small random Llama writes completions of random prompts, rewarded by their share of tokens from half of the
vocabulary; the baseline is RLOO's. The true noise scale is that of all prompts of all batches together, with a 95 %
interval from a jackknife over batches. gns-pytorch is called as it is, on the prompts' losses. The others start from
the gradients of single completions. All figures are in prompts.

Columns: the first batch; signal and noise averaged over a window of batches and then divided; divided in each batch and
then averaged over the window (median of the windows, least and greatest); batches that gave no figure (0 or infinite).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable

import torch
from gns_pytorch import compute_gns
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from oblrpo.estimators import Moments, baseline, moments, squared_norm
from oblrpo.scores import ScoreTape

VOCABULARY, QUESTION, LENGTH = 16, 4, 4
BLOCK = 8
"""Prompts of a micro-batch."""
OURS, WHOLE, DEFAULTS = "oblrpo", "gns-pytorch, all parameters, whole batch", "gns-pytorch at its defaults"


class Batch:
    """Completions with their advantages."""

    def __init__(self, model: LlamaForCausalLM, prompts: int, outputs: int) -> None:
        self.model, self.prompts, self.outputs = model, prompts, outputs
        ids_SQ = torch.randint(VOCABULARY, (prompts, QUESTION)).repeat_interleave(outputs, 0)
        words = {"do_sample": True, "top_k": 0, "min_new_tokens": LENGTH, "max_new_tokens": LENGTH, "pad_token_id": 0}
        self.ids_ST = model.generate(ids_SQ, attention_mask=torch.ones_like(ids_SQ), **words)
        rewards_PG = (self.ids_ST[:, QUESTION:] < VOCABULARY // 2).float().mean(1).view(prompts, outputs)
        self.advantages_PG = rewards_PG - baseline("rloo", rewards_PG)

    def logps(self) -> Tensor:
        """The log-probability of each completion, (S,)."""
        logits_STV = self.model(self.ids_ST).logits[:, QUESTION - 1 : -1]
        return logits_STV.log_softmax(-1).gather(-1, self.ids_ST[:, QUESTION:, None])[..., 0].sum(1)

    def losses(self) -> Tensor:
        """The loss of each prompt, (P,), whose mean is the batch's."""
        return -(self.advantages_PG * self.logps().view(self.prompts, self.outputs)).mean(1)

    def by_the_tape(self) -> Moments:
        """What a run does."""
        self.model.zero_grad()
        with ScoreTape(self.model) as tape:
            tape.record(self.logps())
        coef_PG = -self.advantages_PG / self.advantages_PG.numel()
        norm2_P = tape.accumulate(coef_PG.flatten(), group_size=self.outputs) * self.prompts**2
        return moments(norm2_P, squared_norm(list(self.model.parameters())))

    def gradients(self) -> Tensor:
        """The gradient of each completion's part of the loss, (S, parameters), by autograd."""
        losses_S = -self.advantages_PG.flatten() * self.logps()
        parameters = list(self.model.parameters())
        parts = torch.autograd.grad(losses_S, parameters, torch.eye(len(losses_S)), is_grads_batched=True)
        return torch.cat([part.flatten(1) for part in parts], 1)


def of_rows(rows_ND: Tensor, prompts_per_row: int = 1) -> Moments:
    return moments(rows_ND.square().sum(1), rows_ND.mean(0).square().sum(), prompts_per_row)


def ways(batch: Batch, gradients_SD: Tensor) -> dict[str, Moments]:
    """Signal and noise of a batch, by the way they are taken."""
    is_norm_D = torch.cat([torch.full((p.numel(),), p.ndim == 1) for p in batch.model.parameters()])
    prompts_PD = gradients_SD.unflatten(0, (batch.prompts, batch.outputs)).mean(1)
    completions, ours = of_rows(gradients_SD), batch.by_the_tape()
    return {
        OURS: ours,
        "normalisation layers only": of_rows(prompts_PD[:, is_norm_D]),
        f"completions as examples, over {batch.outputs}": Moments(
            completions.signal2, completions.trace_cov / batch.outputs, batch.prompts
        ),
        f"micro-batches of {BLOCK} prompts": of_rows(prompts_PD.unflatten(0, (-1, BLOCK)).mean(1), BLOCK),
        "the batch gradient's squared norm as signal": Moments(
            float(prompts_PD.mean(0).square().sum()), ours.trace_cov, batch.prompts
        ),
    }


def mean_of(batches: list[Moments]) -> Moments:
    signal2 = statistics.fmean(batch.signal2 for batch in batches)
    return Moments(signal2, statistics.fmean(batch.trace_cov for batch in batches), batches[0].n)


def truth(mean_BD: Tensor, ours: list[Moments]) -> tuple[Moments, float]:
    """The moments of all prompts together, and the jackknife's standard error of their SNR.

    S + T / N is a batch's ||g||^2, and S + T the mean of its prompts' squared norms.
    """
    n, B = ours[0].n, len(ours)
    by_tape_B = torch.tensor([each.signal2 + each.trace_cov / n for each in ours])
    assert torch.allclose(by_tape_B, mean_BD.square().sum(1), rtol=1e-4), "the tape and autograd differ"
    norm2_B = torch.tensor([each.signal2 + each.trace_cov for each in ours])

    def of(kept: list[int]) -> Moments:
        # only the mean of the prompts' squared norms counts, so that each may have its batch's
        return moments(norm2_B[kept].repeat_interleave(n), mean_BD[kept].mean(0).square().sum())

    snrs = []
    for left_out in range(B):
        rest = of([b for b in range(B) if b != left_out])
        snrs.append(rest.signal2 / rest.trace_cov)
    return of(list(range(B))), statistics.stdev(snrs) * (B - 1) / math.sqrt(B)


def over_windows(count: int, size: int, figure: Callable[[slice], float]) -> str:
    """The median of a figure over windows of batches, with the least and the greatest."""
    found = sorted(figure(slice(start, start + size)) for start in range(0, count - size + 1, size))
    if found[0] == math.inf:
        return "infinite"
    return f"{statistics.median(found):.0f} ({found[0]:.0f} to {found[-1]:.0f})"


def furthest(ours: list[Moments], theirs: list[float]) -> float:
    """The largest relative difference between two figures of a batch; infinite here is 0 there."""
    assert all((each.critical_batch_size == math.inf) == (ratio == 0) for each, ratio in zip(ours, theirs, strict=True))
    return max((abs(ratio * each.snr - 1) for each, ratio in zip(ours, theirs, strict=True) if ratio), default=0.0)


def row(name: str, batches: list[Moments] | None, ratios: list[float] | None, window: int) -> str:
    """A line of the table, of moments or, where there are none, of their ratios alone."""
    alone, before = ratios or [], ""
    if batches is not None:
        alone = [each.critical_batch_size for each in batches]
        before = over_windows(len(alone), window, lambda part: mean_of(batches[part]).critical_batch_size)
    after = over_windows(len(alone), window, lambda part: statistics.fmean(alone[part]))
    nothing = sum(each in (0.0, math.inf) for each in alone)
    return f"| {name} | {alone[0]:.2f} | {before} | {after} | {nothing} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"batches": 128, "prompts": 32, "outputs": 4, "window": 16, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    random.seed(args.seed)  # by which gns-pytorch chooses parameters
    started = time.perf_counter()
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, attn_implementation="eager")).eval()

    found: dict[str, list[Moments]] = {}
    ratios: dict[str, list[float]] = {WHOLE: [], DEFAULTS: []}
    means = []
    for _ in range(args.batches):
        batch = Batch(model, args.prompts, args.outputs)
        gradients_SD = batch.gradients()
        means.append(gradients_SD.mean(0))
        for name, each in ways(batch, gradients_SD).items():
            found.setdefault(name, []).append(each)
        ratios[WHOLE].append(compute_gns(batch.losses(), model, param_percentage=1.0, batch_percentage=1.0))
        ratios[DEFAULTS].append(compute_gns(batch.losses(), model))

    true, error = truth(torch.stack(means), found[OURS])
    low, high = (Moments(true.snr + sign * 1.96 * error, 1.0, true.n).critical_batch_size for sign in (1, -1))
    print(f"{args.batches} batches of {args.prompts} prompts x {args.outputs} outputs, seed {args.seed}")
    print(f"true noise scale {true.critical_batch_size:.1f} ({low:.1f} to {high:.1f}) prompts")
    print(f"{OURS} and {WHOLE}: at most {furthest(found[OURS], ratios[WHOLE]):.0e} apart in a batch\n")
    print(
        "| | first batch | averaged, then divided | divided, then averaged | without a figure |\n|---|---|---|---|---|"
    )
    for name in (OURS, WHOLE, DEFAULTS, *list(found)[1:]):
        print(row(name, found.get(name), ratios.get(name), args.window))
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
