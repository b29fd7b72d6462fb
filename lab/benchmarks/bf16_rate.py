"""Does the measured rate find in bfloat16 what it finds in float32?

    python -m lab.benchmarks.bf16_rate models/smollm2-135m-instruct [--lora-r 16] [--tokens 100] [--rows 2] [--csv FILE]

One run in float32, whose gradients (Adam's directions of completions with random advantages of +-1) three schedules
`auto` see alike: one that measures its updates in float32, which the weights follow; one that measures them in bfloat16
arithmetic (`rounds`); and, with --plain, one that does so without the setting (what 9aa78c3 did). Each goes on with its
own rate. A line of the CSV is one update: the rates, their KLs, what bfloat16's measurement cost in forwards and in
seconds, and the seconds of the gradient.

Completions are the policy's own, drawn once before the first update, and used in turn. Updates are meant to take --kl
nats a completion each: shorter ones are harder to separate from rounding.
"""

import argparse
import csv
import math
import time
from dataclasses import replace
from pathlib import Path

import torch

from oblrpo.estimators import Moments, SNRSchedule
from oblrpo.intervals import geometric_mean
from oblrpo.policy import Policy, Sequences, load_policy
from oblrpo.rollout import sample
from oblrpo.settings import PolicyConfig

PROMPT = "A long story about a village by the sea, told by somebody who has lived there all her life:\n\n"
NOISE = Moments(signal2=0.0, trace_cov=1.0, n=8)
COLUMNS = ("update", "float32", "bfloat16", "plain", "kl_float32", "kl_bfloat16", "kl_plain", "forwards",
           "seconds_bfloat16", "seconds_plain", "seconds_gradient")  # fmt: skip


class Measured:
    """A schedule that follows directions given to it, and measures in its own arithmetic."""

    def __init__(self, policy: Policy, rate: float, rounds: bool, kl: float) -> None:
        self.policy, self.forwards, self.seconds = policy, 0, 0.0
        self.optimizer = torch.optim.SGD(policy.parameters, lr=rate)
        self.schedule = SNRSchedule(self.optimizer, "auto", low_precision=rounds, kl=kl)

    def update(self, batch: Sequences, before_SC: torch.Tensor | None = None) -> tuple[float, float]:
        """Make the update that lies in `.grad`; return its rate and KL."""
        begun, self.forwards = time.perf_counter(), 0
        if not self.schedule.rule.gauge.low_precision and before_SC is None:
            before_SC = self.token_logps_SC(batch)
        # Directions are no gradients, that a step could be compared with.
        self.schedule.step(NOISE, mean_length=float(batch.own_SC.sum(1).float().mean()), fresh=False)
        rate = self.schedule.learning_rates[0]
        self.optimizer.step()
        first_SC = 0.0 if before_SC is None else before_SC
        kl, left = self.schedule.limit_step(lambda: (self.token_logps_SC(batch) - first_SC) * batch.own_SC)
        self.seconds = time.perf_counter() - begun
        return rate * left, kl

    @torch.no_grad()
    def token_logps_SC(self, batch: Sequences) -> torch.Tensor:
        """log pi of every token."""
        self.forwards += 1
        return self.policy.logps(batch).token_logps_SC


class Adam:
    """Adam's directions, with a rate of 1."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters, self.t = parameters, 0
        self.mean, self.square = ([torch.zeros_like(p) for p in parameters] for _ in range(2))

    @torch.no_grad()
    def direct(self) -> None:
        """Replace gradients by directions."""
        self.t += 1
        for p, mean, square in zip(self.parameters, self.mean, self.square, strict=True):
            mean.lerp_(p.grad, 0.1)
            square.lerp_(p.grad.square(), 1e-3)
            p.grad = (mean / (1 - 0.9**self.t)) / ((square / (1 - 0.999**self.t)).sqrt() + 1e-12)


def completions(policy: Policy, count: int, tokens: int, file: Path | None) -> Sequences:
    """Completions of so many tokens, or those of a file, where they are kept."""
    if file is None or not file.exists():
        torch.manual_seed(0)
        drawn = sample(policy, [PROMPT], count, tokens, 1.0).sequences
        if file is None:
            return drawn
        torch.save([drawn.ids_ST, drawn.mask_ST, drawn.own_ST, drawn.start], file)
    ids_ST, mask_ST, own_ST, start = torch.load(file)
    width = start + tokens
    return Sequences(ids_ST[:, :width], mask_ST[:, :width], own_ST[:, :width], start)


def run(said: argparse.Namespace) -> list[dict[str, float]]:
    """All updates, written to the file as they come."""
    lora = {"r": said.lora_r} if said.lora_r else {}
    exact = load_policy(said.model, PolicyConfig(model=said.model, device="cpu", lora=lora))
    pool = completions(exact, said.pool, said.tokens, said.completions)
    print(f"completions of {pool.own_SC.sum(1).tolist()} tokens", flush=True)
    short = replace(exact, bf16=True)
    float32, bfloat16 = (
        Measured(policy, said.rate, rounds, said.kl) for policy, rounds in ((exact, False), (short, True))
    )
    plain = Measured(short, said.rate, False, said.kl) if said.plain else None
    adam, rows, signs = Adam(exact.parameters), [], torch.Generator().manual_seed(1)
    began = time.perf_counter()
    for number in range(said.updates):
        if time.perf_counter() - began > 60 * said.minutes:
            break
        batch = pool.at(torch.arange(number * said.rows, (number + 1) * said.rows) % pool.count)
        begun = time.perf_counter()
        logps = exact.logps(batch)
        sign_S = 2.0 * torch.randint(2, (batch.count,), generator=signs) - 1
        (sign_S * logps.logps_S).mean().backward()
        seconds = time.perf_counter() - begun
        adam.direct()
        row = dict.fromkeys(COLUMNS, math.nan) | {"update": number + 1, "seconds_gradient": seconds}
        start = [p.detach().clone() for p in exact.parameters]
        others = {"bfloat16": bfloat16} | ({"plain": plain} if plain else {})
        for name, each in others.items():
            row[name], row[f"kl_{name}"] = each.update(batch)
            row[f"seconds_{name}"] = each.seconds
            with torch.no_grad():
                for p, before in zip(exact.parameters, start, strict=True):
                    p.copy_(before)
        del start
        row["forwards"] = bfloat16.forwards
        row["float32"], row["kl_float32"] = float32.update(batch, logps.token_logps_SC.detach())
        float32.optimizer.zero_grad()
        rows.append(row)
        print(" ".join(f"{key}={value:.4g}" for key, value in row.items()), flush=True)
        if said.csv:
            with said.csv.open("a", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                if not number:
                    writer.writeheader()
                writer.writerow({key: f"{value:.4g}" for key, value in row.items()})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--lora-r", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--rows", type=int, default=2, help="completions of an update, all of them measured")
    parser.add_argument("--pool", type=int, default=4, help="completions that are drawn")
    parser.add_argument("--completions", type=Path, help="file that keeps them")
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--kl", type=float, default=0.5, help="nats a completion that an update is meant to take")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no update begins later")
    parser.add_argument("--rate", type=float, default=1e-6, help="where the schedules start")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--csv", type=Path)
    said = parser.parse_args()
    torch.set_num_threads(1)
    rows = run(said)
    later = rows[len(rows) // 10 :]
    for name in ("bfloat16", *(["plain"] if said.plain else [])):
        found = geometric_mean([row[name] / row["float32"] for row in later])
        print(f"{name} over float32: {found.value:.3f} ({found.low:.3f} to {found.high:.3f}), {len(later)} updates")
        cost = sorted(row[f"seconds_{name}"] / row["seconds_gradient"] for row in later)[len(later) // 2]
        print(f"  its measurement takes {cost:.2f} times as long as the gradient (median)")
    forwards = [row["forwards"] for row in rows]
    mean = sum(row["forwards"] for row in later) / len(later)
    print(f"forwards of a measurement: {mean:.2f} in the mean, {forwards[0]} for the first update; without `rounds` 2")


if __name__ == "__main__":
    main()
