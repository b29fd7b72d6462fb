"""The gradient of one update, taken a micro-batch at a time, and what the next update learns from it.

One forward and one backward for activations (`scores.ScoreTape`) give the score norms of whole groups, the gradient
under advantages that depend on them, and each prompt's own gradient norm. Where advantages depend on none, or on what
was measured by a pass ahead, no score of a single output is kept (`scores.GroupTape`), and a micro-batch may be smaller
than a group. TRL's own loss and backward are not run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oblrpo import estimators
from oblrpo.adapters.plain_state import from_json, to_json
from oblrpo.adapters.trl.rows import MASKS, in_eval_mode, own_logp, own_SC, sequences_of
from oblrpo.errors import check_finite
from oblrpo.estimators import BASELINES, ONE_IN
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.scores import CalibratedProxy, Features, GroupTape, ScoreTape

COLUMNS = (
    "reward", "valid", "baseline", "advantage", "weight", "norm2", "length", "logit_norm2", "logp", "entropy",
)  # fmt: skip
"""What is kept of every output; NaN where it was not measured."""


@dataclass(frozen=True)
class Scored:
    """One micro-batch, after its share of the gradient was added."""

    sequences: Sequences
    logp_SC: Tensor
    """The log-probability of every token; 0 where there is none of the policy's own."""
    table_SK: Tensor
    """A row an output; columns are `COLUMNS`."""
    group_norm2_P: Tensor
    """The squared norm of each prompt's share of this process's gradient."""


@dataclass(frozen=True)
class Batch:
    """The whole batch of all processes, the same on each of them."""

    columns: dict[str, Tensor]
    """Every column of `COLUMNS`, (S,)."""
    group_size: int
    """G, the number of outputs of a prompt, which lie together."""
    moments: estimators.Moments
    norm2: float
    """The squared norm of the gradient, averaged over processes and not clipped."""
    agreement: float
    """How well the calibrated proxy agreed with exact norms, where it was compared; else NaN."""


class BatchGradient:
    """Takes the gradient (1/S) sum_s A_s grad log pi(o_s|q_s) of S sequences; `.grad` is that of -J.

    Args:
        policy: the policy, in either mode; dropout is off while scores are taken.
        args: an `OBLRPOConfig`.
        accelerator: of the trainer.

    Raises:
        UnsupportedModelError: a trainable layer has no rule.
    """

    def __init__(self, policy: Policy, args: Any, accelerator: Any) -> None:
        self.policy, self.args, self.accelerator = policy, args, accelerator
        self.entry = BASELINES[args.baseline]
        self.prior = estimators.Prior()
        self.proxy = CalibratedProxy()
        self.parts: list[Scored] = []
        self.weighted = "norm2_PG" in self.entry.needs
        part_of_group = args.per_device_train_batch_size < args.num_generations
        ahead = args.score_method == "two_pass" or part_of_group
        self.measures_ahead = self.weighted and ahead
        self._tape = ScoreTape(policy.model, "streamed" if ahead else args.score_method)
        self._group_tape = GroupTape(policy.model)
        self._complete: list[Tensor | None] = []  # the gradient of the groups before one of which a part is in `.grad`

    def measure(self, parts: list[dict[str, Tensor]], step: int) -> None:
        """Tell every micro-batch of an update its weights and baselines, by a pass ahead of that for the gradient.

        A forward of each gives calibrated weights; exact norms take a backward for activations, too.

        Args:
            parts: all of this process's micro-batches, as `add` gets them.
            step: as for `add`.

        Raises:
            DivergedError: a log-probability or a score norm is NaN or infinite.
            ValueError: a completion is empty.
        """
        for inputs in parts:
            if not self._takes_norms(step):
                with in_eval_mode(self.policy.model), torch.no_grad():
                    self._weigh(inputs, self._logps(sequences_of(inputs), features=True))
                continue
            with in_eval_mode(self.policy.model), self._tape as tape:
                logps = self._logps(sequences_of(inputs), features=True)
                tape.record(logps.logps_S)
                self._weigh(inputs, logps, tape)
            tape.forget()
        names = ("rewards", "weight", *(name for name in MASKS if name in parts[0]))
        whole = {name: torch.cat([inputs[name] for inputs in parts]) for name in names}
        self.set_baselines(whole)
        start = 0
        for inputs in parts:
            rows = slice(start, start := start + len(inputs["rewards"]))
            inputs.update(valid=whole["valid"][rows], baseline=whole["baseline"][rows])

    def set_baselines(self, inputs: dict[str, Tensor]) -> None:
        """Set `valid`, which outputs count, and `baseline` of whole groups; without weights, of those of all processes.

        Args:
            inputs: `rewards`, and `weight` and the masks where the baseline needs them, (S,) and (S, C).
        """
        rewards_PG = inputs["rewards"].view(-1, self.args.num_generations)
        valid_PG = ~rewards_PG.isnan()
        valid_PG &= valid_PG.sum(1, keepdim=True) >= self.entry.smallest_group
        given: dict[str, Any] = {}
        if self.weighted:
            if not self.parts:
                self._seen = copy.deepcopy(self.prior)
            weight_PG = inputs["weight"].view_as(rewards_PG)
            given |= estimators.baseline_inputs(own_SC(inputs).view(*rewards_PG.shape, -1), weight_PG)
            given["prior"] = self._seen
        baseline_PG = estimators.baseline(self.args.baseline, rewards_PG, valid_PG=valid_PG, **given)
        if self.weighted:
            self._seen.observe(rewards_PG, weight_PG, valid_PG)
        inputs.update(valid=valid_PG.flatten(), baseline=baseline_PG.flatten())

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
        known = "baseline" in inputs
        sequences, exact = sequences_of(inputs), self._takes_norms(step) and not known
        with in_eval_mode(self.policy.model), self._tape if exact else self._group_tape as tape:
            logps = self._logps(sequences, features=not known)
            tape.record(logps.logps_S)
            if not known:
                self._weigh(inputs, logps, tape)
                self.set_baselines(inputs)
            advantage_S = torch.where(inputs["valid"], inputs["rewards"] - inputs["baseline"], 0)
            group_norm2_P = self._accumulate(tape, -advantage_S / outputs)
        found = inputs | {
            "reward": inputs["rewards"],
            "advantage": advantage_S,
            "length": sequences.lengths_S,
            "logp": logps.logps_S,
            "entropy": (logps.entropy_SC * sequences.own_SC).sum(1),
        }
        unknown_S = torch.full_like(logps.logps_S, math.nan)
        columns = [found.get(name, unknown_S).detach().to(torch.float64) for name in COLUMNS]
        self.parts.append(Scored(sequences, own_logp(sequences, logps), torch.stack(columns, 1), group_norm2_P))
        return advantage_S.mean()

    def _takes_norms(self, step: int) -> bool:
        """Whether this update measures score norms, to weigh by or to learn from."""
        return self.weighted and (self.args.score_norms == "exact" or step % self.args.calibration_steps == 0)

    def _logps(self, sequences: Sequences, features: bool) -> Logps:
        features &= self.weighted and self.args.score_norms == "calibrated"
        logps = self.policy.logps(sequences, self.args.temperature, features=features)
        check_finite("log-probability", logps.logps_S.detach())
        return logps

    def _weigh(self, inputs: dict[str, Tensor], logps: Logps, tape: ScoreTape | GroupTape | None = None) -> None:
        """Set the weights that the baseline takes, and what they come from: exact norms, features of the draws."""
        if isinstance(tape, ScoreTape):
            inputs["norm2"] = tape.norm2()
            check_finite("score norm", inputs["norm2"])
        if logps.features is None:
            inputs["weight"] = inputs["norm2"]
        else:
            inputs["logit_norm2"] = logps.features.logit_norm2_S
            inputs["weight"] = self.proxy.predict(logps.features)

    def _accumulate(self, tape: ScoreTape | GroupTape, coef_S: Tensor) -> Tensor:
        """Add to the gradient; return the squared norm of each group's share, as far as groups are complete."""
        G, rows = self.args.num_generations, len(coef_S)
        norm2_P = tape.accumulate(coef_S, min(G, rows))
        tape.forget()
        check_finite("gradient of a prompt", norm2_P)
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

    def finish(self) -> Batch:
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
        rows = len(self.parts[0].table_SK) * (len(self.parts) if self.measures_ahead else 1)
        agreement = self._learn(columns, rows, G)
        return Batch(columns, G, estimators.moments(group_norm2_P, norm2), float(norm2), agreement)

    def _learn(self, columns: dict[str, Tensor], rows: int, group_size: int) -> float:
        """Make the whole batch, seen by every process, part of the past; return the calibrated proxy's agreement."""
        if bool(columns["weight"].isnan().any()):
            return math.nan  # a baseline without weights remembers nothing
        parts = [columns[name].view(-1, rows // group_size, group_size) for name in ("reward", "weight", "valid")]
        for rewards_PG, weight_PG, valid_PG in zip(*parts, strict=True):  # as many rows at a time as were seen at once
            self.prior.observe(rewards_PG, weight_PG, valid_PG)
        self.prior.next_step()
        if self.args.score_norms == "exact" or bool(columns["norm2"].isnan().any()):
            return math.nan
        features = Features(*(columns[name].float() for name in ("length", "logit_norm2", "logp", "entropy")))
        return self.proxy.observe(features, columns["norm2"], group_size, columns["valid"].bool())

    def forget(self) -> None:
        """Let go of the batch."""
        self.parts, self._complete = [], []

    def watch(self) -> Callable[[], Tensor]:
        """Return a function that tells, after the update, by how much log pi of some outputs' tokens has changed.

        Where the policy rounds it tells log pi itself.
        """
        start = 0
        chosen, before = [], []
        for part in self.parts:
            rows, start = slice(-start % ONE_IN, None, ONE_IN), start + len(part.logp_SC)
            if len(part.logp_SC[rows]):
                chosen.append(part.sequences.at(rows))
                before.append(part.logp_SC[rows])
        # Where the policy rounds, the schedule compares forwards of these rows alone (`SNRSchedule`).
        before_SC = 0.0 if self.policy.rounds else self._filled(before)

        def change_SC() -> Tensor:
            mine_SC = self._logp_SC(chosen) - before_SC
            all_SC: Tensor = self.accelerator.gather(self.accelerator.pad_across_processes(mine_SC, dim=1))
            return all_SC

        return change_SC

    @torch.no_grad()
    def _logp_SC(self, chosen: list[Sequences]) -> Tensor:
        with in_eval_mode(self.policy.model):
            return self._filled([own_logp(rows, self.policy.logps(rows, self.args.temperature)) for rows in chosen])

    def _filled(self, logp_SC: list[Tensor]) -> Tensor:
        """Rows of several micro-batches as one rectangle."""
        width = max(part.logp_SC.shape[1] for part in self.parts)
        return torch.cat([nn.functional.pad(rows, (0, width - rows.shape[1])) for rows in logp_SC])

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, for JSON."""
        return {"prior": to_json(self.prior.state_dict()), "proxy": to_json(self.proxy.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.prior.load_state_dict(from_json(state["prior"]))
        self.proxy.load_state_dict(from_json(state["proxy"]))


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
