"""The weights of rewards in the baseline: exact squared score norms, or a proxy that needs no backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from oblrpo.policy import Logps
from oblrpo.scores import PROXIES, CalibratedProxy, Features, agreement

SCORE_NORMS = ("exact", *PROXIES, "calibrated")
"""What the setting `score_norms` may be."""


class RewardWeights:
    """Chooses the weights of a batch by a name of `SCORE_NORMS`, and follows how well every proxy would have done.

    In every so many steps, exact norms and proxies are both taken, and compared; `every` 0: never.
    """

    def __init__(self, name: str = "exact", every: int = 0) -> None:
        self.exact, self.every = name == "exact", every
        self._name = "logit" if self.exact else name  # the proxy before any norm is taken
        self.calibrated = CalibratedProxy()

    def compares(self, step: int | None) -> bool:
        """Whether exact norms and proxies are both taken in this step."""
        return step is not None and self.every > 0 and step % self.every == 0

    def of(self, logps: Logps, norm2_S: Tensor | None) -> Tensor:
        """The weights, (S,). Those of a proxy depend on the completion and on earlier steps only."""
        if self.exact:
            assert norm2_S is not None
            return norm2_S
        return self.by_proxy(logps.features)

    def by_proxy(self, features: Features, name: str = "") -> Tensor:
        """Weights before any norm is taken, (S,): the proxy of the settings, or the logit norm where that is none."""
        name = name or self._name
        return self.calibrated.predict(features) if name == "calibrated" else PROXIES[name](features)

    def compare(
        self,
        features: Features,
        norm2_S: Tensor,
        group_size: int,
        valid_S: Tensor | None = None,
        count_S: Tensor | None = None,
    ) -> dict[str, float]:
        """Return how well every proxy agrees with the exact norms; the calibrated one learns from them afterwards."""
        agreements = {name: agreement(self.by_proxy(features, name), norm2_S, group_size, valid_S) for name in PROXIES}
        agreements["calibrated"] = self.calibrated.observe(features, norm2_S, group_size, valid_S, count_S)
        return {f"score_norm2/agreement_{name}": value for name, value in agreements.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state of the calibrated proxy."""
        return self.calibrated.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.calibrated.load_state_dict(state)
