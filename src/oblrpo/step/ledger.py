"""What inner products of scores tell of a step: the noise under every baseline, and how far prompts differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.errors import check_finite
from oblrpo.estimators import BASELINES, Prior
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.policy.micro_batches import MicroBatches, rows_of
from oblrpo.scores import ScoreTape
from oblrpo.step.flow import Batch
from oblrpo.step.off_policy import ImportanceWeights, log_ratio, truncated
from oblrpo.tables.algorithms import Algorithm

WORK_SHARE = 0.02
"""The share of a run's work that its ledgers take, where no number of steps is set."""
SAMPLING, TRAINING, LEDGER = 1.0, 3.0, 7.0
"""What sampling a token, training on it, and a ledger of it cost, in forwards of a token."""
DIRECTIONS, DIMENSIONS = 8, 2048
"""The size of each of the two independent sketches that inner products come from; see `ScoreTape.sketch`."""

LOOKED_AT = 16
"""One prompt in so many is looked at, by one forward and backward more."""
COUNTED = 100
"""The batches of an epoch from which on prompts count as without number. What a batch of N of M prompts lacks is at
most N / M of its noise, so that N SNR is then too low by 1 % of 1 + N SNR at the most."""


@dataclass(frozen=True)
class LedgerOfBatch:
    """The ledger of a batch, and of what it was taken."""

    ledger: estimators.Ledger
    prompts_P: Tensor
    """The prompts of the batch that took part, in the order of `norm2_S`."""
    norm2_S: Tensor
    """The squared score norms of their outputs."""


class VarianceLedger:
    """Takes the ledger: one forward and backward for activations, and as much again for the token-level baseline.

    Inner products come from sketches, unless they are to be `exact`, which needs all prompts in one micro-batch.
    `metrics` takes the ledger in step 1 and in every so many steps (`every`; 0: never; None: when `WORK_SHARE` of the
    run's work pays for one). Work is counted in tokens, and not in seconds, so that a run repeats itself.
    """

    def __init__(
        self, policy: Policy, temperature: float, micro_batches: MicroBatches, exact: bool = False,
        every: int | None = 0,
    ) -> None:  # fmt: skip
        if exact and micro_batches.any:
            raise ValueError("an exact ledger needs all prompts in one micro-batch.")
        self.policy, self.temperature, self.every = policy, temperature, every
        self.micro_batches, self.exact = micro_batches, exact
        self._tape = ScoreTape(policy.model, "streamed" if exact else "auto")  # streamed, it holds nothing
        self._saved = 0.0  # of past work, for the next ledger; in forwards of a token

    def metrics(self, batch: Batch, prior: Prior, step: int, weights: ImportanceWeights) -> dict[str, float]:
        """The ledger of a step as metrics, in steps that take one; else nothing."""
        if not self._is_due(batch, step):
            return {}
        if (taken := self.take(batch, prior, step, weights)) is None:
            return {}
        ledger = taken.ledger
        dimension = ledger.entries["rloo"].effective_dimension if "rloo" in ledger.entries else math.nan
        return ledger_metrics(ledger) | {"effective_dimension": dimension}

    def _is_due(self, batch: Batch, step: int) -> bool:
        if self.every is not None:
            return self.every > 0 and (step == 1 or (step > 0 and step % self.every == 0))
        tokens = float(batch.sequences.mask_ST.sum())
        if step < 1 or self._saved < LEDGER * tokens:
            return False
        self._saved -= LEDGER * tokens
        return True

    def save_up(self, batch: Batch) -> None:
        """Put the share of a step's work aside, after its gradient: what went through the model of this batch."""
        tokens_S = batch.sequences.mask_ST.sum(1)
        trained = float(tokens_S[batch.kept_PG.flatten()].sum())
        self._saved += WORK_SHARE * (SAMPLING * float(tokens_S.sum()) + TRAINING * trained)

    def state_dict(self) -> dict[str, Any]:
        """What was put aside."""
        return {"saved": self._saved}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self._saved = state["saved"]

    def take(self, batch: Batch, prior: Prior, seed: int, weights: ImportanceWeights) -> LedgerOfBatch | None:
        """The ledger of the prompts with outputs enough for every baseline; None where fewer than two have them.

        Where the sampler is corrected for, scores are rho grad log pi: their inner products, norms and all that
        follows. The prior is what earlier steps say, for `oblr_shrunk`; the seed is that of the sketches.
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
        if weights.sampler_logps_SC is not None and weights.clip_max is not None:
            reported_SC = weights.sampler_logps_SC[rows_S, :longest]
            token_logps_SC = _joined([output.token_logps_SC for output in outputs], longest)
            rho_S = truncated(log_ratio(token_logps_SC, reported_SC, sequences.own_SC)[0], weights.clip_max)
            gram = _weighted(gram, rho_S)
        logit_norm2_SC = _joined([output.logit_norm2_SC for output in outputs], longest)
        own_PGT = sequences.own_SC.view(*rewards_PG.shape, -1).to(rewards_PG)
        inputs = estimators.baseline_inputs(own_PGT, norm2_S.view_as(rewards_PG), logit_norm2_SC.view_as(own_PGT))

        def by_token(advantages_PGT: Tensor) -> Tensor:
            weighted = self._pass(sequences, sizes, seed, advantages_PGT.flatten(0, 1))[1]
            return weighted if rho_S is None else _weighted(weighted, rho_S)

        rho_PG = None if rho_S is None else rho_S.view_as(rewards_PG)
        ledger = ledger_of(gram, rewards_PG, valid_PG, inputs, prior, rho_PG, batch.weight_PG[chosen_P], by_token)
        return LedgerOfBatch(ledger, chosen_P, norm2_S)

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
                    weight = weight_SC[start : start + batch.count, : output.token_logps_SC.shape[1]]
                    scored_S = (output.token_logps_SC * weight.to(output.token_logps_SC) * batch.own_SC).sum(1)
                check_finite("log-probability", scored_S.detach())
                tape.record(scored_S, gram=tape.method == "streamed")
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


def counted(rows: int | None, prompts: int, outputs: int, algorithm: Algorithm) -> int | None:
    """The number of prompts, if it is few for batches of so many, and if a prompt's mean gradient is E[F s | q]."""
    known = algorithm.unbiased and outputs > 1  # one output alone does not tell the two kinds of noise apart
    return rows if rows is not None and known and rows < COUNTED * prompts else None


def drawn(rewards_PG: Tensor, valid_PG: Tensor, seed: int) -> Tensor:
    """The weights of prompts in an estimate of mean_q ||mu_q||^2, (P,): 0 where no look is taken.

    Of n prompts with two outputs that count, k are drawn with replacement, with chances p in proportion to the variance
    of their rewards; one that is drawn m times weighs m / (k n p). Prompts whose rewards agree have the estimate 0.
    The weights are NaN where n is 0.
    """
    count_P, rewards_PG = valid_PG.sum(1).cpu(), torch.where(valid_PG, rewards_PG.double(), 0).cpu()
    mean_P1 = rewards_PG.sum(1, keepdim=True) / count_P.clamp(min=1)[:, None]
    p_P = torch.where(valid_PG.cpu(), rewards_PG - mean_P1, 0).square().sum(1)  # 0 of a single output
    weight_P = torch.zeros_like(p_P)
    if p_P.any():
        k, generator = math.ceil(len(p_P) / LOOKED_AT), torch.Generator("cpu").manual_seed(seed)
        times_P = torch.multinomial(p_P, k, True, generator=generator).bincount(minlength=len(p_P))
        weight_P = torch.where(times_P > 0, times_P / (k * p_P / p_P.sum()), 0)
    return (weight_P / (count_P > 1).sum()).to(valid_PG.device)


def own_norm2(
    batch: Batch, weight_P: Tensor, rho_PG: Tensor, policy: Policy, temperature: float, micro_batches: MicroBatches
) -> float:
    """The sum over prompts of weight_P times `estimators.own_norm2` of scores times rho_PG. No `.grad` changes."""
    G, chosen_P, total = batch.shape[1], (weight_P > 0).nonzero().flatten(), 0 * float(weight_P.sum())
    ledger = VarianceLedger(policy, temperature, MicroBatches(), exact=True)
    for block in micro_batches.of(batch.sequences.at(rows_of(chosen_P, G)), G) if len(chosen_P) else ():
        p = chosen_P[block]
        gram_SS = _weighted(ledger._pass(batch.sequences.at(rows_of(p, G)), [len(p) * G], 0)[1], rho_PG[p].flatten())
        gram_PGG = gram_SS.view(len(p), G, len(p), G).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        own2 = estimators.own_norm2(gram_PGG * weight_P[p, None, None], batch.rewards_PG[p], batch.valid_PG[p])
        total += len(p) * own2
    return total


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
