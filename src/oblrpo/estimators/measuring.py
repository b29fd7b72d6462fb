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

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor

from oblrpo.estimators.rules import RateSettings, Rule, mean_kl

AIM = 0.15**2
"""The mean square of the change of a token, in nats^2, to which an update is lengthened; responses are linear there."""
NEAR = 4.0
"""How far from `AIM`, to each side, a lengthened update may be; and how many times above rounding it has to be."""
LINEAR = 1.0
"""The mean square of the change of a token from which on it says nothing of smaller changes."""
ONE_IN = 4
"""One of so many of a batch's outputs is scored again after the update, in every training loop of ours."""
EVERY = 10
"""How many updates are measured with one floor."""
LONGEST = 1e15
"""How many times an update is lengthened at the most to feel what it does."""
RATES_OF_THEIR_OWN = ("Rprop", "Adafactor", "Prodigy")
"""Optimizers whose step is not a direction times the rate that they are given."""
OFFSETS = 1 << 20
"""How many random offsets are drawn at the most; larger tensors repeat them."""


class MeasuringRule(Rule):
    """A rule that has to know by how much every update moves the policy: `SNRSchedule.confine` is called after it.

    It holds a copy of the trained parameters from `factor` to `confine`, if it has to put a part of the update back.
    """

    mode: ClassVar[str]
    measures_updates: ClassVar[bool] = True
    numbers: ClassVar[tuple[str, ...]] = ("_reach", "_floor", "_measured")

    def __init__(self, settings: RateSettings) -> None:
        super().__init__(settings)
        self._used: float | None = None  # the rate of an update that was made and not yet confined
        self._before: list[Tensor] = []
        self._reach = 0.0  # the root mean square change of a token at rate 1; 0 before it is measured
        self._floor = 0.0  # the mean square change of a token that is rounding's
        self._measured = 0

    @classmethod
    def refusal(cls, optimizer: str, learning_rate: float) -> str:
        """Why the rule cannot work, or empty: the optimizer has a rate of its own, or the rate to start from is 0."""
        if optimizer in RATES_OF_THEIR_OWN:
            return f"schedule {cls.mode!r} sets the learning rate, which {optimizer} makes its own; try AdamW."
        return "" if learning_rate else f"schedule {cls.mode!r} needs a learning_rate above 0 to start from."

    def _first_rate(self) -> float:
        """The rate that the optimizer was made with; a scheduler's warm-up may begin at 0."""
        rate = max(float(group.get("initial_lr", group["lr"])) for group in self.settings.optimizer.param_groups)
        if refused := self.refusal("", rate):
            raise ValueError(refused)
        return rate

    def stepped(self, used: float | None) -> None:
        """Take note of the rate that `optimizer.step()` was called at."""
        self._used = used

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for group in self.settings.optimizer.param_groups for p in group["params"]]

    def _hold(self) -> None:
        self._before = [p.detach().clone() for p in self._parameters]

    def _scale_update(self, scale: float) -> None:
        for p, before in zip(self._parameters, self._before, strict=True):
            p.copy_(before + (p - before) * scale if scale else before)

    def _is_update(self) -> bool:
        """Whether the update has moved any weight; of sharded ones, on any rank, for all of them have to measure."""
        pairs = [(_local(p), _local(before)) for p, before in zip(self._parameters, self._before, strict=True)]
        moved = any(bool((p != before).any()) for p, before in pairs)
        if not any(hasattr(p, "to_local") for p in self._parameters):
            return moved
        flag = torch.tensor(float(moved), device=pairs[0][0].device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        return bool(flag)

    @contextmanager
    def _put_back(self) -> Iterator[list[Tensor]]:
        """The parameters as the update made them, which they are again in the end, whatever happens."""
        made = [p.detach().clone() for p in self._parameters]
        try:
            yield made
        finally:
            for p, kept in zip(self._parameters, made, strict=True):
                p.copy_(kept)

    def _kl(self, change: Callable[[], Tensor], used: float | None) -> float:
        """The KL of the update as it is, which was made at this rate; nats an output."""
        if not self.settings.rounds or used is None:
            return mean_kl(change())
        if not used or not self._is_update():
            return 0.0
        with self._put_back() as made:
            return _Lengths(self, made, change).kl(used)


class _Lengths:
    """One update at several lengths: the parameters are moved along it, from where they were before it."""

    def __init__(self, rule: MeasuringRule, made: list[Tensor], change: Callable[[], Tensor]) -> None:
        self.rule, self.made, self.change, self.length = rule, made, change, 0.0
        generator = torch.Generator().manual_seed(rule._measured)
        largest = max(p.numel() for p in made)
        offset = (torch.rand(min(OFFSETS, largest), generator=generator) - 0.5).to(made[0].device)
        for p, before in zip(rule._parameters, rule._before, strict=True):
            p.copy_(before)
            _shift(p, offset)
        self.none = change()

    def kl(self, used: float) -> float:
        """The KL of the update, made at this rate; the rule learns reach and floor from it."""
        rule, aim = self.rule, max(AIM, NEAR * self.rule._floor)
        k = min(max(math.sqrt(aim) / (rule._reach * used), 1.0), LONGEST) if rule._reach else 1.0
        change = self._at(k)
        size = mean_square(change)
        due = not rule._reach or rule._measured % EVERY == 0 or size < max(AIM / NEAR, 2 * rule._floor)
        if due and size < LINEAR:
            k, change, rule._floor = self._with_floor(k, change)
            size, aim = mean_square(change), max(AIM, NEAR * rule._floor)
        while k > 1 and size > NEAR * aim:
            k = max(1.0, k * max(0.1, math.sqrt(aim / size)))
            change = self._at(k)
            size = mean_square(change)
        rule._measured += 1
        if not 0 < size < math.inf:
            return size
        own = max(0.0, size - rule._floor)
        if own and size < LINEAR:
            rule._reach = math.sqrt(own) / (k * used)
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
        for p, before, made in zip(self.rule._parameters, self.rule._before, self.made, strict=True):
            p.add_((made - before) * (length - self.length))
        self.length = length
        return self.change() - self.none


def mean_square(change: Tensor) -> float:
    """The mean square over tokens of the changes of their log pi; what is exactly 0 is no token's. Infinite if one is.

    Args:
        change: (S, T) or (S,), nats.
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
