"""Algorithm 1 of OBLR-PO: score norms, baseline, advantages, gradient, signal-to-noise ratio, learning rate, update.

Sampling comes before (`rollout`); evaluation and checkpoints lie around it (`loop`). The algorithm is four names in a
table; nothing here asks which one runs.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from oblrpo import estimators
from oblrpo.algorithms import Algorithm
from oblrpo.config import AlgorithmConfig, OptimConfig, RolloutConfig, ScoresConfig
from oblrpo.errors import DivergedError, InputError, check_finite
from oblrpo.estimators import BASELINES, NORMALISATIONS, WEIGHTINGS
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.rollout import Rollouts
from oblrpo.scores import ScoreTape, UnsupportedModelError
from oblrpo.trainer.batch import Batch
from oblrpo.trainer.gradient import Block, GradientEstimate, Update
from oblrpo.trainer.sampler_mismatch import SamplerMismatch, clip_max_of
from oblrpo.trainer.score_norms import ScoreNorms, join
from oblrpo.trainer.variance_ledger import VarianceLedger, ledger_metrics

Metric = Mapping[torch.nn.Parameter, Tensor] | None


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
        self.clip_max = clip_max_of(rollout)
        self.scores = scores or ScoresConfig()
        self.score_norms = ScoreNorms(self.scores, "norm2_PG" in self.baseline.needs)
        self.prior = estimators.Prior(
            config.prior_strength if config.prior_strength >= 0 else None, config.prior_memory
        )
        # Made once: it refuses a model with a layer that has no rule before anything is sampled.
        self.tape = ScoreTape(policy.model, self.scores.score_method, memory_budget=self.scores.score_memory_mb * 10**6)
        exact = self.scores.ledger == "exact"
        per_block = rollout.prompts_per_micro_batch
        self.variance_ledger = VarianceLedger(policy, rollout.temperature, per_block, exact, self.clip_max)
        self.schedule = estimators.SNRSchedule(
            optimizer,
            algorithm.schedule,  # type: ignore[arg-type]
            ema=None if optim.schedule_ema == -1 else optim.schedule_ema,
            floor=optim.schedule_floor,
            ceiling=optim.schedule_ceiling,
            warmup=optim.warmup_steps * config.num_iterations,  # the schedule counts updates
            kl=optim.schedule_kl,
        )

    _PARTS = ("optimizer", "schedule", "scheduler", "score_norms", "prior")

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

    def learn(
        self, rollouts: Rollouts, rewards_PG: Tensor, step: int = 0, valid_PG: Tensor | None = None
    ) -> list[Update]:
        """`num_iterations` updates on one batch of completions; its own log-probabilities before the first are old.

        None, and nothing changes, where fewer than two prompts have as many valid outputs as the baseline needs.

        Args:
            rollouts: P x G completions.
            rewards_PG: F.
            step: of the run, from 1.
            valid_PG: outputs that have a reward (all if None); what stands in the place of the others is ignored.

        Raises:
            InputError: the model cannot be recorded, or the gradient cannot be used.
            DivergedError: the gradient or the updated weights are NaN or infinite.
        """
        given = rollouts.sequences, rewards_PG
        if self._batch(*given, valid_PG).prompts < 2:
            return []
        updates: list[Update] = []
        before, observed = copy.deepcopy(self.prior), self.prior
        for _ in range(self.config.num_iterations):
            old_logps_PG = updates[0].estimate.logps_PG if updates else None
            try:
                estimate = self.gradient(*given, old_logps_PG, step, valid_PG, rollouts.sampler_logps_SC)
                updates.append(self.update(estimate, *given))
            except DivergedError:
                raise
            except (ValueError, UnsupportedModelError) as error:
                raise InputError(f"the gradient cannot be used: {error}") from None
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
        self,
        sequences: Sequences,
        rewards_PG: Tensor,
        old_logps_PG: Tensor | None = None,
        step: int = 0,
        valid_PG: Tensor | None = None,
        sampler_logps_SC: Tensor | None = None,
    ) -> GradientEstimate:
        """G = (1/P) sum_i g_i, g_i = (1/G) sum_j rho_ij A_ij grad log pi(o_ij|q_i), streamed over whole groups.

        rho is pi / pi_old of the whole completion, 1 on-policy. With a sampler that reports its log-probabilities
        log mu, and unless `sampler_correction` is none, it is min(C, pi / mu) in every update on the batch. The
        baseline is weighted by ||rho grad log pi||^2. P and G count the outputs that take part (`Batch`).

        Raises:
            DivergedError: a log-probability, a score norm or a gradient is NaN or infinite.
            ValueError: what the sampler reports is no log-probability; fewer than two prompts take part.
        """
        batch = self._batch(sequences, rewards_PG, valid_PG, sampler_logps_SC)
        further = {} if old_logps_PG is not None else self._ledger(batch, step)
        P, G = batch.shape
        scale_PG = self._weighting(batch) / self._divisor(batch)
        metric = self._metric()
        per_block = self.rollout.prompts_per_micro_batch or P
        self.optimizer.zero_grad(set_to_none=True)
        blocks = [
            self._block(batch, slice(start, min(start + per_block, P)), scale_PG, old_logps_PG, metric, step)
            for start in range(0, P, per_block)
        ]
        norms = [block.norm2_S for block in blocks if block.norm2_S is not None]
        if old_logps_PG is None:
            further |= self._observe(batch, blocks)
        grad_norm2 = estimators.squared_norm(self.policy.parameters, metric)
        group_norm2_P = torch.cat([block.group_norm2_P for block in blocks])[batch.part_P]
        return GradientEstimate(
            norm2_PG=torch.cat(norms).view(P, G).to(batch.rewards_PG) if norms else None,
            baseline_PG=torch.cat([block.baseline_PG for block in blocks]),
            advantages_PG=torch.cat([block.advantages_PG for block in blocks]) / self._divisor(batch),
            logps_PG=torch.cat([block.output.logps_S for block in blocks]).view(P, G).to(batch.rewards_PG),
            rho_PG=torch.cat([block.rho_PG for block in blocks]),
            counted_PG=batch.counted_PG,
            moments=estimators.moments(group_norm2_P, grad_norm2, metric="optimizer" if metric else "euclidean"),
            grad_norm2=estimators.squared_norm(self.policy.parameters) if metric else grad_norm2,
            entropy=sum(block.entropy for block in blocks) / float(batch.sequences.completion_mask_SC.sum()),
            further=further,
        )

    def _batch(
        self,
        sequences: Sequences,
        rewards_PG: Tensor,
        valid_PG: Tensor | None,
        sampler_logps_SC: Tensor | None = None,
    ) -> Batch:
        """Prompts with fewer valid outputs than this algorithm compares take no part."""
        smallest = max(self.baseline.smallest_group, 2 if self.algorithm.normalisation == "group_std" else 1)
        return Batch(sequences, rewards_PG, valid_PG, smallest, sampler_logps_SC)

    def _block(
        self,
        whole: Batch,
        prompts: slice,
        scale_PG: Tensor,
        old_logps_PG: Tensor | None,
        metric: Metric,
        step: int,
    ) -> Block:
        """One micro-batch: forward, backward, norms, baseline, and its share of the gradient into `.grad`."""
        G, rewards_PG, weights = whole.shape[1], whole.rewards_PG[prompts], self.score_norms
        batch = whole.sequences.rows(prompts.start * G, prompts.stop * G)
        norm2_S = None
        with self.tape as tape:
            output = self.policy.logps(batch, self.rollout.temperature, self._needs_features(step))
            check_finite("log-probability", output.logps_S.detach())
            rho_PG, mismatch = self._rho(whole, prompts, batch, output, old_logps_PG)
            scale_PG = whole.of_mean(-rho_PG * scale_PG[prompts], prompts)  # minus: optimizers descend
            if self.baseline.by_token:  # known before the backward, which carries it token by token
                baseline = self._baseline(whole, prompts, rho_PG, None, batch, output)
                advantages = rewards_PG[..., None] - baseline
                tape.record((output.logp_SC * advantages.flatten(0, 1) * batch.completion_mask_SC).sum(1))
                mask = batch.completion_mask_SC.view_as(baseline)
                baseline_PG = (baseline * mask).sum(2) / mask.sum(2)
                advantages_PG = rewards_PG - baseline_PG
                group_norm2_P = tape.accumulate(scale_PG.flatten(), G, metric)
            else:
                tape.record(output.logps_S, **self._fold_basis(whole, prompts, scale_PG))
        if not self.baseline.by_token:
            norm2_S = tape.norm2() if weights.needs_norms(step) else None
            if norm2_S is not None:
                check_finite("score norm", norm2_S)
            baseline_PG = self._baseline(whole, prompts, rho_PG, norm2_S, batch, output)
            advantages_PG = rewards_PG - baseline_PG
            group_norm2_P = tape.accumulate((scale_PG * advantages_PG).flatten(), G, metric)
        check_finite("gradient of a prompt", group_norm2_P)
        group_norm2_P = group_norm2_P * whole.prompts**2
        entropy = float((output.entropy_SC * batch.completion_mask_SC).sum())
        return Block(norm2_S, baseline_PG, advantages_PG, rho_PG, group_norm2_P, output.detached(), entropy, mismatch)

    def _rho(
        self, whole: Batch, prompts: slice, batch: Sequences, output: Logps, old_logps_PG: Tensor | None
    ) -> tuple[Tensor, SamplerMismatch | None]:
        """Importance weights of a block's outputs, and how far the policy is from the sampler, where that is known."""
        G = whole.shape[1]
        logps_PG = output.logps_S.detach().view(-1, G).to(whole.rewards_PG)
        old = logps_PG if old_logps_PG is None else old_logps_PG[prompts]
        rho_PG, mismatch = (logps_PG - old).exp(), None
        if whole.sampler_logps_SC is not None:
            width = output.logp_SC.shape[1]
            reported_SC = whole.sampler_logps_SC[prompts.start * G : prompts.stop * G, :width]
            mismatch = SamplerMismatch.of(output.logp_SC, reported_SC, batch.completion_mask_SC)
            if self.clip_max is not None:  # the sampler is the old policy, of every update on the batch
                rho_PG = mismatch.rho_S(self.clip_max).view(-1, G).to(rho_PG)
        return rho_PG, mismatch

    def _baseline(
        self, whole: Batch, prompts: slice, rho_PG: Tensor, norm2_S: Tensor | None, batch: Sequences, output: Logps
    ) -> Tensor:
        """Of a block's outputs; of rewards alone, from the whole batch."""
        name, needs = self.algorithm.baseline, self.baseline.needs
        if not needs:
            return estimators.baseline(name, whole.rewards_PG, valid_PG=whole.valid_PG)[prompts]
        G, inputs = whole.shape[1], {}
        rewards_PG, valid_PG = whole.rewards_PG[prompts], whole.valid(prompts)
        if "norm2_PG" in needs:
            inputs["norm2_PG"] = self.score_norms.of(output.features, norm2_S).view(-1, G)
        if "length_PG" in needs:
            inputs["length_PG"] = batch.lengths_S.view(-1, G)
        if self.baseline.by_token:
            assert output.logit_norm2_SC is not None
            inputs["logit_norm2_PGT"] = output.logit_norm2_SC.view(*rho_PG.shape, -1)
            inputs["token_mask_PGT"] = batch.completion_mask_SC.view(*rho_PG.shape, -1)
        result = estimators.baseline(name, rewards_PG, valid_PG=valid_PG, rho_PG=rho_PG, prior=self.prior, **inputs)
        if "norm2_PG" in needs:  # other baselines too: the ledger asks what oblr_shrunk would have given
            self.prior.observe(rewards_PG, inputs["norm2_PG"] * rho_PG**2, valid_PG)
        return result

    def _needs_features(self, step: int) -> bool:
        return self.baseline.by_token or self.score_norms.needs_features(step)

    def _fold_basis(self, whole: Batch, prompts: slice, scale_PG: Tensor) -> dict[str, Any]:
        """What `record` needs to know beforehand if it is to keep a few sums a prompt only."""
        if self.tape.method != "folds":
            return {}
        basis_PGK = estimators.fold_basis(whole.rewards_PG[prompts], whole.valid(prompts)) * scale_PG[..., None]
        return {"basis_SK": basis_PGK.flatten(0, 1), "group_size": whole.shape[1]}

    def _weighting(self, batch: Batch) -> Tensor:
        """What the loss weighting makes of F - b, (P, G)."""
        lengths_PG = batch.sequences.lengths_S.view_as(batch.rewards_PG).to(batch.rewards_PG)
        weigh = WEIGHTINGS[self.algorithm.weighting]
        return weigh(lengths_PG, self.rollout.max_completion_length, batch.valid_PG)

    def _divisor(self, batch: Batch) -> Tensor:
        return NORMALISATIONS[self.algorithm.normalisation](batch.rewards_PG, batch.valid_PG)

    def _observe(self, batch: Batch, blocks: list[Block]) -> dict[str, float]:
        """Teach the calibrated proxy; metrics of the proxies and of the sampler's mismatch, where there are any."""
        further: dict[str, float] = {}
        norms = [block.norm2_S for block in blocks if block.norm2_S is not None]
        features = [block.output.features for block in blocks if block.output.features is not None]
        if norms and features and batch.shape[1] > 1:
            valid_S = None if batch.valid_PG is None else batch.valid_PG.flatten()
            further |= self.score_norms.observe(join(features), torch.cat(norms), batch.shape[1], valid_S)
        mismatches = [block.mismatch for block in blocks if block.mismatch is not None]
        return further | (SamplerMismatch.join(mismatches).metrics(self.clip_max) if mismatches else {})

    def _ledger(self, batch: Batch, step: int) -> dict[str, float]:
        every = self.scores.ledger_steps
        if self.scores.ledger == "off" or not every or step < 1 or (step != 1 and step % every):
            return {}
        ledger = self.variance_ledger.take(batch, self._weighting(batch), self.prior, step)
        return {} if ledger is None else ledger_metrics(ledger)

    def _metric(self) -> Metric:
        if self.optim.schedule_metric == "euclidean":
            return None
        return estimators.inverse_preconditioner(self.optimizer)

    def update(self, estimate: GradientEstimate, sequences: Sequences, rewards_PG: Tensor) -> Update:
        """Set the rate that the gradient's signal-to-noise ratio supports, clip if asked to, and step."""
        rho_N = estimate.rho_PG.double()[estimate.counted_PG]
        factor = self.schedule.step(estimate.moments, float(rho_N.mean() ** 2 / rho_N.square().mean()))
        learning_rate = self.schedule.learning_rates[0]
        if self.optim.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.policy.parameters, self.optim.max_grad_norm)
        watched = self._watched(estimate, sequences) if self.algorithm.schedule == "auto" else None
        self.optimizer.step()
        kl = None
        if watched is not None:
            chosen, before_S = watched
            kl, share = self.schedule.confine(lambda: self._logps_S(chosen) - before_S)
            factor, learning_rate = factor * share, learning_rate * share
        self.scheduler.step()
        return Update(estimate, factor, learning_rate, self.schedule.smoothed, self.schedule.snr_interval(), kl)

    def _watched(self, estimate: GradientEstimate, sequences: Sequences) -> tuple[Sequences, Tensor]:
        """Every so many outputs, and their log pi(o|q) before the update."""
        rows = estimate.counted_PG.flatten().nonzero().flatten()[:: self.optim.schedule_kl_every]
        chosen = sequences.at(rows)
        # In bfloat16 another batch is rounded in another way, which is not to be taken for a movement of the policy.
        return chosen, self._logps_S(chosen) if self.policy.rounds else estimate.logps_PG.flatten()[rows]

    @torch.no_grad()
    def _logps_S(self, chosen: Sequences) -> Tensor:
        """Their log pi(o|q), as many at a time as in training."""
        S = len(chosen.completion_SC)
        per_block = self.rollout.prompts_per_micro_batch * self.rollout.num_generations or S
        blocks = [chosen.rows(start, min(start + per_block, S)) for start in range(0, S, per_block)]
        return torch.cat([self.policy.logps(block, self.rollout.temperature).logps_S for block in blocks])
