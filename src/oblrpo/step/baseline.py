"""The named baseline in a training step, with the prior that it remembers and the weights that it takes."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.errors import check_finite
from oblrpo.estimators import BASELINES
from oblrpo.policy import Logps
from oblrpo.scores import Features
from oblrpo.step.batch import Batch
from oblrpo.step.gradient import Gradient, by_output
from oblrpo.step.weights import RewardWeights


class StepBaseline:
    """The baseline b of every output of a step.

    Use: `begin` every pass over a batch, call the baseline with every micro-batch of it, and `end_step`.

    Args:
        name: a key of `estimators.BASELINES`.
        weights: what weighs rewards, exact norms or a proxy.
        past_only: whether the prior comes from earlier steps alone. It has to where lengths decide which prompts go
            through the model together: what a prompt's own outputs have chosen must not reach its baseline. It does
            where processes, each of which sees a part of a batch, are to agree with one that sees all of it.
    """

    def __init__(self, name: str, weights: RewardWeights, past_only: bool = False) -> None:
        self.name, self.weights = name, weights
        self.weighted = "norm2_PG" in BASELINES[name].needs
        self.prior = estimators.Prior(past_only=past_only)
        """The prior, which holds what earlier steps say."""
        self.known_PG: Tensor | None = None
        """The baseline of the whole batch, where no forward is needed to know it."""
        self._seen = self._kept = self.prior  # the prior with what this pass, and the first pass, have seen
        self._compares = False

    def begin(self, step: int | None, batch: Batch | None = None) -> None:
        """Begin a pass over a batch; all of it is given for a baseline that is known before any forward.

        `step` is the number of the step, by which norms and their proxies are compared. It is None in later passes over
        the same batch, which compare nothing, and of which nothing is kept.
        """
        # A copy: what this pass observes is part of the past only once the step has come to its end.
        self._seen, self._compares = copy.deepcopy(self.prior), self.weights.compares(step)
        if step is not None:
            self._kept = self._seen
        self.known_PG = None if batch is None else batch.baseline_PG
        if batch is not None and self.known_PG is None and not (self.weighted and batch.proxy_PG is None):
            self.known_PG = self._of(batch, batch.proxy_PG)

    def asks_norms(self, part: Batch | None = None) -> bool:
        """Whether score norms are taken: to weigh rewards by, or to compare proxies with."""
        is_known = self.known_PG is not None or (part is not None and part.baseline_PG is not None)
        return self._compares or (self.weights.exact and not is_known)

    def __call__(self, part: Batch, logps: Logps, tape: Any) -> tuple[Tensor, Tensor | None]:
        """The baseline b of every output of a micro-batch, (P, G), and the score norms, (S,), where they were taken."""
        norm2_S = None
        if self.asks_norms(part):
            norm2_S = tape.norm2()
            check_finite("score norm", norm2_S)
        if part.baseline_PG is not None:
            return part.baseline_PG, norm2_S
        if self.known_PG is not None:
            return self.known_PG.flatten()[part.index_S].view(part.shape), norm2_S
        return self._of(part, self.weights.of(logps, norm2_S).view(part.shape)), norm2_S

    def _of(self, batch: Batch, norm2_PG: Tensor | None) -> Tensor:
        return self.of(batch.rewards_PG, batch.valid_PG, batch.own_PGT, norm2_PG, batch.rho_PG)

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
            self.name, rewards_PG, valid_PG=valid_PG, rho_PG=rho_PG, prior=self._seen, **inputs
        )
        if self.weighted and norm2_PG is not None:
            self._seen.observe(rewards_PG, norm2_PG if rho_PG is None else norm2_PG * rho_PG**2, valid_PG)
        return baseline_PG

    def compare(self, first: Gradient, drawn: Features | None = None) -> dict[str, float]:
        """How well every proxy agrees with exact norms, of which the calibrated one learns; in steps that compare them.

        `first` is the gradient of the first pass over a batch. Where the outputs that went through the model were
        drawn, `drawn` are the features of all outputs, by their draws.
        """
        batch, parts = first.batch, first.parts
        norms = [part.norm2_S for part in parts if part.norm2_S is not None]
        if not self._compares or not norms or batch.shape[1] < 2:
            return {}
        if drawn is None:
            valid_S = torch.cat([part.batch.valid_PG.flatten() for part in parts])
            features = Features.join([part.logps.features for part in parts])
            return self.weights.compare(features, torch.cat(norms), batch.shape[1], valid_S)
        norm2_PG = by_output(parts, norms, torch.zeros_like(batch.rewards_PG))
        valid_S = (batch.valid_PG & (batch.keep_PG > 0)).flatten()
        return self.weights.compare(drawn, norm2_PG.flatten(), batch.shape[1], valid_S, batch.keep_PG.flatten())

    def end_step(self) -> None:
        """Make what the first pass has seen a part of the past."""
        self.prior = self._kept
        self.prior.next_step()

    def state_dict(self) -> dict[str, Any]:
        """The prior and what the calibrated proxy has learned."""
        return {"prior": self.prior.state_dict(), "proxy": self.weights.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.prior.load_state_dict(state["prior"])
        self.weights.load_state_dict(state["proxy"])
