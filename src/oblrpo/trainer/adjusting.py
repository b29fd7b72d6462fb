"""Settings that the user did not give adjust to data and model; one that was given and does not fit is refused."""

from __future__ import annotations

from collections.abc import Collection

from oblrpo.errors import InputError
from oblrpo.policy import Policy
from oblrpo.policy.model import ROOM
from oblrpo.policy.rehearsal import check_lengths
from oblrpo.settings import TrainConfig, flatten, with_settings
from oblrpo.tasks import DataTask, Problem, Task

FEWEST = 8
"""Rows of data from which on a step's number of prompts is chosen."""
PAIR = 2
"""Prompts that a step, and a measurement of held-out accuracy, have at least."""
UNTRAINED = 64
"""Tokens up to which a policy may write that knows nothing yet, and so hardly ever ends by itself."""


def adjust(
    config: TrainConfig, task: Task, policy: Policy, free: Collection[str]
) -> tuple[TrainConfig, list[Problem], int, str]:
    """Let the settings that are `free` give way to the problems there are, and to the model's context.

    Returns:
        The config, the held-out problems, the tokens of the longest prompt, and a line about what has given way.
    """
    before, now, why = flatten(config), flatten(config), dict[str, str]()
    data = task if isinstance(task, DataTask) else None
    if data:
        if "prompts_per_step" in free and len(data.given) < FEWEST:
            raise InputError(
                f"{data.name} has too few rows ({len(data.given)}); give at least {FEWEST}, or set prompts_per_step "
                "yourself." + "".join(f" {note}" for note in data.notes)
            )
        if "warm_start_steps" in free and not now["sft_data"]:
            now["warm_start_steps"], why["warm_start_steps"] = 0, "data has no demonstrations"
        if "heldout_fraction" in free:
            data.hold_out(*(PAIR if name in free else now[name] for name in ("eval_prompts", "prompts_per_step")))
            now["heldout_fraction"] = data.fraction
            why["heldout_fraction"] = f"{len(data.given) - data.rows} of {len(data.given)} rows held out"
        if "prompts_per_step" in free:
            now["prompts_per_step"] = max(PAIR, min(now["prompts_per_step"], data.rows))
            why["prompts_per_step"] = "no more to train on"
    heldout = task.heldout(now["eval_prompts"], PAIR if "eval_prompts" in free else None)
    now["eval_prompts"], why["eval_prompts"] = len(heldout), "no more are held out"
    first = task.train_batch(1, now["prompts_per_step"])
    prompts = [problem.prompt for problem in (data.problems if data else [*heldout, *first])]
    room, why["max_completion_length"] = now["max_completion_length"], "the model's context"
    if "max_completion_length" in free:
        if not (config.policy.model or now["sft_data"] or now["warm_start_steps"]):
            room, why["max_completion_length"] = min(room, UNTRAINED), "a policy that is built begins with random text"
        longest, of_model = policy.room(prompts, room, spare := 1 if data else 2)  # those yet to come may be longer
        if (room := config.rollout.fit(longest, of_model, ROOM, spare)) < of_model:
            why["max_completion_length"] = "vllm_args.max_model_len"
    else:
        config.rollout.fit(longest := max(policy.lengths(prompts, room)), room, least=room)
    check_lengths(policy, lambda: longest + room)
    needed = (longest + room) * now["num_generations"]
    now["max_completion_length"], why["tokens_per_micro_batch"] = room, "one prompt with its completions"
    if 0 < now["tokens_per_micro_batch"] < needed:
        if "tokens_per_micro_batch" not in free:
            raise InputError(
                f"tokens_per_micro_batch is {now['tokens_per_micro_batch']}, but the longest prompt with "
                f"{now['num_generations']} completions may take {needed} tokens, and a group stays whole: set it to "
                f"at least {needed}, or lower num_generations or max_completion_length."
            )
        now["tokens_per_micro_batch"] = needed
    bent = {name: reason for name, reason in why.items() if now[name] != before[name]}
    sentences = {name: f"{name} {now[name]} instead of {before[name]} ({reason})" for name, reason in bent.items()}
    words = "; ".join((sentences | {name: why[name] for name in bent if name == "heldout_fraction"}).values())
    # What not setting chat does stands in the head of the run.
    config = with_settings(config, {name: now[name] for name in bent} | {"chat": bool(now["chat"])}, "", ())
    return config, heldout, longest, f"adjusted   {words}\n" if words else ""
