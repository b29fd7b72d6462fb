"""The scores of a micro-batch: its outputs go through the model, which records their score factors on the tape."""

from __future__ import annotations

from torch import Tensor

from oblrpo.errors import check_finite
from oblrpo.policy import Logps, Policy
from oblrpo.policy.micro_batches import of_like_length
from oblrpo.scores import GroupTape, ScoreTape
from oblrpo.step.flow import Batch, Weigh, Weighed


def score(
    part: Batch, policy: Policy, temperature: float, tape: ScoreTape | GroupTape, weigh: Weigh
) -> tuple[Logps, Weighed]:
    """Record grad log pi(o|q) of every output; return their log-probabilities, and what their scores are multiplied by.

    Outputs of like length share a forward, whichever prompt they answer, so that little is padded. A prompt's outputs
    are on one tape all the same.
    """
    if isinstance(tape, ScoreTape) and tape.takes_slices:
        slices = of_like_length(part.sequences.mask_ST.sum(1), policy.tokens_of_a_forward)
        if len(slices) > 1:
            # Groups of which a slice has as many outputs are neighbours in it, and multiplied out together.
            slices = [rows_S[by_count(part.owner_S[rows_S])] for rows_S in slices]
            logps = _in_slices(part, slices, policy, temperature, tape, weigh)
            return logps, weigh(part, logps.token_logps_SC.detach())
    with tape:
        logps = policy.logps(part.sequences, temperature)
        check_finite("log-probability", logps.logps_S.detach())
        weighed = weigh(part, logps.token_logps_SC.detach())
        tape.record(_scored(part, logps, weighed))
    return logps, weighed


def _scored(part: Batch, logps: Logps, weighed: Weighed) -> Tensor:
    """What the score of each output is the gradient of, (S,): log pi(o|q), or sum_t m_t log pi(o_t) of weights m_t."""
    if weighed.token_weight_SC is None:
        return logps.logps_S
    return (logps.token_logps_SC * weighed.token_weight_SC * part.sequences.own_SC).sum(1)


def _in_slices(
    part: Batch, slices: list[Tensor], policy: Policy, temperature: float, tape: ScoreTape, weigh: Weigh
) -> Logps:
    """Record slices of the outputs; what their forwards say of all, 0 where a token is not the policy's own."""
    outputs = []
    with tape:
        for rows_S in slices:
            some = part.at(rows_S)
            logps = policy.logps(some.sequences, temperature)
            check_finite("log-probability", logps.logps_S.detach())
            tape.record(_scored(some, logps, weigh(some, logps.token_logps_SC.detach())), rows_S=rows_S)
            outputs.append(logps.detached())
    token_logps_SC, entropy_SC, logit_norm2_SC = (
        part.sequences.by_token(slices, [getattr(each, name) for each in outputs])
        for name in ("token_logps_SC", "entropy_SC", "logit_norm2_SC")
    )
    return Logps(token_logps_SC.sum(1), token_logps_SC, entropy_SC, logit_norm2_SC, part.sequences.own_SC)


def by_count(owner_N: Tensor) -> Tensor:
    """The order of these rows by how many of them have the same owner."""
    place_N, count_P = owner_N.unique(return_inverse=True, return_counts=True)[1:]
    order_N: Tensor = count_P[place_N].argsort(stable=True)
    return order_N
