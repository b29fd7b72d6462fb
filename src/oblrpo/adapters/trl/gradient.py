"""The gradient of one update, taken a micro-batch at a time, and what the next update learns from it.

One forward and one backward for activations (`scores.ScoreTape`) give the score norms of whole groups, the gradient
under advantages that depend on them, and each prompt's own gradient norm. Where advantages depend on none, or on what
was measured by a pass ahead, no score of a single output is kept (`scores.GroupTape`), unless rows are so unlike in
length that forwards of like ones, which need scores kept, take less; and a micro-batch may be smaller than a group.
TRL's own loss and backward are not run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from oblrpo import estimators
from oblrpo.adapters.shared import baseline_metrics, with_tensors, without_tensors
from oblrpo.adapters.trl.taped import Outputs, Part, TapedPass, add_to_gradient, drawn, own_norm2
from oblrpo.errors import check_finite
from oblrpo.estimators import BASELINES, ONE_IN
from oblrpo.policy import Policy, Sequences
from oblrpo.policy.sequences import MicroBatches, of_like_length
from oblrpo.scores import Features, GroupTape, ScoreTape
from oblrpo.step import Movement, StepBaseline
from oblrpo.step.look import counted
from oblrpo.tables.algorithms import Algorithm

MASKS = ("completion_mask", "tool_mask")
"""What TRL's batch says of tokens."""


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


def own_SC(inputs: dict[str, Tensor]) -> Tensor:
    """Which tokens of a batch of TRL's are the policy's own: those of a completion but what tools have said."""
    mask_SC = inputs["completion_mask"]
    return mask_SC * inputs["tool_mask"] if "tool_mask" in inputs else mask_SC


def sequences_of(inputs: dict[str, Tensor]) -> Sequences:
    """The rows of a batch of TRL's, without the padding that only other rows needed."""
    padded = Sequences.of(
        inputs["prompt_ids"], inputs["prompt_mask"], inputs["completion_ids"], inputs["completion_mask"]
    )
    own_ST = torch.cat([torch.zeros_like(inputs["prompt_mask"]), own_SC(inputs)], 1)
    return Sequences(padded.ids_ST, padded.mask_ST, own_ST, padded.start).at(slice(None))


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


COLUMNS = ("reward", "valid", "baseline", "advantage", "norm2", "length", "logp", "entropy", "logit_norm2")
"""What processes show each other of every output; the last four are the fields of `Features`."""


@dataclass(frozen=True)
class GatheredBatch:
    """The batch of all processes, the same on each of them."""

    columns: dict[str, Tensor]
    """`COLUMNS` and `weight`, (P, G) each; NaN where something was not measured."""
    moments: estimators.Moments
    norm2: float
    """The squared norm of the gradient, averaged over processes and not clipped."""
    differs: bool
    """Whether any reward differs from another; if not, nothing was learned of the batch."""
    agreement: float
    """How well the calibrated proxy agreed with exact norms, where it was compared; else NaN."""

    def metrics(self) -> dict[str, float]:
        """What baselines, norms and tokens of the batch were like."""
        columns, valid_PG = self.columns, self.columns["valid"]
        norm2_PG = None if columns["norm2"].isnan().any() else columns["norm2"]
        return {
            "entropy": float(columns["entropy"].sum() / columns["length"].sum()),
            "completions/masked_ratio": 1 - float(valid_PG.double().mean()),
            **baseline_metrics(columns["reward"], valid_PG, columns["baseline"], norm2_PG),
            **({} if math.isnan(self.agreement) else {"score_norm2/agreement_calibrated": self.agreement}),
        }


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
        self.policy, self.args, self.accelerator = policy, args, accelerator
        size, G = args.per_device_train_batch_size, args.num_generations
        prompts = size * args.gradient_accumulation_steps * accelerator.num_processes // G
        fits = args.shuffle_dataset and size >= G  # a look takes a whole group at a time
        self.rows = counted(rows, prompts, G, Algorithm(args.baseline)) if fits else None
        self.weighted = "norm2_PG" in BASELINES[args.baseline].needs
        compared = self.weighted and args.score_norms == "calibrated"
        # Earlier steps say the same to every process and micro-batch; this one's other prompts would not.
        self.baseline = StepBaseline(args.baseline, args.score_norms, past_only=True)
        self._every = args.calibration_steps if compared else 0
        self._pass = TapedPass(self.baseline)
        self.parts: list[Part] = []  # the micro-batches so far; `group_norm2_P` is of groups that are complete
        ahead = args.score_method == "two_pass" or size < G
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
        self._pass = TapedPass(self.baseline, step, self._every)
        for inputs in parts:
            sequences = sequences_of(inputs)
            slices = of_like_length(sequences.mask_ST.sum(1), self.policy.tokens_of_a_forward)
            with in_eval_mode(self.policy.model):
                measured = [self._measured(sequences.at(rows_S)) for rows_S in slices]
            order_S = torch.cat(slices).argsort()
            inputs.update({name: torch.cat([each[name] for each in measured])[order_S] for name in measured[0]})
        names = ("rewards", "weight", *(name for name in MASKS if name in parts[0]))
        batch = {name: torch.cat([inputs[name] for inputs in parts]) for name in names}
        self.set_baselines(batch)
        start = 0
        for inputs in parts:
            rows = slice(start, start := start + len(inputs["rewards"]))
            inputs.update(valid=batch["valid"][rows], baseline=batch["baseline"][rows])
        self._pass = TapedPass(self.baseline)  # the pass for the gradient compares nothing

    def _measured(self, sequences: Sequences) -> dict[str, Tensor]:
        """The weights that the baseline takes, and score norms where this update takes them."""
        if not self._pass.takes_norms():
            with torch.no_grad():
                logps = self.policy.logps(sequences, self.args.temperature)
            check_finite("log-probability", logps.logps_S)
            return {"weight": self._pass.weights(logps, None)}
        with self._tape as tape:
            logps = self.policy.logps(sequences, self.args.temperature)
            check_finite("log-probability", logps.logps_S.detach())
            tape.record(logps.logps_S)
        norm2_S = tape.norm2()
        check_finite("score norm", norm2_S)
        tape.forget()
        return {"weight": self._pass.weights(logps, norm2_S), "norm2": norm2_S}

    def set_baselines(self, inputs: dict[str, Tensor]) -> None:
        """Set `valid`, which outputs count, and `baseline` of whole groups; without weights, of those of all processes.

        Args:
            inputs: `rewards`, and `weight` and the masks where the baseline needs them, (S,) and (S, C).
        """
        rewards_PG = inputs["rewards"].view(-1, self.args.num_generations)
        valid_PG = self._valid_PG(rewards_PG)
        own_PGT = norm2_PG = None
        if self.weighted:
            own_PGT, norm2_PG = own_SC(inputs).view(*rewards_PG.shape, -1), inputs["weight"].view_as(rewards_PG)
        baseline_PG = self._pass.baseline.of(rewards_PG, valid_PG, own_PGT, norm2_PG)
        inputs.update(valid=valid_PG.flatten(), baseline=baseline_PG.flatten())

    def _valid_PG(self, rewards_PG: Tensor) -> Tensor:
        """Which outputs count: those with a reward, of groups that have as many of these as the baseline needs."""
        valid_PG = ~rewards_PG.isnan()
        return valid_PG & (valid_PG.sum(1, keepdim=True) >= BASELINES[self.args.baseline].smallest_group)

    def _outputs(self, inputs: dict[str, Tensor]) -> Outputs:
        """TRL's rows with their rewards, and the baseline where it is known."""
        rewards_PG, fixed_PG = inputs["rewards"].view(-1, min(self.args.num_generations, len(inputs["rewards"]))), None
        if "baseline" in inputs:
            valid_PG = inputs["valid"].view_as(rewards_PG)
            fixed_PG = torch.where(valid_PG, inputs["baseline"].view_as(rewards_PG), 0)  # NaN where a reward is missing
        else:
            valid_PG = self._valid_PG(rewards_PG)
        return Outputs(sequences_of(inputs), torch.where(valid_PG, rewards_PG, 0), valid_PG, fixed_PG)

    def add(self, inputs: dict[str, Tensor], outputs: int, step: int) -> Tensor:
        """Add one micro-batch's share to the gradient; return the mean advantage of its outputs.

        Args:
            inputs: the micro-batch as TRL has it, and `rewards`, NaN where there is none; `valid` and `baseline` where
                they are known.
            outputs: the number of outputs of this process in the update.
            step: the number of updates before this one.

        Raises:
            DivergedError: a log-probability, a score norm or a gradient is NaN or infinite.
            ValueError: a completion is empty.
        """
        if not self.parts:
            self._pass = TapedPass(self.baseline, None if "baseline" in inputs else step, self._every)
        mine = self._outputs(inputs)
        in_slices = self._tape.takes_slices and self._are_ragged(mine.sequences)
        tape = self._tape if in_slices or self._pass.takes_norms(mine.fixed_PG) else self._group_tape
        with in_eval_mode(self.policy.model):
            part = add_to_gradient(mine, outputs, self.policy, self.args.temperature, tape, self._pass)
        norm2_P = self._complete_groups(part.group_norm2_P, mine.sequences.count)
        self.parts.append(replace(part, norm2_S=inputs.get("norm2", part.norm2_S), group_norm2_P=norm2_P))
        return part.advantages_PG.mean()

    def _are_ragged(self, sequences: Sequences) -> bool:
        """Whether slices of like length save more than their tape costs: it holds 4/3 times as much of a token."""
        lengths_S = sequences.mask_ST.sum(1)
        slices = of_like_length(lengths_S, self.policy.tokens_of_a_forward)
        tokens = sum(len(rows_S) * int(lengths_S[rows_S].max()) for rows_S in slices)
        return tokens < 0.75 * len(lengths_S) * int(lengths_S.max())

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

    def finish(self, step: int) -> GatheredBatch:
        """Average the gradient over processes, and measure it in step `step`; every process gets the same.

        Raises:
            ValueError: the last group is not complete.
        """
        G, prompts = self.args.num_generations, sum(len(part.group_norm2_P) for part in self.parts)
        if sum(part.outputs.sequences.count for part in self.parts) != G * prompts:
            raise ValueError("the update ends within a group")
        table_SK, group_norm2_P = self.accelerator.gather(
            (
                torch.cat([_table_SK(part) for part in self.parts]),
                torch.cat([part.group_norm2_P for part in self.parts]) * prompts**2,
            )
        )
        if self._complete:
            for parameter, grad in zip(self.policy.parameters, self._complete, strict=True):
                parameter.grad = grad
            self._complete = []
        if self.accelerator.num_processes > 1:
            for parameter in self.policy.parameters:
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = self.accelerator.reduce(grad, "mean")
        norm2 = estimators.squared_norm(self.policy.parameters)
        columns = dict(zip(COLUMNS, table_SK.view(-1, G, len(COLUMNS)).unbind(2), strict=True))
        rewards_PG, valid_PG = columns["reward"], columns["valid"].bool()
        features = Features(*(columns[name].flatten().float() for name in COLUMNS[-4:]))
        weight_PG = torch.full_like(rewards_PG, math.nan)
        if self.weighted:
            exact = self.baseline.exact
            weight_PG = columns["norm2"] if exact else self.baseline.by_proxy(features).view_as(rewards_PG)
        columns |= {"valid": valid_PG, "weight": weight_PG}
        differs, agreement = estimators.differ(rewards_PG, valid_PG), math.nan
        if differs and self.weighted:  # this batch, seen by every process, is now part of the past
            self.baseline.prior.observe(rewards_PG, weight_PG, valid_PG)
            self.baseline.prior.next_step()
            if not self.baseline.exact and not columns["norm2"].isnan().any():
                norm2_S, valid_S = columns["norm2"].flatten(), valid_PG.flatten()
                agreement = self.baseline.calibrated.observe(features, norm2_S, G, valid_S)
        moments = estimators.moments(group_norm2_P, norm2)
        if differs and self.rows is not None:
            moments = moments.of_rows(self._own_norm2(drawn(rewards_PG, valid_PG, step)), self.rows)
        return GatheredBatch(columns, moments, norm2, differs, agreement)

    def _own_norm2(self, weight_P: Tensor) -> float:
        """`own_norm2` of the prompts of all processes, the same on each of them."""
        outputs = Outputs(
            Sequences.join([part.outputs.sequences for part in self.parts]),
            torch.cat([part.outputs.rewards_PG for part in self.parts]),
            torch.cat([part.outputs.valid_PG for part in self.parts]),
        )
        share_P = outputs.valid_PG.sum(1) / self.args.num_generations  # g_i is the mean over all outputs of A s
        mine_P = weight_P.view(-1, len(share_P))[self.accelerator.process_index] * share_P.square()
        prompts = MicroBatches(self.args.per_device_train_batch_size // self.args.num_generations)
        with in_eval_mode(self.policy.model):
            own2 = own_norm2(outputs, mine_P, self.policy, self.args.temperature, prompts)
        total = torch.tensor(own2, dtype=torch.float64, device=mine_P.device)
        return float(self.accelerator.reduce(total, "sum"))

    def forget(self) -> None:
        """Let go of the batch."""
        self.parts, self._complete = [], []

    def watch(self) -> Callable[[], Tensor]:
        """Return a function that returns, after the update, how much log pi of some outputs' tokens has changed.

        Where the policy rounds, it returns log pi itself.
        """
        accelerator, rows = self.accelerator, sum(part.outputs.sequences.count for part in self.parts)
        first = start = accelerator.process_index * rows
        chosen, before = [], []
        for part in self.parts:
            rows_S, start = slice(-start % ONE_IN, None, ONE_IN), start + part.outputs.sequences.count
            chosen.append(part.outputs.sequences.at(rows_S))
            before.append(part.logps.token_logps_SC[rows_S, : chosen[-1].own_SC.shape[1]])
        sequences = Sequences.join(chosen)
        blocks = torch.arange(sequences.count).split([len(token_logps_SC) for token_logps_SC in before])
        before_SC = sequences.by_token(blocks, before)
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
        return without_tensors(self.baseline.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.baseline.load_state_dict(with_tensors(state))


def _table_SK(part: Part) -> Tensor:
    """A row an output; columns are `COLUMNS`."""
    outputs = part.outputs
    unknown_PG = torch.full_like(part.baseline_PG, math.nan)
    baseline_PG = torch.where(outputs.valid_PG, part.baseline_PG, unknown_PG)
    norm2 = unknown_PG if part.norm2_S is None else part.norm2_S
    known = (outputs.rewards_PG, outputs.valid_PG, baseline_PG, part.advantages_PG, norm2)
    columns = (*known, *vars(part.logps.features).values())
    return torch.stack([values.flatten().to(torch.float64) for values in columns], 1)


def total(grad: Tensor | None, before: Tensor | None) -> Tensor | None:
    """The sum of two gradients, written into the second."""
    if before is None or grad is None:
        return before if grad is None else grad
    return before.add_(grad)
