"""The gradient of one update, taken a micro-batch at a time, and what the next update learns from it.

One forward and one backward for activations (`scores.ScoreTape`) give the score norms of whole groups, the gradient
under advantages that depend on them, and each prompt's own gradient norm. Where advantages depend on none, or on what
was measured by a pass ahead, no score of a single output is kept (`scores.GroupTape`), unless rows are so unlike in
length that forwards of like ones, which need scores kept, take less; and a micro-batch may be smaller than a group.
TRL's own loss and backward are not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from oblrpo import estimators
from oblrpo.adapters.plain_state import from_json, to_json
from oblrpo.adapters.trl.rows import MASKS, in_eval_mode, own_logp, own_SC, sequences_of
from oblrpo.errors import check_finite
from oblrpo.estimators import BASELINES, ONE_IN
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.policy.micro_batches import MicroBatches, of_like_length
from oblrpo.scores import Features, GroupTape, ScoreTape
from oblrpo.step import Batch, Movement, StepBaseline, add_to_gradient
from oblrpo.tables.algorithms import Algorithm

COLUMNS = (
    "reward", "valid", "baseline", "advantage", "weight", "norm2", "length", "logit_norm2", "logp", "entropy",
)  # fmt: skip
"""What is kept of every output; NaN where it was not measured."""


@dataclass(frozen=True)
class GradientShare:
    """One micro-batch, after its share of the gradient was added."""

    sequences: Sequences
    logp_SC: Tensor
    """The log-probability of every token; 0 where there is none of the policy's own."""
    table_SK: Tensor
    """A row an output; columns are `COLUMNS`."""
    group_norm2_P: Tensor
    """The squared norm of each prompt's share of this process's gradient."""


@dataclass(frozen=True)
class WholeBatch:
    """The whole batch of all processes, the same on each of them."""

    columns: dict[str, Tensor]
    """Every column of `COLUMNS`, (S,)."""
    group_size: int
    """G, the number of outputs of a prompt, which lie together."""
    moments: estimators.Moments
    norm2: float
    """The squared norm of the gradient, averaged over processes and not clipped."""
    differs: bool
    """Whether any reward differs from another; if not, nothing was learned of the batch."""
    headroom: float
    """The least nats an output that could earn all that is left to earn."""
    agreement: float
    """How well the calibrated proxy agreed with exact norms, where it was compared; else NaN."""


class BatchGradient:
    """Takes the gradient (1/S) sum_s A_s grad log pi(o_s|q_s) of S sequences; `.grad` is that of -J.

    Args:
        policy: the policy, in either mode; dropout is off while scores are taken.
        args: an `OBLRPOConfig`.
        accelerator: of the trainer.
        rows: how many prompts there are to train on; None where they cannot be counted.

    Raises:
        UnsupportedModelError: a trainable layer has no rule.
    """

    def __init__(self, policy: Policy, args: Any, accelerator: Any, rows: int | None = None) -> None:
        self.policy, self.args, self.accelerator, self.rows = policy, args, accelerator, rows
        self.weighted = "norm2_PG" in BASELINES[args.baseline].needs
        compared = self.weighted and args.score_norms == "calibrated"
        # Earlier steps say the same to every process and micro-batch; this one's other prompts would not.
        every = args.calibration_steps if compared else 0
        self.baseline = StepBaseline(args.baseline, args.score_norms, every, past_only=True)
        self._pass = self.baseline.begin()
        self.parts: list[GradientShare] = []
        part_of_group = args.per_device_train_batch_size < args.num_generations
        ahead = args.score_method == "two_pass" or part_of_group
        self.measures_ahead = self.weighted and ahead
        self._tape = ScoreTape(policy.model, "streamed" if ahead else args.score_method)
        self._group_tape = GroupTape(policy.model)
        self._complete: list[Tensor | None] = []  # the gradient of the groups before one of which a part is in `.grad`

    def measure(self, parts: list[dict[str, Tensor]], step: int) -> None:
        """Give every micro-batch of an update its weights and baselines, by a pass ahead of that for the gradient.

        A forward of each gives calibrated weights; exact norms take a backward for activations, too.

        Args:
            parts: all of this process's micro-batches, as `add` gets them.
            step: as for `add`.

        Raises:
            DivergedError: a log-probability or a score norm is NaN or infinite.
            ValueError: a completion is empty.
        """
        self._pass = self.baseline.begin(step)
        for inputs in parts:
            sequences = sequences_of(inputs)
            slices = of_like_length(sequences.mask_ST.sum(1), self.policy.tokens_of_a_forward)
            with in_eval_mode(self.policy.model):
                found = [self._weights(*self._measured(sequences.at(rows_S))) for rows_S in slices]
            order_S = torch.cat(slices).argsort()
            inputs.update({name: torch.cat([each[name] for each in found])[order_S] for name in found[0]})
        names = ("rewards", "weight", *(name for name in MASKS if name in parts[0]))
        whole = {name: torch.cat([inputs[name] for inputs in parts]) for name in names}
        self.set_baselines(whole)
        start = 0
        for inputs in parts:
            rows = slice(start, start := start + len(inputs["rewards"]))
            inputs.update(valid=whole["valid"][rows], baseline=whole["baseline"][rows])
        self._pass = self.baseline.begin()  # the pass for the gradient compares nothing

    def _measured(self, sequences: Sequences) -> tuple[Logps, Tensor | None]:
        """What a forward shows, and score norms where this update takes them."""
        if not self._pass.takes_norms():
            with torch.no_grad():
                logps = self.policy.logps(sequences, self.args.temperature)
            check_finite("log-probability", logps.logps_S)
            return logps, None
        with self._tape as tape:
            logps = self.policy.logps(sequences, self.args.temperature)
            check_finite("log-probability", logps.logps_S.detach())
            tape.record(logps.logps_S)
        norm2_S = tape.norm2()
        check_finite("score norm", norm2_S)
        tape.forget()
        return logps, norm2_S

    def set_baselines(self, inputs: dict[str, Tensor]) -> None:
        """Set `valid`, which outputs count, and `baseline` of whole groups; without weights, of those of all processes.

        Args:
            inputs: `rewards`, and `weight` and the masks where the baseline needs them, (S,) and (S, C).
        """
        rewards_PG = inputs["rewards"].view(-1, self.args.num_generations)
        valid_PG = ~rewards_PG.isnan()
        valid_PG &= valid_PG.sum(1, keepdim=True) >= BASELINES[self.args.baseline].smallest_group
        own_PGT = norm2_PG = None
        if self.weighted:
            own_PGT, norm2_PG = own_SC(inputs).view(*rewards_PG.shape, -1), inputs["weight"].view_as(rewards_PG)
        baseline_PG = self._pass.of(rewards_PG, valid_PG, own_PGT, norm2_PG)
        inputs.update(valid=valid_PG.flatten(), baseline=baseline_PG.flatten())

    def _batch(self, inputs: dict[str, Tensor], outputs: int) -> Batch:
        """TRL's rows as a batch whose gradient is the sum of advantages times scores over so many outputs."""
        shape = -1, min(self.args.num_generations, len(inputs["rewards"]))
        rewards_PG, held_PG = inputs["rewards"].view(shape), None
        valid_PG, algorithm = ~rewards_PG.isnan(), Algorithm(self.args.baseline)
        if "baseline" in inputs:  # groups that are too small have been left out
            valid_PG = inputs["valid"].view(shape)
            held_PG = torch.where(valid_PG, inputs["baseline"].view(shape), 0)  # NaN where a reward is missing
            algorithm = Algorithm("none")
        batch = Batch.of(sequences_of(inputs), rewards_PG, valid_PG, algorithm)
        count_PG = torch.full_like(batch.count_PG, outputs)
        return replace(batch, prompts_in_mean=1, count_PG=count_PG, baseline_PG=held_PG)

    def add(self, inputs: dict[str, Tensor], outputs: int, step: int) -> Tensor:
        """Add one micro-batch's share to the gradient; return the mean advantage of its outputs.

        Args:
            inputs: the micro-batch as TRL has it, and `rewards`, NaN where there is none; `valid` and `baseline` where
                they are known.
            outputs: the number of outputs of this process in the whole update.
            step: the number of updates before this one.

        Raises:
            DivergedError: a log-probability, a score norm or a gradient is NaN or infinite.
            ValueError: a completion is empty.
        """
        if not self.parts:
            self._pass = self.baseline.begin(None if "baseline" in inputs else step)
        batch = self._batch(inputs, outputs)
        in_slices = self._tape.takes_slices and self._are_ragged(batch.sequences)
        tape = self._tape if in_slices or self._pass.takes_norms(batch.baseline_PG) else self._group_tape
        with in_eval_mode(self.policy.model):
            part = add_to_gradient(batch, self.policy, self.args.temperature, tape, self._pass)
        advantage_S = estimators.advantages(batch.rewards_PG, part.baseline_PG, batch.valid_PG).flatten()
        logps, sequences = part.logps, batch.sequences
        columns = inputs | {
            "valid": batch.valid_PG.flatten(),
            "baseline": torch.where(batch.valid_PG, part.baseline_PG, inputs["rewards"].view(batch.shape)).flatten(),
            "reward": inputs["rewards"],
            "advantage": advantage_S,
            "length": sequences.lengths_S,
            "logp": logps.logps_S,
            "entropy": (logps.entropy_SC * logps.own_SC).sum(1),
        }
        if self.weighted and batch.baseline_PG is None:
            columns |= self._weights(logps, part.norm2_S)
        unknown_S = torch.full_like(logps.logps_S, math.nan)
        table_SK = torch.stack([columns.get(name, unknown_S).detach().to(torch.float64) for name in COLUMNS], 1)
        norm2_P = self._complete_groups(part.group_norm2_P, len(advantage_S))
        self.parts.append(GradientShare(sequences, own_logp(sequences, logps), table_SK, norm2_P))
        return advantage_S.mean()

    def _are_ragged(self, sequences: Sequences) -> bool:
        """Whether slices of like length save more than their tape costs: it holds 4/3 times as much of a token."""
        lengths_S = sequences.mask_ST.sum(1)
        slices = of_like_length(lengths_S, self.policy.tokens_of_a_forward)
        tokens = sum(len(rows_S) * int(lengths_S[rows_S].max()) for rows_S in slices)
        return tokens < 0.75 * len(lengths_S) * int(lengths_S.max())

    def _weights(self, logps: Logps, norm2_S: Tensor | None) -> dict[str, Tensor]:
        """The weights that the baseline takes, and what they come from: exact norms, features of the draws."""
        columns = {"weight": self._pass.weights(logps, norm2_S)}
        if norm2_S is not None:
            columns["norm2"] = norm2_S
        if not self.baseline.exact:
            columns["logit_norm2"] = logps.features.logit_norm2_S
        return columns

    def _complete_groups(self, norm2_P: Tensor, rows: int) -> Tensor:
        """The squared norm of each group's share of the gradient, of the groups that are complete."""
        G = self.args.num_generations
        if rows >= G:
            return norm2_P
        if (len(self.parts) + 1) * rows % G:
            return norm2_P[:0]
        norm2 = estimators.squared_norm(self.policy.parameters)  # `.grad` holds nothing but this group
        before = self._complete or [None] * len(self.policy.parameters)
        self._complete = [
            total(parameter.grad, grad) for parameter, grad in zip(self.policy.parameters, before, strict=True)
        ]
        self.policy.model.zero_grad(set_to_none=True)
        return torch.tensor([norm2], dtype=torch.float64, device=norm2_P.device)

    def finish(self) -> WholeBatch:
        """Average the gradient over processes, and measure it; every process gets the same.

        Raises:
            ValueError: the last group is not complete.
        """
        G, prompts = self.args.num_generations, sum(len(part.group_norm2_P) for part in self.parts)
        if sum(len(part.table_SK) for part in self.parts) != G * prompts:
            raise ValueError("the update ends within a group")
        table_SK, group_norm2_P = self.accelerator.gather(
            (
                torch.cat([part.table_SK for part in self.parts]),
                torch.cat([part.group_norm2_P for part in self.parts]) * prompts**2,
            )
        )
        if self._complete:
            for parameter, grad in zip(self.policy.parameters, self._complete, strict=True):
                parameter.grad = grad
            self._complete = []
        if self.accelerator.num_processes > 1:
            average(self.policy.parameters, self.accelerator.num_processes)
        norm2 = estimators.squared_norm(self.policy.parameters)
        columns = dict(zip(COLUMNS, table_SK.unbind(1), strict=True))
        rewards_PG, valid_PG = columns["reward"].view(-1, G), columns["valid"].bool().view(-1, G)
        differs = estimators.differ(rewards_PG, valid_PG)
        agreement = self._learn(columns, G) if differs else math.nan
        room = estimators.headroom(rewards_PG, valid_PG) if differs else math.inf
        moments = self._moments(columns, group_norm2_P, norm2)
        return WholeBatch(columns, G, moments, float(norm2), differs, room, agreement)

    def _moments(self, columns: dict[str, Tensor], group_norm2_P: Tensor, norm2: float) -> estimators.Moments:
        """Signal and noise, of prompts that are drawn without replacement where the trainer's rows can be counted."""
        moments = estimators.moments(group_norm2_P, norm2)
        valid_PG = columns["valid"].bool().view(len(group_norm2_P), -1)
        part2_PG = (columns["advantage"].square() * columns["norm2"]).view_as(valid_PG) / valid_PG.shape[1] ** 2
        if self.rows is None or bool(part2_PG[valid_PG].isnan().any()):
            return moments
        own2 = estimators.own_norm2(group_norm2_P, part2_PG, valid_PG)
        return moments if own2 is None else moments.of_rows(own2, self.rows)

    def _learn(self, columns: dict[str, Tensor], group_size: int) -> float:
        """Make the whole batch, seen by every process, part of the past; return the calibrated proxy's agreement."""
        if bool(columns["weight"].isnan().any()):
            return math.nan  # a baseline without weights remembers nothing
        self.baseline.prior.observe(*(columns[name].view(-1, group_size) for name in ("reward", "weight", "valid")))
        self.baseline.prior.next_step()
        if self.args.score_norms == "exact" or bool(columns["norm2"].isnan().any()):
            return math.nan
        features = Features(*(columns[name].float() for name in ("length", "logit_norm2", "logp", "entropy")))
        return self.baseline.calibrated.observe(features, columns["norm2"], group_size, columns["valid"].bool())

    def forget(self) -> None:
        """Let go of the batch."""
        self.parts, self._complete = [], []

    def watch(self) -> Callable[[], Tensor]:
        """Return a function that returns, after the update, how much log pi of some outputs' tokens has changed.

        Where the policy rounds, it returns log pi itself.
        """
        accelerator, rows = self.accelerator, sum(len(part.logp_SC) for part in self.parts)
        first = start = accelerator.process_index * rows
        chosen, before = [], []
        for part in self.parts:
            rows_S, start = slice(-start % ONE_IN, None, ONE_IN), start + len(part.logp_SC)
            chosen.append(part.sequences.at(rows_S))
            before.append(part.logp_SC[rows_S])
        sequences = Sequences.join(chosen)
        width = sequences.own_SC.shape[1]
        before_SC = torch.cat([nn.functional.pad(old_SC, (0, width - old_SC.shape[1]))[:, :width] for old_SC in before])
        rows_at_once = MicroBatches(self.args.per_device_train_batch_size)
        change = Movement(self.policy, self.args.temperature, rows_at_once).of(sequences, before_SC)

        def change_SC() -> Tensor:
            with in_eval_mode(self.policy.model):
                mine_SC = change() if sequences.count else before[0].new_zeros(0, 1)
            mine_SC = accelerator.pad_across_processes(mine_SC, dim=1)
            all_SC = mine_SC.new_zeros(-(-accelerator.num_processes * rows // ONE_IN), mine_SC.shape[1])
            all_SC[-(-first // ONE_IN) :][: len(mine_SC)] = mine_SC
            whole_SC: Tensor = accelerator.reduce(all_SC, "sum")
            return whole_SC

        return change_SC

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, for JSON."""
        return {name: to_json(state) for name, state in self.baseline.state_dict().items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.baseline.load_state_dict({name: from_json(state[name]) for name in ("prior", "proxy")})


def total(grad: Tensor | None, before: Tensor | None) -> Tensor | None:
    """The sum of two gradients, written into the second."""
    if before is None or grad is None:
        return before if grad is None else grad
    return before.add_(grad)


def average(parameters: list[nn.Parameter], processes: int) -> None:
    """Replace every gradient by its mean over processes; one that has none counts as 0."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= processes
