"""The weights of rewards in the baseline: exact squared score norms, or a proxy that needs no backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from oblrpo.scores import PROXIES, CalibratedProxy, Features, agreement
from oblrpo.settings import ScoresConfig

SCORE_NORMS = ("exact", *PROXIES, "calibrated")
"""What the setting `score_norms` may be."""


class ScoreNorms:
    """Chooses the weights of a batch, and follows how well every proxy would have done.

    Args:
        config: settings that say which weights to take, and how often to compare them with exact norms.
        weighted: whether the baseline takes weights; if not, norms only serve as metrics.
    """

    def __init__(self, config: ScoresConfig, weighted: bool) -> None:
        self.name, self.every = config.score_norms, config.calibration_steps
        self.always = weighted and self.name == "exact"
        self.calibrated = CalibratedProxy()

    def compares(self, step: int) -> bool:
        """Whether exact norms and proxies are both taken in this step."""
        return self.every > 0 and step % self.every == 0

    def needs_norms(self, step: int) -> bool:
        """Whether exact norms are taken in this step."""
        return self.always or self.compares(step)

    def needs_features(self, step: int) -> bool:
        """Whether the forward must return the features that proxies use."""
        return self.name != "exact" or self.compares(step)

    def of(self, features: Features | None, norm2_S: Tensor | None) -> Tensor:
        """The weights, (S,). Those of a proxy depend on the completion and on earlier steps only."""
        if self.name == "exact":
            assert norm2_S is not None
            return norm2_S
        assert features is not None
        return self._proxy(self.name, features)

    def without_norms(self, features: Features) -> Tensor:
        """Weights before any norm is known, (S,): the proxy of the settings, or the logit norm where that is none."""
        return self._proxy("logit" if self.name == "exact" else self.name, features)

    def observe(
        self,
        features: Features,
        norm2_S: Tensor,
        group_size: int,
        valid_S: Tensor | None = None,
        count_S: Tensor | None = None,
    ) -> dict[str, float]:
        """Return how well every proxy agrees with the exact norms; the calibrated one learns from them afterwards."""
        found = {name: agreement(self._proxy(name, features), norm2_S, group_size, valid_S) for name in PROXIES}
        found["calibrated"] = self.calibrated.observe(features, norm2_S, group_size, valid_S, count_S)
        return {f"score_norm2/agreement_{name}": value for name, value in found.items()}

    def _proxy(self, name: str, features: Features) -> Tensor:
        return self.calibrated.predict(features) if name == "calibrated" else PROXIES[name](features)

    def state_dict(self) -> dict[str, Any]:
        """The state of the calibrated proxy."""
        return self.calibrated.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.calibrated.load_state_dict(state)


def join(blocks: list[Features]) -> Features:
    """Put the features of all micro-batches together."""
    return Features(*(torch.cat(values) for values in zip(*(vars(block).values() for block in blocks), strict=True)))
