"""The schedule's factor against the true one, N SNR / (1 + N SNR), for plug-in and debiased, by batch size.

    python -m lab.benchmarks.schedule MODEL [--task path] [--prompts 2048] [--outputs 4] [--sizes 4 8 16 32 64 128]

The true signal and noise are those of all prompts together (their sketched gradients under RLOO; the interval is a
bootstrap over prompts). Then the prompts are dealt into batches of N, over and over: the factor from one batch alone,
and from averages with decay 0.9, the first 50 batches left out.
"""

import statistics
import time

import torch

from lab.benchmarks.pool import advantages, arguments_of, draw
from oblrpo.estimators import Moments, SNRSchedule, moments

DEALS = 40


def of_batch(rows: torch.Tensor) -> Moments:
    return moments(rows.square().sum(1), rows.mean(0).square().sum())


def factors(gradients: torch.Tensor, size: int, mode: str, ema: float, generator) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = SNRSchedule(optimizer, mode, ema=ema)
    found = []
    for _ in range(DEALS):
        order = torch.randperm(len(gradients), generator=generator)
        for start in range(0, len(order) - size + 1, size)[: max(1, 4000 // DEALS)]:
            found.append(schedule.step(of_batch(gradients[order[start : start + size]])))
            schedule.restore()
    return found if not ema else found[50:]


def main() -> None:
    arguments = arguments_of(__doc__, prompts=2048, outputs=4, sizes=[4, 8, 16, 32, 64, 128])
    started = time.perf_counter()
    pool = draw(
        arguments.model, arguments.task, arguments.task_args, arguments.prompts, arguments.outputs, arguments.seed
    )
    everything = slice(0, arguments.outputs)
    gradients = (advantages(pool, "rloo", everything)[..., None].float() * pool.sketch).mean(1)
    generator = torch.Generator().manual_seed(arguments.seed)
    truth = of_batch(gradients)
    again = [
        of_batch(gradients[torch.randint(len(gradients), (len(gradients),), generator=generator)]) for _ in range(200)
    ]
    # a resample holds its own noise once more in its signal: taken off
    snrs = sorted((each.signal2 - each.trace_cov / each.n) / each.trace_cov for each in again)
    low, high = snrs[5], snrs[-6]
    print(f"{arguments.model}: {arguments.prompts} prompts x {arguments.outputs} outputs, seed {arguments.seed}")
    print(
        f"accuracy {pool.rewards.mean():.3f}, SNR of a prompt {truth.snr:.5f} ({low:.5f} - {high:.5f}), critical batch "
        f"{truth.critical_batch_size:.0f} prompts\n"
    )
    print("| N | N SNR | true | plug-in, one batch | debiased, one batch | plug-in, averaged | debiased, averaged |")
    print("|---|---|---|---|---|---|---|")
    for size in arguments.sizes:
        ideal = size * truth.snr / (1 + size * truth.snr)
        bounds = [max(size * each, 0) / (1 + max(size * each, 0)) for each in (low, high)]
        cells = []
        for ema in (0.0, 0.9):
            for mode in ("plugin", "debiased"):
                found = factors(gradients, size, mode, ema, generator)
                cells.append(f"{statistics.mean(found):.2f} (sd {statistics.stdev(found):.2f})")
        true = f"{ideal:.2f} ({bounds[0]:.2f} - {bounds[1]:.2f})"
        print(f"| {size} | {size * truth.snr:.2f} | {true} | {' | '.join(cells)} |")
    print(f"\n{time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
