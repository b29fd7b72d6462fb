"""`python -m lab.probe`: local smoothness of a run or a model."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

from rich.console import Console

from oblrpo.cli import run_command
from oblrpo.cli.flags import parse
from oblrpo.errors import InputError
from oblrpo.settings import PolicyConfig, Positional, RolloutConfig, TaskConfig, TrainConfig, flags_in


@dataclass(frozen=True)
class ProbeModelConfig:
    """What a model is probed on. A run knows its own task and sampling and refuses these settings."""

    task: TaskConfig = field(default_factory=TaskConfig)
    max_completion_length: int = 512
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """Sampling temperature."""
    prompts_per_micro_batch: int = 0
    """Prompts whose completions are scored at a time; 0: all."""
    trust_remote_code: bool = False
    """Let transformers run Python code that comes with the model."""


@dataclass(frozen=True)
class ProbeCommand:
    """Measure the local smoothness of the objective around a run's checkpoints, or around any model.

    For each checkpoint: the largest curvature c of J (Hessian-vector products) from below and from above, the learning
    rate 1 / c that it implies, and, along the update that the run makes next, curvature, secant, and predicted against
    realised improvement.
    Examples: `python -m lab.probe runs/demo`;
    `python -m lab.probe path/to/model --task path --max-completion-length 12`.
    """

    target: Annotated[str, Positional("RUN|MODEL", "the folder of a run, or a model")] = ""
    """Folder of a run, or a model: folder or hub name."""
    prompts: int = 128
    """Prompts of each of two independent batches."""
    outputs: int = 8
    """Completions of each prompt."""
    iterations: int = 12
    """Hessian-vector products to find the direction of largest curvature."""
    probe_seed: int = 0
    """Seed of the samples and of the first direction."""
    device: str | None = None
    """`cpu`, `cuda`, `cuda:1`, or `auto` for the first GPU if there is one. None: the run's own; for a model `auto`."""
    of_model: ProbeModelConfig = field(default_factory=ProbeModelConfig)


def run(argv: list[str]) -> None:
    """Run `python -m lab.probe`.

    Raises:
        InputError: settings of a model are given for a run, there is no such folder, or as `probe_run` and
            `probe_model` raise.
    """
    command = parse(ProbeCommand(), argv, "python -m lab.probe")
    from transformers.utils import logging as transformers_logging

    from lab.probe import Effort, print_place, probe_model, probe_run

    transformers_logging.disable_progress_bar()
    progress = Console(stderr=True, markup=False, highlight=False)
    effort = Effort(command.prompts, command.outputs, command.iterations, command.probe_seed)
    target, of_model = Path(command.target), command.of_model
    if (target / "config.yaml").is_file():
        if given := model_settings_in(argv):
            raise InputError(
                f"{target} is a run, which knows its task, model and sampling; leave out {', '.join(given)}."
            )
        places = probe_run(target, effort, command.device, progress.print)
    else:
        check_is_a_model(command.target)
        config = TrainConfig(
            task=of_model.task,
            policy=PolicyConfig(
                model=command.target, device=command.device or "auto", trust_remote_code=of_model.trust_remote_code
            ),
            rollout=RolloutConfig(
                num_generations=command.outputs,
                max_completion_length=of_model.max_completion_length,
                temperature=of_model.temperature,
                prompts_per_micro_batch=of_model.prompts_per_micro_batch,
            ),
        )
        places = iter([probe_model(config, effort, progress.print)])
    for place in places:
        print_place(place)


def model_settings_in(argv: list[str]) -> list[str]:
    """Return the flags that set what a run knows itself, whatever their values."""
    names = {each.name for part in (ProbeModelConfig, TaskConfig) for each in fields(part)}
    return [flag for name, flag in flags_in(argv).items() if name in names]


def check_is_a_model(target: str) -> None:
    """Refuse at once what is neither a folder nor can be a name on the hub.

    Raises:
        InputError: it is neither.
    """
    path = Path(target)
    if target and path.is_dir():
        return
    owner = target.split("/")[0]
    looks_local = owner in {"", ".", "..", "~", "runs"} or Path(owner).is_dir()
    if looks_local or not re.fullmatch(r"[\w.-]+/[\w.-]+", target) or path.exists():
        raise InputError(
            f"{target!r} is no folder of a run or a model, nor a model on the hub (owner/name); check its name."
        )


if __name__ == "__main__":
    run_command(run)
