"""The variance ledger of a step: every registered baseline on the batch at hand, from one more pass over it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.errors import check_finite
from oblrpo.estimators import BASELINES, Prior
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.policy.micro_batches import MicroBatches, rows_of
from oblrpo.scores import ScoreTape
from oblrpo.step.off_policy import OffPolicyBatch, SamplerMismatch
from oblrpo.step.selection import BACKWARD, SAMPLING

SHARE = 0.02
"""The share of a run's work that its ledgers take, where they are not asked for by number."""
LOOK = 7.0
"""What a ledger costs a token, in forwards: twice a forward and a backward, and inner products."""
DIRECTIONS, DIMENSIONS = 8, 2048
"""The size of each of the two independent sketches that inner products come from; see `ScoreTape.sketch`."""


class VarianceLedger:
    """Takes the ledger: one forward and backward for activations, and as much again for the token-level baseline.

    Inner products come from sketches, unless they are to be `exact`, which needs all prompts in one micro-batch.
    `metrics` takes the ledger in step 1 and in every so many steps; `every` 0: never; None: whenever `SHARE` of the
    run's work pays for one. Work is counted in tokens, and not in seconds, so that a run repeats itself.
    """

    def __init__(
        self, policy: Policy, temperature: float, micro_batches: MicroBatches, exact: bool = False,
        every: int | None = 0,
    ) -> None:  # fmt: skip
        if exact and micro_batches.any:
            raise ValueError("an exact ledger needs all prompts in one micro-batch.")
        self.policy, self.temperature, self.every = policy, temperature, every
        self.micro_batches, self.exact = micro_batches, exact
        self.taken: tuple[Tensor, Tensor] | None = None
        """The prompts (P',) of the ledger that was taken last, and their scores' inner products, until `of_draw`."""
        self._tape = ScoreTape(policy.model)
        self._saved = 0.0  # of past work, for the next ledger; in forwards of a token

    def metrics(self, batch: OffPolicyBatch, prior: Prior, step: int) -> dict[str, float]:
        """The ledger of a step as metrics, in steps that take one; else nothing."""
        self.taken = None  # an earlier step's, where that step made no update
        if not self._is_due(batch, step):
            return {}
        ledger = self.take(batch, prior, step)
        if ledger is None:
            return {}
        dimension = ledger.entries["rloo"].effective_dimension if "rloo" in ledger.entries else math.nan
        return ledger_metrics(ledger) | {"effective_dimension": dimension}

    def _is_due(self, batch: OffPolicyBatch, step: int) -> bool:
        if self.every is not None:
            return self.every > 0 and (step == 1 or (step > 0 and step % self.every == 0))
        tokens = float(batch.sequences.mask_ST.sum())
        if step < 1 or self._saved < LOOK * tokens:
            return False
        self._saved -= LOOK * tokens
        return True

    def save_up(self, batch: OffPolicyBatch) -> None:
        """Put the share of a step's work aside, after its gradient: what went through the model of this batch."""
        tokens_S = batch.sequences.mask_ST.sum(1)
        trained = float(tokens_S[batch.keep_PG.flatten() > 0].sum())
        self._saved += SHARE * (SAMPLING * float(tokens_S.sum()) + BACKWARD * trained)

    def state_dict(self) -> dict[str, Any]:
        """What was put aside."""
        return {"saved": self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self._saved = state["saved"]

    def of_draw(self, batch: OffPolicyBatch) -> dict[str, float]:
        """What leaving outputs out added to the gradient's variance, as metrics; after `metrics` of the same batch.

        `measured` is over sum_j a_j^2 w_j, as the prediction is, and `of_gradient` over the variance with all outputs.
        Nothing where no ledger was taken, or none were drawn.
        """
        taken, self.taken = self.taken, None
        if taken is None or batch.draw is None:
            return {}
        chosen_P, gram = taken
        chance_PG, coef_PG = batch.draw.chance_PG[chosen_P], batch.draw.coef_PG[chosen_P]
        valid_PG = batch.valid_PG[chosen_P]
        gram_SS = gram.expand(2, -1, -1).mean(0)
        added = estimators.added_variance(chance_PG, coef_PG, gram_SS, batch.draw.nothing)
        alone = float(coef_PG.double().square().flatten() @ gram_SS.diagonal().double())
        advantages = {"drawn": coef_PG * len(chosen_P) * valid_PG.sum(1, keepdim=True)}
        whole = estimators.ledger(gram, advantages, batch.rewards_PG[chosen_P], {"drawn": False}, valid_PG=valid_PG)
        variances = {"measured": alone, "of_gradient": whole.entries["drawn"].variance}
        return {f"added_variance/{name}": added / over for name, over in variances.items() if over > 0}

    def take(self, batch: OffPolicyBatch, prior: Prior, seed: int) -> estimators.Ledger | None:
        """The ledger of the prompts with outputs enough for every baseline; None where fewer than two have them.

        With importance weights rho, scores are rho grad log pi: their inner products, norms and all that follows. The
        prior is what earlier steps say, for `oblr_shrunk`; the seed is that of the sketches.
        """
        G = batch.shape[1]
        part_P = batch.valid_PG.sum(1) >= min(2, G)
        if int(part_P.sum()) < 2:
            return None
        chosen_P = part_P.nonzero().flatten()
        blocks = self.micro_batches.of(batch.sequences.at(rows_of(chosen_P, G)), G)
        chosen_P = chosen_P[torch.cat(blocks)]  # in the order in which they go through the model
        sizes = [len(block) * G for block in blocks]
        rows_S = rows_of(chosen_P, G)
        sequences = batch.sequences.at(rows_S)
        rewards_PG, valid_PG = batch.rewards_PG[chosen_P], batch.valid_PG[chosen_P]
        outputs, gram, norm2_S = self._pass(sequences, sizes, seed)
        longest, rho_S = sequences.own_SC.shape[1], None
        if batch.sampler_logps_SC is not None and batch.clip_max is not None:
            reported_SC = batch.sampler_logps_SC[rows_S, :longest]
            logp_SC = _joined([output.logp_SC for output in outputs], longest)
            rho_S = SamplerMismatch.of(logp_SC, reported_SC, sequences.own_SC).rho_S(batch.clip_max)
            gram = _weighted(gram, rho_S)
        self.taken = chosen_P, gram
        logit_norm2_SC = _joined([output.logit_norm2_SC for output in outputs], longest)
        own_PGT = sequences.own_SC.view(*rewards_PG.shape, -1).to(rewards_PG)
        inputs = estimators.baseline_inputs(own_PGT, norm2_S.view_as(rewards_PG), logit_norm2_SC.view_as(own_PGT))

        def by_token(advantages_PGT: Tensor) -> Tensor:
            weighted = self._pass(sequences, sizes, seed, advantages_PGT.flatten(0, 1))[1]
            return weighted if rho_S is None else _weighted(weighted, rho_S)

        rho_PG = None if rho_S is None else rho_S.view_as(rewards_PG)
        return ledger_of(gram, rewards_PG, valid_PG, inputs, prior, rho_PG, batch.weight_PG[chosen_P], by_token)

    def _pass(
        self, sequences: Sequences, sizes: list[int], seed: int, weight_SC: Tensor | None = None
    ) -> tuple[list[Logps], Tensor, Tensor]:
        """The forward's results, two estimates of the (token-weighted) scores' inner products, and squared norms."""
        outputs, norms = [], []
        grams: list[Tensor] = []
        sketches: list[Sequence[Tensor]] = []
        start = 0
        for size in sizes:
            batch = sequences.at(slice(start, start + size))
            with self._tape as tape:
                output = self.policy.logps(batch, self.temperature)
                scored_S = output.logps_S
                if weight_SC is not None:
                    weight = weight_SC[start : start + batch.count, : output.logp_SC.shape[1]]
                    scored_S = (output.logp_SC * weight.to(output.logp_SC) * batch.own_SC).sum(1)
                check_finite("log-probability", scored_S.detach())
                tape.record(scored_S)
            start += batch.count
            outputs.append(output.detached())
            norms.append(tape.norm2())
            check_finite("score norm", norms[-1])
            if self.exact:
                grams.append(tape.gram())
            else:
                sketches.append(two_sketches(tape, seed))
        self._tape.forget()
        norm2_S = torch.cat(norms)
        if self.exact:
            return outputs, with_norms(grams[0], norm2_S), norm2_S
        return outputs, gram_of([torch.cat(blocks) for blocks in zip(*sketches, strict=True)], norm2_S), norm2_S


def ledger_of(
    gram: Tensor,
    rewards_PG: Tensor,
    valid_PG: Tensor,
    inputs: Mapping[str, Tensor],
    prior: Prior,
    rho_PG: Tensor | None = None,
    weight_PG: Tensor | None = None,
    by_token: Callable[[Tensor], Tensor] | None = None,
) -> estimators.Ledger:
    """The ledger of a batch whose scores' inner products were taken, (S, S), or two estimates of them, (2, S, S).

    Every prompt has a valid output. `inputs` are those of `baseline_inputs`; importance weights rho_PG and the loss
    weighting weight_PG are 1 if None; `by_token` gives the inner products under advantages by token, (P, G, T).
    """
    weight_PG = torch.ones_like(rewards_PG) if weight_PG is None else weight_PG
    coefs, grams = {}, {}
    advantages = estimators.under_every_baseline(rewards_PG, inputs, valid_PG=valid_PG, rho_PG=rho_PG, prior=prior)
    for name, (advantage, divisor_PG) in advantages.items():
        scale_PG = weight_PG / divisor_PG
        if not BASELINES[name].by_token:
            coefs[name] = advantage * scale_PG
        elif by_token is not None:
            coefs[name], grams[name] = scale_PG, by_token(advantage)
    plainly = bool((weight_PG == 1).all())  # a loss weighting has another mean gradient
    unbiased = {name: BASELINES[name].unbiased and plainly for name in coefs}
    return estimators.ledger(gram, coefs, rewards_PG, unbiased, grams, valid_PG)


def ledger_metrics(ledger: estimators.Ledger) -> dict[str, float]:
    """`variance/NAME` and `signal2/NAME` of every baseline, and the variance that no baseline can remove."""
    metrics = {f"variance/{name}": entry.variance for name, entry in ledger.entries.items()}
    metrics |= {f"signal2/{name}": entry.signal2 for name, entry in ledger.entries.items()}
    return metrics | {"variance_between_prompts": ledger.between}


def two_sketches(tape: ScoreTape, seed: int) -> list[Tensor]:
    """Two independent sketches of the scores that a tape holds, (S, L) each."""
    return [tape.sketch(2 * seed + which, DIRECTIONS, DIMENSIONS) for which in range(2)]


def gram_of(sketches: Sequence[Tensor], norm2_S: Tensor) -> Tensor:
    """An estimate of the scores' inner products from each sketch, (2, S, S), exact on the diagonal."""
    return with_norms(torch.stack([sketch_SL @ sketch_SL.T for sketch_SL in sketches]), norm2_S)


def with_norms(gram: Tensor, norm2_S: Tensor) -> Tensor:
    """Inner products, (S, S) or several of them, with exact norms on the diagonal."""
    return gram.diagonal_scatter(norm2_S.to(gram).expand(gram.shape[:-1]), dim1=-2, dim2=-1)


def _weighted(gram: Tensor, rho_S: Tensor) -> Tensor:
    """The inner products of the scores times rho, from those of the scores."""
    return gram * rho_S[:, None] * rho_S


def _joined(blocks: list[Tensor], width: int) -> Tensor:
    return torch.cat([torch.nn.functional.pad(block, (0, width - block.shape[1])) for block in blocks])
