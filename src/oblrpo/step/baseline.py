"""The named baseline in a training step: its memory of earlier steps, and one pass over a batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.errors import check_finite
from oblrpo.estimators import BASELINES
from oblrpo.policy import Logps
from oblrpo.scores import PROXIES, CalibratedProxy, Features, agreement
from oblrpo.step.flow import Batch, Gradient

SCORE_NORMS = ("exact", *PROXIES, "calibrated")
"""What the setting `score_norms` may be: exact squared score norms, or a proxy that needs no backward."""


class StepBaseline:
    """The past of a baseline: the prior, and the calibrated proxy. `BaselinePass` only reads it, but for `compare`.

    Args:
        name: a key of `estimators.BASELINES`.
        score_norms: what weighs rewards, one of `SCORE_NORMS`.
        every: steps between two in which exact norms and all proxies are both taken, and compared; 0: never.
        past_only: whether the prior comes from earlier steps alone. It has to where lengths decide which prompts go
            through the model together: what a prompt's own outputs have chosen must not reach its baseline. It does
            where processes, each of which sees a part of a batch, are to agree with one that sees all of it.
    """

    def __init__(self, name: str, score_norms: str = "exact", every: int = 0, past_only: bool = False) -> None:
        self.name, self.score_norms, self.every = name, score_norms, every
        self.weighted, self.exact = "norm2_PG" in BASELINES[name].needs, score_norms == "exact"
        self.prior = estimators.Prior(past_only=past_only)
        self.calibrated = CalibratedProxy()

    def begin(self, step: int | None = None, batch: Batch | None = None) -> BaselinePass:
        """Begin a pass over a batch; all of it is given for a baseline that is known before any forward.

        `step` is the number of the step, by which norms and their proxies are compared; None in later passes over the
        same batch, which compare nothing.
        """
        compares = step is not None and self.every > 0 and step % self.every == 0
        known_PG = None if batch is None else batch.baseline_PG
        # A copy: what this pass observes is part of the past only once the step has come to its end.
        begun = BaselinePass(self, copy.deepcopy(self.prior), compares, known_PG)
        if batch is not None and known_PG is None and not self.weighted:
            begun.known_PG = begun.of(batch.rewards_PG, batch.valid_PG, batch.own_PGT)
        return begun

    def end_step(self, first: BaselinePass) -> None:
        """Make what the first pass over the batch has seen a part of the past."""
        self.prior = first.prior
        self.prior.next_step()

    def by_proxy(self, features: Features, name: str = "") -> Tensor:
        """Weights of rewards by a proxy, (S,), which depend on the completion and on earlier steps only."""
        name = name or self.score_norms
        return self.calibrated.predict(features) if name == "calibrated" else PROXIES[name](features)

    def state_dict(self) -> dict[str, Any]:
        """The prior and what the calibrated proxy has learned."""
        return {"prior": self.prior.state_dict(), "proxy": self.calibrated.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.prior.load_state_dict(state["prior"])
        self.calibrated.load_state_dict(state["proxy"])


@dataclass
class BaselinePass:
    """One pass over a batch. Only `prior` changes: it takes in one micro-batch after the other."""

    past: StepBaseline
    prior: estimators.Prior
    """The prior with what this pass has seen."""
    compares: bool
    """Whether exact norms and proxies are both taken."""
    known_PG: Tensor | None
    """The baseline of the whole batch, where no forward is needed to know it."""

    def takes_norms(self, fixed_PG: Tensor | None = None) -> bool:
        """Whether score norms are taken: to compare proxies with, or to weigh rewards by where no baseline is fixed."""
        return self.compares or (self.past.exact and self.known_PG is None and fixed_PG is None)

    def __call__(self, part: Batch, logps: Logps, rho_PG: Tensor, tape: Any) -> tuple[Tensor, Tensor | None]:
        """The baseline b of every output of a micro-batch, (P, G), and the score norms, (S,), where they were taken."""
        norm2_S = None
        if self.takes_norms(part.baseline_PG):
            norm2_S = tape.norm2()
            check_finite("score norm", norm2_S)
        if part.baseline_PG is not None:
            return part.baseline_PG, norm2_S
        if self.known_PG is not None:
            return self.known_PG.flatten()[part.index_S].view(part.shape), norm2_S
        weight_PG = self.weights(logps, norm2_S).view(part.shape)
        return self.of(part.rewards_PG, part.valid_PG, part.own_PGT, weight_PG, rho_PG), norm2_S

    def compare(self, gradient: Gradient) -> dict[str, float]:
        """How well every proxy agrees with exact norms, in passes that compare them; the calibrated one then learns."""
        parts, G = [part for part in gradient.parts if part.norm2_S is not None], gradient.batch.shape[1]
        if not self.compares or not parts or G < 2:
            return {}
        valid_S = torch.cat([part.batch.valid_PG.flatten() for part in parts])
        norm2_S = torch.cat([part.norm2_S for part in parts if part.norm2_S is not None])
        features = Features.join([part.logps.features for part in parts])
        found = {name: agreement(self.past.by_proxy(features, name), norm2_S, G, valid_S) for name in PROXIES}
        found["calibrated"] = self.past.calibrated.observe(features, norm2_S, G, valid_S)
        return {f"score_norm2/agreement_{name}": value for name, value in found.items()}

    def weights(self, logps: Logps, norm2_S: Tensor | None) -> Tensor:
        """The weights of rewards, (S,): exact squared norms, or the proxy of the settings."""
        if not self.past.exact:
            return self.past.by_proxy(logps.features)
        assert norm2_S is not None
        return norm2_S

    def of(
        self,
        rewards_PG: Tensor,
        valid_PG: Tensor,
        own_PGT: Tensor | None = None,
        norm2_PG: Tensor | None = None,
        rho_PG: Tensor | None = None,
    ) -> Tensor:
        """The baseline of every output, (P, G); the prior of what follows in this pass takes the outputs in.

        own_PGT are the policy's own tokens, for a baseline that looks at lengths, and norm2_PG the weights, for one
        that takes some. Importance weights rho_PG are 1 if None.
        """
        inputs = {} if own_PGT is None else estimators.baseline_inputs(own_PGT, norm2_PG)
        baseline_PG = estimators.baseline(
            self.past.name, rewards_PG, valid_PG=valid_PG, rho_PG=rho_PG, prior=self.prior, **inputs
        )
        if self.past.weighted and norm2_PG is not None:
            self.prior.observe(rewards_PG, norm2_PG if rho_PG is None else norm2_PG * rho_PG**2, valid_PG)
        return baseline_PG
