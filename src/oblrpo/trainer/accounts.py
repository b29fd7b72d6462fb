"""The variance ledger of a step: every registered baseline on the batch at hand, from one more pass over it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.estimators import BASELINES, NORMALISATIONS, Prior
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.scores import ScoreTape

DIRECTIONS, DIMENSIONS = 8, 2048
"""Of each of two independent sketches, see `ScoreTape.sketch`."""


class Accountant:
    """Takes the ledger: one forward and backward for activations, and as much again for the token-level baseline.

    Args:
        policy: whose gradient it is.
        temperature: that was sampled at.
        prompts_per_block: whose completions are run through the model at a time; 0: all.
        exact: take inner products exactly, in one block, instead of from sketches.

    Raises:
        ValueError: exact, and several blocks.
    """

    def __init__(self, policy: Policy, temperature: float, prompts_per_block: int, exact: bool) -> None:
        if exact and prompts_per_block:
            raise ValueError("an exact ledger needs all prompts in one micro-batch.")
        self.policy, self.temperature = policy, temperature
        self.prompts_per_block, self.exact = prompts_per_block, exact
        self._tape = ScoreTape(policy.model)

    def take(
        self, sequences: Sequences, rewards_PG: Tensor, scale_PG: Tensor, prior: Prior, seed: int
    ) -> estimators.Ledger:
        """The ledger of an on-policy batch.

        Args:
            sequences: P x G completions.
            rewards_PG: F.
            scale_PG: what the loss weighting multiplies advantages by.
            prior: of `oblr_shrunk`.
            seed: of the sketches.
        """
        P, G = rewards_PG.shape
        outputs, plain, norms = self._pass(sequences, G, seed, None)
        features = torch.cat([each.features.length_S for each in outputs if each.features is not None])
        inputs = {"norm2_PG": norms.view(P, G), "length_PG": features.view(P, G)}
        longest = sequences.completion_SC.shape[1]
        logit_norm2 = [_padded(each.logit_norm2_SC, longest) for each in outputs if each.logit_norm2_SC is not None]
        inputs["logit_norm2_PGT"] = torch.cat(logit_norm2).view(P, G, -1)
        inputs["token_mask_PGT"] = sequences.completion_mask_SC.view(P, G, -1).to(rewards_PG)
        coefs, grams = {}, {}
        for name, entry in BASELINES.items():
            if entry.smallest_group > G:
                continue
            baseline = estimators.baseline(name, rewards_PG, prior=prior, **inputs)
            scaled_PG = scale_PG / NORMALISATIONS[entry.normalisation](rewards_PG)
            if entry.by_token:
                coefs[name] = scaled_PG
                grams[name] = self._pass(sequences, G, seed, (rewards_PG[..., None] - baseline).flatten(0, 1))[1]
            else:
                coefs[name] = (rewards_PG - baseline) * scaled_PG
        plainly = bool((scale_PG == 1).all())  # a loss weighting has another mean gradient
        unbiased = {name: BASELINES[name].unbiased and plainly for name in coefs}
        return estimators.ledger(plain, coefs, rewards_PG, unbiased, grams)

    def _pass(
        self, sequences: Sequences, G: int, seed: int, weight_SC: Tensor | None
    ) -> tuple[list[Logps], Tensor, Tensor]:
        """What the forward says, inner products of (token-weighted) scores (two estimates), and squared norms."""
        outputs, norms = [], []
        grams: list[Tensor] = []
        sketches: list[list[Tensor]] = [[], []]
        S = len(sequences.completion_SC)
        per_block = self.prompts_per_block * G or S
        for start in range(0, S, per_block):
            batch = sequences.rows(start, min(start + per_block, S))
            with self._tape as tape:
                output = self.policy.logps(batch, self.temperature, features=True)
                scored_S = output.logps_S
                if weight_SC is not None:
                    weight = weight_SC[start : start + per_block, : output.logp_SC.shape[1]]
                    scored_S = (output.logp_SC * weight.to(output.logp_SC) * batch.completion_mask_SC).sum(1)
                tape.record(scored_S)
            outputs.append(output.detached())
            norms.append(tape.norm2())
            if self.exact:
                grams.append(tape.gram())
            else:
                for which, rows in enumerate(sketches):
                    rows.append(tape.sketch(2 * seed + which, DIRECTIONS, DIMENSIONS))
        norm2_S = torch.cat(norms)
        gram = grams[0] if self.exact else torch.stack([_gram(torch.cat(rows)) for rows in sketches])
        diagonal = norm2_S.to(gram).expand(gram.shape[:-1])  # known exactly
        return outputs, gram.diagonal_scatter(diagonal, dim1=-2, dim2=-1), norm2_S


def ledger_metrics(ledger: estimators.Ledger) -> dict[str, float]:
    """`variance/NAME` and `signal2/NAME` of every baseline, and the part of the variance that no baseline can mend."""
    accounts = ledger.accounts
    metrics = {f"variance/{name}": account.variance for name, account in accounts.items()}
    metrics |= {f"signal2/{name}": account.signal2 for name, account in accounts.items()}
    dimension = accounts["rloo"].effective_dimension if "rloo" in accounts else math.nan
    return metrics | {"variance_between_prompts": ledger.between, "effective_dimension": dimension}


def _gram(sketch_SL: Tensor) -> Tensor:
    return sketch_SL @ sketch_SL.T


def _padded(values_SC: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(values_SC, (0, width - values_SC.shape[1]))
