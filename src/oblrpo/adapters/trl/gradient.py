"""The gradient of one update, taken a micro-batch of whole groups at a time, and what the next update learns from it.

One forward and one backward for activations (`scores.ScoreTape`) give the score norms, the gradient under advantages
that depend on them, and each prompt's own gradient norm. TRL's own loss and backward are not run.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from oblrpo import estimators
from oblrpo.adapters.plain_state import from_json, to_json
from oblrpo.errors import check_finite
from oblrpo.estimators import BASELINES
from oblrpo.policy import Logps, Policy, Sequences
from oblrpo.scores import CalibratedProxy, Features, ScoreTape

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
        self.prior = estimators.Prior(args.prior_strength, args.prior_memory)
        self.proxy = CalibratedProxy()
        self.parts: list[Scored] = []
        self._tape = ScoreTape(policy.model, args.score_method)

    def add(self, inputs: dict[str, Tensor], outputs: int, step: int) -> Tensor:
        """Add one micro-batch's share to the gradient; return the mean advantage of its outputs.

        Args:
            inputs: the micro-batch as TRL has it, and `rewards`, NaN where there is none.
            outputs: the number of outputs of this process in the whole update.
            step: the number of updates before this one.

        Raises:
            DivergedError: a log-probability, a score norm or a gradient is NaN or infinite.
            ValueError: a completion is empty.
        """
        if not self.parts:
            self._seen = copy.deepcopy(self.prior)
        G, calibrated = self.args.num_generations, self.args.score_norms == "calibrated"
        weighted = "norm2_PG" in self.entry.needs
        sequences = sequences_of(inputs)
        with in_eval_mode(self.policy.model), self._tape as tape:
            logps = self.policy.logps(sequences, self.args.temperature, features=weighted and calibrated)
            check_finite("log-probability", logps.logps_S.detach())
            tape.record(logps.logps_S)
        norm2_S = None
        if weighted and (not calibrated or step % self.args.calibration_steps == 0):
            norm2_S = tape.norm2()
            check_finite("score norm", norm2_S)
        weight_S = norm2_S if logps.features is None else self.proxy.predict(logps.features)
        rewards_PG = inputs["rewards"].view(-1, G)
        valid_PG = ~rewards_PG.isnan()
        valid_PG &= valid_PG.sum(1, keepdim=True) >= self.entry.smallest_group
        baseline_PG = self._baseline(inputs, sequences, rewards_PG, valid_PG, weight_S)
        advantage_PG = torch.where(valid_PG, rewards_PG - baseline_PG, 0)
        group_norm2_P = tape.accumulate(-advantage_PG.flatten() / outputs, G)
        check_finite("gradient of a prompt", group_norm2_P)
        tape.forget()
        known: dict[str, Tensor | None] = {
            "reward": rewards_PG,
            "valid": valid_PG,
            "baseline": baseline_PG,
            "advantage": advantage_PG,
            "weight": weight_S,
            "norm2": norm2_S,
            "length": sequences.lengths_S,
            "logit_norm2": None if logps.features is None else logps.features.logit_norm2_S,
            "logp": logps.logps_S,
            "entropy": (logps.entropy_SC * sequences.own_SC).sum(1),
        }
        unknown_S = torch.full_like(logps.logps_S, math.nan)
        columns = [unknown_S if (found := known[name]) is None else found.flatten() for name in COLUMNS]
        table_SK = torch.stack([column.detach().to(torch.float64) for column in columns], 1)
        self.parts.append(Scored(sequences, own_logp(sequences, logps), table_SK, group_norm2_P))
        return advantage_PG.mean()

    def _baseline(
        self, inputs: dict[str, Tensor], sequences: Sequences, rewards_PG: Tensor, valid_PG: Tensor, weight_S: Any
    ) -> Tensor:
        """The baseline of every output, (P, G); one of rewards alone comes with the batch, of which this is a part."""
        if weight_S is None:
            return inputs["baseline"].view_as(rewards_PG)
        weight_PG = weight_S.view_as(rewards_PG)
        mask_PGT = sequences.own_SC.view(*rewards_PG.shape, -1)
        given = estimators.baseline_inputs(mask_PGT, weight_PG)
        baseline_PG = estimators.baseline(self.args.baseline, rewards_PG, valid_PG=valid_PG, prior=self._seen, **given)
        self._seen.observe(rewards_PG, weight_PG, valid_PG)
        return baseline_PG

    def finish(self) -> Batch:
        """Average the gradient over processes, and measure it; every process gets the same."""
        G, prompts = self.args.num_generations, sum(len(part.group_norm2_P) for part in self.parts)
        table_SK, group_norm2_P = self.accelerator.gather(
            (
                torch.cat([part.table_SK for part in self.parts]),
                torch.cat([part.group_norm2_P for part in self.parts]) * prompts**2,
            )
        )
        if self.accelerator.num_processes > 1:
            average(self.policy.parameters, self.accelerator.num_processes)
        norm2 = estimators.squared_norm(self.policy.parameters)
        columns = dict(zip(COLUMNS, table_SK.unbind(1), strict=True))
        agreement = self._learn(columns, len(self.parts[0].table_SK), G)
        return Batch(columns, G, estimators.moments(group_norm2_P, norm2), float(norm2), agreement)

    def _learn(self, columns: dict[str, Tensor], rows: int, group_size: int) -> float:
        """Make the whole batch, seen by every process, part of the past; return the calibrated proxy's agreement."""
        if bool(columns["weight"].isnan().any()):
            return math.nan  # a baseline without weights remembers nothing
        parts = [columns[name].view(-1, rows // group_size, group_size) for name in ("reward", "weight", "valid")]
        for rewards_PG, weight_PG, valid_PG in zip(
            *parts, strict=True
        ):  # micro-batch by micro-batch, as they were seen
            self.prior.observe(rewards_PG, weight_PG, valid_PG)
        self.prior.next_step()
        if self.args.score_norms == "exact" or bool(columns["norm2"].isnan().any()):
            return math.nan
        features = Features(*(columns[name].float() for name in ("length", "logit_norm2", "logp", "entropy")))
        return self.proxy.observe(features, columns["norm2"], group_size, columns["valid"].bool())

    def forget(self) -> None:
        """Let go of the batch."""
        self.parts = []

    def watch(self) -> Callable[[], Tensor]:
        """Return a function that tells, after the update, by how much log pi of some outputs' tokens has changed.

        Where the policy rounds it tells log pi itself.
        """
        every = slice(None, None, self.args.schedule_kl_every)
        chosen = [part.sequences.at(every) for part in self.parts]
        # Where the policy rounds, the schedule compares forwards of these rows alone (`SNRSchedule`).
        before_SC = 0.0 if self.policy.rounds else self._filled([part.logp_SC[every] for part in self.parts])

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


def policy_of(trainer: Any) -> Policy:
    """A trainer's model with its tokenizer; the head is looked at before accelerate wraps the model's forward."""
    policy = Policy(
        trainer.model,
        trainer.processing_class,
        bf16=trainer.accelerator.mixed_precision == "bf16",
        checkpointing=trainer.args.gradient_checkpointing,
    )
    with in_eval_mode(trainer.model):
        _ = policy.head
    return policy


def own_logp(sequences: Sequences, logps: Logps) -> Tensor:
    """The log-probability of every token, (S, C); 0 where there is none of the policy's own."""
    return torch.where(sequences.own_SC.bool(), logps.logp_SC.detach(), 0.0)


def sequences_of(inputs: dict[str, Tensor]) -> Sequences:
    """The rows of a batch of TRL's, without the padding that only other rows needed."""
    mask_SC = inputs["completion_mask"]
    own_SC = mask_SC * inputs["tool_mask"] if "tool_mask" in inputs else mask_SC
    whole = Sequences.of(inputs["prompt_ids"], inputs["prompt_mask"], inputs["completion_ids"], mask_SC)
    own_ST = torch.cat([torch.zeros_like(inputs["prompt_mask"]), own_SC], 1)
    return Sequences(whole.ids_ST, whole.mask_ST, own_ST, whole.start).at(slice(None))


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch dropout off for a while; every module gets back the mode that it had."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def average(parameters: list[nn.Parameter], processes: int) -> None:
    """Replace every gradient by its mean over processes; one that has none counts as 0."""
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= processes
