"""The most memory that a training step will hold, predicted from small trials of the model itself."""

import math
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from oblrpo.estimators.baselines import SAMPLING, TRAINING
from oblrpo.memory import WithoutProducts, machine_bytes, peak_bytes
from oblrpo.policy import Policy, Sequences
from oblrpo.settings import OptimConfig, TrainConfig
from oblrpo.step import Learner
from oblrpo.step.look import FIRST_PROMPTS, LOOK, WORK_SHARE
from oblrpo.tables.algorithms import SCHEDULES
from oblrpo.trainer.optimizers import make_optimizer

TRIAL_TOKENS = (24, 48)  # the lengths of the trials' rows; what a token takes is the slope between them
SLACK_ONE, SLACK_MANY = 1.7, 2.2
"""What glibc's heap takes for activations, over what they ask for: with one micro-batch, and with several, of which the
next does not fit into the room that the one before has left (measured; docs/reference/models.md)."""

GB, LEAST = 1e9, 5e6  # what is less is not shown
USABLE_SHARE = 0.9  # of the machine's memory, for a micro-batch that is proposed


@dataclass(frozen=True)
class PeakMemory:
    """The parts of the peak, in bytes."""

    libraries: int  # Python and libraries, as they were before the model was loaded; 0 on a GPU
    weights: int
    gradient: int
    optimizer: int  # what the optimizer remembers of each trained weight
    update: int  # the last update, for schedules that look back at it
    copy: int  # the weights as they were before an update that is measured, for it may have to be shortened
    reference: int  # the trained weights as they were before the first step, for a KL penalty
    activations: int  # what the backward, or a look, holds of one micro-batch
    slack: int  # room between them that is not used
    tokens: int  # the tokens of that micro-batch, padding included
    group: int  # those of one prompt with its completions, which a look takes together
    here: int  # what the machine, or the GPU, has

    @property
    def total(self) -> int:
        """All that is there at once: activations and the last update are gone when the copy is made."""
        kept = self.libraries + self.weights + self.gradient + self.optimizer + self.reference
        return kept + max(self.activations + self.slack + self.update, self.copy)

    def __str__(self) -> str:
        parts = {
            "weights": self.weights, "gradient": self.gradient, "optimizer": self.optimizer,
            "last update": self.update,
            "reference of the KL penalty": self.reference,
            f"activations of {self.tokens:,} tokens": self.activations, "heap overhead": self.slack,
            "Python and libraries": self.libraries,
        }  # fmt: skip
        shown = ", ".join(f"{value / GB:.2f} {name}" for name, value in parts.items() if value >= LEAST)
        after = f"; after the activations a {self.copy / GB:.2f} copy of the weights" if self.copy >= LEAST else ""
        return f"about {self.total / GB:.1f} GB at the peak of a step ({shown}{after}){self._remedy()}"

    def _remedy(self) -> str:
        """What to do where the peak is more than there is; activations and their slack grow with the tokens."""
        if self.total <= self.here:
            return ""
        room = USABLE_SHARE * self.here - (self.total - self.activations - self.slack)
        many = SLACK_MANY * self.activations if self.slack else self.activations
        fits = int(room / many * self.tokens) // self.group * self.group if many else 0
        bound = f"; bound it with --tokens-per-micro-batch {fits}"
        other = ", and one prompt at a time is too much: lower --num-generations or --max-completion-length, or --lora"
        return f": more than the {self.here / GB:.0f} GB here{bound if fits > 0 else other}"


def peak_memory(learner: Learner, config: TrainConfig, prompt_length: int, libraries: int) -> PeakMemory:
    """Predict the peak of a step in which every completion is as long as it may be; the learner is left unchanged.

    What a token of a micro-batch takes is measured on two small ones of random tokens; it grows in proportion.
    `libraries` are the bytes that the process held before the model was loaded.
    """
    policy, schedule, rollout = learner.policy, learner.schedule, config.rollout
    trained = sum(p.numel() * p.element_size() for p in policy.parameters)
    gradient = trained + 2 * sum(p.numel() for p in policy.parameters)  # with the first half's, in bfloat16
    rows, width = rollout.num_generations, prompt_length + rollout.max_completion_length
    budget = rollout.tokens_per_micro_batch // (rows * width) or rollout.prompts_per_step
    looks, P = learner.looks, rollout.prompts_per_step
    # Gradients are of one half of the prompts at a time, looks of all, or of as many as the work between them pays for.
    paid = math.ceil(P * looks.every * WORK_SHARE * (SAMPLING + TRAINING) / LOOK)
    looked = P if looks.every == 1 or looks.ledger_steps != 0 else max(FIRST_PROMPTS, paid) if looks.every else 0
    prompts = min(budget, rollout.prompts_per_micro_batch or P, max(-(-P // 2), min(P, looked)))
    tokens, own = prompts * rows * width, rollout.max_completion_length / width
    peaks = [_trial(policy, rollout.temperature, rows, length, own) for length in TRIAL_TOKENS]
    slope = (peaks[1] - peaks[0]) / (rows * (TRIAL_TOKENS[1] - TRIAL_TOKENS[0]))
    constant = peaks[0] - slope * rows * TRIAL_TOKENS[0]
    activations = constant + slope * tokens
    head, on_gpu = policy.head, policy.device.type == "cuda"
    number = 2 if on_gpu and policy.low_precision else 4
    if head is not None and tokens * own * number > head.in_features * 4:  # probabilities are made again, not kept
        activations -= tokens * own * head.out_features * number
    activations = max(0.0, activations)
    slack = 0 if on_gpu else (SLACK_ONE if prompts == P else SLACK_MANY) - 1
    return PeakMemory(
        libraries=0 if on_gpu else libraries,
        weights=sum(p.numel() * p.element_size() for p in policy.model.parameters()),
        gradient=gradient,
        optimizer=trained * _numbers_a_weight(config.optim),
        update=sum(p.numel() for p in policy.parameters) * SCHEDULES[schedule.mode].state_bytes_per_parameter,
        copy=trained if schedule.measures_updates else 0,
        reference=trained if learner.reference is not None else 0,
        activations=int(activations),
        slack=int(slack * activations),
        tokens=tokens,
        group=rows * width,
        here=machine_bytes(policy.device),
    )


def _trial(policy: Policy, temperature: float, rows: int, length: int, own: float) -> int:
    """Peak bytes of a forward and backward of a prompt's rows of so many tokens, each gradient dropped when it is made.

    No product is computed, for none changes what is kept.
    """
    start = max(1, length - max(1, round(own * length)))  # a completion is read after a prompt of one token or more
    with policy.seeded(0):
        ids_ST = torch.randint(policy.vocabulary, (rows, length), device=policy.device)
    mask_ST = torch.ones_like(ids_ST)
    own_ST = mask_ST.clone()
    own_ST[:, :start] = 0
    sequences = Sequences(ids_ST, mask_ST, own_ST, start)

    def step() -> None:
        with WithoutProducts():
            policy.logps(sequences, temperature).logps_S.sum().backward()

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    with ExitStack() as after:
        for parameter in policy.parameters:
            after.callback(parameter.register_post_accumulate_grad_hook(drop).remove)
        return peak_bytes(step, policy.device)


def _numbers_a_weight(config: OptimConfig) -> int:
    """How many numbers the optimizer keeps of each weight, found on a small one of its kind and settings."""
    weight = torch.nn.Parameter(torch.ones(2, 3, device="cpu"))
    weight.grad = torch.ones_like(weight)
    small = make_optimizer(config, [weight])
    small.step()
    return sum(value.shape == weight.shape for value in small.state[weight].values() if isinstance(value, Tensor))
