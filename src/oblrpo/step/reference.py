"""The reference of a KL penalty: the policy as it was before the first step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from oblrpo.errors import check_finite
from oblrpo.estimators import kl_in_reward
from oblrpo.policy import Policy, Sequences
from oblrpo.policy.micro_batches import MicroBatches, rows_of


class Reference:
    """Takes F - beta log(pi(o|q) / pi_ref(o|q)) for the reward F, as a constant: the policy gradient of J - beta KL.

    The reference is a copy of the trained parameters, which take turns with it. Under adapters it is the adapters' copy
    only, and new adapters that begin at 0 make it the model with its adapters switched off.

    Args:
        policy: the policy; the reference is what it is when `penalised` is first called.
        beta: the reward that a nat costs.
        temperature: the temperature of sampling, of both distributions.
        micro_batches: how many prompts' completions go through the model at a time.
    """

    def __init__(self, policy: Policy, beta: float, temperature: float, micro_batches: MicroBatches) -> None:
        self.policy, self.beta, self.temperature, self.micro_batches = policy, beta, temperature, micro_batches
        self._weights: list[Tensor] = []

    @torch.no_grad()
    def penalised(self, sequences: Sequences, rewards_PG: Tensor) -> tuple[Tensor, Tensor]:
        """The rewards less the penalty, and log(pi / pi_ref) of every completion in nats, both (P, G).

        Raises:
            DivergedError: a log-probability is NaN or infinite.
        """
        if not self._weights:
            self._weights = [p.detach().clone() for p in self.policy.parameters]
        logps_PG = self._logps(sequences, rewards_PG)
        with self._in_place():
            reference_PG = self._logps(sequences, rewards_PG)
        return kl_in_reward(rewards_PG, logps_PG, reference_PG, self.beta), logps_PG - reference_PG

    def _logps(self, sequences: Sequences, rewards_PG: Tensor) -> Tensor:
        logps_S = rewards_PG.new_zeros(rewards_PG.numel())
        G = rewards_PG.shape[1]
        for index_P in self.micro_batches.of(sequences, G):
            index_S = rows_of(index_P, G)
            logps_S[index_S] = self.policy.logps(sequences.at(index_S), self.temperature).logps_S.to(logps_S)
        check_finite("log-probability", logps_S)
        return logps_S.view_as(rewards_PG)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Let the policy be the reference for a while."""
        trained = [p.data for p in self.policy.parameters]
        try:
            for parameter, weight in zip(self.policy.parameters, self._weights, strict=True):
                parameter.data = weight
            yield
        finally:
            for parameter, weight in zip(self.policy.parameters, trained, strict=True):
                parameter.data = weight

    def state_dict(self) -> dict[str, Any]:
        """The weights; none before the first step, whose policy is the reference."""
        return {"weights": self._weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off.

        Raises:
            ValueError: the weights are those of another model.
        """
        parameters = self.policy.parameters
        if state["weights"] and [w.shape for w in state["weights"]] != [p.shape for p in parameters]:
            raise ValueError("its reference for the KL penalty has other weights than the policy")
        self._weights = [w.to(p) for w, p in zip(state["weights"], parameters, strict=False)]
