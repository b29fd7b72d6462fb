"""How far an optimizer's update moves the policy, also where log-probabilities are computed with few digits.

In bfloat16 any change of the weights, however small, moves the log-probability of a token by some hundredths of a nat:
roundings fall otherwise. Over a completion that is more than an update may do. So the update is lengthened k times
until it moves tokens by far more than that (`AIM`), and what it does is scaled back: c / k for a change c of a token,
and (size - floor) / size of its KL, where size is the mean square of the c and floor that of rounding alone. As
size(k) = a k^2 + floor, the floor comes from two lengths; every `EVERY` updates are measured at a second one.

Weights that lie on the grid of bfloat16, as those of most published models do, do not move at all when they are
rounded, until an update is as long as half of the grid's width; those half-way between two points all move at once.
So both ends of a difference are taken from weights with the same random offset, uniform in +-1/2 of that width: then a
weight crosses to the next point with a chance in proportion to its change, and the mean response is the linear one.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from oblrpo.tables.algorithms import refusal

AIM = 0.15**2
"""The mean square of the change of a token, in nats^2, to which an update is lengthened; responses are linear there."""
NEAR = 4.0
"""How far from `AIM`, to each side, a lengthened update may be; and how many times above rounding it has to be."""
LINEAR = 1.0  # the mean square of the change of a token from which on it says nothing of smaller changes
ONE_IN = 4
"""One of so many of a batch's outputs is scored again after the update, in every training loop of ours."""
EVERY = 10  # how many updates are measured with one floor
LONGEST = 1e15  # how many times an update is lengthened at the most to feel what it does
OFFSETS = 1 << 20  # how many random offsets are drawn at the most; larger tensors repeat them


class Step(NamedTuple):
    """The outcome of an update: how far it went."""

    kl: float  # how far the update moved the policy, in nats
    share: float  # how much of the update is left; 1 unless it would have moved the policy too far


@dataclass
class GaugeState:
    """What is known of an optimizer's updates where log-probabilities are computed with few digits."""

    reach: float = 0.0  # the root mean square change of a token at rate 1; 0 before it is measured
    floor: float = 0.0  # the mean square change of a token that is rounding's
    measured: int = 0  # how many updates were measured


class UpdateGauge:
    """Measures by how much an update of the optimizer moves the policy.

    It holds the trained parameters beside a copy of each from `hold` on, where a part of the update may be put back.
    With `low_precision`, log-probabilities are computed with fewer digits than float32.
    """

    def __init__(self, optimizer: Optimizer, low_precision: bool) -> None:
        self.optimizer, self.low_precision = optimizer, low_precision
        self.copies: list[tuple[Tensor, Tensor, bool]] = []  # parameter, copy, whether there was a gradient
        self.state = GaugeState()

    def first_rate(self, schedule: str) -> float:
        """The rate that the optimizer was made with; a scheduler's warm-up may begin at 0."""
        rate = max(float(group.get("initial_lr", group["lr"])) for group in self.optimizer.param_groups)
        if refused := refusal(schedule, "", rate):
            raise ValueError(refused)
        return rate

    @property
    def parameters(self) -> list[Any]:
        """The parameters of all groups."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def hold(self) -> None:
        """Copy the parameters before an update."""
        self.copies = [(p, p.detach().clone(), p.grad is not None) for p in self.parameters]

    def scale_update(self, scale: float) -> None:
        """Make the update so many times as long."""
        for p, before, _ in self.copies:
            p.copy_(before + (p - before) * scale if scale else before)

    def is_update(self) -> bool:
        """Whether the update has moved any weight; of sharded ones, on any rank, for all of them have to measure."""
        moved = any(bool((_local(p) != _local(before)).any()) for p, before, _ in self.copies)
        if not any(hasattr(p, "to_local") for p, *_ in self.copies):
            return moved
        flag = torch.tensor(float(moved), device=_local(self.copies[0][0]).device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)

    @contextmanager
    def put_back(self) -> Iterator[list[Tensor]]:
        """The parameters as the update made them, which they are again in the end, whatever happens."""
        made = [p.detach().clone() for p, *_ in self.copies]
        try:
            yield made
        finally:
            for (p, *_), kept in zip(self.copies, made, strict=True):
                p.copy_(kept)

    def kl(self, change: Callable[[], Tensor], used: float | None) -> float:
        """The KL of the update as it is, which was made at this rate; nats an output."""
        if not self.low_precision or used is None:
            return mean_kl(change())
        if not used or not self.is_update():
            return 0.0
        with self.put_back() as made:
            return _Lengths(self, made, change).kl(used)


class _Lengths:
    """One update at several lengths: the parameters are moved along it, from where they were before it."""

    def __init__(self, gauge: UpdateGauge, made: list[Tensor], change: Callable[[], Tensor]) -> None:
        self.gauge, self.made, self.change, self.length = gauge, made, change, 0.0
        generator = torch.Generator().manual_seed(gauge.state.measured)
        largest = max(p.numel() for p in made)
        offset = (torch.rand(min(OFFSETS, largest), generator=generator) - 0.5).to(made[0].device)
        for p, before, _ in gauge.copies:
            p.copy_(before)
            _shift(p, offset)
        self.none = change()

    def kl(self, used: float) -> float:
        """The KL of the update, made at this rate; the gauge learns reach and floor from it."""
        state = self.gauge.state
        aim = max(AIM, NEAR * state.floor)
        k = min(max(math.sqrt(aim) / (state.reach * used), 1.0), LONGEST) if state.reach else 1.0
        change = self._at(k)
        size = mean_square(change)
        due = not state.reach or state.measured % EVERY == 0 or size < max(AIM / NEAR, 2 * state.floor)
        if due and size < LINEAR:
            k, change, state.floor = self._with_floor(k, change)
            size, aim = mean_square(change), max(AIM, NEAR * state.floor)
        while k > 1 and size > NEAR * aim:
            k = max(1.0, k * max(0.1, math.sqrt(aim / size)))
            change = self._at(k)
            size = mean_square(change)
        state.measured += 1
        if not 0 < size < math.inf:
            return size
        own = max(0.0, size - state.floor)
        if own and size < LINEAR:
            state.reach = math.sqrt(own) / (k * used)
        return mean_kl(change / k) * own / size

    def _with_floor(self, k: float, change: Tensor) -> tuple[float, Tensor, float]:
        """A length at which the update stands out from its tenth, ten times longer until it does; and the floor."""
        size, tenth = mean_square(change), mean_square(self._at(k / 10))
        while size < max(AIM / NEAR, NEAR * tenth) and k < LONGEST:
            k, tenth, change = 10 * k, size, self._at(10 * k)
            size = mean_square(change)
        floor = (100 * tenth - size) / 99 if size < LINEAR else tenth
        return k, change, max(0.0, min(floor, size))

    def _at(self, length: float) -> Tensor:
        for (p, before, _), made in zip(self.gauge.copies, self.made, strict=True):
            p.add_((made - before) * (length - self.length))
        self.length = length
        return self.change() - self.none


def mean_kl(change: Tensor) -> float:
    """KL(before || after) in nats an output: the mean over outputs of sum over tokens of exp(c) - 1 - c.

    c is the change of the log-probability of a token that was drawn before the update: (S, T), 0 where a row has no
    token, or (S,) where an output is taken as one token. As E[exp(c)] = 1, the sum is without bias (Schulman's k3) for
    outputs of the policy just before the update that the update has not seen; for others it is approximate. Those of
    the batch itself were pushed along by the update, all their tokens together: by output that counts once for every
    pair of tokens, by token once for each. Hence by token wherever it can be had. The result is infinite if any change
    is NaN or infinite, or if there is none.
    """
    change = change.detach().double()
    if not len(change) or not change.isfinite().all():
        return math.inf
    return max(0.0, float((change.expm1() - change).sum() / len(change)))


def mean_square(change: Tensor) -> float:
    """The mean square, nats^2, over tokens of changes of log pi, (S, T) or (S,); infinite if one is.

    What is exactly 0 is no token's.
    """
    change = change.detach().double()
    if not change.isfinite().all():
        return math.inf
    return float(change.square().sum() / change.count_nonzero().clamp(min=1))


def _shift(p: Any, offset: Tensor) -> None:
    """Add an offset, in +-1/2, of the distance of two numbers of bfloat16 to every weight; 0 stays 0."""
    local, offset = _local(p), offset.to(p.device)
    for piece in local.as_strided((local.numel(),), (1,)).split(len(offset)):  # in the order of memory
        exponent = piece.float().view(torch.int32) & 0x7F800000
        piece.add_(exponent.view(torch.float32) * 2.0**-7 * offset[: len(piece)])


def _local(p: Any) -> Tensor:
    """A parameter's numbers; of a sharded one, those of this rank."""
    local: Tensor = p.to_local() if hasattr(p, "to_local") else p.data
    return local
