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

SCORE_NORMS = ("calibrated", *PROXIES)
"""What the setting `score_norms` may be, where there was no look."""


class StepBaseline:
    """The past of a baseline: the prior, and the calibrated proxy of score norms, which a `BaselinePass` teaches.

    Args:
        name: a key of `estimators.BASELINES`.
        score_norms: what weighs rewards, one of `SCORE_NORMS`.
    """

    def __init__(self, name: str, score_norms: str = "calibrated") -> None:
        self.name, self.score_norms = name, score_norms
        self.weighted, self.prior = "norm2_PG" in BASELINES[name].needs, estimators.Prior()
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

    def weights(self, proxy_PG: Tensor, looked: tuple[Tensor, Tensor] | None, prompts: int) -> Tensor:
        """The weights of rewards, (P, G): exact squared norms if all `prompts` that take part were looked at.

        Else they are the proxy's, of all prompts: its level follows that of the norms from look to look, so that exact
        ones beside it would weigh several times too much in what prompts say of each other. A look is which prompts it
        was at, and the inner products of each of these prompts' scores.
        """
        if looked is None or self.score_norms != "calibrated" or len(looked[0]) < prompts:
            return proxy_PG
        return proxy_PG.index_copy(0, looked[0], looked[1].diagonal(dim1=1, dim2=2).to(proxy_PG))

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
        inputs = {} if norm2_PG is None else {"norm2_PG": norm2_PG}
        if own_PGT is not None:
            inputs = estimators.baseline_inputs(own_PGT, norm2_PG)
        baseline_PG = estimators.baseline(self.past.name, rewards_PG, valid_PG=valid_PG, prior=self.prior, **inputs)
        if self.past.weighted and norm2_PG is not None and remember:
            self.prior.observe(rewards_PG, norm2_PG, valid_PG)
        return baseline_PG

    def learn(
        self,
        looked: tuple[Tensor, Tensor],
        features: Features,
        rewards_PG: Tensor,
        valid_PG: Tensor,
        weight_PG: Tensor,
        scale_PG: Tensor,
    ) -> dict[str, float]:
        """Take in a look, once b was taken; return how well each proxy agreed with its norms, the fitted one before it.

        What a look says of ties is what `Prior.lazy` decides by in later steps.

        Args:
            looked: which prompts were looked at, and the inner products of their scores; NaN beside the diagonal where
                norms alone were taken.
            features: of the outputs of all prompts.
            rewards_PG: the rewards F.
            valid_PG: which outputs count.
            weight_PG: the weights that b was taken with.
            scale_PG: what multiplies F - b in the gradient.
        """
        P, gram_PGG = looked
        norm2_S, G, valid_S = gram_PGG.diagonal(dim1=1, dim2=2).flatten(), gram_PGG.shape[1], valid_PG[P].flatten()
        features = features.at(rows_of(P, G))
        agreements = {name: agreement(self.past.by_proxy(features, name), norm2_S, G, valid_S) for name in PROXIES}
        agreements["calibrated"] = self.past.calibrated.observe(features, norm2_S, G, valid_S)
        if self.past.name == "oblr_thrifty" and bool(gram_PGG.isfinite().all()):
            norms, shares = list[Tensor](), list[Tensor]()
            for lazy in TIES:
                prior = copy.copy(self.past.prior)
                prior.lazy = lazy
                b_PG = estimators.baseline(
                    "oblr_thrifty", rewards_PG, valid_PG=valid_PG, norm2_PG=weight_PG, prior=prior
                )
                a_PG = estimators.advantages(rewards_PG, b_PG, valid_PG) * scale_PG
                norms.append((estimators.group_norm2(gram_PGG, a_PG[P]) / valid_PG[P].sum(1).square()).mean())
                shares.append((a_PG[valid_PG] != 0).double().mean())
            self.prior.observe_ties(torch.stack(norms), torch.stack(shares))
        return {f"score_norm2/agreement_{name}": value for name, value in agreements.items()}
