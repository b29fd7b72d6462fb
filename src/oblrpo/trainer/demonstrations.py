"""What a run learns from before RL: rows of prompt and completion, or its built-in task's worked solutions; and how."""

import json
import math
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch

from oblrpo.errors import InputError, check_finite
from oblrpo.objects import Objects
from oblrpo.policy import Completion, Policy, Prompt, Sequences, tokens_of
from oblrpo.policy.sequences import MicroBatches
from oblrpo.settings import TrainConfig
from oblrpo.tasks import BENCHMARKS, Demonstrator, Problem, Task
from oblrpo.tasks.benchmarks import TEMPLATE
from oblrpo.tasks.data import PLACEHOLDER, checked_messages, permutation, problems_of
from oblrpo.tasks.rows import as_text, kind_of, native, text_of
from oblrpo.tasks.sources import read_source
from oblrpo.tasks.task import SAID

COMPLETION = "completion"  # the column of completions
RATE_BUILT, RATE_LOADED, RATE_ADAPTERS = 3e-3, 2e-5, 2e-4  # peak rates where `warm_start_args` says none
Examples = tuple[Sequence[Prompt], Sequence[Completion]]


@dataclass(frozen=True)
class Demonstrations:
    """Prompts with completions to learn from."""

    steps: int  # gradient steps; 0: there is nothing to learn from
    batch: Callable[[int], Examples] = lambda step: ([], [])  # prompts and completions of a step, a pure function of it
    words: str = ""  # what they are
    notes: list[str] = field(default_factory=list)  # what a user should know, a line each


@dataclass(frozen=True)
class Demonstration:
    """A prompt with its completion."""

    place: str
    prompt: Prompt
    completion: Completion
    key: str  # the prompt before any template, without regard to case and spacing


def demonstrations_of(
    config: TrainConfig, task: Task, heldout: Sequence[Problem], policy: Policy, rows: Sequence[Demonstration]
) -> Demonstrations:
    """Return what the run learns from before RL: rows of `sft_data`, or what its task demonstrates.

    Rows come in an order shuffled by the seed, each once an epoch; the last batch of an epoch may be shorter. Rows
    whose prompts are held out are left out.
    """
    warm, seed = config.warm_start, config.run.seed
    if not rows:
        return Demonstrations(warm.warm_start_steps, partial(_shown, config, task), f"demonstrations of {task.name}")
    left_out = {problem.key for problem in heldout}
    kept = [row for row in rows if row.key not in left_out]
    notes = []
    if dropped := len(rows) - len(kept):
        notes.append(f"{dropped} of {len(rows)} rows of sft_data have held-out prompts; they are left out.")
    if not kept:
        raise InputError("the prompts of sft_data are all held out (eval_prompts); give rows with other prompts.")
    prompts, completions = [row.prompt for row in kept], [row.completion for row in kept]
    tokens_of(policy, prompts, completions, [row.place for row in kept])
    epoch = -(-len(kept) // warm.learning.batch)  # batches, the last of which may be short

    def batch(step: int) -> Examples:
        turn, at = divmod(step, epoch)
        order = permutation(f"sft_data/{seed}/{turn}", len(kept))
        chosen = order[at * warm.learning.batch : (at + 1) * warm.learning.batch]
        return [prompts[row] for row in chosen], [completions[row] for row in chosen]

    steps = warm.warm_start_steps or epoch
    return Demonstrations(steps, batch, f"{len(kept)} rows of sft_data, {steps / epoch:.3g} epoch(s)", notes)


def _shown(config: TrainConfig, task: Task, step: int) -> Examples:
    problems = task.train_batch(-1 - step, config.warm_start.learning.batch)  # steps that RL never draws
    rng = random.Random(f"demonstrations/{config.run.seed}/{step}")
    demonstrate = cast(Demonstrator, task).demonstration
    shown = [demonstrate(problem, rng, config.warm_start.learning.noise) for problem in problems]
    return [problem.prompt for problem in problems], shown


def read_rows(config: TrainConfig, objects: Objects) -> list[Demonstration]:
    """Return the rows of `sft_data`; texts are put into the template that the task's problems are put into."""
    task, names = config.task, config.warm_start.sft_data
    if not names:
        return []
    objects.check(sft_data=names)
    given = read_source(names, "train", objects.rows)
    template = task.prompt_template or (TEMPLATE if task.task in BENCHMARKS else PLACEHOLDER)
    problems = problems_of(given, task.prompt_column, "", template)
    return [
        Demonstration(place, problem.prompt, _completion(row, place), problem.key)
        for (place, row), problem in zip(given, problems, strict=True)
    ]


def _completion(row: dict[str, Any], place: str) -> Completion:
    """Return the completion: text, which may be that of one assistant message, or the messages of an episode."""
    value, where = native(row.get(COMPLETION)), f"{place}: column '{COMPLETION}'"
    if not isinstance(value, list):
        return text_of(row, COMPLETION, place)
    messages = checked_messages(value, where) if all(isinstance(message, dict) for message in value) else []
    own = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if own[:1] != [0] or own[-1] != len(messages) - 1 or 1 in (after - before for before, after in pairwise(own)):
        raise InputError(
            f"{where} must be text, or messages that begin and end with the assistant's, with others' (role tool) "
            "between any two of them."
        )
    for index, message in enumerate(messages):
        if further := [key for key in message if key in SAID - {"tool_calls"}]:
            raise InputError(f"{where}: message {index} has {further[0]!r}; only text and tool_calls can be learned.")
        if "tool_calls" in message:
            messages[index] = {**message, "tool_calls": [_call(each, where, index) for each in message["tool_calls"]]}
        elif index in own:
            text_of(message, "content", f"{where}: message {index}")
        if not isinstance(message.get("content"), str | None):
            raise InputError(f"{where}: the content of message {index} is {kind_of(message['content'])}, not text.")
    return messages if len(messages) > 1 or "tool_calls" in messages[0] else str(messages[0]["content"])


def _call(call: Any, where: str, index: int) -> dict[str, Any]:
    """Return a call of a tool whose arguments are a mapping, as templates read them; some data have them as JSON."""
    function: Any = call.get("function") if isinstance(call, dict) else None
    name, arguments = (function.get(key) for key in ("name", "arguments")) if isinstance(function, dict) else ("", None)
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not (name and isinstance(name, str) and isinstance(arguments, dict)):
        raise InputError(
            f"{where}: message {index} has the call {as_text(call):.60}; a call is "
            '{"type": "function", "function": {"name": ..., "arguments": {...}}}.'
        )
    # A table fills up with nulls what calls of other tools have.
    given = {key: value for key, value in arguments.items() if value is not None}
    return {**call, "type": "function", "function": {**function, "arguments": given}}


def peak_rate(config: TrainConfig, policy: Policy) -> float:
    """Return the peak learning rate: as set, or else by what is trained: a built policy, a loaded one, or adapters."""
    if config.warm_start.learning.learning_rate is not None:
        return config.warm_start.learning.learning_rate
    if getattr(policy.model, "peft_config", None):
        return RATE_ADAPTERS
    return RATE_LOADED if config.policy.model else RATE_BUILT


ALL = MicroBatches()


def warm_start(
    policy: Policy,
    demonstrations: Callable[[int], Examples],
    steps: int,
    learning_rate: float,
    progress: Callable[[int, float], None] = lambda step, loss: None,
    micro_batches: MicroBatches = ALL,
) -> None:
    """Maximise the mean token log-probability of demonstrated completions with AdamW and a cosine rate.

    The loss is -sum log pi(o|q) / tokens over the policy's own tokens of a batch, end tokens included; prompts and what
    tools say have none. The
    rate rises over 20 steps, or over a tenth of them all where that is less. `demonstrations` gives the prompts and
    completions of a step; `progress` is called with the step and its loss, in nats a token.

    Raises:
        DivergedError: a loss is NaN or infinite.
    """
    optimizer = torch.optim.AdamW(policy.parameters, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    rise = max(1, min(20, steps // 10))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = accumulate_loss(policy, policy.sequences(*demonstrations(step)), micro_batches)
        torch.nn.utils.clip_grad_norm_(policy.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step, loss)


def accumulate_loss(policy: Policy, batch: Sequences, micro_batches: MicroBatches = ALL) -> float:
    """Add the gradient of -sum log pi / tokens to `.grad`, a micro-batch at a time, and return the loss."""
    tokens, loss = batch.lengths_S.sum(), torch.zeros((), device="cpu")
    for rows_S in micro_batches.of(batch, 1):
        share = -policy.logps(batch.at(rows_S)).logps_S.sum() / tokens
        share.backward()
        loss += share.detach().to(loss)
    check_finite("loss of the supervised learning (learning_rate in warm_start_args)", loss)
    return loss.item()
