"""The gradient of one update while TRL accumulates it: its two halves, and the rows that tell how far it moved."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from oblrpo import estimators
from oblrpo.adapters.shared import rows_of_all_ranks
from oblrpo.adapters.trl.advantages import in_eval_mode, sequences_of
from oblrpo.errors import check_finite
from oblrpo.estimators import ONE_IN
from oblrpo.estimators.moments import inner
from oblrpo.policy import Policy, Sequences
from oblrpo.policy.sequences import MicroBatches
from oblrpo.step import Movement


def first_half(parts: int, size: int, group_size: int) -> int:
    """How many of so many micro-batches make the half of an update that both are whole groups; 0 where none do."""
    ends = [end for end in range(1, parts) if end * size % group_size == 0 == parts * size % group_size]
    return min(ends, key=lambda end: abs(2 * end - parts), default=0)


class Accumulated:
    """What the micro-batches of one update leave, on every process.

    Args:
        policy: the model that is trained.
        args: an `OBLRPOConfig`.
        accelerator: that of the trainer.
        noisy: whether TRL's forward has dropout or its kin, so that its log-probabilities are not the policy's.
    """

    def __init__(self, policy: Policy, args: Any, accelerator: Any, noisy: bool) -> None:
        self.policy, self.args, self.accelerator, self.noisy = policy, args, accelerator, noisy
        blocks = MicroBatches(args.per_device_train_batch_size)
        self._movement = Movement(policy, args.temperature, blocks)
        self.forget()

    def forget(self) -> None:
        """Begin a new update."""
        self.micro_batches = self._counted = 0
        self._held: list[tuple[torch.nn.Parameter, Tensor]] = []
        self._norm2_of_first = 0.0
        self._rows: list[tuple[Sequences, Tensor]] = []

    def note(self, inputs: dict[str, Tensor], token_logps_SC: Tensor, parts: int) -> None:
        """Keep one in `ONE_IN` of a micro-batch's rows, of `parts` micro-batches, with log pi of their tokens.

        Those without a token that is trained on do not count.
        """
        rows = sequences_of(inputs)
        first = self.accelerator.process_index * parts * rows.count + self._counted
        trained = (rows.lengths_S > 0).nonzero().flatten()
        self._counted, chosen = self._counted + len(trained), trained[-first % ONE_IN :: ONE_IN]
        if len(chosen):
            before_SC = token_logps_SC.detach()[chosen]
            self._rows.append((rows.at(chosen), before_SC.fill_(math.nan) if self.noisy else before_SC))

    def end_micro_batch(self, parts: int) -> None:
        """After the backward of one of `parts` micro-batches: hold the sum of the first half, in bfloat16."""
        self.micro_batches += 1
        if self.micro_batches != self._first_half(parts):
            return
        alone = self.accelerator.num_processes == 1
        for parameter in self.policy.parameters:
            if parameter.grad is None and alone:
                continue
            own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            grad: Tensor = self.accelerator.reduce(own, "mean")  # of processes; TRL does so at the end
            held = grad.to(torch.bfloat16, copy=True)
            self._norm2_of_first += inner([(grad, held)])
            self._held.append((parameter, held))

    def _first_half(self, parts: int) -> int:
        args = self.args
        if args.num_iterations > 1 and args.steps_per_generation % args.gradient_accumulation_steps:
            return 0  # the halves would share completions
        return first_half(parts, args.per_device_train_batch_size, args.num_generations)

    @property
    def has_halves(self) -> bool:
        """Whether an update that is no epoch's last has two halves of whole prompts, with completions of their own."""
        return self._first_half(self.args.gradient_accumulation_steps) > 0

    @property
    def prompts(self) -> int:
        """How many prompts the update has of all processes, whole ones."""
        rows = self.micro_batches * self.args.per_device_train_batch_size
        return int(rows * self.accelerator.num_processes // self.args.num_generations)

    def norm2(self) -> float:
        """The squared norm of the whole gradient, not clipped.

        Raises:
            DivergedError: it is NaN or infinite.
        """
        norm2 = estimators.squared_norm(self.policy.parameters)
        # In float32, because optimizers square the gradient there, and keep the squares.
        check_finite("gradient", torch.tensor(norm2, dtype=torch.float32, device="cpu"))
        return norm2

    def moments(self, norm2: float, group_norm2_P: Tensor | None = None) -> estimators.Moments | None:
        """Signal and noise: from all prompts' own norms where they are given, else from the gradient's two halves."""
        if group_norm2_P is not None and len(group_norm2_P) > 1:
            return estimators.moments(group_norm2_P, norm2)
        if not self._held:
            return None
        inner2 = inner((parameter.grad, held) for parameter, held in self._held if parameter.grad is not None)
        share = self._first_half(self.micro_batches) / self.micro_batches
        first = round(self.prompts * share)
        halves = first, self.prompts - first
        return estimators.moments_of_halves(inner2 - self._norm2_of_first, norm2, halves)

    def watch(self) -> Callable[[], Tensor]:
        """Return a function that returns, after the update, how much log pi of some outputs' tokens has changed.

        Where the policy rounds, it returns log pi itself.
        """
        change = None
        if self._rows:
            sequences = Sequences.join([rows for rows, _ in self._rows])
            blocks = torch.arange(sequences.count).split([rows.count for rows, _ in self._rows])
            before = [before_SC[:, : rows.own_SC.shape[1]] for rows, before_SC in self._rows]
            with in_eval_mode(self.policy.model):
                change = self._movement.of(sequences, sequences.by_token(blocks, before))

        def change_SC() -> Tensor:
            with in_eval_mode(self.policy.model):
                mine_SC = torch.zeros(0, 1, device=self.policy.device) if change is None else change()
            return rows_of_all_ranks(mine_SC)

        return change_SC
