"""The variance ledger of a step: every registered baseline on the batch at hand, from one more pass over it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.errors import check_finite
from oblrpo.estimators import BASELINES, Prior
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.policy.micro_batches import MicroBatches, rows_of
from oblrpo.scores import ScoreTape
from oblrpo.trainer.batch import Batch
from oblrpo.trainer.sampler_mismatch import SamplerMismatch

DIRECTIONS, DIMENSIONS = 8, 2048
"""The size of each of the two independent sketches that inner products come from; see `ScoreTape.sketch`."""


class VarianceLedger:
    """Takes the ledger: one forward and backward for activations, and as much again for the token-level baseline.

    Args:
        policy: the policy whose gradient it is.
        temperature: the temperature of sampling.
        micro_batches: which prompts' completions go through the model together.
        exact: take inner products exactly, in one block, instead of from sketches.
        every: `metrics` takes the ledger in step 1 and every so many steps; 0: never.

    Raises:
        ValueError: an exact ledger is asked for in several blocks.
    """

    def __init__(
        self, policy: Policy, temperature: float, micro_batches: MicroBatches, exact: bool = False, every: int = 0
    ) -> None:
        if exact and micro_batches.any:
            raise ValueError("an exact ledger needs all prompts in one micro-batch.")
        self.policy, self.temperature, self.every = policy, temperature, every
        self.micro_batches, self.exact = micro_batches, exact
        self._taken: tuple[Tensor, Tensor] | None = None  # prompts, and their scores' inner products, until `of_draw`
        self._tape = ScoreTape(policy.model)

    def metrics(self, batch: Batch, prior: Prior, step: int) -> dict[str, float]:
        """The ledger of a step as metrics, in steps that take one; else nothing."""
        self._taken = None  # an earlier step's, where that step made no update
        if not self.every or step < 1 or (step != 1 and step % self.every):
            return {}
        ledger = self.take(batch, prior, step)
        return {} if ledger is None else ledger_metrics(ledger)

    def of_draw(self, batch: Batch) -> dict[str, float]:
        """What leaving outputs out added to the gradient's variance, as metrics; after `metrics` of the same batch.

        `measured` is over sum_j a_j^2 w_j, as the prediction is, and `of_gradient` over the variance with all outputs.
        Nothing where no ledger was taken, or none were drawn.
        """
        taken, self._taken = self._taken, None
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
        found = {"measured": alone, "of_gradient": whole.entries["drawn"].variance}
        return {f"added_variance/{name}": added / over for name, over in found.items() if over > 0}

    def take(self, batch: Batch, prior: Prior, seed: int) -> estimators.Ledger | None:
        """The ledger of the prompts with outputs enough for every baseline; None where fewer than two have them.

        With importance weights rho, scores are rho grad log pi: their inner products, norms and all that follows.

        Args:
            batch: P x G completions and rewards, with their loss weighting.
            prior: what earlier steps say, for `oblr_shrunk`.
            seed: the seed of the sketches.
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
        sequences, weight_PG = batch.sequences.at(rows_S), batch.weight_PG[chosen_P]
        rewards_PG, valid_PG = batch.rewards_PG[chosen_P], batch.valid_PG[chosen_P]
        outputs, plain, norms = self._pass(sequences, sizes, seed, None)
        rho_S = None
        if batch.sampler_logps_SC is not None and batch.clip_max is not None:
            longest = sequences.own_SC.shape[1]
            reported_SC = batch.sampler_logps_SC[rows_S, :longest]
            logp_SC = torch.cat([_padded(each.logp_SC, longest) for each in outputs])
            rho_S = SamplerMismatch.of(logp_SC, reported_SC, sequences.own_SC).rho_S(batch.clip_max)
            plain = _weighted(plain, rho_S)
        self._taken = chosen_P, plain
        rho_PG = None if rho_S is None else rho_S.view_as(rewards_PG)
        inputs = _inputs(outputs, norms, sequences, rewards_PG)
        coefs, grams = {}, {}
        every = estimators.under_every_baseline(rewards_PG, inputs, valid_PG=valid_PG, rho_PG=rho_PG, prior=prior)
        for name, (advantages, divisor_PG) in every.items():
            scale_PG = weight_PG / divisor_PG
            if BASELINES[name].by_token:
                coefs[name] = scale_PG
                gram = self._pass(sequences, sizes, seed, advantages.flatten(0, 1))[1]
                grams[name] = gram if rho_S is None else _weighted(gram, rho_S)
            else:
                coefs[name] = advantages * scale_PG
        plainly = bool((weight_PG == 1).all())  # a loss weighting has another mean gradient
        unbiased = {name: BASELINES[name].unbiased and plainly for name in coefs}
        return estimators.ledger(plain, coefs, rewards_PG, unbiased, grams, valid_PG)

    def _pass(
        self, sequences: Sequences, sizes: list[int], seed: int, weight_SC: Tensor | None
    ) -> tuple[list[Logps], Tensor, Tensor]:
        """The forward's results, two estimates of the (token-weighted) scores' inner products, and squared norms."""
        outputs, norms = [], []
        grams: list[Tensor] = []
        sketches: list[list[Tensor]] = [[], []]
        start = 0
        for size in sizes:
            batch = sequences.at(slice(start, start + size))
            with self._tape as tape:
                output = self.policy.logps(batch, self.temperature, features=True)
                scored_S = output.logps_S
                if weight_SC is not None:
                    weight = weight_SC[start : start + batch.count, : output.logp_SC.shape[1]]
                    scored_S = (output.logp_SC * weight.to(output.logp_SC) * batch.own_SC).sum(1)
                tape.record(scored_S)
            start += batch.count
            outputs.append(output.detached())
            norms.append(tape.norm2())
            check_finite("score norm", norms[-1])
            if self.exact:
                grams.append(tape.gram())
            else:
                for which, rows in enumerate(sketches):
                    rows.append(tape.sketch(2 * seed + which, DIRECTIONS, DIMENSIONS))
        self._tape.forget()
        norm2_S = torch.cat(norms)
        gram = grams[0] if self.exact else torch.stack([_gram(torch.cat(rows)) for rows in sketches])
        diagonal = norm2_S.to(gram).expand(gram.shape[:-1])  # known exactly
        return outputs, gram.diagonal_scatter(diagonal, dim1=-2, dim2=-1), norm2_S


def ledger_metrics(ledger: estimators.Ledger) -> dict[str, float]:
    """`variance/NAME` and `signal2/NAME` of every baseline, and the part of the variance that no baseline can mend."""
    entries = ledger.entries
    metrics = {f"variance/{name}": entry.variance for name, entry in entries.items()}
    metrics |= {f"signal2/{name}": entry.signal2 for name, entry in entries.items()}
    dimension = entries["rloo"].effective_dimension if "rloo" in entries else math.nan
    return metrics | {"variance_between_prompts": ledger.between, "effective_dimension": dimension}


def _inputs(outputs: list[Logps], norm2_S: Tensor, sequences: Sequences, rewards_PG: Tensor) -> dict[str, Tensor]:
    """Everything that baselines need beyond rewards."""
    P, G = rewards_PG.shape
    own_PGT = sequences.own_SC.view(P, G, -1).to(rewards_PG)
    T = own_PGT.shape[2]
    logit_norm2 = [_padded(each.logit_norm2_SC, T) for each in outputs if each.logit_norm2_SC is not None]
    return estimators.baseline_inputs(own_PGT, norm2_S.view(P, G), torch.cat(logit_norm2).view(P, G, -1))


def _weighted(gram: Tensor, rho_S: Tensor) -> Tensor:
    """The inner products of the scores times rho, from those of the scores."""
    return gram * rho_S[:, None] * rho_S


def _gram(sketch_SL: Tensor) -> Tensor:
    return sketch_SL @ sketch_SL.T


def _padded(values_SC: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values_SC, (0, width - values_SC.shape[1]))
