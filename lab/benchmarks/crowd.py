"""Many of `lab.benchmarks.rate_rules`' small policies at once, under rates that do and do not know the noise."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lab.benchmarks.rate_rules import CHOICES, GENERATIONS, PROMPTS, World
from oblrpo.estimators import SNRSchedule, moments

WORLDS = {"sparse": "sparse", "graded": "graded", "noisy": "graded"}
NOISE = 1.0
"""The standard deviation of what `noisy` adds to a reward."""
MEASURED: dict[str, tuple[str, float | None]] = {
    "debiased": ("debiased", None),
    "debiased-long": ("debiased", 0.99),
    "plugin": ("plugin", None),
}
"""Mode and memory of the schedules that look at signal and noise alone."""
MARKS = (8, 4, 2, 1)
"""Of a run's steps, the shares after which it is looked at: an eighth to all."""
COSINE = "-cosine"
"""How a contender's name ends under whose rate torch's scheduler has put a cosine."""
STARTS = {"SGD": 1.0, "AdamW": 0.01}
"""Where `kl` and `auto` start."""


class Place(NamedTuple):
    """Where contenders meet; the first columns of the CSV."""

    world: str
    optimizer: str
    prompts: int
    steps: int
    seed: int


class Job(NamedTuple):
    """Contenders that run side by side."""

    place: Place
    contenders: tuple[str, ...]


class Crowd(World):
    """K policies that begin as the same one, and see the same prompts and random numbers."""

    def __init__(self, name: str, seed: int, K: int) -> None:
        super().__init__(WORLDS[name], seed)
        self.noise = NOISE if name == "noisy" else 0.0
        self.weights = torch.nn.Parameter(self.weights.detach().repeat(K, 1, 1, 1))

    def logps(self, features_PF: Tensor) -> Tensor:
        """Of every policy and choice, (K, P, T, V)."""
        return torch.einsum("ktvf,pf->kptv", self.weights, features_PF).log_softmax(-1)

    @torch.no_grad()
    def expected_K(self) -> Tensor:
        """Every policy's exact expected reward."""
        logps_KQTV = self.logps(self.features_QF)
        answers_KQT1 = self.answers_QT[..., None].expand(*logps_KQTV.shape[:-1], 1)
        return self._rewarded(logps_KQTV.gather(-1, answers_KQT1)[..., 0].exp()).mean(1)

    @torch.no_grad()
    def ascend(self, P: int) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """Sample a batch and set the gradients; the squared norms of prompts and batch, how the first log pi change."""
        index_P = torch.randint(PROMPTS, (P,), generator=self.random)
        features_PF, answers_P1T = self.features_QF[index_P], self.answers_QT[index_P][:, None]
        luck_PGT1 = torch.rand(P, GENERATIONS, self.length, 1, generator=self.random)
        logps_KPTV = self.logps(features_PF)
        below_KPGTV = logps_KPTV.exp().cumsum(-1)[:, :, None] < luck_PGT1
        tokens_KPGT = below_KPGTV.sum(-1).clamp(max=CHOICES - 1)
        rewards_KPG = self._rewarded((tokens_KPGT == answers_P1T).float())
        if self.noise:
            rewards_KPG = rewards_KPG + self.noise * self._normal(P, GENERATIONS)
        # RLOO's advantages add up to 0 over a prompt, so that of the score only its one-hot vector is left.
        share_KPG = (rewards_KPG - rewards_KPG.mean(-1, keepdim=True)) / (GENERATIONS - 1)
        tokens_KPTG = tokens_KPGT.transpose(2, 3)
        share_KPTG = share_KPG[:, :, None].expand_as(tokens_KPTG)
        pull_KPTV = torch.zeros_like(logps_KPTV).scatter_add_(-1, tokens_KPTG, share_KPTG)
        self.weights.grad = torch.einsum("kptv,pf->ktvf", pull_KPTV, features_PF) / -P
        norm2_KP = pull_KPTV.square().sum((2, 3)) * features_PF.square().sum(1)

        def change_ST() -> Tensor:
            changed_PTV = (self.logps(features_PF) - logps_KPTV)[0]
            return changed_PTV.gather(-1, tokens_KPTG[0]).transpose(1, 2).flatten(0, 1)

        return norm2_KP, self.weights.grad.square().sum((1, 2, 3)), change_ST


def optimizer_of(name: str, weights: torch.nn.Parameter, rate: float) -> torch.optim.Optimizer:
    if name == "SGD":
        return torch.optim.SGD([weights], lr=rate, foreach=False)
    return torch.optim.AdamW([weights], lr=rate, weight_decay=0.0, foreach=False)


def planned(kind: str, t: int, steps: int) -> float:
    """The factor on a rate that knows nothing of noise, at step t from 0."""
    age = 100 * t / steps
    shapes = {
        "cosine": (1 + math.cos(math.pi * t / steps)) / 2,
        "root": 1 / math.sqrt(1 + age),
        "inverse": 1 / (1 + age),
    }
    return shapes.get(kind, 1.0)


class Rates:
    """The rates of contenders that have one to choose, step by step."""

    def __init__(self, contenders: tuple[str, ...], steps: int) -> None:
        self.kinds, rates = zip(*(name.split(":rate=") for name in contenders), strict=True)
        self.steps, self.rate_K = steps, torch.tensor([float(rate) for rate in rates])
        self.schedules = {k: self._schedule(*MEASURED[kind]) for k, kind in enumerate(self.kinds) if kind in MEASURED}

    @staticmethod
    def _schedule(mode: str, ema: float | None) -> SNRSchedule:
        """One whose factor alone is wanted."""
        return SNRSchedule(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0), mode, ema=ema)

    def at(self, t: int, norm2_KP: Tensor, norm2_K: Tensor) -> Tensor:
        """Of step t from 0, and 0 for who has no gradient, as `SNRSchedule` has it."""
        factor_K = torch.tensor([planned(kind, t, self.steps) for kind in self.kinds]) * norm2_KP.any(1)
        for k, schedule in self.schedules.items():
            factor_K[k] = schedule.step(moments(norm2_KP[k], norm2_K[k]))
        return self.rate_K * factor_K


def run(job: Job) -> tuple[Job, dict[int, list[float]]]:
    """The exact expected rewards of all contenders, at every mark."""
    torch.set_num_threads(1)
    place = job.place
    crowd = Crowd(place.world, place.seed, len(job.contenders))
    step = alone(crowd, job) if ":rate=" not in job.contenders[0] else together(crowd, job)
    found = {}
    goes_on = True
    for t in range(place.steps):
        goes_on = goes_on and step(t)
        for mark in (mark for mark in MARKS if t + 1 == place.steps // mark):
            found[mark] = crowd.expected_K().tolist()
    return job, found


def together(crowd: Crowd, job: Job) -> Callable[[int], bool]:
    """A step of many policies: the optimizer's direction at rate 1, of which each goes as far as its own rate."""
    rates = Rates(job.contenders, job.place.steps)
    optimizer = optimizer_of(job.place.optimizer, crowd.weights, 1.0)

    @torch.no_grad()
    def step(t: int) -> bool:
        norm2_KP, norm2_K, _ = crowd.ascend(job.place.prompts)
        before = crowd.weights.clone()
        crowd.weights.zero_()  # a direction beside no weights has all its digits
        optimizer.step()
        crowd.weights.mul_(rates.at(t, norm2_KP, norm2_K)[:, None, None, None]).add_(before)
        return True

    return step


def alone(crowd: Crowd, job: Job) -> Callable[[int], bool]:
    """A step of one policy whose schedule has to see the update itself; False where that refuses to go on."""
    mode, _, target = job.contenders[0].removesuffix(COSINE).partition(":kl=")
    optimizer = optimizer_of(job.place.optimizer, crowd.weights, STARTS[job.place.optimizer])
    shape = "cosine" if job.contenders[0].endswith(COSINE) else "fixed"
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: planned(shape, t, job.place.steps))
    schedule = SNRSchedule(optimizer, mode, kl=float(target) if target else None)  # type: ignore[arg-type]

    def step(t: int) -> bool:
        norm2_KP, norm2_K, change_ST = crowd.ascend(job.place.prompts)
        schedule.step(moments(norm2_KP[0], norm2_K[0]), mean_length=crowd.length)
        optimizer.step()
        try:
            schedule.limit_step(change_ST)
        except ValueError as error:
            print(*job.place, *job.contenders, f"stops after {t} steps: {error}", file=sys.stderr, flush=True)
            return False
        scheduler.step()
        return True

    return step
