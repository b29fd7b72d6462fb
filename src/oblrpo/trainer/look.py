"""What logs cannot show of a run, measured once with its newest checkpoint: noise, batch, baselines.

Some batches of fresh prompts are sampled and scored; nothing is learned, and the run's folder stays as it is. A look is
at one policy, a checkpoint's. The run's own N SNR is a mean over the policies of its last steps, which differ.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from oblrpo.algorithms import resolve
from oblrpo.errors import InputError
from oblrpo.estimators import BASELINES, Ledger
from oblrpo.intervals import GeometricMean, Mean, geometric_mean, mean
from oblrpo.rewards import Rewards
from oblrpo.runs import RunFolder
from oblrpo.runs.state_files import load_state
from oblrpo.seeds import seed_of
from oblrpo.settings import TrainConfig
from oblrpo.step import Learner
from oblrpo.trainer.setup import (
    environments_of,
    load_checkpoint,
    make_learner,
    sampler_of,
    set_threads,
    with_tools,
)
from oblrpo.trainer.task import drop_long_prompts, task_of

BATCHES, LEAST = 4, 32
MOST = 1 << 15  # completions of a batch: the inner products of all their scores are 8 GB
FIRST_STEP = 2_000_000  # the look's prompts are those of steps from this one on, which no run reaches


@dataclass(frozen=True)
class Findings:
    """What was measured, as means over batches with 95 % intervals by Student's t."""

    step: int  # the step of the checkpoint
    prompts: int  # prompts of each batch, P
    outputs: int  # completions of each prompt, G
    baseline: str  # the run's own baseline
    reward: Mean
    n_snr: float
    """Signal over noise of a batch of the run's own size with its baseline; 0 where noise hides any signal."""
    n_snr_low: float  # the lower end of its interval, by that of the signal; the noise is taken as known
    n_snr_high: float
    n_snr_signed: float
    """N SNR before 0 takes the place of what is negative by chance: what a mean over policies is taken of."""
    run_n_snr: float | None
    """The run's own N SNR at this step, a mean over the policies of the last steps; None where it had none."""
    run_prompts: int  # prompts a step of the run
    between: Mean | None
    """The share of the variance under `rloo` that comes from which prompts are drawn; negative by chance. None where
    the loss weighs completions by their lengths, which has another mean gradient."""
    variance: Mapping[str, GeometricMean]
    """The variance under each baseline over that under `rloo`, on the same batches."""

    @property
    def critical(self) -> float:
        """The number of prompts at which noise equals signal; infinite where no signal is found."""
        return self.run_prompts / self.n_snr if self.n_snr > 0 else math.inf

    @property
    def figures(self) -> str:
        """N SNR and the critical batch, with their intervals, in words."""
        with_yours = f" with your {self.run_prompts} prompts and {self.baseline}"
        found = f"N SNR {self.n_snr:.2g} ({self.n_snr_low:.2g} to {self.n_snr_high:.2g}){with_yours}; "
        if not self.n_snr > 0:
            return found + "no signal is above the noise (more prompts, --prompts, may show one)"
        most = f" to {self.run_prompts / self.n_snr_low:.0f}" if self.n_snr_low > 0 else " or more"
        return (
            f"{found}the critical batch is {self.critical:.0f} prompts ({self.run_prompts / self.n_snr_high:.0f}{most})"
        )

    def plain(self) -> dict[str, Any]:
        """It as a JSON object."""
        return asdict(self) | {"critical_batch_size": self.critical if math.isfinite(self.critical) else None}

    def __str__(self) -> str:
        run = "none" if self.run_n_snr is None else f"{self.run_n_snr:.2g}"
        source = "its source is unknown with this loss weighting"
        if self.between is not None:
            share = _figure(self.between)
            source = f"a share of {share} comes from the choice of prompts, the rest from their completions"
        lines = [
            f"A look at step {self.step}: {BATCHES} batches of {self.prompts} fresh prompts x {self.outputs} "
            "completions; 95 % intervals over batches",
            f"  reward            {_figure(self.reward)}",
            f"  signal and noise  {self.figures}",
            f"                    of this one policy (step {self.step}); the run logged {run} there, a mean over the "
            "policies of its last steps",
            f"  noise             {source}",
            "  gradient variance under each baseline, relative to rloo on the same batches:",
        ]
        if not self.variance:
            return "\n".join(
                [*lines[:-1], "  no comparison      all rewards agree, so there is no gradient to compare"]
            )
        for unbiased in (True, False):
            lines += [] if unbiased else ["  under biased baselines, which also rescale the gradient:"]
            names = [name for name in self.variance if BASELINES[name].unbiased == unbiased]
            for name in sorted(names, key=lambda name: self.variance[name].value):
                ratio, yours = self.variance[name], "  <- yours" if name == self.baseline else ""
                lines.append(f"    {name:14} {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}){yours}")
        return "\n".join(lines)


def look(run: Path, prompts: int = 0, step: int | None = None, first: int = 0) -> Findings:
    """Measure a checkpoint of a run of ours.

    Args:
        run: the run's folder.
        prompts: prompts of each batch, 2 at least; 0: as many as a step of the run has, and 32 if it has fewer.
        step: the step of the checkpoint; None: the newest that is not damaged.
        first: how many batches of prompts are left out, for looks that must share none.
    """
    folder = RunFolder(run)
    config, environments = environments_of(folder.saved_config())
    task, most = task_of(config), MOST // config.rollout.num_generations
    size = prompts or max(config.rollout.prompts_per_step, min(LEAST, getattr(task, "rows", LEAST)))
    if size < 2 or config.rollout.num_generations < 2:
        raise InputError("a look needs at least 2 prompts, and a run with num_generations of at least 2.")
    if size > most:
        raise InputError(
            f"--prompts is {size:,}; a look at this run takes at most {most:,}, each with "
            f"{config.rollout.num_generations} completions."
        )
    checkpoint = folder.newest_whole()[0] if step is None else folder.checkpoint(step)
    if checkpoint is None:
        raise InputError(f"{folder.path} has no checkpoint yet; try again once one is saved (save_steps).")
    given = config.task
    rewards = Rewards(task, given.rewards, given.on_reward_error, given.reward_seconds, environment=environments.reward)
    try:
        policy, state = load_checkpoint(checkpoint, config), load_state(checkpoint)
        policy = with_tools(policy, environments)
        drop_long_prompts(task, policy, config.task.max_prompt_length)
        set_threads(config.run.threads, policy)
        learner = make_learner(policy, rewards, config, sampler_of(policy, config, environments))
        learner.load_state_dict(state, str(folder.path))
        numbers = range(first, first + BATCHES)
        found = [_batch(learner, task.train_batch(FIRST_STEP + number, size), config, number) for number in numbers]
    finally:
        rewards.close()
        environments.close()
    batches, step = [batch for batch in found if batch is not None], int(state["step"])
    if len(batches) < 2:
        raise InputError(f"{folder.path}, step {step}: too few completions have a reward; check the reward's errors.")
    logged = {row["step"]: row.get("n_snr") for row in folder.read_metrics()}
    return _summed_up(batches, step, size, config, logged.get(step))


def _batch(learner: Learner, problems: list[Any], config: TrainConfig, number: int) -> tuple[float, Ledger] | None:
    """The mean reward and the ledger of a batch that is sampled; None where fewer than two prompts have rewards."""
    torch.manual_seed(seed_of(config.run.seed, FIRST_STEP + number))
    sampled = learner.sample(problems)
    charged, _ = learner.charged(sampled)
    batch = learner.batch(charged)
    if not batch.prompts:
        return None
    looked = learner.looks.at(batch, batch.count_P.nonzero().flatten(), seed=number)
    if (ledger := learner.looks.ledger(looked, batch, learner.baseline.prior, learner.weights(charged))) is None:
        return None
    return float(sampled.rewards_PG[sampled.valid_PG].mean()), ledger


def _summed_up(
    batches: Sequence[tuple[float, Ledger]], step: int, size: int, config: TrainConfig, run_n_snr: float | None = None
) -> Findings:
    own, P = resolve(config.algorithm, config.optim).baseline, config.rollout.prompts_per_step
    rewards, ledgers = zip(*batches, strict=True)
    entries = [ledger.entries[own] for ledger in ledgers]
    signal, noise = mean([entry.signal2 for entry in entries]), mean([entry.variance for entry in entries]).value
    per_signal = P / size / noise if noise > 0 else 0.0  # `variance` is that of a batch of `size` prompts
    beside = [(ledger, under) for ledger in ledgers if (under := ledger.entries["rloo"].variance) > 0]
    shares = [ledger.between / under for ledger, under in beside if not math.isnan(ledger.between)]
    names = ledgers[0].entries
    ratios = {name: [ledger.entries[name].variance / under for ledger, under in beside] for name in names}
    return Findings(
        step=step,
        prompts=size,
        outputs=config.rollout.num_generations,
        baseline=own,
        reward=mean(rewards),
        n_snr=max(signal.value, 0.0) * per_signal,
        n_snr_low=max(signal.low, 0.0) * per_signal,
        n_snr_high=max(signal.high, 0.0) * per_signal,
        n_snr_signed=signal.value * per_signal,
        run_n_snr=run_n_snr,
        run_prompts=P,
        between=mean(shares) if shares else None,
        variance={name: geometric_mean(of) for name, of in ratios.items() if of and min(of) > 0},
    )


def _figure(found: Mean) -> str:
    return f"{found.value:.2f}" + ("" if found.margin is None else f" +- {found.margin:.2f}")
