"""The named baseline in a training step: what it asks of the forward and of the tape, and what it remembers.

Algorithm 1 asks a `StepBaseline` for each thing in turn and never asks which baseline it is.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.errors import InputError, check_finite
from oblrpo.estimators import BASELINES
from oblrpo.policy import Logps
from oblrpo.scores import ScoreTape
from oblrpo.settings import ScoresConfig
from oblrpo.trainer.batch import Batch
from oblrpo.trainer.results import Part, by_output
from oblrpo.trainer.score_norms import ScoreNorms, join

ROUNDING = 1e-6
"""An advantage below this share of the largest reward is what float32 leaves of 0."""


class StepBaseline:
    """A baseline of one number an output, known once the backward has given score norms.

    Args:
        name: a key of `estimators.BASELINES`.
        scores: what weighs rewards, exact norms or a proxy, and how often they are compared.
        by_length: whether lengths decide which prompts go through the model together. The prior then comes from
            earlier steps alone: one from prompts that a prompt's own outputs have chosen would bias the gradient.
    """

    def __init__(self, name: str, scores: ScoresConfig, by_length: bool = False) -> None:
        self.name, self.entry = name, BASELINES[name]
        self.score_norms = ScoreNorms(scores, "norm2_PG" in self.entry.needs)
        self.prior = estimators.Prior(past_only=by_length)
        """The prior, which holds what earlier steps say."""
        self._seen = self._kept = self.prior
        self.fixed_PG: Tensor | None = None
        """The baselines of the whole batch, where they were taken before the forward."""
        self._held = False  # fixed_PG is that of the first update on the batch: norms have no further use

    def known(self, batch: Batch) -> Tensor | None:
        """The baseline of every output, (P, G), where rewards and lengths alone tell it; else None."""
        return None

    def proxy(self, batch: Batch) -> Tensor:
        """Squared score norms before any forward, (P, G), of any scale: a proxy of what the draws tell.

        Raises:
            InputError: the sampler does not tell.
        """
        if batch.features is None:
            raise InputError(
                "this sampler does not tell what train_on needs of its draws (log-probability, entropy, logit norm); "
                "set train_on to exact."
            )
        return self.score_norms.without_norms(batch.features).view(batch.shape)

    def fix(self, batch: Batch) -> Tensor:
        """Take the baseline of every output from proxies, (P, G), before any goes through the model.

        Raises:
            InputError: as `proxy` raises.
        """
        if self.fixed_PG is not None:
            return self.fixed_PG
        norm2_PG, fixed_PG = self.proxy(batch), self.known(batch)
        if fixed_PG is None:
            fixed_PG = self._baseline(batch, estimators.baseline_inputs(batch.own_PGT, norm2_PG))
            self._seen.observe(batch.rewards_PG, norm2_PG, batch.valid_PG)
        self.fixed_PG = fixed_PG
        return fixed_PG

    def pulling(self, batch: Batch, step: int) -> Tensor:
        """Which outputs have to go through the model, (P, G): all, unless their advantages are known to be 0."""
        return torch.ones_like(batch.valid_PG)

    def begin(self, held_PG: Tensor | None = None) -> None:
        """Begin a pass over a batch, of which nothing is known yet, or the baselines that it shall keep."""
        self._seen, self.fixed_PG, self._held = copy.deepcopy(self.prior), held_PG, held_PG is not None

    def needs_features(self, step: int) -> bool:
        """Whether the forward of this step must tell what proxies of score norms go by."""
        if self._held:
            return False
        return self.score_norms.compares(step) if self.fixed_PG is not None else self.score_norms.needs_features(step)

    def record(self, tape: ScoreTape, part: Batch, logps: Logps) -> None:
        """Run the backward whose per-sequence gradients are the scores grad log pi(o|q), their tokens weighed."""
        tape.record(part.scored(logps.logp_SC))

    def norms(self, tape: ScoreTape, step: int) -> Tensor | None:
        """The squared score norms of what was recorded, (S,); None in a step that has no use for them."""
        if self._held or not self.score_norms.needs_norms(step):
            return None
        norm2_S = tape.norm2()
        check_finite("score norm", norm2_S)
        return norm2_S

    def of(self, part: Batch, logps: Logps, norm2_S: Tensor | None) -> Tensor:
        """The baseline b of every output, (P, G)."""
        if self.fixed_PG is not None:
            return self.fixed_PG.flatten()[part.index_S].view(part.shape)
        norm2_PG = self.score_norms.of(logps.features, norm2_S).view(part.shape)
        inputs = estimators.baseline_inputs(part.own_PGT, norm2_PG)
        result = self._baseline(part, inputs)
        self._seen.observe(part.rewards_PG, norm2_PG * part.rho_PG**2, part.valid_PG)
        return result

    def learn(self, parts: list[Part]) -> dict[str, float]:
        """Keep what the first pass over a batch says for later steps, and teach the calibrated proxy.

        Returns:
            How well every proxy agrees with exact norms, in steps that compare them.
        """
        self._kept = self._seen
        norms = [part.norm2_S for part in parts if part.norm2_S is not None]
        features = [part.logps.features for part in parts if part.logps.features is not None]
        whole = parts[0].batch.whole
        if not norms or not features or whole is None or whole.shape[1] < 2:
            return {}
        if whole.draw is None or whole.keep_PG is None:
            valid_S = torch.cat([part.batch.valid_PG.flatten() for part in parts])
            return self.score_norms.observe(join(features), torch.cat(norms), whole.shape[1], valid_S)
        # Of what was drawn: what the sampler told of all, and the norms of those that went through the model.
        if whole.features is None:
            return {}
        norm2_PG = by_output(parts, norms, torch.zeros_like(whole.rewards_PG))
        valid_S, keep_S = (whole.valid_PG & whole.kept_PG).flatten(), whole.keep_PG.flatten()
        return self.score_norms.observe(whole.features, norm2_PG.flatten(), whole.shape[1], valid_S, keep_S)

    def next_step(self) -> None:
        """End the step: what its first pass saw becomes part of the past."""
        self.prior = self._kept
        self.prior.next_step()

    def state_dict(self) -> dict[str, Any]:
        """The prior and what the calibrated proxy has learned."""
        return {"prior": self.prior.state_dict(), "proxy": self.score_norms.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off.

        Raises:
            KeyError: it is the state of another version.
            ValueError: as `Prior` raises.
        """
        self.prior.load_state_dict(state["prior"])
        self.score_norms.load_state_dict(state["proxy"])

    def _baseline(self, part: Batch, inputs: dict[str, Tensor]) -> Tensor:
        return estimators.baseline(
            self.name, part.rewards_PG, valid_PG=part.valid_PG, rho_PG=part.rho_PG, prior=self._seen, **inputs
        )


class UnweightedBaseline(StepBaseline):
    """A baseline without score norms: of rewards, which it takes from the whole batch, or of rewards and lengths."""

    def known(self, batch: Batch) -> Tensor | None:
        """The baseline b of every output, (P, G)."""
        return self._of_rewards(batch)

    def pulling(self, batch: Batch, step: int) -> Tensor:
        """Which outputs have an advantage other than 0, (P, G); all, where the step asks for more than the gradient."""
        baseline_PG = self.known(batch)
        if baseline_PG is None or self.score_norms.needs_norms(step) or self.needs_features(step):
            return super().pulling(batch, step)
        advantages_PG = torch.where(batch.valid_PG, batch.rewards_PG - baseline_PG, 0)
        return advantages_PG.abs() > ROUNDING * batch.rewards_PG.abs().max()

    def of(self, part: Batch, logps: Logps, norm2_S: Tensor | None) -> Tensor:
        """The baseline b of every output, (P, G)."""
        if self.fixed_PG is not None:
            return super().of(part, logps, norm2_S)
        if part.whole is None or (self.entry.needs and part.shape[1] == part.whole.shape[1]):
            return self._of_rewards(part)
        return self._of_rewards(part.whole).flatten()[part.index_S].view(part.shape)

    def _of_rewards(self, batch: Batch) -> Tensor:
        if self.entry.needs:
            return self._baseline(batch, estimators.baseline_inputs(batch.own_PGT))
        return estimators.baseline(self.name, batch.rewards_PG, valid_PG=batch.valid_PG)


def step_baseline(name: str, scores: ScoresConfig, by_length: bool = False) -> StepBaseline:
    """The named baseline, ready for training steps."""
    kind = StepBaseline if "norm2_PG" in BASELINES[name].needs else UnweightedBaseline
    return kind(name, scores, by_length)
