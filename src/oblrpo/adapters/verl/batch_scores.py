"""The driver's part in scores: the prompts' gradient norms and the variance ledger of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from oblrpo import estimators
from oblrpo.adapters.verl.prompt_rows import PromptRows
from oblrpo.adapters.verl.scoring import GRAM, NORM2, SKETCH
from oblrpo.adapters.verl.settings import Settings
from oblrpo.errors import InputError
from oblrpo.estimators import BASELINES


class BatchScores:
    """The scores of one batch: what to ask of the workers, and what follows from their answers.

    Args:
        settings: the settings of the adapter.
        step: the global step of verl.
        outputs: the greatest number G of outputs of a prompt.
    """

    def __init__(self, settings: Settings, step: int, outputs: int) -> None:
        every = settings.ledger_steps
        self.takes_ledger = bool(every) and (step == 1 or step % every == 0)
        self._settings, self._step, self._outputs = settings, step, outputs
        self._pairs_sketched = settings.needs_moments and not settings.exact_pairs
        self._seeds = [2 * step, 2 * step + 1] if self.takes_ledger or self._pairs_sketched else []

    def wanted(self) -> dict[str, Any]:
        """Return the entries of the batch's `extra_info` that ask the workers for scores."""
        size = self._outputs if self._settings.exact_pairs else 0
        return {"oblrpo_score": True, "oblrpo_sketch_seeds": tuple(self._seeds), "oblrpo_group_size": size}

    @property
    def columns(self) -> list[str]:
        """The names of the columns in which the workers answer."""
        return [NORM2, *([GRAM] if self._settings.exact_pairs else []), *([SKETCH] if self._seeds else [])]

    def take(self, data: Any) -> None:
        """Receive those columns, with uid and response_mask, in the batch's order."""
        uids = [str(uid) for uid in tu.get(data, "uid")]
        mask = data["response_mask"].to_padded_tensor(0)
        self.norm2_S = _dense(data[NORM2])
        self.groups = PromptRows(uids, mask.any(1))
        self._gram = _dense(data[GRAM]) if self._settings.exact_pairs else None
        self._sketch = _dense(data[SKETCH]).unflatten(1, (len(self._seeds), -1)) if self._seeds else None

    def group_norm2(self, data: Any, scale: float) -> list[float]:
        """The squared norm of every prompt's gradient g_i; the mean of the g_i is the gradient of verl's loss.

        Args:
            data: `advantages` and `response_mask` in the batch's order.
            scale: the factor of an output's advantage in the loss.
        """
        groups = self.groups
        coef_PG = groups.take(_one_an_output(data)) * groups.valid_PG * scale * len(groups.rows_of)
        return [float(norm2) for norm2 in estimators.group_norm2(self._gram_PGG(), coef_PG)]

    def _gram_PGG(self) -> Tensor:
        groups, size = self.groups, self.groups.size
        if self._gram is not None:
            return groups.take(self._gram)[:, :, :size]
        assert self._sketch is not None
        sketch_PGKL = groups.take(self._sketch.double())
        gram_PGG = torch.einsum("pgkl,phkl->pgh", sketch_PGKL, sketch_PGKL) / len(self._seeds)
        return gram_PGG.diagonal_scatter(groups.take(self.norm2_S.double()), dim1=1, dim2=2)

    def ledger(self, data: Any, rewards: str, prior: estimators.Prior) -> dict[str, float]:
        """What the noise of this batch's gradient would have been under every baseline but the token-level one.

        Args:
            data: `response_mask` and rewards token by token.
            rewards: the name of the column that holds these rewards.
            prior: the prior of `oblr_shrunk`.
        """
        groups, valid_PG = self.groups, self.groups.valid_PG
        assert self._sketch is not None
        sketch_KSL = groups.take(self._sketch.double()).flatten(0, 1).transpose(0, 1)
        norm2_PG = groups.take(self.norm2_S.double())
        gram_KSS = sketch_KSL @ sketch_KSL.mT
        gram_KSS = gram_KSS.diagonal_scatter(norm2_PG.flatten().expand(len(gram_KSS), -1), dim1=1, dim2=2)
        rewards_PG = groups.take(data[rewards].to_padded_tensor(0).double().sum(1))
        mask_PGT = groups.take(data["response_mask"].to_padded_tensor(0).double())
        inputs = estimators.baseline_inputs(mask_PGT, norm2_PG)
        every = estimators.under_every_baseline(rewards_PG, inputs, valid_PG=valid_PG, prior=prior)
        coefs = {name: advantages_PG / divisor_PG for name, (advantages_PG, divisor_PG) in every.items()}
        unbiased = {name: BASELINES[name].unbiased for name in coefs}
        known = valid_PG.any(1)
        keep = known.repeat_interleave(groups.size)
        result = estimators.ledger(
            gram_KSS[:, keep][:, :, keep],
            {name: coef_PG[known] for name, coef_PG in coefs.items()},
            rewards_PG[known],
            unbiased,
            valid_PG=valid_PG[known],
        )
        metrics = {f"critic/variance/{name}": entry.variance for name, entry in result.entries.items()}
        metrics |= {f"critic/signal2/{name}": entry.signal2 for name, entry in result.entries.items()}
        return metrics | {"critic/variance_between_prompts": result.between}


def _dense(column: Tensor) -> Tensor:
    """Return a column as it was put in: rows of equal length come back from the queue as a nested tensor."""
    return column.to_padded_tensor(0) if column.is_nested else column


def _one_an_output(data: Any) -> Tensor:
    """The advantage of every output, (S,).

    Raises:
        InputError: the tokens of an output have different advantages.
    """
    mask = data["response_mask"].to_padded_tensor(0).bool()
    advantages = data["advantages"].to_padded_tensor(0).double()
    highest = advantages.masked_fill(~mask, -torch.inf).amax(1)
    lowest = advantages.masked_fill(~mask, torch.inf).amin(1)
    if not torch.allclose(highest[mask.any(1)], lowest[mask.any(1)]):
        raise InputError(
            "trainer_mode oblr_po measures signal and noise of gradients with one advantage an output, and "
            "algorithm.adv_estimator gives its tokens different ones; set +oblrpo.schedule=off."
        )
    return torch.where(mask.any(1), highest, 0)
