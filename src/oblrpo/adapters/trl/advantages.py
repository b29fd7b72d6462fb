"""The advantages of what TRL generates together: rewards less the baseline, over all processes.

Rewards are weighed by squared score norms: exact ones in steps that look at all prompts, else what a proxy takes them
for, which earlier looks have taught (`step.look`). The gradient itself is that of TRL's own loss.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList

from oblrpo import estimators
from oblrpo.adapters.shared import baseline_metrics, norm_metrics, with_tensors, without_tensors
from oblrpo.estimators import BASELINES
from oblrpo.policy import Policy, Sequences
from oblrpo.policy.sequences import MicroBatches
from oblrpo.rollout.decode import Draw, Drawn
from oblrpo.rollout.transformers import Record
from oblrpo.scores import Features
from oblrpo.step import StepBaseline
from oblrpo.step.flow import Batch
from oblrpo.step.look import Looks, counted, look_steps
from oblrpo.tables.algorithms import Algorithm

BY_TOKEN = ("grpo", "sapo")
"""The losses that take a mean over each completion's tokens."""


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


@contextmanager
def draws_recorded(model: Any, temperature: float) -> Iterator[list[Drawn]]:
    """Note what `model.generate` draws for a while, with the figures of every token, in a list."""
    before, own, drawn = vars(model).get("generate"), model.generate, list[Drawn]()

    def generate(*args: Any, **kwargs: Any) -> Tensor:
        record = Record(Draw(temperature, features=True))
        ids_ST: Tensor = own(*args, **kwargs, logits_processor=LogitsProcessorList([record]))
        if record.rows == len(ids_ST):  # else it is a function of the user's that runs no such processors
            drawn.append(record.drawn(ids_ST[:, kwargs["input_ids"].shape[1] :]))
        return ids_ST

    model.generate = generate
    try:
        yield drawn
    finally:
        del model.generate
        if before is not None:
            model.generate = before


@dataclass(frozen=True)
class Generation:
    """What was generated together by all processes, the same on each of them."""

    rewards_PG: Tensor
    """NaN where there is none."""
    valid_PG: Tensor
    """Which outputs count: those with a reward, and with tokens that are trained on."""
    baseline_PG: Tensor
    """The baseline b; NaN where an output does not count, and where no reward differs."""
    advantages_PG: Tensor
    """F - b; 0 in the same places."""
    mean_length: float
    """The mean length of the outputs that count, in the policy's own tokens."""
    norm2_PG: Tensor | None = None
    """Squared score norms, or what a proxy takes them for, where the baseline weighs rewards by them."""
    group_norm2_P: Tensor | None = None
    """The squared norms of the prompts' gradients, of which TRL's is the mean, where all prompts were looked at."""
    own2: float = math.nan
    """`estimators.own_norm2` of all prompts, where it is known."""
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def differs(self) -> bool:
        """Whether any reward differs from another; if not, nothing is learned."""
        return estimators.differ(self.rewards_PG, self.valid_PG)


class Advantages:
    """Makes the advantages of one generation after another; `baseline` and `looks` hold what earlier ones say.

    Args:
        policy: the model that is trained.
        args: an `OBLRPOConfig`.
        accelerator: that of the trainer.
        rows: how many prompts there are to train on; None where they cannot be counted.
        plain: whether TRL's gradient is the mean of A grad log pi and nothing else.
    """

    def __init__(self, policy: Policy, args: Any, accelerator: Any, rows: int | None, plain: bool) -> None:
        self.policy, self.args, self.accelerator, self.plain = policy, args, accelerator, plain
        size, G = args.per_device_train_batch_size, args.num_generations
        prompts = size * args.gradient_accumulation_steps * accelerator.num_processes // G
        few = args.shuffle_dataset and size >= G and plain
        self.rows = counted(rows, prompts, G, Algorithm(args.baseline)) if few else None
        self.weighted = "norm2_PG" in BASELINES[args.baseline].needs
        every = look_steps(args.look_steps, args.schedule) if self.weighted or self.rows is not None else 0
        blocks = MicroBatches(max(1, size // G) if size >= G else size)
        self.baseline = StepBaseline(args.baseline, args.score_norms)
        self.looks = Looks(policy, args.temperature, blocks, every, apart=size < G)
        self.generations = 0  # that had a signal

    @property
    def knows_norms(self) -> bool:
        """Whether every generation's prompts have their gradients' own norms taken."""
        return self.plain and self.looks.every == 1 and not self.looks.apart

    def of(self, inputs: dict[str, Tensor], rewards_S: Tensor, features: Features | None) -> Generation:
        """The advantages of all processes' outputs.

        Args:
            inputs: what this process has generated, as TRL has it: whole groups.
            rewards_S: the rewards of all processes' outputs, NaN where there is none.
            features: of this process's outputs; None: a forward takes them.

        Raises:
            DivergedError: a log-probability or a score norm is NaN or infinite.
            UnsupportedModelError: as `ScoreTape` says.
        """
        gather, G, past = self.accelerator.gather, self.args.num_generations, self.baseline
        sequences = sequences_of(inputs)
        P = sequences.count // G
        mine = slice(P * self.accelerator.process_index, P * (self.accelerator.process_index + 1))
        facts_S2 = torch.stack([sequences.lengths_S, sequences.mask_ST.sum(1)], 1)
        lengths_PG, tokens_PG = gather(facts_S2).view(-1, G, 2).double().unbind(2)
        rewards_PG = rewards_S.view(-1, G)
        valid_PG = ~rewards_PG.isnan() & (lengths_PG > 0)  # TRL takes all tokens from truncated ones that it masks
        valid_PG = valid_PG & (valid_PG.sum(1, keepdim=True) >= BASELINES[past.name].smallest_group)
        mean_length = float(lengths_PG[valid_PG | ~valid_PG.any()].mean())
        metrics = {"completions/masked_ratio": 1 - float(valid_PG.double().mean())}
        none_PG = torch.full_like(rewards_PG, math.nan)
        if not estimators.differ(rewards_PG, valid_PG):
            norm2_PG = none_PG if self.weighted else None
            nothing_PG = torch.zeros_like(none_PG)
            return Generation(rewards_PG, valid_PG, none_PG, nothing_PG, mean_length, norm2_PG, metrics=metrics)
        self.generations += 1
        rewards_PG, known_PG = torch.where(valid_PG, rewards_PG, 0), rewards_PG
        scale_PG = self._scale_of(lengths_PG).to(rewards_PG)
        looked = all_features = norm2_PG = weight_PG = None
        with in_eval_mode(self.policy.model):
            if self.looks.every:
                looked = self._look(Batch.of(sequences, rewards_PG[mine], valid_PG[mine], Algorithm(past.name)))
            if self.weighted:
                all_features = self._gathered(self._features(sequences) if features is None else features)
        begun, remember = past.begin(), True
        if all_features is not None:
            proxy_PG = past.by_proxy(all_features).view_as(rewards_PG)
            prompts = int(valid_PG.any(1).sum())
            norm2_PG = past.weights(proxy_PG, looked, prompts)
            weight_PG = norm2_PG * scale_PG.square()  # of the output's whole share in the gradient
            remember = past.scaled or (looked is not None and len(looked[0]) == prompts)
        baseline_PG = begun.of(rewards_PG, valid_PG, norm2_PG=weight_PG, remember=remember)
        advantages_PG = estimators.advantages(rewards_PG, baseline_PG, valid_PG)
        metrics |= baseline_metrics(valid_PG, baseline_PG)
        group_norm2_P, own2 = None, math.nan
        if looked is not None:
            P, gram_PGG = looked
            metrics |= norm_metrics(rewards_PG[P], valid_PG[P], gram_PGG.diagonal(dim1=1, dim2=2))
            if all_features is not None and weight_PG is not None:
                metrics |= begun.learn(looked, all_features, rewards_PG, valid_PG, weight_PG, scale_PG)
            group_norm2_P, own2 = self._of_prompts(looked, advantages_PG, rewards_PG, valid_PG, scale_PG)
        past.end_step(begun)
        tokens = float(tokens_PG.sum()) / self.accelerator.num_processes
        self.looks.save_up(tokens, tokens, looked is not None)
        baseline_PG = torch.where(valid_PG, baseline_PG, none_PG)
        return Generation(
            known_PG, valid_PG, baseline_PG, advantages_PG, mean_length, norm2_PG, group_norm2_P, own2, metrics
        )

    def _scale_of(self, lengths_PG: Tensor) -> Tensor:
        """What the loss multiplies an output's A grad log pi by, beside what all have in common."""
        constant = self.args.max_completion_length if self.args.loss_type == "dr_grpo" else 1
        return 1 / (
            lengths_PG.clamp(min=1) if self.args.loss_type in BY_TOKEN else torch.full_like(lengths_PG, constant)
        )

    def _look(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """The look of this step, if there is one: all processes' prompts, and the inner products of their scores."""
        look, (P, G) = self.looks.take(batch, self.generations), batch.rewards_PG.shape
        gram_PGG = torch.full((P, G, G), math.nan, dtype=torch.float64, device=batch.rewards_PG.device)
        if look is not None:
            gram_PGG = gram_PGG.index_copy(0, look.prompts_P, look.look.gram_PGG.double())
        gram_PGG = self.accelerator.gather(gram_PGG)
        prompts_P = gram_PGG.diagonal(dim1=1, dim2=2).isfinite().all(1).nonzero().flatten()
        return (prompts_P, gram_PGG[prompts_P]) if len(prompts_P) else None

    def _features(self, sequences: Sequences) -> Features:
        """What a forward says of these outputs."""
        blocks = MicroBatches(self.args.per_device_train_batch_size).of(sequences, 1)
        with torch.no_grad():
            parts = [self.policy.logps(sequences.at(rows_S), self.args.temperature).features for rows_S in blocks]
        return Features.join(parts)

    def _gathered(self, features: Features) -> Features:
        """The features of all processes' outputs."""
        table_SK = torch.stack([values.double() for values in vars(features).values()], 1)
        return Features(*self.accelerator.gather(table_SK).unbind(1))

    def _of_prompts(
        self,
        looked: tuple[Tensor, Tensor],
        advantages_PG: Tensor,
        rewards_PG: Tensor,
        valid_PG: Tensor,
        scale_PG: Tensor,
    ) -> tuple[Tensor | None, float]:
        """The squared norms of prompts' gradients, of which TRL's is the mean, and `own_norm2`, if all are known."""
        (P, gram_PGG), G = looked, rewards_PG.shape[1]
        if not self.plain or not gram_PGG.isfinite().all():
            return None, math.nan
        scale_LG = scale_PG[P].double()
        gram_PGG = gram_PGG * scale_LG[:, :, None] * scale_LG[:, None]
        norm2_P, own2 = estimators.group_norm2(gram_PGG, advantages_PG[P]) / G**2, math.nan
        if self.rows is not None:
            share_P = valid_PG[P].sum(1) / G  # TRL's mean is over all outputs, those that do not count too
            shared_PGG = gram_PGG * share_P.square()[:, None, None]
            own2 = estimators.own_norm2(shared_PGG, rewards_PG[P], valid_PG[P])
            self.looks.observe_own(own2, float(norm2_P.mean()))
        if len(P) < int(valid_PG.any(1).sum()):
            return None, math.nan
        # A prompt of which no output counts is in TRL's mean with the gradient 0.
        return norm2_P.new_zeros(len(rewards_PG)).index_copy(0, P, norm2_P), own2 * len(P) / len(rewards_PG)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, for JSON."""
        state = {"generations": self.generations, "looks": self.looks.state_dict()}
        return state | without_tensors(self.baseline.state_dict())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up where `state_dict` left off."""
        self.generations = int(state.pop("generations"))
        self.looks.load_state_dict(state.pop("looks"))
        self.baseline.load_state_dict(with_tensors(state))
