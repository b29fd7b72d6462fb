"""The driver's part in scores: the prompts' gradient norms and the variance ledger of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from verl.utils import tensordict_utils as tu

from oblrpo import estimators
from oblrpo.adapters.verl.prompt_rows import PADDING, PromptRows
from oblrpo.adapters.verl.scoring import FEATURES, GRAM, NORM2, SKETCH
from oblrpo.adapters.verl.settings import Settings
from oblrpo.errors import InputError
from oblrpo.scores import CalibratedProxy, Features
from oblrpo.step.ledger import gram_of, ledger_metrics, ledger_of


class BatchScores:
    """The scores of one batch: what is requested of the workers, and what follows from their answers.

    Args:
        settings: the settings of the adapter.
        step: the global step of verl.
        outputs: the greatest number G of outputs of a prompt.
        uids: the uid of every row, in any order.
        measured: whether signal and noise were measured before.
    """

    def __init__(
        self, settings: Settings, step: int, outputs: int, uids: Sequence[str] = (), measured: bool = True
    ) -> None:
        every = settings.ledger_steps
        self.takes_ledger = bool(every) and (step == 1 or step % every == 0)
        due = step == 1 or step % settings.calibration_steps == 0 or not measured
        self.exact = not settings.calibrated or due or self.takes_ledger
        self._chosen: tuple[str, ...] | None = None  # all
        if settings.calibrated and not self.takes_ledger:
            # A uid is drawn at random when its prompt is: the choice knows nothing of outputs or their lengths.
            prompts = sorted({uid for uid in uids if not uid.startswith(PADDING)})
            self._chosen = tuple(prompts[: math.ceil(len(prompts) * settings.calibration_share)])
        self._settings, self._step, self._outputs = settings, step, outputs
        self._pairs_sketched = settings.needs_moments and not settings.exact_pairs
        self._seeds = [2 * step, 2 * step + 1] if self.takes_ledger or self._pairs_sketched else []

    def requests(self) -> dict[str, Any]:
        """Return the entries of the batch's `extra_info` that request scores of the workers."""
        size = self._outputs if self._settings.exact_pairs else 0
        return {
            "oblrpo_features": self._settings.calibrated,
            "oblrpo_score": self.exact,
            "oblrpo_prompts": self._chosen,
            "oblrpo_sketch_seeds": tuple(self._seeds),
            "oblrpo_group_size": size,
        }

    @property
    def columns(self) -> list[str]:
        """The names of the columns in which the workers answer."""
        features = [FEATURES] if self._settings.calibrated else []
        if not self.exact:
            return features
        return [*features, NORM2, *([GRAM] if self._settings.exact_pairs else []), *([SKETCH] if self._seeds else [])]

    def take(self, data: Any) -> None:
        """Receive those columns, with uid and response_mask, in the batch's order."""
        uids = [str(uid) for uid in tu.get(data, "uid")]
        mask = data["response_mask"].to_padded_tensor(0)
        self.groups = PromptRows(uids, mask.any(1))
        self.mean_length = float(mask.sum(1)[mask.any(1)].double().mean())
        firsts = [uids[rows[0]] for rows in self.groups.rows_of]
        self._known_P = torch.tensor([self._chosen is None or uid in self._chosen for uid in firsts])
        columns = {name: _dense(data[name]) for name in self.columns}
        self._norm2, self._gram, self._features = columns.get(NORM2), columns.get(GRAM), columns.get(FEATURES)
        self._sketch = columns[SKETCH].unflatten(1, (len(self._seeds), -1)) if SKETCH in columns else None

    @property
    def norm2_S(self) -> Tensor:
        """Squared score norms, in the batch's order; 0 where they were not requested."""
        assert self._norm2 is not None
        return self._norm2

    def weight_S(self, proxy: CalibratedProxy) -> Tensor:
        """The weight of every output's reward: its squared score norm, or what the proxy takes it for."""
        if not self._settings.calibrated:
            return self.norm2_S
        valid_PG = self.groups.valid_PG
        return self.groups.put(torch.where(valid_PG, proxy.predict(self._taken_features()).view_as(valid_PG), 0))

    def teach(self, proxy: CalibratedProxy) -> float:
        """Let the proxy see this batch's exact norms; return how well it agreed with them before, NaN if unknown."""
        valid_PG = self.groups.valid_PG & self._known_P[:, None]
        norm2_S = self.groups.take(self.norm2_S).flatten()
        return proxy.observe(self._taken_features(), norm2_S, self.groups.size, valid_PG.flatten())

    def _taken_features(self) -> Features:
        """The features of outputs in the order of prompts; where there is none, those of a token that is certain."""
        assert self._features is not None
        valid_S = self.groups.valid_PG.flatten()
        table_SK = self.groups.take(self._features).flatten(0, 1) * valid_S[:, None]
        table_SK[~valid_S, 0] = 1
        return Features(*table_SK.unbind(1))

    def group_norm2(
        self, data: Any, scale: float, rewards_PG: Tensor | None = None, rows: int | None = None
    ) -> dict[str, Any]:
        """What the workers need for signal and noise: the squared norm of every prompt's gradient g_i, and `own2`.

        The mean of the g_i is the gradient of verl's loss; `own2` is the mean of the squared norms of prompts' own mean
        gradients (`estimators.own_norm2`), where prompts can be counted, and `rows` their number. Where scores of some
        prompts alone were taken, their mean stands for each of the others, which is what `estimators.moments` needs
        of them. Nothing where no scores were taken, unless all gradients are known to be 0.

        Args:
            data: `advantages` and `response_mask` in the batch's order.
            scale: the factor of an output's advantage in the loss.
            rewards_PG: the rewards F; with `rows` only.
            rows: the number of prompts to train on, where batches hold a good part of them.
        """
        groups = self.groups
        coef_PG = groups.take(_one_an_output(data)) * groups.valid_PG * scale * len(groups.rows_of)
        if not coef_PG.any():
            return {"group_norm2": [0.0] * len(coef_PG)}
        if not self.exact:
            return {}
        gram_PGG, known_P = self._gram_PGG(), self._known_P
        norm2_P = estimators.group_norm2(gram_PGG, coef_PG)
        norm2_P[~known_P] = norm2_P[known_P].mean()
        norms = {"group_norm2": norm2_P.tolist()}
        if rows is None or rewards_PG is None:
            return norms
        unit_P = groups.valid_PG.sum(1) * scale * len(groups.rows_of)  # verl's g_i over the mean of A s
        gram_PGG = gram_PGG.double() * unit_P.square()[:, None, None]
        own2 = estimators.own_norm2(gram_PGG[known_P], rewards_PG[known_P], groups.valid_PG[known_P])
        return norms | {"own2": own2, "rows": rows}

    def rewards(self, data: Any, column: str) -> Tensor:
        """The reward of every output, (P, G), from the column that holds rewards token by token."""
        return self.groups.take(data[column].to_padded_tensor(0).double().sum(1))

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
        rewards_PG = self.rewards(data, rewards)
        own_PGT, norm2_PG = groups.take(data["response_mask"].to_padded_tensor(0).double()), groups.take(self.norm2_S)
        sketches = groups.take(self._sketch.double()).flatten(0, 1).unbind(1)
        known_P = valid_PG.any(1)
        rows_S = known_P.repeat_interleave(groups.size)
        gram_KSS = gram_of(sketches, norm2_PG.flatten())[:, rows_S][:, :, rows_S]
        inputs = estimators.baseline_inputs(own_PGT[known_P], norm2_PG[known_P].double())
        ledger = ledger_of(gram_KSS, rewards_PG[known_P], valid_PG[known_P], inputs, prior)
        return {f"critic/{name}": value for name, value in ledger_metrics(ledger).items()}


def _dense(column: Tensor) -> Tensor:
    """Return a column as it was put in: rows of equal length come back from the queue as a nested tensor."""
    return column.to_padded_tensor(0) if column.is_nested else column


def _one_an_output(data: Any) -> Tensor:
    """The advantage of every output, (S,)."""
    mask = data["response_mask"].to_padded_tensor(0).bool()
    advantages = data["advantages"].to_padded_tensor(0).double()
    highest = advantages.masked_fill(~mask, -torch.inf).amax(1)
    lowest = advantages.masked_fill(~mask, torch.inf).amin(1)
    if not torch.allclose(highest[mask.any(1)], lowest[mask.any(1)]):
        raise InputError(
            "trainer_mode oblr_po measures signal and noise of gradients with one advantage per completion, and "
            "algorithm.adv_estimator gives its tokens different ones; set +oblrpo.schedule=off."
        )
    return torch.where(mask.any(1), highest, 0)
