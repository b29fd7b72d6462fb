"""How far an update moves the policy, measured on some of the batch's own outputs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oblrpo.estimators import ONE_IN
from oblrpo.policy import Policy, Sequences
from oblrpo.policy.micro_batches import MicroBatches
from oblrpo.step.flow import Gradient


class Movement:
    """Scores a subsample of a batch once more after the update, every output a group of its own."""

    def __init__(self, policy: Policy, temperature: float, micro_batches: MicroBatches) -> None:
        self.policy, self.temperature, self.micro_batches, self.every = policy, temperature, micro_batches, ONE_IN

    def watch(self, gradient: Gradient) -> Callable[[], Tensor]:
        """Return a function that gives, after the update, the change of the tokens' log pi, (some S, C).

        Where the policy rounds it gives log pi itself.
        """
        rows = gradient.batch.valid_PG.flatten().nonzero().flatten()[:: self.every]
        return self.of(gradient.batch.sequences.at(rows), gradient.token_logps_SC[rows])

    def of(self, chosen: Sequences, token_logps_SC: Tensor) -> Callable[[], Tensor]:
        """The same of these rows, with their log pi before, NaN where nothing has taken it."""
        if self.policy.low_precision:  # then the schedule compares forwards of these rows alone (`SNRSchedule`)
            return lambda: self._token_logps_SC(chosen)
        before_SC = token_logps_SC[:, : chosen.own_SC.shape[1]]
        if not before_SC.isfinite().all():  # some did not go through the model
            before_SC = self._token_logps_SC(chosen)
        return lambda: self._token_logps_SC(chosen) - before_SC

    @torch.no_grad()
    def _token_logps_SC(self, chosen: Sequences) -> Tensor:
        blocks = self.micro_batches.of(chosen, 1)
        outputs = [self.policy.logps(chosen.at(rows_S), self.temperature).token_logps_SC for rows_S in blocks]
        return chosen.by_token(blocks, outputs)
