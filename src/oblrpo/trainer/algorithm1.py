"""Algorithm 1 of OBLR-PO: score norms, baseline, advantages, gradient, signal-to-noise ratio, learning rate, update.

Sampling comes before (`rollout`); evaluation and checkpoints lie around it (`loop`). The algorithm is four names in a
table; nothing here asks which one runs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oblrpo import estimators
from oblrpo.algorithms import Algorithm
from oblrpo.config import AlgorithmConfig, OptimConfig, RolloutConfig, ScoresConfig
from oblrpo.errors import DivergedError, InputError
from oblrpo.estimators import BASELINES, NORMALISATIONS, WEIGHTINGS
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.rollout import Rollouts
from oblrpo.scores import ScoreTape, UnsupportedModelError
from oblrpo.trainer.accounts import Accountant, ledger_metrics
from oblrpo.trainer.weights import Weights, join

Metric = Mapping[torch.nn.Parameter, Tensor] | None


@dataclass(frozen=True)
class Estimate:
    """The gradient of one batch (left in `.grad`, as that of the loss -J) and all that was learned on the way."""

    norm2_PG: Tensor | None
    """Squared score norms, where they were taken."""
    baseline_PG: Tensor
    """Of a baseline by token: the mean over the output's tokens."""
    advantages_PG: Tensor
    """(F - b) over the normalisation's divisor."""
    logps_PG: Tensor
    rho_PG: Tensor
    moments: estimators.Moments
    grad_norm2: float
    entropy: float
    further: dict[str, float]
    """Metrics of some steps: how well proxies agree with the exact norms, the variance ledger."""


@dataclass(frozen=True)
class Update:
    """What one update did."""

    estimate: Estimate
    factor: float
    learning_rate: float
    smoothed: estimators.Moments
    snr_interval: tuple[float, float]
    kl: float | None
    """By how much the update moved the policy, nats, where it was measured."""


@dataclass(frozen=True)
class _Block:
    """One micro-batch of whole groups."""

    norm2_S: Tensor | None
    baseline_PG: Tensor
    advantages_PG: Tensor
    rho_PG: Tensor
    group_norm2_P: Tensor
    output: Logps
    entropy: float


class Learner:
    """Turns completions and rewards into updates of the policy."""

    def __init__(
        self,
        policy: Policy,
        algorithm: Algorithm,
        optimizer: Optimizer,
        scheduler: Any,
        rollout: RolloutConfig,
        config: AlgorithmConfig,
        optim: OptimConfig,
        scores: ScoresConfig | None = None,
    ) -> None:
        self.policy, self.algorithm, self.optimizer, self.scheduler = policy, algorithm, optimizer, scheduler
        self.rollout, self.config, self.optim = rollout, config, optim
        self.baseline = BASELINES[algorithm.baseline]
        self.scores = scores or ScoresConfig()
        self.weights = Weights(self.scores)
        self.prior = estimators.Prior(
            config.prior_strength if config.prior_strength >= 0 else None, config.prior_memory
        )
        # Made once: it refuses a model with a layer that has no rule before anything is sampled.
        self.tape = ScoreTape(policy.model, self.scores.score_method, memory_budget=self.scores.score_memory_mb * 10**6)
        exact = self.scores.ledger == "exact"
        self.accountant = Accountant(policy, rollout.temperature, rollout.prompts_per_micro_batch, exact)
        self.schedule = estimators.SNRSchedule(
            optimizer,
            algorithm.schedule,  # type: ignore[arg-type]
            ema=None if optim.schedule_ema == -1 else optim.schedule_ema,
            floor=optim.schedule_floor,
            ceiling=optim.schedule_ceiling,
            warmup=optim.warmup_steps * config.num_iterations,  # the schedule counts updates
            kl=optim.schedule_kl,
        )

    _PARTS = ("optimizer", "schedule", "scheduler", "weights", "prior")

    def state_dict(self) -> dict[str, Any]:
        """Everything but the policy that the next step depends on."""
        return {part: getattr(self, part).state_dict() for part in self._PARTS}

    def load_state_dict(self, state: dict[str, Any], run: str) -> None:
        """Take up where `state_dict` left off.

        Raises:
            InputError: it is the state of another version; the message names `run`.
        """
        try:
            for part in self._PARTS:
                getattr(self, part).load_state_dict(state[part])
        except (KeyError, ValueError) as error:
            raise InputError(
                f"{run} was written by another version ({error}); resume it with that one, or start anew from its "
                "checkpoint with --model."
            ) from None

    def learn(self, rollouts: Rollouts, rewards_PG: Tensor, step: int = 0) -> list[Update]:
        """`num_iterations` updates on one batch of completions; its own log-probabilities before the first are old.

        Raises:
            InputError: the model cannot be recorded, or the gradient cannot be used.
            DivergedError: the gradient or the updated weights are NaN or infinite.
        """
        updates: list[Update] = []
        before, observed = copy.deepcopy(self.prior), self.prior
        for _ in range(self.config.num_iterations):
            old_logps_PG = updates[0].estimate.logps_PG if updates else None
            try:
                estimate = self.gradient(rollouts.sequences, rewards_PG, old_logps_PG, step)
                updates.append(self.update(estimate, rollouts.sequences, rewards_PG))
            except (ValueError, UnsupportedModelError) as error:
                raise (DivergedError if "NaN" in str(error) else InputError)(  # the estimators' own word for it
                    f"the gradient cannot be used: {error} Where it is NaN, lower learning_rate."
                ) from None
            observed = self.prior if len(updates) == 1 else observed
            self.prior = copy.deepcopy(before)  # a later update on the batch must not have seen it
        self.prior = observed
        self.prior.next_step()
        if not torch.stack([p.detach().sum() for p in self.policy.parameters]).isfinite().all():
            raise DivergedError(
                "the update made the weights NaN or infinite; lower learning_rate or set max_grad_norm."
            )
        return updates

    def gradient(
        self, sequences: Sequences, rewards_PG: Tensor, old_logps_PG: Tensor | None = None, step: int = 0
    ) -> Estimate:
        """G = (1/P) sum_i g_i, g_i = (1/G) sum_j rho_ij A_ij grad log pi(o_ij|q_i), streamed over whole groups.

        rho is pi / pi_old of the whole completion, 1 on-policy; the baseline is weighted by ||rho grad log pi||^2.

        Raises:
            ValueError: a score norm or a gradient is NaN or infinite.
        """
        P, G = rewards_PG.shape
        scale_PG = self._scale(sequences, rewards_PG)
        further = {} if old_logps_PG is not None else self._ledger(sequences, rewards_PG, step)
        metric = self._metric()
        per_block = self.rollout.prompts_per_micro_batch or P
        self.optimizer.zero_grad(set_to_none=True)
        blocks = [
            self._block(
                sequences, rewards_PG, slice(start, min(start + per_block, P)), scale_PG, old_logps_PG, metric, step
            )
            for start in range(0, P, per_block)
        ]
        norms = [block.norm2_S for block in blocks if block.norm2_S is not None]
        features = [block.output.features for block in blocks if block.output.features is not None]
        if norms and features and old_logps_PG is None and G > 1:
            further |= self.weights.observe(join(features), torch.cat(norms), G)
        grad_norm2 = estimators.squared_norm(self.policy.parameters, metric)
        group_norm2_P = torch.cat([block.group_norm2_P for block in blocks])
        return Estimate(
            norm2_PG=torch.cat(norms).view(P, G).to(rewards_PG) if norms else None,
            baseline_PG=torch.cat([block.baseline_PG for block in blocks]),
            advantages_PG=torch.cat([block.advantages_PG for block in blocks]) / self._divisor(rewards_PG),
            logps_PG=torch.cat([block.output.logps_S for block in blocks]).view(P, G).to(rewards_PG),
            rho_PG=torch.cat([block.rho_PG for block in blocks]),
            moments=estimators.moments(group_norm2_P, grad_norm2, metric="optimizer" if metric else "euclidean"),
            grad_norm2=estimators.squared_norm(self.policy.parameters) if metric else grad_norm2,
            entropy=sum(block.entropy for block in blocks) / float(sequences.completion_mask_SC.sum()),
            further=further,
        )

    def _block(
        self,
        sequences: Sequences,
        rewards_PG: Tensor,
        prompts: slice,
        scale_PG: Tensor,
        old_logps_PG: Tensor | None,
        metric: Metric,
        step: int,
    ) -> _Block:
        """One micro-batch: forward, backward, norms, baseline, and its share of the gradient into `.grad`."""
        P, G = rewards_PG.shape
        batch, weights = sequences.rows(prompts.start * G, prompts.stop * G), self.weights
        norm2_S = None
        with self.tape as tape:
            output = self.policy.logps(batch, self.rollout.temperature, self._needs_features(step))
            logps_PG = output.logps_S.detach().view(-1, G).to(rewards_PG)
            old = logps_PG if old_logps_PG is None else old_logps_PG[prompts]
            rho_PG = (logps_PG - old).exp()
            scale_PG = -rho_PG * scale_PG[prompts] / P / G  # minus: optimizers descend
            if self.baseline.by_token:  # known before the backward, which carries it token by token
                baseline = self._baseline(rewards_PG, prompts, rho_PG, None, batch, output)
                advantages = rewards_PG[prompts, :, None] - baseline
                tape.record((output.logp_SC * advantages.flatten(0, 1) * batch.completion_mask_SC).sum(1))
                mask = batch.completion_mask_SC.view_as(baseline)
                baseline_PG = (baseline * mask).sum(2) / mask.sum(2)
                advantages_PG = rewards_PG[prompts] - baseline_PG
                group_norm2_P = tape.accumulate(scale_PG.flatten(), G, metric)
            else:
                tape.record(output.logps_S, **self._fold_basis(rewards_PG[prompts], scale_PG))
        if not self.baseline.by_token:
            norm2_S = tape.norm2() if weights.needs_norms(step) else None
            baseline_PG = self._baseline(rewards_PG, prompts, rho_PG, norm2_S, batch, output)
            advantages_PG = rewards_PG[prompts] - baseline_PG
            group_norm2_P = tape.accumulate((scale_PG * advantages_PG).flatten(), G, metric)
        entropy = float((output.entropy_SC * batch.completion_mask_SC).sum())
        return _Block(norm2_S, baseline_PG, advantages_PG, rho_PG, group_norm2_P * P**2, output.detached(), entropy)

    def _baseline(
        self,
        rewards_PG: Tensor,
        prompts: slice,
        rho_PG: Tensor,
        norm2_S: Tensor | None,
        batch: Sequences,
        output: Logps,
    ) -> Tensor:
        """Of a block's outputs; of rewards alone, from the whole batch."""
        name, needs = self.algorithm.baseline, self.baseline.needs
        if not needs:
            return estimators.baseline(name, rewards_PG)[prompts]
        G, inputs = rewards_PG.shape[1], {}
        if "norm2_PG" in needs:
            inputs["norm2_PG"] = self.weights.of(output.features, norm2_S).view(-1, G)
        if "length_PG" in needs:
            inputs["length_PG"] = batch.lengths_S.view(-1, G)
        if self.baseline.by_token:
            assert output.logit_norm2_SC is not None
            inputs["logit_norm2_PGT"] = output.logit_norm2_SC.view(*rho_PG.shape, -1)
            inputs["token_mask_PGT"] = batch.completion_mask_SC.view(*rho_PG.shape, -1)
        result = estimators.baseline(name, rewards_PG[prompts], rho_PG=rho_PG, prior=self.prior, **inputs)
        if "norm2_PG" in needs:  # other baselines too: the ledger asks what oblr_shrunk would have given
            self.prior.observe(rewards_PG[prompts], inputs["norm2_PG"] * rho_PG**2)
        return result

    def _needs_features(self, step: int) -> bool:
        return self.baseline.by_token or self.weights.needs_features(step)

    def _fold_basis(self, rewards_PG: Tensor, scale_PG: Tensor) -> dict[str, Any]:
        """What `record` needs to know beforehand if it is to keep a few sums a prompt only."""
        if self.tape.method != "folds":
            return {}
        basis_PGK = estimators.fold_basis(rewards_PG) * scale_PG[..., None]
        return {"basis_SK": basis_PGK.flatten(0, 1), "group_size": rewards_PG.shape[1]}

    def _scale(self, sequences: Sequences, rewards_PG: Tensor) -> Tensor:
        """What normalisation and loss weighting make of F - b, (P, G)."""
        lengths_PG = sequences.lengths_S.view_as(rewards_PG).to(rewards_PG)
        weighting = WEIGHTINGS[self.algorithm.weighting](lengths_PG, self.rollout.max_completion_length)
        return weighting / self._divisor(rewards_PG)

    def _divisor(self, rewards_PG: Tensor) -> Tensor:
        return NORMALISATIONS[self.algorithm.normalisation](rewards_PG)

    def _ledger(self, sequences: Sequences, rewards_PG: Tensor, step: int) -> dict[str, float]:
        every = self.scores.ledger_steps
        if self.scores.ledger == "off" or not every or step < 1 or (step != 1 and step % every):
            return {}
        lengths_PG = sequences.lengths_S.view_as(rewards_PG).to(rewards_PG)
        weighting = WEIGHTINGS[self.algorithm.weighting](lengths_PG, self.rollout.max_completion_length)
        return ledger_metrics(self.accountant.take(sequences, rewards_PG, weighting, self.prior, seed=step))

    def _metric(self) -> Metric:
        if self.optim.schedule_metric == "euclidean":
            return None
        return estimators.inverse_preconditioner(self.optimizer)

    def update(self, estimate: Estimate, sequences: Sequences, rewards_PG: Tensor) -> Update:
        """Set the rate that the gradient's signal-to-noise ratio supports, clip if asked to, and step."""
        rho_PG = estimate.rho_PG.double()
        factor = self.schedule.step(estimate.moments, float(rho_PG.mean() ** 2 / rho_PG.square().mean()))
        learning_rate = self.schedule.learning_rates[0]
        if self.optim.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.policy.parameters, self.optim.max_grad_norm)
        self.optimizer.step()
        kl = None
        if self.algorithm.schedule == "auto":
            kl, share = self.schedule.confine(lambda: self._change(estimate, sequences, rewards_PG))
            factor, learning_rate = factor * share, learning_rate * share
        self.scheduler.step()
        return Update(estimate, factor, learning_rate, self.schedule.smoothed, self.schedule.snr_interval(), kl)

    @torch.no_grad()
    def _change(self, estimate: Estimate, sequences: Sequences, rewards_PG: Tensor) -> Tensor:
        """Log pi(o|q) now less that before the update, of every so many outputs: one more forward on them."""
        every = self.optim.schedule_kl_every
        rows = slice(None, None, every)
        chosen = Sequences(
            sequences.prompt_SQ[rows],
            sequences.prompt_mask_SQ[rows],
            sequences.completion_SC[rows],
            sequences.completion_mask_SC[rows],
        )
        change = []
        old_S = estimate.logps_PG.flatten()[rows]
        per_block = (self.rollout.prompts_per_micro_batch * rewards_PG.shape[1]) or len(old_S)
        for start in range(0, len(old_S), per_block):
            batch = chosen.rows(start, min(start + per_block, len(old_S)))
            change.append(self.policy.logps(batch, self.rollout.temperature).logps_S - old_S[start : start + per_block])
        return torch.cat(change)
