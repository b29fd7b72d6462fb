"""`oblrpo train`: settings from recipe, run and flags; then the trainer."""

import gc
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from oblrpo.cli.flags import COMMON, misplaced, parse, print_settings
from oblrpo.commands import check_files, check_settings, run_training, summary_of
from oblrpo.errors import InputError
from oblrpo.model_files import check_is_there
from oblrpo.runs import RunFolder
from oblrpo.settings import TrainConfig, flags_in, flatten, load_recipe, yaml_text


@dataclass(frozen=True)
class TrainCommand:
    """Post-train a language model with reinforcement learning on verifiable rewards.

    Examples: `oblrpo train demo --output runs/demo`; `oblrpo train demo --algorithm grpo --seed 1 --output runs/grpo`;
    `oblrpo train my.yaml --dry-run`; `oblrpo train --resume --output runs/demo --steps 200`.
    """

    config: TrainConfig
    resume: bool = False
    """Resume the run in `--output` from its latest checkpoint, with the settings it was started with."""
    accept_changed: bool = False
    """With --resume: resume although data or rewards have changed since the run started."""
    dry_run: bool = False
    """Print what the run would be, the memory of a step and the resolved settings; write nothing."""


def run(argv: list[str]) -> None:
    """Run `oblrpo train`."""
    if {"-h", "--help"} & set(argv):
        print_settings(TrainCommand(TrainConfig()), "oblrpo train", COMMON)
        return
    command, recipe = _parse(argv, TrainConfig()), TrainConfig()
    # What the flags override comes from the recipe, or from the run to be resumed; then the flags are read again.
    if command.config.recipe:
        if hint := misplaced(command.config.recipe):
            raise InputError(f"{command.config.recipe!r} is not a recipe or a YAML file of settings.{hint}")
        recipe = load_recipe(command.config.recipe, recipe)
        command = _parse(argv, recipe)
    if command.resume:
        command = _parse(argv, RunFolder(Path(command.config.run.output)).saved_config())
    elif command.accept_changed:
        raise InputError("--accept-changed has no effect without --resume; remove it.")
    config = command.config
    check_files(config.task.data, config.task.eval_data, config.warm_start.sft_data)
    check_settings(config, flags_in(argv), recipe)
    if not command.resume:
        check_is_there(config.policy.model)
        if not command.dry_run:
            RunFolder(Path(config.run.output)).check_new()
    gc.disable()  # almost nothing of what loads is garbage, and looking for it took a fifth of the time
    try:  # torch and transformers load only now: --help is instant, and so is what is refused
        import torch
        from transformers.utils import logging as transformers_logging

        from oblrpo.memory import resident_bytes
        from oblrpo.report.console import Progress
        from oblrpo.report.html import seen
        from oblrpo.trainer.loop import Trainer
        from oblrpo.trainer.peak_memory import peak_memory, remedy
    finally:
        gc.freeze()  # nor will it be: to look again, at the end too, takes most of a second
        gc.enable()

    transformers_logging.disable_progress_bar()
    libraries = resident_bytes()
    trainer = Trainer(config, command.resume, accept_changed=command.accept_changed)
    if command.dry_run:
        print(seen(trainer.describe()), flush=True)
        torch.set_num_threads(1)  # a few rows of no product: others would wait
        case = (trainer.policy, trainer.config, trainer.longest_prompt)
        peak = replace(trainer.peak, libraries=libraries) if trainer.peak else peak_memory(*case, libraries)
        print(f"memory     {peak}{remedy(*case, peak)}\n", flush=True)
        print(seen(yaml_text(flatten(trainer.config))), end="", flush=True)
        trainer.try_policy(write=False)
        return
    console = Console(soft_wrap=True, markup=False, emoji=False)
    run_training(trainer, Progress(console))
    print(summary_of(trainer, console.width))


def _parse(argv: list[str], base: TrainConfig) -> TrainCommand:
    command = parse(TrainCommand(base), argv, "oblrpo train", "--help-all")
    given = tuple(sorted({*base.given, *(flags_in(argv).keys() & flatten(base))}))
    return replace(command, config=replace(command.config, given=given))
