"""What each baseline does to the gradient's variance within prompts, and whether it leaves its mean alone.

    python -m lab.benchmarks.variance MODEL [--task path] [--prompts 240] [--outputs 32] [--groups 2 4 8 16]

For a checkpoint, M outputs of Q prompts are split into M / G groups of G a prompt. Two groups of one prompt are
independent, so that the sample variance of the prompt's gradient over its groups is unbiased for every baseline. The
first table gives its mean over prompts over RLOO's at the same G, with a bootstrap interval (2.5 - 97.5 %);
the second over RLOO's at the largest G. The third takes mean gradients of each half of the groups: their inner product
with RLOO's of the *other* half, over RLOO's own; all unbiased baselines have the same mean, so it is 1 for them.
In-sample and normalised baselines have another mean: their variance counts at equal signal, divided by its square.
"""

import time

import torch

from lab.benchmarks.pool import Pool, advantages, arguments_of, draw, prior_of, token_weighted
from oblrpo.estimators import BASELINES, kappa

BOOTSTRAP = 2000
STRENGTHS = (2.0, 8.0, 32.0)


def groups(outputs: int, G: int) -> list[slice]:
    return [slice(start, start + G) for start in range(0, outputs, G)]


def gradients(pool: Pool, name: str, G: int, strength: float | None, seed: int):
    """Inner products within prompts of its groups' gradients, (Q, R, R), and their sketches, (Q, R, L)."""
    parts = groups(pool.rewards.shape[1], G)
    coefs = []
    for index, part in enumerate(parts):
        prior = prior_of(pool, parts[index - 1], strength) if name == "oblr_shrunk" else None
        coefs.append(advantages(pool, name, part, prior))
    coef, gram, sketch = torch.cat(coefs, 1), pool.gram, pool.sketch
    if BASELINES[name].by_token:
        gram, sketch = token_weighted(pool, coef, seed)
        coef = torch.ones_like(pool.rewards)
    Q, M = coef.shape
    weighted = (coef[:, :, None] * gram * coef[:, None, :]).view(Q, M // G, G, M // G, G).sum((2, 4)) / G**2
    return weighted, (coef[..., None].float() * sketch).view(Q, M // G, G, -1).sum(2) / G


def within(inner: torch.Tensor) -> torch.Tensor:
    """Unbiased variance of a prompt's gradient over its groups, (Q,)."""
    R = inner.shape[1]
    return (inner.diagonal(dim1=1, dim2=2).sum(1) - inner.sum((1, 2)) / R) / (R - 1)


def interval(samples: torch.Tensor) -> str:
    low, high = samples.quantile(torch.tensor([0.025, 0.975], dtype=samples.dtype)).tolist()
    return f"{low:.2f} - {high:.2f}"


def report(pool: Pool, sizes: list[int], seed: int) -> None:
    Q = len(pool.rewards)
    resampled = torch.randint(Q, (BOOTSTRAP, Q), generator=torch.Generator().manual_seed(seed))
    accuracy, solved = pool.rewards.mean(), pool.rewards.mean(1)
    spread = torch.corrcoef(torch.stack([pool.norm2.log().flatten(), pool.rewards.flatten()]))[0, 1]
    without_signal = ((solved == 0) | (solved == 1)).double().mean()
    print(
        f"accuracy {accuracy:.3f}, {without_signal:.2f} of prompts always or never solved, "
        f"kappa {kappa(pool.norm2, pool.rewards):.2f}, correlation of log w and reward {spread:.2f}\n"
    )
    names = [("oblr_shrunk", strength) for strength in STRENGTHS]
    rows = [(name, None) for name in BASELINES if name not in {"dr_grpo", "vcpo"}] + names  # the same as mean, eob
    at_16 = None
    results = {}
    for G in sorted(sizes, reverse=True):
        reference, reference_sketch = gradients(pool, "rloo", G, None, seed)
        reference_Q = within(reference)
        at_16 = reference_Q if at_16 is None else at_16
        for name, strength in rows:
            if BASELINES[name].smallest_group > G:
                continue
            inner, sketch = gradients(pool, name, G, strength, seed)
            variance_Q = within(inner)
            halves = [sketch[:, 0::2].mean(1), sketch[:, 1::2].mean(1)]
            others = [reference_sketch[:, 1::2].mean(1), reference_sketch[:, 0::2].mean(1)]
            own = [reference_sketch[:, 0::2].mean(1), reference_sketch[:, 1::2].mean(1)]
            signal = _signal(halves, others, resampled) / _signal(own, others, resampled)
            ratio = variance_Q[resampled].sum(1) / reference_Q[resampled].sum(1)
            against = variance_Q[resampled].sum(1) / at_16[resampled].sum(1)
            results[name, strength, G] = (
                variance_Q.sum() / reference_Q.sum(), ratio, variance_Q.sum() / at_16.sum(), against,
                _signal(halves, others, None) / _signal(own, others, None), signal,
            )  # fmt: skip
    sizes = sorted(sizes)
    print(f"| baseline | {' | '.join(f'G={G}' for G in sizes)} |\n|---|{'---|' * len(sizes)}")
    for row in rows:
        print(f"| {_label(row)} | " + " | ".join(_cell(results.get((*row, G)), 0) for G in sizes) + " |")
    print(f"\nover RLOO's at G = {sizes[-1]}\n\n| baseline | {' | '.join(f'G={G}' for G in sizes)} |")
    print(f"|---|{'---|' * len(sizes)}")
    for row in rows:
        print(f"| {_label(row)} | " + " | ".join(_cell(results.get((*row, G)), 2) for G in sizes) + " |")
    print(
        f"\nmean gradient along RLOO's, over RLOO's\n\n| baseline | unbiased | {' | '.join(f'G={G}' for G in sizes)} |"
    )
    print(f"|---|---|{'---|' * len(sizes)}")
    for row in rows:
        cells = " | ".join(_cell(results.get((*row, G)), 4) for G in sizes)
        print(f"| {_label(row)} | {'yes' if BASELINES[row[0]].unbiased else 'no'} | {cells} |")


def _signal(halves, others, resampled) -> torch.Tensor:
    """Inner product of mean gradients of one half with the reference's of the other, over bootstrap samples."""
    total = 0
    for one, other in zip(halves, others, strict=True):
        if resampled is None:
            total = total + (one.mean(0).double() * other.mean(0).double()).sum()
        else:
            weights = torch.zeros(len(resampled), len(one)).scatter_add_(
                1, resampled, torch.ones(resampled.shape)
            ) / len(one)
            total = total + ((weights @ one) * (weights @ other)).double().sum(1)
    return total


def _label(row) -> str:
    name, strength = row
    return name if strength is None else f"{name}, c = {strength:g}"


def _cell(result, which: int) -> str:
    return "" if result is None else f"{result[which]:.2f} ({interval(result[which + 1])})"


def main() -> None:
    arguments = arguments_of(__doc__, prompts=240, outputs=32, groups=[2, 4, 8, 16])
    started = time.perf_counter()
    pool = draw(
        arguments.model, arguments.task, arguments.task_args, arguments.prompts, arguments.outputs, arguments.seed
    )
    print(f"{arguments.model}: {arguments.prompts} prompts x {arguments.outputs} outputs, seed {arguments.seed}")
    report(pool, arguments.groups, arguments.seed)
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
