"""The scores of a micro-batch: its outputs go through the model and leave on the tape what their scores come of."""

from __future__ import annotations

from typing import TypeVar

from torch import Tensor

from oblrpo.errors import check_finite
from oblrpo.policy import Logps, Policy
from oblrpo.policy.micro_batches import of_like_length
from oblrpo.scores import GroupTape, ScoreTape
from oblrpo.step.batch import Batch
from oblrpo.step.gradient import by_token

SomeBatch = TypeVar("SomeBatch", bound=Batch)


def score(part: SomeBatch, policy: Policy, temperature: float, tape: ScoreTape | GroupTape) -> tuple[SomeBatch, Logps]:
    """Record grad log pi(o|q) of every output; return them with their importance weights, and their log-probabilities.

    Outputs of like length share a forward, whichever prompt they answer, so that little is padded. A prompt's outputs
    are on one tape all the same.
    """
    if isinstance(tape, ScoreTape) and tape.takes_slices:
        slices = of_like_length(part.sequences.mask_ST.sum(1), policy.tokens_of_a_forward)
        if len(slices) > 1:
            # Groups of which a slice has as many outputs are neighbours in it, and multiplied out together.
            slices = [rows_S[by_count(part.owner_S[rows_S])] for rows_S in slices]
            logps = _in_slices(part, slices, policy, temperature, tape)
            return part.under(logps), logps
    with tape:
        logps = policy.logps(part.sequences, temperature)
        check_finite("log-probability", logps.logps_S.detach())
        part = part.under(logps)
        tape.record(part.scored(logps.logp_SC))  # log pi(o|q) itself, unless tokens have importance weights
    return part, logps


def _in_slices(part: Batch, slices: list[Tensor], policy: Policy, temperature: float, tape: ScoreTape) -> Logps:
    """Record slices of the outputs; what their forwards say of all, 0 where a token is not the policy's own."""
    outputs = []
    with tape:
        for rows_S in slices:
            some = part.at(rows_S)
            logps = policy.logps(some.sequences, temperature)
            check_finite("log-probability", logps.logps_S.detach())
            tape.record(some.under(logps).scored(logps.logp_SC), rows_S=rows_S)
            outputs.append(logps.detached())
    logp_SC, entropy_SC, logit_norm2_SC = (
        by_token(part.sequences, slices, [getattr(each, name) for each in outputs])
        for name in ("logp_SC", "entropy_SC", "logit_norm2_SC")
    )
    return Logps(logp_SC.sum(1), logp_SC, entropy_SC, logit_norm2_SC, part.sequences.own_SC)


def by_count(owner_N: Tensor) -> Tensor:
    """The order of these rows by how many of them have the same owner."""
    place_N, count_P = owner_N.unique(return_inverse=True, return_counts=True)[1:]
    order_N: Tensor = count_P[place_N].argsort(stable=True)
    return order_N
