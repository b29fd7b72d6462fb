"""The named baseline in a training step: its memory of earlier steps, and one pass over a batch."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.estimators import BASELINES
from oblrpo.estimators.baselines import TIES
from oblrpo.policy.sequences import rows_of
from oblrpo.scores import PROXIES, CalibratedProxy, Features, agreement
from oblrpo.step.flow import Batch
from oblrpo.step.look import LookAtBatch

SCORE_NORMS = ("calibrated", *PROXIES)
"""What the setting `score_norms` may be, where there was no look."""


class StepBaseline:
    """The past of a baseline: the prior, and the calibrated proxy of score norms, which a `BaselinePass` teaches.

    Args:
        name: a key of `estimators.BASELINES`.
        score_norms: what weighs rewards, one of `SCORE_NORMS`.
        past_only: whether the prior comes from earlier steps alone. It has to where processes, each of which sees a
            part of a batch, are to agree with one that sees all of it.
    """

    def __init__(self, name: str, score_norms: str = "calibrated", past_only: bool = False) -> None:
        self.name, self.score_norms = name, score_norms
        self.weighted, self.exact = "norm2_PG" in BASELINES[name].needs, score_norms == "exact"
        self.prior = estimators.Prior(past_only=past_only)
        self.calibrated = CalibratedProxy()

    def begin(self) -> BaselinePass:
        """Begin a pass over a batch."""
        # A copy: what this pass observes is part of the past only once the step has come to its end.
        return BaselinePass(self, copy.deepcopy(self.prior))

    def end_step(self, first: BaselinePass) -> None:
        """Make what the first pass over the batch has seen a part of the past."""
        self.prior = first.prior
        self.prior.next_step()

    def by_proxy(self, features: Features, name: str = "") -> Tensor:
        """Weights of rewards by a proxy, (S,), which depend on the completion and on earlier steps only."""
        name = name or self.score_norms
        return self.calibrated.predict(features) if name == "calibrated" else PROXIES[name](features)

    @property
    def scaled(self) -> bool:
        """Whether the proxy's weights are in units of squared norms: from the first look on."""
        return self.score_norms != "calibrated" or self.calibrated.observed > 0

    def weights(self, proxy_PG: Tensor, look: LookAtBatch | None, prompts: int) -> Tensor:
        """The weights of rewards, (P, G): exact squared norms if all `prompts` that take part were looked at.

        Else they are the proxy's, of all prompts: its level follows that of the norms from look to look, so that exact
        ones beside it would weigh several times too much in what prompts say of each other.
        """
        if look is None or self.score_norms != "calibrated" or len(look.prompts_P) < prompts:
            return proxy_PG
        return proxy_PG.index_copy(0, look.prompts_P, look.look.norm2_PG.to(proxy_PG))

    def state_dict(self) -> dict[str, Any]:
        """The prior and what the calibrated proxy has learned."""
        return {"prior": self.prior.state_dict(), "proxy": self.calibrated.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.prior.load_state_dict(state["prior"])
        self.calibrated.load_state_dict(state["proxy"])


@dataclass
class BaselinePass:
    """One pass over a batch. `prior` takes it in; the proxy learns from its look, once b was taken."""

    past: StepBaseline
    prior: estimators.Prior
    """The prior with what this pass has seen."""

    def of(
        self,
        rewards_PG: Tensor,
        valid_PG: Tensor,
        own_PGT: Tensor | None = None,
        norm2_PG: Tensor | None = None,
        remember: bool = True,
    ) -> Tensor:
        """The baseline of every output, (P, G); the prior of what follows in this pass takes the outputs in.

        own_PGT are the policy's own tokens, for a baseline that looks at lengths, and norm2_PG the weights, for one
        that takes some. Weights in another unit than later ones are not to be remembered.
        """
        inputs = {} if own_PGT is None else estimators.baseline_inputs(own_PGT, norm2_PG)
        baseline_PG = estimators.baseline(self.past.name, rewards_PG, valid_PG=valid_PG, prior=self.prior, **inputs)
        if self.past.weighted and norm2_PG is not None and remember:
            self.prior.observe(rewards_PG, norm2_PG, valid_PG)
        return baseline_PG

    def learn(self, look: LookAtBatch, features: Features, batch: Batch, weight_PG: Tensor) -> dict[str, float]:
        """Take in a look, once b was taken; return how well each proxy agreed with its norms, the fitted one before it.

        What a look says of ties is what `Prior.lazy` decides by in later steps.
        """
        P, gram_PGG, norm2_S = look.prompts_P, look.look.gram_PGG, look.look.norm2_PG.flatten()
        G, valid_S = gram_PGG.shape[1], batch.valid_PG[P].flatten()
        features = features.at(rows_of(P, G))
        agreements = {name: agreement(self.past.by_proxy(features, name), norm2_S, G, valid_S) for name in PROXIES}
        agreements["calibrated"] = self.past.calibrated.observe(features, norm2_S, G, valid_S)
        if self.past.name == "oblr_thrifty":
            norms, shares = list[Tensor](), list[Tensor]()
            for lazy in TIES:
                prior = copy.copy(self.past.prior)
                prior.lazy = lazy
                b_PG = estimators.baseline(
                    "oblr_thrifty", batch.rewards_PG, valid_PG=batch.valid_PG, norm2_PG=weight_PG, prior=prior
                )
                a_PG = estimators.advantages(batch.rewards_PG, b_PG, batch.valid_PG)
                a_PG = a_PG * batch.weight_PG / batch.divisor_PG
                norms.append((estimators.group_norm2(gram_PGG, a_PG[P]) / batch.count_P[P].square()).mean())
                shares.append((a_PG[batch.valid_PG] != 0).double().mean())
            self.prior.observe_ties(torch.stack(norms), torch.stack(shares))
        return {f"score_norm2/agreement_{name}": value for name, value in agreements.items()}
