"""The most memory that a run will hold, predicted from small trials of the model itself, and what fits into it."""

import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from oblrpo.algorithms import resolve
from oblrpo.estimators.baselines import SAMPLING, TRAINING
from oblrpo.memory import WithoutProducts, free_bytes, heap_is_kept, machine_bytes, peak_bytes
from oblrpo.policy import Policy, Sequences
from oblrpo.rollout.room import SamplingMemory, rows_at_once, sampling_memory
from oblrpo.scores.head import LEAST_TOKENS, token_logps
from oblrpo.settings import OptimConfig, RolloutConfig, TrainConfig
from oblrpo.step.look import FIRST_PROMPTS, LOOK, WORK_SHARE, look_steps
from oblrpo.tables.algorithms import SCHEDULES
from oblrpo.trainer.optimizers import make_optimizer

TRIAL_TOKENS = (24, 48)  # the lengths of the trials' rows; what a token takes is the slope between them
PIECE = 1 << 25  # logits of the head's trial: more than those of one of its pieces
SLACK_ONE, SLACK_MANY = 1.7, 2.2
"""What glibc's heap takes for activations, over what they ask for: with one micro-batch, and with several, of which the
next does not fit into the room that the one before has left (measured; docs/reference/models.md)."""

GB, LEAST = 1e9, 5e6  # what is less is not shown
USABLE_SHARE = 0.9  # of the machine's memory, for a micro-batch that is proposed


@dataclass(frozen=True)
class PeakMemory:
    """What is there while a run samples, trains and updates, in bytes; the peak is the most of the three."""

    libraries: int  # Python and libraries, as they were before the model was loaded; 0 on a GPU
    weights: int
    gradient: int
    half: int  # the gradient of the first half of the prompts, in bfloat16, until that of the other is known
    optimizer: int  # what the optimizer remembers of each trained weight
    working: int  # what it makes in an update, and drops
    update: int  # the last update, for schedules that look back at it
    copy: int  # the weights as they were before an update that is measured, for it may have to be shortened
    reference: int  # the trained weights as they were before the first step, for a KL penalty
    activations: int  # what the backward, or a look, holds of one micro-batch
    slack: int  # room between them that is not used
    keys_values: int  # what sampling takes: keys and values of all rows at once, and a forward of theirs
    tokens: int  # the tokens of that micro-batch, padding included
    group: int  # those of one prompt with its completions, which a look takes together
    rows: int  # the completions that are sampled at once
    iterated: bool  # whether a batch has several updates, which add up to the last one
    here: int  # what the machine, or the GPU, has

    @property
    def kept(self) -> int:
        """What is there from step to step."""
        return self.libraries + self.weights + self.optimizer + self.reference

    @property
    def phases(self) -> dict[str, dict[str, int]]:
        """The parts that come to what is kept, in every phase; the last update is gone when the next one is made."""
        update, gradient = {"last update": self.update}, {"gradient": self.gradient}
        forwards = {f"activations of {self.tokens:,} tokens": self.activations, "heap overhead": self.slack}
        made = {"copy of the weights": self.copy, "temporaries of the optimizer": self.working}
        return {
            "sampling": update | {f"keys and values of {self.rows:,} completions": self.keys_values},
            "training": gradient | {"gradient of the first half": self.half} | update | forwards,
            "the update": gradient | (update if self.iterated else {}) | made,
        }

    @property
    def total(self) -> int:
        """The peak."""
        return self.kept + max(sum(parts.values()) for parts in self.phases.values())

    @property
    def training(self) -> int:
        """What is there at the most while gradients are taken."""
        return self.kept + sum(self.phases["training"].values())

    def __str__(self) -> str:
        phases = self.phases
        phase = max(phases, key=lambda name: sum(phases[name].values()))
        kept = {
            "weights": self.weights, "optimizer": self.optimizer, "reference of the KL penalty": self.reference,
            "Python and libraries": self.libraries,
        }  # fmt: skip
        shown = ", ".join(
            f"{value / GB:.2f} {name}" for name, value in (kept | phases[phase]).items() if value >= LEAST
        )
        others = ", ".join(
            f"{(self.kept + sum(parts.values())) / GB:.1f} in {name}" for name, parts in phases.items() if name != phase
        )
        return f"about {self.total / GB:.1f} GB at the peak, in {phase} ({shown}); {others}"

    def micro_batch(self, room: float) -> int:
        """The most tokens of a micro-batch, in whole groups, that a step takes no more than so much room with."""
        rest = self.training - self.activations - self.slack
        many = SLACK_MANY * self.activations if self.slack else self.activations
        return max(0, int((room - rest) / many * self.tokens)) // self.group * self.group if many else self.tokens


def peak_memory(
    policy: Policy, config: TrainConfig, prompt_length: int, libraries: int = 0, sampling: SamplingMemory | None = None
) -> PeakMemory:
    """Predict the peak of a run whose completions are all as long as they may be; the policy is left unchanged.

    What a token takes is measured on small batches of random tokens; it grows in proportion. `libraries` are the bytes
    that the process held before the model was loaded; `sampling` is measured where it is not given.
    """
    rollout, schedule = config.rollout, SCHEDULES[resolve(config.algorithm, config.optim).schedule]
    on_gpu = policy.device.type == "cuda"
    count = sum(p.numel() for p in policy.parameters)
    trained = sum(p.numel() * p.element_size() for p in policy.parameters)
    numbers, working = _optimizer_memory(config.optim, on_gpu)
    largest = max((p.numel() * p.element_size() for p in policy.parameters), default=0)
    keys_values = rows = 0
    if rollout.sampler == "transformers":
        rows = min(rollout.max_num_seqs or most_rows(config), most_rows(config))
        G, sampling = rollout.num_generations, sampling or sampling_memory(policy, bool(config.turns.names))
        keys_values = sampling.of(-(-rows // G), G, prompt_length, rollout.max_completion_length)
    activations, slack, tokens = _activations(policy, config, prompt_length)
    return PeakMemory(
        libraries=0 if on_gpu else libraries,
        weights=sum(p.numel() * p.element_size() for p in policy.model.parameters()),
        gradient=trained,
        half=2 * count,
        optimizer=trained * numbers,
        working=working * (trained if on_gpu else largest),
        update=count * schedule.state_bytes_per_parameter,
        # Where log-probabilities are rounded, the weights that the update has made are set aside, too.
        copy=trained * (2 if policy.low_precision else 1) if schedule.measures_updates else 0,
        reference=trained if config.algorithm.beta else 0,
        activations=int(activations),
        slack=int(slack * activations),
        keys_values=keys_values,
        tokens=tokens,
        group=rollout.num_generations * (prompt_length + rollout.max_completion_length),
        rows=rows,
        iterated=config.algorithm.num_iterations > 1,
        here=machine_bytes(policy.device),
    )


def fit(
    policy: Policy, config: TrainConfig, prompt_length: int, free: Collection[str]
) -> tuple[TrainConfig, PeakMemory | None]:
    """Let memory decide how many completions are sampled at once, and the tokens of a micro-batch where that is `free`.

    Room is what is free now, with the weights there, less what the run will keep from step to step. The peak that is
    predicted is returned where it was needed. A decision stands in the settings, with which a run resumes.

    Raises:
        InputError: not even one prompt's completions can be sampled.
    """
    rollout = config.rollout
    bounded = rollout.tokens_per_micro_batch or rollout.prompts_per_micro_batch
    bound = "tokens_per_micro_batch" in free and not bounded
    sample = rollout.sampler == "transformers" and not rollout.max_num_seqs
    if not (bound or sample):
        return config, None
    room = free_bytes(policy.device)
    sampling = sampling_memory(policy, bool(config.turns.names)) if sample else None
    peak = peak_memory(policy, config, prompt_length, sampling=sampling)
    if sampling is not None:
        ahead = peak.kept - peak.weights + peak.update
        asked = {"num_generations": rollout.num_generations, "eval_samples": config.run.eval_samples}
        sizes, instead = (prompt_length, rollout.max_completion_length), ", or train fewer weights (lora)"
        rows = rows_at_once(sampling, room - ahead, rollout.prompts_per_step, asked, *sizes, instead)
        rollout = replace(rollout, max_num_seqs=rows)
    if bound and peak.training - peak.weights > USABLE_SHARE * room:
        tokens = max(peak.group, peak.micro_batch(USABLE_SHARE * room + peak.weights))  # what does not fit is said
        rollout = replace(rollout, tokens_per_micro_batch=tokens)
    if rollout != config.rollout:
        config = replace(config, rollout=rollout)
        peak = peak_memory(policy, config, prompt_length, sampling=sampling)
    return config, peak


def remedy(policy: Policy, config: TrainConfig, prompt_length: int, peak: PeakMemory) -> str:
    """What to set where the peak is more than there is, in words; empty if it fits."""
    if peak.total <= peak.here:
        return ""
    said, room = f": more than the {peak.here / GB:.0f} GB here; ", USABLE_SHARE * peak.here
    adapters = "" if hasattr(policy.model, "peft_config") else "train adapters (--lora)"
    flags = list[str]()
    for flag in ("", "--gradient-checkpointing", "--optimizer SGD"):
        if flag == "--gradient-checkpointing":
            policy = replace(policy, checkpointing=True)
        elif flag:
            config = replace(config, optim=replace(config.optim, optimizer="SGD", optimizer_args={}))
        flags += [flag] * bool(flag)
        found = peak_memory(policy, config, prompt_length, peak.libraries)
        tokens = min(found.tokens, found.micro_batch(room))
        if not tokens:
            continue
        bounded = replace(config, rollout=replace(config.rollout, tokens_per_micro_batch=tokens))
        found = peak_memory(policy, bounded, prompt_length, peak.libraries)
        if found.total <= peak.here:
            words = " ".join([*flags, f"--tokens-per-micro-batch {tokens}"])
            other = f", or {adapters}" if adapters and "SGD" in words else ""
            return f"{said}about {found.total / GB:.1f} GB with {words}{other}"
    lower = "lower --num-generations or --max-completion-length, or take a smaller model"
    return f"{said}{adapters}{', or ' * bool(adapters)}{lower}"


def most_rows(config: TrainConfig) -> int:
    """The most completions that a run asks its sampler for at once: those of a step, or of a held-out prompt."""
    return max(config.rollout.prompts_per_step * config.rollout.num_generations, config.run.eval_samples)


def _activations(policy: Policy, config: TrainConfig, prompt_length: int) -> tuple[float, float, int]:
    """The bytes that a micro-batch's backward holds, the heap's overhead as a part of them, and its tokens."""
    rollout, scores = config.rollout, config.scores
    rows, width = rollout.num_generations, prompt_length + rollout.max_completion_length
    P, tokens = rollout.prompts_per_step, rollout.tokens_per_micro_batch
    # Gradients are of one half of the prompts at a time, looks of all, or of as many as the work between them pays for.
    every = look_steps(scores.look_steps, resolve(config.algorithm, config.optim).schedule)
    paid = math.ceil(P * every * WORK_SHARE * (SAMPLING + TRAINING) / LOOK)
    looked = P if every == 1 or scores.ledger_steps != 0 else max(FIRST_PROMPTS, paid) if every else 0
    half, looked = -(-P // 2), min(P, looked)
    together = min(rollout.prompts_per_micro_batch or P, max(half, looked)) * rows
    if tokens:  # micro-batches are of like size: of rows for gradients, of groups for looks
        together = _even(half * rows, tokens // width)
        together = max(together, rows * _even(looked, tokens // (rows * width))) if looked else together
    own, tokens = rollout.max_completion_length / width, together * width
    peaks = [_trial(policy, rollout.temperature, rows, length, own) for length in TRIAL_TOKENS]
    slope = (peaks[1] - peaks[0]) / (rows * (TRIAL_TOKENS[1] - TRIAL_TOKENS[0]))
    constant, on_gpu = peaks[0] - slope * rows * TRIAL_TOKENS[0], policy.device.type == "cuda"
    activations = constant + slope * tokens + _head_memory(policy, rollout, together)
    slack = 0 if on_gpu or not heap_is_kept() else (SLACK_ONE if together == P * rows else SLACK_MANY) - 1
    return max(0.0, activations), slack, tokens


def _even(count: int, most: int) -> int:
    """The largest part where so many are cut into as few parts of like size as can be, of `most` each or one."""
    return -(-count // -(-count // max(1, most)))


def _trial(policy: Policy, temperature: float, rows: int, length: int, own: float) -> int:
    """Peak bytes of a forward and backward of a prompt's rows of so many tokens, each gradient dropped when it is made.

    No product is computed, for none changes what is kept. Where the head goes by pieces it reads a token a row, for
    what it takes does not grow in proportion, and the input embedding is frozen, whose gradient would be the peak.
    """
    own = own if policy.head is None else 0
    start = max(1, length - max(1, round(own * length)))  # a completion is read after a prompt of one token or more
    with policy.seeded(0):
        ids_ST = torch.randint(policy.vocabulary, (rows, length), device=policy.device)
    mask_ST = torch.ones_like(ids_ST)
    own_ST = mask_ST.clone()
    own_ST[:, :start] = 0
    sequences = Sequences(ids_ST, mask_ST, own_ST, start)
    embedding = policy.model.get_input_embeddings().weight

    def step() -> None:
        with WithoutProducts():
            policy.logps(sequences, temperature).logps_S.sum().backward()

    with _dropped_gradients(policy) as after:
        if policy.head is not None and embedding.requires_grad:
            embedding.requires_grad_(False)
            after.callback(embedding.requires_grad_, True)
        return peak_bytes(step, policy.device)


def _head_memory(policy: Policy, rollout: RolloutConfig, rows: int) -> float:
    """The bytes that the head takes beside the layers, for so many completions; 0 where it is not apart.

    Its temporaries are of a piece of the logits; `token_logps` says which probabilities are kept.
    """
    head = policy.head
    if head is None:
        return 0.0
    most, number = max(LEAST_TOKENS, 1 + PIECE // head.out_features), 4
    columns = min(rollout.max_completion_length, most)
    shape = (min(rows, max(1, most // columns)), columns)
    if policy.device.type == "cuda" and policy.low_precision:
        number = 2
    hidden_STC = head.weight.new_zeros(*shape, head.in_features).requires_grad_()
    target_ST = torch.zeros(shape, dtype=torch.long, device=policy.device)

    def kept(count: int) -> int:
        fits = head.weight.requires_grad and count * number <= head.in_features * 4
        return count * head.out_features * number if fits else 0

    def step() -> None:
        with WithoutProducts(), policy.arithmetic():
            token_logps(head, hidden_STC, target_ST, rollout.temperature).logp_ST.sum().backward()

    with _dropped_gradients(policy):
        return peak_bytes(step, policy.device) - kept(shape[0] * columns) + kept(rows * rollout.max_completion_length)


@contextmanager
def _dropped_gradients(policy: Policy) -> Iterator[ExitStack]:
    """Drop each gradient when it is made."""

    def drop(parameter: Tensor) -> None:
        parameter.grad = None

    with ExitStack() as after:
        for parameter in policy.parameters:
            after.callback(parameter.register_post_accumulate_grad_hook(drop).remove)
        yield after


def _optimizer_memory(config: OptimConfig, on_gpu: bool) -> tuple[int, int]:
    """How many numbers an optimizer keeps of each weight, and makes, found on a small one of its kind and settings.

    On a GPU those that torch's Adam and its kin make are of all weights at once (foreach), else of one after another.
    """
    weight = torch.nn.Parameter(torch.ones(2, 3, device="cpu"))
    weight.grad = torch.ones_like(weight)
    small = make_optimizer(config, [weight])
    small.step()
    kept = sum(value.shape == weight.shape for value in small.state[weight].values() if isinstance(value, Tensor))
    one_by_one = small.defaults.get("fused") or small.defaults.get("foreach") is False
    return kept, 0 if kept < 2 or (on_gpu and one_by_one) else 1 if on_gpu else 2
