"""What logs cannot say of a run, measured once with its newest checkpoint: noise, batch, baselines, length, assumption.

Some batches of fresh prompts are sampled and scored; nothing is learned, and the run's folder stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from oblrpo.algorithms import resolve
from oblrpo.errors import InputError
from oblrpo.estimators import BASELINES, Ledger, depends_on_own_output
from oblrpo.intervals import GeometricMean, Mean, geometric_mean, mean
from oblrpo.rewards import Rewards
from oblrpo.runs import RunFolder
from oblrpo.runs.state_files import load_state
from oblrpo.scores.proxies import agreement
from oblrpo.seeds import seed_of
from oblrpo.settings import TrainConfig
from oblrpo.trainer.learner import Learner
from oblrpo.trainer.setup import load_checkpoint, make_learner, set_threads
from oblrpo.trainer.task import drop_long_prompts, task_of

BATCHES, LEAST = 4, 32
FAR = 2_000_000
"""The look's prompts are those of steps from this one on, which no run reaches."""


@dataclass(frozen=True)
class Look:
    """What was measured, as means over batches with 95 % intervals by Student's t."""

    step: int
    """The step of the checkpoint."""
    prompts: int
    """Prompts of each batch, P."""
    outputs: int
    """Completions of each prompt, G."""
    baseline: str
    """The run's own baseline."""
    reward: Mean
    n_snr: float
    """Signal over noise of a batch of the run's own size with its baseline; 0 where noise hides any signal."""
    n_snr_low: float
    """The lower end of its interval, by that of the signal; the noise is taken as known."""
    n_snr_high: float
    run_prompts: int
    """Prompts a step of the run."""
    between: Mean | None
    """The share of the variance under `rloo` that comes from which prompts are drawn; negative by chance. None where
    the loss weighs completions by their lengths, which has another mean gradient."""
    variance: Mapping[str, GeometricMean]
    """The variance under each baseline over that under `rloo`, on the same batches."""
    length: Mean | None
    """The correlation of log length and log squared score norm within prompts; None where lengths do not differ."""
    depends: bool
    """Whether the run's baseline changes with the completion that it is subtracted from."""

    @property
    def critical(self) -> float:
        """The number of prompts at which noise equals signal; infinite where no signal is found."""
        return self.run_prompts / self.n_snr if self.n_snr > 0 else math.inf

    def plain(self) -> dict[str, Any]:
        """It as a JSON object."""
        found = asdict(self) | {"critical_batch_size": self.critical if math.isfinite(self.critical) else None}
        return found | {"variance": {name: asdict(ratio) for name, ratio in self.variance.items()}}

    def __str__(self) -> str:
        lines = [
            f"A look at step {self.step}: {BATCHES} batches of {self.prompts} fresh prompts x {self.outputs} "
            "completions; 95 % intervals over batches",
            f"  reward            {_figure(self.reward)}",
            f"  signal and noise  N SNR {self.n_snr:.2g} ({self.n_snr_low:.2g} to {self.n_snr_high:.2g}) with your "
            f"{self.run_prompts} prompts and {self.baseline}; {self._batch()}",
            f"  noise             {self._noise()}",
            f"  length            {self._length()}",
            f"  assumption 1      {self._assumption()}",
            "  variance of the gradient, over rloo's on the same batches:",
        ]
        if not self.variance:
            return "\n".join(
                [*lines[:-1], "  no baseline        all rewards agree, so that there is no gradient to compare"]
            )
        for unbiased in (True, False):
            lines += [] if unbiased else ["  of biased baselines, whose gradients have other lengths, too:"]
            names = [name for name in self.variance if BASELINES[name].unbiased == unbiased]
            for name in sorted(names, key=lambda name: self.variance[name].value):
                ratio, yours = self.variance[name], "  <- yours" if name == self.baseline else ""
                lines.append(f"    {name:14} {ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f}){yours}")
        return "\n".join(lines)

    def _batch(self) -> str:
        if not self.n_snr > 0:
            return "no signal is above the noise (a look at more prompts, --prompts, can tell more)"
        most = f" to {self.run_prompts / self.n_snr_low:.0f}" if self.n_snr_low > 0 else " or more"
        return f"the critical batch is {self.critical:.0f} prompts ({self.run_prompts / self.n_snr_high:.0f}{most})"

    def _noise(self) -> str:
        if self.between is None:
            return "where it comes from is not known under this loss weighting"
        return f"{_figure(self.between)} of it comes from which prompts are drawn, the rest from their completions"

    def _length(self) -> str:
        if self.length is None:
            return "completions of a prompt are equally long: nothing to weigh by"
        if self.length.margin is None:
            return "completions of a prompt differ in length in one batch only: nothing can be told"
        good = "a good" if self.length.low > GOOD else "a poor" if self.length.high < GOOD else "perhaps a good"
        return (
            f"{good} proxy of score norms here: correlation {_figure(self.length)} within prompts, of their logarithms"
        )

    def _assumption(self) -> str:
        if self.depends:
            return f"broken: {self.baseline} changes with the completion it is subtracted from, and biases the gradient"
        return f"holds: {self.baseline} does not look at the completion it is subtracted from"


GOOD = 0.9  # the correlation from which on a proxy is called good: four fifths of the spread


def look(run: Path, prompts: int = 0) -> Look:
    """Measure the newest whole checkpoint of a run of ours.

    Args:
        run: the run's folder.
        prompts: prompts of each batch, 2 at least; 0: as many as a step of the run has, 32 at least.

    Raises:
        InputError: there is no such run, or no checkpoint, or too few prompts, or no reward on any of them.
    """
    folder = RunFolder(run)
    if not folder.config_file.is_file():
        raise InputError(
            f"--look needs a run of oblrpo train, whose prompts and rewards are known; {run} is none. In a trainer of "
            "TRL's add a VarianceLedgerCallback (docs/trl.md)."
        )
    config, (checkpoint, _) = folder.saved_config(), folder.newest_whole()
    if checkpoint is None:
        raise InputError(f"{run} holds no checkpoint yet; look when one is there (save_steps).")
    size = prompts or max(config.rollout.prompts_per_step, LEAST)
    if size < 2 or config.rollout.num_generations < 2:
        raise InputError("a look needs at least 2 prompts, and a run with num_generations of at least 2.")
    policy, state, task = load_checkpoint(checkpoint, config), load_state(checkpoint), task_of(config)
    drop_long_prompts(task, policy, config.task.max_prompt_length)
    set_threads(config.run.threads, policy)
    rewards = Rewards(task, config.task.rewards, config.task.on_reward_error, config.task.reward_seconds)
    try:
        learner = make_learner(policy, rewards, config)
        learner.load_state_dict(state, str(run))
        learner.sampler.sync(policy)
        batches = [_batch(learner, task.train_batch(FAR + number, size), config, number) for number in range(BATCHES)]
    finally:
        rewards.close()
    taken = [batch for batch in batches if batch is not None]
    if len(taken) < 2:
        raise InputError(f"{run}: too few completions have a reward to look at; look at the reward's errors.")
    return _summed_up(taken, state["step"], size, config)


@dataclass(frozen=True)
class _Batch:
    reward: float
    ledger: Ledger
    length: float  # correlation with score norms


def _batch(learner: Learner, problems: list[Any], config: TrainConfig, number: int) -> _Batch | None:
    """Sample and score a batch; None where fewer than two of its prompts have rewards."""
    torch.manual_seed(seed_of(config.run.seed, FAR + number))
    sampled = learner.sample(problems)
    ledger = learner.ledger.take(learner.batch(sampled), learner.baseline.prior, number)
    if ledger is None or learner.ledger.taken is None:
        return None
    chosen_P, gram = learner.ledger.taken
    G = config.rollout.num_generations
    norm2_S = gram.expand(2, -1, -1).mean(0).diagonal()
    lengths_S = sampled.rollouts.sequences.lengths_S.view(-1, G)[chosen_P].flatten().to(norm2_S)
    valid_S = sampled.valid_PG[chosen_P].flatten()
    reward = float(sampled.rewards_PG[sampled.valid_PG].mean())
    return _Batch(reward, ledger, agreement(lengths_S, norm2_S, G, valid_S))


def _summed_up(batches: Sequence[_Batch], step: int, size: int, config: TrainConfig) -> Look:
    own = resolve(config.algorithm, config.optim).baseline
    entries, P = [batch.ledger.entries[own] for batch in batches], config.rollout.prompts_per_step
    signal, noise = mean([entry.signal2 for entry in entries]), mean([entry.variance for entry in entries]).value
    per_signal = P / size / noise if noise > 0 else 0.0  # `variance` is that of a batch of `size` prompts
    lengths = [batch.length for batch in batches if not math.isnan(batch.length)]
    rloo = [batch.ledger.entries["rloo"].variance for batch in batches]
    pairs = [(batch.ledger.between, under) for batch, under in zip(batches, rloo, strict=True) if under > 0]
    shares = [between / under for between, under in pairs if not math.isnan(between)]
    ratios = {
        name: [
            batch.ledger.entries[name].variance / under for batch, under in zip(batches, rloo, strict=True) if under > 0
        ]
        for name in batches[0].ledger.entries
    }
    return Look(
        step=step,
        prompts=size,
        outputs=config.rollout.num_generations,
        baseline=own,
        reward=mean([batch.reward for batch in batches]),
        n_snr=max(signal.value, 0.0) * per_signal,
        n_snr_low=max(signal.low, 0.0) * per_signal,
        n_snr_high=max(signal.high, 0.0) * per_signal,
        run_prompts=P,
        between=mean(shares) if shares else None,
        variance={name: geometric_mean(of) for name, of in ratios.items() if of and min(of) > 0},
        length=mean(lengths) if lengths else None,
        depends=depends_on_own_output(own),
    )


def _figure(found: Mean) -> str:
    return f"{found.value:.2f}" + ("" if found.margin is None else f" +- {found.margin:.2f}")
